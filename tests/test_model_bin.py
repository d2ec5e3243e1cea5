"""CTranslate2's `model.bin`: crafted files are refused before the library loads them."""

from __future__ import annotations

import math
import random
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from exporting import exported, random_model
from test_foreign_files import read_export, refusal

from nmt.config import Activation, DType, ExportFormat, Norm, NormLayer, Positions, Quantization
from nmt.data.tokenizer import Tokenizer
from nmt.runtime.manifest import write_manifest
from nmt.translate.engines.ctranslate2 import load_ctranslate2

TYPE_BYTES = (4, 1, 2, 4, 2, 2)


@dataclass
class Variable:
    name: bytes
    shape: list[int]
    type_code: int
    content: bytes


class ModelBin:
    """The content of a file, which can be changed and written again."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._position = 4
        self.name = self._text()
        self.revision = self._number("<I")
        self.variables = [self._variable() for _ in range(self._number("<I"))]
        self.aliases = [[self._text(), self._text()] for _ in range(self._number("<I"))]
        assert self._position == len(content)
        assert self.to_bytes() == content

    def _number(self, number_format: str) -> int:
        (number,) = struct.unpack_from(number_format, self._content, self._position)
        self._position += struct.calcsize(number_format)
        return int(number)

    def _bytes(self, size: int) -> bytes:
        self._position += size
        return self._content[self._position - size : self._position]

    def _text(self) -> bytes:
        return self._bytes(self._number("<H"))

    def _variable(self) -> Variable:
        name = self._text()
        shape = [self._number("<I") for _ in range(self._number("<B"))]
        type_code = self._number("<B")
        return Variable(name, shape, type_code, self._bytes(self._number("<I")))

    def to_bytes(self) -> bytes:
        texts = [self.name, *(text for alias in self.aliases for text in alias)]
        name, *aliases = [struct.pack("<H", len(text)) + text for text in texts]
        content = [struct.pack("<I", 6), name, struct.pack("<I", self.revision)]
        content.append(struct.pack("<I", len(self.variables)))
        for v in self.variables:
            rank = len(v.shape)
            header = struct.pack(f"<B{rank}IBI", rank, *v.shape, v.type_code, len(v.content))
            content += [struct.pack("<H", len(v.name)), v.name, header, v.content]
        return b"".join([*content, struct.pack("<I", len(self.aliases)), *aliases])


def change_consistently(model: ModelBin, draw: random.Random, case: int) -> None:
    """Change one variable in such a way that all sizes in the file still fit each other."""
    settings = [v for v in model.variables if not v.shape]
    tensors = [v for v in model.variables if v.shape]
    tensor = draw.choice(tensors)
    row_bytes = len(tensor.content) // tensor.shape[0]
    if case % 8 == 0:
        setting = draw.choice(settings)
        setting.content = bytes(draw.choice([0, 255, 7, 127]) for _ in setting.content)
    elif case % 8 == 1:
        tensor.shape = tensor.shape[::-1] if len(set(tensor.shape)) > 1 else [1, *tensor.shape]
    elif case % 8 == 2:
        model.variables.remove(draw.choice(model.variables))
    elif case % 8 == 3:
        tensor.shape[0] = draw.choice([0, 1, tensor.shape[0] // 2])
        tensor.content = tensor.content[: tensor.shape[0] * row_bytes]
    elif case % 8 == 4:
        draw.choice(model.aliases)[1] = draw.choice(model.variables).name
    elif case % 8 == 5:
        tensor.shape += [1] * draw.choice([1, 3])
    elif case % 8 == 6:
        tensor.type_code = draw.randrange(len(TYPE_BYTES))
        tensor.content = b"\x7f" * (math.prod(tensor.shape) * TYPE_BYTES[tensor.type_code])
    else:
        tensor.shape[0] += 3
        tensor.content += bytes(3 * row_bytes)


def change_header(content: bytes, draw: random.Random) -> bytes:
    """Change a byte of a name, number or shape; the tensors are larger than all of these."""
    changed = bytearray(content)
    model = ModelBin(content)
    position = content.index(draw.choice(model.variables).name)
    changed[position + draw.randrange(-2, 60)] = draw.choice([0, 1, 255, draw.randrange(256)])
    if draw.random() < 0.1:
        del changed[draw.randrange(len(changed)) :]
    return bytes(changed)


def translate_with(folder: Path) -> None:
    loaded = load_ctranslate2(folder, device="cpu", dtype=DType.float32, num_threads=1)
    engine: Any = loaded.backend._engine  # type: ignore[attr-defined]
    engine.translate_batch(
        [["▁the", "▁house"]] * 3, beam_size=2, return_attention=True, max_decoding_length=20
    )


@pytest.mark.parametrize("num_cases", [30, pytest.param(240, marks=pytest.mark.slow)])
def test_crafted_files_are_translated_with_or_refused(
    tokenizer: Tokenizer, tmp_path: Path, num_cases: int
) -> None:
    folder = exported(random_model(tmp_path / "model", tokenizer), ExportFormat.ctranslate2)
    path = folder / "model.bin"
    content = path.read_bytes()
    assert refusal(translate_with, folder) == ""
    num_refused = 0
    for case in range(num_cases):
        draw = random.Random(case)
        if case % 3 == 0:
            path.write_bytes(change_header(content, draw))
        else:
            model = ModelBin(content)
            change_consistently(model, draw, case // 3)
            path.write_bytes(model.to_bytes())
        write_manifest(folder)
        message = refusal(translate_with, folder)
        num_refused += bool(message)
        assert "model.bin" in message or not message, (case, message)
    assert num_refused > 0.7 * num_cases


def test_a_file_whose_settings_do_not_fit_its_architecture_is_named(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    folder = exported(random_model(tmp_path / "model", tokenizer), ExportFormat.ctranslate2)
    path = folder / "model.bin"
    model = ModelBin(path.read_bytes())
    (layer,) = [v for v in model.variables if v.name == b"decoder/alignment_layer\0"]
    layer.content = struct.pack("<h", 127)  # CTranslate2 would read beyond its layers
    path.write_bytes(model.to_bytes())
    write_manifest(folder)
    assert "'decoder/alignment_layer' has an unexpected value or type" in refusal(
        read_export, folder
    )


@pytest.mark.slow
def test_every_architecture_is_accepted_in_every_format(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    architectures: list[dict[str, Any]] = [
        {"norm": Norm.pre, "activation": Activation.swiglu},
        {"norm": Norm.pre, "norm_layer": NormLayer.rms},
        {"positions": Positions.learned, "num_positions": 70},
        {"positions": Positions.relative, "max_distance": 4},
        {"positions": Positions.rotary, "qk_norm": True},
        {"positions": Positions.alibi, "num_kv_heads": 1},
        {"tied_output": False, "output_bias": True, "source_eos": False},
        {"num_encoder_layers": 1, "num_decoder_layers": 3},
    ]
    for number, changes in enumerate(architectures):
        model_dir = random_model(tmp_path / str(number), tokenizer, **changes)
        for quantization in Quantization:
            folder = exported(model_dir, ExportFormat.ctranslate2, quantization=quantization)
            assert refusal(read_export, folder) == "", (changes, quantization)
