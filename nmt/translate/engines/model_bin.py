"""Check the file `model.bin` of an export before CTranslate2 loads the file.

CTranslate2 checks that sizes are consistent, but not that the tensors fit the architecture. With
tensors that do not fit, the first translation may raise an error or crash the process.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from nmt.checkpoint import ModelInfo, build_model
from nmt.config import Positions
from nmt.data.tokenizer import Tokenizers
from nmt.errors import DamagedError
from nmt.export.ctranslate2 import build_spec
from nmt.runtime.reading import open_regular

_BINARY_VERSION = 6
_SPEC_NAME = "TransformerSpec"
_TYPES = ("float32", "int8", "int16", "int32", "float16", "bfloat16")  # by code, from 0 to 5
_TYPE_BYTES = (4, 1, 2, 4, 2, 2)  # size of a number of each type
_FLOAT_TYPES = ("float32", "float16", "bfloat16")
_MAX_VARIABLES = 1 << 16
_MAX_NAME_CHARACTERS = 80  # maximum length of a name in an error message


class Variable(NamedTuple):
    """A tensor or a setting in `model.bin`."""

    shape: tuple[int, ...]  # () for a setting
    dtype: str
    value: bytes  # the value of a setting; empty for a tensor


def check_model_bin(
    path: Path, info: ModelInfo, tokenizers: Tokenizers, max_positions: int
) -> None:
    """Raise `DamagedError` unless the file contains the variables of an export of this model."""
    try:
        with open_regular(path) as file:
            variables = read_variables(file)
        _check_variables(variables, info, tokenizers, max_positions)
    except (ValueError, struct.error, RuntimeError) as error:
        raise DamagedError(
            f"{path} is not an export of this model ({error}); export it again"
        ) from None


def read_variables(file: BinaryIO) -> dict[str, Variable]:
    """Read the names, shapes and types of all variables, and the values of settings.

    Raises `ValueError` or `struct.error` if the file is not a complete `model.bin`.
    """
    num_bytes = os.fstat(file.fileno()).st_size
    version = _read_number(file, "<I")
    spec_name = _read_text(file)
    if version != _BINARY_VERSION or spec_name != _SPEC_NAME:
        raise ValueError(
            f"it is {spec_name[:40]!r} in version {version}, instead of {_SPEC_NAME!r} in version "
            f"{_BINARY_VERSION}"
        )
    _read_number(file, "<I")  # the revision, which CTranslate2 checks
    variables = {}
    for _ in range(_read_count(file)):
        name = _read_text(file)
        rank = _read_number(file, "<B")
        shape = tuple(_read_number(file, "<I") for _ in range(rank))
        type_code = _read_number(file, "<B")
        size = _read_number(file, "<I")
        if type_code >= len(_TYPES) or size != math.prod(shape) * _TYPE_BYTES[type_code]:
            raise ValueError(f"{name[:_MAX_NAME_CHARACTERS]!r} has an invalid type or size")
        value = b""
        if shape:
            file.seek(size, os.SEEK_CUR)  # skip the numbers of a tensor
        else:
            value = file.read(size)
        if file.tell() > num_bytes:
            raise ValueError("it ends too early")
        variables[name] = Variable(shape, _TYPES[type_code], value)
    for _ in range(_read_count(file)):  # aliases, such as of shared embeddings
        alias = _read_text(file)
        aliased_name = _read_text(file)
        if aliased_name not in variables or not variables[aliased_name].shape:
            raise ValueError(f"{alias[:_MAX_NAME_CHARACTERS]!r} refers to no tensor")
        variables[alias] = variables[aliased_name]
        if f"{aliased_name}_scale" in variables:
            variables[f"{alias}_scale"] = variables[f"{aliased_name}_scale"]
    return variables


def _read_number(file: BinaryIO, number_format: str) -> int:
    """Read a number in a format of `struct`, such as "<I"."""
    data = file.read(struct.calcsize(number_format))
    (number,) = struct.unpack(number_format, data)
    return int(number)


def _read_count(file: BinaryIO) -> int:
    """Read the number of variables or aliases. Raises `ValueError` if it is too large."""
    count = _read_number(file, "<I")
    if count > _MAX_VARIABLES:
        raise ValueError(f"it has {count} variables")
    return count


def _read_text(file: BinaryIO) -> str:
    """Read a text, which is stored as its number of bytes, the text and a NUL byte."""
    num_bytes = _read_number(file, "<H")  # with the NUL byte
    text = file.read(num_bytes)
    if not text.endswith(b"\0"):
        raise ValueError("a name has no end")
    return text[:-1].decode("utf-8")


def _check_variables(
    variables: dict[str, Variable], info: ModelInfo, tokenizers: Tokenizers, max_positions: int
) -> None:
    """Raise `ValueError` unless these are the variables of the architecture of a model."""
    if info.model.positions.is_added_to_embeddings:
        # checked first, since `build_spec` would build a huge table for a damaged `max_positions`
        table = variables.get("encoder/position_encodings/encodings")
        if table is None or table.shape != (max_positions, info.model.d_model):
            raise ValueError(f"it has no table of {max_positions} positions")
        # `build_spec` repeats the last learned position until the table has `max_positions` rows.
        # Thus a model with one learned position gives the shape of the table without computing it.
        model = replace(info.model, positions=Positions.learned, num_positions=1, position_offset=0)
        info = replace(info, model=model)
    state = build_model(info, None, torch.device("cpu")).state_dict()
    # each tensor is expanded from one zero, so that it takes no memory
    zeros = {name: torch.zeros(()).expand(tensor.shape) for name, tensor in state.items()}
    expected = build_spec(info, zeros, tokenizers, max_positions).variables()
    for name in variables:
        if name not in expected and name.removesuffix("_scale") not in expected:
            raise ValueError(f"{name[:_MAX_NAME_CHARACTERS]!r} is unknown")
    for name, variable in expected.items():
        _check_variable(name, variables, variable)


def _check_variable(name: str, variables: dict[str, Variable], expected: Any) -> None:
    """Raise `ValueError` unless a variable has its expected shape, and a setting its value."""
    if name not in variables:
        raise ValueError(f"{name!r} is missing")
    variable = variables[name]
    if variable.shape != tuple(expected.shape):
        raise ValueError(f"{name!r} has the shape {variable.shape} instead of {expected.shape}")
    if not variable.shape:
        is_valid = variable.dtype == expected.dtype and variable.value == expected.to_bytes()
    elif variable.dtype in ("int8", "int16"):  # int8 has a scale per row, int16 one per matrix
        scale = variables.get(f"{name}_scale")
        scale_shape = variable.shape[:1] if variable.dtype == "int8" else ()
        is_valid = scale is not None and scale.shape == scale_shape and scale.dtype in _FLOAT_TYPES
    else:
        is_valid = variable.dtype in _FLOAT_TYPES
    if not is_valid:
        raise ValueError(f"{name!r} has an unexpected value or type")
