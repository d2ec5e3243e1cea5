"""Turn parallel text into a data folder.

This divides the corpora into spans, scans them once, trains the tokenizers, encodes each span into
a shard, and writes the report and `meta.json`. A span is a range of pairs, and its shard is one
Arrow file. Any process on any machine can encode any span, since each process reads the input
itself.

A worker that has encoded a span writes a record with the counts of its pairs. A span with a record
is not encoded again. Encoding a span twice gives the same bytes.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from nmt.config import PreprocessConfig, resolve_path
from nmt.data.binary import CorpusShards, write_lengths
from nmt.data.languages import describe_languages
from nmt.data.shards import ShardFile
from nmt.data.tokenizer import Tokenizers, save_tokenizers
from nmt.errors import ConfigError, DataError
from nmt.preprocess.chunks import DataSource, Span, find_spans
from nmt.preprocess.clean_chunk import CleanChunk, PairCounts
from nmt.preprocess.duplicates import count_repeats
from nmt.preprocess.encode import ShardEncoder, make_encoding_task
from nmt.preprocess.filters import HELD_OUT, check_filters, no_pairs_left_error
from nmt.preprocess.held_out import (
    collect_lines,
    read_held_out,
    warn_of_swapped_sides,
    write_lines,
)
from nmt.preprocess.plan import make_tokenizers_and_mark_duplicates, scan_training_text
from nmt.preprocess.report import build_report, render_data_report
from nmt.preprocess.sources import find_sources, has_split
from nmt.preprocess.statistics import Statistics
from nmt.preprocess.workspace import Job, Workspace, open_workspace, read_records, run_stage
from nmt.runtime.files import remove_all_temporary, write_json

log = logging.getLogger(__name__)
_HELD_OUT_SPLITS = ("valid", "test")
_MAX_DROPPED_SHARE = 0.05  # if more of the training pairs are dropped, a warning is logged
_STAGE = "encode"


def prepare(config: PreprocessConfig) -> dict[str, Any]:
    """Make the data folder and return its report.

    Raises a subclass of `NmtError` for a user's mistake. An existing data folder then stays as it
    is.
    """
    check_filters(config)
    alternatives = {
        "train": "choose a built-in corpus, for example data=numbers",
        "valid": "take pairs out of the training text: data.valid.num_pairs=2000",
    }
    for split, alternative in alternatives.items():
        if not has_split(config.data, split):
            raise ConfigError(
                f"data.{split} is missing; give data.{split}.src=FILE and data.{split}.tgt=FILE "
                f"(or data.{split}.tsv=FILE), or {alternative}"
            )
    with open_workspace(resolve_path(config.data_dir)) as work:
        job = _make_job(config, work)
        work.start(job.fingerprint())
        spans = find_spans(job.sources, config.shard_pairs)
        if not spans:
            raise DataError(
                "the training corpus is empty; give data.train a file with sentence pairs"
            )
        if not config.overwrite:
            num_pairs = sum(span.num_pairs for span in spans)
            work.check_existing_pairs(num_pairs)  # an existing data folder must have as many
        # this may take held-out sets out of the training text, which the new job then contains
        job = scan_training_text(job, spans)
        held_out_chunks = read_held_out(job)
        # a validation set taken out of training text with swapped sides is swapped too
        if config.data.valid.num_pairs is None:
            warn_of_swapped_sides(job, spans, held_out_chunks["valid"])
        tokenizers = make_tokenizers_and_mark_duplicates(job, spans)
        run_stage(job, spans, _STAGE, make_encoding_task)  # workers load the saved tokenizers
        report = _finish_folder(job, held_out_chunks, tokenizers, spans)
        work.finish(overwrite=config.overwrite)
    return report


def _make_job(config: PreprocessConfig, work: Workspace) -> Job:
    """Find the sources of all splits, and return the job that reads them.

    Text from archives, compressed files and datasets is first copied to files in `work.spool`.
    """
    train_sources = find_sources(config, "train", work.spool)
    by_corpus: dict[str, list[DataSource]] = {}
    for source in train_sources:
        by_corpus.setdefault(source.corpus, []).append(source)
    held_out = {}
    for split in _HELD_OUT_SPLITS:
        if has_split(config.data, split):
            held_out[split] = find_sources(config, split, work.spool)
    return Job(config, work, sources=by_corpus, held_out=held_out)


def _finish_folder(
    job: Job,
    held_out_chunks: Mapping[str, list[CleanChunk]],
    tokenizers: Tokenizers,
    spans: Sequence[Span],
) -> dict[str, Any]:
    """Complete the data folder after all shards are written, and return the report.

    Writes held-out splits, report, tokenizers and `meta.json`. `held_out_chunks` is the result of
    `read_held_out`.
    """
    folder = job.work.data
    remove_all_temporary(folder)  # temporary files of workers that were killed
    train_statistics, train_corpora = _merge_records(job, spans)
    _check_dropped(train_statistics)
    statistics = {"train": train_statistics}
    corpora_by_split = {"train": train_corpora}
    # Training pairs with held-out sentences are dropped. `held_out=None` switches this off, since
    # the held-out pairs themselves are encoded here.
    encoder = ShardEncoder(job, held_out=None)
    for split, chunks in held_out_chunks.items():
        src, tgt = collect_lines(chunks)
        write_lines(folder / f"{split}.src", src)
        write_lines(folder / f"{split}.tgt", tgt)
        statistics[split], corpora_by_split[split] = _encode_held_out(encoder, split, chunks)
    duplicates = None
    # if the filter drops duplicates, the report already counts them among the dropped pairs
    if not job.config.filter.drops_duplicates:
        duplicates = count_repeats(job.work.hashes)
    report = build_report(
        statistics, config=job.config, tokenizers=tokenizers, duplicates=duplicates
    )
    save_tokenizers(folder, tokenizers)
    write_json(folder / "report.json", report)
    (folder / "report.html").write_text(render_data_report(report), encoding="utf-8", newline="\n")
    split_values = write_lengths(folder, corpora_by_split)
    meta = {
        **split_values,
        **describe_languages(job.config.data),
        "temperature": job.config.data.temperature,  # evens out the shares of the corpora
        "vocab_size": tokenizers.tgt.vocab_size,
        "tokenizer_sha256": tokenizers.sha256,
        "max_length": job.config.max_length,
    }
    if tokenizers.src_vocab_size is not None:
        meta["src_vocab_size"] = tokenizers.src_vocab_size
    write_json(folder / "meta.json", meta)
    return report


def _encode_held_out(
    encoder: ShardEncoder, split: str, chunks: list[CleanChunk]
) -> tuple[dict[str, Statistics], list[CorpusShards]]:
    """Write the shards of a held-out split. Returns the statistics of each corpus and its shards.

    Without `data.corpora`, the only corpus has the name "".
    """
    statistics_by_corpus = {}
    corpora = []
    # the chunks are sorted by corpus, as are the sources of a job
    for corpus, corpus_chunks in groupby(chunks, key=lambda chunk: chunk.corpus):
        shard_name = f"{split}-{corpus}-00000" if corpus else f"{split}-00000"
        statistics_by_corpus[corpus], shards = encoder.write(shard_name, corpus_chunks)
        corpora.append(CorpusShards(corpus, weight=1.0, shards=shards))
    return statistics_by_corpus, corpora


def _merge_records(
    job: Job, spans: Sequence[Span]
) -> tuple[dict[str, Statistics], list[CorpusShards]]:
    """Merge the records of all spans. Returns statistics and shards of each training corpus.

    Without `data.corpora`, the only corpus has the name "" and the weight 1.
    """
    statistics_by_corpus = {}
    corpora = []
    for corpus in job.sources:
        statistics = Statistics()
        shards = []
        corpus_spans = [span for span in spans if span.corpus == corpus]
        for record in read_records(job, corpus_spans, _STAGE):
            statistics.merge(Statistics.from_json(record["statistics"]))
            shards += [ShardFile(**shard) for shard in record["shards"]]
        statistics_by_corpus[corpus] = statistics
        if shards:
            weight = job.config.data.corpora[corpus].weight if corpus else 1.0
            corpora.append(CorpusShards(corpus, weight=weight, shards=shards))
    return statistics_by_corpus, corpora


def _check_dropped(corpora: Mapping[str, Statistics]) -> None:
    """Raise a `DataError` if no training pair is kept. Warns if many were dropped."""
    total_counts = PairCounts()
    for statistics in corpora.values():
        total_counts.merge(statistics.pairs)
    if total_counts.kept == 0:
        raise no_pairs_left_error(total_counts)
    dropped = Counter(total_counts.dropped)
    dropped.pop(HELD_OUT, None)  # held-out pairs are dropped on purpose, so they cause no warning
    if dropped.total() > _MAX_DROPPED_SHARE * total_counts.read:
        log.warning(
            "warning: %.1f %% of the training pairs were dropped, most of them for: %s (%s)",
            100 * dropped.total() / total_counts.read,
            dropped.most_common(1)[0][0],
            total_counts.list_reasons(),
        )
    elif total_counts.kept < total_counts.read:
        percent = 100 * (1 - total_counts.kept / total_counts.read)
        log.info("dropped %.1f %% of the training pairs: %s", percent, total_counts.list_reasons())
