"""List the files with the text of a split, and convert other forms of text to files.

Standard input, pipes, compressed files, datasets and generated corpora are first written
("spooled") to plain files, so that a worker can start to read at any line.
"""

from __future__ import annotations

import contextlib
import filecmp
import glob
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from nmt.config import Corpus, DataConfig, PreprocessConfig, SplitConfig, resolve_path
from nmt.data.languages import DEFAULT_LANGUAGES, LanguagePair, corpus_direction
from nmt.data.text import (
    check_file,
    is_compressed,
    is_stream,
    load_bundled_corpus,
    open_bytes,
    read_blocks,
)
from nmt.errors import ConfigError, DataError
from nmt.preprocess import archives
from nmt.preprocess.bitext_xml import read_pairs
from nmt.preprocess.chunks import DataSource, Format
from nmt.preprocess.hub_datasets import describe_dataset, read_dataset
from nmt.runtime.files import sync

log = logging.getLogger(__name__)
STDIN = "-"
# for each split of nmt, the split of a dataset that is read, unless `dataset_split` names another
DATASET_SPLITS = {"train": "train", "valid": "validation", "test": "test"}
_BITEXT_SUFFIXES = ("tsv", "jsonl", "tmx", "xliff")
"""Suffixes of files with both sides. `SplitConfig` has a setting of the same name for each."""


@dataclass(frozen=True)
class _CorpusSettings:
    """The settings of one corpus in one split."""

    key: str  # config key, such as data.corpora.news.valid
    name: str  # the corpus's name in data.corpora, or ""
    settings: SplitConfig
    direction: LanguagePair

    def file_names(self) -> list[tuple[str, ...]]:
        """Return the file names of each source, in the order of `DataSource.paths`.

        A file in an archive has a name such as corpus.zip/corpus.de-en.de.
        """
        names_by_source: list[tuple[str, ...]] = []
        if self.settings.src is not None and self.settings.tgt is not None:
            for src, tgt in pair_up(self.settings.src, self.settings.tgt, self.key):
                src = archives.find_text(src, self.direction.src_lang)
                tgt = archives.find_text(tgt, self.direction.tgt_lang)
                # For an archive with a single file, `find_text` returns this file for both sides.
                # A plain file may be both sides, since the user has named it twice.
                if src == tgt and archives.split_name(src) is not None:
                    raise DataError(f"{self.key}: source and target are the same file, {src}")
                names_by_source.append((src, tgt))
            names_by_source = self._add_files(names_by_source, "alignments")
            return self._add_files(names_by_source, "scores")
        for suffix in _BITEXT_SUFFIXES:
            patterns = getattr(self.settings, suffix) or []
            for file in _match_all(patterns):
                names_by_source.append((archives.find_text(file, suffix),))
        return names_by_source

    def _add_files(
        self, names_by_source: list[tuple[str, ...]], setting: str
    ) -> list[tuple[str, ...]]:
        """Add to each source its file of alignments or scores, if `setting` names any."""
        patterns: list[str] | None = getattr(self.settings, setting)
        if patterns is None:
            return names_by_source
        files = [archives.find_text(file, setting) for file in _match_all(patterns)]
        if len(files) != len(names_by_source):
            raise DataError(
                f"{self.key}.{setting}: {len(files)} files for {len(names_by_source)} files of "
                "text; the numbers must be equal"
            )
        return [(*names, file) for names, file in zip(names_by_source, files, strict=True)]


def _list_corpora(config: DataConfig, split: str) -> list[_CorpusSettings]:
    """Return the settings of all corpora of a split, sorted by name.

    Leaves out corpora without text, whose `text_keys` are empty. Named training corpora are
    always listed, so that `_check_files` can raise an error for one without text.
    """
    corpora = []

    def add_corpus(key: str, name: str, settings: SplitConfig) -> None:
        corpora.append(_CorpusSettings(key, name, settings, corpus_direction(config, name)))

    corpus_configs = sorted(config.corpora.items())
    if split == "train" and corpus_configs:  # `DataConfig.check` refuses data.train in this case
        for name, corpus_config in corpus_configs:
            add_corpus(f"data.corpora.{name}", name, corpus_config)
        return corpora
    unnamed_corpus = getattr(config, split)
    if unnamed_corpus.text_keys:
        add_corpus(f"data.{split}", "", unnamed_corpus)
    for name, corpus_config in corpus_configs:
        held_out_settings = getattr(corpus_config, split)
        if held_out_settings.text_keys:
            add_corpus(f"data.corpora.{name}.{split}", name, held_out_settings)
    return corpora


