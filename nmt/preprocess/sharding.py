"""Writes the shards of a data folder. A shard is one Arrow file, and the task that writes it reads
its pairs from the input itself, so that any process on any machine can do it, in any order.

A shard is done when its JSON file is there, which says what its pairs came to. Done again, it gives
the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from nmt.data.arrow import ShardFile, ShardWriter
from nmt.data.tokenizer import Tokenizers
from nmt.errors import DataError
from nmt.files import replace_file
from nmt.preprocess.chunks import ShardTask, TaskChunk, read_chunks
from nmt.preprocess.clean import Cleaned, Mask, PairCounts, clean
from nmt.preprocess.duplicates import HashWriter, read_seen
from nmt.preprocess.encode import ChunkEncoder, EncodedChunk, EncodeItem
from nmt.preprocess.plan import CorpusPlan, TaskReader, count_chunk, drops_duplicates
from nmt.preprocess.pool import WorkerPool, count_workers
from nmt.preprocess.statistics import HeldOut, Statistics
from nmt.preprocess.workspace import Job
from nmt.progress import Progress

_TOTALS = "totals"  # no task has a name without .json


@dataclass
class ShardResult:
    """What some pairs came to, and the file they are in, if any was kept."""

    counts: PairCounts = field(default_factory=PairCounts)
    statistics: Statistics = field(default_factory=Statistics)
    shard: ShardFile | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "counts": self.counts.to_json(),
            "statistics": self.statistics.to_json(),
            "shard": None if self.shard is None else asdict(self.shard),
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> ShardResult:
        """Read what `to_json` gave."""
        return cls(
            PairCounts.from_json(content["counts"]),
            Statistics.from_json(content["statistics"]),
            None if content["shard"] is None else ShardFile(**content["shard"]),
        )


def write_shards(job: Job, plan: CorpusPlan, held_out: HeldOut) -> dict[str, int]:
    """Write all shards, or those of `shard`, that are not done; return the pairs of each corpus."""
    wanted, totals = _choose(job, plan), job.work.units / _TOTALS
    num_pairs = plan.num_pairs
    if num_pairs is None and totals.exists():  # an earlier run came to the end of the corpora
        num_pairs = json.loads(totals.read_text(encoding="utf-8"))
    reader = TaskReader(job, num_pairs)

    def is_wanted(task: ShardTask) -> bool:
        return (wanted is None or task in wanted) and not result_path(job, task).exists()

    make = partial(
        ChunkEncoder,
        job.config,
        job.work.plan,
        held_out=held_out,
        has_hashes=not drops_duplicates(job.config),
    )
    with (
        reader.progress("encode") as progress,
        WorkerPool[EncodeItem, EncodedChunk](count_workers(job.config.num_threads), make) as pool,
    ):
        done = pool.map(_items(job, reader.read(is_wanted)))
        for task, group in groupby(done, key=lambda pair: pair[0].part.task):
            path = None if job.config.report_only else job.work.data / f"{task.name}.arrow"
            chunks = _watched(job, task, group, progress)
            result = _write_shard(path, chunks, plan.tokenizers, has_text=job.config.keep_text)
            job.work.write(result_path(job, task), result.to_json())
        progress.finish()
    if job.config.shard is None:
        job.work.write(totals, reader.num_pairs)
    return reader.num_pairs


def result_path(job: Job, task: ShardTask) -> Path:
    """Return the file that holds what a task came to."""
    return job.work.units / f"{task.name}.json"


def _choose(job: Job, plan: CorpusPlan) -> set[ShardTask] | None:
    """Return the tasks of `shard`; None for all there are."""
    if job.config.shard is None:
        return None
    assert plan.num_pairs is not None
    number, count = map(int, job.config.shard.split("/"))
    return set(job.tasks(plan.num_pairs)[number - 1 :: count])


def _items(job: Job, parts: Iterable[TaskChunk]) -> Iterator[EncodeItem]:
    """Add to each chunk which of its pairs came before, where such are dropped."""
    for task, group in groupby(parts, key=lambda part: part.task):
        seen: Mask | None = None
        if drops_duplicates(job.config):
            seen = read_seen(job.work.hashes, task.order, job.config.shard_pairs)
        for part in group:
            yield EncodeItem(part, None if seen is None else seen[part.rows])


def _watched(
    job: Job, task: ShardTask, group: Iterable[tuple[EncodeItem, EncodedChunk]], progress: Progress
) -> Iterator[EncodedChunk]:
    """Yield the chunks of a task; write the hashes of its pairs where repeated ones are counted."""
    with ExitStack() as stack:
        hashes = None
        if not drops_duplicates(job.config):
            hashes = stack.enter_context(HashWriter(job.work.hashes, task.order))
        for item, encoded in group:
            if hashes is not None and encoded.hashes is not None:
                hashes.add(encoded.hashes)
            yield encoded
            count_chunk(progress, item.part)


def _write_shard(
    path: Path | None, chunks: Iterable[EncodedChunk], tokenizers: Tokenizers, *, has_text: bool
) -> ShardResult:
    """Write encoded pairs to `path`, which is there when they all are; without a pair it is not.

    Without a path they are counted alone.
    """
    result = ShardResult()
    with ExitStack() as stack:
        writer = None
        if path is not None:
            writer = ShardWriter(
                stack.enter_context(replace_file(path)),
                src_vocab_size=tokenizers.src.vocab_size,
                tgt_vocab_size=tokenizers.tgt.vocab_size,
                has_text=has_text,
            )
            stack.enter_context(writer)
        for chunk in chunks:
            result.counts.merge(chunk.counts)
            result.statistics.merge(chunk.statistics)
            if writer is not None:
                texts = {"src_text": chunk.src_text, "tgt_text": chunk.tgt_text}
                src, tgt = chunk.src, chunk.tgt
                writer.add(src.flat, src.offsets, tgt.flat, tgt.offsets, **texts)
    if path is not None and writer is not None:
        if writer.shard.pairs:
            result.shard = replace(writer.shard, file=path.name)
        else:
            path.unlink()
    return result


@dataclass(frozen=True)
class HeldOutSplit:
    """The clean pairs of a validation or test set, which is read whole: nothing is dropped."""

    name: str
    chunks: list[Cleaned]

    @property
    def text(self) -> tuple[list[str], list[str]]:
        """All sources and all targets."""
        src = [line for cleaned in self.chunks for line in cleaned.src]
        return src, [line for cleaned in self.chunks for line in cleaned.tgt]


def read_splits(job: Job) -> list[HeldOutSplit]:
    """Read the held-out splits; raise a `DataError` for one without pairs."""
    splits = []
    for name, sources in job.held_out.items():
        chunks = [clean(chunk, job.config, held_out=True) for chunk in read_chunks(sources)]
        if not chunks:
            raise DataError(
                f"the {name} corpus is empty; give data.{name} a file with sentence pairs"
            )
        splits.append(HeldOutSplit(name, chunks))
    return splits


def write_split(job: Job, split: HeldOutSplit, tokenizers: Tokenizers) -> ShardResult:
    """Write the text, which is the reference of translations, and the ids."""
    for side, lines in zip(("src", "tgt"), split.text, strict=True):
        text = "".join(line + "\n" for line in lines)
        path = job.work.data / f"{split.name}.{side}"
        path.write_text(text, encoding="utf-8", newline="\n")
    encoder = ChunkEncoder(job.config, job.work.plan, held_out=None, has_hashes=False)
    chunks = map(encoder.encode_held_out, split.chunks)
    path = job.work.data / f"{split.name}-00000.arrow"
    return _write_shard(path, chunks, tokenizers, has_text=job.config.keep_text)
