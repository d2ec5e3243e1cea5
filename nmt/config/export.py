"""Settings of `nmt-export`."""

from __future__ import annotations

from dataclasses import dataclass

from nmt.config.options import (
    DEFAULT_RUN_DIR,
    ExportFormat,
    Quantization,
    option,
    require,
)

_FLOATS = (Quantization.float32, Quantization.float16, Quantization.bfloat16)


@dataclass(kw_only=True)
class ExportConfig:
    """Settings of `nmt-export`."""

    model_dir: str = option(DEFAULT_RUN_DIR, "run, checkpoint or model folder")
    output: str = option("exported", "folder to write")
    format: ExportFormat = option(
        ExportFormat.ctranslate2, "ctranslate2, or huggingface (MarianMT, for model.norm=post)"
    )
    quantization: Quantization = option(
        Quantization.float32, "float32, float16, bfloat16; ctranslate2 also int8, int8_float16, ..."
    )
    max_positions: int = option(
        2048, "longest sentence, in tokens, that the exported model can read or write"
    )

    def __post_init__(self) -> None:
        bounded = 2 <= self.max_positions <= 65536
        require(bounded, "max_positions", self.max_positions, "must be from 2 to 65536")
        is_float = self.format is not ExportFormat.huggingface or self.quantization in _FLOATS
        rule = "format=huggingface takes float32, float16 or bfloat16"
        require(is_float, "quantization", self.quantization, rule)
