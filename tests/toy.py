"""A toy corpus and the commands run on it, for tests of the whole pipeline."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import safetensors.torch
import torch
from folders import write_folder
from tiny import assert_same_tensors, tiny_config
from torch import Tensor

from nmt.cli.commands import COMMANDS
from nmt.cli.main import main
from nmt.config import DType, TrainConfig
from nmt.data.augment import TextAugmenter
from nmt.data.batching import UpdatePlan
from nmt.data.tokenizer import Tokenizer
from nmt.runtime.distributed import World
from nmt.training.batches import Batch, ChangedPair
from nmt.training.build import Run, build_run
from nmt.training.learner import Learner

WORDS = {"red": "rot", "green": "grün", "big": "groß"}
WORDS |= {"house": "Haus", "tree": "Baum", "sees": "sieht"}


def write_corpus(folder: Path, num_train: int = 200, words: tuple[int, int] = (2, 8)) -> list[str]:
    """Write train, valid and test files; return the arguments of nmt-preprocess that name them."""
    draw = random.Random(1)
    arguments = ["tokenizer.vocab_size=310", f"data_dir={folder / 'data'}", "data.tgt_lang=de"]
    for split, size in {"train": num_train, "valid": 20, "test": 20}.items():
        lines: dict[str, list[str]] = {"src": [], "tgt": []}
        for _ in range(size):
            src_words = draw.choices(list(WORDS), k=draw.randint(words[0], words[1]))
            lines["src"].append(" ".join(src_words) + "\n")
            lines["tgt"].append(" ".join(map(WORDS.__getitem__, src_words)) + "\n")
        for side, side_lines in lines.items():
            path = folder / f"{split}.{side}.txt"
            path.write_text("".join(side_lines), encoding="utf-8", newline="\n")
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


def command(name: str, *arguments: str | Iterable[str]) -> int:
    """Run `nmt-NAME` in this process and return its exit status.

    Each of `arguments` is one argument or several.
    """
    return main(COMMANDS[name], flatten(arguments))


def flatten(arguments: Iterable[Any]) -> list[str]:
    """Return all strings in nested lists."""
    flat: list[str] = []
    for argument in arguments:
        flat += [argument] if isinstance(argument, str) else flatten(argument)
    return flat


def train(data_dir: Path, run_dir: Path, *arguments: str | Iterable[str]) -> int:
    """Run nmt-train with a model of a few thousand weights; see `command` for `arguments`."""
    return command("train", [f"data_dir={data_dir}", f"run_dir={run_dir}"], TINY, arguments)


def read_records(run_dir: Path, key: str) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl that have `key`."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    return [record for record in map(json.loads, lines) if key in record]


def read_values(run_dir: Path, key: str, field: str = "update") -> list[Any]:
    """Return `field` of each line of metrics.jsonl that has `key`."""
    return [record.get(field) for record in read_records(run_dir, key)]


def read_weights(run_dir: Path) -> dict[str, Tensor]:
    """Return the weights of the newest checkpoint."""
    return safetensors.torch.load_file(run_dir / "checkpoints/latest/model.safetensors")


def assert_same_weights(run_dir: Path, other_run_dir: Path) -> None:
    """Compare the newest checkpoints of two runs bit by bit."""
    assert_same_tensors(read_weights(run_dir), read_weights(other_run_dir))


def assert_resumes_exactly(
    data_dir: Path, folder: Path, *arguments: str | Iterable[str], ends: Iterable[int]
) -> Path:
    """Train up to the last of `ends` at once, and again with a stop after each of `ends`; compare
    the weights, and return the first run.
    """
    for end in ends:
        assert train(data_dir, folder / "cut", arguments, f"max_updates={end}") == 0
    assert train(data_dir, folder / "uncut", arguments, f"max_updates={end}") == 0
    assert_same_weights(folder / "uncut", folder / "cut")
    return folder / "uncut"


def write_data(folder: Path, tokenizer: Tokenizer, lengths: list[tuple[int, int]]) -> None:
    """Write a data folder of random pairs; `lengths` are in tokens and count EOS."""
    draw = np.random.default_rng(0)
    pairs = []
    for src_length, tgt_length in lengths:
        src = draw.integers(4, tokenizer.vocab_size, src_length - 1).tolist()
        tgt = draw.integers(4, tokenizer.vocab_size, tgt_length - 1).tolist()
        pairs.append((src, tgt))
    (folder / "tokenizer.model").write_bytes(tokenizer.model)
    languages = {"src_lang": "en", "tgt_lang": "de"}
    meta = {"tokenizer_sha256": tokenizer.sha256, "max_length": 200, **languages}
    write_folder(folder, {"": pairs}, tokenizer.vocab_size, **meta)


def call_before(
    patch: pytest.MonkeyPatch, owner: Any, name: str, action: Callable[..., Any]
) -> None:
    """Call `action` with the arguments of each call of a function, before the function itself."""
    original = getattr(owner, name)

    def call(*arguments: Any, **named: Any) -> Any:
        action(*arguments, **named)
        return original(*arguments, **named)

    patch.setattr(owner, name, call)


def batch_rows(update: UpdatePlan) -> list[list[int]]:
    """Return the rows of each batch of an update."""
    return [rows.tolist() for rows in update.batches]


def read_pairs(
    learner: Learner, batches: list[Any], draw: int, augment: TextAugmenter | None = None
) -> list[list[list[int]]]:
    """Return the source, decoder input and target ids of the pairs of `batches`, lists of rows, as
    training reads them in update `draw`. The pairs are sorted by row.
    """
    update = UpdatePlan(list(map(np.array, batches)), 1, 1)
    maker = learner.batch_maker
    pack_pairs = maker.pack_pairs
    rows: list[int] = []

    def record_rows(changed_pairs: Sequence[ChangedPair]) -> Batch:
        rows.extend(pair.row for pair in changed_pairs)
        return pack_pairs(changed_pairs)

    with mock.patch.object(maker, "pack_pairs", record_rows):
        made_batches = maker.make_batches(update, draw, augment)
    pairs = []
    for micro_batches in made_batches:
        for batch in micro_batches:
            src_lengths, tgt_lengths = batch.lengths.T.tolist()
            src = batch.src[: batch.num_src_tokens].split(src_lengths)
            tgt_in = batch.tgt_in[: batch.num_tokens].split(tgt_lengths)
            tgt_out = batch.tgt_out[: batch.num_tokens].split(tgt_lengths)
            for pair in zip(src, tgt_in, tgt_out, strict=True):
                pairs.append(list(map(Tensor.tolist, pair)))
    return [pairs[i] for i in np.argsort(rows, kind="stable")]


def make_run(data_dir: Path, run_dir: Path, world: World | None = None, **changes: Any) -> Run:
    """Set up a run on the CPU with all weights, biases too, away from 0."""
    settings: dict[str, Any] = {
        "model": tiny_config(),
        "device": "cpu",
        "dtype": DType.float32,
        "num_threads": 1,
        "tokens_per_update": 1000,
        "valid_bleu": False,
    }
    config = TrainConfig(data_dir=str(data_dir), run_dir=str(run_dir), **settings | changes)
    setup = build_run(config, world or World(), torch.device("cpu"))
    with torch.no_grad():
        for parameter in setup.learner.model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return setup
