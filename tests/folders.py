"""Data folders of made-up ids, without text or tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from nmt.data.binary import CorpusShards, write_lengths
from nmt.data.shards import ShardFile, ShardWriter
from nmt.runtime.files import write_json

Pairs = Sequence[tuple[Sequence[int], Sequence[int]]]


def flat(rows: Sequence[Sequence[int]]) -> tuple[Any, Any]:
    """Return the ids of all rows (N,) and the offsets of the rows, which end with N (R + 1,)."""
    ids = np.array(list(chain.from_iterable(rows)), dtype=np.int64)
    return ids, np.cumsum([0, *map(len, rows)])


def write_shard(path: Path, pairs: Pairs, vocab_size: int) -> ShardFile:
    """Write one file."""
    with ShardWriter(path, src_vocab_size=vocab_size, tgt_vocab_size=vocab_size) as writer:
        writer.add(flat([src for src, _ in pairs]), flat([tgt for _, tgt in pairs]))
    return writer.shard


def write_folder(
    folder: Path,
    corpora: Mapping[str, Pairs],
    vocab_size: int,
    *,
    weights: Mapping[str, float] | None = None,
    pairs_a_shard: int = 1_000_000,
    **meta: Any,
) -> None:
    """Write named training corpora in shards; the first corpus is the validation set, too."""
    index = {"train": [], "valid": []}
    for name, pairs in corpora.items():
        shards = []
        for start in range(0, max(len(pairs), 1), pairs_a_shard):
            path = folder / f"train-{name}-{len(shards):05d}.arrow"
            shards.append(write_shard(path, pairs[start : start + pairs_a_shard], vocab_size))
        index["train"].append(CorpusShards(name, (weights or {}).get(name, 1.0), shards))
    first = next(iter(corpora.values()))
    valid = write_shard(folder / "valid-00000.arrow", first, vocab_size)
    index["valid"].append(CorpusShards("", 1.0, [valid]))
    write_json(
        folder / "meta.json", {**write_lengths(folder, index), "vocab_size": vocab_size, **meta}
    )
