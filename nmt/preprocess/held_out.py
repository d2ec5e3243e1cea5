"""Read validation and test sets, or take them out of the training text.

Every pair has a key, a hash of its text (see `scan.py`). The pairs with the smallest keys are
taken, so the choice depends only on the text. A pair is skipped if it shares a sentence with a pair
that is already taken.

The size of a set is a number of pairs or a share. A share takes the pairs with keys in a fixed
range. If the text grows, nearly all of these pairs are taken again, and new pairs are added. A pair
is lost only if it shares a sentence with a new held-out pair.

Training pairs that share a sentence with a held-out pair are left out of training, in corpora of
every direction. Sentences are compared without case, punctuation and spaces.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from nmt.config import PreprocessConfig
from nmt.data.languages import corpus_direction
from nmt.errors import ConfigError, DataError
from nmt.preprocess.characters import normal_form
from nmt.preprocess.chunks import DataSource, Format, Span, read_chunks, read_span
from nmt.preprocess.clean import clean
from nmt.preprocess.clean_chunk import CleanChunk
from nmt.preprocess.scan import NUM_KEYS, KeyLimits, num_held_out_groups, scan
from nmt.preprocess.workspace import Job, read_records
from nmt.runtime.files import replace_json
from nmt.runtime.metadata import read_json

log = logging.getLogger(__name__)
# The test set is taken first, so that it stays the same if the validation set gets more pairs.
_SPLITS = ("test", "valid")
# The corpora and the sentences of all sets. Written to the plan folder when the sets are complete.
_TAKEN_FILE = "taken.json"
_SPARE_CANDIDATES = 1000  # see `_num_candidates`
# Chinese and Japanese have no spaces, so each of their characters counts as a word.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|\w+")
_SWAP_MARGIN = 0.2
"""Source and target seem to be swapped if exchanging them raises the share of known words by more
than this. Between two different languages, the share changes by 0.3 or more.
"""
_Pair = tuple[str, str, str]  # corpus, source, target


def requested_sizes(config: PreprocessConfig) -> dict[str, float]:
    """Return how many pairs each split takes out of the training text.

    A size below 1 is a share of the training pairs.
    """
    sizes = {}
    for split in _SPLITS:
        size = getattr(config.data, split).num_pairs
        if size is not None:
            sizes[split] = size
    return sizes


def held_out_key_limit(sizes: Mapping[str, float], num_training_pairs: int) -> int:
    """Return a limit for held-out keys that probably leaves enough candidates.

    Keys are distributed evenly from 0 to `NUM_KEYS`. Of all pairs, a share of limit / NUM_KEYS
    therefore has keys below the limit. `sizes` is from `requested_sizes`.
    """
    total_size = sum(sizes.values())
    if total_size < 1:
        return int(total_size * NUM_KEYS)
    num_pairs_below = 2 * _num_candidates(total_size)  # filters may drop half of these pairs
    limit = num_pairs_below * NUM_KEYS // num_training_pairs
    return min(limit, NUM_KEYS)


def _num_candidates(num_requested: float) -> int:
    """Return how many candidates to collect in order to choose `num_requested` pairs.

    There are more candidates than pairs, since those that share a sentence are skipped.
    """
    return 2 * int(num_requested) + _SPARE_CANDIDATES


def take_held_out(job: Job, spans: Sequence[Span], stage: str, limits: KeyLimits) -> Job:
    """Take held-out sets out of the training text. Returns the job with these sets.

    Chooses pairs among the candidates that the scan named `stage` found with `limits`, and writes
    them to the plan folder. If an earlier run did this, reads only the result. Raises a
    `ConfigError` if the text has too few pairs.
    """
    sizes = requested_sizes(job.config)
    if not sizes:
        return job
    taken_file = job.work.plan / _TAKEN_FILE
    if not taken_file.exists():
        candidates = _read_candidates(job, spans, stage, limits)
        sentences: set[str] = set()
        corpora = {}
        for split, pairs in _choose_pairs(candidates, sizes).items():
            corpora[split] = _write_pairs(job, split, pairs)
            for _, src, tgt in pairs:
                sentences.update((src, tgt))
        replace_json(taken_file, {"corpora": corpora, "lines": sorted(sentences)})
    held_out = dict(job.held_out)
    for split, corpora_of_split in read_json(taken_file)["corpora"].items():
        sources = list(held_out[split])
        label = f"{split} taken from train"
        for corpus in corpora_of_split:
            tags = corpus_direction(job.config.data, corpus).tags
            paths = _taken_paths(job, split, corpus)
            sources.append(DataSource(corpus, Format.pair, paths, (label, label), tags=tags))
        held_out[split] = sorted(sources, key=lambda source: source.corpus)
    return replace(job, held_out=held_out)


def read_taken_sentences(job: Job) -> list[str]:
    """Return the sentences that were taken out of the training text."""
    taken_file = job.work.plan / _TAKEN_FILE
    if not taken_file.exists():
        return []
    sentences: list[str] = read_json(taken_file)["lines"]
    return sentences


def _taken_paths(job: Job, split: str, corpus: str) -> tuple[Path, Path]:
    """Return the files with the sources and targets that a split takes out of a corpus."""
    name = f"taken-{split}-{corpus}" if corpus else f"taken-{split}"
    return job.work.plan / f"{name}.src", job.work.plan / f"{name}.tgt"


def _write_pairs(job: Job, split: str, pairs: Sequence[_Pair]) -> list[str]:
    """Write the pairs of a split, two files for each corpus. Returns the names of the corpora."""
    texts: dict[str, tuple[list[str], list[str]]] = {}  # sources and targets of each corpus
    for corpus, src, tgt in pairs:
        src_lines, tgt_lines = texts.setdefault(corpus, ([], []))
        src_lines.append(src)
        tgt_lines.append(tgt)
    for corpus, (src_lines, tgt_lines) in texts.items():
        src_path, tgt_path = _taken_paths(job, split, corpus)
        write_lines(src_path, src_lines)
        write_lines(tgt_path, tgt_lines)
    return sorted(texts)


def write_lines(path: Path, lines: Sequence[str]) -> None:
    """Write lines, each ended by a newline, on every system."""
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8", newline="\n")


def _read_candidates(
    job: Job, spans: Sequence[Span], stage: str, limits: KeyLimits
) -> dict[int, _Pair]:
    """Return the candidates by key. While there are too few, scans again with a higher limit."""
    total_size = sum(requested_sizes(job.config).values())
    candidates = _merge_candidates(job, spans, stage)
    if total_size < 1:  # shares: the first scan found all pairs with keys below the share
        return candidates
    num_needed = _num_candidates(total_size)
    key_limit = limits.held_out_below
    num_scans = 1
    while key_limit < NUM_KEYS:
        num_groups = num_held_out_groups(candidates, job.config.data.split_by)
        if num_groups >= num_needed:
            break
        # keys are distributed evenly, so about twice as many groups as needed are below this limit
        key_limit = min(NUM_KEYS, 2 * key_limit * num_needed // max(num_groups, 1))
        num_scans += 1
        scan_name = f"{stage} for held-out pairs"
        if num_scans > 2:
            scan_name += f", {num_scans - 1}"
        scan(job, spans, scan_name, replace(limits, held_out_below=key_limit))
        candidates = _merge_candidates(job, spans, scan_name)
    return candidates


def _merge_candidates(job: Job, spans: Sequence[Span], stage: str) -> dict[int, _Pair]:
    """Return the candidates of a stage by key. The first of several with the same key is kept."""
    candidates: dict[int, _Pair] = {}
    for record in read_records(job, spans, stage):
        for key, corpus, src, tgt in record["candidates"]:
            candidates.setdefault(key, (corpus, src, tgt))
    return candidates


def _choose_pairs(
    candidates: Mapping[int, _Pair], sizes: Mapping[str, float]
) -> dict[str, list[_Pair]]:
    """Choose pairs for each split, in the order of their keys.

    Skips a pair if one of its sentences is in an earlier pair. `sizes` is from `requested_sizes`: a
    size is a number of pairs, or a share if it is below 1.
    """
    pairs_by_split: dict[str, list[_Pair]] = {}
    used_forms: set[str] = set()  # normal forms of the sentences of chosen pairs
    keys = deque(sorted(candidates))  # each split continues where the previous one ended
    share_end = 0.0  # if sizes are shares, the first key after the split
    for split, size in sizes.items():
        is_share = size < 1
        if is_share:
            share_end += size * NUM_KEYS
        pairs: list[_Pair] = []
        while keys:
            is_complete = len(pairs) == size
            is_after_share = is_share and keys[0] >= share_end
            if is_complete or is_after_share:
                break
            pair = candidates[keys.popleft()]
            _, src, tgt = pair
            forms = {normal_form(src), normal_form(tgt)}
            if used_forms.isdisjoint(forms):
                used_forms.update(forms)
                pairs.append(pair)
        min_pairs = max(size, 1)  # a share must give at least one pair
        if len(pairs) < min_pairs:
            raise ConfigError(
                f"data.{split}.num_pairs={size:g}: the training text has only {len(pairs)} pairs "
                "that share no sentence; give fewer, or another text"
            )
        log.info("took %d pairs for %s out of the training text", len(pairs), split)
        pairs_by_split[split] = pairs
    return pairs_by_split


def read_held_out(job: Job) -> dict[str, list[CleanChunk]]:
    """Read the held-out sets, by split, without dropping a pair.

    Raises a `DataError` for an empty set.
    """
    splits = {}
    for split, sources in job.held_out.items():
        chunks = read_chunks(sources)
        splits[split] = [clean(chunk, job.config, held_out=True) for chunk in chunks]
        if not splits[split]:
            raise DataError(
                f"the {split} corpus is empty; give data.{split} a file with sentence pairs"
            )
    return splits


def collect_lines(chunks: list[CleanChunk]) -> tuple[list[str], list[str]]:
    """Return the sources and the targets of all chunks."""
    src: list[str] = []
    tgt: list[str] = []
    for chunk in chunks:
        src += chunk.src
        tgt += chunk.tgt
    return src, tgt


def warn_of_swapped_sides(job: Job, spans: Sequence[Span], valid_chunks: list[CleanChunk]) -> None:
    """Warn if source and target of a training corpus seem to be swapped.

    Compares the words of the first chunk of each corpus with the validation pairs of the same
    direction.
    """

    def find_languages(corpus: str) -> tuple[str, str]:
        direction = corpus_direction(job.config.data, corpus)
        return direction.src_lang, direction.tgt_lang

    first_spans: dict[str, Span] = {}
    for span in spans:
        first_spans.setdefault(span.corpus, span)
    for corpus, span in first_spans.items():
        first_chunk = next(read_span(job.sources[corpus], span))
        train = clean(first_chunk, job.config, held_out=False)
        comparable_chunks = []
        for chunk in valid_chunks:
            if find_languages(chunk.corpus) == find_languages(corpus):
                comparable_chunks.append(chunk)
        src, tgt = collect_lines(comparable_chunks)
        # shares of known words, the mean of both sides
        straight_share = (known_share(src, train.src) + known_share(tgt, train.tgt)) / 2
        swapped_share = (known_share(src, train.tgt) + known_share(tgt, train.src)) / 2
        if swapped_share - straight_share > _SWAP_MARGIN:
            key = f"corpora.{corpus}" if corpus else "train"
            log.warning(
                "warning: source and target of data.%s seem to be swapped: %.0f %% of the words of "
                "data.valid occur on the other side, and %.0f %% on the same side; exchange the "
                "files",
                key,
                100 * swapped_share,
                100 * straight_share,
            )


def known_share(lines: Sequence[str], known_lines: Sequence[str]) -> float:
    """Return the share of the words in `lines` that also occur in `known_lines`, without case."""
    known_text = "\n".join(known_lines).lower()
    text = "\n".join(lines).lower()
    known_words = set(_WORD.findall(known_text))
    words = _WORD.findall(text)
    num_known = sum(word in known_words for word in words)
    return num_known / max(len(words), 1)
