"""Makes a data folder of parallel text: finds the spans of the corpora, makes the plan (see
`plan.py`), encodes each span into a shard, and writes report and index over all.

A shard is one Arrow file, and the task that writes it reads its pairs from the input itself, so
that any process on any machine can do it, in any order. It is done when its record is there, with
the counts of its pairs; written again, it has the same bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nmt.config import PreprocessConfig, resolve
from nmt.data.binary import CorpusIndex, ShardFile, write_index
from nmt.data.languages import describe_languages
from nmt.data.tokenizer import Tokenizers, save_tokenizers
from nmt.errors import ConfigError, DataError
from nmt.preprocess.chunks import Span, find_spans
from nmt.preprocess.clean import Cleaned, PairCounts
from nmt.preprocess.duplicates import count_repeats
from nmt.preprocess.encode import ShardEncoder, start_encoding
from nmt.preprocess.filters import HELD_OUT, check_filters, none_left
from nmt.preprocess.held_out import read_held_out, take_held_out, text_of
from nmt.preprocess.plan import make_plan
from nmt.preprocess.report import build_report, report_page
from nmt.preprocess.sources import find_sources, has_split
from nmt.preprocess.statistics import Statistics
from nmt.preprocess.workspace import Job, Workspace, open_workspace, read_records, run_stage
from nmt.runtime.files import remove_leftovers, write_json

log = logging.getLogger(__name__)
_HELD_OUT = ("valid", "test")
_MANY_DROPPED = 0.05
_STAGE = "encode"


def prepare(config: PreprocessConfig) -> dict[str, Any]:
    """Make the data folder and return its report.

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
            work = stack.enter_context(open_workspace(resolve(config.data_dir)))
        return _run(config, work)


def _run(config: PreprocessConfig, work: Workspace) -> dict[str, Any]:
    found = find_sources(config, "train", work.spool)
    sources = {name: list(part) for name, part in groupby(found, key=lambda s: s.corpus)}
    held_out = {
        split: find_sources(config, split, work.spool)
        for split in _HELD_OUT
        if has_split(config.data, split)
    }
    job = Job(config, work, sources, held_out)
    work.start(job.fingerprint())
    spans = find_spans(sources, config.shard_pairs)
    if not spans:
        raise DataError("the training corpus is empty; give data.train a file with sentence pairs")
    job = take_held_out(job, spans)
    splits = read_held_out(job)
    tokenizers = make_plan(job, spans)
    run_stage(job, spans, _STAGE, start_encoding)
    report = _merge(job, splits, tokenizers, spans)
    if not config.report_only:
        work.finish()
    return report


def _merge(
    job: Job, splits: Mapping[str, list[Cleaned]], tokenizers: Tokenizers, spans: Sequence[Span]
) -> dict[str, Any]:
    """Make the data folder of shards that are done: held-out splits, report, and the index over
    all; return the report. No training text is read here, and no shard is written again.
    """
    folder = job.work.data
    remove_leftovers(folder)  # of workers that were lost
    corpora, index = _add_up(job, spans)
    _check_kept(job, corpora)
    results = {"train": corpora}
    encoder = ShardEncoder(job, None)
    for split, chunks in splits.items():
        for side, lines in zip(("src", "tgt"), text_of(chunks), strict=True):  # the references
            text = "".join(line + "\n" for line in lines)
            (folder / f"{split}.{side}").write_text(text, encoding="utf-8", newline="\n")
        results[split], index[split] = {}, []
        for name, part in groupby(chunks, key=lambda cleaned: cleaned.chunk.source.corpus):
            file = "-".join(filter(None, [split, name, "00000"]))
            results[split][name], shards = encoder.write(file, part)
            index[split].append(CorpusIndex(name, 1.0, shards))
    # where duplicates are dropped, the drops say how many they are
    repeats = None if job.config.filter.drops_duplicates else count_repeats(job.work.hashes)
    report = build_report(results, config=job.config, tokenizers=tokenizers, duplicates=repeats)
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
    }
    if tokenizers.src_vocab_size is not None:
        meta["src_vocab_size"] = tokenizers.src_vocab_size
    write_json(folder / "meta.json", meta)
    return report


def _add_up(
    job: Job, spans: Sequence[Span]
) -> tuple[dict[str, Statistics], dict[str, list[CorpusIndex]]]:
    """Add up the shards of each corpus."""
    results, index = {}, []
    for corpus in job.sources:
        results[corpus], shards = Statistics(), []
        for record in read_records(job, [s for s in spans if s.corpus == corpus], _STAGE):
            results[corpus].merge(Statistics.from_json(record["statistics"]))
            shards += [ShardFile(**shard) for shard in record["shards"]]
        if shards:
            weight = job.config.data.corpora[corpus].weight if corpus else 1.0
            index.append(CorpusIndex(corpus, weight, shards))
    return results, {"train": index}


def _check_kept(job: Job, corpora: Mapping[str, Statistics]) -> None:
    """Raise a `DataError` when no training pair is left; warn when many are not."""
    total = PairCounts()
    for corpus in corpora.values():
        total.merge(corpus.pairs)
    if total.kept == 0:
        raise none_left(total)
    percent = 100 * (1 - total.kept / total.read)
    lost = [item for item in total.dropped.most_common() if item[0] != HELD_OUT]
    if sum(number for _, number in lost) > _MANY_DROPPED * total.read:
        warning = "warning: %.1f %% of the training pairs were dropped, most of them for: %s (%s)"
        log.warning(warning, percent, lost[0][0], total.reasons())
    elif percent:
        log.info("dropped %.1f %% of the training pairs: %s", percent, total.reasons())
