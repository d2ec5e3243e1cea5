"""Crafted and damaged files of weights are read or refused, in little time and memory."""

from __future__ import annotations

import io
import itertools
import json
import pickle
import random
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_foreign_files import refusal

from nmt.checkpoint import load_tensors
from nmt.errors import ModelError
from nmt.importing.marian import _load_arrays as load_arrays
from nmt.importing.weights import TensorFile, load_pickle

Content = Iterator[tuple[str, bytes]]  # descriptions and files


def damaged(content: bytes, count: int) -> Content:
    """Yield copies of a file with changed bytes; every fourth one is also cut off."""
    draw = random.Random(1)
    for case in range(count):
        changed = bytearray(content)
        for _ in range(draw.choice([1, 3, 10])):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        if case % 4 == 0:
            changed = changed[: draw.randrange(len(changed))]
        yield f"damage {case}", bytes(changed)


# --- torch.save, before torch 1.6


def old_file(content: bytes, keys: bytes = pickle.dumps([], 2), numbers: bytes = b"") -> bytes:
    """Return a file with this pickle as its content."""
    sizes = {"short": 2, "int": 4, "long": 4}
    machine = {"protocol_version": 1001, "little_endian": True, "type_sizes": sizes}
    objects = [torch.serialization.MAGIC_NUMBER, 1001, machine]
    return b"".join(pickle.dumps(item, 2) for item in objects) + content + keys + numbers


def int64(value: int) -> bytes:
    """Return the opcode and argument that push an integer."""
    return b"\x8a\x08" + struct.pack("<q", value)


def old_tensor(num_stored: int, shape: tuple[int, ...], stride: int) -> bytes:
    """Return a file with the tensor "a", whose storage claims to hold `num_stored` numbers."""
    pickled = (
        b"\x80\x02}U\x01actorch._utils\n_rebuild_tensor_v2\n((U\x07storagectorch\nFloatStorage"
    )
    pickled += b"\nU\x010U\x03cpu" + int64(num_stored) + b"NtQ" + int64(0)
    for sizes in (shape, (stride,) * len(shape)):
        pickled += b"(" + b"".join(map(int64, sizes)) + b"t"
    pickled += b"\x89ccollections\nOrderedDict\n)RtRs."
    return old_file(pickled, pickle.dumps(["0"], 2), struct.pack("<q", num_stored) + bytes(16))


def make_tar() -> bytes:
    """Return the oldest format of torch, a tar file."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, value in {"storages": 1 << 40, "tensors": 0, "pickle": {}, "../x": 1}.items():
            member = tarfile.TarInfo(name)
            member.size = len(pickle.dumps(value))
            archive.addfile(member, io.BytesIO(pickle.dumps(value)))
    return buffer.getvalue()


def old_files() -> Content:
    sizes = (4, 1 << 20, 1 << 34, 1 << 62, -1)
    shapes = ((1 << 20,), (1 << 33,), (1 << 40, 1 << 40), (-4,))
    for num_stored, shape, stride in itertools.product(sizes, shapes, (0, 1)):
        yield f"{num_stored} {shape} {stride}", old_tensor(num_stored, shape, stride)
    opcodes = {
        "nested tuples": b"(" * 200_000 + b"t" * 200_000,
        "nested lists": b"]" * 100_000 + b"a" * 99_999,
        "nested pairs": b")" + b"\x85" * 1_000_000,
        "integer of 2 GB": b"\x8b\xff\xff\xff\x7f",
        "text of 4 GB": b"X\xff\xff\xff\xff",
        "bytes without end": b"\x8e" + b"\xff" * 7 + b"\x7f",
        "frame without end": b"\x95" + b"\xff" * 7 + b"\x7f",
        "array of 400 MB": b"}U\x01acbuiltins\nbytearray\n" + int64(400 << 20) + b"\x85Rs",
        "array without end": b"cbuiltins\nbytearray\n" + int64(1 << 40) + b"\x85R",
        "many integers": b"(" + b"K\x01" * 8_000_000 + b"l",
        "many dictionaries": b"(" + b"}" * 16_000_000 + b"l",
        "storage": b"ctorch\nFloatStorage\n" + int64(1 << 40) + b"\x85R",
        "code": b"cos\nsystem\nU\x04true\x85R",
    }
    for name, content in opcodes.items():
        yield name, old_file(b"\x80\x02" + content + b".")
    yield "large names", old_file(pickle.dumps({"x" * (40 << 20): 1}, 2))
    yield "tar", make_tar()
    buffer = io.BytesIO()
    state = {"model": {"a": torch.zeros(4, 4), "b": torch.ones(3)}, "args": {"x": 1}}
    torch.save(state, buffer, _use_new_zipfile_serialization=False)
    yield from damaged(buffer.getvalue(), 200)


def read_pickle(path: Path) -> None:
    TensorFile(path, load_pickle(path))


def zip_files() -> Content:
    """Yield damaged files in the format of today, and files whose pickle has many objects."""
    buffer = io.BytesIO()
    torch.save({"a": torch.zeros(4, 4), "b": torch.ones(3)}, buffer)
    yield from damaged(buffer.getvalue(), 200)
    for name, content in {"objects": b"(" + b"}" * 15_000_000 + b"l.", "end": b""}.items():
        changed = io.BytesIO()
        with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(changed, "w") as new:
            for member in old.infolist():
                is_pickle = member.filename.endswith("data.pkl")
                new.writestr(member.filename, content if is_pickle else old.read(member))
        yield name, changed.getvalue()
    yield "members", zip_of_a_million()


def zip_of_a_million() -> bytes:
    """Return a zip file whose directory has a million members."""
    directory = (b"PK\x01\x02" + bytes(42)) * 1_000_000
    start = b"PK\x03\x04" + bytes(26)
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, len(directory), len(start), 0)
    return start + directory + end


# --- safetensors


def safetensors_file(header: Any, numbers: bytes = bytes(16)) -> bytes:
    """Return a file with this header, as bytes or JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + numbers


