"""Reads the whole training corpus once, where that is needed before anything can be encoded: draws
the sample that the tokenizer is trained on, finds duplicates, counts pairs for several machines.

The sample is the same whoever reads which part: each pair has a key that is a hash of the seed, the
corpus and its number there, and the sample are the pairs with the smallest keys (bottom-k sampling;
Cohen and Kaplan, 2007).
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from functools import partial
from itertools import count, groupby
from pathlib import Path
from typing import Any

import numpy as np

from nmt.config import Duplicates, PreprocessConfig, Step, TokenizerConfig
from nmt.data.tokenizer import Tokenizers, load_tokenizers, save_tokenizers
from nmt.data.vocabulary import open_tokenizers, train_tokenizers
from nmt.errors import DataError
from nmt.preprocess.characters import LineSet
from nmt.preprocess.chunks import ChunkReader, ShardTask, TaskChunk
from nmt.preprocess.clean import Rows, clean
from nmt.preprocess.duplicates import Hashes, HashWriter, find_duplicates, hash_duplicates
from nmt.preprocess.filters import drop_by_text
from nmt.preprocess.pool import WorkerPool, count_workers
from nmt.preprocess.sources import total_disk_bytes
from nmt.preprocess.workspace import Job
from nmt.progress import Progress

log = logging.getLogger(__name__)
_PLAN, _SCANNED = "plan.json", "scanned.json"
Keys = np.ndarray[Any, np.dtype[np.uint64]]
Pair = tuple[str, str]
_SPARE = 1.2  # how far the sample may outgrow its size before it is cut
_MUCH_TEXT = 1 << 20  # bytes; less is trained on as fast as a process starts

CorpusPlan = tuple[Tokenizers, dict[str, int] | None]
"""What is known before encoding: tokenizers, and the pairs of each corpus if they were counted."""


def make_plan(job: Job) -> CorpusPlan:
    """Return the plan, made now or by an earlier run; the work folder keeps it."""
    config, folder = job.config, job.work.plan
    if (folder / _PLAN).exists():
        return read_plan(job)
    num_pairs: Mapping[str, int] | None = None
    if config.tokenizer.model is None:
        num_pairs = _scan(job)
        log.info("training the tokenizer")
        # SentencePiece ignores Ctrl-C and gives no memory back
        is_long = sum(path.stat().st_size for path in _sample_paths(folder)) > _MUCH_TEXT
        with WorkerPool[Path, None](int(is_long), partial(partial, _train, config)) as pool:
            list(pool.map([folder]))
    else:
        save_tokenizers(folder, open_tokenizers(config))
        if drops_duplicates(config):
            num_pairs = _scan(job)
        elif config.step is Step.plan:
            reader = TaskReader(job)
            list(reader.read(lambda task: False))  # yields nothing, and counts
            num_pairs = reader.num_pairs
    if drops_duplicates(config):
        find_duplicates(job.work.hashes)
    job.work.write(folder / _PLAN, {"num_pairs": num_pairs})
    for path in _sample_paths(folder):
        path.unlink(missing_ok=True)
    return read_plan(job)


def read_plan(job: Job) -> CorpusPlan:
    """Read the plan that an earlier run or `step=plan` has made."""
    content = json.loads((job.work.plan / _PLAN).read_text(encoding="utf-8"))
    return load_tokenizers(job.work.plan), content["num_pairs"]


def drops_duplicates(config: PreprocessConfig) -> bool:
    """Return whether pairs that came before are dropped."""
    return config.filter.duplicates is not Duplicates.keep


def _train(config: PreprocessConfig, folder: Path) -> None:
    """Train tokenizers on the sample in `folder`, and write them there."""
    src, tgt = (path.open(encoding="utf-8", newline="\n") for path in _sample_paths(folder))
    with src, tgt:
        sides = ((line.removesuffix("\n") for line in stream) for stream in (src, tgt))
        save_tokenizers(folder, train_tokenizers(config, *sides))


def _sample_paths(folder: Path) -> tuple[Path, Path]:
    return folder / "sample.src", folder / "sample.tgt"


_Scanned = tuple[tuple[Keys, list[Pair]], tuple[Hashes, Rows] | None]


def _scan_chunk(
    config: PreprocessConfig, taken: LineSet | None, item: tuple[TaskChunk, np.uint64]
) -> _Scanned:
    """Return the candidates for the sample in a chunk, those with keys below a limit; and the
    hashes of its pairs, with their rows in the task, where duplicates are dropped.
    """
    part, limit = item
    chunk = part.chunk
    cleaned = clean(chunk, config, held_out=False)
    drop_by_text(cleaned, config, taken=taken)
    numbers = chunk.first_pair + cleaned.rows
    keys = sample_keys(config.seed, part.task.corpus, numbers)
    chosen = np.flatnonzero(keys < limit)
    candidates = keys[chosen], [(cleaned.src[i], cleaned.tgt[i]) for i in chosen.tolist()]
    if not drops_duplicates(config):
        return candidates, None
    hashes = hash_duplicates(cleaned.src, cleaned.tgt, config.filter.duplicates)
    return candidates, (hashes, cleaned.rows + part.rows.start)


def _scan(job: Job) -> dict[str, int]:
    """Write sample and hashes, unless an earlier run has; return the pairs of each corpus."""
    scanned, tokenizer = job.work.plan / _SCANNED, job.config.tokenizer
    if scanned.exists():
        num_pairs: dict[str, int] = json.loads(scanned.read_text(encoding="utf-8"))
        return num_pairs
    sample, reader = Sample(sample_size(tokenizer)), TaskReader(job)
    items = ((part, sample.limit) for part in reader.read(lambda task: True))
    num_workers = count_workers(job.config.num_threads)
    make = partial(partial, _scan_chunk, job.config, job.taken)
    with (
        reader.progress("plan") as progress,
        WorkerPool[tuple[TaskChunk, np.uint64], _Scanned](num_workers, make) as pool,
    ):
        for task, group in groupby(pool.map(items), key=lambda pair: pair[0][0].task):
            with HashWriter(job.work.hashes, task.order) as hashes:
                for (part, _), (candidates, hashed) in group:
                    sample.add(*candidates)
                    if hashed is not None:
                        hashes.add(*hashed)
                    count_chunk(progress, part)
        progress.finish()
    pairs = sample.take()
    if tokenizer.model is None and not pairs:
        raise DataError("the training corpus is empty: no pair has text on both sides")
    for side, path in enumerate(_sample_paths(job.work.plan)):
        with path.open("w", encoding="utf-8", newline="\n") as stream:
            stream.writelines(f"{pair[side]}\n" for pair in pairs)
    job.work.write(scanned, reader.num_pairs)
    return reader.num_pairs


def sample_size(config: TokenizerConfig) -> int:
    """Return the number of pairs that give a tokenizer at most `max_sentences` lines."""
    if config.model is not None:
        return 0
    return config.max_sentences if config.separate else max(1, config.max_sentences // 2)


def sample_keys(seed: int, corpus: str, numbers: np.ndarray[Any, np.dtype[np.int64]]) -> Keys:
    """Return the keys of the pairs with these numbers in their corpus, (N,).

    The mixing function is that of SplitMix64 (Steele et al., 2014), a bijection: no two pairs of a
    corpus have the same key.
    """
    digest = hashlib.blake2b(f"{seed} {corpus}".encode(), digest_size=8).digest()
    keys = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    keys += np.frombuffer(digest, dtype="<u8").astype(np.uint64)
    keys ^= keys >> np.uint64(30)
    keys *= np.uint64(0xBF58476D1CE4E5B9)
    keys ^= keys >> np.uint64(27)
    keys *= np.uint64(0x94D049BB133111EB)
    return keys ^ (keys >> np.uint64(31))


class Sample:
    """The pairs with the `size` smallest keys among those that were added, in that order."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._keys: Keys = np.empty(0, dtype=np.uint64)
        self._pairs: list[Pair] = []
        self.limit = np.uint64(np.iinfo(np.uint64).max if size else 0)
        """Pairs with this key or a larger one need not be added; it falls as the sample fills."""

    def add(self, keys: Keys, pairs: list[Pair]) -> None:
        """Add pairs with their keys."""
        self._keys = np.concatenate([self._keys, keys])
        self._pairs += pairs
        if len(self._pairs) > _SPARE * self._size + 1000:
            self.take()

    def take(self) -> list[Pair]:
        """Return the sampled pairs, in the order of adding."""
        if len(self._pairs) > self._size:
            self.limit = np.partition(self._keys, self._size)[self._size]
            stay = np.flatnonzero(self._keys < self.limit)
            self._keys = self._keys[stay]
            self._pairs = [self._pairs[i] for i in stay.tolist()]
        return self._pairs


