"""Where the pairs of a split come from: settings become a list of plain files to read.

What is no such file (stdin, pipes, datasets, generated corpora) is first written to one, in the
spool folder. Nothing here looks into a line.
"""

from __future__ import annotations

import glob
import itertools
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
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

STDIN = "-"
SPLITS = ("train", "valid", "test")
_SPLITS_OF_DATASETS = {"train": "train", "valid": "validation", "test": "test"}


def has_split(config: DataConfig, split: str) -> bool:
    """Return whether the settings name a corpus for `split` (train, valid or test)."""
    parts = _parts(config, split)
    return config.corpus is not Corpus.files or any(part.given for _, _, part in parts)


def find_sources(config: PreprocessConfig, split: str, spool: Path) -> list[Source]:
    """List the sources of a split, corpora in the order of their names; spool what must be.

    A part of a job that several machines share takes from `spool` what `step=plan` left there.
    Raises `DataError` or `ConfigError` for what is missing, in whatever split, before reading.
    """
    finder = _Finder(config, split, spool)
    if config.data.corpus is not Corpus.files:
        return [finder.bundled()]
    _check_files(config.data)
    parts = _parts(config.data, split)
    return [source for part in parts for source in finder.find(*part)]


def total_disk_bytes(sources: Sequence[Source]) -> int:
    """Add up the sizes of all files, as they lie on disk."""
    return sum(path.stat().st_size for source in sources for path in source.paths)


def _parts(config: DataConfig, split: str) -> list[tuple[str, str, SplitConfig]]:
    """Return the settings that make up a split: key, name of the corpus, values."""
    if split == "train" and config.corpora:
        corpora = sorted(config.corpora.items())
        return [(f"data.corpora.{name}", name, part) for name, part in corpora]
    return [(f"data.{split}", "", getattr(config, split))]


def _check_files(config: DataConfig) -> None:
    """Find what is missing before hours are spent on what is there."""
    num_stdin = 0
    for split in SPLITS:
        for key, name, part in _parts(config, split):
            if name and not part.given:
                raise ConfigError(f"{key} names no text; give {key}.src=FILE and {key}.tgt=FILE")
            for file in itertools.chain.from_iterable(_file_names(part, key)):
                path = resolve(file)
                if file == STDIN:
                    num_stdin += 1
                elif not path.exists() and config.made_by:
                    raise DataError(f"{path} does not exist; make it with: {config.made_by}")
                elif not _is_stream(file):
                    check_file(path)
    if num_stdin > 1:
        raise ConfigError(f"{num_stdin} files are {STDIN}; stdin is one, and is read once")


def _file_names(part: SplitConfig, key: str) -> list[tuple[str, ...]]:
    """Return the names of the files of each source, patterns resolved."""
    if part.src is not None and part.tgt is not None:
        return pair_up(part.src, part.tgt, key)
    return [(file,) for name in part.tsv or part.jsonl or [] for file in _match(name).values()]


def _is_stream(name: str) -> bool:
    """Return whether a file can be read only once: stdin, or what a shell makes of <(command)."""
    path = resolve(name)
    return name == STDIN or (path.exists() and not path.is_file() and not path.is_dir())


