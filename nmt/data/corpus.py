"""Reads parallel text: file pairs, TSV, Hugging Face datasets, and the corpora that nmt brings
along.

Lines end at the byte \\n and nowhere else, so that both sides of a pair always have the same
number. It knows nothing of tokens.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

from nmt.config import DataConfig, SplitConfig
from nmt.data import copying, homeassistant, numbers
from nmt.data.reading import open_bytes, unpacking
from nmt.errors import DataError
from nmt.options import Corpus, resolve

SPLITS = ("train", "valid", "test")
Pair = tuple[str, str]
# What str.splitlines() and many tools take for the end of a line, inside one of ours; and NUL
LINE_BREAKS = dict.fromkeys(map(ord, "\r\v\f\x1c\x1d\x1e\x85\u2028\u2029\x00"), " ")


def clean_line(raw: bytes, place: str) -> str:
    """Decode one line without its \\n: UTF-8, no BOM, no trailing \\r, other line breaks inside
    become a space.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = raw[error.start]
        raise DataError(
            f"{place}: byte {error.start + 1} (0x{byte:02x}) is not UTF-8; convert the file, "
            "for example with iconv -f latin1 -t utf-8"
        ) from None
    return text.removeprefix("\ufeff").removesuffix("\r").translate(LINE_BREAKS)


def read_stream(stream: Iterable[bytes], name: str) -> Iterator[str]:
    """Yield the lines of a byte stream; `name` stands in error messages."""
    with unpacking(name):
        for number, raw in enumerate(stream, start=1):
            yield clean_line(raw.removesuffix(b"\n"), f"{name}:{number}")


def read_lines(path: str | Path) -> Iterator[str]:
    """Yield the lines of a file, plain, .gz, .xz or .zst."""
    path = resolve(path)
    with open_bytes(path) as stream:
        yield from read_stream(stream, str(path))


def read_input(path: str) -> Iterator[str]:
    """Yield the lines of a file, or of stdin for "-"."""
    if path != "-":
        return read_lines(path)
    if sys.stdin is None:
        raise DataError("stdin is closed; give the path of a file")
    return read_stream(sys.stdin.buffer, "stdin")


def count_lines(path: str) -> int:
    """Count the lines of a file without decoding them."""
    with open_bytes(resolve(path)) as stream, unpacking(path):
        return sum(1 for _ in stream)


def read_file_pair(src: str, tgt: str) -> Iterator[Pair]:
    """Yield the pairs of two aligned files; see `pair_lines`."""
    return pair_lines(read_lines(src), read_lines(tgt), names=(src, tgt))


def pair_lines(
    src_lines: Iterator[str], tgt_lines: Iterator[str], *, names: tuple[str, str]
) -> Iterator[Pair]:
    """Yield the pairs of two aligned streams; raise a `DataError` with both counts when they are
    not equally long.
    """
    end = object()
    for num_pairs, (source, target) in enumerate(
        itertools.zip_longest(src_lines, tgt_lines, fillvalue=end)
    ):
        if source is end or target is end:
            num_src = num_pairs + (source is not end) + sum(1 for _ in src_lines)
            num_tgt = num_pairs + (target is not end) + sum(1 for _ in tgt_lines)
            raise DataError(
                f"{names[0]} has {num_src} lines, {names[1]} {num_tgt}; "
                "extract the pair again, line by line"
            )
        yield cast(str, source), cast(str, target)


def read_tsv(path: str) -> Iterator[Pair]:
    """Yield the first two columns of each line."""
    for number, line in enumerate(read_lines(path), start=1):
        columns = line.split("\t")
        if len(columns) < 2:
            raise DataError(f"{path}:{number}: no tab in the line; expected source, tab, target")
        yield columns[0], columns[1]


def read_dataset(split: SplitConfig, src_lang: str, tgt_lang: str) -> Iterator[Pair]:
    """Stream pairs from a Hugging Face dataset, by hub name or local folder.

    Records are `{"translation": {src_lang: ..., tgt_lang: ...}}` as in wmt14, or have the two
    languages as fields.
    """
    for number, record in enumerate(_records(split), start=1):
        fields: dict[str, Any] = record.get("translation", record)
        if src_lang not in fields or tgt_lang not in fields:
            raise DataError(
                f"record {number} of {split.dataset} has the fields {', '.join(fields)}; "
                f"set data.src_lang and data.tgt_lang (now {src_lang}, {tgt_lang}) to two of them"
            )
        pair = (fields[src_lang] or "", fields[tgt_lang] or "")
        source, target = (text.replace("\n", " ").translate(LINE_BREAKS) for text in pair)
        yield source, target


def read_pairs(config: DataConfig, split: str, *, seed: int) -> Iterator[Pair]:
    """Yield the pairs of a split (train, valid or test), before any filter."""
    if config.corpus is Corpus.files:
        yield from _read_split(getattr(config, split), config)
    else:
        langs = (config.src_lang, config.tgt_lang)
        yield from _bundled(config.corpus, langs, resolve(config.cache_dir), seed)[split]


def has_split(config: DataConfig, split: str) -> bool:
    """Say whether the corpus has this split."""
    return config.corpus is not Corpus.files or getattr(config, split).given


def _records(split: SplitConfig) -> Iterator[dict[str, Any]]:
    import datasets  # takes seconds; only those who use it pay

    assert split.dataset is not None
    local = resolve(split.dataset)
    name = str(local) if local.is_dir() else split.dataset
    part = split.dataset_split or "train"
    try:
        yield from datasets.load_dataset(name, split.dataset_config, split=part, streaming=True)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"dataset {split.dataset} (configuration {split.dataset_config}, split {part}) "
            f"cannot be read: {' '.join(str(error).split())[:300]}"
        ) from None


@functools.lru_cache(maxsize=1)  # the splits are read one after the other
def _bundled(
    corpus: Corpus, langs: tuple[str, str], cache_dir: Path, seed: int
) -> dict[str, list[Pair]]:
    if corpus is Corpus.numbers:
        return numbers.generate(seed)
    if corpus is Corpus.copy:
        return copying.generate(seed)
    return homeassistant.extract(homeassistant.fetch(cache_dir), *langs)


def _read_split(split: SplitConfig, config: DataConfig) -> Iterator[Pair]:
    if split.dataset is not None:
        yield from read_dataset(split, config.src_lang, config.tgt_lang)
    elif split.tsv is not None:
        for path in split.tsv:
            yield from read_tsv(path)
    else:
        assert split.src is not None
        assert split.tgt is not None
        for src, tgt in zip(split.src, split.tgt, strict=True):
            yield from read_file_pair(src, tgt)
