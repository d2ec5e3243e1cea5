"""What a run of the benchmark is asked to do, and what follows from it."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engines import Engine

from nmt.config import ModelConfig

MODELS = {
    "base": ModelConfig(),
    "big": ModelConfig(d_model=1024, d_ff=4096, num_heads=16),
    "small": ModelConfig(
        num_encoder_layers=3, num_decoder_layers=3, d_model=256, d_ff=1024, num_heads=4
    ),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that the comparisons share."""

    cache_dir: Path
    engines: list[str]  # empty means all
    repeats: int
    steps: int
    turn_seconds: float
    batch_tokens: int
    update_tokens: int | None  # None is a batch
    threads: int
    device: str
    dtype: str
    installs: bool
    num_lines: int

    @property
    def clock(self) -> str:
        """What seconds are counted: a GPU works while the processor waits."""
        return "cpu" if self.device == "cpu" else "wall"

    @property
    def limit_key(self) -> str:
        """Which rate of the limit's driver belongs to that clock."""
        return "flops_per_cpu_second" if self.clock == "cpu" else "flops_per_second"

    @property
    def limit_times(self) -> int:
        """How often each product of the limit is done: a GPU's take a millisecond."""
        return 1 if self.device == "cpu" else 30

    @property
    def warmup_steps(self) -> int:
        """Steps before the first turn: a GPU's allocator needs to have seen some shapes."""
        return 1 if self.device == "cpu" else 30

    def choose(self, engines: dict[str, Engine]) -> list[str]:
        """Return those that run on the device and were asked for."""
        able = [name for name, engine in engines.items() if self.device in engine.devices]
        return [name for name in able if not self.engines or name in self.engines]

    def say(self, text: str) -> None:
        """Tell how far it is."""
        print(text, file=sys.stderr, flush=True)


def parse_model(text: str) -> tuple[str, ModelConfig]:
    """Read base, big, small, or sizes such as 4+2:384:1536:6 (layers, d_model, d_ff, heads)."""
    if text in MODELS:
        return text, MODELS[text]
    try:
        layers, d_model, d_ff, heads = text.split(":")
        encoder, decoder = layers.split("+")
        config = ModelConfig(
            num_encoder_layers=int(encoder),
            num_decoder_layers=int(decoder),
            d_model=int(d_model),
            d_ff=int(d_ff),
            num_heads=int(heads),
        )
    except ValueError:
        known = ", ".join(MODELS)
        raise argparse.ArgumentTypeError(
            f"{text} is none of {known}, nor sizes such as 3+3:256:1024:4"
        ) from None
    return text.replace(":", "-"), config


def describe(model: ModelConfig) -> dict[str, Any]:
    """Return the sizes of a model as drivers read them."""
    return {key: value.value if hasattr(value, "value") else value
            for key, value in asdict(model).items()}  # fmt: skip