def has_split(config: DataConfig, split: str) -> bool:
    """Return whether the settings name a text for `split` (train, valid or test)."""
    if config.corpus is not Corpus.files:
        return True
    if split == "train" and config.corpora:
        return True  # `_check_files` names each corpus without text
    return any(corpus.settings.text_keys for corpus in _list_corpora(config, split))


def find_sources(config: PreprocessConfig, split: str, spool_dir: Path) -> list[DataSource]:
    """List the sources of a split, sorted by corpus. Spools text to `spool_dir` where necessary.

    Returns an empty list for a held-out set that is taken out of the training text. Before it reads
    any text, raises `DataError` or `ConfigError` if a file of any split is missing.
    """
    bundled = config.data.corpus
    if bundled is not Corpus.files:
        pairs = load_bundled_corpus(bundled, config.seed)[split]
        src_text = "".join(f"{src_line}\n" for src_line, _ in pairs)
        tgt_text = "".join(f"{tgt_line}\n" for _, tgt_line in pairs)
        paths = (spool_dir / f"{split}.src", spool_dir / f"{split}.tgt")
        block = (src_text.encode(), tgt_text.encode())  # the whole text of both files
        _spool_blocks(paths, [block])
        names = (bundled.value, bundled.value)
        return [DataSource(corpus="", format=Format.pair, paths=paths, names=names)]
    _check_files(config.data)
    sources = []
    for corpus in _list_corpora(config.data, split):
        direction = corpus.direction
        # names of the fields in JSON and datasets; `columns` are the numbers of the columns in TSV
        fields = corpus.settings.fields or [direction.src_lang, direction.tgt_lang]
        template = DataSource(
            corpus=corpus.name,
            format=Format.pair,
            paths=(),
            names=(),
            columns=tuple(corpus.settings.columns),
            fields=tuple(fields),
            has_alignment_file=corpus.settings.alignments is not None,
            score=corpus.settings.score,
            tags=direction.tags,
            settings_key=corpus.key,
        )
        file_name_prefix = f"{split}-{corpus.name}" if corpus.name else split
        spool_prefix = spool_dir / file_name_prefix
        if corpus.settings.dataset is not None:
            source = _spool_dataset(corpus.settings, template, spool_prefix, DATASET_SPLITS[split])
            sources.append(source)
        else:
            max_bytes = int(config.data.max_stream_gb * 1e9)
            sources += _find_files(corpus, template, spool_prefix, max_bytes)
    return sources


def _spool_dataset(
    settings: SplitConfig, template: DataSource, spool_prefix: Path, default_split: str
) -> DataSource:
    """Write the texts of a dataset to one file per field. Returns these files as a source."""
    sides = ["src", "tgt"]
    has_alignment = len(template.fields) == 3
    if has_alignment:
        sides.append("alignment")
    paths = tuple(spool_prefix.with_name(f"{spool_prefix.name}.{side}") for side in sides)
    _spool_blocks(paths, read_dataset(settings, template.fields, default_split))
    return replace(
        template,
        paths=paths,
        names=(describe_dataset(settings),) * len(paths),
        has_alignment_file=has_alignment,
    )


def _find_files(
    corpus: _CorpusSettings, template: DataSource, spool_prefix: Path, max_stream_bytes: int
) -> Iterator[DataSource]:
    """Yield a copy of `template` for each source of a corpus, with paths, names and format."""
    if corpus.settings.tmx is not None or corpus.settings.xliff is not None:
        yield from _convert_xml(corpus, template, spool_prefix, max_stream_bytes)
        return
    if corpus.settings.tsv is not None:
        template = replace(template, format=Format.tsv)
    elif corpus.settings.jsonl is not None:
        template = replace(template, format=Format.jsonl)
    for source_index, file_names in enumerate(corpus.file_names()):
        paths = []
        for side, file in enumerate(file_names):
            path = resolve_path(file)
            is_in_archive = archives.split_name(file) is not None
            if is_stream(file) or is_compressed(file) or is_in_archive:
                path = spool_prefix.with_name(f"{spool_prefix.name}-{source_index}-{side}")
                with spool(path) as spool_file:
                    for block in _unpacked_blocks(file, max_stream_bytes):
                        spool_file.write(block)
            paths.append(path)
        names = tuple(map(_name_for_messages, file_names))
        yield replace(template, paths=tuple(paths), names=names)