def safetensors_files() -> Content:
    shapes = ([1 << 40, 1 << 40], [-1], [1 << 63], [0, 1 << 62], [], [1.5], ["a"], [1] * 9999)
    spans = ([0, 16], [16, 0], [0, 1 << 60], [-1, 16], [0, 1 << 64], [0, 0], [1.5, 2], None, "x")
    for shape, span in itertools.product((*shapes, "x", None), spans):
        entry = {"dtype": "F32", "shape": shape, "data_offsets": span}
        yield f"{shape} {span}"[:60], safetensors_file({"a": entry})
    for dtype in ("BF16", "BOOL", "F8_E4M3", "F4", "U64", "C64", "X"):
        entry = {"dtype": dtype, "shape": [4], "data_offsets": [0, 16]}
        yield dtype, safetensors_file({"a": entry})
    for num_bytes in (0, 1, 7, 8, 1 << 21, 1 << 22, (1 << 22) + 1, 1 << 40, (1 << 64) - 1):
        yield f"header {num_bytes}", num_bytes.to_bytes(8, "little") + b"{}" + bytes(100)
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    yield "nested lists", safetensors_file(b"[" * 1_000_000)
    yield "nested objects", safetensors_file(b'{"a":' * 500_000)
    yield "many tensors", safetensors_file({f"t{i}": empty for i in range(1_000_000)}, b"")
    yield "metadata", safetensors_file({"__metadata__": {f"t{i}": "x" for i in range(200_000)}})
    long_name = {"a" * 3_000_000: {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}
    yield "long name", safetensors_file(long_name, bytes(15))
    entries = {"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}
    yield from damaged(safetensors_file(entries), 100)


# --- npz


def npz_file(header: bytes | str, *, numbers: bytes = bytes(16), version: int = 1) -> bytes:
    """Return a `.npz` with settings and an array with this header."""
    if isinstance(header, str):
        header = header.encode()
    size = struct.pack("<H" if version == 1 else "<I", len(header))
    array = b"\x93NUMPY" + bytes([version, 0]) + size + header + numbers
    return make_zip({"a.npy": array})


def make_zip(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    """Return a zip file with the settings of a model of Marian and these members."""
    settings = io.BytesIO()
    np.save(settings, np.frombuffer(b"a: 1", np.int8))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, content in {"special:model.yml.npy": settings.getvalue(), **members}.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def change_directory(content: bytes, offset: int, value: bytes) -> bytes:
    """Change the last entry of the directory of a zip file."""
    changed = bytearray(content)
    start = changed.rfind(b"PK\x01\x02") + offset
    changed[start : start + len(value)] = value
    return bytes(changed)


def npz_files() -> Content:
    types = ("<f4", "|O", "<U1", [("a", "<f4")], "<M8", "x", "|V1000000", "<U500000000", "|S0")
    types += (None, "<c8", ">f4", ("<f4", (1 << 20,)))
    shapes = ((1 << 40,), (1 << 31, 1 << 31), (-1,), (0, 1 << 62), (1.5,), "x", (1,) * 70, (True,))
    for descr, shape in itertools.product(types, shapes):
        header = {"descr": descr, "fortran_order": False, "shape": shape}
        yield f"{descr} {shape}"[:60], npz_file(repr(header))
    texts = ["{" * 5000, "(" * 9000, "-" * 9000 + "1", "9" * 60_000, "__import__('os')"]
    texts += ["'a'*99999999", "\0", "1if 1else " * 500 + "1", "lambda:" * 3000 + "1"]
    for text, version in itertools.product(texts, (1, 2, 3, 9)):
        yield f"header {text[:20]} {version}", npz_file(text, version=version)
    empty = io.BytesIO()
    np.save(empty, np.zeros(0, np.float32))
    yield "many", make_zip({f"a{i}.npy": empty.getvalue() for i in range(60_000)})
    zeros = {"a.npy": bytes(100 << 20)}
    for compression in (zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        packed = make_zip(zeros, compression)
        yield f"packed {compression}", packed
        for size in (100, 0xFFFFFFF0):  # of the unpacked member
            yield f"packed {size}", change_directory(packed, 24, struct.pack("<I", size))
    yield "members", zip_of_a_million()
    yield "pickle", make_zip({"a.npy": pickle.dumps([1])})
    yield "no array", make_zip({"a": b"x" * 100})
    valid = make_zip({"a.npy": empty.getvalue()})
    yield "encrypted", change_directory(valid, 8, b"\1")
    yield "compression 99", change_directory(valid, 10, b"\x63")
    yield from damaged(valid, 200)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_files", "read", "may_be_read"),
    [
        (old_files, read_pickle, "damage|nested|storage"),
        (zip_files, read_pickle, "damage"),
        (safetensors_files, load_tensors, "damage|metadata"),
        (npz_files, load_arrays, "damage|many"),
    ],
)
def test_crafted_weights_are_read_or_refused(
    make_files: Callable[[], Content],
    read: Callable[[Path], object],
    may_be_read: str,
    tmp_path: Path,
) -> None:
    path = tmp_path / "weights"
    num_cases = 0
    for name, content in make_files():
        path.write_bytes(content)
        print(name)  # shown if an exception follows
        message = refusal(read, path)
        num_cases += 1
        if not name.startswith(tuple(may_be_read.split("|"))):
            assert str(path) in message, name
    assert num_cases >= 200


def test_small_files_with_many_objects_are_refused_before_they_are_made(tmp_path: Path) -> None:
    contents = {
        "a pickle of more objects": b"(" + b"}" * 2_000_000 + b"l.",
        "it wants a bytearray": b"cbuiltins\nbytearray\n" + int64(100 << 20) + b"\x85R.",
    }
    for message, content in contents.items():
        (tmp_path / "old.pt").write_bytes(old_file(b"\x80\x02" + content))
        assert message in refusal(load_pickle, tmp_path / "old.pt")


def test_only_dense_tensors_are_imported(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    dense = {"a": torch.zeros(2, 3), "b": torch.zeros(3, 2).T, "c": torch.zeros(4, 4)[1:, 1:]}
    torch.save(dense, path)
    TensorFile(path, load_pickle(path))
    other_tensors = {
        "sparse": torch.zeros(2, 3).to_sparse(),
        "meta": torch.zeros(2, 3, device="meta"),
        "expanded": torch.zeros(1).expand(1 << 40),
    }
    for name, tensor in other_tensors.items():
        torch.save({**dense, name: tensor}, path)
        with pytest.raises(ModelError, match=f"{path}: {name} is not a dense tensor"):
            TensorFile(path, load_pickle(path))


def test_a_matrix_is_not_tied_to_its_transpose_in_the_same_memory(tmp_path: Path) -> None:
    matrix = torch.arange(9.0).reshape(3, 3)
    path = tmp_path / "model.pt"
    torch.save({"a": matrix, "view": matrix.view(3, 3), "transposed": matrix.T}, path)
    tensors = TensorFile(path, load_pickle(path))
    assert tensors.are_equal("a", "view")
    assert not tensors.are_equal("a", "transposed")
