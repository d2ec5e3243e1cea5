"""Shows the content of report.json: as a table on the terminal, and as report.html, one file that
needs nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from tabulate import tabulate

_MOST_CORPORA = 8
_MOST_ADVICE = 8
_BARS = " ▁▂▃▄▅▆▇█"
_SPLITS = ("train", "valid", "test")
_SIDES = (("src", "src_lang"), ("tgt", "tgt_lang"))
_PER_SIDE = ("tokens a pair", "tokens a word", "unknown", "bytes")
_HEADERS = ["", "read", "kept", *(f"{name}\nsrc/tgt" for name in _PER_SIDE)]


def report_table(report: dict[str, Any]) -> str:
    """Return the report in lines of at most 100 characters."""
    rows = [row for split in _SPLITS if split in report for row in _rows(split, report[split])]
    details = [
        *(("dropped", text) for text in _reasons(report, "dropped")),
        *(("replaced", text) for text in _reasons(report, "replaced")),
        *(("duplicates", text) for text in _duplicates(report)),
        *(("overlap", text) for text in _overlap(report)),
        *(("lengths", _lengths(report, *side)) for side in _SIDES),
        *(("characters", _characters(report, *side)) for side in _SIDES),
    ]
    advice = [("!", text) for text in report["advice"][:_MOST_ADVICE]]
    if len(report["advice"]) > _MOST_ADVICE:
        advice.append(("!", f"and {len(report['advice']) - _MOST_ADVICE} more, in report.json"))
    table = tabulate(
        rows,
        headers=_HEADERS,
        tablefmt="plain",
        colalign=["left", *["right"] * 6],
        disable_numparse=True,
    )
    blocks = [table, *(_paragraphs(some) for some in (details, advice) if some)]
    return "\n\n".join(blocks)


def _paragraphs(rows: list[tuple[str, str]]) -> str:
    """Put a name before each text, which is wrapped; a name that comes again is left out."""
    shown = [
        ("" if i and name == rows[i - 1][0] != "!" else name, text)
        for i, (name, text) in enumerate(rows)
    ]
    widths = [None, 98 - max(len(name) for name, _ in shown)]
    text: str = tabulate(shown, tablefmt="plain", maxcolwidths=widths, disable_numparse=True)
    return text


def _rows(split: str, part: dict[str, Any]) -> Iterator[list[str]]:
    yield _row(split, part)
    corpora = list(part["corpora"].items())
    for name, corpus in corpora[:_MOST_CORPORA]:
        yield _row(f"› {name}"[:12], corpus)
    if len(corpora) > _MOST_CORPORA:
        yield [f"› {len(corpora) - _MOST_CORPORA} more"]


def _row(name: str, part: dict[str, Any]) -> list[str]:
    formats = {
        "tokens_per_pair": ".1f",
        "tokens_per_word": ".2f",
        "unknown_share": ".2%",
        "byte_share": ".2%",
    }
    pairs = [f"{part['src'][key]:{f}}/{part['tgt'][key]:{f}}" for key, f in formats.items()]
    return [name, f"{part['read']:,}", f"{part['kept']:,}", *pairs]


def _reasons(report: dict[str, Any], what: str) -> Iterator[str]:
    """Yield the reasons of a split in a line each, with the first place."""
    for split in (name for name in _SPLITS if name in report):
        part = report[split]
        for reason, number in sorted(part[what].items(), key=lambda item: (-item[1], item[0])):
            places = part["examples"].get(reason, [])
            first = f", first at {places[0]['file']}:{places[0]['line']}" if places else ""
            share = f" ({number / part['read']:.1%})" if what == "dropped" else ""
            where = "" if split == "train" else f" in {split}"
            yield f"{reason} {number:,}{share}{where}{first}"


def _duplicates(report: dict[str, Any]) -> Iterator[str]:
    if report["duplicates"] is not None:
        size, numbers = report["train"]["read"], report["duplicates"].items()
        yield ", ".join(f"{kind} {number:,} ({number / size:.1%})" for kind, number in numbers)


def _overlap(report: dict[str, Any]) -> Iterator[str]:
    for split, found in report["overlap"].items():
        exact, normalized = (
            " ".join(f"{kind['held_out_rows']:,}" for kind in found[strictness].values())
            for strictness in ("exact", "normalised")
        )
        yield (
            f"{split}, pairs sources targets of {found['num_rows']:,} that are in train: "
            f"{exact} exact, {normalized} normalised"
        )


def _lengths(report: dict[str, Any], side: str, language: str) -> str:
    lengths = report["train"][side]["lengths"]
    most = max(lengths["bars"])
    bars = "".join(_BARS[-(-8 * bar // most)] for bar in lengths["bars"])  # any pair shows
    end = lengths["bar_width"] * len(lengths["bars"])
    return (
        f"{report[language]:<4}{bars}  0 to {end - 1:,} tokens; median {lengths['median']:,}, "
        f"99 % up to {lengths['p99']:,}"
    )


def _characters(report: dict[str, Any], side: str, language: str) -> str:
    part = report["train"][side]
    scripts = ", ".join(f"{name} {share:.1%}" for name, share in list(part["scripts"].items())[:3])
    odd = ", ".join(f"{o['code']} {o['name'].lower()} {o['count']:,}" for o in part["odd"][:2])
    return f"{report[language]:<4}{part['covered_share']:.3%} have a piece; {scripts}" + (
        f"; {part['odd_characters']:,} odd: {odd}" if odd else ""
    )


def report_page(report: dict[str, Any]) -> str:
    """Return report.html. Text of the user is set as text, whatever is in it."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals.update(percent=_percent, ticks=_ticks)
    splits = {name: report[name] for name in _SPLITS if name in report}
    template = environment.get_template("report.html.j2")
    return template.render(report=report, splits=splits, sides=_SIDES)


def _shown(value: object) -> object:
    """Format what the template puts out: numbers, and text where characters that hide, or turn the
    text around, show as codes.
    """
    if isinstance(value, int | float):
        return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"
    if type(value) is str:  # not HTML that a macro has made
        return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in value)
    return value


def _percent(part: float, whole: float = 1.0, digits: int = 2) -> str:
    """Format a share; nothing of nothing is 0 %."""
    return f"{part / whole if whole else 0:.{digits}%}"


def _ticks(end: int, most: int) -> range:
    """Return about `most` round numbers from 0 to `end`, as the marks of an axis."""
    steps = (digit * 10**power for power in range(19) for digit in (1, 2, 5))
    return range(0, end + 1, next(step for step in steps if step * most >= end))
