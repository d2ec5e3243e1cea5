"""The command line of the benchmark, and what it takes for granted on each device."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from environments import ROOT
from settings import parse_model

from nmt.config import ModelConfig

_PARTS = ("train", "translate", "startup")


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _numbers(text: str) -> list[int]:
    return [int(word) for word in _words(text)]


def _models(text: str) -> list[tuple[str, ModelConfig]]:
    return [parse_model(word) for word in _words(text)]


_HELP = ("-h", "--help")
_DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {
        "vocab_size": 8000,
        "models": _models("base,small"),
        "batch_tokens": 4096,
        "repeats": 3,
        "steps": 1,
        "turn_seconds": 6.0,
        "translate_model": parse_model("small"),
        "model_updates": 1000,
        "lines": 400,
        "lengths": [0, 16],
        "dtype": "float32",
    },
    # the paper's updates of about 25,000 target tokens, in one batch
    "cuda": {
        "vocab_size": 37000,
        "models": _models("base,big"),
        "batch_tokens": 28000,
        "update_tokens": 25000,
        "repeats": 3,
        "steps": 40,
        "turn_seconds": 0.0,
        "translate_model": parse_model("base"),
        "model_updates": 2000,
        "lines": 3000,
        "lengths": [0, 32],
        "dtype": "bfloat16",
    },
}
_QUICK = {
    "repeats": 2,
    "turn_seconds": 1.0,
    "batch_tokens": 1024,
    "model_updates": 200,
    "lines": 100,
}
_QUICK |= {"update_tokens": None, "models": _models("small"), "lengths": [16]}


def parse_args(description: str | None) -> argparse.Namespace:
    """Read the command line; what is not said there depends on the device and on --quick."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--quick", action="store_true", help="a look at everything: short, and so less certain")
    known, _ = parser.parse_known_args([word for word in sys.argv[1:] if word not in _HELP])
    add("--only", type=_words, default=list(_PARTS), help="parts: train, translate, startup")
    add("--engines", type=_words, default=[], help="names with commas between; default all")
    add("--corpus", type=Path, help="folder with train.en(.gz) and so on; default: the demo's")
    add("--src", default="en", help="source language, the end of file names")
    add("--tgt", default="de", help="target language")
    add("--vocab-size", type=int, help="of the subword model, both languages together")
    add("--models", type=_models, help="to train: base, big, small, or such as 3+3:256:1024:4")
    add("--batch-tokens", type=int, help="bound on a batch: rows * longest side")
    add("--update-tokens", type=int, help="target tokens an update of nmt; default: one batch")
    add("--repeats", type=int, help="turns of each engine")
    add("--steps", type=int, help="training steps a turn, at least")
    add("--turn-seconds", type=float, help="CPU seconds of training a turn, at least")
    add("--translate-model", type=parse_model, help="the sizes of the model to translate with")
    add("--model-updates", type=int, help="updates of training it")
    add("--lines", type=int, help="lines translated a turn")
    add("--beams", type=_numbers, default=[4, 1], help="beam sizes; 1 is greedy")
    add("--lengths", type=_numbers, help="of translations, EOS counted; 0 is what the model wants")
    add("--threads", type=int, default=1, help="of each engine")
    add("--dtype", choices=("float32", "bfloat16"), help="of products on the device")
    add("--here", action="store_true", help="install nothing: look for peers in this environment")
    add("--cache", type=Path, default=Path.home() / ".cache" / "nmt-benchmark")
    add("--output", type=Path, default=ROOT / "docs" / "benchmarks")
    add("--name", help="of the two files written there; default: cpu or gpu, with -quick")
    parser.set_defaults(**_DEFAULTS[known.device] | (_QUICK if known.quick else {}))
    args = parser.parse_args()
    if not args.only or not set(args.only) <= set(_PARTS):
        parser.error(f"--only takes {', '.join(_PARTS)}")
    return args
