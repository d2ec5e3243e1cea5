"""Checkpoint averaging: the mean of the weights of several checkpoints (paper, section 6.1)."""

from __future__ import annotations

import logging
from pathlib import Path

from torch import Tensor

from nmt.checkpoint import (
    checkpoint_update,
    list_checkpoints,
    load_info,
    load_tokenizer,
    load_weights,
    save_model,
)
from nmt.config import BestMetric
from nmt.errors import ModelError
from nmt.runtime.metrics_log import read_metrics_log

log = logging.getLogger(__name__)


def average(folders: list[Path], output: Path) -> None:
    """Write to `output` the model whose weights are the mean of those in `folders`.

    Raises `ModelError`, before it writes, when architecture, vocabulary, names or shapes differ.
    """
    infos = [load_info(folder) for folder in folders]
    tokenizer = load_tokenizer(folders[0], infos[0])
    for folder, info in zip(folders, infos, strict=True):
        both, sizes = f"{folder} and {folders[0]}", (info.vocab_size, info.src_vocab_size)
        if info.model != infos[0].model or sizes != (infos[0].vocab_size, infos[0].src_vocab_size):
            raise ModelError(f"{both} differ in architecture; average checkpoints of one run")
        if info.tokenizer_sha256 != infos[0].tokenizer_sha256:
            raise ModelError(f"{both} have different vocabularies; train them on one data folder")
    weights = mean_weights(folders)
    newest = max(infos, key=lambda info: info.updates)
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
    """Return the `count` best checkpoints, best first; log whether better ones are gone."""
    scores = validation_scores(run_dir, metric)
    ranked = sorted(scores, key=scores.__getitem__, reverse=metric is BestMetric.bleu)
    there = {checkpoint_update(folder): folder for folder in list_checkpoints(run_dir)}
    found = _enough(run_dir, [there[update] for update in ranked if update in there], count)[:count]
    if gone := [update for update in ranked[:count] if update not in there]:
        text = "of the %d best updates the checkpoints of %s are gone; keep_best=%d would keep them"
        log.warning(text, count, ", ".join(map(str, gone)), count)
    return found


def validation_scores(run_dir: Path, metric: BestMetric) -> dict[int, float]:
    """Return the score of each update of a run that was validated."""
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise ModelError(f"{path} does not exist; best=N needs the run folder of nmt-train")
    key = f"valid_{metric.value}"
    return {record["update"]: record[key] for record in read_metrics_log(path) if key in record}


def _enough(run_dir: Path, folders: list[Path], count: int) -> list[Path]:
    if len(folders) < count:
        raise ModelError(
            f"{run_dir} holds {len(folders)} checkpoints that fit, {count} are asked for; "
            "ask for fewer, or train with a smaller checkpoint_every_updates or a larger keep_last "
            "(best=N: keep_best)"
        )
    return folders
