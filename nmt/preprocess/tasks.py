"""One run of preprocessing: its settings, sources and work folder, and its input cut into the tasks
that each write a shard.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import chain, count
from typing import Any

from nmt.config import PreprocessConfig, resolve
from nmt.preprocess.chunks import ChunkReader, ShardTask, Source, TaskChunk
from nmt.preprocess.sources import total_disk_bytes
from nmt.preprocess.workspace import Workspace
from nmt.progress import Progress

_FORMAT = 1  # of the work folder
_MOST_TASKS = 1_000_000  # of a corpus
# settings that change no byte of a shard; weights and temperature stand in the index alone
_WITHOUT_EFFECT = ("data_dir", "num_threads", "step", "shard", "report_only")


@dataclass(frozen=True)
class Job:
    """What a run is about."""

    config: PreprocessConfig
    work: Workspace
    sources: Mapping[str, list[Source]]  # of the training corpora, by name in order
    held_out: Mapping[str, list[Source]]  # of valid and test

    def task(self, corpus: str, number: int) -> ShardTask:
        """Return a task of a corpus."""
        order = list(self.sources).index(corpus) * _MOST_TASKS + number
        return ShardTask(corpus, number, number * self.config.shard_pairs, order)

    def tasks(self, num_pairs: Mapping[str, int]) -> list[ShardTask]:
        """Return the tasks of corpora that have so many pairs."""
        return [
            self.task(corpus, number)
            for corpus, size in num_pairs.items()
            for number in range(-(-size // self.config.shard_pairs))
        ]

    def fingerprint(self) -> dict[str, Any]:
        """Return what decides the bytes of the data folder: settings, inputs and given models."""
        settings = asdict(self.config)
        for name in _WITHOUT_EFFECT:
            del settings[name]
        del settings["data"]["made_by"], settings["data"]["temperature"]
        for corpus in settings["data"]["corpora"].values():
            del corpus["weight"]
        given = [self.config.tokenizer.model, self.config.tokenizer.tgt_model]
        models = [path for name in given if name and (path := resolve(name)).is_file()]
        sources = chain(*self.sources.values(), *self.held_out.values())
        status = {str(path): path.stat() for source in sources for path in source.paths}
        return {
            "format": _FORMAT,
            **settings,
            "inputs": {path: [s.st_size, s.st_mtime_ns] for path, s in status.items()},
            "models": [hashlib.sha256(path.read_bytes()).hexdigest() for path in models],
        }


class TaskReader:
    """Reads the input of tasks in one pass over all corpora; `num_pairs` is at the end how many
    pairs each corpus has.
    """

    def __init__(self, job: Job, num_pairs: Mapping[str, int] | None = None) -> None:
        self._job, self._known = job, num_pairs
        self.num_pairs: dict[str, int] = {}
        self._disk_bytes = 0  # of the corpora that are done

    def count_pairs(self) -> dict[str, int]:
        """Return the number of pairs of each corpus, for which all are read."""
        for _ in self.read(lambda task: False):
            pass
        return self.num_pairs

    def read(self, is_wanted: Callable[[ShardTask], bool]) -> Iterator[TaskChunk]:
        """Yield the input of the tasks that are wanted, and pass over that of others; with pairs
        counted before, stop a corpus after the last task that is wanted.
        """
        for corpus, sources in self._job.sources.items():
            last = None
            if self._known is not None:
                tasks = filter(is_wanted, self._job.tasks({corpus: self._known[corpus]}))
                last = max((task.number for task in tasks), default=-1)
            with ChunkReader(sources) as reader:
                self.num_pairs[corpus] = 0
                yield from self._read_corpus(corpus, reader, is_wanted, last)
            if self._known is not None:
                self.num_pairs[corpus] = self._known[corpus]
            self._disk_bytes += total_disk_bytes(sources)

    def _read_corpus(
        self,
        corpus: str,
        reader: ChunkReader,
        is_wanted: Callable[[ShardTask], bool],
        last: int | None,
    ) -> Iterator[TaskChunk]:
        size = self._job.config.shard_pairs
        for number in count():
            if last is not None and number > last:
                return
            task, num_pairs = self._job.task(corpus, number), 0
            if is_wanted(task):
                for chunk in reader.read(size):
                    num_pairs += chunk.num_pairs
                    yield TaskChunk(task, chunk, self._disk_bytes + chunk.disk_bytes)
            else:
                num_pairs = reader.skip(size)
            self.num_pairs[corpus] += num_pairs
            if num_pairs < size:
                return

    def progress(self, name: str) -> Progress:
        """Start to show how far a pass over all corpora is."""
        disk_bytes = sum(map(total_disk_bytes, self._job.sources.values()))
        return Progress(name, "pairs", total_bytes=disk_bytes)


def count_chunk(progress: Progress, part: TaskChunk) -> None:
    """Count a chunk as done."""
    text_bytes = sum(map(len, part.chunk.raw))
    progress.update(part.chunk.num_pairs, read_bytes=part.disk_bytes, text_bytes=text_bytes)
