"""The content of report.json, with advice on what looks wrong; the table on the terminal and
report.html show it. docs/formats.md describes the keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from tabulate import tabulate

from nmt.config import PreprocessConfig
from nmt.data.languages import describe_languages
from nmt.data.mixing import pairs_an_epoch
from nmt.data.tokenizer import Tokenizers
from nmt.preprocess.characters import Ints, describe_characters
from nmt.preprocess.duplicates import KINDS
from nmt.preprocess.filters import HELD_OUT
from nmt.preprocess.statistics import NUM_BINS, STRICTNESS, Overlap, Statistics, bin_starts
from nmt.runtime.pages import page_templates

FORMAT_VERSION = 1
_MOST_BARS = 50  # of a histogram
_QUANTILES = {"median": 0.5, "p90": 0.9, "p99": 0.99}
_STEEP = 3.0  # a pair is steep when one side has more than this many times the other's tokens

_UNSPACED = {"Han", "Hiragana", "Katakana", "Thai", "Lao", "Khmer", "Myanmar"}

_MOST_SHOWN = 8  # corpora, and pieces of advice, on the terminal
_BARS = " ▁▂▃▄▅▆▇█"
_SPLITS = ("train", "valid", "test")
_SIDES = (("src", "source"), ("tgt", "target"))
_LANGUAGES = (("src", "src_lang"), ("tgt", "tgt_lang"))
_PER_SIDE = {  # columns of the table, and their format
    "tokens a pair": ("tokens_per_pair", ".1f"),
    "tokens a word": ("tokens_per_word", ".2f"),
    "unknown": ("unknown_share", ".2%"),
    "bytes": ("byte_share", ".2%"),
}
Report = dict[str, Any]
Corpora = Mapping[str, Statistics]  # of a split, by name; "" for the only one


def build_report(
    splits: Mapping[str, Corpora],
    *,
    config: PreprocessConfig,
    tokenizers: Tokenizers,
    duplicates: Mapping[str, int] | None,
) -> Report:
    """Sum up the corpora of each split; `train` is one of them.

    `duplicates` is how many training pairs, sources and targets came before (keys as `KINDS`), None
    where nobody counted.
    """
    report: Report = {
        "format_version": FORMAT_VERSION,
        **{key: describe_languages(config.data)[key] for key in ("src_lang", "tgt_lang")},
        "max_length": config.max_length,
        "duplicates": None if duplicates is None else dict(duplicates),
        "overlap": {},
    }
    for split, corpora in splits.items():
        total = Statistics()
        for statistics in corpora.values():
            total.merge(statistics)
        report[split] = _summary(total)
        for i, (side, tokenizer) in enumerate((("src", tokenizers.src), ("tgt", tokenizers.tgt))):
            characters = total.sides[i].characters
            report[split][side] |= describe_characters(characters, tokenizer)
            report[split][side]["lengths"] = _lengths(total, i)
        named = {name: _summary(statistics) for name, statistics in corpora.items() if name}
        report[split]["corpora"] = named
        if split == "train":
            overlaps = total.overlaps
            sizes = [summary["kept"] for summary in named.values()]
            weights = [config.data.corpora[name].weight for name in named]
            drawn = pairs_an_epoch(sizes, weights, config.data.temperature)
            for summary, number in zip(named.values(), drawn, strict=True):
                summary["times"] = _share(number, summary["kept"])
    for split in (name for name in splits if name != "train"):
        found: Report = {"num_rows": report[split]["kept"], "examples": {}}
        found |= {strictness: {} for strictness in STRICTNESS}
        for strictness, kind in product(STRICTNESS, KINDS):
            overlap = overlaps.get(f"{split} {strictness} {kind}", Overlap())
            numbers = {"held_out_rows": len(overlap.rows), "train_pairs": overlap.matches}
            found[strictness][kind] = numbers
            if overlap.matches:
                found["examples"][f"{strictness} {kind}"] = overlap.examples
        report["overlap"][split] = found
    report["advice"] = list(_advice(report))
    return report


def _summary(statistics: Statistics) -> Report:
    """Describe what was read and kept of a corpus or split."""
    counts, starts = statistics.pairs, bin_starts()
    bins, pairs = _length_counts(statistics)
    middle = (starts[:-1] + starts[1:] - 1) // 2  # of each bin
    middles = [
        np.minimum(middle[b], s.longest) for b, s in zip(bins, statistics.sides, strict=True)
    ]
    examples = {
        name: [{k: v for k, v in place._asdict().items() if v is not None} for place in places]
        for name, places in counts.examples.items()
    }
    summary: Report = {
        "read": counts.read,
        "kept": counts.kept,
        "dropped": dict(counts.dropped),
        "replaced": dict(counts.replaced),
        "examples": examples,
        "steep_pairs": int(pairs[np.maximum(*middles) / np.minimum(*middles) > _STEEP].sum()),
    }
    for name, side in zip(("src", "tgt"), statistics.sides, strict=True):
        summary[name] = {
            **{key: number for key, number in vars(side).items() if key != "characters"},
            "tokens_per_pair": _share(side.tokens, counts.kept),
            "tokens_per_word": _share(side.tokens, side.words),
            "unknown_share": _share(side.unknown_tokens, side.tokens),
            "byte_share": _share(side.byte_tokens, side.tokens),
        }
    summary["length_ratio"] = _share(summary["tgt"]["tokens"], summary["src"]["tokens"])
    return summary


def _lengths(statistics: Statistics, side: int) -> Report:
    """Describe the lengths of one side, EOS included: quantiles, and bars of equal width."""
    bins, counts = _length_counts(statistics)
    starts = bin_starts()[:-1]
    width = max(1, -(-(statistics.sides[side].longest + 1) // _MOST_BARS))
    bars = np.bincount(starts[bins[side]] // width, weights=counts).astype(np.int64)
    sums = np.cumsum(np.bincount(bins[side], weights=counts, minlength=NUM_BINS).astype(np.int64))
    quantiles = {
        name: int(starts[np.searchsorted(sums, share * sums[-1])])
        for name, share in _QUANTILES.items()
    }
    return quantiles | {"bar_width": width, "bars": bars.tolist()}


def _length_counts(statistics: Statistics) -> tuple[tuple[Ints, Ints], Ints]:
    """Return the bins of source and target lengths that occur together (K,), and how often."""
    keys = np.array([*statistics.lengths], np.int64)
    return np.divmod(keys, NUM_BINS), np.array([*statistics.lengths.values()], np.int64)


def _share(part: float, whole: float) -> float:
    """Divide, rounded so that the file is the same on every machine; 0 of nothing is 0."""
    return round(part / whole, 6) if whole else 0.0


def _advice(report: Report) -> Iterator[str]:
    """Yield advice on what looks wrong, the gravest first."""
    yield from _advice_on_overlap(report)
    train = report["train"]
    read, kept = train["read"], train["kept"]
    lost = {reason: number for reason, number in train["dropped"].items() if reason != HELD_OUT}
    if (dropped := sum(lost.values())) > 0.05 * read:
        reason, number = max(lost.items(), key=lambda item: item[1])
        yield (
            f"{dropped / read:.1%} of the training pairs were dropped, most for "
            f"'{reason}' ({number:,}): look at the examples, fix the input or the filter."
        )
    yield from _advice_on_sides(report)
    for kind, option, most in zip(KINDS, ("pair", "src", "tgt"), (0.1, 0.3, 0.3), strict=True):
        number = (report["duplicates"] or {}).get(kind, 0)
        if number > most * train["kept"]:
            yield (
                f"{number / train['kept']:.0%} of the training {kind} came before: "
                f"filter.duplicates={option} keeps the first of each."
            )
            break  # those of one side are more, for the same cause
    ratio, steep = train["length_ratio"], train["steep_pairs"]
    if not 0.5 <= ratio <= 2:
        yield (
            f"There are {ratio:.2f} target tokens for each source token: check that the sides "
            "belong together and are not exchanged."
        )
    elif steep > 0.01 * kept:
        yield (
            f"{steep / kept:.1%} of the training pairs have a side more than three times "
            "as long as the other: filter.max_ratio=3 drops what is hardly a translation."
        )
    corpora = train["corpora"].values()
    if corpora and not any(corpus["times"] for corpus in corpora):
        yield "The weights leave no training pair an epoch: give a corpus a larger one."


def _advice_on_overlap(report: Report) -> Iterator[str]:
    for name, found in report["overlap"].items():
        size, pairs = found["num_rows"], found["normalised"]["pairs"]["held_out_rows"]
        if pairs:
            first = found["examples"]["normalised pairs"][0]
            yield (
                f"{pairs:,} of {size:,} {name} pairs ({pairs / size:.1%}) are in the training "
                f"text, so scores on {name} will be too high: take them out of it "
                f"(first {first['file']}:{first['line']})."
            )
        for kind in ("sources", "targets"):
            rows = found["normalised"][kind]["held_out_rows"]
            if rows > pairs and rows > 0.01 * size:  # short sentences are often the same
                yield (
                    f"{rows:,} of {size:,} {name} {kind} ({rows / size:.1%}) are in the training "
                    f"text: state it beside scores, or take these pairs out."
                )


def _advice_on_sides(report: Report) -> Iterator[str]:
    """Yield advice on the tokens of each side, then on its words, then on its characters."""
    for split, (key, side) in product(filter(report.__contains__, _SPLITS), _SIDES):
        counts = report[split][key]
        if counts["unknown_share"] > 0.001:
            yield (
                f"{counts['unknown_share']:.2%} of the {split} {side} tokens are unknown: set "
                "tokenizer.byte_fallback=true, or train the tokenizer on such text."
            )
        if counts["byte_share"] > 0.01:
            worst = [f"most for {c['code']} {c['name']}" for c in counts["uncovered"][:1]]
            yield (
                f"{counts['byte_share']:.1%} of the {split} {side} tokens are single bytes, "
                f"{worst[0] if worst else 'all of known ones'}: raise "
                "tokenizer.character_coverage or vocab_size, or train the tokenizer on such text."
            )
    train = [(side, report["train"][key]) for key, side in _SIDES]
    for side, counts in train:
        scripts = {name for name, share in counts["scripts"].items() if share > 0.2}
        if not _UNSPACED & scripts and counts["tokens_per_word"] > 3:
            yield (
                f"A {side} word takes {counts['tokens_per_word']:.1f} tokens: raise "
                "tokenizer.vocab_size, unless words of this language are that long."
            )
    for side, counts in train:
        if counts["odd_characters"] > 0.001 * counts["characters"]:
            first = counts["odd"][0]
            fix = "filter.max_foreign drops such pairs"
            if first["why"] != "other script":
                fix = "the text was decoded or extracted wrongly; make it again from its source"
            yield (
                f"{counts['odd_characters'] / counts['characters']:.2%} of the {side} characters "
                f"are odd (first {first['code']} {first['name']}, {first['count']:,} times, "
                f"{first['why']}): {fix}."
            )


def report_table(report: Report) -> str:
    """Return the report in lines of at most 100 characters."""
    rows = []
    for split in filter(report.__contains__, _SPLITS):
        corpora = report[split]["corpora"]
        shown = [(f"› {name}"[:12], part) for name, part in corpora.items()][:_MOST_SHOWN]
        for name, part in [(split, report[split]), *shown]:
            sides = [
                f"{part['src'][key]:{form}}/{part['tgt'][key]:{form}}"
                for key, form in _PER_SIDE.values()
            ]
            rows.append([name, f"{part['read']:,}", f"{part['kept']:,}", *sides])
        if len(corpora) > _MOST_SHOWN:
            rows.append([f"› {len(corpora) - _MOST_SHOWN} more"])
    table = tabulate(
        rows,
        headers=["", "read", "kept", *(f"{name}\nsrc/tgt" for name in _PER_SIDE)],
        tablefmt="plain",
        colalign=["left", *["right"] * 6],
        disable_numparse=True,
    )
    advice = [("!", text) for text in report["advice"][:_MOST_SHOWN]]
    if len(report["advice"]) > _MOST_SHOWN:
        advice.append(("!", f"and {len(report['advice']) - _MOST_SHOWN} more, in report.json"))
    blocks = [table]
    for lines in filter(None, ([*_details(report)], advice)):
        names = [name for name, _ in lines]  # one that comes again is left out
        rows = [
            ["" if i and name == names[i - 1] != "!" else name, text]
            for i, (name, text) in enumerate(lines)
        ]
        widths = [None, 98 - max(map(len, names))]
        blocks.append(tabulate(rows, tablefmt="plain", maxcolwidths=widths, disable_numparse=True))
    return "\n\n".join(blocks)


def _details(report: Report) -> Iterator[tuple[str, str]]:
    """Yield what stands below the table, each line with its name."""
    train = report["train"]
    for what in ("dropped", "replaced"):
        for split in filter(report.__contains__, _SPLITS):
            part = report[split]
            for reason, number in sorted(part[what].items(), key=lambda item: (-item[1], item[0])):
                places = part["examples"].get(reason, [])
                first = f", first at {places[0]['file']}:{places[0]['line']}" if places else ""
                share = f" ({number / part['read']:.1%})" if what == "dropped" else ""
                where = "" if split == "train" else f" in {split}"
                yield what, f"{reason} {number:,}{share}{where}{first}"
    if report["duplicates"] is not None:
        size, numbers = train["kept"], report["duplicates"].items()
        texts = [f"{kind} {number:,} ({number / size:.1%})" for kind, number in numbers]
        yield "duplicates", ", ".join(texts)
    for split, found in report["overlap"].items():
        exact, normalized = (
            " ".join(f"{kind['held_out_rows']:,}" for kind in found[strictness].values())
            for strictness in STRICTNESS
        )
        yield (
            "overlap",
            f"{split}, pairs sources targets of {found['num_rows']:,} that are in train: "
            f"{exact} exact, {normalized} normalised",
        )
    for side, language in _LANGUAGES:
        lengths = train[side]["lengths"]
        most, end = max(lengths["bars"]), lengths["bar_width"] * len(lengths["bars"])
        bars = "".join(_BARS[-(-8 * bar // most)] for bar in lengths["bars"])  # any pair shows
        yield (
            "lengths",
            f"{report[language]:<3} {bars}  0 to {end - 1:,} tokens; median "
            f"{lengths['median']:,}, 99 % up to {lengths['p99']:,}",
        )
    for side, language in _LANGUAGES:
        part = train[side]
        scripts = [f"{name} {share:.1%}" for name, share in list(part["scripts"].items())[:3]]
        parts = [f"{part['covered_share']:.3%} have a piece", ", ".join(scripts)]
        odd = [f"{o['code']} {o['name'].lower()} {o['count']:,}" for o in part["odd"][:2]]
        parts += [f"{part['odd_characters']:,} odd: {', '.join(odd)}"] if odd else []
        yield "characters", f"{report[language]:<3} {'; '.join(parts)}"


def report_page(report: Report) -> str:
    """Return report.html. Text of the user is set as text, whatever is in it."""
    splits = {name: report[name] for name in _SPLITS if name in report}
    template = page_templates(Path(__file__).parent).get_template("report.html.j2")
    return template.render(report=report, splits=splits, sides=_LANGUAGES)
