"""Encodes the training corpora unit by unit in worker processes and writes the files of ids.

A unit is done when its JSON file is there, which says what the unit came to; units that are done
stay as they are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from nmt.data.arrow import ShardFile, ShardWriter
from nmt.data.tokenizer import Tokenizers
from nmt.files import sync
from nmt.preprocess.counts import Counts
from nmt.preprocess.duplicates import read_seen
from nmt.preprocess.encoding import Encoded, Encoder, Task
from nmt.preprocess.job import Job
from nmt.preprocess.pieces import Piece, Unit
from nmt.preprocess.plan import Plan, drops_duplicates
from nmt.preprocess.pool import WorkerPool, count_workers
from nmt.preprocess.progress import Progress
from nmt.preprocess.repeats import UnitRepeats
from nmt.preprocess.statistics import HeldOut, Statistics
from nmt.preprocess.units import UnitReader, note, start_progress

_TOTALS = "totals"  # no unit has a name without .json


@dataclass
class Result:
    """What some pairs came to, and the file they are in, if any was kept."""

    counts: Counts = field(default_factory=Counts)
    statistics: Statistics = field(default_factory=Statistics)
    shard: ShardFile | None = None

    def add(self, part: Encoded) -> None:
        """Count pairs that come after these."""
        self.counts.merge(part.counts)
        self.statistics.merge(part.statistics)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "counts": self.counts.to_json(),
            "statistics": self.statistics.to_json(),
            "shard": None if self.shard is None else asdict(self.shard),
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Result:
        """Read what `to_json` gave."""
        shard = content["shard"]
        return cls(
            Counts.from_json(content["counts"]),
            Statistics.from_json(content["statistics"]),
            None if shard is None else ShardFile(**shard),
        )


def write_shard(
    path: Path | None, parts: Iterable[Encoded], tokenizers: Tokenizers, *, has_text: bool
) -> Result:
    """Write encoded pairs to `path`, which is there when they all are; without a pair it is not.

    Without a path they are counted alone.
    """
    result = Result()
    if path is None:
        for part in parts:
            result.add(part)
        return result
    temporary = path.with_name(path.name + ".tmp")
    sizes = (tokenizers.src.vocab_size, tokenizers.tgt.vocab_size)
    with ShardWriter(
        temporary, src_vocab_size=sizes[0], tgt_vocab_size=sizes[1], has_text=has_text
    ) as writer:
        for part in parts:
            result.add(part)
            texts = {"src_text": part.src_text, "tgt_text": part.tgt_text}
            src, tgt = part.src, part.tgt
            writer.add(src.flat, src.offsets, tgt.flat, tgt.offsets, **texts)
    if writer.shard.pairs == 0:
        temporary.unlink()
    else:
        sync(temporary)
        os.replace(temporary, path)
        result.shard = replace(writer.shard, file=path.name)
    return result


def result_path(job: Job, unit: Unit) -> Path:
    """Return where it stands what a unit came to."""
    return job.work.units / f"{unit.name}.json"


def read_result(job: Job, unit: Unit) -> Result:
    """Read what a unit came to."""
    return Result.from_json(json.loads(result_path(job, unit).read_text(encoding="utf-8")))


def encode_units(job: Job, plan: Plan, overlap: HeldOut) -> dict[str, int]:
    """Encode all units, or those of `shard`, that are not done; return the pairs of each corpus."""
    wanted = _choose(job, plan)
    reader = UnitReader(job, plan.num_pairs or _read_totals(job))
    seen = _Seen(job)

    def is_wanted(unit: Unit) -> bool:
        return (wanted is None or unit in wanted) and not result_path(job, unit).exists()

    tasks = (Task(piece, seen.read(piece)) for piece in reader.read(is_wanted))
    make = partial(
        Encoder,
        job.config,
        job.work.plan,
        held_out=overlap,
        has_hashes=not drops_duplicates(job.config),
    )
    with (
        start_progress(job, "encode") as progress,
        WorkerPool[Task, Encoded](count_workers(job.config.num_threads), make) as pool,
    ):
        done = pool.map(tasks)
        for unit, group in groupby(done, key=lambda pair: pair[0].piece.unit):
            _write_unit(job, plan, unit, group, progress)
    if job.config.shard is None:
        job.work.write(job.work.units / _TOTALS, reader.num_pairs)
    return reader.num_pairs


def _read_totals(job: Job) -> dict[str, int] | None:
    """Return the pairs of each corpus where an earlier run came to their end."""
    path = job.work.units / _TOTALS
    totals: dict[str, int] | None = json.loads(path.read_text("utf-8")) if path.exists() else None
    return totals


def _choose(job: Job, plan: Plan) -> set[Unit] | None:
    """Return the units of `shard`; None for all there are."""
    if job.config.shard is None:
        return None
    assert plan.num_pairs is not None
    number, count = map(int, job.config.shard.split("/"))
    units = [unit for corpus, size in plan.num_pairs.items() for unit in job.units(corpus, size)]
    return set(units[number - 1 :: count])


def _write_unit(
    job: Job,
    plan: Plan,
    unit: Unit,
    group: Iterable[tuple[Task, Encoded]],
    progress: Progress,
) -> None:
    with ExitStack() as stack:
        hashes = None
        if not drops_duplicates(job.config):
            hashes = stack.enter_context(UnitRepeats(job.work.hashes, unit.order))
        path = None if job.config.report_only else job.work.data / f"{unit.name}.arrow"
        parts = _watch(group, hashes, progress)
        result = write_shard(path, parts, plan.tokenizers, has_text=job.config.keep_text)
    job.work.write(result_path(job, unit), result.to_json())


def _watch(
    group: Iterable[tuple[Task, Encoded]], hashes: UnitRepeats | None, progress: Progress
) -> Iterator[Encoded]:
    for task, encoded in group:
        if hashes is not None and encoded.hashes is not None:
            hashes.add(encoded.hashes)
        yield encoded
        note(progress, task.piece)


class _Seen:
    """What the plan says of duplicates in the unit that is read now."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._unit: Unit | None = None

    def read(self, piece: Piece) -> Any:
        """Return which pairs of a piece came before; None where duplicates stay."""
        if not drops_duplicates(self._job.config):
            return None
        if piece.unit != self._unit:
            self._unit = piece.unit
            size = self._job.config.shard_pairs
            self._rows = read_seen(self._job.work.hashes, piece.unit.order, size)
        return self._rows[piece.rows]
