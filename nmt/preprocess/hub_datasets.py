"""Text of datasets that the library `datasets` reads: files, local folders, and the hub.

The library finds and streams the files of a dataset. Its cache is only used without a network.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.compute as pc

from nmt.config import SplitConfig, resolve_path
from nmt.errors import DataError, suggest_names, to_one_line
from nmt.runtime.reading import check_tree

log = logging.getLogger(__name__)
# Line breaks inside of a text become this character, which `clean` counts and turns into a space.
LINE_SEPARATOR = "\u2028".encode()
_ROWS_PER_BATCH = 10_000
_HUB_TIMEOUT_SECONDS = 10
_SAVED_DATASET_FILES = ("state.json", "dataset_dict.json")  # save_to_disk writes one of them


def describe_dataset(settings: SplitConfig) -> str:
    """Return the name of a dataset with its configuration and split, for messages."""
    details = [settings.dataset_config, settings.dataset_split]
    description = ", ".join(detail for detail in details if detail)
    if not description:
        return str(settings.dataset)
    return f"{settings.dataset} ({description})"


def read_dataset(
    settings: SplitConfig, fields: Sequence[str], default_split: str
) -> Iterator[list[bytes]]:
    """Yield blocks of lines of a dataset: for each field, the next lines as bytes.

    A missing text becomes an empty line. `fields` name the source, the target and perhaps the
    alignment. Each is a column or, as in wmt14, a field of the column `translation`. Raises
    `DataError` if the dataset is missing or damaged, or has no such fields.
    """
    name = describe_dataset(settings)
    log.info("reading the dataset %s", name)
    split = settings.dataset_split or default_split
    tables = _read_tables(settings, split)
    try:
        with closing(tables):  # type: ignore[type-var]
            for table in tables:
                columns = _find_columns(table, fields, name)
                yield [_join_lines(column, name) for column in columns]
    except (OSError, ValueError, RuntimeError, pa.ArrowException) as error:
        reason = to_one_line(error, 300)
        raise DataError(f"dataset {name} cannot be read: {reason}") from None


def _read_tables(settings: SplitConfig, split: str) -> Iterator[pa.Table]:
    """Yield the records of a split of a file, a local folder or a dataset of the hub."""
    assert settings.dataset is not None
    datasets = _import_datasets()
    path = resolve_path(settings.dataset)
    if path.is_dir():
        check_tree(path)
    if any((path / name).is_file() for name in _SAVED_DATASET_FILES):
        saved_dataset = datasets.load_from_disk(str(path))
        dataset_by_split = {split: saved_dataset}
        if isinstance(saved_dataset, dict):  # a dataset with several splits
            dataset_by_split = saved_dataset
    else:
        builder = _make_builder(datasets, path, settings, split)
        if hasattr(builder.config, "batch_size"):  # Parquet reads whole row groups by default
            builder.config.batch_size = _ROWS_PER_BATCH
        dataset_by_split = builder.as_streaming_dataset()
    if split not in dataset_by_split:
        raise DataError(
            f"{settings.dataset} has no split {split}; {suggest_names(split, dataset_by_split)}"
        )
    dataset = dataset_by_split[split].with_format("arrow")
    yield from dataset.iter(batch_size=_ROWS_PER_BATCH)


def _make_builder(datasets: Any, path: Path, settings: SplitConfig, split: str) -> Any:
    """Return the builder of `datasets` for a dataset that save_to_disk did not write."""
    config = settings.dataset_config
    if path.is_file():
        if path.suffix not in (".parquet", ".arrow"):
            raise DataError(
                f"{path} is not a .parquet or .arrow file; read text with src and tgt, tsv or jsonl"
            )
        format_name = path.suffix.removeprefix(".")  # parquet or arrow
        return datasets.load_dataset_builder(format_name, data_files={split: str(path)})
    if not path.is_dir():
        assert settings.dataset is not None
        _check_hub(settings.dataset)
        return datasets.load_dataset_builder(settings.dataset, config)
    try:
        return datasets.load_dataset_builder(str(path), config)
    except ValueError:
        if config is None or not (path / config).is_dir():
            raise
        # if there is no README, a configuration is the name of a subfolder
        return datasets.load_dataset_builder(str(path), data_dir=config)


def _check_hub(dataset: str) -> None:
    """Raise a `DataError` if the hub cannot be reached.

    `datasets` itself would retry for 30 seconds before it raises an error.
    """
    # with a proxy, a direct connection may be impossible; offline, `datasets` reads its cache
    if urllib.request.getproxies() or os.environ.get("HF_HUB_OFFLINE"):
        return
    hub = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    default_port = 80 if hub.scheme == "http" else 443
    port = hub.port or default_port
    try:
        socket.create_connection((hub.hostname, port), timeout=_HUB_TIMEOUT_SECONDS).close()
    except OSError as error:
        raise DataError(
            f"dataset {dataset} is not a local file or folder, and {hub.hostname} cannot be "
            f"reached ({error.strerror or error}); on a machine with network, make a copy with: hf "
            f"download {dataset} --repo-type dataset --local-dir FOLDER; then give this folder"
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
    # the library logs its errors before it raises them; `read_dataset` reports the exception
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    return datasets


def _find_columns(
    table: pa.Table, fields: Sequence[str], dataset: str
) -> Iterator[pa.ChunkedArray]:
    """Yield the texts of each field, which is a column or a field of the column `translation`.

    Raises `DataError`, which names the `dataset`, if the table lacks a field.
    """
    names = table.column_names
    translation_fields = []
    if "translation" in names and pa.types.is_struct(table.schema.field("translation").type):
        translation_type = table.schema.field("translation").type
        translation_fields = [inner_field.name for inner_field in translation_type]
    for field in fields:
        if field in names:
            yield table[field]
        elif field in translation_fields:
            yield pc.struct_field(table["translation"], field)
        else:
            field_names = translation_fields if translation_fields else names
            raise DataError(
                f"{dataset} has the fields {', '.join(field_names)}; set data.src_lang "
                "and data.tgt_lang, or fields of this corpus, to two of them (now "
                f"{', '.join(fields)})"
            )


def _join_lines(column: pa.ChunkedArray, dataset: str) -> bytes:
    """Return the texts of a column as lines. For speed, Arrow functions process the column."""
    if pa.types.is_nested(column.type):
        raise DataError(
            f"{dataset}: a field holds {column.type}, not text; name fields that hold text"
        )
    # numbers and other values become text; bytes stay, since `clean` reports invalid UTF-8
    if column.type not in (pa.large_binary(), pa.binary()):
        column = column.cast(pa.large_string())
    texts = pc.fill_null(column.cast(pa.binary()), b"")
    texts = pc.replace_substring(texts, b"\n", LINE_SEPARATOR).combine_chunks()
    if len(texts) == 0:
        return b""
    # `binary_join` takes an array of lists and joins the texts of each list; here it has one list
    offsets = pa.array([0, len(texts)], pa.int32())
    text_lists = pa.ListArray.from_arrays(offsets, texts)
    lines: bytes = pc.binary_join(text_lists, b"\n")[0].as_py()
    return lines + b"\n"
