"""Writes the shards of a data folder. A shard is one Arrow file, and the task that writes it reads
its pairs from the input itself, so that any process on any machine can do it, in any order.

A shard is done when its JSON file is there, with the counts of its pairs. Written again, it has the
same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from itertools import groupby
from pathlib import Path

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
from nmt.preprocess.report import CorpusResult
from nmt.preprocess.statistics import HeldOut, Statistics
from nmt.preprocess.workspace import Job
from nmt.progress import Progress

_TOTALS = "totals"  # no task has a name without .json


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
            result, shard = _write_shard(job, path, chunks, plan.tokenizers)
            content = {
                "counts": vars(result.counts),
                "statistics": result.statistics.to_json(),
                "shard": None if shard is None else asdict(shard),
            }
            job.work.write(result_path(job, task), content)
        progress.finish()
    if job.config.shard is None:
        job.work.write(totals, reader.num_pairs)
    return reader.num_pairs


def result_path(job: Job, task: ShardTask) -> Path:
    """Return the file that holds what a task came to."""
    return job.work.units / f"{task.name}.json"


def read_result(job: Job, task: ShardTask) -> tuple[CorpusResult, ShardFile | None]:
    """Return what the pairs of a task that is done came to, and their file, if any was kept."""
    content = json.loads(result_path(job, task).read_text(encoding="utf-8"))
    counts = PairCounts.from_json(content["counts"])
    statistics = Statistics.from_json(content["statistics"])
    shard = content["shard"]
    return CorpusResult(counts, statistics), None if shard is None else ShardFile(**shard)


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
    job: Job, path: Path | None, chunks: Iterable[EncodedChunk], tokenizers: Tokenizers
) -> tuple[CorpusResult, ShardFile | None]:
    """Write encoded pairs to `path`, which is there when they all are; without a pair it is not.

    Without a path they are counted alone.
    """
    result = CorpusResult()
    if path is None:
        for chunk in chunks:
            result.merge(chunk.counts, chunk.statistics)
        return result, None
    with replace_file(path) as temporary:
        writer = ShardWriter(
            temporary,
            src_vocab_size=tokenizers.src.vocab_size,
            tgt_vocab_size=tokenizers.tgt.vocab_size,
            has_text=job.config.keep_text,
        )
        with writer:
            for chunk in chunks:
                result.merge(chunk.counts, chunk.statistics)
                texts = {"src_text": chunk.src_text, "tgt_text": chunk.tgt_text}
                src, tgt = chunk.src, chunk.tgt
                writer.add(src.flat, src.offsets, tgt.flat, tgt.offsets, **texts)
        shard = replace(writer.shard, file=path.name)
    if shard.pairs == 0:
        path.unlink()
        return result, None
    return result, shard


def read_split(job: Job, split: str) -> list[Cleaned]:
    """Read a validation or test set, of which all pairs stay; an empty one is a `DataError`."""
    chunks = read_chunks(job.held_out[split])
    cleaned = [clean(chunk, job.config, held_out=True) for chunk in chunks]
    if not cleaned:
        raise DataError(
            f"the {split} corpus is empty; give data.{split} a file with sentence pairs"
        )
    return cleaned


def text_of(chunks: list[Cleaned]) -> tuple[list[str], list[str]]:
    """Return all sources and all targets."""
    src = [line for chunk in chunks for line in chunk.src]
    return src, [line for chunk in chunks for line in chunk.tgt]


def write_split(
    job: Job, split: str, chunks: list[Cleaned], tokenizers: Tokenizers
) -> tuple[CorpusResult, ShardFile]:
    """Write the text of a held-out split, which is the reference of translations, and the ids."""
    for side, lines in zip(("src", "tgt"), text_of(chunks), strict=True):
        text = "".join(line + "\n" for line in lines)
        (job.work.data / f"{split}.{side}").write_text(text, encoding="utf-8", newline="\n")
    encoder = ChunkEncoder(job.config, job.work.plan, held_out=None, has_hashes=False)
    path = job.work.data / f"{split}-00000.arrow"
    result, shard = _write_shard(job, path, map(encoder.encode_held_out, chunks), tokenizers)
    assert shard is not None  # there is a pair, and none is dropped
    return result, shard
