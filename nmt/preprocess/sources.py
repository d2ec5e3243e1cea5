"""List the files with the text of a split, and convert all other text to such files.

Standard input, pipes, compressed files, datasets and generated corpora are first written
("spooled") to plain files, so that a worker can start to read anywhere. The library `datasets`
finds and streams the files of a dataset; its cache is not used.
"""

from __future__ import annotations

import contextlib
import filecmp
import glob
import logging
import os
import re
import socket
import sys
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.compute as pc

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
from nmt.errors import ConfigError, DataError, suggest_names
from nmt.preprocess import archives
from nmt.preprocess.bitext_xml import read_pairs
from nmt.preprocess.chunks import Format, Source
from nmt.runtime.files import sync
from nmt.runtime.reading import check_tree

log = logging.getLogger(__name__)
STDIN = "-"
DATASET_SPLITS = {"train": "train", "valid": "validation", "test": "test"}  # default names
# Replaces line breaks inside texts of datasets. Cleaning turns it into a space and counts it.
LINE_SEPARATOR = "\u2028".encode()
_BITEXT_SUFFIXES = ("tsv", "jsonl", "tmx", "xliff")
"""Suffixes of files with both sides, which are also the names of their settings."""
_ROWS_PER_BATCH = 10_000
_HUB_TIMEOUT_SECONDS = 10
_SAVED_DATASET_FILES = ("state.json", "dataset_dict.json")  # written by save_to_disk