def _convert_xml(
    corpus: _CorpusSettings, template: DataSource, spool_prefix: Path, max_stream_bytes: int
) -> Iterator[DataSource]:
    """Write the pairs of each TMX or XLIFF file to two text files, and yield these as a source."""
    direction = corpus.direction
    languages = (direction.src_lang, direction.tgt_lang)
    is_unset = languages == DEFAULT_LANGUAGES
    if is_unset:
        languages = ("", "")  # `read_pairs` then uses the languages that an XLIFF file states
    for source_index, file_names in enumerate(corpus.file_names()):
        file = file_names[0]  # the only one, which holds both sides
        name = _name_for_messages(file)
        pairs = read_pairs(
            _unpacked_blocks(file, max_stream_bytes),
            name,
            languages,
            keep_markup=corpus.settings.keep_codes,
        )
        paths = (
            spool_prefix.with_name(f"{spool_prefix.name}-{source_index}.src"),
            spool_prefix.with_name(f"{spool_prefix.name}-{source_index}.tgt"),
        )
        lines = ((f"{src}\n".encode(), f"{tgt}\n".encode()) for src, tgt in pairs)
        _spool_blocks(paths, lines)
        yield replace(template, paths=paths, names=(name, name))


def _name_for_messages(file: str) -> str:
    return "stdin" if file == STDIN else file


def _check_files(config: DataConfig) -> None:
    """Raise an error for a missing file of any split, before the first split is read."""
    files: list[str] = []
    for split in DATASET_SPLITS:
        for corpus in _list_corpora(config, split):
            key = corpus.key
            if not corpus.settings.text_keys:
                raise ConfigError(f"{key} names no text; give {key}.src=FILE and {key}.tgt=FILE")
            for names in corpus.file_names():
                files += names
    for file in files:
        if archives.split_name(file) is not None:
            continue  # `file_names` raises an error if the archive has no such file
        if file == STDIN:
            continue
        path = resolve_path(file)
        if not path.exists() and config.made_by:
            raise DataError(f"{path} does not exist; make it with: {config.made_by}")
        if not is_stream(file):
            check_file(path)
        elif _is_endless(path):
            raise DataError(f"{path} is a device, not a text; give a file or a pipe")
    if files.count(STDIN) > 1:
        raise ConfigError(f"{files.count(STDIN)} files are {STDIN}; stdin can be read only once")


def _is_endless(path: Path) -> bool:
    """Return whether a path is a device such as /dev/zero, whose text never ends.

    Terminals and /dev/null are devices whose text ends.
    """
    if not path.is_char_device() or path.samefile(os.devnull):
        return False
    with path.open("rb") as device:
        return not device.isatty()


def pair_up(src: Sequence[str], tgt: Sequence[str], key: str) -> list[tuple[str, ...]]:
    """Pair source and target files in their order. Names with * and ? are patterns.

    A file that matches `news-*.en` is paired with the file that matches `news-*.de` with the same
    text for the wildcard. If no text is the same, files are paired in alphabetical order. `key` is
    the config key of the split, such as data.train. Raises `DataError` for a file without a
    counterpart.
    """
    if len(src) != len(tgt):
        return _pair_in_order(_match_all(src), _match_all(tgt), key)
    file_pairs: list[tuple[str, ...]] = []
    for src_name, tgt_name in zip(src, tgt, strict=True):
        src_matches = match_files(src_name)
        tgt_matches = match_files(tgt_name)
        # the keys are the texts for the wildcards
        if src_matches.keys() == tgt_matches.keys():
            for texts, src_file in src_matches.items():
                file_pairs.append((src_file, tgt_matches[texts]))
        elif src_matches.keys().isdisjoint(tgt_matches):  # for example, part-*.en and teil-1.de
            src_files = list(src_matches.values())
            tgt_files = list(tgt_matches.values())
            file_pairs += _pair_in_order(src_files, tgt_files, "src and tgt")
        else:
            unpaired = [src_matches[texts] for texts in src_matches if texts not in tgt_matches]
            unpaired += [tgt_matches[texts] for texts in tgt_matches if texts not in src_matches]
            raise DataError(
                f"{min(unpaired)} has no counterpart on the other side; add the missing file, or "
                "name the files without * and ?"
            )
    return file_pairs


