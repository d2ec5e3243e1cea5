"""Settings that several commands share: device, number format, threads, checksums."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from nmt.config.options import DEFAULT_RUN_DIR, Settings, option

DTYPE_HELP = "number format of matrix multiplications: float32, bfloat16, float16 or auto"


class DType(str, Enum):
    """Number format of matrix multiplications; weights, softmax, loss and scores stay float32."""

    auto = "auto"  # bfloat16 on a GPU that supports it, else float32
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"  # training scales the loss, because small gradients would become zero


class Engine(str, Enum):
    """The library that runs the model."""

    native = "native"  # PyTorch
    ctranslate2 = "ctranslate2"  # for a folder that nmt-export wrote


@dataclass(kw_only=True)
class ChecksumConfig(Settings):
    """Settings of all commands that read a data, run or model folder."""

    verify: bool = option(
        True, "compare files with the checksums in the manifest of their folder", on_resume="free"
    )


@dataclass(kw_only=True)
class RuntimeConfig(ChecksumConfig):
    """Settings of all commands that run a model."""

    device: str = option("auto", "auto, cpu, cuda, cuda:1 or mps", on_resume="free")
    num_threads: int = option(
        0,
        "CPU threads; 0: the cores that are idle when the command starts",
        low=0,
        high=1024,
        on_resume="free",
    )


@dataclass(kw_only=True)
class InferenceConfig(RuntimeConfig):
    """Settings of the commands that translate or score with a trained model."""

    model_dir: list[str] = option(  # a resumed job compares the files in these folders instead
        [DEFAULT_RUN_DIR],
        "run, checkpoint or model folder; several, as in [a,b]: an ensemble",
        on_resume="free",
    )
    backend: Engine = option(
        Engine.native, "native (PyTorch), or ctranslate2 for folders that nmt-export wrote"
    )
    dtype: DType = option(DType.float32, DTYPE_HELP)
