"""Puts together what is known of a corpus: the content of report.json, from which the table on the
terminal and the page are made. docs/formats.md says what each key means.
"""

# K length bins in use

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nmt.config import PreprocessConfig, TrainConfig
from nmt.data.mixing import pairs_an_epoch
from nmt.preprocess.advice import give_advice
from nmt.preprocess.characters import Encoder, describe_characters
from nmt.preprocess.counts import Counts
from nmt.preprocess.epoch import EpochForecast, forecast_epoch, length_counts
from nmt.preprocess.memory import FLOAT, HALF, MemoryForecast, a_piece, forecast_memory
from nmt.preprocess.overlap import KINDS, STRICTNESS, SplitOverlap
from nmt.preprocess.statistics import NUM_BINS, SideStatistics, Statistics, bin_starts
from nmt.preprocess.tally import Ints

FORMAT_VERSION = 1
_MOST_BARS = 50  # of a histogram
_QUANTILES = {"median": 0.5, "p90": 0.9, "p99": 0.99}
_STEEP = 3.0  # tokens of one side for each of the other, from which pairs are counted as steep
Report = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """One corpus of a split."""

    corpus: str  # "" for the only one
    counts: Counts
    statistics: Statistics


def build_report(
    splits: Mapping[str, Sequence[Part]],
    *,
    config: PreprocessConfig,
    training: TrainConfig,
    tokenizers: tuple[Encoder, Encoder],
    duplicates: Mapping[str, int] | None,
) -> Report:
    """Sum up the splits; `train` is one of them.

    Args:
        splits: the corpora of each split.
        config: what the corpora were read with.
        training: the settings whose epochs and memory are foreseen.
        tokenizers: of source and target, the same one twice when they share it.
        duplicates: how many training pairs, sources and targets came before (keys as `KINDS`);
            None where nobody counted.
    """
    report: Report = {name: _split(parts, tokenizers) for name, parts in splits.items()}
    train = _joined(splits["train"])
    times = _times_an_epoch(splits["train"], config, training)
    for name in report["train"]["corpora"]:
        report["train"]["corpora"][name]["times"] = round(times[name], 6)
    report |= {
        "format_version": FORMAT_VERSION,
        "src_lang": config.data.src_lang,
        "tgt_lang": config.data.tgt_lang,
        "max_length": config.max_length,
        "duplicates": None if duplicates is None else dict(duplicates),
        "overlap": {k: _overlap(train.overlaps[k]) for k in splits if k in train.overlaps},
        "training": _training(splits["train"], times, training, tokenizers),
    }
    report["advice"] = give_advice(report)
    return report


def _joined(parts: Sequence[Part]) -> Statistics:
    total = Statistics()
    for part in parts:
        total.merge(part.statistics)
    return total


def _split(parts: Sequence[Part], tokenizers: tuple[Encoder, Encoder]) -> Report:
    counts = Counts()
    for part in parts:
        counts.merge(part.counts)
    statistics = _joined(parts)
    summary = _counts(counts) | _sides(statistics)
    for i, side in enumerate(("src", "tgt")):
        characters = describe_characters(statistics.sides[i].characters, tokenizers[i])
        summary[side] |= characters | {"lengths": _lengths(statistics, i)}
    named = [part for part in parts if part.corpus]
    summary["corpora"] = {
        part.corpus: _counts(part.counts) | _sides(part.statistics) for part in named
    }
    return summary


def _counts(counts: Counts) -> Report:
    examples = {
        name: [{k: v for k, v in place._asdict().items() if v is not None} for place in places]
        for name, places in counts.examples.items()
    }
    return {
        "read": counts.read,
        "kept": counts.kept,
        "dropped": dict(counts.dropped),
        "replaced": dict(counts.replaced),
        "examples": examples,
    }


def _sides(statistics: Statistics) -> Report:
    src, tgt = (_side(side, statistics.num_pairs) for side in statistics.sides)
    lengths = length_counts([(statistics, 1.0)])
    ratio = lengths.lengths.max(axis=1) / lengths.lengths.min(axis=1)
    steep = int(lengths.counts[ratio > _STEEP].sum())
    return {
        "src": src,
        "tgt": tgt,
        "length_ratio": _share(tgt["tokens"], src["tokens"]),  # target by source
        "steep_pairs": steep,
    }


def _side(side: SideStatistics, num_pairs: int) -> Report:
    return {
        "tokens": side.num_tokens,
        "words": side.num_words,
        "tokens_per_pair": _share(side.num_tokens, num_pairs),
        "tokens_per_word": _share(side.num_tokens, side.num_words),
        "unknown_tokens": side.num_unknown,
        "unknown_share": _share(side.num_unknown, side.num_tokens),
        "byte_tokens": side.num_bytes,
        "byte_share": _share(side.num_bytes, side.num_tokens),
        "longest": side.longest,
    }