def _pair_in_order(src: list[str], tgt: list[str], key: str) -> list[tuple[str, ...]]:
    """Pair the i-th files. Raises a `DataError` that names `key` if the numbers differ."""
    if len(src) != len(tgt):
        raise DataError(
            f"{key}: {len(src)} source files ({src[0]} ...), {len(tgt)} target files "
            f"({tgt[0]} ...); the numbers must be equal"
        )
    return list(zip(src, tgt, strict=True))


def _match_all(names: Sequence[str]) -> list[str]:
    """Return the files that match any of the names or patterns, in order."""
    files: list[str] = []
    for name in names:
        files.extend(match_files(name).values())
    return files


def match_files(name: str) -> dict[tuple[str, ...], str]:
    """Return the files that match a name or pattern, in alphabetical order.

    The keys are the texts that the wildcards * and ? match. Raises `DataError` if no file matches.
    """
    path = os.path.expanduser(name)
    has_wildcard = re.search(r"[*?]", name) is not None
    if name == STDIN or not has_wildcard or os.path.exists(path):
        return {(): name}
    glob_pattern = path.replace("[", "[[]")  # nmt takes brackets as part of a name
    files = sorted(file for file in glob.glob(glob_pattern) if not os.path.isdir(file))
    if not files:
        raise DataError(f"{name} matches no file; check the pattern")
    # `glob` does not return the texts that the wildcards match, so a regular expression finds them
    regex = re.escape(path)
    regex = regex.replace(r"\*", "([^/]*)")
    regex = regex.replace(r"\?", "([^/])")
    matching_files = {}
    for file in files:
        match = re.fullmatch(regex, file)
        if match is not None:
            matching_files[match.groups()] = file
    return matching_files


def _unpacked_blocks(name: str, max_stream_bytes: int) -> Iterator[bytes]:
    """Yield the decompressed bytes of a text in blocks.

    `name` is stdin (`-`), a file, or a file in an archive. Raises `DataError` for more than
    `max_stream_bytes` from stdin or a pipe.
    """
    archive_and_file = archives.split_name(name)
    if archive_and_file is not None:
        archive, file_name = archive_and_file
        yield from archives.read_blocks(archive, file_name)
        return
    if name == STDIN and sys.stdin is None:
        raise DataError("stdin is closed; give the path of a file")
    with ExitStack() as stack:
        if name == STDIN:
            stream: IO[bytes] = sys.stdin.buffer
        else:
            stream = stack.enter_context(open_bytes(resolve_path(name)))
        num_bytes = 0
        for block in read_blocks(stream, name):
            num_bytes += len(block)
            if num_bytes > max_stream_bytes and is_stream(name):
                raise DataError(
                    f"{_name_for_messages(name)} has more than the {max_stream_bytes:,} bytes that "
                    "nmt reads from a pipe; write the text to a file, or raise data.max_stream_gb"
                )
            yield block


def _spool_blocks(paths: Sequence[Path], blocks: Iterable[Sequence[bytes]]) -> None:
    """Write blocks of bytes to files. Each block has the next bytes of every file."""
    with ExitStack() as stack:
        files = [stack.enter_context(spool(path)) for path in paths]
        for block in blocks:
            for file, file_block in zip(files, block, strict=True):
                file.write(file_block)


@contextlib.contextmanager
def spool(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file to write to. It replaces `path` if the block ends without an exception.

    If `path` already has the same content, it keeps its modification time, so that results of an
    interrupted run stay valid.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as stream:
            yield stream
        is_unchanged = path.is_file() and filecmp.cmp(path, temporary, shallow=False)
        if not is_unchanged:
            sync(temporary)
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
