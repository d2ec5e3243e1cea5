"""Decide everything that must be known before the training text is encoded, after one scan of it:
the held-out sets that are taken out of it, the tokenizers, and which pairs are duplicates.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress
from pathlib import Path

import numpy as np

from nmt.config import PreprocessConfig, TokenizerConfig
from nmt.data.tokenizer import Tokenizers, load_tokenizers, save_tokenizers
from nmt.data.vocabulary import open_tokenizers, train_tokenizers
from nmt.errors import DataError
from nmt.preprocess.characters import LineSet, normal_form
from nmt.preprocess.chunks import Span
from nmt.preprocess.clean import PairCounts
from nmt.preprocess.duplicates import find_duplicates, hash_forms
from nmt.preprocess.filters import no_pairs_left
from nmt.preprocess.held_out import (
    first_held_out_limit,
    read_taken_lines,
    requested_numbers,
    take_held_out,
)
from nmt.preprocess.scan import ALL_KEYS, Keys, ScanLimits, scan
from nmt.preprocess.workspace import Job, read_records
from nmt.runtime.files import replace_file, replace_json
from nmt.runtime.pool import Processes, Workers

log = logging.getLogger(__name__)
_PLAN = "plan.json"
_STAGE = "scan"
_SPARE_FACTOR = 2  # the first limit leaves twice the needed pairs if none is dropped
_MAX_BYTES_IN_PROCESS = 1 << 20  # of text: training on it is as fast as starting a process
_BLOCK_PAIRS = 5_000


def scan_training_text(job: Job, spans: Sequence[Span]) -> Job:
    """Scan the training text if needed, and return the job with its held-out sets.

    Raises a `ConfigError` if the text has too few pairs for them.
    """
    numbers = requested_numbers(job.config)
    trains_tokenizer = job.config.tokenizer.model is None
    limits = _first_limits(job, spans)
    if trains_tokenizer or numbers or job.config.filter.drops_duplicates:
        scan(job, spans, _STAGE, limits)
    return take_held_out(job, spans, _STAGE, limits)


def make_tokenizers(job: Job, spans: Sequence[Span]) -> Tokenizers:
    """Return the tokenizers, and find the duplicates, unless an earlier run did so.

    The plan folder keeps both.
    """
    folder = job.work.plan
    if (folder / _PLAN).exists():
        return load_tokenizers(folder)
    lines = read_taken_lines(job)
    if job.config.tokenizer.model is not None:
        save_tokenizers(folder, open_tokenizers(job.config))
    else:
        end = _draw_sample(job, spans, lines)
        log.info("training the tokenizer")
        paths = [folder / f"{span.name}.pairs" for span in spans]
        make_trainer = partial(partial, _train, job.config, paths, end)
        # in a process, since SentencePiece ignores Ctrl-C and never releases its memory
        worker: Workers[Path, None] = Workers(make_trainer)
        if sum(path.stat().st_size for path in paths) > _MAX_BYTES_IN_PROCESS:
            worker = Processes(1, make_trainer)
        with worker:
            list(worker.map([folder]))
    if job.config.filter.drops_duplicates:
        find_duplicates(job.work.hashes, _hash_taken(lines))
    replace_json(folder / _PLAN, {})
    for path in itertools.chain(folder.glob("*.keys"), folder.glob("*.pairs")):
        path.unlink()
    return load_tokenizers(folder)


def _first_limits(job: Job, spans: Sequence[Span]) -> ScanLimits:
    num_pairs = sum(span.num_pairs for span in spans)
    sample = 0
    if job.config.tokenizer.model is None:
        sample = first_limit(sample_size(job.config.tokenizer), num_pairs)
    return ScanLimits(sample, first_held_out_limit(requested_numbers(job.config), num_pairs))


def _hash_taken(lines: Sequence[str]) -> Keys | None:
    """Return the hashes of the normal forms of sentences that were taken for held-out sets."""
    forms = list(filter(None, map(normal_form, lines)))
    return hash_forms(forms, forms)[:, 0] if forms else None


def _train(config: PreprocessConfig, paths: list[Path], end: np.uint64, folder: Path) -> None:
    """Train tokenizers on the sample, the pairs with keys below `end`; write them to `folder`."""

    def lines(side: int) -> Iterator[str]:
        for path in paths:
            is_sampled = np.fromfile(path.with_suffix(".keys"), np.uint64) < end
            with path.open(encoding="utf-8", newline="\n") as stream:
                for pair in compress(zip(stream, stream, strict=True), is_sampled.tolist()):
                    yield pair[side].removesuffix("\n")

    save_tokenizers(folder, train_tokenizers(config, lines(0), lines(1)))


def _draw_sample(job: Job, spans: Sequence[Span], taken: Sequence[str]) -> np.uint64:
    """Return the key that ends the sample; the pairs below it lie in the files of the spans.

    Scans the text again, for all pairs, if the first scan found too few.
    """
    size = sample_size(job.config.tokenizer)
    limits = _first_limits(job, spans)
    keys = _read_keys(job, spans, taken)
    stage = _STAGE
    # an interrupted second scan may have written some of the larger keys
    num_below_limit = np.count_nonzero(keys < np.uint64(limits.sample))
    if num_below_limit < size and limits.sample < ALL_KEYS:
        stage = f"{_STAGE} for the sample"
        scan(job, spans, stage, replace(limits, sample=ALL_KEYS))
        keys = _read_keys(job, spans, taken)
    if not (keys < np.uint64(ALL_KEYS)).any():
        counts = PairCounts()
        for record in read_records(job, spans, stage):
            counts.merge(PairCounts.from_json(record["pairs"]))
        if counts.kept == 0:
            raise no_pairs_left(counts)
        raise DataError(
            "all training pairs share a sentence with the held-out sets, so none is left; "
            "set smaller numbers in data.valid.num_pairs and data.test.num_pairs"
        )
    return sample_end(keys, size)


def _read_keys(job: Job, spans: Sequence[Span], taken: Sequence[str]) -> Keys:
    """Return the keys of the sampled pairs, after pairs with sentences in `taken` are removed."""
    paths = [job.work.plan / f"{span.name}.pairs" for span in spans]
    if taken:
        line_set = LineSet(taken)
        for path in paths:
            _remove_pairs(path, line_set)
    return np.concatenate([np.fromfile(path.with_suffix(".keys"), np.uint64) for path in paths])


def _remove_pairs(path: Path, taken: LineSet) -> None:
    """Remove the keys of sampled pairs with a sentence in `taken`.

    A removed pair gets the largest key, which is never part of a sample.
    """
    keys = np.fromfile(path.with_suffix(".keys"), np.uint64)
    with path.open(encoding="utf-8", newline="\n") as stream:
        for start in range(0, len(keys), _BLOCK_PAIRS):
            lines = [line.removesuffix("\n") for line in itertools.islice(stream, 2 * _BLOCK_PAIRS)]
            is_taken = taken.mask(lines[::2]) | taken.mask(lines[1::2])
            keys[start : start + _BLOCK_PAIRS][is_taken] = ALL_KEYS
    with replace_file(path.with_suffix(".keys")) as temporary:
        keys.tofile(temporary)


def sample_size(config: TokenizerConfig) -> int:
    """Return the number of pairs that give a tokenizer at most `max_sentences` lines."""
    return config.max_sentences if config.separate else max(1, config.max_sentences // 2)


def first_limit(size: int, num_pairs: int) -> int:
    """Return a key with probably `size` of `num_pairs` pairs below it after some are dropped."""
    return min(ALL_KEYS, _SPARE_FACTOR * (size + 1000) * ALL_KEYS // max(num_pairs, 1))


def sample_end(keys: Keys, size: int) -> np.uint64:
    """Return the key that ends the sample of the `size` smallest keys."""
    return np.partition(keys, size)[size] if len(keys) > size else np.uint64(ALL_KEYS)
