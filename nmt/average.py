"""Checkpoint averaging: the mean of the weights of several checkpoints (paper, section 6.1)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from nmt.checkpoint import (
    ModelInfo,
    checkpoint_update,
    list_checkpoints,
    load_info,
    load_tokenizer,
    load_weights,
    save_model,
)
from nmt.config import BestMetric
from nmt.errors import ModelError


def average(folders: list[Path], output: Path) -> None:
    """Write to `output` the model whose weights are the mean of those in `folders`, computed in
    float64.

    Raises `ModelError` when architecture, vocabulary, names or shapes differ; nothing is written
    then.
    """
    infos = [load_info(folder) for folder in folders]
    tokenizer = load_tokenizer(folders[0], infos[0])
    for folder, info in zip(folders, infos, strict=True):
        _check_same(folders[0], infos[0], folder, info)
    weights = mean_weights(folders)
    newest = replace(infos[0], updates=max(info.updates for info in infos))
    save_model(output, weights, newest, tokenizer)


def mean_weights(folders: list[Path]) -> dict[str, Tensor]:
    """Return the mean of each tensor, summed in float64 and rounded once."""
    first = load_weights(folders[0])
    sums = {name: tensor.double() for name, tensor in first.items()}
    for folder in folders[1:]:
        weights = load_weights(folder)
        if weights.keys() != sums.keys():
            names = ", ".join(sorted(weights.keys() ^ sums.keys())[:3])
            raise ModelError(f"{folder} and {folders[0]} do not hold the same tensors: {names}")
        for name, tensor in weights.items():
            if tensor.shape != sums[name].shape:
                raise ModelError(
                    f"{name} is {tuple(tensor.shape)} in {folder}, {tuple(sums[name].shape)} in "
                    f"{folders[0]}; average checkpoints of one run"
                )
            sums[name] += tensor.double()
    return {name: (total / len(folders)).to(first[name].dtype) for name, total in sums.items()}


def last_checkpoints(run_dir: Path, count: int) -> list[Path]:
    """Return the newest `count` checkpoints of a run, oldest first."""
    return _enough(run_dir, list_checkpoints(run_dir), count)[-count:]


def best_checkpoints(run_dir: Path, count: int, metric: BestMetric) -> list[Path]:
    """Return the `count` checkpoints with the best validation scores, best first."""
    scores = _validation_scores(run_dir / "metrics.jsonl", metric)
    scored = [f for f in list_checkpoints(run_dir) if checkpoint_update(f) in scores]
    sign = -1 if metric is BestMetric.bleu else 1
    scored.sort(key=lambda folder: sign * scores[checkpoint_update(folder)])
    return _enough(run_dir, scored, count)[:count]


def _enough(run_dir: Path, folders: list[Path], count: int) -> list[Path]:
    if len(folders) < count:
        raise ModelError(
            f"{run_dir} holds {len(folders)} checkpoints that fit, {count} are asked for; "
            "ask for fewer, or train with a smaller checkpoint_every_updates or a larger keep_last"
        )
    return folders


def _validation_scores(path: Path, metric: BestMetric) -> dict[int, float]:
    if not path.is_file():
        raise ModelError(f"{path} does not exist; best=N needs the run folder of nmt-train")
    key = f"valid_{metric.value}"
    lines = path.read_text(encoding="utf-8").split("\n")
    try:
        records = [json.loads(line) for line in lines if line]
    except ValueError as error:
        raise ModelError(f"{path} is damaged ({error}); use last=N instead of best=N") from None
    return {record["update"]: record[key] for record in records if key in record}


def _check_same(first: Path, one: ModelInfo, folder: Path, other: ModelInfo) -> None:
    sizes = [(info.vocab_size, info.src_vocab_size) for info in (one, other)]
    if other.model != one.model or sizes[0] != sizes[1]:
        raise ModelError(
            f"{folder} and {first} differ in architecture; average checkpoints of one run"
        )
    if other.tokenizer_sha256 != one.tokenizer_sha256:
        raise ModelError(
            f"{folder} and {first} have different vocabularies; train them on one data folder"
        )
