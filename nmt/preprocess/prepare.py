"""Makes a data folder, in steps that one machine does in a row or several share: plan, shard,
merge.

The folder is filled in a work folder beside its place and renamed into it, so that an interrupted
run leaves none, and the next one goes on.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from itertools import groupby
from typing import Any

from nmt.config import PreprocessConfig, Step, resolve
from nmt.errors import ConfigError
from nmt.preprocess.filters import check_filters
from nmt.preprocess.heldout import find_overlap, read_splits
from nmt.preprocess.job import Job, fingerprint
from nmt.preprocess.merge import merge
from nmt.preprocess.plan import make_plan, read_plan
from nmt.preprocess.shards import encode_units
from nmt.preprocess.sources import find_sources, has_split
from nmt.preprocess.workspace import Workspace, open_scratch, open_workspace

HELD_OUT = ("valid", "test")


def prepare(config: PreprocessConfig) -> dict[str, Any] | None:
    """Do the step of `config` that is due; return the report once all is done.

    Raises `NmtError` children for what the user can fix; an old data folder then stays as it was.
    """
    check_filters(config)
    _check_given(config)
    step = Step.shard if config.shard is not None else config.step
    with _workspace(config) as work:
        return _run(_open_job(config, work, step), step)


def _workspace(config: PreprocessConfig) -> AbstractContextManager[Workspace]:
    if config.report_only:
        return open_scratch()
    part = None if config.shard is None else config.shard.replace("/", "-")
    return open_workspace(resolve(config.data_dir), part=part)


def _open_job(config: PreprocessConfig, work: Workspace, step: Step) -> Job:
    found = find_sources(config, "train", work.spool)
    sources = {name: list(part) for name, part in groupby(found, key=lambda s: s.corpus)}
    held_out = {
        split: find_sources(config, split, work.spool)
        for split in HELD_OUT
        if has_split(config.data, split)
    }
    job = Job(config, work, sources, held_out)
    if step in (Step.all, Step.plan):
        work.start(fingerprint(job))
    else:
        work.join(fingerprint(job))
    return job


def _run(job: Job, step: Step) -> dict[str, Any] | None:
    splits = read_splits(job)
    overlap = find_overlap(splits)
    plan = make_plan(job) if step in (Step.all, Step.plan) else read_plan(job)
    if step is Step.plan:
        return None
    num_pairs = plan.num_pairs
    if step in (Step.all, Step.shard):
        num_pairs = encode_units(job, plan, overlap)
    if step is Step.shard:
        return None
    assert num_pairs is not None
    report = merge(job, splits, plan.tokenizers, num_pairs)
    if not job.config.report_only:
        job.work.finish()
    return report


def _check_given(config: PreprocessConfig) -> None:
    for split in ("train", "valid"):
        if not has_split(config.data, split):
            raise ConfigError(
                f"data.{split} is missing; give data.{split}.src=FILE and data.{split}.tgt=FILE "
                f"(or data.{split}.tsv=FILE), or choose a corpus: data=numbers"
            )
