"""Draws bars as inline SVG, whose colours the style of the page around gives."""

from __future__ import annotations

from collections.abc import Sequence

from nmt.preprocess.markup import safe

_WIDTH, _HEIGHT = 520, 190  # of the picture, in its own units
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 8, 8, 36  # around the bars
_STEPS = (1, 2, 5)


def histogram(bars: Sequence[int], *, bar_width: int, unit: str, title: str) -> str:
    """Draw how many pairs have each length.

    Args:
        bars: their numbers.
        bar_width: how many lengths each bar spans, the first from 0.
        unit: what lengths are counted in, for the axis.
        title: what is shown, for readers who cannot see it.
    """
    most = max(bars)
    marks = [_mark(i, count, most, len(bars), bar_width) for i, count in enumerate(bars)]
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{safe(title)}">'
        f"{_grid(most)}{''.join(marks)}{_axis(len(bars), bar_width, unit)}</svg>"
    )


def _mark(i: int, count: int, most: int, num_bars: int, bar_width: int) -> str:
    if count == 0:
        return ""
    step = (_WIDTH - _LEFT - _RIGHT) / num_bars
    height = max((_HEIGHT - _TOP - _BOTTOM) * count / most, 1)  # whatever is there shows
    first, last = i * bar_width, (i + 1) * bar_width - 1
    lengths = f"{first}" if first == last else f"{first} to {last}"
    return (
        f'<rect class="bar" x="{_LEFT + i * step:.1f}" y="{_HEIGHT - _BOTTOM - height:.1f}" '
        f'width="{max(step - 1, 0.5):.1f}" height="{height:.1f}">'
        f"<title>{lengths} tokens: {count:,} pairs</title></rect>"
    )


def _grid(most: int) -> str:
    lines = []
    step = _nice_step(most / 4)
    for value in range(0, most + 1, step):
        y = _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / most
        lines.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        lines.append(f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">')
        lines.append(f"{_short(value)}</text>")
    return "".join(lines)


def _axis(num_bars: int, bar_width: int, unit: str) -> str:
    scale = (_WIDTH - _LEFT - _RIGHT) / (num_bars * bar_width)
    labels = []
    for value in range(0, num_bars * bar_width, _nice_step(num_bars * bar_width / 8)):
        x = _LEFT + (value + bar_width / 2) * scale
        labels.append(f'<text class="tick" x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 15}"')
        labels.append(f' text-anchor="middle">{_short(value)}</text>')
    middle = (_LEFT + _WIDTH) / 2
    name = f'<text class="tick" x="{middle}" y="{_HEIGHT - 5}" text-anchor="middle">{unit}</text>'
    return "".join(labels) + name


def _nice_step(least: float) -> int:
    """Return the smallest of 1, 2, 5, 10, 20 ... that is at least `least`."""
    power = 1
    while True:
        for step in _STEPS:
            if step * power >= least:
                return step * power
        power *= 10


def _short(value: int) -> str:
    """Write a number in few characters."""
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return str(value)
