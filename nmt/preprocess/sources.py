"""Where the pairs of a split come from: settings become a list of plain files to read.

What is no such file (stdin, pipes, packed files, datasets, generated corpora) is first written to
one, in the spool folder, so that a worker can begin anywhere in it. The library `datasets` finds
and streams the files of a dataset; nothing goes through its cache.
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
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.compute as pc

from nmt.config import Corpus, DataConfig, PreprocessConfig, SplitConfig, resolve
from nmt.data.languages import corpus_direction
from nmt.data.text import bundled_corpus, check_file, is_packed, is_stream, open_bytes
from nmt.errors import ConfigError, DataError, nearest
from nmt.preprocess.chunks import Format, Source
from nmt.runtime.files import sync

log = logging.getLogger(__name__)
STDIN = "-"
SPLITS = {"train": "train", "valid": "validation", "test": "test"}  # and their names in datasets
# A line break inside a text would end the line. As this character it stays inside, where cleaning
# makes a space of it and counts it.
LINE_SEPARATOR = "\u2028".encode()
_ROWS_A_BATCH = 10_000
_SAVED = ("state.json", "dataset_dict.json")  # of a folder made by save_to_disk


def has_split(config: DataConfig, split: str) -> bool:
    """Return whether the settings name a corpus for `split` (train, valid or test)."""
    parts = _parts(config, split)
    return config.corpus is not Corpus.files or any(part.source_keys for _, _, part in parts)


def find_sources(config: PreprocessConfig, split: str, folder: Path) -> list[Source]:
    """List the sources of a split, corpora in the order of their names; spool to `folder` what
    must be.

    Raises `DataError` or `ConfigError` for what is missing, in whatever split, before reading.
    """

    def spooled(names: list[str], blocks: Iterable[Sequence[bytes]]) -> tuple[Path, ...]:
        """Write blocks, of each a part to every file."""
        paths = tuple(folder / f"{split}{name}" for name in names)
        with ExitStack() as stack:
            files = [stack.enter_context(spool(path)) for path in paths]
            for block in blocks:
                for file, content in zip(files, block, strict=True):
                    file.write(content)
        return paths

    if (corpus := config.data.corpus) is not Corpus.files:
        pairs = bundled_corpus(corpus, config.seed)[split]
        sides = ["".join(f"{text}\n" for text in side) for side in zip(*pairs, strict=True)]
        paths = spooled([".src", ".tgt"], [[side.encode() for side in sides]])
        return [Source("", Format.pair, paths, (corpus.value, corpus.value))]
    _check_files(config.data)
    sources = []
    for key, name, part in _parts(config.data, split):
        suffix = f"-{name}" if name else ""
        columns = (part.columns[0], part.columns[1])
        direction = corpus_direction(config.data, name)
        src, tgt = part.fields or (direction.src_lang, direction.tgt_lang)
        how: dict[str, Any] = {"columns": columns, "fields": (src, tgt), "tags": direction.tags}
        if part.dataset is not None:
            blocks = read_dataset(part, (src, tgt), SPLITS[split])
            paths = spooled([f"{suffix}.src", f"{suffix}.tgt"], blocks)
            shown: tuple[str, ...] = (_describe(part),) * 2
            sources.append(Source(name, Format.pair, paths, shown, **how))
            continue
        kind = Format.pair if part.src else Format.tsv if part.tsv else Format.jsonl
        for number, files in enumerate(_file_names(part, key)):
            paths = ()
            for side, file in enumerate(files):
                path = resolve(file)
                if is_stream(file) or is_packed(file):
                    (path,) = spooled([f"{suffix}-{number}-{side}"], _unpacked_blocks(file))
                paths += (path,)
            shown = tuple("stdin" if file == STDIN else file for file in files)
            sources.append(Source(name, kind, paths, shown, **how))
    return sources


def _parts(config: DataConfig, split: str) -> list[tuple[str, str, SplitConfig]]:
    """Return the settings that make up a split: key, name of the corpus, values."""
    corpora = sorted(config.corpora.items())
    if split == "train" and corpora:
        return [(f"data.corpora.{name}", name, part) for name, part in corpora]
    own = [(f"data.corpora.{name}.{split}", name, getattr(c, split)) for name, c in corpora]
    parts = [(f"data.{split}", "", getattr(config, split)), *own]
    return [part for part in parts if part[2].source_keys]


def _check_files(config: DataConfig) -> None:
    """Find what is missing before hours are spent on what is there."""
    num_stdin = 0
    for key, name, part in (part for split in SPLITS for part in _parts(config, split)):
        if name and not part.source_keys:
            raise ConfigError(f"{key} names no text; give {key}.src=FILE and {key}.tgt=FILE")
        for file in (file for files in _file_names(part, key) for file in files):
            path = resolve(file)
            if file == STDIN:
                num_stdin += 1
            elif not path.exists() and config.made_by:
                raise DataError(f"{path} does not exist; make it with: {config.made_by}")
            elif not is_stream(file):
                check_file(path)
    if num_stdin > 1:
        raise ConfigError(f"{num_stdin} files are {STDIN}; stdin is one, and is read once")


def _file_names(part: SplitConfig, key: str) -> list[tuple[str, ...]]:
    """Return the names of the files of each source, patterns resolved."""
    if part.src is not None and part.tgt is not None:
        return pair_up(part.src, part.tgt, key)
    return [(file,) for name in part.tsv or part.jsonl or [] for file in match_files(name).values()]


def pair_up(src: Sequence[str], tgt: Sequence[str], key: str) -> list[tuple[str, ...]]:
    """Pair the files of two sides, one after the other; names with * and ? are patterns.

    Of two patterns, files belong together where the wildcards stand for the same text, as in
    `news-*.en` and `news-*.de`. Raises `DataError` for files without a counterpart; `key` names the
    setting.
    """
    if len(src) != len(tgt):
        ones, others = (
            [f for name in side for f in match_files(name).values()] for side in (src, tgt)
        )
        return _pair_in_order(ones, others, key)
    pairs: list[tuple[str, ...]] = []
    for left, right in zip(map(match_files, src), map(match_files, tgt), strict=True):
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


def match_files(name: str) -> dict[tuple[str, ...], str]:
    """Return the files of a name or pattern, sorted, by what the wildcards stand for."""
    path = os.path.expanduser(name)
    if name == STDIN or not re.search(r"[*?]", name) or os.path.exists(path):
        return {(): name}
    files = sorted(p for p in glob.glob(path.replace("[", "[[]")) if not os.path.isdir(p))
    if not files:
        raise DataError(f"{name} matches no file; check the pattern")
    wild = re.compile(re.escape(path).replace(r"\*", "([^/]*)").replace(r"\?", "([^/])"))
    matches = [(wild.fullmatch(file), file) for file in files]
    return {match.groups(): file for match, file in matches if match is not None}


def _unpacked_blocks(name: str) -> Iterator[tuple[bytes]]:
    if name == STDIN and sys.stdin is None:
        raise DataError("stdin is closed; give the path of a file")
    with nullcontext(sys.stdin.buffer) if name == STDIN else open_bytes(resolve(name)) as stream:
        while block := stream.read(1 << 20):
            yield (block,)


@contextlib.contextmanager
def spool(path: Path) -> Iterator[IO[bytes]]:
    """Give a file to write, which becomes `path` when the block ends without an exception.

    A file with the same content, written before an interruption, stays as it is, with its time:
    what was made from it is still good.
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


