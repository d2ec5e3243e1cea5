"""What must be known before the training corpus is encoded: tokenizers, which are trained on a
sample of it, and which pairs came before.

The sample is the same whoever reads which part: each pair has a key that is a hash of the seed, the
corpus and its number there, and the sample are the pairs with the smallest keys (bottom-k sampling;
Cohen and Kaplan, 2007). The task of a span writes those below a limit that probably leaves enough;
where it does not, all spans are read once more.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np

from nmt.config import PreprocessConfig, TokenizerConfig
from nmt.data.tokenizer import Tokenizers, load_tokenizers, save_tokenizers
from nmt.data.vocabulary import open_tokenizers, train_tokenizers
from nmt.preprocess.chunks import Chunk, Span
from nmt.preprocess.clean import PairCounts, clean
from nmt.preprocess.duplicates import HashWriter, find_duplicates, hash_duplicates
from nmt.preprocess.filters import drop_by_text, none_left
from nmt.preprocess.held_out import read_taken
from nmt.preprocess.workspace import Job, Task, read_records, run_stage
from nmt.runtime.files import replace_file
from nmt.runtime.pool import Processes, Workers

log = logging.getLogger(__name__)
_PLAN, _STAGE = "plan.json", "plan"
Keys = np.ndarray[Any, np.dtype[np.uint64]]
ALL_KEYS = (1 << 64) - 1
_SPARE = 2  # how many times the pairs that are wanted a first limit gives, if none is dropped
_MUCH_TEXT = 1 << 20  # bytes; less is trained on as fast as a process starts


def make_plan(job: Job, spans: Sequence[Span]) -> Tokenizers:
    """Return the tokenizers, made now or by an earlier run; the work folder keeps them."""
    config, folder = job.config, job.work.plan
    if (folder / _PLAN).exists():
        return load_tokenizers(folder)
    if config.tokenizer.model is None:
        end = _draw_sample(job, spans)
        log.info("training the tokenizer")
        paths = [folder / f"{span.name}.pairs" for span in spans]
        # SentencePiece ignores Ctrl-C and gives no memory back
        is_long = sum(path.stat().st_size for path in paths) > _MUCH_TEXT
        make = partial(partial, _train, config, paths, end)
        with Processes[Path, None](1, make) if is_long else Workers[Path, None](make) as worker:
            list(worker.map([folder]))
    else:
        save_tokenizers(folder, open_tokenizers(config))
        if config.filter.drops_duplicates:
            run_stage(job, spans, _STAGE, partial(_start_scan, limit=0))
    if config.filter.drops_duplicates:
        find_duplicates(job.work.hashes)
    job.work.write(folder / _PLAN, {})
    for path in (*folder.glob("*.keys"), *folder.glob("*.pairs")):
        path.unlink()
    return load_tokenizers(folder)


def _train(config: PreprocessConfig, paths: list[Path], end: np.uint64, folder: Path) -> None:
    """Train tokenizers on the sample, the pairs with keys below `end`; write them to `folder`."""

    def lines(side: int) -> Iterator[str]:
        for path in paths:
            is_drawn = np.fromfile(path.with_suffix(".keys"), np.uint64) < end
            with path.open(encoding="utf-8", newline="\n") as stream:
                for pair in compress(zip(stream, stream, strict=True), is_drawn.tolist()):
                    yield pair[side].removesuffix("\n")

    save_tokenizers(folder, train_tokenizers(config, lines(0), lines(1)))


def _start_scan(job: Job, limit: int) -> Task:
    """Return the task that writes the pairs of a span with keys below the limit, and these keys;
    and the hashes of all its pairs, where duplicates are dropped.
    """
    config, taken, folder = job.config, read_taken(job), job.work.plan

    def scan(span: Span, chunks: Iterator[Chunk]) -> dict[str, Any]:
        keys, path = [np.empty(0, np.uint64)], folder / f"{span.name}.pairs"
        counts = PairCounts()
        with (
            replace_file(path) as temporary,
            temporary.open("w", encoding="utf-8", newline="\n") as stream,
            HashWriter(job.work.hashes, span.order) as hashes,
        ):
            for chunk in chunks:
                cleaned = clean(chunk, config, held_out=False)
                drop_by_text(cleaned, config, taken=taken)
                counts.merge(cleaned.counts)
                numbers = chunk.first_pair + cleaned.rows
                found = sample_keys(config.seed, span.corpus, numbers)
                chosen = np.flatnonzero(found < np.uint64(limit))
                keys.append(found[chosen])
                for i in chosen.tolist():
                    stream.write(f"{cleaned.src[i]}\n{cleaned.tgt[i]}\n")
                if config.filter.drops_duplicates:
                    hashed = hash_duplicates(cleaned.src, cleaned.tgt, config.filter.duplicates)
                    hashes.add(hashed, numbers - span.first_pair)
        with replace_file(path.with_suffix(".keys")) as temporary:
            np.concatenate(keys).tofile(temporary)
        return {"found": sum(map(len, keys)), "pairs": vars(counts)}

    return scan


def _draw_sample(job: Job, spans: Sequence[Span]) -> np.uint64:
    """Return the key below which pairs are in the sample; those of each span are in its files."""
    size, num_pairs = sample_size(job.config.tokenizer), sum(span.num_pairs for span in spans)
    num_found = 0
    for stage, limit in ((_STAGE, first_limit(size, num_pairs)), (_STAGE + " again", ALL_KEYS)):
        run_stage(job, spans, stage, partial(_start_scan, limit=limit))
        records = [*read_records(job, spans, stage)]
        num_found = sum(record["found"] for record in records)
        if num_found >= size or limit == ALL_KEYS:
            break
    if num_found == 0:
        counts = PairCounts()
        for record in records:
            counts.merge(PairCounts.from_json(record["pairs"]))
        raise none_left(counts)
    keys = [np.fromfile(job.work.plan / f"{span.name}.keys", np.uint64) for span in spans]
    return sample_end(np.concatenate(keys), size)


def sample_size(config: TokenizerConfig) -> int:
    """Return the number of pairs that give a tokenizer at most `max_sentences` lines."""
    return config.max_sentences if config.separate else max(1, config.max_sentences // 2)


def sample_keys(seed: int, corpus: str, numbers: np.ndarray[Any, np.dtype[np.int64]]) -> Keys:
    """Return the keys of the pairs with these numbers in their corpus, (N,).

    The mixing function is that of SplitMix64 (Steele et al., 2014), a bijection: no two pairs of a
    corpus have the same key.
    """
    digest = hashlib.blake2b(f"{seed} {corpus}".encode(), digest_size=8).digest()
    keys = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    keys += np.frombuffer(digest, dtype="<u8").astype(np.uint64)
    keys ^= keys >> np.uint64(30)
    keys *= np.uint64(0xBF58476D1CE4E5B9)
    keys ^= keys >> np.uint64(27)
    keys *= np.uint64(0x94D049BB133111EB)
    return keys ^ (keys >> np.uint64(31))


def first_limit(size: int, num_pairs: int) -> int:
    """Return a key below which there are probably `size` of so many pairs, some of them dropped."""
    return min(ALL_KEYS, _SPARE * (size + 1000) * ALL_KEYS // max(num_pairs, 1))


def sample_end(keys: Keys, size: int) -> np.uint64:
    """Return the key that ends the sample of the `size` smallest."""
    return np.partition(keys, size)[size] if len(keys) > size else np.uint64(ALL_KEYS)
