"""`init_from`: start a run with the architecture and the weights of another model."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nmt.checkpoint import (
    ModelInfo,
    find_model,
    list_checkpoints,
    load_info,
    load_tokenizer,
    load_weights,
)
from nmt.config import Part, SearchConfig, TrainConfig, resolve_path
from nmt.data.tokenizer import Tokenizer, Tokenizers
from nmt.errors import ConfigError, ModelError

log = logging.getLogger(__name__)
_JOINT_EMBEDDING = "embedding.weight"
_SRC_EMBEDDING = "src_embedding.weight"
_VOCABULARY_TENSORS = {_JOINT_EMBEDDING, _SRC_EMBEDDING, "output_weight", "output_bias"}


def adopt_model(config: TrainConfig) -> TrainConfig:
    """Return `config` with the architecture of `init_from`, except for dropouts, and with its
    search settings unless the config has some; without `init_from`, return it unchanged.

    Raises a `ConfigError` for a model setting that is neither the default nor the folder's.
    """
    if config.init_from is None:
        return config
    folder, info = _find_info(config)
    changes: dict[str, Any] = {}
    for setting in fields(config.model):
        if "dropout" in setting.name:
            continue
        configured = getattr(config.model, setting.name)
        loaded = getattr(info.model, setting.name)
        if configured not in (setting.default, loaded):
            raise ConfigError(
                f"model.{setting.name}={_as_typed(configured)}: init_from={folder} has "
                f"{_as_typed(loaded)}; leave it out"
            )
        changes[setting.name] = loaded
    search = info.search if config.search == SearchConfig() else config.search
    return replace(config, model=replace(config.model, **changes), search=search)


def _find_info(config: TrainConfig) -> tuple[Path, ModelInfo]:
    """Read the info of the run's own newest checkpoint, since `init_from` may be gone when the run
    resumes, else of `init_from`.
    """
    for folder in reversed(list_checkpoints(resolve_path(config.run_dir))):
        with suppress(ModelError):  # `load_newest` reports damaged checkpoints
            return folder, load_info(folder)
    folder = find_model(resolve_path(str(config.init_from)))
    return folder, load_info(folder)


def _as_typed(value: Any) -> Any:
    return getattr(value, "value", value)


def load_initial_weights(
    config: TrainConfig, tokenizer: Tokenizers, fresh: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Read the weights of `init_from`, whose architecture `adopt_model` gave this run.

    With another tokenizer, the embeddings of pieces that both have are kept. The other rows come
    from `fresh`, the weights of a new model; with frozen embeddings they raise a `ConfigError`.
    """
    folder = find_model(resolve_path(str(config.init_from)))
    info = load_info(folder)
    weights = load_weights(folder)
    if info.tokenizer_sha256 != tokenizer.sha256:
        old_tokenizer = load_tokenizer(folder, info)
        is_frozen = Part.embeddings in config.freeze
        weights = carry_over(weights, old_tokenizer, fresh, tokenizer, is_frozen=is_frozen)
    assert all(tensor.shape == fresh[name].shape for name, tensor in weights.items())
    log.info("starting with the weights of %s", folder)
    return weights


def carry_over(
    weights: dict[str, Tensor],
    old: Tokenizers,
    fresh: dict[str, Tensor],
    new: Tokenizers,
    *,
    is_frozen: bool = False,
) -> dict[str, Tensor]:
    """Return `weights` for the vocabulary of `new`, with rows of `fresh` for pieces only it has."""
    carried = {name: weights.get(name, tensor) for name, tensor in fresh.items()}
    for name in sorted(_VOCABULARY_TENSORS & fresh.keys()):
        rows = weights[name if name in weights else _JOINT_EMBEDDING]
        old_side = old.tgt
        new_side = new.tgt
        if name == _SRC_EMBEDDING:
            old_side = old.src
            new_side = new.src
        old_ids, new_ids = _shared_ids(old_side, new_side)
        num_new = len(fresh[name]) - len(new_ids)
        if is_frozen and num_new:
            raise ConfigError(
                f"freeze=[embeddings]: {num_new} pieces that init_from does not know would stay "
                "random; leave it out"
            )
        carried[name] = fresh[name].clone()
        carried[name][new_ids] = rows[old_ids].to(carried[name])
        message = "%s: another vocabulary; %d of %d rows are kept, %d pieces are new"
        log.info(message, name, len(new_ids), len(carried[name]), num_new)
    return carried


def _shared_ids(old: Tokenizer, new: Tokenizer) -> tuple[Tensor, Tensor]:
    """Return the ids of the pieces that both tokenizers have, in the old and in the new one."""
    old_id_of = {piece: piece_id for piece_id, piece in enumerate(_named_pieces(old))}
    pairs = []
    for new_id, piece in enumerate(_named_pieces(new)):
        if piece in old_id_of:
            pairs.append((old_id_of[piece], new_id))
    old_ids, new_ids = torch.tensor(pairs).T
    return old_ids, new_ids


def _named_pieces(tokenizer: Tokenizer) -> list[str]:
    """Return all pieces, with control symbols named by their role, since their text may differ."""
    pieces = list(tokenizer.all_pieces())
    roles = dict(zip(("<pad>", "<unk>", "<bos>", "<eos>"), tokenizer.control_ids, strict=True))
    for role, piece_id in roles.items():
        if piece_id >= 0:
            pieces[piece_id] = role
    return pieces
