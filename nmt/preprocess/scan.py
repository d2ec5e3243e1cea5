"""Scan the training text once, to collect everything that must be known before it is encoded:
a sample for the tokenizer, the hashes of duplicates, and candidates for held-out sets.

Every pair has two keys, which are uniform 64-bit hashes. The sample key is a hash of the seed, the
corpus and the number of the pair. The sample consists of the pairs with the smallest sample keys
(bottom-k sampling; Cohen and Kaplan, 2007). The held-out key is a hash of the text of the pair.
With `data.split_by=src` or `tgt`, the upper half of the held-out key is a hash of that side.
Held-out sets consist of the pairs with the smallest held-out keys. Keys do not depend on the
division of the text into spans.

The scan writes the pairs with keys below a limit. The limit is estimated, because the number of
pairs that the filters drop is not known before the scan. If too few pairs are left, `plan.py` and
`held_out.py` call `scan` again with a higher limit.

The normal form of a sentence is the sentence without case, punctuation and spaces. Later steps drop
a training pair if one of its sentences has the same normal form as a sentence that was taken from
the training text for a held-out set.
"""

# In shapes, N is the number of pairs of a chunk that were not dropped.

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import xxhash

from nmt.config import PreprocessConfig, SplitBy
from nmt.preprocess.characters import normal_form
from nmt.preprocess.chunks import Chunk, Span
from nmt.preprocess.clean import clean
from nmt.preprocess.clean_chunk import CleanChunk, PairCounts, Scores
from nmt.preprocess.duplicates import HashWriter, hash_compared_unit, hash_normal_forms
from nmt.preprocess.filters import drop_by_text
from nmt.preprocess.workspace import Job, Task, run_stage
from nmt.runtime.files import replace_file

Keys = np.ndarray[Any, np.dtype[np.uint64]]
NUM_KEYS = 1 << 64  # number of possible keys, which start at 0
MAX_KEY = NUM_KEYS - 1  # the largest limit that fits into uint64
_NUM_HALF_KEYS = 1 << 32  # possible values of the upper or lower half of a key


@dataclass(frozen=True)
class KeyLimits:
    """A scan writes the pairs whose key is less than the limit. A limit of 0 selects no pairs."""

    sample_below: int  # limit of sample keys, at most MAX_KEY
    held_out_below: int  # limit of held-out keys, at most NUM_KEYS, which is above all keys


def scan(job: Job, spans: Sequence[Span], stage: str, limits: KeyLimits) -> None:
    """Scan all spans that were not scanned in this stage yet. See `run_stage`.

    Writes a record of each span: the counts of its pairs and its candidates for held-out sets. In
    the plan folder, writes the pairs for the sample to `SPAN.pairs`, two lines each, and their
    sample keys to `SPAN.keys`.
    """
    run_stage(job, spans, stage, partial(_make_scan_task, limits=limits))


def _make_scan_task(job: Job, limits: KeyLimits) -> Task:
    """Return a function that scans one span and returns its record. See `scan`."""
    config = job.config
    drops_duplicates = config.filter.drops_duplicates

    def scan_span(span: Span, chunks: Iterator[Chunk]) -> dict[str, Any]:
        """Write sampled pairs, their keys, and hashes of all pairs. Returns the record."""
        sampled_keys = [np.empty(0, np.uint64)]  # `concatenate` needs an array
        candidates: list[tuple[int, str, str, str]] = []  # see `_find_candidates`
        counts = PairCounts()
        pair_file = job.work.plan / f"{span.name}.pairs"
        with (
            replace_file(pair_file) as temporary,
            temporary.open("w", encoding="utf-8", newline="\n") as stream,
            HashWriter(job.work.hashes, task=span.index_overall) as hash_writer,
        ):
            for raw_chunk in chunks:
                chunk = clean(raw_chunk, config, held_out=False)
                drop_by_text(chunk, config)
                counts.merge(chunk.counts)
                # numbers of the pairs in the corpus; `kept_rows` are their positions in `raw_chunk`
                pair_numbers = raw_chunk.first_pair + chunk.kept_rows  # (N,)
                keys = sample_keys(config.seed, span.corpus, pair_numbers)  # (N,)
                is_sampled = keys < np.uint64(limits.sample_below)  # (N,)
                sampled_keys.append(keys[is_sampled])
                for i in np.flatnonzero(is_sampled).tolist():
                    stream.write(f"{chunk.src[i]}\n{chunk.tgt[i]}\n")
                # (N, 2), in which `find_duplicates` later looks for held-out sentences
                form_hashes = None
                if limits.held_out_below:
                    src_forms = [normal_form(line) for line in chunk.src]
                    tgt_forms = [normal_form(line) for line in chunk.tgt]
                    candidates += _find_candidates(
                        chunk, src_forms, tgt_forms, limits.held_out_below, config
                    )
                    src_form_hashes = hash_normal_forms(src_forms)
                    tgt_form_hashes = hash_normal_forms(tgt_forms)
                    form_hashes = np.stack([src_form_hashes, tgt_form_hashes], axis=1)
                if drops_duplicates:
                    pair_hashes = hash_compared_unit(chunk.src, chunk.tgt, config.filter.duplicates)
                    rows = pair_numbers - span.first_pair  # (N,), indices in the span
                    scores = _scores_for_duplicates(chunk, config)
                    hash_writer.add_rows(pair_hashes, rows, form_hashes, scores)
        with replace_file(pair_file.with_suffix(".keys")) as temporary:
            np.concatenate(sampled_keys).tofile(temporary)
        return {"candidates": candidates, "pairs": vars(counts)}

    return scan_span


