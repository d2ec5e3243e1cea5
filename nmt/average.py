"""Checkpoint averaging: the mean of the weights of several checkpoints.

The paper, Vaswani et al. (2017), averages the last checkpoints of a run (section 6.1).
"""

from __future__ import annotations

import logging
from pathlib import Path

from torch import Tensor

from nmt.checkpoint import (
    ModelInfo,
    list_checkpoints,
    load_info,
    load_model_tokenizers,
    load_weights,
    parse_checkpoint_update,
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
    first_info = infos[0]
    for folder, info in zip(folders, infos, strict=True):
        both_folders = f"{folder} and {folders[0]}"
        if _architecture(info) != _architecture(first_info):
            raise ModelError(
                f"{both_folders} differ in architecture; average checkpoints of one run"
            )
        if info.tokenizer_sha256 != first_info.tokenizer_sha256:
            raise ModelError(
                f"{both_folders} have different vocabularies; train them on one data folder"
            )
    newest_info = max(infos, key=lambda info: info.updates)
    card_body = (
        f"# {newest_info.src_lang} to {newest_info.tgt_lang}, nmt\n\n"
        f"The mean of {len(folders)} checkpoints. Translate with `nmt-translate model_dir=FOLDER`, "
        "where FOLDER is this folder."
    )
    # `render_card` finds the run from a folder in it; `output` does not exist yet
    checkpoints_folder = folders[0].parent
    card = render_card(checkpoints_folder, newest_info, card_body)

    def write_card(folder: Path) -> None:
        (folder / CARD).write_text(card, encoding="utf-8", newline="\n")

    tokenizers = load_model_tokenizers(folders[0], first_info)
    weights = average_weights(folders)
    save_model(output, weights, newest_info, tokenizers, write_extra_files=write_card)


def _architecture(info: ModelInfo) -> tuple[object, ...]:
    """Return the settings that determine the names and shapes of the weights."""
    return (info.model, info.vocab_size, info.src_vocab_size)


def average_weights(folders: list[Path]) -> dict[str, Tensor]:
    """Return the mean of each tensor. Sums in float64, then rounds to the dtype of the tensor."""
    first_weights = load_weights(folders[0])
    sums = {name: tensor.double() for name, tensor in first_weights.items()}
    for folder in folders[1:]:
        weights = load_weights(folder)
        if weights.keys() != sums.keys():
            # names of tensors that only one of the two checkpoints has
            unshared_names = sorted(weights.keys() ^ sums.keys())[:3]
            raise ModelError(
                f"{folder} and {folders[0]} do not hold the same tensors: "
                f"{', '.join(unshared_names)}"
            )
        for name, tensor in weights.items():
            if tensor.shape != sums[name].shape:
                raise ModelError(
                    f"{name} is {tuple(tensor.shape)} in {folder}, {tuple(sums[name].shape)} in "
                    f"{folders[0]}; average checkpoints of one run"
                )
            sums[name] += tensor.double()
    means = {}
    for name, tensor_sum in sums.items():
        means[name] = (tensor_sum / len(folders)).to(first_weights[name].dtype)
    return means


def find_newest_checkpoints(run_dir: Path, count: int) -> list[Path]:
    """Return the newest `count` checkpoints of a run, oldest first."""
    checkpoints = list_checkpoints(run_dir)
    _require_enough(run_dir, len(checkpoints), count)
    return checkpoints[-count:]


def find_best_checkpoints(run_dir: Path, count: int, metric: BestMetric) -> list[Path]:
    """Return the `count` best checkpoints, best first; warn if better ones were removed."""
    scores = read_validation_scores(run_dir, metric)
    higher_is_better = metric is BestMetric.bleu
    best_updates = sorted(scores, key=lambda update: scores[update], reverse=higher_is_better)
    folders = {parse_checkpoint_update(folder): folder for folder in list_checkpoints(run_dir)}
    checkpoints = [folders[update] for update in best_updates if update in folders]
    _require_enough(run_dir, len(checkpoints), count)
    removed_updates = []
    for update in best_updates[:count]:
        if update not in folders:
            removed_updates.append(str(update))
    if removed_updates:
        log.warning(
            "checkpoints %s, among the %d best, were removed; keep_best=%d would keep them",
            ", ".join(removed_updates),
            count,
            count,
        )
    return checkpoints[:count]


def read_validation_scores(run_dir: Path, metric: BestMetric) -> dict[int, float]:
    """Return the validation loss or BLEU of a run, by the update after which it was measured."""
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
            "fewer, or train with a smaller checkpoint_every_updates or a larger keep_last (for "
            "best=N, a larger keep_best)"
        )