def _describe(split: SplitConfig) -> str:
    """Name a dataset with its configuration and split, for messages."""
    parts = [part for part in (split.dataset_config, split.dataset_split) if part]
    return f"{split.dataset} ({', '.join(parts)})" if parts else str(split.dataset)


def read_dataset(
    split: SplitConfig, fields: Sequence[str], default_split: str
) -> Iterator[tuple[bytes, ...]]:
    """Yield blocks of lines, source and target; a text that is missing is an empty line.

    `fields` are two columns, or two fields of the column `translation` as in wmt14. Raises
    `DataError` for a dataset that is not there, is damaged or has no such fields.
    """
    name = _describe(split)
    log.info("reading the dataset %s", name)
    tables = _tables(split, split.dataset_split or default_split)
    try:
        with closing(tables):  # type: ignore[type-var]
            for table in tables:
                yield tuple(_lines(_column(table, f, name, fields), name) for f in fields)
    except (OSError, ValueError, RuntimeError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())[:300]
        raise DataError(f"dataset {name} cannot be read: {reason}") from None


def _tables(split: SplitConfig, part: str) -> Iterator[pa.Table]:
    """Yield the records of a file, a local folder or a dataset of the hub."""
    assert split.dataset is not None
    datasets, path = _library(), resolve(split.dataset)
    if any((path / name).is_file() for name in _SAVED):
        saved = datasets.load_from_disk(str(path))
        splits = saved if isinstance(saved, dict) else {part: saved}
    else:
        builder = _builder(datasets, path, split, part)
        if hasattr(builder.config, "batch_size"):  # of Parquet, else whole groups of rows
            builder.config.batch_size = _ROWS_A_BATCH
        splits = builder.as_streaming_dataset()
    if part not in splits:
        raise DataError(f"{split.dataset} has no split {part}; {nearest(part, splits)}")
    yield from splits[part].with_format("arrow").iter(batch_size=_ROWS_A_BATCH)


