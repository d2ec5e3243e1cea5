"""Words a report for the terminal: a screen of plain text.

It reads the content of report.json alone; whatever does not fit is in the files.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

_WIDTH = 100
_MOST_CORPORA = 8
_MOST_ADVICE = 8
_BARS = " ▁▂▃▄▅▆▇█"
_SPLITS = ("train", "valid", "test")
_SIDES = (("src", "src_lang"), ("tgt", "tgt_lang"))
_COLUMNS = ("tokens a pair", 15), ("tokens a word", 15), ("unknown", 13), ("bytes", 13)
_HEAD = (
    f"{'':12}{'read':>13} {'kept':>13} " + " ".join(f"{name:>{w}}" for name, w in _COLUMNS),
    f"{'':39}"
    + " ".join(f"{'source':>{w - w // 2 - 1}} {'target':>{w // 2}}" for _, w in _COLUMNS),
)


def report_table(report: dict[str, Any]) -> str:
    """Return the report in lines of at most 100 characters."""
    subjects: dict[str, Iterator[str]] = {
        "dropped": _reasons(report, "dropped"),
        "mended": _reasons(report, "replaced"),
        "duplicates": _duplicates(report),
        "overlap": _overlap(report),
        "lengths": _lengths(report),
        "characters": _characters(report),
        "training": _training(report),
        "memory": _memory(report),
    }
    lines = [*_HEAD, *_rows(report), ""]
    for name, details in subjects.items():
        for i, text in enumerate(details):
            lines += _wrapped(name if i == 0 else "", text)
    return "\n".join([*lines, *_advice(report)])


def _wrapped(name: str, text: str) -> list[str]:
    lines = textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=f"{name:<12}",
        subsequent_indent=" " * 14,
        drop_whitespace=False,  # bars of nothing at the left are spaces
        break_on_hyphens=False,
    )
    return [line.rstrip() for line in lines]


def _rows(report: dict[str, Any]) -> Iterator[str]:
    for split in _SPLITS:
        if split in report:
            yield _row(split, report[split])
        corpora = report.get(split, {}).get("corpora", {})
        for name in list(corpora)[:_MOST_CORPORA]:
            yield _row("  " + name, corpora[name])
        if len(corpora) > _MOST_CORPORA:
            yield f"  and {len(corpora) - _MOST_CORPORA} more, in report.json"


def _row(name: str, part: dict[str, Any]) -> str:
    src, tgt = part["src"], part["tgt"]
    return (
        f"{name[:11]:<12}{part['read']:>13,} {part['kept']:>13,}"
        f" {src['tokens_per_pair']:>7.1f} {tgt['tokens_per_pair']:>7.1f}"
        f" {src['tokens_per_word']:>7.2f} {tgt['tokens_per_word']:>7.2f}"
        f" {src['unknown_share']:>6.2%} {tgt['unknown_share']:>6.2%}"
        f" {src['byte_share']:>6.2%} {tgt['byte_share']:>6.2%}"
    )


def _reasons(report: dict[str, Any], what: str) -> Iterator[str]:
    """Yield the reasons of a split in a line each, with the first place."""
    for split in _SPLITS:
        part = report.get(split, {})
        for reason, number in _by_number(part.get(what, {})):
            places = part["examples"].get(reason, [])
            first = f", first at {places[0]['file']}:{places[0]['line']}" if places else ""
            share = f" ({number / part['read']:.1%})" if what == "dropped" else ""
            where = "" if split == "train" else f" in {split}"
            yield f"{reason} {number:,}{share}{where}{first}"


def _by_number(numbers: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(numbers.items(), key=lambda item: (-item[1], item[0]))


def _duplicates(report: dict[str, Any]) -> Iterator[str]:
    if report["duplicates"] is not None:
        size = report["train"]["read"]
        numbers = report["duplicates"].items()
        yield ", ".join(f"{kind} {number:,} ({number / size:.1%})" for kind, number in numbers)


def _overlap(report: dict[str, Any]) -> Iterator[str]:
    for split, found in report["overlap"].items():
        counts = [
            " ".join(f"{kind['held_out_rows']:,}" for kind in found[strictness].values())
            for strictness in ("exact", "normalised")
        ]
        yield (
            f"{split}, pairs sources targets of {found['num_rows']:,} that are in train: "
            f"{counts[0]} exact, {counts[1]} normalised"
        )


def _lengths(report: dict[str, Any]) -> Iterator[str]:
    for side, language in _SIDES:
        lengths = report["train"][side]["lengths"]
        end = lengths["bar_width"] * len(lengths["bars"])
        yield (
            f"{report[language]:<4}{_sparkline(lengths['bars'])}  0 to {end - 1:,} tokens; "
            f"median {lengths['median']:,}, 99 % up to {lengths['p99']:,}"
        )


def _sparkline(bars: list[int]) -> str:
    """Draw bars by one character each; whatever is there shows."""
    most = max(bars)
    return "".join(_BARS[-(-8 * bar // most)] for bar in bars)


def _characters(report: dict[str, Any]) -> Iterator[str]:
    for side, language in _SIDES:
        part = report["train"][side]
        scripts = list(part["scripts"].items())[:3]
        text = ", ".join(f"{name} {share:.1%}" for name, share in scripts)
        odd = ", ".join(f"{o['code']} {o['name'].lower()} {o['count']:,}" for o in part["odd"][:2])
        yield (
            f"{report[language]:<4}{part['covered_share']:.3%} have a piece; {text}"
            + (f"; {part['odd_characters']:,} odd: {odd}" if odd else "")
        )


def _training(report: dict[str, Any]) -> Iterator[str]:
    epoch, settings = report["training"]["epoch"], report["training"]["settings"]
    if epoch is not None:
        num_epochs = settings["max_updates"] / epoch["num_updates"]
        yield (
            f"{epoch['num_updates']:,} updates an epoch of {settings['tokens_per_update']:,} "
            f"target tokens; {epoch['padding_share']:.1%} padding; "
            f"{settings['max_updates']:,} updates are {num_epochs:,.1f} epochs"
        )


def _memory(report: dict[str, Any]) -> Iterator[str]:
    memory = report["training"]["memory"]
    if memory is not None:
        full, half = memory["float32"], memory["bfloat16"]
        yield (
            f"about {full['total'] / 1e9:.1f} GB of a GPU in float32, {half['total'] / 1e9:.1f} in "
            f"bfloat16; {full['cpu_process'] / 1e9:.1f} GB on a CPU; "
            f"{full['num_parameters'] / 1e6:.1f} M parameters"
        )


def _advice(report: dict[str, Any]) -> Iterator[str]:
    advice = report["advice"]
    if advice:
        yield ""
    for text in advice[:_MOST_ADVICE]:
        yield from textwrap.wrap(text, _WIDTH, initial_indent="! ", subsequent_indent="  ")
    if len(advice) > _MOST_ADVICE:
        yield f"! and {len(advice) - _MOST_ADVICE} more, in report.json"
