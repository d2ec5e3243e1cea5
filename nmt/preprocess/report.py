"""The report of a data folder: `report.json` with advice, a table for the terminal, and a page.

docs/formats.md describes the keys of `report.json`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tabulate import tabulate

from nmt.config import PreprocessConfig
from nmt.data.languages import describe_languages
from nmt.data.mixing import compute_pairs_per_epoch
from nmt.data.tokenizer import Tokenizers
from nmt.preprocess.characters import Ints, describe_characters
from nmt.preprocess.duplicates import COMPARED_UNITS
from nmt.preprocess.filters import HELD_OUT
from nmt.preprocess.statistics import MATCH_LEVELS, NUM_BINS, Overlap, Statistics, bin_starts
from nmt.runtime.pages import load_page_templates

Report = dict[str, Any]
Corpora = Mapping[str, Statistics]  # keys: names of corpora, or "" for text without a name

FORMAT_VERSION = 1
_MAX_HISTOGRAM_BARS = 50
_QUANTILES = {"median": 0.5, "p90": 0.9, "p99": 0.99}
_STEEP_RATIO = 3.0  # pairs with a larger ratio of lengths are probably no translations
# scripts of languages that do not separate words by spaces
_UNSPACED_SCRIPTS = {"Han", "Hiragana", "Katakana", "Thai", "Lao", "Khmer", "Myanmar"}
# For each unit: the value of filter.duplicates that drops its repeats, and a share of the training
# pairs. The report advises the value if more than this share of the pairs repeat an earlier unit.
_DUPLICATE_FILTERS = {"pairs": ("pair", 0.1), "sources": ("src", 0.3), "targets": ("tgt", 0.3)}

_SPLITS = ("train", "valid", "test")
_SIDE_NAMES = {"src": "source", "tgt": "target"}
_LANGUAGE_KEYS = {"src": "src_lang", "tgt": "tgt_lang"}
_MAX_LISTED = 8  # maximum number of corpora, and of pieces of advice, that the terminal shows
# the report gives advice if the ratio of target tokens to source tokens is out of these bounds
_MIN_LENGTH_RATIO = 0.5
_MAX_LENGTH_RATIO = 2.0
_BAR_CHARACTERS = " ▁▂▃▄▅▆▇█"
_SIDE_COLUMNS = {  # columns of the table: key and format of the number
    "tokens a pair\nsrc/tgt": ("tokens_per_pair", ".1f"),
    "tokens a word\nsrc/tgt": ("tokens_per_word", ".2f"),
    "unknown\nsrc/tgt": ("unknown_share", ".2%"),
    "bytes\nsrc/tgt": ("byte_share", ".2%"),
}


def build_report(
    splits: Mapping[str, Corpora],
    *,
    config: PreprocessConfig,
    tokenizers: Tokenizers,
    duplicates: Mapping[str, int] | None,
) -> Report:
    """Return the content of `report.json`.

    `splits` includes train. `duplicates` counts the repeated training pairs, sources and targets,
    unless duplicates were dropped.
    """
    languages = describe_languages(config.data)
    report: Report = {
        "format_version": FORMAT_VERSION,
        "src_lang": languages["src_lang"],
        "tgt_lang": languages["tgt_lang"],
        "max_length": config.max_length,
        "duplicates": None if duplicates is None else dict(duplicates),
        "overlap": {},
    }
    if config.data.license is not None:
        report["license"] = config.data.license
    overlaps: Mapping[str, Overlap] = {}  # overlaps of the training text with other splits
    for split, corpora in splits.items():
        total = Statistics()
        for statistics in corpora.values():
            total.merge(statistics)
        report[split] = _summarize_split(total, tokenizers)
        summaries = {name: _summarize(corpus) for name, corpus in corpora.items() if name}
        report[split]["corpora"] = summaries
        if split == "train":
            overlaps = total.overlaps
            _add_times(summaries, config)
    for split in splits:
        if split != "train":
            report["overlap"][split] = _describe_overlap(split, report[split]["kept"], overlaps)
    report["advice"] = list(_advise(report))
    return report


def _summarize_split(statistics: Statistics, tokenizers: Tokenizers) -> Report:
    """Describe the pairs, tokens, characters and lengths of a split."""
    summary = _summarize(statistics)
    summary["src"] |= describe_characters(statistics.src.characters, tokenizers.src)
    summary["tgt"] |= describe_characters(statistics.tgt.characters, tokenizers.tgt)
    src_bins, tgt_bins, counts = _count_by_bins(statistics)
    summary["src"]["lengths"] = _describe_lengths(src_bins, counts, statistics.src.longest)
    summary["tgt"]["lengths"] = _describe_lengths(tgt_bins, counts, statistics.tgt.longest)
    return summary


def _summarize(statistics: Statistics) -> Report:
    """Describe the pairs and tokens of a corpus or split."""
    counts = statistics.pairs
    examples = {}
    for name, locations in counts.examples.items():
        examples[name] = [location.to_report() for location in locations]
    summary: Report = {
        "read": counts.read,
        "kept": counts.kept,
        "dropped": dict(counts.dropped),
        "replaced": dict(counts.replaced),
        "examples": examples,
        "steep_pairs": _count_steep_pairs(statistics),
        "length_ratio": _ratio(statistics.tgt.tokens, statistics.src.tokens),
    }
    for name, side in (("src", statistics.src), ("tgt", statistics.tgt)):
        summary[name] = {
            "tokens": side.tokens,
            "words": side.words,
            "unknown_tokens": side.unknown_tokens,
            "byte_tokens": side.byte_tokens,
            "longest": side.longest,
            "tokens_per_pair": _ratio(side.tokens, counts.kept),
            "tokens_per_word": _ratio(side.tokens, side.words),
            "unknown_share": _ratio(side.unknown_tokens, side.tokens),
            "byte_share": _ratio(side.byte_tokens, side.tokens),
        }
    return summary


def _ratio(numerator: float, denominator: float) -> float:
    """Divide, or return 0 if the denominator is 0.

    The result is rounded, so that the report has the same bytes on every machine.
    """
    return round(numerator / denominator, 6) if denominator else 0.0


def _count_by_bins(statistics: Statistics) -> tuple[Ints, Ints, Ints]:
    """Return source bins (K,), target bins (K,), and the number of pairs with these bins (K,).

    K is the number of combinations of a source bin and a target bin that occur.
    """
    keys = np.array(list(statistics.num_pairs_by_bins), np.int64)
    counts = np.array(list(statistics.num_pairs_by_bins.values()), np.int64)
    src_bins = keys // NUM_BINS  # a key is src_bin * NUM_BINS + tgt_bin
    tgt_bins = keys % NUM_BINS
    return src_bins, tgt_bins, counts


def _count_steep_pairs(statistics: Statistics) -> int:
    """Estimate how many pairs are steep.

    One side of a steep pair has more than `_STEEP_RATIO` times as many tokens as the other side.
    """
    src_bins, tgt_bins, counts = _count_by_bins(statistics)
    starts = bin_starts()
    largest_lengths = starts[1:] - 1  # largest number of tokens in each bin
    middles = (starts[:-1] + largest_lengths) // 2  # middle length of each bin
    # the middle of a bin may exceed the longest line of the side
    src = np.minimum(middles[src_bins], statistics.src.longest)
    tgt = np.minimum(middles[tgt_bins], statistics.tgt.longest)
    is_steep = np.maximum(src, tgt) / np.minimum(src, tgt) > _STEEP_RATIO
    return int(counts[is_steep].sum())


def _describe_lengths(bins: Ints, counts: Ints, longest: int) -> Report:
    """Return quantiles and a histogram of the lengths of one side. Lengths include EOS.

    `bins` (K,) holds bins of lengths, and the same bin may occur several times. `counts` (K,) holds
    the number of pairs for each element of `bins`. `longest` is the largest length.
    """
    starts = bin_starts()[:-1]
    num_lengths = longest + 1  # lengths start at 0
    bar_width = math.ceil(num_lengths / _MAX_HISTOGRAM_BARS)
    bar_indices = starts[bins] // bar_width  # (K,), the bar of the histogram that counts each bin
    bars = np.bincount(bar_indices, weights=counts).astype(np.int64)
    pairs_by_bin = np.bincount(bins, weights=counts, minlength=NUM_BINS).astype(np.int64)
    running_sums = np.cumsum(pairs_by_bin)  # number of pairs in each bin and the bins before it
    lengths: Report = {"bar_width": bar_width, "bars": bars.tolist()}
    for name, share in _QUANTILES.items():
        quantile_bin = np.searchsorted(running_sums, share * running_sums[-1])
        lengths[name] = int(starts[quantile_bin])
    return lengths


def _add_times(summaries: Mapping[str, Report], config: PreprocessConfig) -> None:
    """Add `times` to the summary of each corpus: how often its pairs occur in an epoch."""
    sizes = [summary["kept"] for summary in summaries.values()]
    weights = [config.data.corpora[name].weight for name in summaries]
    drawn_per_corpus = compute_pairs_per_epoch(sizes, weights, config.data.temperature)
    for summary, num_drawn in zip(summaries.values(), drawn_per_corpus, strict=True):
        summary["times"] = _ratio(num_drawn, summary["kept"])


def _describe_overlap(split: str, num_rows: int, overlaps: Mapping[str, Overlap]) -> Report:
    """Describe how many pairs, sources and targets of a held-out split are in the training text."""
    description: Report = {"num_rows": num_rows, "examples": {}}
    for level in MATCH_LEVELS:
        description[level] = {}
        for unit in COMPARED_UNITS:
            # `Statistics.overlaps` has no entry without matches
            overlap = overlaps.get(f"{split} {level} {unit}", Overlap())
            description[level][unit] = {
                "held_out_rows": len(overlap.rows),
                "train_pairs": overlap.matches,
            }
            if overlap.matches:
                description["examples"][f"{level} {unit}"] = overlap.examples
    return description


def _splits_of(report: Report) -> list[str]:
    """Return the names of the splits that a report describes."""
    return [split for split in _SPLITS if split in report]


# Advice


def _advise(report: Report) -> Iterator[str]:
    """Yield advice about likely problems, the most important first."""
    for split, overlap in report["overlap"].items():
        yield from _advise_on_overlap(split, overlap)
    train = report["train"]
    num_kept = train["kept"]
    yield from _advise_on_dropped(train)
    for split in _splits_of(report):
        for side, side_name in _SIDE_NAMES.items():
            yield from _advise_on_tokens(split, side_name, report[split][side])
    for side, side_name in _SIDE_NAMES.items():
        yield from _advise_on_words(side_name, train[side])
    for side, side_name in _SIDE_NAMES.items():
        yield from _advise_on_characters(side_name, train[side])
    if report["duplicates"] is not None:
        yield from _advise_on_duplicates(report["duplicates"], num_kept)
    ratio = train["length_ratio"]
    if not _MIN_LENGTH_RATIO <= ratio <= _MAX_LENGTH_RATIO:
        yield (
            f"There are {ratio:.2f} target tokens for each source token: check that the sides "
            "belong together and are not exchanged."
        )
    elif train["steep_pairs"] > 0.01 * num_kept:
        yield (
            f"{train['steep_pairs'] / num_kept:.1%} of the training pairs have a side more than "
            "three times as long as the other: filter.max_ratio=3 drops such pairs."
        )
    corpora = train["corpora"].values()
    if corpora and not any(corpus["times"] for corpus in corpora):
        yield "Every weight is too small, so an epoch has no training pairs: increase a weight."


def _advise_on_overlap(split: str, overlap: Report) -> Iterator[str]:
    """Advise on pairs of a held-out split that are in the training text."""
    size = overlap["num_rows"]
    num_pairs = overlap["normalised"]["pairs"]["held_out_rows"]
    if num_pairs:
        first_example = overlap["examples"]["normalised pairs"][0]
        yield (
            f"{num_pairs:,} of {size:,} {split} pairs ({num_pairs / size:.1%}) are in the training "
            f"text, so scores on {split} will be too high: remove them from the training text "
            f"(first {first_example['file']}:{first_example['line']})."
        )
    for unit in ("sources", "targets"):
        num_rows = overlap["normalised"][unit]["held_out_rows"]
        # a few short sentences, such as "Yes.", are the same in any two texts
        is_frequent = num_rows > 0.01 * size
        if num_rows > num_pairs and is_frequent:
            yield (
                f"{num_rows:,} of {size:,} {split} {unit} ({num_rows / size:.1%}) are in the "
                "training text: state this with the scores, or remove these pairs."
            )


def _advise_on_dropped(train: Report) -> Iterator[str]:
    """Advise on a large share of dropped training pairs."""
    dropped = {reason: num for reason, num in train["dropped"].items() if reason != HELD_OUT}
    num_dropped = sum(dropped.values())
    if num_dropped > 0.05 * train["read"]:
        reason = max(dropped, key=dropped.__getitem__)
        yield (
            f"{num_dropped / train['read']:.1%} of the training pairs were dropped, most for "
            f"'{reason}' ({dropped[reason]:,}): look at the examples, fix the input or the filter."
        )


def _advise_on_duplicates(duplicates: Mapping[str, int], num_kept: int) -> Iterator[str]:
    """Advise on repeated training pairs, or else on repeated sources or targets."""
    for unit, (filter_value, min_share) in _DUPLICATE_FILTERS.items():
        num_repeats = duplicates[unit]
        if num_repeats > min_share * num_kept:
            yield (
                f"{num_repeats / num_kept:.0%} of the training {unit} came before: "
                f"filter.duplicates={filter_value} keeps the first of each."
            )
            break  # repeated pairs repeat sources and targets too


def _advise_on_tokens(split: str, side: str, counts: Report) -> Iterator[str]:
    """Advise on unknown tokens and byte tokens."""
    if counts["unknown_share"] > 0.001:
        yield (
            f"{counts['unknown_share']:.2%} of the {split} {side} tokens are unknown: set "
            "tokenizer.byte_fallback=true (with type=word a smaller min_freq), or train the "
            "tokenizer on such text."
        )
    if counts["byte_share"] > 0.01:
        cause = "although each character has a piece"
        if counts["uncovered"]:
            character = counts["uncovered"][0]
            cause = f"most for {character['code']} {character['name']}"
        yield (
            f"{counts['byte_share']:.1%} of the {split} {side} tokens are single bytes, {cause}: "
            "raise tokenizer.character_coverage or vocab_size, or train the tokenizer on such text."
        )


def _advise_on_words(side: str, counts: Report) -> Iterator[str]:
    """Advise on words that are divided into many tokens."""
    scripts = {name for name, share in counts["scripts"].items() if share > 0.2}
    if counts["tokens_per_word"] > 3 and not _UNSPACED_SCRIPTS & scripts:
        yield (
            f"A {side} word takes {counts['tokens_per_word']:.1f} tokens: raise "
            "tokenizer.vocab_size, unless words of this language are that long."
        )


def _advise_on_characters(side: str, counts: Report) -> Iterator[str]:
    """Advise on characters that are odd in the text."""
    if counts["odd_characters"] > 0.001 * counts["characters"]:
        first = counts["odd"][0]
        fix = "the text was decoded or extracted wrongly; make it again from its source"
        if first["why"] == "other script":
            fix = "filter.max_foreign drops such pairs"
        yield (
            f"{counts['odd_characters'] / counts['characters']:.2%} of the {side} characters "
            f"are odd (first {first['code']} {first['name']}, {first['count']:,} times, "
            f"{first['why']}): {fix}."
        )


# The table on the terminal


def report_table(report: Report) -> str:
    """Return the report as text, in lines of at most 100 characters."""
    advice = [("!", text) for text in report["advice"][:_MAX_LISTED]]
    num_more = len(report["advice"]) - _MAX_LISTED
    if num_more > 0:
        advice.append(("!", f"and {num_more} more, in report.json"))
    tables = [_counts_table(report), _text_table(list(_list_details(report)))]
    if advice:
        tables.append(_text_table(advice))
    return "\n\n".join(tables)


def _counts_table(report: Report) -> str:
    """Return a table of the pairs and tokens of all splits and of their first corpora."""
    rows = []
    for split in _splits_of(report):
        corpora = report[split]["corpora"]
        summaries = {split: report[split]}
        for name in list(corpora)[:_MAX_LISTED]:
            summaries[f"› {name}"] = corpora[name]
        for name, summary in summaries.items():
            row = [name[:12], f"{summary['read']:,}", f"{summary['kept']:,}"]
            for key, number_format in _SIDE_COLUMNS.values():
                src = format(summary["src"][key], number_format)
                tgt = format(summary["tgt"][key], number_format)
                row.append(f"{src}/{tgt}")
            rows.append(row)
        if len(corpora) > _MAX_LISTED:
            rows.append([f"› {len(corpora) - _MAX_LISTED} more"])
    number_columns = ["read", "kept", *_SIDE_COLUMNS]
    table: str = tabulate(
        rows,
        headers=["", *number_columns],
        tablefmt="plain",
        colalign=["left"] + ["right"] * len(number_columns),
        disable_numparse=True,
    )
    return table


def _text_table(rows: list[tuple[str, str]]) -> str:
    """Return a table of names and texts. Of consecutive equal names, only the first is shown.

    The name "!", which marks advice, is always shown.
    """
    shown_rows = []
    previous = ""
    for name, text in rows:
        if name != previous or name == "!":
            shown_rows.append([name, text])
        else:
            shown_rows.append(["", text])
        previous = name
    name_width = max(len(name) for name, _ in rows)
    text_width = 100 - name_width - 2  # two spaces separate name and text
    table: str = tabulate(
        shown_rows, tablefmt="plain", maxcolwidths=[None, text_width], disable_numparse=True
    )
    return table


def _list_details(report: Report) -> Iterator[tuple[str, str]]:
    """Yield name and text of each row below the table of counts."""
    train = report["train"]
    for key in ("dropped", "replaced"):
        for split in _splits_of(report):
            for text in _list_reasons(report[split], key, split):
                yield key, text
    if report["duplicates"] is not None:
        texts = [
            f"{unit} {number:,} ({number / train['kept']:.1%})"
            for unit, number in report["duplicates"].items()
        ]
        yield "duplicates", ", ".join(texts)
    for split, overlap in report["overlap"].items():
        matches = []
        for level in MATCH_LEVELS:
            numbers = [f"{overlap[level][unit]['held_out_rows']:,}" for unit in COMPARED_UNITS]
            matches.append(f"{' '.join(numbers)} {level}")
        yield (
            "overlap",
            f"{split}, pairs sources targets of {overlap['num_rows']:,} that are in train: "
            f"{', '.join(matches)}",
        )
    for side, language_key in _LANGUAGE_KEYS.items():
        yield "lengths", f"{report[language_key]:<3} {_length_text(train[side]['lengths'])}"
    for side, language_key in _LANGUAGE_KEYS.items():
        yield "characters", f"{report[language_key]:<3} {_character_text(train[side])}"


def _list_reasons(summary: Report, key: str, split: str) -> Iterator[str]:
    """Yield each key of `summary[key]`, which is `dropped` or `replaced`, with its number."""
    counts = summary[key]
    for reason in sorted(counts, key=lambda reason: (-counts[reason], reason)):
        number = counts[reason]
        text = f"{reason} {number:,}"
        if key == "dropped":
            text += f" ({number / summary['read']:.1%})"
        if split != "train":
            text += f" in {split}"
        examples = summary["examples"].get(reason)
        if examples:
            text += f", first at {examples[0]['file']}:{examples[0]['line']}"
        yield text


def _length_text(lengths: Report) -> str:
    """Return a histogram of lengths as one line."""
    highest = max(lengths["bars"])
    max_height = len(_BAR_CHARACTERS) - 1  # the first character is for a height of 0
    bars = ""
    for bar in lengths["bars"]:
        bars += _BAR_CHARACTERS[math.ceil(max_height * bar / highest)]
    end = lengths["bar_width"] * len(lengths["bars"])
    return (
        f"{bars}  0 to {end - 1:,} tokens; median {lengths['median']:,}, "
        f"99 % up to {lengths['p99']:,}"
    )


def _character_text(counts: Report) -> str:
    """Summarize the characters of one side in one line."""
    scripts = [f"{name} {share:.1%}" for name, share in list(counts["scripts"].items())[:3]]
    text = f"{counts['covered_share']:.3%} have a piece; {', '.join(scripts)}"
    if counts["odd"]:
        examples = []
        for character in counts["odd"][:2]:
            name = character["name"].lower()
            examples.append(f"{character['code']} {name} {character['count']:,}")
        text += f"; {counts['odd_characters']:,} odd: {', '.join(examples)}"
    return text


def render_data_report(report: Report) -> str:
    """Return report.html. All text is escaped."""
    splits = {split: report[split] for split in _splits_of(report)}
    template = load_page_templates(Path(__file__).parent).get_template("report.html.j2")
    return template.render(report=report, splits=splits, languages=_LANGUAGE_KEYS)