def _builder(datasets: Any, path: Path, split: SplitConfig, part: str) -> Any:
    """Let `datasets` find the files; a configuration may be a mere folder, without a README."""
    name, load = split.dataset_config, datasets.load_dataset_builder
    if path.is_file():
        if path.suffix not in (".parquet", ".arrow"):
            raise DataError(
                f"{path} is no .parquet or .arrow file; read text with src and tgt, tsv or jsonl"
            )
        return load(path.suffix[1:], data_files={part: str(path)})
    if not path.is_dir():
        return load(split.dataset, name)
    try:
        return load(str(path), name)
    except ValueError:
        if name is None or not (path / name).is_dir():
            raise
        return load(str(path), data_dir=name)


def _library() -> Any:
    """Import `datasets` (a second), but not torch with it (two more, and 200 MB of memory)."""
    hides_torch = "torch" not in sys.modules and "USE_TORCH" not in os.environ
    if hides_torch:
        os.environ["USE_TORCH"] = "0"
    import datasets

    if hides_torch:
        del os.environ["USE_TORCH"]
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are raised as well
    return datasets


def _column(table: pa.Table, field: str, name: str, wanted: Sequence[str]) -> pa.ChunkedArray:
    if field in table.column_names:
        return table[field]
    names = table.column_names
    if "translation" in names and pa.types.is_struct(table.schema.field("translation").type):
        names = [inner.name for inner in table.schema.field("translation").type]
        if field in names:
            return pc.struct_field(table["translation"], field)
    raise DataError(
        f"{name} has the fields {', '.join(names)}; set data.src_lang and data.tgt_lang, or fields "
        f"of this corpus, to two of them (now {', '.join(wanted)})"
    )


def _lines(column: pa.ChunkedArray, name: str) -> bytes:
    """Join texts to lines, without a loop in Python over them."""
    kind = column.type
    if pa.types.is_nested(kind):
        raise DataError(f"{name}: a field holds {kind}, not text; name fields that hold text")
    if kind not in (pa.large_binary(), pa.binary()):
        column = column.cast(pa.large_string())
    texts = pc.fill_null(column.cast(pa.binary()), b"")
    texts = pc.replace_substring(texts, b"\n", LINE_SEPARATOR).combine_chunks()
    if len(texts) == 0:
        return b""
    rows = pa.ListArray.from_arrays(pa.array([0, len(texts)], pa.int32()), texts)
    joined: bytes = pc.binary_join(rows, b"\n")[0].as_py()
    return joined + b"\n"
