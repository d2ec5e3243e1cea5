"""Where the pairs of a split come from: settings become a list of plain files to read.

What is no such file (stdin, pipes, datasets, corpora that nmt brings along) is written to one
first, in the spool folder. Knows nothing of what stands in a line.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nmt.config import (
    Corpus,
    CorpusConfig,
    DataConfig,
    PreprocessConfig,
    SplitConfig,
    Step,
    resolve,
)
from nmt.data.text import bundled_corpus, check_file
from nmt.errors import ConfigError, DataError
from nmt.preprocess.patterns import STDIN, expand, pair_up
from nmt.preprocess.pieces import Format, Source
from nmt.preprocess.spool import Spool
from nmt.preprocess.tables import describe, read_dataset

log = logging.getLogger(__name__)
SPLITS = ("train", "valid", "test")
_SPLITS_OF_DATASETS = {"train": "train", "valid": "validation", "test": "test"}


def has_split(config: DataConfig, split: str) -> bool:
    """Say whether the settings name a corpus for `split` (train, valid or test)."""
    return config.corpus is not Corpus.files or any(part.given for _, part in _parts(config, split))


def find_sources(config: PreprocessConfig, split: str, spool: Path) -> list[Source]:
    """List the sources of a split, corpora in the order of their names; spool what must be.

    A part of a job that several machines share takes from `spool` what `step=plan` left there.
    Raises `DataError` or `ConfigError` for what is missing, in whatever split, before reading.
    """
    _check_files(config.data)
    finder = _Finder(config, split, spool)
    if config.data.corpus is not Corpus.files:
        return [finder.bundled()]
    parts = _parts(config.data, split)
    return [source for name, part in parts for source in finder.find(name, part)]


def total_disk_bytes(sources: Sequence[Source]) -> int:
    """Add up the sizes of all files, as they lie on disk."""
    return sum(path.stat().st_size for source in sources for path in source.paths)


def _parts(config: DataConfig, split: str) -> list[tuple[str, SplitConfig]]:
    """Name the settings that make up a split."""
    if split == "train" and config.corpora:
        return list(sorted(config.corpora.items()))
    return [("", getattr(config, split))]


def _check_files(config: DataConfig) -> None:
    """Find what is missing before hours are spent on what is there."""
    if config.corpus is not Corpus.files:
        return
    num_stdin = 0
    for split in SPLITS:
        for name, part in _parts(config, split):
            key = _key(split, name)
            if name and not part.given:
                raise ConfigError(f"{key} names no text; give {key}.src=FILE and {key}.tgt=FILE")
            for file in itertools.chain.from_iterable(_file_names(part, key)):
                num_stdin += file == STDIN
                path = resolve(file)
                if file != STDIN and not path.exists() and config.made_by:
                    raise DataError(f"{path} does not exist; make it with: {config.made_by}")
                if file != STDIN and not _is_pipe(path):
                    check_file(path)
    if num_stdin > 1:
        raise ConfigError(f"{num_stdin} files are {STDIN}; stdin is one, and is read once")


def _file_names(part: SplitConfig, key: str) -> list[tuple[str, ...]]:
    """Return the names of the files of each source, patterns resolved."""
    if part.src is not None and part.tgt is not None:
        return [*pair_up(part.src, part.tgt, key)]
    return [(name,) for name in expand(part.tsv or part.jsonl or [])]


def _is_pipe(path: Path) -> bool:
    """Say whether a file can be read only once, as what a shell makes of <(command)."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _key(split: str, corpus: str) -> str:
    return f"data.corpora.{corpus}" if corpus else f"data.{split}"


@dataclass(frozen=True)
class _Finder:
    """Makes the sources of one split."""

    config: PreprocessConfig
    split: str
    spool: Path

    @property
    def _is_spooled(self) -> bool:
        """Whether the files in the spool are to be taken as they are."""
        return self.config.shard is not None or self.config.step in (Step.shard, Step.merge)

    def bundled(self) -> Source:
        """Write a corpus that nmt brings along."""
        corpus = self.config.data.corpus
        places = self._places("")
        if not self._is_spooled:
            pairs = bundled_corpus(corpus, self.config.seed)[self.split]
            with Spool(places[0]) as src, Spool(places[1]) as tgt:
                src.write("".join(f"{pair[0]}\n" for pair in pairs).encode())
                tgt.write("".join(f"{pair[1]}\n" for pair in pairs).encode())
        return Source("", Format.pair, self._checked(places), (corpus.value, corpus.value))

    def find(self, corpus: str, part: SplitConfig) -> Iterator[Source]:
        """Yield the sources of one corpus."""
        data = self.config.data
        tags = (part.src_tag, part.tgt_tag) if isinstance(part, CorpusConfig) else (None, None)
        fields = (part.fields[0], part.fields[1]) if part.fields else (data.src_lang, data.tgt_lang)
        columns = (part.columns[0], part.columns[1])
        if part.dataset is not None:
            name, paths = describe(part), self._dataset(corpus, part, fields)
            yield Source(corpus, Format.pair, paths, (name, name), columns, fields, *tags)
            return
        kind = Format.pair if part.src else Format.tsv if part.tsv else Format.jsonl
        for number, names in enumerate(_file_names(part, _key(self.split, corpus))):
            paths = self._regular(corpus, number, names)
            shown = tuple("stdin" if name == STDIN else name for name in names)
            yield Source(corpus, kind, paths, shown, columns, fields, *tags)

    def _dataset(self, corpus: str, part: SplitConfig, fields: tuple[str, str]) -> tuple[Path, ...]:
        places = self._places(corpus)
        if not self._is_spooled:
            log.info("reading the dataset %s", describe(part))
            default_split = _SPLITS_OF_DATASETS[self.split]
            with Spool(places[0]) as src, Spool(places[1]) as tgt:
                for src_lines, tgt_lines in read_dataset(part, fields, default_split):
                    src.write(src_lines)
                    tgt.write(tgt_lines)
        return self._checked(places)

    def _regular(self, corpus: str, number: int, names: Sequence[str]) -> tuple[Path, ...]:
        """Return files that can be read twice; a stream is spooled, its name keeps its suffix."""
        paths = []
        for side, name in enumerate(names):
            path = resolve(name)
            if name == STDIN or _is_pipe(path):
                stem = "-".join(filter(None, [self.split, corpus, str(number), str(side)]))
                place = self.spool / (stem + path.suffix)
                if not self._is_spooled:
                    _spool_stream(name, place)
                path = self._checked((place,))[0]
            paths.append(path)
        return tuple(paths)

    def _places(self, corpus: str) -> tuple[Path, Path]:
        stem = "-".join(filter(None, [self.split, corpus]))
        return self.spool / f"{stem}.src", self.spool / f"{stem}.tgt"

    def _checked(self, places: tuple[Path, ...]) -> tuple[Path, ...]:
        for place in places:
            if not place.is_file():
                raise DataError(f"{place} is not there; run the same command with step=plan first")
        return places


def _spool_stream(name: str, place: Path) -> None:
    with Spool(place) as spool:
        if name != STDIN:
            with resolve(name).open("rb") as stream:
                spool.copy(stream)
        elif sys.stdin is None:
            raise DataError("stdin is closed; give the path of a file")
        else:
            spool.copy(sys.stdin.buffer)
