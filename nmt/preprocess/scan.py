"""Read the training text once, to collect everything that must be known before it is encoded:
a sample for the tokenizer, the hashes of duplicates, and candidates for held-out sets.

Which pairs a task writes depends only on keys, so that the result is the same for every division
of the work. The sample consists of the pairs with the smallest keys, which are hashes of the seed,
the corpus and the number of the pair there (bottom-k sampling; Cohen and Kaplan, 2007). Candidates
for held-out sets are the pairs with the smallest hashes of their text.

A task writes the pairs whose keys are below a limit that probably leaves enough of them. If more
than half of the pairs are dropped, too few may be left, and the text is scanned once more.
"""

# N pairs of a chunk that are kept

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import xxhash

from nmt.preprocess.characters import normal_form
from nmt.preprocess.chunks import Chunk, Span
from nmt.preprocess.clean import CleanChunk, PairCounts, clean
from nmt.preprocess.duplicates import HashWriter, hash_duplicates, hash_forms
from nmt.preprocess.filters import drop_by_text
from nmt.preprocess.workspace import Job, Task, run_stage
from nmt.runtime.files import replace_file

Keys = np.ndarray[Any, np.dtype[np.uint64]]
ALL_KEYS = (1 << 64) - 1
NUM_KEYS = 1 << 64


@dataclass(frozen=True)
class ScanLimits:
    """The keys below which pairs are written; 0 writes none."""

    sample: int
    held_out: int


def scan(job: Job, spans: Sequence[Span], stage: str, limits: ScanLimits) -> None:
    """Scan all spans that have no record of this stage yet.

    The record of a span holds the counts of its pairs and its candidates for held-out sets. The
    sample lies in `SPAN.pairs` and `SPAN.keys` of the plan folder.
    """
    run_stage(job, spans, stage, partial(_start_scan, limits=limits))


def _start_scan(job: Job, limits: ScanLimits) -> Task:
    """Return the task that scans one span."""
    config = job.config
    drops_duplicates = config.filter.drops_duplicates

    def scan_span(span: Span, chunks: Iterator[Chunk]) -> dict[str, Any]:
        keys = [np.empty(0, np.uint64)]
        candidates: list[tuple[int, str, str, str]] = []
        counts = PairCounts()
        path = job.work.plan / f"{span.name}.pairs"
        with (
            replace_file(path) as temporary,
            temporary.open("w", encoding="utf-8", newline="\n") as stream,
            HashWriter(job.work.hashes, span.order) as hashes,
        ):
            for raw_chunk in chunks:
                chunk = clean(raw_chunk, config, held_out=False)
                drop_by_text(chunk, config)
                counts.merge(chunk.counts)
                numbers = raw_chunk.first_pair + chunk.rows  # in the corpus
                chunk_keys = sample_keys(config.seed, span.corpus, numbers)
                sampled = np.flatnonzero(chunk_keys < np.uint64(limits.sample))
                keys.append(chunk_keys[sampled])
                for i in sampled.tolist():
                    stream.write(f"{chunk.src[i]}\n{chunk.tgt[i]}\n")
                forms = None
                if limits.held_out:
                    src_forms = [normal_form(line) for line in chunk.src]
                    tgt_forms = [normal_form(line) for line in chunk.tgt]
                    candidates += _find_candidates(
                        chunk, src_forms, tgt_forms, limits.held_out, config.seed
                    )
                    forms = hash_forms(src_forms, tgt_forms)
                if drops_duplicates:
                    values = hash_duplicates(chunk.src, chunk.tgt, config.filter.duplicates)
                    hashes.add_rows(values, numbers - span.first_pair, forms)
        with replace_file(path.with_suffix(".keys")) as temporary:
            np.concatenate(keys).tofile(temporary)
        return {"candidates": candidates, "pairs": vars(counts)}

    return scan_span


def _find_candidates(
    chunk: CleanChunk, src_forms: list[str], tgt_forms: list[str], limit: int, seed: int
) -> Iterator[tuple[int, str, str, str]]:
    """Yield key, corpus, source and target of the pairs with keys below the limit."""
    for i, (src_form, tgt_form) in enumerate(zip(src_forms, tgt_forms, strict=True)):
        key = xxhash.xxh3_64_intdigest(f"{src_form}\n{tgt_form}".encode(), seed=seed)
        if key < limit and src_form and tgt_form:
            yield key, chunk.chunk.source.corpus, chunk.src[i], chunk.tgt[i]


def sample_keys(seed: int, corpus: str, numbers: np.ndarray[Any, np.dtype[np.int64]]) -> Keys:
    """Return the keys of the pairs with these numbers in their corpus, (N,).

    The mixing function of SplitMix64 (Steele et al., 2014) is a bijection: no two pairs of a corpus
    have the same key.
    """
    digest = hashlib.blake2b(f"{seed} {corpus}".encode(), digest_size=8).digest()
    keys = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    keys += np.frombuffer(digest, dtype="<u8").astype(np.uint64)
    keys ^= keys >> np.uint64(30)
    keys *= np.uint64(0xBF58476D1CE4E5B9)
    keys ^= keys >> np.uint64(27)
    keys *= np.uint64(0x94D049BB133111EB)
    return keys ^ (keys >> np.uint64(31))
