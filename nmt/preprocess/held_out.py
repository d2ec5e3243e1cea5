"""Takes validation and test sets out of the training text.

Which pairs they are depends on the text alone: those with the smallest hashes whose sentences are
all new. A training pair with a sentence of theirs on either side, the same but for case,
punctuation and spaces, is left out of training, in corpora of every direction.
"""

# N pairs of a chunk

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import xxhash

from nmt.config import PreprocessConfig
from nmt.data.languages import corpus_direction
from nmt.errors import ConfigError
from nmt.preprocess.characters import LineSet, normal_form
from nmt.preprocess.chunks import Format, Source, TaskChunk
from nmt.preprocess.clean import clean
from nmt.preprocess.filters import drop_by_text
from nmt.preprocess.plan import TaskReader, count_chunk
from nmt.preprocess.pool import WorkerPool, count_workers
from nmt.preprocess.workspace import Job

log = logging.getLogger(__name__)
_ORDER = ("test", "valid")  # more validation pairs leave the test set as it is
_TAKEN = "taken.json"  # in the work folder, once all is chosen
_NUM_KEYS = 1 << 64
_SPARE = 1000  # candidates beyond twice the number of pairs: some have a sentence in common
_Pair = tuple[str, str, str]  # corpus, source, target
_Item = tuple[TaskChunk, int]  # and the key below which a pair is a candidate
_Found = list[tuple[int, _Pair]]


def take_held_out(job: Job) -> Job:
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
        taken = _choose(_candidates(job, wanted), wanted)
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
        sources = [_source(job, split, corpus) for corpus in corpora]
        held_out[split] = sorted([*held_out[split], *sources], key=lambda source: source.corpus)
    return replace(job, held_out=held_out, taken=LineSet(known["lines"]))


def _source(job: Job, split: str, corpus: str) -> Source:
    names, tags = (f"{split} taken from train",) * 2, corpus_direction(job.config.data, corpus).tags
    return Source(corpus, Format.pair, _paths(job, split, corpus), names, tags=tags)


def _paths(job: Job, split: str, corpus: str) -> tuple[Path, ...]:
    name = "-".join(filter(None, ["taken", split, corpus]))
    return tuple(job.work.plan / f"{name}.{side}" for side in ("src", "tgt"))


def _find(config: PreprocessConfig, item: _Item) -> _Found:
    """Return the pairs of a chunk whose keys are below the limit, with these keys."""
    part, limit = item
    cleaned = clean(part.chunk, config, held_out=False)
    drop_by_text(cleaned, config)
    found = []
    for src, tgt in zip(cleaned.src, cleaned.tgt, strict=True):
        forms = normal_form(src), normal_form(tgt)
        key = xxhash.xxh3_64_intdigest("\n".join(forms).encode(), seed=config.seed)
        if key < limit and all(forms):
            found.append((key, (part.task.corpus, src, tgt)))
    return found


def _candidates(job: Job, wanted: Mapping[str, float]) -> dict[int, _Pair]:
    """Return the pairs with the smallest keys: as many as may be needed, or a share of all."""
    total = sum(wanted.values())
    size, limit = 2 * int(total) + _SPARE, _NUM_KEYS
    if total < 1:
        size, limit = sys.maxsize, int(total * _NUM_KEYS)
    reader, found = TaskReader(job), dict[int, _Pair]()

    def items() -> Iterator[_Item]:
        for part in reader.read(lambda task: True):
            yield part, limit

    make = partial(partial, _find, job.config)
    with (
        reader.progress("hold out") as progress,
        WorkerPool[_Item, _Found](count_workers(job.config.num_threads), make) as pool,
    ):
        for (part, _), candidates in pool.map(items()):
            for key, pair in candidates:
                found.setdefault(key, pair)
            if len(found) > 2 * size:
                limit = sorted(found)[size]
                found = {key: pair for key, pair in found.items() if key < limit}
            count_chunk(progress, part)
        progress.finish()
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
