"""Where the pairs of a split come from: settings become a list of plain files to read.

What is no such file (stdin, pipes, datasets, generated corpora) is first written to one, in the
spool folder. Nothing here looks into a line.
"""

from __future__ import annotations

import glob
import itertools
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
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
from nmt.preprocess.chunks import Format, Source
from nmt.preprocess.spool import describe, read_dataset, spool

log = logging.getLogger(__name__)
STDIN = "-"
SPLITS = ("train", "valid", "test")
_SPLITS_OF_DATASETS = {"train": "train", "valid": "validation", "test": "test"}
_Parts = tuple[str, ...]  # what the wildcards of a pattern stand for in one name


def has_split(config: DataConfig, split: str) -> bool:
    """Return whether the settings name a corpus for `split` (train, valid or test)."""
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
    return [(file,) for name in part.tsv or part.jsonl or [] for file in _match(name).values()]


def _is_pipe(path: Path) -> bool:
    """Return whether a file can be read only once, like what a shell makes of <(command)."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _key(split: str, corpus: str) -> str:
    return f"data.corpora.{corpus}" if corpus else f"data.{split}"


@dataclass(frozen=True)
class _Finder:
    """Makes the sources of one split."""

    config: PreprocessConfig
    split: str
    spool: Path

    def bundled(self) -> Source:
        """Write a corpus that comes with nmt."""
        corpus = self.config.data.corpus
        blocks = _bundled_lines(self.split, corpus, self.config.seed)
        return Source("", Format.pair, self._spool_lines("", blocks), (corpus.value, corpus.value))

    def find(self, corpus: str, part: SplitConfig) -> Iterator[Source]:
        """Yield the sources of one corpus."""
        data = self.config.data
        tags = (part.src_tag, part.tgt_tag) if isinstance(part, CorpusConfig) else (None, None)
        fields = (part.fields[0], part.fields[1]) if part.fields else (data.src_lang, data.tgt_lang)
        columns = (part.columns[0], part.columns[1])
        if part.dataset is not None:
            name = describe(part)
            blocks = _dataset_lines(part, fields, _SPLITS_OF_DATASETS[self.split])
            paths = self._spool_lines(corpus, blocks)
            yield Source(corpus, Format.pair, paths, (name, name), columns, fields, *tags)
            return
        kind = Format.pair if part.src else Format.tsv if part.tsv else Format.jsonl
        for number, names in enumerate(_file_names(part, _key(self.split, corpus))):
            paths = tuple(
                self._regular(name, [corpus, str(number), str(side)])
                for side, name in enumerate(names)
            )
            shown = tuple("stdin" if name == STDIN else name for name in names)
            yield Source(corpus, kind, paths, shown, columns, fields, *tags)

    def _spool_lines(self, corpus: str, blocks: Iterable[tuple[bytes, bytes]]) -> tuple[Path, ...]:
        """Write blocks of source and target lines to two files."""
        paths = self._place([corpus], ".src"), self._place([corpus], ".tgt")
        if not self._is_spooled:
            with spool(paths[0]) as src, spool(paths[1]) as tgt:
                for src_lines, tgt_lines in blocks:
                    src.write(src_lines)
                    tgt.write(tgt_lines)
        return self._check(paths[0]), self._check(paths[1])

    def _regular(self, name: str, parts: list[str]) -> Path:
        """Return a file that can be read twice; a stream is spooled and keeps its suffix."""
        path = resolve(name)
        if name != STDIN and not _is_pipe(path):
            return path
        place = self._place(parts, path.suffix)
        if not self._is_spooled:
            with spool(place) as output:
                if name != STDIN:
                    with path.open("rb") as stream:
                        shutil.copyfileobj(stream, output)
                elif sys.stdin is None:
                    raise DataError("stdin is closed; give the path of a file")
                else:
                    shutil.copyfileobj(sys.stdin.buffer, output)
        return self._check(place)

    @property
    def _is_spooled(self) -> bool:
        """Whether the files in the spool are to be taken as they are."""
        return self.config.shard is not None or self.config.step in (Step.shard, Step.merge)

    def _place(self, parts: list[str], suffix: str) -> Path:
        return self.spool / ("-".join(filter(None, [self.split, *parts])) + suffix)

    def _check(self, path: Path) -> Path:
        if not path.is_file():
            raise DataError(f"{path} is not there; run the same command with step=plan first")
        return path


def _dataset_lines(
    part: SplitConfig, fields: tuple[str, str], default_split: str
) -> Iterator[tuple[bytes, bytes]]:
    log.info("reading the dataset %s", describe(part))
    yield from read_dataset(part, fields, default_split)


def _bundled_lines(split: str, corpus: Corpus, seed: int) -> Iterator[tuple[bytes, bytes]]:
    pairs = bundled_corpus(corpus, seed)[split]
    src, tgt = ("".join(f"{pair[side]}\n" for pair in pairs).encode() for side in (0, 1))
    yield src, tgt


def pair_up(src: Sequence[str], tgt: Sequence[str], key: str) -> list[tuple[str, str]]:
    """Pair the files of two sides, one after the other; names with * and ? are patterns.

    Of two patterns, files belong together where the wildcards stand for the same text, as in
    `news-*.en` and `news-*.de`. Raises `DataError` for files without a counterpart; `key` names the
    setting.
    """
    if len(src) != len(tgt):
        src, tgt = (
            [file for name in side for file in _match(name).values()] for side in (src, tgt)
        )
        return _pair_in_order(src, tgt, key)
    pairs = []
    for ones, others in ((_match(one), _match(other)) for one, other in zip(src, tgt, strict=True)):
        if ones.keys() == others.keys():
            pairs += [(name, others[parts]) for parts, name in ones.items()]
        elif ones.keys() & others.keys():
            both = [*(ones.items() - others.items()), *(others.items() - ones.items())]
            alone = min(name for parts, name in both if (parts in ones) != (parts in others))
            raise DataError(
                f"{alone} has no counterpart on the other side; add it or name the files"
            )
        else:
            pairs += _pair_in_order([*ones.values()], [*others.values()], "src and tgt")
    return pairs


def _pair_in_order(src: Sequence[str], tgt: Sequence[str], key: str) -> list[tuple[str, str]]:
    if len(src) != len(tgt):
        raise DataError(
            f"{key}: {len(src)} source files ({src[0]} ...), {len(tgt)} target files "
            f"({tgt[0]} ...); name as many on both sides"
        )
    return list(zip(src, tgt, strict=True))


def _match(name: str) -> dict[_Parts, str]:
    """Return the files that a name or pattern stands for, in the order of their names."""
    path = os.path.expanduser(name)
    if name == STDIN or not re.search(r"[*?]", name) or os.path.exists(path):
        return {(): name}
    files = sorted(p for p in glob.glob(path.replace("[", "[[]")) if not os.path.isdir(p))
    if not files:
        raise DataError(f"{name} matches no file; check the pattern")
    wild = re.compile(re.escape(path).replace(r"\*", "([^/]*)").replace(r"\?", "([^/])"))
    matches = [(wild.fullmatch(file), file) for file in files]
    return {match.groups(): file for match, file in matches if match is not None}
