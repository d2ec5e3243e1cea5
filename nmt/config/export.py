"""Settings of `nmt-export` and `nmt-import`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from nmt.config.options import DEFAULT_RUN_DIR, Settings, option
from nmt.config.runtime import ChecksumConfig, Quantization
from nmt.errors import ConfigError


class ExportFormat(str, Enum):
    """The library that the exported model is for."""

    ctranslate2 = "ctranslate2"
    huggingface = "huggingface"
    argos = "argos"  # Argos Translate, LibreTranslate
    onnx = "onnx"  # ONNX Runtime
    marian = "marian"  # .npz
    web = "web"  # a page that translates in the browser
    bergamot = "bergamot"  # Marian's binary format, for Firefox and translateLocally


class ImportFormat(str, Enum):
    """The toolkit that wrote the model to import."""

    auto = "auto"  # detected from the files
    huggingface = "huggingface"  # a folder of transformers: MarianMT, M2M100 (NLLB), Pegasus
    marian = "marian"  # .npz
    opennmt = "opennmt"  # .pt of OpenNMT-py
    fairseq = "fairseq"  # .pt, with dict.*.txt in the same folder


@dataclass(kw_only=True)
class ExportConfig(ChecksumConfig):
    """Settings of `nmt-export`."""

    model_dir: str = option(DEFAULT_RUN_DIR, "run, checkpoint or model folder")
    output: str | None = option(
        None, "folder to write; null: MODEL_DIR-FORMAT-QUANTIZATION, next to model_dir"
    )
    format: ExportFormat = option(
        ExportFormat.ctranslate2,
        "ctranslate2, huggingface (transformers), argos (.argosmodel), onnx, marian, web (a web "
        "page) or bergamot (Marian's binary format)",
    )
    quantization: Quantization = option(
        Quantization.float32,
        "number format: float32 for every format; also float16 and bfloat16 for huggingface, "
        "float16 and int8 for onnx and web, int8 for bergamot, any for ctranslate2 and argos",
    )
    max_positions: int = option(
        2048, "longest source or target sentence, in tokens", low=2, high=65536
    )
    runtime: str = option(
        "node_modules/onnxruntime-web",
        "folder of the npm package onnxruntime-web, which format=web needs",
    )
    sign: str | None = option(
        None,
        "file with a private key (PEM, elliptic curve), to sign the exported folder; needs "
        "pip install nmt[sign]",
    )
    shortlist_data: str | None = option(
        None,
        "data folder from which to learn a shortlist of target pieces (ctranslate2, bergamot); "
        "null: no shortlist",
    )
    calibration_data: str | None = option(
        None,
        "data folder on which to measure fixed scales of activations (bergamot with int8); null: "
        "each multiplication computes its scales",
    )

    def check(self) -> None:
        if self.format is ExportFormat.huggingface:
            has_integers = self.quantization.value.startswith("int")
            problem = "format=huggingface takes float32, float16 or bfloat16"
            self.require(not has_integers, "quantization", problem)
        if self.format in (ExportFormat.onnx, ExportFormat.web):
            supported = (Quantization.float32, Quantization.float16, Quantization.int8)
            problem = f"format={self.format.value} takes float32, float16 or int8"
            self.require(self.quantization in supported, "quantization", problem)
        if self.format is ExportFormat.bergamot:
            is_supported = self.quantization in (Quantization.float32, Quantization.int8)
            self.require(is_supported, "quantization", "format=bergamot takes float32 or int8")
        if self.format is ExportFormat.marian:
            is_float32 = self.quantization is Quantization.float32
            self.require(is_float32, "quantization", "format=marian takes float32")
        if self.shortlist_data is not None:
            supports_shortlist = self.format in (ExportFormat.ctranslate2, ExportFormat.bergamot)
            problem = "needs format=ctranslate2 or bergamot"
            self.require(supports_shortlist, "shortlist_data", problem)
        if self.calibration_data is not None:
            is_bergamot = self.format is ExportFormat.bergamot
            is_int8 = self.quantization is Quantization.int8
            problem = "only format=bergamot with quantization=int8 reads it"
            self.require(is_bergamot and is_int8, "calibration_data", problem)


@dataclass(kw_only=True)
class ImportConfig(Settings):
    """Settings of `nmt-import`."""

    input: str | None = option(None, "file or folder of the model to import")
    output: str = option("imported", "model folder to write")
    format: ImportFormat = option(
        ImportFormat.auto, "auto, huggingface, marian, opennmt or fairseq"
    )
    src_tokenizer: str | None = option(
        None, "SentencePiece model of the source; null: the one in the folder of the model"
    )
    tgt_tokenizer: str | None = option(
        None, "SentencePiece model of the target; null: the model of the source"
    )
    src_lang: str | None = option(
        None, "source language, such as eng_Latn; null: as the imported files say"
    )
    tgt_lang: str | None = option(
        None, "target language, such as fra_Latn; null: as the imported files say"
    )

    def check(self) -> None:
        if self.input is None:
            raise ConfigError("give input=FOLDER, the model of another toolkit")
        if self.src_tokenizer is None:
            self.require(self.tgt_tokenizer is None, "tgt_tokenizer", "needs src_tokenizer=FILE")
