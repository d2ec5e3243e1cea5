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
from nmt.model_card import CARD, render_card
from nmt.runtime.metrics_log import read_metrics_log

log = logging.getLogger(__name__)


def average(folders: list[Path], output: Path) -> None:
    """Write to `output` the model whose weights are the mean of the weights in `folders`.

    Raises `ModelError` and writes nothing if their architectures, vocabularies or tensors differ.
    """
    infos = [load_info(folder) for folder in folders]
    first = infos[0]
    for folder, info in zip(folders, infos, strict=True):
        names = f"{folder} and {folders[0]}"
        architecture = (info.model, info.vocab_size, info.src_vocab_size)
        if architecture != (first.model, first.vocab_size, first.src_vocab_size):
            raise ModelError(f"{names} differ in architecture; average checkpoints of one run")
        if info.tokenizer_sha256 != first.tokenizer_sha256:
            raise ModelError(f"{names} have different vocabularies; train them on one data folder")
    newest = max(infos, key=lambda info: info.updates)
    body = (
        f"# {newest.src_lang} to {newest.tgt_lang}, nmt\n\n"
        f"The mean of {len(folders)} checkpoints. Translate with `nmt-translate model_dir=FOLDER`, "
        "where FOLDER is this folder."
    )
    card = render_card(folders[0].parent, newest, body)  # a folder of the same run

    def write_card(folder: Path) -> None:
        (folder / CARD).write_text(card, encoding="utf-8", newline="\n")

    tokenizer = load_tokenizer(folders[0], first)
    save_model(output, mean_weights(folders), newest, tokenizer, write_more=write_card)


def mean_weights(folders: list[Path]) -> dict[str, Tensor]:
    """Return the mean of each tensor, summed in float64 and rounded once to its dtype."""
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
    checkpoints = list_checkpoints(run_dir)
    _require_enough(run_dir, len(checkpoints), count)
    return checkpoints[-count:]


def best_checkpoints(run_dir: Path, count: int, metric: BestMetric) -> list[Path]:
    """Return the `count` best checkpoints, best first; warn if better ones were removed."""
    scores = validation_scores(run_dir, metric)
    ranked = sorted(scores, key=scores.__getitem__, reverse=metric is BestMetric.bleu)
    folders = {checkpoint_update(folder): folder for folder in list_checkpoints(run_dir)}
    checkpoints = [folders[update] for update in ranked if update in folders]
    _require_enough(run_dir, len(checkpoints), count)
    removed = [str(update) for update in ranked[:count] if update not in folders]
    if removed:
        message = "checkpoints %s, among the %d best, were removed; keep_best=%d would keep them"
        log.warning(message, ", ".join(removed), count, count)
    return checkpoints[:count]


def validation_scores(run_dir: Path, metric: BestMetric) -> dict[int, float]:
    """Return the validation loss or BLEU of a run by the number of updates."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        raise ModelError(f"{path} does not exist; best=N needs the run folder of nmt-train")
    key = f"valid_{metric.value}"
    return {record["update"]: record[key] for record in read_metrics_log(path) if key in record}


def _require_enough(run_dir: Path, num_checkpoints: int, count: int) -> None:
    """Raise a `ModelError` if a run has fewer than `count` checkpoints."""
    if num_checkpoints < count:
        raise ModelError(
            f"{run_dir} has {num_checkpoints} suitable checkpoints, {count} are needed; ask for "
            "fewer, or train with a smaller checkpoint_every_updates or a larger keep_last "
            "(best=N: keep_best)"
        )
