"""Start a run with the architecture and the weights of another model (`init_from`)."""

from __future__ import annotations

import logging
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
    load_model_tokenizers,
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
    """Return `config` with the architecture and the search settings of `init_from`, if it is set.

    Dropouts are not copied, nor search settings if `config` changes any. Raises a `ConfigError` for
    a model setting that is neither the default nor the value of `init_from`.
    """
    if config.init_from is None:
        return config
    folder, info = _find_info(config)
    model_changes: dict[str, Any] = {}
    for setting in fields(config.model):
        if "dropout" in setting.name or setting.name.startswith("alignment"):
            continue  # the weights do not depend on it
        value = getattr(config.model, setting.name)
        init_value = getattr(info.model, setting.name)
        if value not in (setting.default, init_value):
            raise ConfigError(
                f"model.{setting.name}={_unwrap_enum(value)}: init_from={folder} has "
                f"{_unwrap_enum(init_value)}; leave it out"
            )
        model_changes[setting.name] = init_value
    search = info.search if config.search == SearchConfig() else config.search
    return replace(config, model=replace(config.model, **model_changes), search=search)


def _find_info(config: TrainConfig) -> tuple[Path, ModelInfo]:
    """Return the folder and the info of the newest checkpoint of the run, or else of `init_from`.

    A resumed run does not need `init_from`, which may have been removed.
    """
    for folder in reversed(list_checkpoints(resolve_path(config.run_dir))):
        try:
            return folder, load_info(folder)
        except ModelError:  # `load_newest` warns of damaged checkpoints
            continue
    folder = find_model(resolve_path(str(config.init_from)))
    return folder, load_info(folder)


def _unwrap_enum(value: Any) -> Any:
    return getattr(value, "value", value)


def load_initial_weights(
    config: TrainConfig, tokenizers: Tokenizers, random_weights: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Read the weights of `init_from`, after `adopt_model`.

    If its tokenizers are not the `tokenizers` of the run, the embeddings are adapted to the new
    vocabulary. Pieces that `init_from` does not have get embeddings of `random_weights`; if
    embeddings are frozen, raises a `ConfigError` instead.
    """
    folder = find_model(resolve_path(str(config.init_from)))
    info = load_info(folder)
    weights = load_weights(folder)
    if info.tokenizer_sha256 != tokenizers.sha256:
        weights = adapt_vocabulary(
            weights,
            load_model_tokenizers(folder, info),
            random_weights,
            tokenizers,
            is_frozen=Part.embeddings in config.freeze,
        )
    # `adopt_model` has made the architectures equal
    assert all(tensor.shape == random_weights[name].shape for name, tensor in weights.items())
    log.info("starting with the weights of %s", folder)
    return weights


def adapt_vocabulary(
    weights: dict[str, Tensor],
    old_tokenizers: Tokenizers,
    random_weights: dict[str, Tensor],
    new_tokenizers: Tokenizers,
    *,
    is_frozen: bool = False,
) -> dict[str, Tensor]:
    """Return `weights` for the vocabulary of `new_tokenizers`.

    Pieces that only `new_tokenizers` have get rows of `random_weights`; if the embeddings are
    frozen, raises a `ConfigError` instead.
    """
    adapted = {name: weights.get(name, tensor) for name, tensor in random_weights.items()}
    for name in sorted(_VOCABULARY_TENSORS & random_weights.keys()):
        # a model that shares its embeddings has only this tensor for all of them
        old_rows = weights[name if name in weights else _JOINT_EMBEDDING]
        old_tokenizer = old_tokenizers.tgt
        new_tokenizer = new_tokenizers.tgt
        if name == _SRC_EMBEDDING:
            old_tokenizer = old_tokenizers.src
            new_tokenizer = new_tokenizers.src
        old_ids, new_ids = _shared_ids(old_tokenizer, new_tokenizer)
        num_random = len(random_weights[name]) - len(new_ids)
        if is_frozen and num_random:
            raise ConfigError(
                f"freeze=[embeddings]: {num_random} pieces that init_from does not know would stay "
                "random; leave it out"
            )
        adapted[name] = random_weights[name].clone()
        adapted[name][new_ids] = old_rows[old_ids].to(adapted[name])
        log.info(
            "%s: another vocabulary; %d of %d rows are kept, %d pieces are new",
            name,
            len(new_ids),
            len(adapted[name]),
            num_random,
        )
    return adapted


def _shared_ids(old: Tokenizer, new: Tokenizer) -> tuple[Tensor, Tensor]:
    """Return the ids of the pieces that both tokenizers have: (old ids, new ids)."""
    ids_in_old = {piece: old_id for old_id, piece in enumerate(_pieces_and_roles(old))}
    old_ids = []
    new_ids = []
    for new_id, piece in enumerate(_pieces_and_roles(new)):
        if piece in ids_in_old:
            old_ids.append(ids_in_old[piece])
            new_ids.append(new_id)
    return torch.tensor(old_ids), torch.tensor(new_ids)


def _pieces_and_roles(tokenizer: Tokenizer) -> list[str]:
    """Return all pieces by id; control symbols are named by their roles, such as <eos>.

    Two tokenizers may have different pieces for the same role.
    """
    pieces = list(tokenizer.all_pieces())
    roles = ("<pad>", "<unk>", "<bos>", "<eos>")
    for role, piece_id in zip(roles, tokenizer.control_ids, strict=True):
        if piece_id >= 0:
            pieces[piece_id] = role
    return pieces
