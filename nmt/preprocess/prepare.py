"""Makes a data folder, in steps that one machine does in a row or several share: plan, shard,
merge.

The folder is filled in a work folder beside its place and renamed into it, so that an interrupted
run leaves none, and the next one goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nmt.config import PreprocessConfig, Step, resolve
from nmt.data.binary import CorpusIndex, write_index
from nmt.data.tokenizer import Tokenizers, save_tokenizers
from nmt.errors import ConfigError, DataError
from nmt.files import write_json
from nmt.preprocess.clean import Cleaned, PairCounts
from nmt.preprocess.duplicates import count_repeats
from nmt.preprocess.filters import check_filters
from nmt.preprocess.plan import drops_duplicates, make_plan, read_plan
from nmt.preprocess.report import CorpusResult, build_report, report_page
from nmt.preprocess.sharding import (
    read_result,
    read_split,
    result_path,
    text_of,
    write_shards,
    write_split,
)
from nmt.preprocess.sources import find_sources, has_split
from nmt.preprocess.statistics import HeldOut
from nmt.preprocess.workspace import Job, Workspace, open_workspace

log = logging.getLogger(__name__)
_HELD_OUT = ("valid", "test")
_MANY_DROPPED = 0.05
_NUM_NAMED = 3


def prepare(config: PreprocessConfig) -> dict[str, Any] | None:
    """Do the step of `config` that is due; return the report once all is done.

    Raises `NmtError` children for what the user can fix; an old data folder then stays as it was.
    """
    check_filters(config)
    for split in ("train", "valid"):
        if not has_split(config.data, split):
            raise ConfigError(
                f"data.{split} is missing; give data.{split}.src=FILE and data.{split}.tgt=FILE "
                f"(or data.{split}.tsv=FILE), or choose a corpus: data=numbers"
            )
    with ExitStack() as stack:
        if config.report_only:  # leaves nothing
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="nmt-")))
            work = Workspace(folder, folder)
        else:
            part = None if config.shard is None else config.shard.replace("/", "-")
            place = resolve(config.data_dir)
            work = stack.enter_context(open_workspace(place, part=part))
        return _run(config, work)


def _run(config: PreprocessConfig, work: Workspace) -> dict[str, Any] | None:
    step = Step.shard if config.shard is not None else config.step
    is_planning = step in (Step.all, Step.plan)
    job = _find_input(config, work)
    begin = work.start if is_planning else work.join
    begin(job.fingerprint())
    splits = {split: read_split(job, split) for split in job.held_out}
    held_out = HeldOut({split: text_of(chunks) for split, chunks in splits.items()})
    plan = make_plan(job) if is_planning else read_plan(job)
    if step is Step.plan:
        return None
    num_pairs = plan.num_pairs
    if step is not Step.merge:
        num_pairs = write_shards(job, plan, held_out)
    if step is Step.shard:
        return None
    assert num_pairs is not None
    report = _merge(job, splits, plan.tokenizers, num_pairs)
    if not config.report_only:
        work.finish()
    return report


def _find_input(config: PreprocessConfig, work: Workspace) -> Job:
    found = find_sources(config, "train", work.spool)
    sources = {name: list(part) for name, part in groupby(found, key=lambda s: s.corpus)}
    held_out = {
        split: find_sources(config, split, work.spool)
        for split in _HELD_OUT
        if has_split(config.data, split)
    }
    return Job(config, work, sources, held_out)


def _merge(
    job: Job,
    splits: Mapping[str, list[Cleaned]],
    tokenizers: Tokenizers,
    num_pairs: Mapping[str, int],
) -> dict[str, Any]:
    """Make the data folder of shards that are done: held-out splits, report, and the index over
    all; return the report. No training text is read here, and no shard is written again.
    """
    _check_complete(job, num_pairs)
    corpora, index = _add_up(job, num_pairs)
    _check_kept(job, corpora)
    results = {"train": corpora}
    for split, chunks in splits.items():
        result, shard = write_split(job, split, chunks, tokenizers)
        results[split], index[split] = {"": result}, [CorpusIndex("", 1.0, [shard])]
    # where duplicates are dropped, the drops say how many they are
    repeats = None if drops_duplicates(job.config) else count_repeats(job.work.hashes)
    report = build_report(results, config=job.config, tokenizers=tokenizers, duplicates=repeats)
    _write_folder(job, tokenizers, index, report)
    return report


def _check_complete(job: Job, num_pairs: Mapping[str, int]) -> None:
    """Raise a `ConfigError` that names shards which nobody has written."""
    tasks = job.tasks(num_pairs)
    missing = [task for task in tasks if not result_path(job, task).exists()]
    if missing:
        names = ", ".join(f"{task.name}.arrow" for task in missing[:_NUM_NAMED])
        more = f" and {len(missing) - _NUM_NAMED} more" if len(missing) > _NUM_NAMED else ""
        raise ConfigError(
            f"{len(missing)} of {len(tasks)} shards are not there: {names}{more}; run the jobs of "
            "shard=NUMBER/COUNT that failed again, or all: what is done is passed over"
        )


def _add_up(
    job: Job, num_pairs: Mapping[str, int]
) -> tuple[dict[str, CorpusResult], dict[str, list[CorpusIndex]]]:
    """Return what the shards of each corpus came to, and the index of those that hold a pair."""
    results, index = {}, []
    for corpus, size in num_pairs.items():
        results[corpus], shards = CorpusResult(), []
        for task in job.tasks({corpus: size}):
            result, shard = read_result(job, task)
            results[corpus].merge(result.counts, result.statistics)
            shards += [] if shard is None else [shard]
        if shards:
            weight = job.config.data.corpora[corpus].weight if corpus else 1.0
            index.append(CorpusIndex(corpus, weight, shards))
    return results, {"train": index}


def _check_kept(job: Job, corpora: Mapping[str, CorpusResult]) -> None:
    """Raise a `DataError` when no training pair is left; warn when many are not."""
    total = PairCounts()
    for corpus in corpora.values():
        total.merge(corpus.counts)
    if total.read == 0:
        raise DataError("the training corpus is empty; give data.train a file with sentence pairs")
    dropped = sorted(total.dropped.items(), key=lambda item: -item[1])
    reasons = ", ".join(
        f"{n} {reason} ({total.examples[reason][0]} first)" for reason, n in dropped
    )
    if total.kept == 0:
        raise DataError(
            f"all {total.read} training pairs were dropped ({reasons}); "
            f"look at the input, or raise max_length={job.config.max_length}"
        )
    percent = 100 * (1 - total.kept / total.read)
    if percent > 100 * _MANY_DROPPED:
        log.warning(
            "warning: %.1f %% of the training pairs were dropped, most of them for: %s (%s)",
            percent,
            dropped[0][0],
            reasons,
        )
    elif percent:
        log.info("dropped %.1f %% of the training pairs: %s", percent, reasons)


def _write_folder(
    job: Job, tokenizers: Tokenizers, index: dict[str, list[CorpusIndex]], report: dict[str, Any]
) -> None:
    folder, data = job.work.data, job.config.data
    save_tokenizers(folder, tokenizers)
    write_json(folder / "report.json", report)
    (folder / "report.html").write_text(report_page(report), encoding="utf-8", newline="\n")
    meta = {
        **write_index(folder, index),
        "src_lang": data.src_lang,
        "tgt_lang": data.tgt_lang,
        "temperature": data.temperature,
        "vocab_size": tokenizers.tgt.vocab_size,
        "tokenizer_sha256": tokenizers.sha256,
        "max_length": job.config.max_length,
    }
    if tokenizers.src_vocab_size is not None:
        meta["src_vocab_size"] = tokenizers.src_vocab_size
    write_json(folder / "meta.json", meta)