def _lengths(statistics: Statistics, side: int) -> Report:
    """Describe the lengths of one side, EOS included: quantiles, and bars of equal width."""
    keys, counts = statistics.lengths.keys, statistics.lengths.counts
    bins = keys // NUM_BINS if side == 0 else keys % NUM_BINS  # (K,)
    by_bin = np.bincount(bins, weights=counts, minlength=NUM_BINS).astype(np.int64)
    starts, longest = bin_starts()[:-1], statistics.sides[side].longest
    width = max(1, -(-(longest + 1) // _MOST_BARS))
    bars = np.bincount(starts[bins] // width, weights=counts).astype(np.int64)
    quantiles = {name: _quantile(by_bin, starts, share) for name, share in _QUANTILES.items()}
    return quantiles | {"bar_width": width, "bars": bars.tolist()}


def _quantile(by_bin: Ints, starts: Ints, share: float) -> int:
    sums = np.cumsum(by_bin)
    return int(starts[np.searchsorted(sums, share * sums[-1])])


def _overlap(overlap: SplitOverlap) -> Report:
    """Say how many rows of a held-out split are in training text, and how many pairs hold them."""
    rows = overlap.seen.sum(axis=2)
    found: Report = {"num_rows": overlap.seen.shape[2], "examples": overlap.examples}
    for i, strictness in enumerate(STRICTNESS):
        found[strictness] = {
            kind: {"held_out_rows": int(rows[i, k]), "train_pairs": int(overlap.matches[i, k])}
            for k, kind in enumerate(KINDS)
        }
    return found


def _times_an_epoch(
    parts: Sequence[Part], config: PreprocessConfig, training: TrainConfig
) -> dict[str, float]:
    """Return how often an epoch has each pair of a corpus, by name."""
    corpora, temperature = config.data.corpora, training.mix_temperature
    own = {part.corpus: corpora[part.corpus].weight if part.corpus else 1.0 for part in parts}
    weights = {name: training.mix.get(name, weight) for name, weight in own.items()}
    sizes = [part.statistics.num_pairs for part in parts]
    drawn = pairs_an_epoch(
        sizes,
        list(weights.values()),
        config.data.temperature if temperature is None else temperature,
    )
    sums = zip(weights, drawn, sizes, strict=True)
    return {name: number / size if size else 0.0 for name, number, size in sums}


def _training(
    parts: Sequence[Part],
    times: Mapping[str, float],
    training: TrainConfig,
    tokenizers: tuple[Encoder, Encoder],
) -> Report:
    """Foresee an epoch and the memory of its largest batch under the settings in force."""
    model = training.model
    settings = {
        "num_encoder_layers": model.num_encoder_layers,
        "num_decoder_layers": model.num_decoder_layers,
        "d_model": model.d_model,
        "d_ff": model.d_ff,
        "tokens_per_update": training.tokens_per_update,
        "max_tokens": training.max_tokens,
        "max_updates": training.max_updates,
    }
    pairs = length_counts([(part.statistics, times[part.corpus]) for part in parts])
    longest = pairs.longest if len(pairs.counts) else None
    if longest is None or longest > training.max_tokens:
        return {"settings": settings, "longest": longest, "epoch": None, "memory": None}
    epoch = forecast_epoch(
        pairs, max_tokens=training.max_tokens, tokens_per_update=training.tokens_per_update
    )
    return {
        "settings": settings,
        "longest": longest,
        "epoch": {
            **vars(epoch),
            "padding_share": epoch.padding_share,
            "largest": [*epoch.largest],
            "widest": [*epoch.widest],
        },
        "memory": {
            "float32": _memory(training, tokenizers, epoch, FLOAT),
            "bfloat16": _memory(training, tokenizers, epoch, HALF),
        },
    }


def _memory(
    training: TrainConfig,
    tokenizers: tuple[Encoder, Encoder],
    epoch: EpochForecast,
    product_bytes: int,
) -> Report:
    src, tgt = tokenizers
    src_vocab_size = None if src is tgt else src.vocab_size

    def foresee(batch: tuple[int, int, int]) -> MemoryForecast:
        return forecast_memory(
            training, src_vocab_size, tgt.vocab_size, batch=batch, product_bytes=product_bytes
        )

    batches = (epoch.largest, epoch.widest)
    most = max(map(foresee, batches), key=lambda forecast: forecast.total)
    on_cpu = max(foresee(a_piece(batch)).cpu_process for batch in batches)
    return vars(most) | {"total": most.total, "cpu_process": on_cpu}


def _share(part: float, whole: float) -> float:
    """Divide, rounded so that the file is the same on every machine; 0 of nothing is 0."""
    return round(part / whole, 6) if whole else 0.0
