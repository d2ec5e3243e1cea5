"""Where the pairs of a split come from: settings become a list of plain files to read.

What is no such file (stdin, datasets, corpora that nmt brings along) is written to one first, in
the spool folder. It knows nothing of what stands in a line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from nmt.config import CorpusConfig, DataConfig, PreprocessConfig, SplitConfig
from nmt.data.reading import check_file
from nmt.errors import DataError
from nmt.options import Corpus, resolve


class Format(Enum):
    """How a pair stands in the files of a source."""

    pair = "pair"  # line i of one file and line i of another
    tsv = "tsv"
    jsonl = "jsonl"


@dataclass(frozen=True)
class Source:
    """Files that hold pairs of one corpus, line by line."""

    corpus: str  # its name in data.corpora, or ""
    format: Format
    paths: tuple[Path, ...]  # two for a pair, source and target; else one
    names: tuple[str, ...]  # what the user calls them, for messages
    columns: tuple[int, int] = (1, 2)  # of TSV, from 1
    fields: tuple[str, str] = ("src", "tgt")  # of JSON
    src_tag: str | None = None
    tgt_tag: str | None = None


def has_split(config: DataConfig, split: str) -> bool:
    """Say whether the settings name a corpus for `split` (train, valid or test)."""
    if config.corpus is not Corpus.files:
        return True
    given: bool = getattr(config, split).given
    return given or (split == "train" and bool(config.corpora))


def find_sources(config: PreprocessConfig, split: str, spool: Path) -> list[Source]:
    """List the sources of a split, corpora in the order of their names.

    Raises `DataError` or `ConfigError` for what is missing or cannot be read.
    """
    data = config.data
    if split == "train" and data.corpora:
        parts = sorted(data.corpora.items())
    else:
        parts = [("", getattr(data, split))]
    return [source for name, part in parts for source in _find(name, part, data, spool)]


def total_disk_bytes(sources: Sequence[Source]) -> int:
    """Add up the sizes of all files, as they lie on disk."""
    return sum(path.stat().st_size for source in sources for path in source.paths)


def _find(corpus: str, split: SplitConfig, data: DataConfig, spool: Path) -> list[Source]:
    src, tgt = split.src or [], split.tgt or []
    if len(src) != len(tgt):
        raise DataError(f"{len(src)} source files, {len(tgt)} target files; give pairs of them")
    tags = (split.src_tag, split.tgt_tag) if isinstance(split, CorpusConfig) else (None, None)
    sources = []
    for names in zip(src, tgt, strict=True):
        paths = (resolve(names[0]), resolve(names[1]))
        for path in paths:
            check_file(path)
        sources.append(Source(corpus, Format.pair, paths, names, src_tag=tags[0], tgt_tag=tags[1]))
    return sources
