"""Makes a data folder of units that are done: held-out splits, report, and the index over all.

No training text is read here, and no shard is written again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from nmt.data.binary import CorpusIndex, write_index
from nmt.data.tokenizer import Tokenizers, save_tokenizers
from nmt.errors import ConfigError, DataError
from nmt.files import write_json
from nmt.preprocess.counts import Counts
from nmt.preprocess.heldout import Split, write_split
from nmt.preprocess.job import Job
from nmt.preprocess.plan import drops_duplicates
from nmt.preprocess.rendering import report_page
from nmt.preprocess.repeats import count_repeats
from nmt.preprocess.report import CorpusResult, build_report
from nmt.preprocess.shards import Result, read_result, result_path

log = logging.getLogger(__name__)
_MANY_DROPPED = 0.05
_MANY_UNKNOWN = 0.001
_NUM_NAMED = 3


def merge(
    job: Job,
    splits: list[Split],
    tokenizers: Tokenizers,
    num_pairs: Mapping[str, int],
) -> dict[str, Any]:
    """Fill the data folder and return the report."""
    check_complete(job, num_pairs)
    corpora, index = _read_corpora(job, num_pairs)
    check_kept(job, [part.counts for part in corpora])
    parts = {"train": corpora}
    for split in splits:
        result = write_split(job, split, tokenizers)
        assert result.shard is not None  # no held-out pair is dropped, and there is one
        parts[split.name] = [CorpusResult("", result.counts, result.statistics)]
        index[split.name] = [CorpusIndex("", 1.0, [result.shard])]
    report = build_report(
        parts,
        config=job.config,
        tokenizers=tokenizers,
        duplicates=_count_duplicates(job),
    )
    _write(job, tokenizers, index, report)
    return report


def check_complete(job: Job, num_pairs: Mapping[str, int]) -> None:
    """Raise a `ConfigError` that names units which nobody has encoded."""
    units = [unit for corpus, size in num_pairs.items() for unit in job.units(corpus, size)]
    missing = [unit for unit in units if not result_path(job, unit).exists()]
    if missing:
        names = ", ".join(f"{unit.name}.arrow" for unit in missing[:_NUM_NAMED])
        more = f" and {len(missing) - _NUM_NAMED} more" if len(missing) > _NUM_NAMED else ""
        raise ConfigError(
            f"{len(missing)} of {len(units)} shards are not there: {names}{more}; run the jobs of "
            "shard=NUMBER/COUNT that failed again, or all: what is done is passed over"
        )


def check_kept(job: Job, counts: list[Counts]) -> None:
    """Raise a `DataError` when no training pair is left; warn when many are not."""
    total = Counts()
    for part in counts:
        total.merge(part)
    if total.read == 0:
        raise DataError("the training corpus is empty; give data.train a file with sentence pairs")
    reasons = _reasons(total)
    if total.kept == 0:
        raise DataError(
            f"all {total.read} training pairs were dropped ({reasons}); "
            f"look at the input, or raise max_length={job.config.max_length}"
        )
    share = 1 - total.kept / total.read
    if share > _MANY_DROPPED:
        main = max(total.dropped, key=lambda reason: total.dropped[reason])
        log.warning(
            "warning: %.1f %% of the training pairs were dropped, most of them for: %s (%s)",
            100 * share,
            main,
            reasons,
        )
    elif share:
        log.info("dropped %.1f %% of the training pairs: %s", 100 * share, reasons)


def _reasons(counts: Counts) -> str:
    return ", ".join(
        f"{number} {reason} ({counts.examples[reason][0]} first)"
        for reason, number in sorted(counts.dropped.items(), key=lambda item: -item[1])
    )


def _read_corpora(
    job: Job, num_pairs: Mapping[str, int]
) -> tuple[list[CorpusResult], dict[str, list[CorpusIndex]]]:
    parts, index = [], []
    for corpus, size in num_pairs.items():
        total, shards = Result(), []
        for unit in job.units(corpus, size):
            result = read_result(job, unit)
            total.counts.merge(result.counts)
            total.statistics.merge(result.statistics)
            shards += [] if result.shard is None else [result.shard]
        weight = job.config.data.corpora[corpus].weight if corpus else 1.0
        parts.append(CorpusResult(corpus, total.counts, total.statistics))
        if shards:
            index.append(CorpusIndex(corpus, weight, shards))
    return parts, {"train": index}


def _count_duplicates(job: Job) -> dict[str, int] | None:
    """Count pairs that came before; where they are dropped, the drops say how many they are."""
    return None if drops_duplicates(job.config) else count_repeats(job.work.hashes)


def _write(
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
