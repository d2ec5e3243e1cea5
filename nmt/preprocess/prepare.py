"""Makes a data folder in three steps, that one machine does in a row or several share: plan (see
`plan.py`), shard, merge.

A shard is one Arrow file, and the task that writes it reads its pairs from the input itself, so
that any process on any machine can do it, in any order. It is done when its JSON file is there,
with the counts of its pairs; written again, it has the same bytes.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nmt.config import PreprocessConfig, Step, resolve
from nmt.data.binary import CorpusIndex, ShardFile, ShardWriter, write_index
from nmt.data.languages import describe_languages
from nmt.data.tokenizer import Tokenizers, save_tokenizers
from nmt.errors import ConfigError, DataError
from nmt.files import replace_file, write_json
from nmt.preprocess.chunks import ShardTask, TaskChunk, read_chunks
from nmt.preprocess.clean import Cleaned, Mask, PairCounts, clean
from nmt.preprocess.duplicates import HashWriter, count_repeats, read_seen
from nmt.preprocess.encode import ChunkEncoder, EncodedChunk, EncodeItem
from nmt.preprocess.filters import HELD_OUT, check_filters
from nmt.preprocess.held_out import take_held_out
from nmt.preprocess.plan import TaskReader, count_chunk, drops_duplicates, make_plan, read_plan
from nmt.preprocess.pool import WorkerPool, count_workers
from nmt.preprocess.report import build_report, report_page
from nmt.preprocess.sources import find_sources, has_split
from nmt.preprocess.statistics import HeldOut, Statistics
from nmt.preprocess.workspace import Job, Workspace, describe, open_workspace
from nmt.progress import Progress

log = logging.getLogger(__name__)
_HELD_OUT = ("valid", "test")
_MANY_DROPPED = 0.05


def prepare(config: PreprocessConfig) -> dict[str, Any] | None:
    """Do the step of `config` that is due; return the report once all is done.

    Raises `NmtError` children for what the user can fix; an old data folder then stays as it was.
    """
    check_filters(config)
    for split, other in (
        ("train", "choose a corpus: data=numbers"),
        ("valid", "take pairs out of the training text: data.valid.num_pairs=2000"),
    ):
        if not has_split(config.data, split):
            raise ConfigError(
                f"data.{split} is missing; give data.{split}.src=FILE and data.{split}.tgt=FILE "
                f"(or data.{split}.tsv=FILE), or {other}"
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
    found = find_sources(config, "train", work.spool)
    sources = {name: list(part) for name, part in groupby(found, key=lambda s: s.corpus)}
    held_out = {
        split: find_sources(config, split, work.spool)
        for split in _HELD_OUT
        if has_split(config.data, split)
    }
    job = Job(config, work, sources, held_out)
    step = Step.shard if config.shard is not None else config.step
    is_planning = step in (Step.all, Step.plan)
    begin = work.start if is_planning else work.join
    begin(job.fingerprint())
    job = take_held_out(job)
    splits = {split: _read_split(job, split) for split in held_out}
    tokenizers, num_pairs = make_plan(job) if is_planning else read_plan(job)
    if step in (Step.all, Step.shard):
        known = HeldOut({split: _text_of(chunks) for split, chunks in splits.items()})
        num_pairs = _write_shards(job, tokenizers, num_pairs, known)
    if step in (Step.plan, Step.shard):
        return None
    assert num_pairs is not None
    report = _merge(job, splits, tokenizers, num_pairs)
    if not config.report_only:
        work.finish()
    return report


def _read_split(job: Job, split: str) -> list[Cleaned]:
    """Read a validation or test set, of which all pairs stay; an empty one is a `DataError`."""
    chunks = read_chunks(job.held_out[split])
    cleaned = [clean(chunk, job.config, held_out=True) for chunk in chunks]
    if not cleaned:
        raise DataError(
            f"the {split} corpus is empty; give data.{split} a file with sentence pairs"
        )
    return cleaned


def _text_of(chunks: list[Cleaned]) -> tuple[list[str], list[str]]:
    """Return all sources and all targets."""
    src = [line for chunk in chunks for line in chunk.src]
    return src, [line for chunk in chunks for line in chunk.tgt]


def _write_shards(
    job: Job, tokenizers: Tokenizers, num_pairs: Mapping[str, int] | None, held_out: HeldOut
) -> dict[str, int]:
    """Write all shards, or those of `shard`, that are not done; return the pairs of each corpus."""
    totals = job.work.units / "totals"  # no task has a name without .json
    wanted = None
    if job.config.shard is not None:
        assert num_pairs is not None
        number, count = map(int, job.config.shard.split("/"))
        wanted = set(job.tasks(num_pairs)[number - 1 :: count])
    elif num_pairs is None and totals.exists():  # an earlier run came to the end of the corpora
        num_pairs = json.loads(totals.read_text(encoding="utf-8"))
    reader = TaskReader(job, num_pairs)

    def is_wanted(task: ShardTask) -> bool:
        return (wanted is None or task in wanted) and not _result_path(job, task).exists()

    has_hashes = not drops_duplicates(job.config)
    first = partial(ChunkEncoder, job.config, job.work.plan, held_out)
    make = partial(first, taken=job.taken, has_hashes=has_hashes)
    with (
        reader.progress("encode") as progress,
        WorkerPool[EncodeItem, EncodedChunk](count_workers(job.config.num_threads), make) as pool,
    ):
        done = pool.map(_items(job, reader.read(is_wanted)))
        for task, group in groupby(done, key=lambda pair: pair[0][0].task):
            chunks = _counted(job, task, group, progress)
            statistics, shards = _write_shard(job, task.name, chunks, tokenizers)
            content = {"statistics": statistics.to_json(), "shards": [*map(asdict, shards)]}
            job.work.write(_result_path(job, task), content)
        progress.finish()
    if wanted is None:
        job.work.write(totals, reader.num_pairs)
    return reader.num_pairs


def _result_path(job: Job, task: ShardTask) -> Path:
    return job.work.units / f"{task.name}.json"


def _items(job: Job, parts: Iterable[TaskChunk]) -> Iterator[EncodeItem]:
    """Add to each chunk which of its pairs came before, where such are dropped."""
    for task, group in groupby(parts, key=lambda part: part.task):
        seen: Mask | None = None
        if drops_duplicates(job.config):
            seen = read_seen(job.work.hashes, task.order, job.config.shard_pairs)
        for part in group:
            yield part, None if seen is None else seen[part.rows]


def _counted(
    job: Job, task: ShardTask, group: Iterable[tuple[EncodeItem, EncodedChunk]], progress: Progress
) -> Iterator[EncodedChunk]:
    """Yield the chunks of a task; write the hashes of its pairs where repeated ones are counted."""
    with HashWriter(job.work.hashes, task.order) as hashes:
        for (part, _), encoded in group:
            if encoded.hashes is not None:
                hashes.add(encoded.hashes)
            yield encoded
            count_chunk(progress, part)


def _write_shard(
    job: Job, name: str, chunks: Iterable[EncodedChunk], tokenizers: Tokenizers
) -> tuple[Statistics, list[ShardFile]]:
    """Write pairs to a file, if there are any; with `report_only`, count them alone."""
    total, path = Statistics(), job.work.data / f"{name}.arrow"
    sizes, has_text = (tokenizers.src.vocab_size, tokenizers.tgt.vocab_size), job.config.keep_text
    with (
        replace_file(path) as temporary,
        ShardWriter(temporary, *sizes, has_text=has_text) as writer,
    ):
        for chunk in chunks:
            total.merge(chunk.statistics)
            if not job.config.report_only:
                writer.add(chunk.src, chunk.tgt, chunk.texts)
    if writer.shard.pairs == 0:
        path.unlink()
        return total, []
    return total, [replace(writer.shard, file=path.name)]


def _merge(
    job: Job,
    splits: Mapping[str, list[Cleaned]],
    tokenizers: Tokenizers,
    num_pairs: Mapping[str, int],
) -> dict[str, Any]:
    """Make the data folder of shards that are done: held-out splits, report, and the index over
    all; return the report. No training text is read here, and no shard is written again.
    """
    corpora, index = _add_up(job, num_pairs)
    _check_kept(job, corpora)
    results = {"train": corpora}
    encoder = ChunkEncoder(job.config, job.work.plan, None, has_hashes=False)
    for split, chunks in splits.items():
        for side, lines in zip(("src", "tgt"), _text_of(chunks), strict=True):  # the references
            text = "".join(line + "\n" for line in lines)
            (job.work.data / f"{split}.{side}").write_text(text, encoding="utf-8", newline="\n")
        results[split], index[split] = {}, []
        for name, part in groupby(chunks, key=lambda cleaned: cleaned.chunk.source.corpus):
            encoded = map(encoder.encode_held_out, part)
            file = "-".join(filter(None, [split, name, "00000"]))
            results[split][name], shards = _write_shard(job, file, encoded, tokenizers)
            index[split].append(CorpusIndex(name, 1.0, shards))
    # where duplicates are dropped, the drops say how many they are
    repeats = None if drops_duplicates(job.config) else count_repeats(job.work.hashes)
    report = build_report(results, config=job.config, tokenizers=tokenizers, duplicates=repeats)
    folder = job.work.data
    save_tokenizers(folder, tokenizers)
    write_json(folder / "report.json", report)
    (folder / "report.html").write_text(report_page(report), encoding="utf-8", newline="\n")
    meta = {
        **write_index(folder, index),
        **describe_languages(job.config.data),
        "temperature": job.config.data.temperature,
        "vocab_size": tokenizers.tgt.vocab_size,
        "tokenizer_sha256": tokenizers.sha256,
        "max_length": job.config.max_length,
        "made_of": describe(job.config),
    }
    if tokenizers.src_vocab_size is not None:
        meta["src_vocab_size"] = tokenizers.src_vocab_size
    write_json(folder / "meta.json", meta)
    return report


def _add_up(
    job: Job, num_pairs: Mapping[str, int]
) -> tuple[dict[str, Statistics], dict[str, list[CorpusIndex]]]:
    """Add up the shards of each corpus; a `ConfigError` names those that nobody has written."""
    tasks = job.tasks(num_pairs)
    missing = [task for task in tasks if not _result_path(job, task).exists()]
    if missing:
        names = ", ".join(f"{task.name}.arrow" for task in missing[:3])
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ConfigError(
            f"{len(missing)} of {len(tasks)} shards are not there: {names}{more}; run the jobs of "
            "shard=NUMBER/COUNT that failed again, or all: what is done is passed over"
        )
    results, index = {}, []
    for corpus, size in num_pairs.items():
        results[corpus], shards = Statistics(), []
        for task in job.tasks({corpus: size}):
            content = json.loads(_result_path(job, task).read_text(encoding="utf-8"))
            results[corpus].merge(Statistics.from_json(content["statistics"]))
            shards += [ShardFile(**shard) for shard in content["shards"]]
        if shards:
            weight = job.config.data.corpora[corpus].weight if corpus else 1.0
            index.append(CorpusIndex(corpus, weight, shards))
    return results, {"train": index}


def _check_kept(job: Job, corpora: Mapping[str, Statistics]) -> None:
    """Raise a `DataError` when no training pair is left; warn when many are not."""
    total = PairCounts()
    for corpus in corpora.values():
        total.merge(corpus.pairs)
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
    lost = [(reason, number) for reason, number in dropped if reason != HELD_OUT]
    if sum(number for _, number in lost) > _MANY_DROPPED * total.read:
        warning = "warning: %.1f %% of the training pairs were dropped, most of them for: %s (%s)"
        log.warning(warning, percent, lost[0][0], reasons)
    elif percent:
        log.info("dropped %.1f %% of the training pairs: %s", percent, reasons)