@dataclass(frozen=True)
class _CorpusSettings:
    """The settings of one corpus in one split."""

    key: str  # config key, such as data.corpora.news.valid
    corpus: str  # name in data.corpora, or ""
    split: SplitConfig
    direction: LanguagePair

    def file_names(self) -> list[tuple[str, ...]]:
        """Return the file names of each source.

        These are source, target and, if there are any, scores, or one file with both sides.

        A file in an archive has a name such as corpus.zip/corpus.de-en.de.
        """
        if self.split.src is not None and self.split.tgt is not None:
            pairs: list[tuple[str, ...]] = []
            for src, tgt in pair_up(self.split.src, self.split.tgt, self.key):
                src = archives.find_text(src, self.direction.src_lang)
                tgt = archives.find_text(tgt, self.direction.tgt_lang)
                if src == tgt and archives.split_name(src) is not None:
                    raise DataError(f"{self.key}: source and target are the same file, {src}")
                pairs.append((src, tgt))
            return self._add_scores(pairs)
        files: list[tuple[str, ...]] = []
        for suffix in _BITEXT_SUFFIXES:
            for file in _match_all(getattr(self.split, suffix) or []):
                files.append((archives.find_text(file, suffix),))
        return files

    def _add_scores(self, pairs: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
        """Add to each pair of files its file of scores, if the settings name any."""
        if self.split.scores is None:
            return pairs
        scores = _match_all(self.split.scores)
        if len(scores) != len(pairs):
            raise DataError(
                f"{self.key}.scores: {len(scores)} files for {len(pairs)} files of text; the "
                "numbers must be equal"
            )
        return [(*pair, file) for pair, file in zip(pairs, scores, strict=True)]


def _list_corpora(config: DataConfig, split: str) -> list[_CorpusSettings]:
    """Return the settings of all corpora of a split, sorted by name."""
    corpora = []

    def add(key: str, name: str, settings: SplitConfig) -> None:
        corpora.append(_CorpusSettings(key, name, settings, corpus_direction(config, name)))

    named = sorted(config.corpora.items())
    if split == "train" and named:
        for name, corpus in named:
            add(
                f"data.corpora.{name}", name, corpus
            )  # `_check_files` refuses a corpus without text
        return corpora
    unnamed = getattr(config, split)
    if unnamed.source_keys:
        add(f"data.{split}", "", unnamed)
    for name, corpus in named:
        held_out = getattr(corpus, split)
        if held_out.source_keys:
            add(f"data.corpora.{name}.{split}", name, held_out)
    return corpora


def has_split(config: DataConfig, split: str) -> bool:
    """Return whether the settings name text for `split` (train, valid or test)."""
    if config.corpus is not Corpus.files:
        return True
    return any(corpus.split.source_keys for corpus in _list_corpora(config, split))


def find_sources(config: PreprocessConfig, split: str, spool_dir: Path) -> list[Source]:
    """List the sources of a split, sorted by corpus; write text to `spool_dir` where necessary.

    Raises `DataError` or `ConfigError` before reading if a file of any split is missing.
    """
    bundled = config.data.corpus
    if bundled is not Corpus.files:
        pairs = load_bundled_corpus(bundled, config.seed)[split]
        src = "".join(f"{src_line}\n" for src_line, _ in pairs)
        tgt = "".join(f"{tgt_line}\n" for _, tgt_line in pairs)
        paths = (spool_dir / f"{split}.src", spool_dir / f"{split}.tgt")
        _spool_blocks(paths, [[src.encode(), tgt.encode()]])
        return [Source("", Format.pair, paths, (bundled.value, bundled.value))]
    _check_files(config.data)
    sources = []
    for corpus in _list_corpora(config.data, split):
        direction = corpus.direction
        fields = corpus.split.fields or [direction.src_lang, direction.tgt_lang]
        template = Source(
            corpus=corpus.corpus,
            format=Format.pair,
            paths=(),
            names=(),
            columns=(corpus.split.columns[0], corpus.split.columns[1]),
            fields=(fields[0], fields[1]),
            score=corpus.split.score,
            tags=direction.tags,
            key=corpus.key,
        )
        spool_prefix = f"{split}-{corpus.corpus}" if corpus.corpus else split
        if corpus.split.dataset is not None:
            paths = (spool_dir / f"{spool_prefix}.src", spool_dir / f"{spool_prefix}.tgt")
            _spool_blocks(paths, read_dataset(corpus.split, fields, DATASET_SPLITS[split]))
            name = _describe(corpus.split)
            sources.append(replace(template, paths=paths, names=(name, name)))
        else:
            sources += _find_files(corpus, template, spool_dir / spool_prefix)
    return sources


def _find_files(corpus: _CorpusSettings, template: Source, spool_prefix: Path) -> Iterator[Source]:
    """Yield the sources of a corpus in files: copies of `template` with paths, names and format."""
    if corpus.split.tmx is not None or corpus.split.xliff is not None:
        yield from _convert_xml(corpus, template, spool_prefix)
        return
    if corpus.split.tsv is not None:
        template = replace(template, format=Format.tsv)
    elif corpus.split.jsonl is not None:
        template = replace(template, format=Format.jsonl)
    for number, file_names in enumerate(corpus.file_names()):
        paths = []
        for side, file in enumerate(file_names):
            path = resolve_path(file)
            if is_stream(file) or is_compressed(file) or archives.split_name(file) is not None:
                path = spool_prefix.with_name(f"{spool_prefix.name}-{number}-{side}")
                _spool_blocks([path], _unpacked_blocks(file))
            paths.append(path)
        names = tuple("stdin" if file == STDIN else file for file in file_names)
        yield replace(template, paths=tuple(paths), names=names)


def _convert_xml(corpus: _CorpusSettings, template: Source, spool_prefix: Path) -> Iterator[Source]:
    """Write the pairs of TMX or XLIFF files to text files; yield these as sources."""
    direction = corpus.direction
    languages = (direction.src_lang, direction.tgt_lang)
    if languages == DEFAULT_LANGUAGES:
        languages = ("", "")
    for number, [file] in enumerate(corpus.file_names()):
        name = "stdin" if file == STDIN else file
        pairs = read_pairs(
            (block for [block] in _unpacked_blocks(file)),
            name,
            languages,
            keep_codes=corpus.split.keep_codes,
        )
        paths = (
            spool_prefix.with_name(f"{spool_prefix.name}-{number}.src"),
            spool_prefix.with_name(f"{spool_prefix.name}-{number}.tgt"),
        )
        _spool_blocks(paths, _encode_pairs(pairs))
        yield replace(template, paths=paths, names=(name, name))


def _encode_pairs(pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[bytes, bytes]]:
    for source, target in pairs:
        yield f"{source}\n".encode(), f"{target}\n".encode()


def _check_files(config: DataConfig) -> None:
    """Raise an error for a missing file of any split, before the first split is read."""
    files: list[str] = []
    for split in DATASET_SPLITS:
        for corpus in _list_corpora(config, split):
            key = corpus.key
            if not corpus.split.source_keys:
                raise ConfigError(f"{key} names no text; give {key}.src=FILE and {key}.tgt=FILE")
            for names in corpus.file_names():
                files += names
    for file in files:
        if archives.split_name(file) is not None:
            continue  # `file_names` has found the file in its archive
        path = resolve_path(file)
        if file != STDIN and not path.exists() and config.made_by:
            raise DataError(f"{path} does not exist; make it with: {config.made_by}")
        if not is_stream(file):
            check_file(path)
    if files.count(STDIN) > 1:
        raise ConfigError(f"{files.count(STDIN)} files are {STDIN}; stdin can be read only once")


def pair_up(src: Sequence[str], tgt: Sequence[str], key: str) -> list[tuple[str, ...]]:
    """Pair source and target files in their order; names with * and ? are patterns.

    The files of two patterns such as `news-*.en` and `news-*.de` are paired if the wildcards match
    the same text. Raises `DataError` for files without a counterpart; `key` names the setting.
    """
    if len(src) != len(tgt):
        return _pair_in_order(_match_all(src), _match_all(tgt), key)
    pairs: list[tuple[str, ...]] = []
    for src_name, tgt_name in zip(src, tgt, strict=True):
        src_matches = match_files(src_name)
        tgt_matches = match_files(tgt_name)
        if src_matches.keys() == tgt_matches.keys():
            pairs += [(file, tgt_matches[wildcards]) for wildcards, file in src_matches.items()]
        elif src_matches.keys().isdisjoint(tgt_matches):
            src_files = list(src_matches.values())
            pairs += _pair_in_order(src_files, list(tgt_matches.values()), "src and tgt")
        else:
            unpaired = [src_matches[texts] for texts in src_matches if texts not in tgt_matches]
            unpaired += [tgt_matches[texts] for texts in tgt_matches if texts not in src_matches]
            raise DataError(
                f"{min(unpaired)} has no counterpart on the other side; add it or name the files"
            )
    return pairs


def _pair_in_order(src: list[str], tgt: list[str], key: str) -> list[tuple[str, ...]]:
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
    """Return the files that match a name or pattern, by the texts that its wildcards match."""
    path = os.path.expanduser(name)
    if name == STDIN or not re.search(r"[*?]", name) or os.path.exists(path):
        return {(): name}
    files = sorted(file for file in glob.glob(path.replace("[", "[[]")) if not os.path.isdir(file))
    if not files:
        raise DataError(f"{name} matches no file; check the pattern")
    pattern = re.compile(re.escape(path).replace(r"\*", "([^/]*)").replace(r"\?", "([^/])"))
    matching_files = {}
    for file in files:
        if match := pattern.fullmatch(file):
            matching_files[match.groups()] = file
    return matching_files


def _unpacked_blocks(name: str) -> Iterator[tuple[bytes]]:
    """Read blocks of bytes from stdin, a file in an archive, or a file, which is decompressed."""
    archive_and_file = archives.split_name(name)
    if archive_and_file is not None:
        archive, file_name = archive_and_file
        for block in archives.read_blocks(archive, file_name):
            yield (block,)
        return
    if name == STDIN and sys.stdin is None:
        raise DataError("stdin is closed; give the path of a file")
    with ExitStack() as stack:
        if name == STDIN:
            stream: IO[bytes] = sys.stdin.buffer
        else:
            stream = stack.enter_context(open_bytes(resolve_path(name)))
        for block in read_blocks(stream, name):
            yield (block,)


def _spool_blocks(paths: Sequence[Path], blocks: Iterable[Sequence[bytes]]) -> None:
    """Write blocks of bytes to files; each block holds the next bytes of every file."""
    with ExitStack() as stack:
        files = [stack.enter_context(spool(path)) for path in paths]
        for block in blocks:
            for file, file_block in zip(files, block, strict=True):
                file.write(file_block)


@contextlib.contextmanager
def spool(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file to write to. It replaces `path` if the block ends without an exception.

    If the content is the same as before an interruption, `path` keeps its modification time, so
    that results of the interrupted run stay valid.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as stream:
            yield stream
        if not (path.is_file() and filecmp.cmp(path, temporary, shallow=False)):
            sync(temporary)
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


# Hugging Face datasets


def _describe(split: SplitConfig) -> str:
    """Return the name of a dataset with its configuration and split, for messages."""
    details = ", ".join(filter(None, [split.dataset_config, split.dataset_split]))
    return f"{split.dataset} ({details})" if details else str(split.dataset)


def read_dataset(
    split: SplitConfig, fields: Sequence[str], default_split: str
) -> Iterator[list[bytes]]:
    """Yield blocks of the source and target lines of a dataset; a missing text is an empty line.

    `fields` name two columns, or two fields of the column `translation`, as wmt14 has it. Raises
    `DataError` if the dataset is missing or damaged, or has no such fields.
    """
    name = _describe(split)
    log.info("reading the dataset %s", name)
    tables = _read_tables(split, split.dataset_split or default_split)
    try:
        with closing(tables):  # type: ignore[type-var]
            for table in tables:
                columns = [_find_column(table, field, name, fields) for field in fields]
                yield [_join_lines(column, name) for column in columns]
    except (OSError, ValueError, RuntimeError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())[:300]
        raise DataError(f"dataset {name} cannot be read: {reason}") from None


def _read_tables(split: SplitConfig, split_name: str) -> Iterator[pa.Table]:
    """Yield the records of a file, a local folder or a dataset of the hub."""
    assert split.dataset is not None
    datasets = _import_datasets()
    path = resolve_path(split.dataset)
    if path.is_dir():
        check_tree(path)
    if any((path / name).is_file() for name in _SAVED_DATASET_FILES):
        saved = datasets.load_from_disk(str(path))
        splits = saved if isinstance(saved, dict) else {split_name: saved}
    else:
        builder = _make_builder(datasets, path, split, split_name)
        if hasattr(builder.config, "batch_size"):  # Parquet; the default is a whole row group
            builder.config.batch_size = _ROWS_PER_BATCH
        splits = builder.as_streaming_dataset()
    if split_name not in splits:
        raise DataError(
            f"{split.dataset} has no split {split_name}; {suggest_names(split_name, splits)}"
        )
    yield from splits[split_name].with_format("arrow").iter(batch_size=_ROWS_PER_BATCH)


def _make_builder(datasets: Any, path: Path, split: SplitConfig, split_name: str) -> Any:
    """Return the builder of `datasets` for a dataset that save_to_disk did not write."""
    config = split.dataset_config
    if path.is_file():
        if path.suffix not in (".parquet", ".arrow"):
            raise DataError(
                f"{path} is no .parquet or .arrow file; read text with src and tgt, tsv or jsonl"
            )
        return datasets.load_dataset_builder(path.suffix[1:], data_files={split_name: str(path)})
    if not path.is_dir():
        assert split.dataset is not None
        _check_hub(split.dataset)
        return datasets.load_dataset_builder(split.dataset, config)
    try:
        return datasets.load_dataset_builder(str(path), config)
    except ValueError:
        if config is None or not (path / config).is_dir():
            raise
        # without a README, a configuration is the name of a subfolder
        return datasets.load_dataset_builder(str(path), data_dir=config)


def _check_hub(dataset: str) -> None:
    """Raise a `DataError` if the hub cannot be reached, which `datasets` retries for 30 seconds."""
    if urllib.request.getproxies() or os.environ.get("HF_HUB_OFFLINE"):
        return
    hub = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    port = hub.port or (80 if hub.scheme == "http" else 443)
    try:
        socket.create_connection((hub.hostname, port), timeout=_HUB_TIMEOUT_SECONDS).close()
    except OSError as error:
        raise DataError(
            f"dataset {dataset} is no local file or folder, and {hub.hostname} cannot be reached "
            f"({error.strerror or error}); give the folder of a copy, which this makes where there "
            f"is network: hf download {dataset} --repo-type dataset --local-dir FOLDER"
        ) from None


def _import_datasets() -> Any:
    """Import `datasets` without torch, which would take two more seconds and 200 MB of memory."""
    hides_torch = "torch" not in sys.modules and "USE_TORCH" not in os.environ
    if hides_torch:
        os.environ["USE_TORCH"] = "0"
    import datasets

    if hides_torch:
        del os.environ["USE_TORCH"]
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are raised as well
    return datasets


def _find_column(
    table: pa.Table, field: str, dataset: str, fields: Sequence[str]
) -> pa.ChunkedArray:
    """Return a column, or a field of the column `translation`."""
    names = table.column_names
    if field in names:
        return table[field]
    if "translation" in names and pa.types.is_struct(table.schema.field("translation").type):
        names = [inner.name for inner in table.schema.field("translation").type]
        if field in names:
            return pc.struct_field(table["translation"], field)
    raise DataError(
        f"{dataset} has the fields {', '.join(names)}; set data.src_lang and data.tgt_lang, or "
        f"fields of this corpus, to two of them (now {', '.join(fields)})"
    )


def _join_lines(column: pa.ChunkedArray, dataset: str) -> bytes:
    """Return the texts of a column as lines. For speed, Arrow loops over them, not Python."""
    if pa.types.is_nested(column.type):
        raise DataError(
            f"{dataset}: a field holds {column.type}, not text; name fields that hold text"
        )
    if column.type not in (pa.large_binary(), pa.binary()):
        column = column.cast(pa.large_string())
    texts = pc.fill_null(column.cast(pa.binary()), b"")
    texts = pc.replace_substring(texts, b"\n", LINE_SEPARATOR).combine_chunks()
    if len(texts) == 0:
        return b""
    rows = pa.ListArray.from_arrays(pa.array([0, len(texts)], pa.int32()), texts)
    lines: bytes = pc.binary_join(rows, b"\n")[0].as_py()
    return lines + b"\n"
