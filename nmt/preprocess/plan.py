"""Looks at the whole training corpus once, where that is needed before anything can be encoded:
draws the sample that the tokenizer is trained on, finds duplicates, counts pairs.

With a tokenizer that is there and duplicates that stay nothing is read but, for several machines,
to count pairs.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

import numpy as np

from nmt.config import Duplicates, PreprocessConfig, Step
from nmt.data.tokenizer import Tokenizers, load_tokenizers, save_tokenizers
from nmt.data.vocabulary import open_tokenizers, train_tokenizers
from nmt.errors import DataError
from nmt.preprocess.cleaned import Rows
from nmt.preprocess.cleaning import clean
from nmt.preprocess.duplicates import Hashes, UnitHashes, find_duplicates, hash_pairs
from nmt.preprocess.job import Job
from nmt.preprocess.pieces import Piece, Unit
from nmt.preprocess.pool import WorkerPool, count_workers
from nmt.preprocess.progress import Progress
from nmt.preprocess.sample import Keys, Sample, sample_keys, sample_size
from nmt.preprocess.units import UnitReader, note, start_progress

log = logging.getLogger(__name__)
_PLAN, _SCANNED = "plan.json", "scanned.json"


@dataclass(frozen=True)
class Plan:
    """What is known before encoding."""

    tokenizers: Tokenizers
    num_pairs: Mapping[str, int] | None  # of each corpus; None where nobody has counted


def make_plan(job: Job) -> Plan:
    """Return the plan, made now or by an earlier run; the work folder keeps it."""
    if (job.work.plan / _PLAN).exists():
        return read_plan(job)
    num_pairs: Mapping[str, int] | None
    if job.config.tokenizer.model is None:
        num_pairs = _draw_sample(job)
        _train(job)
    else:
        save_tokenizers(job.work.plan, open_tokenizers(job.config))
        num_pairs = _look(job)
    if drops_duplicates(job.config):
        find_duplicates(job.work.hashes)
    job.work.write(job.work.plan / _PLAN, {"num_pairs": num_pairs})
    for path in _sample_paths(job.work.plan):
        path.unlink(missing_ok=True)
    return read_plan(job)


def read_plan(job: Job) -> Plan:
    """Read the plan that an earlier run or `step=plan` has made."""
    content = json.loads((job.work.plan / _PLAN).read_text(encoding="utf-8"))
    return Plan(load_tokenizers(job.work.plan), content["num_pairs"])


def drops_duplicates(config: PreprocessConfig) -> bool:
    """Say whether pairs that came before are dropped."""
    return config.filter.duplicates is not Duplicates.keep


def _look(job: Job) -> dict[str, int] | None:
    """Do what is due when no tokenizer is to be trained; return the pairs of each corpus."""
    if drops_duplicates(job.config):
        return _scan(job, 0)[1]
    if job.config.step is not Step.plan:
        return None
    reader = UnitReader(job)
    for _ in reader.read(lambda unit: False):
        pass
    return reader.num_pairs


def _draw_sample(job: Job) -> dict[str, int]:
    """Write the sample to the work folder, unless it is there; return the pairs of each corpus."""
    scanned = job.work.plan / _SCANNED
    if scanned.exists():
        num_pairs: dict[str, int] = json.loads(scanned.read_text(encoding="utf-8"))
        return num_pairs
    sample, num_pairs = _scan(job, sample_size(job.config.tokenizer))
    src, tgt = sample.take()
    if not src:
        raise DataError("the training corpus is empty: no pair has text on both sides")
    for path, lines in zip(_sample_paths(job.work.plan), (src, tgt), strict=True):
        with path.open("w", encoding="utf-8", newline="\n") as stream:
            stream.writelines(f"{line}\n" for line in lines)
    job.work.write(scanned, num_pairs)
    return num_pairs


def _train(job: Job) -> None:
    """Train in a process of its own: SentencePiece does not heed Ctrl-C, nor give memory back."""
    log.info("training the tokenizer")
    with WorkerPool[Path, None](1, partial(Trainer, job.config)) as pool:
        list(pool.map([job.work.plan]))


class Trainer:
    """Trains tokenizers on the sample in a folder, and writes them there."""

    def __init__(self, config: PreprocessConfig) -> None:
        self._config = config

    def __call__(self, folder: Path) -> None:
        """Write `tokenizer.model`, or two models."""
        src, tgt = (_lines(path) for path in _sample_paths(folder))
        save_tokenizers(folder, train_tokenizers(self._config, src, tgt))


def _sample_paths(folder: Path) -> tuple[Path, Path]:
    return folder / "sample.src", folder / "sample.tgt"


def _lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", newline="\n") as stream:
        for line in stream:
            yield line.removesuffix("\n")


@dataclass(frozen=True)
class _Task:
    piece: Piece
    limit: np.uint64  # of the keys in the sample so far


@dataclass(frozen=True)
class _Seen:
    """What the plan needs of a chunk."""

    keys: Keys
    src: list[str]
    tgt: list[str]
    rows: Rows
    hashes: Hashes | None


class Scanner:
    """Picks candidates for the sample from chunks, and hashes pairs."""

    def __init__(self, config: PreprocessConfig) -> None:
        self._config = config

    def __call__(self, task: _Task) -> _Seen:
        """Return what the plan needs of a chunk."""
        chunk, config = task.piece.chunk, self._config
        cleaned = clean(chunk, config, held_out=False)
        numbers = chunk.first_pair + cleaned.rows
        keys = sample_keys(config.seed, task.piece.unit.corpus, numbers)
        chosen = np.flatnonzero(keys < task.limit)
        src, tgt, kind = cleaned.src, cleaned.tgt, config.filter.duplicates
        return _Seen(
            keys[chosen],
            [src[i] for i in chosen.tolist()],
            [tgt[i] for i in chosen.tolist()],
            cleaned.rows,
            hash_pairs(src, tgt, kind) if drops_duplicates(config) else None,
        )


def _scan(job: Job, size: int) -> tuple[Sample, dict[str, int]]:
    """Read the corpora: return a sample of `size` pairs, and the number of pairs of each."""
    sample, reader = Sample(size), UnitReader(job)
    tasks = (_Task(piece, sample.limit) for piece in reader.read(lambda unit: True))
    with (
        start_progress(job, "plan") as progress,
        WorkerPool[_Task, _Seen](
            count_workers(job.config.num_threads), partial(Scanner, job.config)
        ) as pool,
    ):
        done = pool.map(tasks)
        for unit, group in groupby(done, key=lambda pair: pair[0].piece.unit):
            _note_unit(job, unit, group, sample, progress)
    return sample, reader.num_pairs


def _note_unit(
    job: Job,
    unit: Unit,
    group: Iterable[tuple[_Task, _Seen]],
    sample: Sample,
    progress: Progress,
) -> None:
    with ExitStack() as stack:
        if drops_duplicates(job.config):
            hashes = stack.enter_context(UnitHashes(job.work.hashes, unit.order))
        for task, seen in group:
            sample.add(seen.keys, seen.src, seen.tgt)
            if seen.hashes is not None:
                hashes.add(seen.rows + task.piece.rows.start, seen.hashes)
            note(progress, task.piece)
