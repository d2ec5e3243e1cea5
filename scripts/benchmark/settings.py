"""The command line of the benchmark, with defaults for each device from benchmark.yaml."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engines import BENCHMARK, ROOT, Engine

from nmt.config import ModelConfig

PARTS = ("train", "translate", "latency", "startup")


class Settings(argparse.Namespace):
    """The parsed command line, and values that follow from it."""

    @property
    def clock(self) -> str:
        """Seconds that count: CPU time, or wall-clock time where the CPU waits for a GPU."""
        return "cpu" if self.device == "cpu" else "wall"

    @property
    def unit_of_time(self) -> str:
        """Name of those seconds in a table."""
        return "CPU second" if self.device == "cpu" else "second"

    @property
    def warmup_steps(self) -> int:
        """Training steps before the first turn: a GPU's allocator must have seen several shapes."""
        return 1 if self.device == "cpu" else 30

    @property
    def limit_repeats(self) -> int:
        """Repetitions of each matrix multiplication of the limit; on a GPU one takes about 1 ms."""
        return 1 if self.device == "cpu" else 30

    def choose(self, engines: dict[str, Engine]) -> dict[str, Engine]:
        """Return the requested engines that run on the device."""
        selected = {}
        for name, engine in engines.items():
            is_requested = not self.engines or name in self.engines
            if is_requested and self.device in engine.devices:
                selected[name] = engine
        return selected

    def say(self, text: str) -> None:
        """Report progress."""
        print(text, file=sys.stderr, flush=True)


def parse_args(description: str | None) -> Settings:
    """Read the command line; defaults depend on --device and --quick."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--quick", action="store_true", help="a short run of everything, with less certain figures")
    help_flags = ("-h", "--help")
    first, _ = parser.parse_known_args([word for word in sys.argv[1:] if word not in help_flags])
    add(
        "--only", type=_words, default=list(PARTS), help="parts: train, translate, latency, startup"
    )
    add("--engines", type=_words, default=[], help="names separated by commas (default: all)")
    add("--corpus", type=Path, help="folder with train.en(.gz), val.en, ...; default: the demo's")
    add("--src", default="en", help="source language, the ending of its files")
    add("--tgt", default="de", help="target language")
    add("--vocab-size", type=int, help="of the joint subword model")
    add("--models", type=_models, help="to train: base, big, small, or such as 3+3:256:1024:4")
    add("--batch-tokens", type=int, help="maximum of rows * longest side of a batch")
    add("--update-tokens", type=int, help="target tokens of an update in nmt; default: one batch")
    add("--repeats", type=int, help="turns of each engine")
    add("--steps", type=int, help="minimum training steps of a turn")
    add("--turn-seconds", type=float, help="minimum CPU seconds of a training turn")
    add("--translate-model", type=parse_model, help="sizes of the model that translates")
    add("--model-updates", type=int, help="updates of training that model")
    add("--lines", type=int, help="lines translated in a turn")
    add("--latency-models", type=_models, help="to translate with line by line, as --models")
    add("--latency-lines", type=int, help="lines translated one by one in a turn")
    add("--beams", type=_numbers, default=[4, 1], help="beam sizes; 1 is greedy")
    add("--lengths", type=_numbers, help="fixed target lengths, EOS included; 0: free lengths")
    add("--threads", type=int, default=1, help="of each engine")
    add("--dtype", choices=("float32", "bfloat16"), help="of matrix multiplications")
    add("--here", action="store_true", help="install nothing: use peers of this environment")
    add("--cache", type=Path, default=Path.home() / ".cache" / "nmt-benchmark")
    add("--output", type=Path, default=ROOT / "docs" / "benchmarks")
    add("--name", help="of the two files in --output; default: cpu or gpu, with -quick")
    parser.set_defaults(**BENCHMARK["defaults"][first.device])
    if first.quick:
        parser.set_defaults(**BENCHMARK["defaults"]["quick"])
    settings = parser.parse_args(namespace=Settings())
    if not settings.only or not set(settings.only) <= set(PARTS):
        parser.error(f"--only takes {', '.join(PARTS)}")
    if settings.name is None:
        device = "cpu" if settings.device == "cpu" else "gpu"
        settings.name = f"{device}-quick" if settings.quick else device
    settings.cache = settings.cache.resolve()
    return settings


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _numbers(text: str) -> list[int]:
    return [int(word) for word in _words(text)]


def _models(text: str) -> list[tuple[str, ModelConfig]]:
    return [parse_model(word) for word in _words(text)]


def parse_model(text: str) -> tuple[str, ModelConfig]:
    """Read a name of benchmark.yaml, or sizes: 4+2:384:1536:6 are layers, d_model, d_ff, heads."""
    if text in BENCHMARK["models"]:
        return text, ModelConfig(**BENCHMARK["models"][text])
    try:
        layers, d_model, d_ff, num_heads = text.split(":")
        num_encoder_layers, num_decoder_layers = layers.split("+")
        config = ModelConfig(
            num_encoder_layers=int(num_encoder_layers),
            num_decoder_layers=int(num_decoder_layers),
            d_model=int(d_model),
            d_ff=int(d_ff),
            num_heads=int(num_heads),
        )
    except ValueError:
        names = ", ".join(BENCHMARK["models"])
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a model; use {names}, or sizes such as 3+3:256:1024:4"
        ) from None
    return text.replace(":", "-"), config


def describe_model(model: ModelConfig) -> dict[str, Any]:
    """Return the settings of a model as JSON values."""
    settings = {}
    for key, value in asdict(model).items():
        settings[key] = value.value if hasattr(value, "value") else value
    return settings
