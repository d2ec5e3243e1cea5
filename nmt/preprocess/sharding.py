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

from nmt.data.shards import Shard, ShardWriter
from nmt.data.tokenizer import Tokenizers
from nmt.errors import DataError
from nmt.files import replace_file
from nmt.preprocess.chunks import read_chunks
from nmt.preprocess.cleaned import Cleaned, Mask
from nmt.preprocess.cleaning import clean
from nmt.preprocess.counts import Counts
from nmt.preprocess.duplicates import read_seen
from nmt.preprocess.encoding import Encoded, Encoder, Task
from nmt.preprocess.pieces import Piece, Source, Unit
from nmt.preprocess.plan import CorpusPlan, drops_duplicates
from nmt.preprocess.pool import WorkerPool, count_workers
from nmt.preprocess.repeats import UnitRepeats
from nmt.preprocess.statistics import HeldOut, Statistics
from nmt.preprocess.units import UnitReader, note, start_progress
from nmt.preprocess.workspace import Job
from nmt.progress import Progress

_TOTALS = "totals"  # no unit has a name without .json


@dataclass
class ShardResult:
    """What some pairs came to, and the file they are in, if any was kept."""

    counts: Counts = field(default_factory=Counts)
    statistics: Statistics = field(default_factory=Statistics)
    shard: Shard | None = None

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
            Counts.from_json(content["counts"]),
            Statistics.from_json(content["statistics"]),
            None if content["shard"] is None else Shard(**content["shard"]),
        )


def write_shards(job: Job, plan: CorpusPlan, held_out: HeldOut) -> dict[str, int]:
    """Write all shards, or those of `shard`, that are not done; return the pairs of each corpus."""
    wanted, totals = _choose(job, plan), job.work.units / _TOTALS
    num_pairs = plan.num_pairs
    if num_pairs is None and totals.exists():  # an earlier run came to the end of the corpora
        num_pairs = json.loads(totals.read_text(encoding="utf-8"))
    reader = UnitReader(job, num_pairs)

    def is_wanted(unit: Unit) -> bool:
        return (wanted is None or unit in wanted) and not result_path(job, unit).exists()

    make = partial(
        Encoder,
        job.config,
        job.work.plan,
        held_out=held_out,
        has_hashes=not drops_duplicates(job.config),
    )
    with (
        start_progress(job, "encode") as progress,
        WorkerPool[Task, Encoded](count_workers(job.config.num_threads), make) as pool,
    ):
        done = pool.map(_tasks(job, reader.read(is_wanted)))
        for unit, group in groupby(done, key=lambda pair: pair[0].piece.unit):
            path = None if job.config.report_only else job.work.data / f"{unit.name}.arrow"
            chunks = _watched(job, unit, group, progress)
            result = _write_shard(path, chunks, plan.tokenizers, has_text=job.config.keep_text)
            job.work.write(result_path(job, unit), result.to_json())
        progress.finish()
    if job.config.shard is None:
        job.work.write(totals, reader.num_pairs)
    return reader.num_pairs


def result_path(job: Job, unit: Unit) -> Path:
    """Return the file that holds what a unit came to."""
    return job.work.units / f"{unit.name}.json"


def _choose(job: Job, plan: CorpusPlan) -> set[Unit] | None:
    """Return the units of `shard`; None for all there are."""
    if job.config.shard is None:
        return None
    assert plan.num_pairs is not None
    number, count = map(int, job.config.shard.split("/"))
    units = [unit for corpus, size in plan.num_pairs.items() for unit in job.units(corpus, size)]
    return set(units[number - 1 :: count])


def _tasks(job: Job, pieces: Iterable[Piece]) -> Iterator[Task]:
    """Add to each piece which of its pairs came before, where such are dropped."""
    for unit, group in groupby(pieces, key=lambda piece: piece.unit):
        seen: Mask | None = None
        if drops_duplicates(job.config):
            seen = read_seen(job.work.hashes, unit.order, job.config.shard_pairs)
        for piece in group:
            yield Task(piece, None if seen is None else seen[piece.rows])


def _watched(
    job: Job, unit: Unit, group: Iterable[tuple[Task, Encoded]], progress: Progress
) -> Iterator[Encoded]:
    """Yield the chunks of a unit; write the hashes of its pairs where repeated ones are counted."""
    with ExitStack() as stack:
        hashes = None
        if not drops_duplicates(job.config):
            hashes = stack.enter_context(UnitRepeats(job.work.hashes, unit.order))
        for task, encoded in group:
            if hashes is not None and encoded.hashes is not None:
                hashes.add(encoded.hashes)
            yield encoded
            note(progress, task.piece)


def _write_shard(
    path: Path | None, chunks: Iterable[Encoded], tokenizers: Tokenizers, *, has_text: bool
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
    chunks: list[tuple[Source, Cleaned]]

    @property
    def text(self) -> tuple[list[str], list[str]]:
        """All sources and all targets."""
        src = [line for _, cleaned in self.chunks for line in cleaned.src]
        return src, [line for _, cleaned in self.chunks for line in cleaned.tgt]


def read_splits(job: Job) -> list[HeldOutSplit]:
    """Read the held-out splits; raise a `DataError` for one without pairs."""
    splits = []
    for name, sources in job.held_out.items():
        chunks = [
            (chunk.source, clean(chunk, job.config, held_out=True))
            for chunk in read_chunks(sources)
        ]
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
    encoder = Encoder(job.config, job.work.plan, held_out=None, has_hashes=False)
    chunks = (encoder.encode_held_out(cleaned, source) for source, cleaned in split.chunks)
    path = job.work.data / f"{split.name}-00000.arrow"
    return _write_shard(path, chunks, tokenizers, has_text=job.config.keep_text)
