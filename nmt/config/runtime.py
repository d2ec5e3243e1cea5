"""Settings that several commands share: device, number format, threads, checksums."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from nmt.config.options import DEFAULT_RUN_DIR, Settings, option

BACKEND_HELP = "native (PyTorch), ctranslate2, or auto: ctranslate2 where it supports the request"
VERIFY_KEY_HELP = "public key (PEM); refuse models without its signature (pip install nmt[sign])"
DTYPE_HELP = "number format of matrix multiplications: float32, bfloat16, float16 or auto"


class DType(str, Enum):
    """Number format of matrix multiplications; weights, softmax, loss and scores stay float32."""

    # bfloat16 on a GPU that supports it, and in training on a CPU that is faster with it; float32
    # elsewhere
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"  # training scales the loss, because small gradients would become zero


class Engine(str, Enum):
    """The library that runs the model."""

    auto = "auto"  # CTranslate2 where it supports the request, else native
    native = "native"  # PyTorch
    ctranslate2 = "ctranslate2"  # needs the package, and an architecture that it supports


class Quantization(str, Enum):
    """Number format of the weights in a converted model.

    int8 has one scale per row, int16 one per matrix. A second format, as in `int8_float16`, is the
    format of everything but matrix multiplications.
    """

    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"
    int8 = "int8"
    int8_float32 = "int8_float32"
    int8_float16 = "int8_float16"
    int8_bfloat16 = "int8_bfloat16"
    int16 = "int16"


@dataclass(kw_only=True)
class ChecksumConfig(Settings):
    """Settings of all commands that read a data, run or model folder."""

    verify: bool = option(
        True, "compare files with the checksums in the manifest of their folder", on_resume="accept"
    )


@dataclass(kw_only=True)
class RuntimeConfig(ChecksumConfig):
    """Settings of all commands that run a model."""

    device: str = option("auto", "auto, cpu, cuda, cuda:1 or mps", on_resume="accept")
    num_threads: int = option(
        0,
        "CPU threads; 0: the cores that are idle when the command starts",
        low=0,
        high=1024,
        on_resume="accept",
    )


@dataclass(kw_only=True)
class InferenceConfig(RuntimeConfig):
    """Settings of the commands that translate or score with a trained model."""

    model_dir: list[str] = option(  # a resumed job compares the files in these folders instead
        [DEFAULT_RUN_DIR],
        "run, checkpoint or model folder; several, as in [a,b]: an ensemble",
        on_resume="accept",
    )
    backend: Engine = option(Engine.native, BACKEND_HELP)
    quantization: Quantization | None = option(
        None,
        "weights for CTranslate2: float32, int8, int16, ...; null: int8 on a CPU with VNNI, else "
        "float32",
    )
    dtype: DType = option(DType.float32, DTYPE_HELP)
    verify_key: str | None = option(None, VERIFY_KEY_HELP, on_resume="accept")

    def check(self) -> None:
        if self.backend is Engine.native:
            problem = "only works with backend=auto or ctranslate2"
            self.require(self.quantization is None, "quantization", problem)
