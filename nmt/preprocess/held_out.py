"""Reads validation and test sets, or takes them out of the training text.

Which pairs they are depends on the text alone: those with the smallest hashes whose sentences are
all new. A training pair with a sentence of theirs on either side, the same but for case,
punctuation and spaces, is left out of training, in corpora of every direction.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from nmt.data.languages import corpus_direction
from nmt.errors import ConfigError, DataError
from nmt.preprocess.characters import LineSet, normal_form
from nmt.preprocess.chunks import Chunk, Format, Source, Span, read_chunks
from nmt.preprocess.clean import Cleaned, clean
from nmt.preprocess.filters import drop_by_text
from nmt.preprocess.workspace import Job, Task, read_records, run_stage

log = logging.getLogger(__name__)
_ORDER = ("test", "valid")  # more validation pairs leave the test set as it is
_TAKEN, _STAGE = "taken.json", "hold out"  # the former once all is chosen
_NUM_KEYS = 1 << 64
_SPARE = 1000  # candidates beyond twice the number of pairs: some have a sentence in common
_Pair = tuple[str, str, str]  # corpus, source, target


def take_held_out(job: Job, spans: Sequence[Span]) -> Job:
    """Return the job with the sets that are taken from the training text, which lie in the work
    folder; choose them in one pass over the text unless that is done.

    Raises a `ConfigError` where the text has too few pairs.
    """
    wanted = {split: getattr(job.config.data, split).num_pairs for split in _ORDER}
    wanted = {split: number for split, number in wanted.items() if number is not None}
    marker = job.work.plan / _TAKEN
    if not wanted:
        return job
    if not marker.exists():
        taken = _choose(_candidates(job, spans, wanted), wanted)
        for split, pairs in taken.items():
            for corpus in {pair[0] for pair in pairs}:
                rows = [pair for pair in pairs if pair[0] == corpus]
                for side, path in enumerate(_paths(job, split, corpus), start=1):
                    text = "".join(f"{row[side]}\n" for row in rows)
                    path.write_text(text, encoding="utf-8", newline="\n")
        lines = sorted({text for pairs in taken.values() for pair in pairs for text in pair[1:]})
        names = {split: sorted({pair[0] for pair in pairs}) for split, pairs in taken.items()}
        job.work.write(marker, {"corpora": names, "lines": lines})
    known = json.loads(marker.read_text(encoding="utf-8"))
    held_out = dict(job.held_out)
    for split, corpora in known["corpora"].items():
        for corpus in corpora:
            tags = corpus_direction(job.config.data, corpus).tags
            shown = f"{split} taken from train"
            paths = _paths(job, split, corpus)
            source = Source(corpus, Format.pair, paths, (shown, shown), tags=tags)
            held_out[split] = sorted([*held_out[split], source], key=lambda s: s.corpus)
    return replace(job, held_out=held_out)


def read_taken(job: Job) -> LineSet | None:
    """Return the sentences of the sets that were taken out of the training text, if any were."""
    marker = job.work.plan / _TAKEN
    if not marker.exists():
        return None
    return LineSet(json.loads(marker.read_text(encoding="utf-8"))["lines"])


def _paths(job: Job, split: str, corpus: str) -> tuple[Path, ...]:
    name = "-".join(filter(None, ["taken", split, corpus]))
    return tuple(job.work.plan / f"{name}.{side}" for side in ("src", "tgt"))


def _start_search(job: Job, limit: int) -> Task:
    """Return the task that finds the pairs of a span whose keys are below the limit."""
    config = job.config

    def find(span: Span, chunks: Iterator[Chunk]) -> dict[str, Any]:
        found = []
        for chunk in chunks:
            cleaned = clean(chunk, config, held_out=False)
            drop_by_text(cleaned, config)
            for src, tgt in zip(cleaned.src, cleaned.tgt, strict=True):
                forms = normal_form(src), normal_form(tgt)
                key = xxhash.xxh3_64_intdigest("\n".join(forms).encode(), seed=config.seed)
                if key < limit and all(forms):
                    found.append((key, span.corpus, src, tgt))
        return {"found": found}

    return find


def _candidates(job: Job, spans: Sequence[Span], wanted: Mapping[str, float]) -> dict[int, _Pair]:
    """Return the pairs with the smallest keys: as many as may be needed, or a share of all."""
    total, num_pairs = sum(wanted.values()), sum(span.num_pairs for span in spans)
    size, limit = 2 * int(total) + _SPARE, int(total * _NUM_KEYS)
    if total >= 1:
        limit = min(_NUM_KEYS, 2 * size * _NUM_KEYS // num_pairs)
    found = dict[int, _Pair]()
    for stage, end in ((_STAGE, limit), (_STAGE + " again", _NUM_KEYS)):
        run_stage(job, spans, stage, partial(_start_search, limit=end))
        for record in read_records(job, spans, stage):
            for key, *pair in record["found"]:
                found.setdefault(key, tuple(pair))
        if total < 1 or len(found) >= size or end == _NUM_KEYS:
            break
    return found


def _choose(candidates: Mapping[int, _Pair], wanted: Mapping[str, float]) -> dict[str, list[_Pair]]:
    """Give each split its pairs, in the order of their keys, no sentence twice."""
    taken: dict[str, list[_Pair]] = {split: [] for split in wanted}
    seen: set[str] = set()
    keys, end = iter(sorted(candidates)), 0.0
    for split, number in wanted.items():
        end += number * _NUM_KEYS  # of a share
        for key in keys:
            pair = candidates[key]
            forms = {normal_form(text) for text in pair[1:]}
            if not forms & seen:
                seen |= forms
                taken[split].append(pair)
            if len(taken[split]) == number or (number < 1 and key >= end):
                break
        found = len(taken[split])
        if found < number or not found:
            raise ConfigError(
                f"data.{split}.num_pairs={number:g}: the training text has only {found} such pairs "
                "with sentences of their own; give fewer, or another text"
            )
        log.info("took %d pairs for %s out of the training text", found, split)
    return taken


def read_held_out(job: Job) -> dict[str, list[Cleaned]]:
    """Read validation and test set, of which all pairs stay; an empty one is a `DataError`."""
    splits = {}
    for split, sources in job.held_out.items():
        chunks = read_chunks(sources)
        splits[split] = [clean(chunk, job.config, held_out=True) for chunk in chunks]
        if not splits[split]:
            raise DataError(
                f"the {split} corpus is empty; give data.{split} a file with sentence pairs"
            )
    return splits


def text_of(chunks: list[Cleaned]) -> tuple[list[str], list[str]]:
    """Return all sources and all targets."""
    src = [line for chunk in chunks for line in chunk.src]
    return src, [line for chunk in chunks for line in chunk.tgt]
