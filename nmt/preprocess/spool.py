"""Writes to plain files what is no text file or can be read only once: streams, and the records of
Hugging Face datasets, Parquet and Arrow files, of which each is a line on both sides.

The library `datasets` finds the files of a name or folder and streams them; nothing goes through
its cache.
"""

from __future__ import annotations

import contextlib
import filecmp
import logging
import os
import sys
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from nmt.config import SplitConfig, resolve
from nmt.errors import DataError, nearest
from nmt.files import sync

log = logging.getLogger(__name__)
# A line break inside a text would end the line. As this character it stays inside, where cleaning
# makes a space of it and counts it.
LINE_SEPARATOR = "\u2028".encode()
_ROWS_A_BATCH = 10_000
_SAVED = ("state.json", "dataset_dict.json")  # of a folder made by save_to_disk
Lines = tuple[bytes, bytes]
Tables = Generator[pa.Table, None, None]


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


def describe(split: SplitConfig) -> str:
    """Name a dataset with its configuration and split, for messages."""
    parts = [part for part in (split.dataset_config, split.dataset_split) if part]
    return f"{split.dataset} ({', '.join(parts)})" if parts else str(split.dataset)


def read_dataset(split: SplitConfig, fields: Sequence[str], default_split: str) -> Iterator[Lines]:
    """Yield blocks of lines, source and target; a text that is missing is an empty line.

    `fields` are two columns, or two fields of the column `translation` as in wmt14. Raises
    `DataError` for a dataset that is not there, is damaged or has no such fields.
    """
    name = describe(split)
    log.info("reading the dataset %s", name)
    tables = _tables(split, fields, split.dataset_split or default_split)
    try:
        with contextlib.closing(tables):
            for table in tables:
                src, tgt = (_lines(_column(table, field, name, fields), name) for field in fields)
                yield src, tgt
    except (OSError, ValueError, RuntimeError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())[:300]
        raise DataError(f"dataset {name} cannot be read: {reason}") from None


def _tables(split: SplitConfig, fields: Sequence[str], part: str) -> Tables:
    """Yield the records of a file, a local folder or a dataset of the hub."""
    assert split.dataset is not None
    path = resolve(split.dataset)
    if path.is_file():
        yield from _read_file(path, fields)
        return
    datasets = _library()
    if any((path / name).is_file() for name in _SAVED):
        saved = datasets.load_from_disk(str(path))
        splits = saved if isinstance(saved, dict) else {part: saved}
    else:
        builder = _builder(datasets, split)
        files = [Path(file) for file in (builder.config.data_files or {}).get(part, [])]
        if files and all(f.suffix in (".parquet", ".arrow") and f.is_file() for f in files):
            for file in files:  # in less memory than the library, which reads whole groups of rows
                yield from _read_file(file, fields)
            return
        if hasattr(builder.config, "batch_size"):  # of Parquet on the hub
            builder.config.batch_size = _ROWS_A_BATCH
        splits = builder.as_streaming_dataset()
    if part not in splits:
        raise DataError(f"{split.dataset} has no split {part}; {nearest(part, splits)}")
    yield from splits[part].with_format("arrow").iter(batch_size=_ROWS_A_BATCH)


def _read_file(path: Path, fields: Sequence[str]) -> Tables:
    if path.suffix == ".parquet":
        with pq.ParquetFile(path, memory_map=True) as file:
            names = file.schema_arrow.names
            whole = names if "translation" not in names else ["translation"]
            columns = list(fields) if set(fields) <= set(names) else whole
            for batch in file.iter_batches(_ROWS_A_BATCH, columns=columns, use_threads=False):
                yield pa.Table.from_batches([batch])
        return
    if path.suffix != ".arrow":
        raise DataError(
            f"{path} is no .parquet or .arrow file; read text with src and tgt, tsv or jsonl"
        )
    with pa.memory_map(str(path)) as stream:
        is_file = stream.read(6) == b"ARROW1"  # of the two formats of Arrow
        stream.seek(0)
        if is_file:
            reader = pa.ipc.open_file(stream)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        else:
            batches = pa.ipc.open_stream(stream)
        for batch in batches:
            for start in range(0, batch.num_rows, _ROWS_A_BATCH):
                yield pa.Table.from_batches([batch.slice(start, _ROWS_A_BATCH)])


def _builder(datasets: Any, split: SplitConfig) -> Any:
    """Let `datasets` find the files; a configuration may be a mere folder, without a README."""
    assert split.dataset is not None
    name, folder = split.dataset_config, resolve(split.dataset)
    if not folder.is_dir():
        return datasets.load_dataset_builder(split.dataset, name)
    try:
        return datasets.load_dataset_builder(str(folder), name)
    except ValueError:
        if name is None or not (folder / name).is_dir():
            raise
        return datasets.load_dataset_builder(str(folder), data_dir=name)


def _library() -> Any:
    """Import `datasets` (a second), but not torch with it (two more, and 200 MB of memory)."""
    if "torch" not in sys.modules and "USE_TORCH" not in os.environ:
        os.environ["USE_TORCH"] = "0"
        try:
            import datasets
        finally:
            del os.environ["USE_TORCH"]
    import datasets

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
    if not (pa.types.is_large_binary(kind) or pa.types.is_binary(kind)):
        column = column.cast(pa.large_string())
    texts = pc.fill_null(column.cast(pa.binary()), b"")
    texts = pc.replace_substring(texts, b"\n", LINE_SEPARATOR).combine_chunks()
    if len(texts) == 0:
        return b""
    rows = pa.ListArray.from_arrays(pa.array([0, len(texts)], pa.int32()), texts)
    joined: bytes = pc.binary_join(rows, b"\n")[0].as_py()
    return joined + b"\n"