def _scores_for_duplicates(chunk: CleanChunk, config: PreprocessConfig) -> Scores | None:
    """Return the scores (N,) by which `find_duplicates` chooses among equal pairs, or None.

    If only other corpora have scores, the scores are -inf. Of equal pairs in several corpora, one
    with a score is then kept.
    """
    if chunk.scores is None and config.data.has_scores:
        return np.full(len(chunk.src), -np.inf)
    return chunk.scores


def _find_candidates(
    chunk: CleanChunk,
    src_forms: list[str],
    tgt_forms: list[str],
    limit: int,
    config: PreprocessConfig,
) -> Iterator[tuple[int, str, str, str]]:
    """Yield held-out key, corpus, source and target of the pairs with keys below `limit`.

    `src_forms` and `tgt_forms` are the normal forms of the sentences.
    """
    for i, (src_form, tgt_form) in enumerate(zip(src_forms, tgt_forms, strict=True)):
        key = held_out_key(src_form, tgt_form, config.data.split_by, config.seed)
        if key < limit and src_form and tgt_form:
            yield key, chunk.corpus, chunk.src[i], chunk.tgt[i]


def held_out_key(src_form: str, tgt_form: str, split_by: SplitBy, seed: int) -> int:
    """Return the held-out key of a pair with these normal forms.

    With `SplitBy.src` and `SplitBy.tgt`, a hash of that side is the upper half of the key and a
    hash of the other side the lower half. So the keys of all pairs with the same sentence on that
    side are next to each other, and the upper half decides whether they are below a limit.
    """
    if split_by is SplitBy.pair:
        return xxhash.xxh3_64_intdigest(f"{src_form}\n{tgt_form}".encode(), seed=seed)
    src_hash = xxhash.xxh3_64_intdigest(src_form.encode(), seed=seed)
    tgt_hash = xxhash.xxh3_64_intdigest(tgt_form.encode(), seed=seed)
    upper_hash = src_hash
    lower_hash = tgt_hash
    if split_by is SplitBy.tgt:
        upper_hash = tgt_hash
        lower_hash = src_hash
    upper_half = upper_hash // _NUM_HALF_KEYS
    return upper_half * _NUM_HALF_KEYS + lower_hash % _NUM_HALF_KEYS


def num_held_out_groups(keys: Iterable[int], split_by: SplitBy) -> int:
    """Count the keys, or with `SplitBy.src` and `SplitBy.tgt` the sentences of that side."""
    if split_by is SplitBy.pair:
        return len(set(keys))
    return len({key // _NUM_HALF_KEYS for key in keys})


def sample_keys(seed: int, corpus: str, pair_numbers: np.ndarray[Any, np.dtype[np.int64]]) -> Keys:
    """Return the sample keys (N,) of the pairs of a corpus with these numbers (N,).

    No two pairs of a corpus have the same key, since the mixing function of SplitMix64 (Steele et
    al., 2014) is a bijection.
    """
    digest = hashlib.blake2b(f"{seed} {corpus}".encode(), digest_size=8).digest()
    keys = pair_numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    keys += np.frombuffer(digest, dtype="<u8").astype(np.uint64)
    keys ^= keys >> np.uint64(30)
    keys *= np.uint64(0xBF58476D1CE4E5B9)
    keys ^= keys >> np.uint64(27)
    keys *= np.uint64(0x94D049BB133111EB)
    return keys ^ (keys >> np.uint64(31))
