"""Read files that `torch.save` wrote, which may be damaged or hostile.

torch never runs code of such a file. But a small pickle can take more time and memory than any
model needs, so pickles are checked before torch interprets them.
"""

from __future__ import annotations

import argparse
import mmap
import pickle
import pickletools
import warnings
import zipfile
from pathlib import Path
from typing import IO, Any

import torch
from torch.serialization import safe_globals

from nmt.errors import to_one_line
from nmt.runtime.reading import list_zip_members, open_regular

_MAX_TENSORS = 1 << 15
_MAX_PICKLE_BYTES = 1 << 24  # holds names of tensors, settings and pieces of vocabularies
_MAX_OPCODES = 1 << 20  # enough for 25,000 tensors, or vocabularies of 500,000 pieces
# The pickles at the start of a file in the old format: magic number, version of the format,
# machine, content, keys of the storages.
_NUM_OLD_PICKLES = 5
_ALLOCATING_CLASS = "bytearray"  # torch allows it, and bytearray(n) allocates n bytes
_OPCODES_WITH_CLASS = ("GLOBAL", "STACK_GLOBAL", "INST")


def load_torch_file(path: Path, *, use_mmap: bool = False) -> dict[str, Any]:
    """Read a dictionary of tensors, primitives and `argparse.Namespace` objects.

    `use_mmap` maps tensors to memory instead of reading them. Raises `FileNotFoundError` for a
    missing file, `pickle.UnpicklingError` for objects of other classes, and `ValueError` or
    `DamagedError` for a file that cannot be read.
    """
    with open_regular(path) as file:
        try:
            is_zip = zipfile.is_zipfile(file)
            if is_zip:
                _check_archive(file)
            else:
                _check_old_format(file)
            file.seek(0)
            use_mmap = use_mmap and is_zip  # torch cannot map the old format
            with safe_globals([argparse.Namespace]), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns about files that it then refuses
                content = torch.load(
                    path if use_mmap else file,
                    map_location="cpu",
                    weights_only=True,
                    mmap=use_mmap,
                )
        except pickle.UnpicklingError:
            raise
        # for a damaged file, torch raises MemoryError, IndexError, AssertionError and other types
        except Exception as error:
            raise ValueError(to_one_line(error, 100) or type(error).__name__) from None
    if not isinstance(content, dict):
        raise ValueError("no dictionary")
    return content


def _check_archive(file: IO[bytes]) -> None:
    """Raise `ValueError` for a zip file that torch would misread, or read for a long time."""
    members = list_zip_members(file, max_members=_MAX_TENSORS)
    with zipfile.ZipFile(file) as archive:
        for member in members:
            if member.compress_type:
                raise ValueError("a compressed member, whose bytes torch would use as numbers")
            if not member.filename.endswith(".pkl"):
                continue
            if member.file_size > _MAX_PICKLE_BYTES:
                raise ValueError(f"a pickle of {member.file_size:,} bytes, too large for a model")
            with archive.open(member) as stream:
                _check_pickles(stream, num_pickles=1)


def _check_old_format(file: IO[bytes]) -> None:
    """Raise `ValueError` for a file that is not in the format of torch before 1.6.

    That format is a sequence of pickles, followed by the data of the tensors.
    """
    # A pickle may state sizes that are larger than the file. Reading from a map does not allocate
    # these sizes.
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        _check_pickles(content, num_pickles=_NUM_OLD_PICKLES)
        if content.tell() > _MAX_PICKLE_BYTES:
            raise ValueError(f"pickles of {content.tell():,} bytes, too large for a model")


def _check_pickles(stream: IO[bytes] | mmap.mmap, *, num_pickles: int) -> None:
    """Parse pickles without running them.

    Raises `ValueError` for too many opcodes, and for a class that allocates memory of any size.
    """
    num_opcodes = 0
    for _ in range(num_pickles):
        for opcode, argument, _ in pickletools.genops(stream):  # type: ignore[arg-type]
            num_opcodes += 1
            if num_opcodes > _MAX_OPCODES:
                raise ValueError("a pickle of more objects than a model has")
            if opcode.name in _OPCODES_WITH_CLASS and _ALLOCATING_CLASS in str(argument):
                raise ValueError(f"it wants a {_ALLOCATING_CLASS}")
