"""Prepare for encoding: take held-out sets out of the text, train tokenizers, mark duplicates.

One scan of the training text suffices for all three, unless the filters drop unusually many pairs.
The results are stored in the plan folder, so that an interrupted run does not repeat this work.

In this file, a key is a sample key: a hash of the number of a pair (see `scan.py`). The sample for
the tokenizers consists of the pairs with the smallest keys. The largest of these keys is known only
after a scan, since the filters drop pairs. So the first scan writes all pairs with keys below
`KeyLimits.sample_below`, an estimate that is probably too high. Held-out sets are chosen by other
keys, which are limited by `KeyLimits.held_out_below`.

"Taken" lines are the sentences of the pairs that were taken out of the training text for held-out
sets.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Literal, TextIO

import numpy as np

from nmt.config import PreprocessConfig, TokenizerConfig
from nmt.data.extension import extend_tokenizers
from nmt.data.text import MAX_LINE_BYTES
from nmt.data.tokenizer import Tokenizers, load_tokenizers, save_tokenizers
from nmt.data.vocabulary import ReadSide, open_tokenizers, train_tokenizers
from nmt.errors import DataError
from nmt.preprocess.characters import LineSet, normal_form
from nmt.preprocess.chunks import Span
from nmt.preprocess.clean_chunk import PairCounts
from nmt.preprocess.duplicates import find_duplicates, hash_normal_forms
from nmt.preprocess.filters import no_pairs_left_error
from nmt.preprocess.held_out import (
    held_out_key_limit,
    read_taken_sentences,
    requested_sizes,
    take_held_out,
)
from nmt.preprocess.scan import MAX_KEY, KeyLimits, Keys, scan
from nmt.preprocess.workspace import Job, read_records
from nmt.runtime.files import replace_file, replace_json
from nmt.runtime.pool import CurrentProcess, Processes, Workers
from nmt.runtime.reading import open_regular

log = logging.getLogger(__name__)
_DONE_MARKER = "plan.json"  # written to the plan folder when it is complete
_SCAN_STAGE = "scan"  # name of the first scan and of the folder of its records, see `run_stage`
_EXCLUDED_KEY = MAX_KEY  # replaces the key of a pair that must not be in the sample
# For a sample of S pairs, the first scan writes 2 * (S + 1000) pairs, since some are dropped later.
_SPARE_FACTOR = 2
_SPARE_PAIRS = 1000
_MAX_BYTES_IN_PROCESS = 1 << 20  # starting a process takes longer than training on this much text
_BLOCK_PAIRS = 5_000  # pairs that are read at a time


def scan_training_text(job: Job, spans: Sequence[Span]) -> Job:
    """Scan the training text if the settings require it, and take the held-out sets out of it.

    Returns the job with these sets. Raises a `ConfigError` if the text has too few pairs for them.
    """
    config = job.config
    limits = _first_scan_limits(job, spans)
    needs_scan = (
        config.tokenizer.learns_from_text
        or bool(requested_sizes(config))
        or config.filter.drops_duplicates
    )
    if needs_scan:
        scan(job, spans, _SCAN_STAGE, limits)
    return take_held_out(job, spans, _SCAN_STAGE, limits)


def make_tokenizers_and_mark_duplicates(job: Job, spans: Sequence[Span]) -> Tokenizers:
    """Train, extend or copy the tokenizers, mark duplicate pairs, and return the tokenizers.

    Only loads the tokenizers if an earlier run completed the plan folder.
    """
    folder = job.work.plan
    if (folder / _DONE_MARKER).exists():
        return load_tokenizers(folder)
    taken_lines = read_taken_sentences(job)
    if job.config.tokenizer.learns_from_text:
        _train_tokenizers(job, spans, taken_lines)
    else:

        def read_nothing(side: Literal["src", "tgt"]) -> list[str]:
            """Return no text, since these tokenizers learn nothing from text."""
            return []

        save_tokenizers(folder, _make_tokenizers(job.config, read_nothing))
    if job.config.filter.drops_duplicates:
        find_duplicates(
            job.work.hashes,
            _hash_lines(taken_lines),
            has_scores=job.config.data.has_scores,
        )
    replace_json(folder / _DONE_MARKER, {})
    # only removed now, since a run that is interrupted before the marker needs them again
    for path in itertools.chain(folder.glob("*.keys"), folder.glob("*.pairs")):
        path.unlink()
    return load_tokenizers(folder)


def _first_scan_limits(job: Job, spans: Sequence[Span]) -> KeyLimits:
    """Return limits of keys that usually give the first scan enough pairs.

    If the filters drop too many of these pairs, a second scan follows.
    """
    num_pairs = sum(span.num_pairs for span in spans)
    sample_below = 0
    if job.config.tokenizer.learns_from_text:
        sample_below = estimate_scan_limit(sample_size(job.config.tokenizer), num_pairs)
    return KeyLimits(
        sample_below=sample_below,
        held_out_below=held_out_key_limit(requested_sizes(job.config), num_pairs),
    )


def _hash_lines(lines: Sequence[str]) -> Keys | None:
    """Return the hashes of the nonempty normal forms of lines, or None if all are empty."""
    forms = [form for form in map(normal_form, lines) if form]
    if not forms:
        return None
    return hash_normal_forms(forms)


def _train_tokenizers(job: Job, spans: Sequence[Span], taken_lines: Sequence[str]) -> None:
    """Train the tokenizers on a sample of the training text. Writes them to the plan folder."""
    sample_limit = _complete_sample(job, spans, taken_lines)
    action = "extending" if job.config.tokenizer.model else "training"
    log.info("%s the tokenizer", action)
    pair_files = _pair_files(job, spans)
    make_trainer = partial(_make_trainer, job.config, pair_files, sample_limit)
    worker: Workers[Path, None] = CurrentProcess(make_trainer)
    if sum(path.stat().st_size for path in pair_files) > _MAX_BYTES_IN_PROCESS:
        # SentencePiece ignores Ctrl-C and never releases its memory, so it gets its own process
        worker = Processes(1, make_trainer)
    with worker:
        # a single task, which writes the tokenizers to the plan folder
        results = worker.map([job.work.plan])
        list(results)  # runs the task and waits for its end


def _make_trainer(
    config: PreprocessConfig, pair_files: list[Path], sample_limit: np.uint64
) -> Callable[[Path], None]:
    """Return a function that trains on the pairs with keys below `sample_limit`.

    The function writes the tokenizers to the folder that is its argument.
    """

    def read_sample(side: Literal["src", "tgt"]) -> Iterator[str]:
        side_index = 0 if side == "src" else 1
        for path in pair_files:
            is_sampled = _read_keys(path) < sample_limit
            with _open_pairs(path, len(is_sampled)) as stream:
                # a pair is two consecutive lines, which `zip` takes from the same stream
                pairs = zip(stream, stream, strict=True)
                for pair in compress(pairs, is_sampled.tolist()):
                    yield pair[side_index].removesuffix("\n")

    def train(folder: Path) -> None:
        save_tokenizers(folder, _make_tokenizers(config, read_sample))

    return train


def _make_tokenizers(config: PreprocessConfig, read_sample: ReadSide) -> Tokenizers:
    """Train the tokenizers on a sample of the text, or open existing ones and extend them."""
    if config.tokenizer.model is None:
        return train_tokenizers(config, read_sample)
    tokenizers = open_tokenizers(config)
    if config.tokenizer.extend is None:
        return tokenizers
    return extend_tokenizers(tokenizers, config, read_sample)


def _complete_sample(job: Job, spans: Sequence[Span], taken_lines: Sequence[str]) -> np.uint64:
    """Complete the files of the sample for the tokenizers, and return the limit of the sample.

    The sample consists of the pairs in these files whose keys are below the limit. Rewrites the
    files of keys to exclude pairs with a taken line. If fewer pairs are left than the sample needs,
    scans the text again to write all pairs to the files.
    """
    size = sample_size(job.config.tokenizer)
    limits = _first_scan_limits(job, spans)
    pair_files = _pair_files(job, spans)
    stage = _SCAN_STAGE
    keys = _exclude_taken(pair_files, taken_lines)
    # An interrupted second scan has written all keys to some files, but not to all. Only the keys
    # below the limit of the first scan are counted, so that the second scan is then continued.
    num_below_limit = np.count_nonzero(keys < np.uint64(limits.sample_below))
    if num_below_limit < size and limits.sample_below < MAX_KEY:
        stage = f"{_SCAN_STAGE} for the sample"
        scan(job, spans, stage, replace(limits, sample_below=MAX_KEY))
        keys = _exclude_taken(pair_files, taken_lines)
    is_included = keys != np.uint64(_EXCLUDED_KEY)
    if not is_included.any():  # also if there are no keys at all
        counts = PairCounts()
        for record in read_records(job, spans, stage):
            counts.merge(PairCounts.from_json(record["pairs"]))
        if counts.kept == 0:
            raise no_pairs_left_error(counts)
        raise DataError(
            "all training pairs share a sentence with the held-out sets, so none is left; "
            "set smaller numbers in data.valid.num_pairs and data.test.num_pairs"
        )
    return find_sample_limit(keys, size)


def _pair_files(job: Job, spans: Sequence[Span]) -> list[Path]:
    """Return a path for each span: the file in which `scan` wrote its sampled pairs."""
    return [job.work.plan / f"{span.name}.pairs" for span in spans]


def _read_keys(pair_file: Path) -> Keys:
    """Read the keys of the pairs in a file that `scan` wrote."""
    # the text of a pair has at least 2 bytes, the ends of its two lines
    max_pairs = pair_file.stat().st_size // 2
    max_bytes = max_pairs * np.dtype(np.uint64).itemsize
    with open_regular(pair_file.with_suffix(".keys"), max_bytes=max_bytes) as file:
        return np.fromfile(file, np.uint64)


@contextlib.contextmanager
def _open_pairs(pair_file: Path, num_pairs: int) -> Iterator[TextIO]:
    """Open a file that `scan` wrote, in which a pair is two consecutive lines."""
    max_bytes = 2 * num_pairs * MAX_LINE_BYTES
    with open_regular(pair_file, max_bytes=max_bytes) as file:
        yield io.TextIOWrapper(file, encoding="utf-8", newline="\n")


def _exclude_taken(pair_files: Sequence[Path], taken_lines: Sequence[str]) -> Keys:
    """Exclude pairs with a taken line from the sample. Returns the keys of all pairs.

    Rewrites the files of keys: an excluded pair gets `_EXCLUDED_KEY`, which is above all limits.
    """
    taken_set = LineSet(taken_lines) if taken_lines else None
    keys_by_file = []
    for path in pair_files:
        keys = _read_keys(path)
        if taken_set is not None:
            excluded_pairs = _find_taken(path, len(keys), taken_set)
            keys[excluded_pairs] = _EXCLUDED_KEY
            with replace_file(path.with_suffix(".keys")) as temporary:
                keys.tofile(temporary)
        keys_by_file.append(keys)
    return np.concatenate(keys_by_file)


def _find_taken(pair_file: Path, num_pairs: int, taken_set: LineSet) -> list[int]:
    """Return the numbers of the pairs in a file that have a sentence in `taken_set`."""
    taken_pairs: list[int] = []
    with _open_pairs(pair_file, num_pairs) as stream:
        for start in range(0, num_pairs, _BLOCK_PAIRS):
            block = itertools.islice(stream, 2 * _BLOCK_PAIRS)
            lines = [line.removesuffix("\n") for line in block]
            src = lines[::2]
            tgt = lines[1::2]
            is_taken = taken_set.contains(src) | taken_set.contains(tgt)
            taken_pairs += (start + np.flatnonzero(is_taken)).tolist()
    return taken_pairs


def sample_size(config: TokenizerConfig) -> int:
    """Return the size of the sample in pairs. Each tokenizer gets at most `max_sentences` lines.

    A joint tokenizer learns from both lines of a pair, and separate ones from one line each.
    """
    if config.separate:
        return config.max_sentences
    return max(1, config.max_sentences // 2)


def estimate_scan_limit(size: int, num_pairs: int) -> int:
    """Estimate the limit of keys below which a scan has enough pairs for a sample of `size` pairs.

    The limit selects more than `2 * size` pairs, since the filters drop some of them. Keys
    are distributed evenly from 0 to `MAX_KEY`. Of all pairs, a share of limit / MAX_KEY therefore
    has keys below the limit.
    """
    num_selected = _SPARE_FACTOR * (size + _SPARE_PAIRS)
    limit = num_selected * MAX_KEY // max(num_pairs, 1)
    return min(MAX_KEY, limit)


def find_sample_limit(keys: Keys, size: int) -> np.uint64:
    """Return the limit that is above the `size` smallest keys only, or `MAX_KEY` for fewer keys."""
    if len(keys) <= size:
        return np.uint64(MAX_KEY)
    partitioned: Keys = np.partition(keys, size)  # the `size` smallest keys come first
    return np.uint64(partitioned[size])
