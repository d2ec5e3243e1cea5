"""What is known of a corpus: the content of report.json, and advice on what looks wrong.

The table on the terminal and report.html show the same content (`rendering.py`); docs/formats.md
describes the keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nmt.config import PreprocessConfig
from nmt.data.mixing import pairs_an_epoch
from nmt.data.tokenizer import Tokenizers
from nmt.preprocess.characters import Ints, describe_characters
from nmt.preprocess.clean import PairCounts
from nmt.preprocess.statistics import (
    KINDS,
    NUM_BINS,
    STRICTNESS,
    SplitOverlap,
    Statistics,
    bin_starts,
)

FORMAT_VERSION = 1
_MOST_BARS = 50  # of a histogram
_QUANTILES = {"median": 0.5, "p90": 0.9, "p99": 0.99}
_STEEP = 3.0  # a pair is steep when one side has more than this many times the other's tokens

# from where on advice is given; shares of all pairs, tokens, characters or held-out rows
_MOST_DROPPED = 0.05
_MOST_UNKNOWN = 0.001
_MOST_BYTES = 0.01
_MOST_DUPLICATES = {"pairs": 0.1, "sources": 0.3, "targets": 0.3}  # a side has many translations
_MOST_STEEP = 0.01
_MOST_RATIO = 2.0
_MOST_ODD = 0.001
_MOST_OVERLAP = 0.01  # of sources or targets of a held-out set, which short sentences share
_MOST_TOKENS_A_WORD = 3.0
_UNSPACED = {"Han", "Hiragana", "Katakana", "Thai", "Lao", "Khmer", "Myanmar"}
_SIDES = (("src", "source"), ("tgt", "target"))
Report = dict[str, Any]


@dataclass
class CorpusResult:
    """What became of the pairs of a corpus, a shard or a split."""

    counts: PairCounts = field(default_factory=PairCounts)
    statistics: Statistics = field(default_factory=Statistics)

    def merge(self, counts: PairCounts, statistics: Statistics) -> None:
        """Add what became of the pairs that come after."""
        self.counts.merge(counts)
        self.statistics.merge(statistics)


Corpora = Mapping[str, CorpusResult]  # of a split, by name; "" for the only one


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
    report: Report = {name: _split(corpora, tokenizers) for name, corpora in splits.items()}
    for name, times in _times_an_epoch(splits["train"], config).items():
        report["train"]["corpora"][name]["times"] = round(times, 6)
    overlaps = _total(splits["train"]).statistics.overlaps
    report |= {
        "format_version": FORMAT_VERSION,
        "src_lang": config.data.src_lang,
        "tgt_lang": config.data.tgt_lang,
        "max_length": config.max_length,
        "duplicates": None if duplicates is None else dict(duplicates),
        "overlap": {name: _overlap(overlaps[name]) for name in splits if name in overlaps},
    }
    report["advice"] = [line for part in _ADVICE for line in part(report)]
    return report


def _total(corpora: Corpora) -> CorpusResult:
    total = CorpusResult()
    for result in corpora.values():
        total.merge(result.counts, result.statistics)
    return total


def _split(corpora: Corpora, tokenizers: Tokenizers) -> Report:
    total = _total(corpora)
    summary, statistics = _summary(total), total.statistics
    for i, (side, tokenizer) in enumerate((("src", tokenizers.src), ("tgt", tokenizers.tgt))):
        summary[side] |= describe_characters(statistics.sides[i].characters, tokenizer)
        summary[side]["lengths"] = _lengths(statistics, i)
    summary["corpora"] = {name: _summary(result) for name, result in corpora.items() if name}
    return summary


def _summary(result: CorpusResult) -> Report:
    """Describe what was read and kept of a corpus or split."""
    counts, statistics = result.counts, result.statistics
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
        "steep_pairs": _num_steep(statistics),
    }
    for (name, _), side in zip(_SIDES, statistics.sides, strict=True):
        summary[name] = {
            "tokens": side.num_tokens,
            "words": side.num_words,
            "tokens_per_pair": _share(side.num_tokens, statistics.num_pairs),
            "tokens_per_word": _share(side.num_tokens, side.num_words),
            "unknown_tokens": side.num_unknown,
            "unknown_share": _share(side.num_unknown, side.num_tokens),
            "byte_tokens": side.num_bytes,
            "byte_share": _share(side.num_bytes, side.num_tokens),
            "longest": side.longest,
        }
    summary["length_ratio"] = _share(summary["tgt"]["tokens"], summary["src"]["tokens"])
    return summary


def _arrays(counts: Counter[int]) -> tuple[Ints, Ints]:
    return np.array([*counts], np.int64), np.array([*counts.values()], np.int64)


def _num_steep(statistics: Statistics) -> int:
    """Count the pairs with a side more than three times as long as the other."""
    starts, (keys, counts) = bin_starts(), _arrays(statistics.lengths)
    middles = (starts[:-1] + starts[1:] - 1) // 2
    src, tgt = (
        np.minimum(middles[bins], side.longest)
        for bins, side in zip(np.divmod(keys, NUM_BINS), statistics.sides, strict=True)
    )
    steep = np.maximum(src, tgt) / np.minimum(src, tgt) > _STEEP
    return int(counts[steep].sum())


def _lengths(statistics: Statistics, side: int) -> Report:
    """Describe the lengths of one side, EOS included: quantiles, and bars of equal width."""
    keys, counts = _arrays(statistics.lengths)
    bins = np.divmod(keys, NUM_BINS)[side]
    starts = bin_starts()[:-1]
    width = max(1, -(-(statistics.sides[side].longest + 1) // _MOST_BARS))
    bars = np.bincount(starts[bins] // width, weights=counts).astype(np.int64)
    sums = np.cumsum(np.bincount(bins, weights=counts, minlength=NUM_BINS).astype(np.int64))
    quantiles = {
        name: int(starts[np.searchsorted(sums, share * sums[-1])])
        for name, share in _QUANTILES.items()
    }
    return quantiles | {"bar_width": width, "bars": bars.tolist()}


def _overlap(overlap: SplitOverlap) -> Report:
    """Count the rows of a held-out split that training text has, and the pairs that have them."""
    found: Report = {"num_rows": overlap.num_rows, "examples": overlap.examples}
    for strictness in STRICTNESS:
        found[strictness] = {}
        for kind in KINDS:
            name = f"{strictness} {kind}"
            rows, pairs = len(overlap.seen.get(name, ())), overlap.matches[name]
            found[strictness][kind] = {"held_out_rows": rows, "train_pairs": pairs}
    return found


def _times_an_epoch(corpora: Corpora, config: PreprocessConfig) -> dict[str, float]:
    """Return how often an epoch draws each pair of a named corpus, as the data folder asks for."""
    sizes = {name: result.statistics.num_pairs for name, result in corpora.items() if name}
    weights = [config.data.corpora[name].weight for name in sizes]
    drawn = pairs_an_epoch([*sizes.values()], weights, config.data.temperature)
    times = zip(sizes.items(), drawn, strict=True)
    return {name: number / size if size else 0.0 for (name, size), number in times}


def _share(part: float, whole: float) -> float:
    """Divide, rounded so that the file is the same on every machine; 0 of nothing is 0."""
    return round(part / whole, 6) if whole else 0.0


def _advise_overlap(report: Report) -> Iterator[str]:
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
            if rows > pairs and rows > _MOST_OVERLAP * size:
                yield (
                    f"{rows:,} of {size:,} {name} {kind} ({rows / size:.1%}) are in the training "
                    f"text: state it beside scores, or take these pairs out."
                )


def _advise_drops(report: Report) -> Iterator[str]:
    train = report["train"]
    num_dropped = train["read"] - train["kept"]
    if num_dropped > _MOST_DROPPED * train["read"]:
        reason, number = max(train["dropped"].items(), key=lambda item: item[1])
        yield (
            f"{num_dropped / train['read']:.1%} of the training pairs were dropped, most for "
            f"'{reason}' ({number:,}): look at the examples, fix the input or the filter."
        )


def _advise_tokens(report: Report) -> Iterator[str]:
    for split in (name for name in ("train", "valid", "test") if name in report):
        for key, side in _SIDES:
            counts = report[split][key]
            if counts["unknown_share"] > _MOST_UNKNOWN:
                yield (
                    f"{counts['unknown_share']:.2%} of the {split} {side} tokens are unknown: set "
                    "tokenizer.byte_fallback=true, or train the tokenizer on such text."
                )
            if counts["byte_share"] > _MOST_BYTES:
                worst = counts["uncovered"][0] if counts["uncovered"] else None
                which = (
                    f"most for {worst['code']} {worst['name']}" if worst else "all of known ones"
                )
                yield (
                    f"{counts['byte_share']:.1%} of the {split} {side} tokens are single bytes, "
                    f"{which}: raise tokenizer.character_coverage or vocab_size, or train the "
                    "tokenizer on such text."
                )
    for key, side in _SIDES:
        counts = report["train"][key]
        scripts = {name for name, share in counts["scripts"].items() if share > 0.2}
        if not _UNSPACED & scripts and counts["tokens_per_word"] > _MOST_TOKENS_A_WORD:
            yield (
                f"A {side} word takes {counts['tokens_per_word']:.1f} tokens: raise "
                "tokenizer.vocab_size, unless words of this language are that long."
            )


def _advise_characters(report: Report) -> Iterator[str]:
    for key, side in _SIDES:
        counts = report["train"][key]
        if counts["odd_characters"] > _MOST_ODD * counts["characters"]:
            first = counts["odd"][0]
            cure = "filter.max_foreign drops such pairs"
            if first["why"] != "other script":
                cure = "the text was decoded or extracted wrongly; make it again from its source"
            yield (
                f"{counts['odd_characters'] / counts['characters']:.2%} of the {side} characters "
                f"are odd (first {first['code']} {first['name']}, {first['count']:,} times, "
                f"{first['why']}): {cure}."
            )


def _advise_duplicates(report: Report) -> Iterator[str]:
    size = report["train"]["read"]
    for kind, option in (("pairs", "pair"), ("sources", "src"), ("targets", "tgt")):
        number = (report["duplicates"] or {}).get(kind, 0)
        if number > _MOST_DUPLICATES[kind] * size:
            yield (
                f"{number / size:.0%} of the training {kind} came before: "
                f"filter.duplicates={option} keeps the first of each."
            )
            return  # those of one side are more, for the same cause


def _advise_ratio(report: Report) -> Iterator[str]:
    train = report["train"]
    ratio, steep = train["length_ratio"], train["steep_pairs"]
    if not 1 / _MOST_RATIO <= ratio <= _MOST_RATIO:
        yield (
            f"There are {ratio:.2f} target tokens for each source token: check that the sides "
            "belong together and are not exchanged."
        )
    elif steep > _MOST_STEEP * train["kept"]:
        yield (
            f"{steep / train['kept']:.1%} of the training pairs have a side more than three times "
            "as long as the other: filter.max_ratio=3 drops what is hardly a translation."
        )


def _advise_weights(report: Report) -> Iterator[str]:
    corpora = report["train"]["corpora"].values()
    if corpora and not any(corpus["times"] for corpus in corpora):
        yield "The weights leave no training pair an epoch: give a corpus a larger one."


_ADVICE = (  # the gravest first
    _advise_overlap,
    _advise_drops,
    _advise_tokens,
    _advise_characters,
    _advise_duplicates,
    _advise_ratio,
    _advise_weights,
)
