"""Makes report.html: one file that needs nothing else, for a browser or for print.

It reads the content of report.json alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nmt.preprocess.charts import histogram
from nmt.preprocess.markup import Cell, Figure, percent, safe, section, table
from nmt.preprocess.style import STYLE

_SPLITS = ("train", "valid", "test")
_SIDES = (("src", "src_lang"), ("tgt", "tgt_lang"))
_KINDS = ("pairs", "sources", "targets")
_MOST_SCRIPTS = 5


def report_page(report: dict[str, Any]) -> str:
    """Return the page."""
    languages = safe(f"{report['src_lang']} to {report['tgt_lang']}")
    sections = [
        _advice(report["advice"]),
        _corpora(report),
        _reasons(report, "dropped", "Dropped pairs"),
        _reasons(report, "replaced", "Mended inside pairs"),
        _lengths(report),
        _repeated(report),
        _characters(report),
        _training(report["training"]),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Corpus report: {languages}</title>\n<style>{STYLE}</style>\n</head>\n"
        f'<body>\n<main>\n<h1>Corpus report</h1>\n<p class="soft">{languages}</p>\n'
        f"{_tiles(report)}\n"
        + "\n".join(part for part in sections if part)
        + "\n</main>\n</body>\n</html>\n"
    )


def _tiles(report: dict[str, Any]) -> str:
    train, duplicates = report["train"], report["duplicates"]
    tiles = {
        "training pairs kept": f"{train['kept']:,}",
        "dropped": percent(train["read"] - train["kept"], train["read"]),
    }
    if duplicates is not None:
        tiles["pairs that came before"] = percent(duplicates["pairs"], train["read"])
    for split, found in report["overlap"].items():
        tiles[f"{split} pairs in train"] = f"{found['normalised']['pairs']['held_out_rows']:,}"
    covered = min(train[side]["covered_share"] for side, _ in _SIDES)
    tiles["characters with a piece"] = percent(covered, digits=3)
    boxes = (f'<div class="tile"><b>{v}</b><span>{safe(k)}</span></div>' for k, v in tiles.items())
    return f'<div class="tiles">{"".join(boxes)}</div>'


def _advice(advice: Sequence[str]) -> str:
    if not advice:
        return '<section><p class="good">Nothing looks wrong.</p></section>'
    items = "".join(f"<li>{safe(line)}</li>" for line in advice)
    return section("What to look at", f"<ul>{items}</ul>", css="advice")


def _corpora(report: dict[str, Any]) -> str:
    parts = {}
    for split in _SPLITS:
        if split in report:
            parts[split] = report[split]
            parts |= {f"› {name}": part for name, part in report[split]["corpora"].items()}
    head = ["", "pairs read", "kept", "dropped"]
    if any("times" in part for part in parts.values()):
        head.append("times an epoch")
    counts = section("Pairs", table(head, [_corpus(*item)[: len(head)] for item in parts.items()]))
    head = ["", "side", "tokens", "a pair", "a word", "longest", "unknown", "single bytes"]
    rows = [
        [name if side == "src" else "", report[language], *_tokens(part[side])]
        for name, part in parts.items()
        for side, language in _SIDES
    ]
    return counts + section("Tokens", table(head, rows))


def _corpus(name: str, part: dict[str, Any]) -> list[Cell]:
    dropped = percent(part["read"] - part["kept"], part["read"])
    return [name, part["read"], part["kept"], dropped, part.get("times")]


def _tokens(side: dict[str, Any]) -> list[Cell]:
    cells = [side[key] for key in ("tokens", "tokens_per_pair", "tokens_per_word", "longest")]
    return [*cells, percent(side["unknown_share"]), percent(side["byte_share"])]


def _reasons(report: dict[str, Any], what: str, title: str) -> str:
    rows: list[list[Cell]] = []
    for split in _SPLITS:
        part = report.get(split, {})
        for reason, number in sorted(part.get(what, {}).items(), key=lambda item: -item[1]):
            places = ", ".join(map(_place, part["examples"].get(reason, [])))
            share = percent(number, part["read"]) if what == "dropped" else None
            rows.append([split, reason, number, share, places])
    head = ["", "what", "number", "of the pairs" if what == "dropped" else "", "first at"]
    return section(title, table(head, rows)) if rows else ""


def _place(place: dict[str, Any]) -> str:
    return ":".join(str(place[key]) for key in ("file", "line", "byte") if key in place)


def _lengths(report: dict[str, Any]) -> str:
    charts = []
    for side, language in _SIDES:
        lengths = report["train"][side]["lengths"]
        picture = histogram(
            lengths["bars"],
            bar_width=lengths["bar_width"],
            unit="tokens, with the end of the sentence",
            title=f"Training pairs by length of the {report[language]} side",
        )
        quantiles = (
            f"median {lengths['median']:,}, 90 % up to {lengths['p90']:,}, "
            f"99 % up to {lengths['p99']:,}, longest {report['train'][side]['longest']:,}"
        )
        charts.append(
            f'<div><h3>{safe(report[language])}</h3>{picture}<p class="soft">{quantiles}</p></div>'
        )
    train = report["train"]
    ratio = (
        f"<p>{train['length_ratio']:.2f} target tokens for each source token; "
        f"{percent(train['steep_pairs'], train['kept'])} of the pairs have a side more than three "
        "times as long as the other.</p>"
    )
    return section("Lengths in train", f'<div class="pair">{"".join(charts)}</div>{ratio}')


def _repeated(report: dict[str, Any]) -> str:
    content = ""
    if report["duplicates"] is not None:
        read = report["train"]["read"]
        numbers = report["duplicates"].items()
        rows: list[list[Cell]] = [[kind, number, percent(number, read)] for kind, number in numbers]
        content += "<h3>In train, that came before</h3>" + table(["", "number", "share"], rows)
    for split, found in report["overlap"].items():
        content += f"<h3>{safe(split)}: {found['num_rows']:,} pairs, of which train has</h3>"
        content += _overlap(found)
    note = "Normalised: case, punctuation and spaces are ignored."
    return section("Duplicates and overlap", f'{content}<p class="soft">{note}</p>')


def _overlap(found: dict[str, Any]) -> str:
    rows: list[list[Cell]] = []
    for strictness in ("exact", "normalised"):
        for kind in _KINDS:
            number = found[strictness][kind]["held_out_rows"]
            places = ", ".join(
                f"{place['file']}:{place['line']} = {place['held_out_line']}"
                for place in found["examples"].get(f"{strictness} {kind}", [])
            )
            share = percent(number, found["num_rows"])
            times = found[strictness][kind]["train_pairs"]
            rows.append([f"{kind}, {strictness}", number, share, times, places])
    head = ["", "number", "share", "training pairs", "first in train = line here"]
    return table(head, rows)


def _characters(report: dict[str, Any]) -> str:
    halves = []
    for side, language in _SIDES:
        part = report["train"][side]
        scripts = list(part["scripts"].items())
        letters = ", ".join(f"{safe(name)} {share:.2%}" for name, share in scripts[:_MOST_SCRIPTS])
        halves.append(
            f"<div><h3>{safe(report[language])}</h3><p>{part['characters']:,} characters, "
            f"{part['distinct_characters']:,} different ones; letters: {letters or 'none'}</p>"
            f"<h3>Odd ones: {part['odd_characters']:,}</h3>{_codes(part['odd'])}"
            f"<h3>Without a piece: {percent(1 - part['covered_share'], digits=4)}</h3>"
            f"{_codes(part['uncovered'])}</div>"
        )
    return section("Characters in train", f'<div class="pair">{"".join(halves)}</div>')


def _codes(codes: Sequence[dict[str, Any]]) -> str:
    if not codes:
        return '<p class="soft">none</p>'
    head = {"code": "code", "name": "name", "count": "number", "why": "why"}
    keys = [key for key in head if key in codes[0]]
    return table([head[key] for key in keys], [[code[key] for key in keys] for code in codes])


def _training(training: dict[str, Any]) -> str:
    settings, epoch, memory = training["settings"], training["epoch"], training["memory"]
    if epoch is None:
        return ""
    facts: list[list[Cell]] = [
        ["updates an epoch", epoch["num_updates"]],
        ["batches an epoch", epoch["num_batches"]],
        ["padding", percent(epoch["padding_share"])],
        ["pairs an epoch", epoch["num_pairs"]],
        ["source tokens an epoch", epoch["num_src_tokens"]],
        ["target tokens an epoch", epoch["num_tgt_tokens"]],
        ["epochs in max_updates", settings["max_updates"] / epoch["num_updates"]],
        ["largest batch", Figure("{:,} × ({:,} + {:,})".format(*epoch["largest"]))],
    ]
    given = [[key, Figure(value)] for key, value in settings.items()]
    sizes = [
        [name, *(Figure(f"{part[key] / 1e9:.2f}") for key in _SIZES), part["num_parameters"]]
        for name, part in memory.items()
    ]
    head = ["GB on each device", *_SIZES.values(), "parameters"]
    note = (
        "Estimated from the sizes of the model and of the largest batch; nmt-train dry_run=true "
        "measures. On a GPU it is the tensors that count, on a CPU the whole process."
    )
    return section(
        "Training, foreseen",
        f'<div class="pair"><div><h3>An epoch</h3>{table(["", ""], facts)}</div>'
        f"<div><h3>With these settings</h3>{table(['', ''], given)}</div></div>"
        f'<h3>Memory at the peak</h3>{table(head, sizes)}<p class="soft">{note}</p>',
    )


_SIZES = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "total": "all, on a GPU",
    "cpu_process": "all, on a CPU",
}
