"""A toy corpus and the commands run on it, for tests of the whole pipeline."""

from __future__ import annotations

import random
from pathlib import Path

from nmt.cli.commands import COMMANDS
from nmt.cli.shell import main

WORDS = {
    "red": "rot",
    "green": "grün",
    "big": "groß",
    "house": "Haus",
    "tree": "Baum",
    "sees": "sieht",
}
SIZES = {"train": 200, "valid": 20, "test": 20}


def write_corpus(folder: Path) -> list[str]:
    """Write train, valid and test files; return the arguments of nmt-preprocess that name them."""
    draw = random.Random(1)
    arguments = ["tokenizer.vocab_size=310", f"data_dir={folder / 'data'}", "data.tgt_lang=de"]
    for split, size in SIZES.items():
        rows = [draw.choices(list(WORDS), k=draw.randint(2, 8)) for _ in range(size)]
        for side, table in (("src", {}), ("tgt", WORDS)):
            lines = [" ".join(table.get(word, word) for word in row) for row in rows]
            path = folder / f"{split}.{side}.txt"
            path.write_text("".join(line + "\n" for line in lines), encoding="utf-8", newline="\n")
            arguments.append(f"data.{split}.{side}={path}")
    return arguments


TINY = [
    "model.num_encoder_layers=1",
    "model.num_decoder_layers=1",
    "model.d_model=16",
    "model.d_ff=32",
    "model.num_heads=2",
    "optimizer.warmup_steps=20",
    "tokens_per_update=200",
    "max_tokens=100",
    "log_every_updates=5",
    "validate_every_updates=10",
    "checkpoint_every_updates=4",
    "device=cpu",
    "num_threads=1",
]


def command(name: str, *arguments: str) -> int:
    """Run `nmt-NAME` in this process and return its exit status."""
    return main(COMMANDS[name], list(arguments))


def train(data_dir: Path, run_dir: Path, *arguments: str) -> int:
    """Run nmt-train with a model of a few thousand weights."""
    places = [f"data_dir={data_dir}", f"run_dir={run_dir}"]
    return command("train", *places, *TINY, *arguments)