@dataclass(frozen=True)
class _Finder:
    """Makes the sources of one split."""

    config: PreprocessConfig
    split: str
    spool: Path

    def bundled(self) -> Source:
        """Write a corpus that comes with nmt."""
        corpus = self.config.data.corpus
        pairs = bundled_corpus(corpus, self.config.seed)[self.split]
        sides = ["".join(f"{text}\n" for text in side) for side in zip(*pairs, strict=True)]
        paths = self._spool([".src", ".tgt"], [[side.encode() for side in sides]])
        return Source("", Format.pair, paths, (corpus.value, corpus.value))

    def find(self, key: str, corpus: str, part: SplitConfig) -> Iterator[Source]:
        """Yield the sources of one corpus."""
        data, suffix = self.config.data, f"-{corpus}" if corpus else ""
        tags = (part.src_tag, part.tgt_tag) if isinstance(part, CorpusConfig) else (None, None)
        fields = (part.fields[0], part.fields[1]) if part.fields else (data.src_lang, data.tgt_lang)
        columns = (part.columns[0], part.columns[1])
        if part.dataset is not None:
            name = describe(part)
            blocks = read_dataset(part, fields, _SPLITS_OF_DATASETS[self.split])
            paths = self._spool([f"{suffix}.src", f"{suffix}.tgt"], blocks)
            yield Source(corpus, Format.pair, paths, (name, name), columns, fields, *tags)
            return
        kind = Format.pair if part.src else Format.tsv if part.tsv else Format.jsonl
        for number, names in enumerate(_file_names(part, key)):
            paths = ()
            for side, name in enumerate(names):
                path = resolve(name)
                if _is_stream(name):  # its copy keeps the suffix
                    copy = f"{suffix}-{number}-{side}{path.suffix}"
                    (path,) = self._spool([copy], _stream_blocks(name))
                paths += (path,)
            shown = tuple("stdin" if name == STDIN else name for name in names)
            yield Source(corpus, kind, paths, shown, columns, fields, *tags)

    def _spool(self, names: list[str], blocks: Iterable[Sequence[bytes]]) -> tuple[Path, ...]:
        """Write blocks, of each a part to every file, unless the plan of a shared job has."""
        paths = tuple(self.spool / f"{self.split}{name}" for name in names)
        if self.config.shard is None and self.config.step in (Step.all, Step.plan):
            with ExitStack() as stack:
                files = [stack.enter_context(spool(path)) for path in paths]
                for block in blocks:
                    for file, content in zip(files, block, strict=True):
                        file.write(content)
        for path in paths:
            if not path.is_file():
                raise DataError(f"{path} is not there; run the same command with step=plan first")
        return paths


def _stream_blocks(name: str) -> Iterator[tuple[bytes]]:
    if name == STDIN and sys.stdin is None:
        raise DataError("stdin is closed; give the path of a file")
    with nullcontext(sys.stdin.buffer) if name == STDIN else resolve(name).open("rb") as stream:
        while block := stream.read(1 << 20):
            yield (block,)


def pair_up(src: Sequence[str], tgt: Sequence[str], key: str) -> list[tuple[str, ...]]:
    """Pair the files of two sides, one after the other; names with * and ? are patterns.

    Of two patterns, files belong together where the wildcards stand for the same text, as in
    `news-*.en` and `news-*.de`. Raises `DataError` for files without a counterpart; `key` names the
    setting.
    """
    if len(src) != len(tgt):
        ones, others = ([f for name in side for f in _match(name).values()] for side in (src, tgt))
        return _pair_in_order(ones, others, key)
    pairs: list[tuple[str, ...]] = []
    for left, right in zip(map(_match, src), map(_match, tgt), strict=True):
        if left.keys() == right.keys():
            pairs += [(name, right[parts]) for parts, name in left.items()]
        elif not left.keys() & right.keys():
            pairs += _pair_in_order([*left.values()], [*right.values()], "src and tgt")
        else:
            alone = min((left | right)[parts] for parts in left.keys() ^ right.keys())
            raise DataError(
                f"{alone} has no counterpart on the other side; add it or name the files"
            )
    return pairs


def _pair_in_order(src: list[str], tgt: list[str], key: str) -> list[tuple[str, ...]]:
    if len(src) != len(tgt):
        raise DataError(
            f"{key}: {len(src)} source files ({src[0]} ...), {len(tgt)} target files "
            f"({tgt[0]} ...); name as many on both sides"
        )
    return list(zip(src, tgt, strict=True))


def _match(name: str) -> dict[tuple[str, ...], str]:
    """Return the files that a name or pattern stands for, in the order of their names; keys are
    what the wildcards stand for.
    """
    path = os.path.expanduser(name)
    if name == STDIN or not re.search(r"[*?]", name) or os.path.exists(path):
        return {(): name}
    files = sorted(p for p in glob.glob(path.replace("[", "[[]")) if not os.path.isdir(p))
    if not files:
        raise DataError(f"{name} matches no file; check the pattern")
    wild = re.compile(re.escape(path).replace(r"\*", "([^/]*)").replace(r"\?", "([^/])"))
    matches = [(wild.fullmatch(file), file) for file in files]
    return {match.groups(): file for match, file in matches if match is not None}