class TaskReader:
    """Reads the input of tasks in a pass over all corpora; `num_pairs` counts those of each."""

    def __init__(self, job: Job, num_pairs: Mapping[str, int] | None = None) -> None:
        self._job, self._known = job, num_pairs
        self.num_pairs: dict[str, int] = {}

    def read(self, is_wanted: Callable[[ShardTask], bool]) -> Iterator[TaskChunk]:
        """Yield the input of the tasks that are wanted, and pass over that of others; with pairs
        counted before, stop a corpus after the last task that is wanted.
        """
        size = self._job.config.shard_pairs
        disk_bytes = 0  # of the corpora that are done
        for corpus, sources in self._job.sources.items():
            numbers: Iterable[int] = count()
            if self._known is not None:
                tasks = filter(is_wanted, self._job.tasks({corpus: self._known[corpus]}))
                numbers = range(max((task.number for task in tasks), default=-1) + 1)
            num_pairs = 0
            with closing(ChunkReader(sources, disk_bytes)) as reader:
                for task in (self._job.task(corpus, number) for number in numbers):
                    wanted = is_wanted(task)
                    for chunk in reader.read(size):
                        num_pairs += chunk.num_pairs
                        if wanted:
                            yield TaskChunk(task, chunk)
                    if num_pairs < task.first_pair + size:
                        break
            self.num_pairs[corpus] = self._known[corpus] if self._known else num_pairs
            disk_bytes += total_disk_bytes(sources)

    def progress(self, name: str) -> Progress:
        """Start to show how far a pass over all corpora is."""
        disk_bytes = sum(map(total_disk_bytes, self._job.sources.values()))
        return Progress(name, "pairs", total_bytes=disk_bytes)


def count_chunk(progress: Progress, part: TaskChunk) -> None:
    """Count a chunk as done."""
    text_bytes = sum(map(len, part.chunk.raw))
    progress.update(part.chunk.num_pairs, read_bytes=part.chunk.disk_bytes, text_bytes=text_bytes)
