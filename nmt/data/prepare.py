"""Makes a data folder: reads the corpus, trains the tokenizer, writes ids, counts what was dropped
and why.

The folder is written beside its place and renamed into it, so that an interrupted run leaves none.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from nmt.config import DataConfig, PreprocessConfig
from nmt.data import corpus
from nmt.data.binary import write_pairs
from nmt.data.tokenizer import Tokenizers, save_tokenizers
from nmt.data.vocabulary import open_tokenizers, train_tokenizers
from nmt.errors import ConfigError, DataError
from nmt.files import replace_folder, write_json
from nmt.options import resolve

log = logging.getLogger(__name__)
FORMAT_VERSION = 1
_LINES_A_CHUNK = 20_000
_NUM_EXAMPLES = 5


@dataclass
class SplitReport:
    """What became of the pairs of one split."""

    read: int = 0
    kept: int = 0
    src_tokens: int = 0  # of the kept pairs, EOS not counted
    tgt_tokens: int = 0
    unknown_tokens: int = 0
    dropped: dict[str, int] = field(default_factory=dict)  # by reason
    examples: dict[str, list[int]] = field(default_factory=dict)  # the first lines dropped, from 1

    def drop(self, reason: str, line: int) -> None:
        """Count a dropped pair."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        if self.dropped[reason] <= _NUM_EXAMPLES:
            self.examples.setdefault(reason, []).append(line)


def prepare(config: PreprocessConfig) -> dict[str, SplitReport]:
    """Write the data folder `config.data_dir` and return a report by split.

    Raises `DataError` or `ConfigError` for input that cannot be used; the old folder, if any, then
    stays as it was.
    """
    _check_sources(config.data)
    with replace_folder(resolve(config.data_dir), marker="meta.json") as folder:
        tokenizer = _train_tokenizer(config)
        save_tokenizers(folder, tokenizer)
        reports = {"train": _write_train(folder, config, tokenizer)}
        for split in ("valid", "test"):
            if corpus.has_split(config.data, split):
                reports[split] = _write_held_out(folder, split, config, tokenizer)
        plain = {name: asdict(report) for name, report in reports.items()}
        write_json(folder / "report.json", plain)
        write_json(folder / "meta.json", _meta(folder, config, tokenizer, reports))
    return reports


def _check_sources(config: DataConfig) -> None:
    for split in ("train", "valid"):
        if not corpus.has_split(config, split):
            raise ConfigError(
                f"data.{split} is missing; give data.{split}.src=FILE and data.{split}.tgt=FILE "
                f"(or data.{split}.tsv=FILE), or choose a corpus: data=numbers"
            )


def _usable(pairs: Iterable[corpus.Pair], report: SplitReport) -> Iterator[tuple[int, corpus.Pair]]:
    for line, (source, target) in enumerate(pairs, start=1):
        report.read += 1
        if source.strip() and target.strip():
            yield line, (source, target)
        else:
            report.drop("empty side", line)


def _train_tokenizer(config: PreprocessConfig) -> Tokenizers:
    if config.tokenizer.model is not None:
        return open_tokenizers(config)
    pairs = corpus.read_pairs(config.data, "train", seed=config.seed)
    usable = (pair for _, pair in _usable(pairs, SplitReport()))
    first = next(usable, None)
    if first is None:
        raise DataError("the training corpus is empty: no pair has text on both sides")
    sources, targets = zip(*_chain(first, usable), strict=True)
    return train_tokenizers(config, sources, targets)


def _chain(first: corpus.Pair, rest: Iterable[corpus.Pair]) -> Iterator[corpus.Pair]:
    yield first
    yield from rest


def _write_train(folder: Path, config: PreprocessConfig, tokenizer: Tokenizers) -> SplitReport:
    report = SplitReport()
    lines = _usable(corpus.read_pairs(config.data, "train", seed=config.seed), report)
    ids = _encode(lines, tokenizer, report, config, keep_all=False)
    write_pairs(folder / "train-00000.arrow", ids, _vocab_size(tokenizer))
    if report.kept == 0:
        raise DataError(
            f"all {report.read} training pairs were dropped ({_reasons(report)}); "
            f"look at the input, or raise max_length={config.max_length}"
        )
    if report.read > report.kept:
        share = 100 * (1 - report.kept / report.read)
        level = logging.WARNING if share > 5 else logging.INFO
        log.log(level, "dropped %.1f %% of the training pairs: %s", share, _reasons(report))
    return report


def _write_held_out(
    folder: Path, split: str, config: PreprocessConfig, tokenizer: Tokenizers
) -> SplitReport:
    """Write raw text for references, and for `valid` the ids too; nothing is dropped."""
    report = SplitReport()
    pairs = list(corpus.read_pairs(config.data, split, seed=config.seed))
    if not pairs:
        raise DataError(
            f"the {split} corpus is empty; give data.{split} a file with sentence pairs"
        )
    for side, name in enumerate(("src", "tgt")):
        text = "".join(pair[side] + "\n" for pair in pairs)
        (folder / f"{split}.{name}").write_text(text, encoding="utf-8", newline="\n")
    report.read = len(pairs)
    ids = _encode(enumerate(pairs, start=1), tokenizer, report, config, keep_all=True)
    write_pairs(folder / f"{split}-00000.arrow", ids, _vocab_size(tokenizer))
    return report


def _encode(
    lines: Iterable[tuple[int, corpus.Pair]],
    tokenizer: Tokenizers,
    report: SplitReport,
    config: PreprocessConfig,
    *,
    keep_all: bool,
) -> Iterator[tuple[list[int], list[int]]]:
    lines = iter(lines)
    num_threads = config.num_threads or -1
    while chunk := list(islice(lines, _LINES_A_CHUNK)):
        sources = tokenizer.src.encode_batch([pair[0] for _, pair in chunk], num_threads)
        targets = tokenizer.tgt.encode_batch([pair[1] for _, pair in chunk], num_threads)
        for (line, _), src, tgt in zip(chunk, sources, targets, strict=True):
            if not keep_all and max(len(src), len(tgt)) + 1 > config.max_length:
                report.drop("too long", line)
                continue
            report.kept += 1
            report.src_tokens += len(src)
            report.tgt_tokens += len(tgt)
            report.unknown_tokens += src.count(tokenizer.src.unk_id)
            report.unknown_tokens += tgt.count(tokenizer.tgt.unk_id)
            yield src, tgt


def _reasons(report: SplitReport) -> str:
    return ", ".join(
        f"{count} {reason} (line {report.examples[reason][0]} first)"
        for reason, count in sorted(report.dropped.items(), key=lambda item: -item[1])
    )


def _meta(
    folder: Path, config: PreprocessConfig, tokenizer: Tokenizers, reports: dict[str, SplitReport]
) -> dict[str, Any]:
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.arrow")):
        with path.open("rb") as stream:
            shutil.copyfileobj(stream, _HashWriter(digest))
    return {
        "format_version": FORMAT_VERSION,
        "src_lang": config.data.src_lang,
        "tgt_lang": config.data.tgt_lang,
        "vocab_size": tokenizer.tgt.vocab_size,
        "tokenizer_sha256": tokenizer.sha256,
        "data_sha256": digest.hexdigest(),
        "max_length": config.max_length,
        "num_pairs": {name: report.kept for name, report in reports.items()},
    }


def _vocab_size(tokenizer: Tokenizers) -> int:
    return max(tokenizer.src.vocab_size, tokenizer.tgt.vocab_size)


class _HashWriter:
    """Lets `shutil.copyfileobj` feed a hash."""

    def __init__(self, digest: Any) -> None:
        self.write = digest.update
