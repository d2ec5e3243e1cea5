"""Makes a data folder of parallel text: finds the spans of the corpora, makes the plan (see
`plan.py`), encodes each span into a shard, and writes report and index over all.

A shard is one Arrow file, and the task that writes it reads its pairs from the input itself, so
that any process on any machine can do it, in any order. It is done when its record is there, with
the counts of its pairs; written again, it has the same bytes.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nmt.config import PreprocessConfig, resolve
from nmt.data.binary import CorpusIndex, ShardFile, ShardWriter, write_index
from nmt.data.languages import describe_languages
from nmt.data.tokenizer import Tokenizers, load_tokenizers, save_tokenizers
from nmt.errors import ConfigError, DataError
from nmt.files import remove_leftovers, replace_file, write_json
from nmt.preprocess.chunks import Span, find_spans, read_chunks, read_span
from nmt.preprocess.clean import Cleaned, PairCounts, clean
from nmt.preprocess.duplicates import HashWriter, count_repeats, read_seen
from nmt.preprocess.encode import ChunkEncoder, EncodedChunk
from nmt.preprocess.filters import HELD_OUT, check_filters
from nmt.preprocess.held_out import read_taken, take_held_out
from nmt.preprocess.plan import drops_duplicates, make_plan
from nmt.preprocess.report import build_report, report_page
from nmt.preprocess.sources import find_sources, has_split
from nmt.preprocess.statistics import HeldOut, Statistics
from nmt.preprocess.workspace import (
    Job,
    Task,
    Workspace,
    describe,
    open_workspace,
    read_records,
    run_stage,
)

log = logging.getLogger(__name__)
_HELD_OUT = ("valid", "test")
_MANY_DROPPED = 0.05
_SPANS, _STAGE = "spans.json", "encode"


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
    spans = _find_spans(job)
    job = take_held_out(job, spans)
    splits = _read_held_out(job)
    tokenizers = make_plan(job, spans)
    run_stage(job, spans, _STAGE, _start_encoding)
    report = _merge(job, splits, tokenizers, spans)
    if not config.report_only:
        work.finish()
    return report


def _find_spans(job: Job) -> list[Span]:
    """Return the spans of all corpora, which the work folder keeps."""
    path = job.work.plan / _SPANS
    if not path.exists():
        job.work.write(path, [asdict(s) for s in find_spans(job.sources, job.config.shard_pairs)])
    found = [Span(**span) for span in json.loads(path.read_text(encoding="utf-8"))]
    if not found:
        raise DataError("the training corpus is empty; give data.train a file with sentence pairs")
    return found


def _read_held_out(job: Job) -> dict[str, list[Cleaned]]:
    """Read validation and test set, of which all pairs stay; an empty one is a `DataError`."""
    splits = {}
    for split, sources in job.held_out.items():
        chunks = read_chunks(sources)
        splits[split] = [clean(chunk, job.config, held_out=True) for chunk in chunks]
        if not splits[split]:
            raise DataError(
                f"the {split} corpus is empty; give data.{split} a file with sentence pairs"
            )
    return splits


def _text_of(chunks: list[Cleaned]) -> tuple[list[str], list[str]]:
    """Return all sources and all targets."""
    src = [line for chunk in chunks for line in chunk.src]
    return src, [line for chunk in chunks for line in chunk.tgt]


def _start_encoding(job: Job) -> Task:
    """Return the task that writes the shard of a span; its record has the shard and its counts."""
    config, tokenizers = job.config, load_tokenizers(job.work.plan)
    drops, taken = drops_duplicates(config), read_taken(job)
    known = HeldOut({split: _text_of(chunks) for split, chunks in _read_held_out(job).items()})
    encoder = ChunkEncoder(config, job.work.plan, known, taken=taken, has_hashes=not drops)

    def encode(span: Span) -> dict[str, Any]:
        num_bytes = 0
        seen = read_seen(job.work.hashes, span.order, span.num_pairs) if drops else None
        with HashWriter(job.work.hashes, span.order) as hashes:

            def encoded() -> Iterable[EncodedChunk]:
                nonlocal num_bytes
                for chunk in read_span(job.sources[span.corpus], span):
                    num_bytes += sum(map(len, chunk.raw))
                    start = chunk.first_pair - span.first_pair
                    end = start + chunk.num_pairs
                    result = encoder.encode(chunk, None if seen is None else seen[start:end])
                    if result.hashes is not None:
                        hashes.add(result.hashes)
                    yield result

            statistics, shards = _write_shard(job, span.name, encoded(), tokenizers)
        content = {"statistics": statistics.to_json(), "shards": [*map(asdict, shards)]}
        return {"bytes": num_bytes, **content}

    return encode


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
    spans: Sequence[Span],
) -> dict[str, Any]:
    """Make the data folder of shards that are done: held-out splits, report, and the index over
    all; return the report. No training text is read here, and no shard is written again.
    """
    folder = job.work.data
    remove_leftovers(folder)  # of workers that were lost
    corpora, index = _add_up(job, spans)
    _check_kept(job, corpora)
    results = {"train": corpora}
    encoder = ChunkEncoder(job.config, job.work.plan, None, has_hashes=False)
    for split, chunks in splits.items():
        for side, lines in zip(("src", "tgt"), _text_of(chunks), strict=True):  # the references
            text = "".join(line + "\n" for line in lines)
            (folder / f"{split}.{side}").write_text(text, encoding="utf-8", newline="\n")
        results[split], index[split] = {}, []
        for name, part in groupby(chunks, key=lambda cleaned: cleaned.chunk.source.corpus):
            encoded = map(encoder.encode_held_out, part)
            file = "-".join(filter(None, [split, name, "00000"]))
            results[split][name], shards = _write_shard(job, file, encoded, tokenizers)
            index[split].append(CorpusIndex(name, 1.0, shards))
    # where duplicates are dropped, the drops say how many they are
    repeats = None if drops_duplicates(job.config) else count_repeats(job.work.hashes)
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
        "made_of": describe(job.config),
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
