"""Read text from archives (.zip, .tar, .tar.gz, .tar.bz2, .tar.xz) without unpacking them to disk.

A file in an archive is named like a path: `corpus.zip/corpus.de-en.de`. Only the content of regular
files is read, so names and links in an archive have no effect.
"""

from __future__ import annotations

import contextlib
import functools
import re
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from nmt.config import resolve_path
from nmt.data.text import decompress, explain_read_errors, is_compressed
from nmt.errors import DataError, list_first, to_one_line

MAX_FILES = 10_000
# An archive may unpack to MAX_RATIO times its size, or to MIN_LIMIT_BYTES if that is more.
# Compression makes text 3 to 20 times smaller.
MAX_RATIO = 200
MIN_LIMIT_BYTES = 256 << 20
_BLOCK_BYTES = 1 << 20
# names of archives, such as corpus.zip, corpus.tgz or corpus.tar.gz
_ARCHIVE = re.compile(r"(?i)\.(zip|tar|tgz|txz|tbz2?|tar\.(gz|bz2|xz))$")
_SKIPPED = re.compile(r"(?i)(^|/)(__MACOSX/|\.|README|LICEN[SC]E)")  # file names that are ignored


def split_name(name: str) -> tuple[Path, str] | None:
    """Divide `ARCHIVE/FILE` into the path of the archive and the name of a file in it.

    If `name` is an archive, the name of the file is "". Returns None for other names.
    """
    path = resolve_path(name)
    for archive in (path, *path.parents):
        if _ARCHIVE.search(archive.name) and archive.is_file():
            file_name = path.relative_to(archive).as_posix()
            if file_name == ".":  # `path` is the archive itself
                file_name = ""
            return archive, file_name
    return None


def find_text(name: str, suffix: str) -> str:
    """Return `ARCHIVE/FILE` for the name of an archive. Returns other names unchanged.

    FILE is the only file with text, or the only one whose name ends in `.suffix`. Raises
    `DataError` if there is no such file. If `name` is `ARCHIVE/FILE`, checks that FILE exists.
    """
    archive_and_file = split_name(name)
    if archive_and_file is None:
        return name
    archive, file_name = archive_and_file
    archive_name = name.removesuffix(f"/{file_name}")  # as in the settings
    file_names = list_files(archive)
    if file_name:
        matching_names = [file for file in file_names if file == file_name]
        problem = f"has no file {file_name}"
    elif len(file_names) == 1:
        matching_names = file_names
    else:
        matching_names = [file for file in file_names if _plain_name(file).endswith(f".{suffix}")]
        problem = f"has {len(matching_names)} files that end in .{suffix}"
    if len(matching_names) == 1:
        return name if file_name else f"{name}/{matching_names[0]}"
    if not file_names:
        raise DataError(f"{archive} has no file with text")
    raise DataError(
        f"{archive} {problem}, but {list_first(file_names, 8)}; name one, such as "
        f"{archive_name}/{file_names[0]}, or set data.src_lang and data.tgt_lang to the ends of "
        "two names"
    )


def _plain_name(file_name: str) -> str:
    """Remove a suffix such as .gz."""
    return file_name.rpartition(".")[0] if is_compressed(file_name) else file_name


@functools.cache
def list_files(archive: Path) -> list[str]:
    """Return the names of the files with text in an archive.

    Raises `DataError` if the archive is damaged, has too many files, or states that it unpacks to
    more bytes than `MAX_RATIO` allows.
    """
    file_names = []
    num_bytes = 0
    for file_name, size in _list_sizes(archive):
        num_bytes += size
        _check_size(archive, num_bytes)
        if not _SKIPPED.search(file_name):
            file_names.append(file_name)
        if len(file_names) > MAX_FILES:
            raise DataError(f"{archive} has more than {MAX_FILES:,} files; unpack it")
    return file_names


def _list_sizes(archive: Path) -> Iterator[tuple[str, int]]:
    """Yield the name and the unpacked size of each regular file in an archive."""
    with _archive_errors(archive):
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as zip_file:
                for zip_member in zip_file.infolist():
                    if not zip_member.is_dir():
                        yield zip_member.filename, zip_member.file_size
        else:
            with _open_tar(archive) as tar_file:
                # To find the next member, `tarfile` decompresses the content of this one. So the
                # caller checks each size before it asks for the next member.
                for member in tar_file:
                    if member.isreg():
                        yield member.name.removeprefix("./"), member.size


def _open_tar(archive: Path) -> tarfile.TarFile:
    """Open a tar archive, compressed or not. Raises `tarfile.TarError` for other files."""
    with archive.open("rb") as file:
        # tarfile would try xz, which skips zeros at the start: this takes minutes in a sparse file
        if not any(file.read(tarfile.BLOCKSIZE)):
            raise tarfile.ReadError("it begins with zeros")
    return tarfile.open(archive)


def _check_size(archive: Path, num_bytes: int) -> None:
    """Raise a `DataError` if unpacked text is too large for the size of its archive."""
    packed_bytes = archive.stat().st_size
    if num_bytes > max(MAX_RATIO * packed_bytes, MIN_LIMIT_BYTES):
        raise DataError(
            f"{archive} of {packed_bytes:,} bytes unpacks to {num_bytes:,} or more, over "
            f"{MAX_RATIO} times its size, which no text needs; unpack it if you trust it"
        )


def read_blocks(archive: Path, file_name: str) -> Iterator[bytes]:
    """Yield the content of a file in an archive in blocks. A file named `*.gz` is decompressed.

    Raises `DataError` if the file is damaged or encrypted, or larger than `MAX_RATIO` allows.
    Counts the bytes, since the sizes that an archive states may be wrong.
    """
    num_bytes = 0
    with _archive_errors(archive), ExitStack() as stack:
        if zipfile.is_zipfile(archive):
            zip_file = stack.enter_context(zipfile.ZipFile(archive))
            packed_file: IO[bytes] | None = zip_file.open(file_name)
        else:
            tar_file = stack.enter_context(_open_tar(archive))
            # `getmember` would need the "./" that some archives have before their names
            member = next(m for m in tar_file if m.name.removeprefix("./") == file_name)
            packed_file = tar_file.extractfile(member)
        assert packed_file is not None, "not a regular file"
        stream = stack.enter_context(decompress(packed_file, Path(file_name).suffix))
        while block := stream.read(_BLOCK_BYTES):
            num_bytes += len(block)
            _check_size(archive, num_bytes)
            yield block


@contextlib.contextmanager
def _archive_errors(archive: Path) -> Iterator[None]:
    """Raise a `DataError` for errors in the `with` block about a damaged or encrypted archive."""
    try:
        with explain_read_errors(str(archive)):
            yield
    except (zipfile.BadZipFile, tarfile.TarError, RuntimeError, ValueError) as error:
        reason = to_one_line(error)
        raise DataError(
            f"{archive} cannot be read ({reason}); fetch it again, or unpack it"
        ) from None
