"""Start a run with the architecture and the weights of another model (`init_from`).

The vocabulary of the run may differ. In this file, `old` means the vocabulary of `init_from`, and
`new` the vocabulary of the run. `init_rows` maps new pieces to the old pieces whose rows they copy.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
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
from nmt.data.extension import segment_new_pieces
from nmt.data.tokenizer import Tokenizer, Tokenizers
from nmt.errors import ConfigError, ModelError, suggest_names

log = logging.getLogger(__name__)
_JOINT_EMBEDDING = "embedding.weight"
_SRC_EMBEDDING = "src_embedding.weight"
_VOCABULARY_TENSORS = {_JOINT_EMBEDDING, _SRC_EMBEDDING, "output_weight", "output_bias"}


def use_initial_architecture(config: TrainConfig) -> TrainConfig:
    """Return a config with the architecture and the search settings of `init_from`, if it is set.

    Dropouts and alignment settings stay as in `config`. If `config` changes any search setting, all
    search settings stay as in `config`. Raises a `ConfigError` if another setting of the model is
    neither its default nor the value in `init_from`.
    """
    if config.init_from is None:
        return config
    folder, info = _find_model_info(config)
    model_changes: dict[str, Any] = {}
    for setting in fields(config.model):
        is_dropout = "dropout" in setting.name
        is_alignment = setting.name.startswith("alignment")
        if is_dropout or is_alignment:
            continue  # the weights do not depend on it
        value = getattr(config.model, setting.name)
        init_value = getattr(info.model, setting.name)
        is_set = value != setting.default
        if is_set and value != init_value:
            raise ConfigError(
                f"model.{setting.name}={_unwrap_enum(value)}: init_from={folder} has "
                f"{_unwrap_enum(init_value)}; leave it out"
            )
        model_changes[setting.name] = init_value
    search = info.search if config.search == SearchConfig() else config.search
    return replace(config, model=replace(config.model, **model_changes), search=search)


def _find_model_info(config: TrainConfig) -> tuple[Path, ModelInfo]:
    """Return the folder and the info of the newest checkpoint of the run, or else of `init_from`.

    A checkpoint of the run has the architecture of `init_from`, so a run can be resumed even if the
    folder of `init_from` no longer exists.
    """
    for folder in reversed(list_checkpoints(resolve_path(config.run_dir))):
        try:
            return folder, load_info(folder)
        except ModelError:  # `load_newest` warns of damaged checkpoints
            continue
    folder = find_model(resolve_path(str(config.init_from)))
    return folder, load_info(folder)


def _unwrap_enum(value: Any) -> Any:
    """Return the value of a member of an enum, and other values unchanged."""
    return getattr(value, "value", value)


def load_initial_weights(
    config: TrainConfig, tokenizers: Tokenizers, random_weights: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Read the weights of `init_from`. `config` is the result of `use_initial_architecture`.

    If `init_from` has other tokenizers than the run, `adapt_vocabulary` adapts the embeddings.
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
            init_rows=config.init_rows,
            is_frozen=Part.embeddings in config.freeze,
        )
    elif config.init_rows:
        raise ConfigError("init_rows: the data has no new pieces; leave it out")
    for name, tensor in weights.items():
        assert tensor.shape == random_weights[name].shape, "`config` has another architecture"
    log.info("starting with the weights of %s, trained for %d updates", folder, info.updates)
    return weights


def adapt_vocabulary(
    weights: dict[str, Tensor],
    old_tokenizers: Tokenizers,
    random_weights: dict[str, Tensor],
    new_tokenizers: Tokenizers,
    *,
    init_rows: Mapping[str, str] | None = None,
    is_frozen: bool = False,
) -> dict[str, Tensor]:
    """Return `weights` for the vocabulary of `new_tokenizers`.

    Pieces that are in both vocabularies keep their rows. If the new vocabulary is the old one
    followed by other pieces, `_compute_new_rows` computes the rows of these pieces. Otherwise, new
    pieces get rows of `random_weights`. Pieces of `init_rows` copy the row of an old piece. Raises
    a `ConfigError` for wrong names, and for new pieces if the embeddings are frozen.
    """
    extends_src = _extends(old_tokenizers.src, new_tokenizers.src)
    extends_tgt = _extends(old_tokenizers.tgt, new_tokenizers.tgt)
    is_extension = extends_src and extends_tgt
    init_rows = init_rows or {}
    _check_init_rows(init_rows, old_tokenizers, new_tokenizers)
    adapted = {}
    for name, random_tensor in random_weights.items():
        # `weights` may lack tensors of the vocabulary, which are replaced below
        adapted[name] = weights.get(name, random_tensor)
    joint_embedding = weights[_JOINT_EMBEDDING]
    for name in sorted(_VOCABULARY_TENSORS & random_weights.keys()):
        # a model that shares this matrix with its joint embedding has only the joint embedding
        old_rows = weights.get(name, joint_embedding)  # (V, D), or (V,) for the output bias
        old_tokenizer = _tokenizer_of(name, old_tokenizers)
        new_tokenizer = _tokenizer_of(name, new_tokenizers)
        old_ids, new_ids = _shared_ids(old_tokenizer, new_tokenizer)
        num_new_pieces = len(random_weights[name]) - len(new_ids)
        if is_frozen and num_new_pieces:
            raise ConfigError(
                f"freeze=[embeddings]: {num_new_pieces} pieces that init_from does not know would "
                "stay untrained; do not freeze the embeddings"
            )
        rows = random_weights[name].clone()
        rows[new_ids] = old_rows[old_ids].to(rows)
        if is_extension:
            segmentations = _segment_new_rows(name, old_tokenizers, new_tokenizers)
            new_rows = _compute_new_rows(old_rows, old_tokenizer, new_tokenizer, segmentations)
            rows[len(old_rows) :] = new_rows.to(rows)  # the new pieces follow the old ones
        else:
            log.info(
                "%s: another vocabulary; %d of %d rows are kept, %d pieces are new",
                name,
                len(new_ids),
                len(rows),
                num_new_pieces,
            )
        _copy_rows(rows, old_rows, init_rows, old_tokenizer, new_tokenizer)
        adapted[name] = rows
    if is_extension:
        _log_growth(old_tokenizers, new_tokenizers)
    return adapted


def _tokenizer_of(name: str, tokenizers: Tokenizers) -> Tokenizer:
    """Return the tokenizer whose ids are the rows of the tensor `name`."""
    return tokenizers.src if name == _SRC_EMBEDDING else tokenizers.tgt


def _segment_new_rows(
    name: str, old_tokenizers: Tokenizers, new_tokenizers: Tokenizers
) -> dict[str, list[int]]:
    """Return, for each new piece of the tensor `name`, the ids of old pieces that spell it.

    An imported model may have one joint vocabulary, but two SentencePiece models: one for the
    source and one for the target. Then the new pieces of both models are segmented.
    """
    old_tokenizer = _tokenizer_of(name, old_tokenizers)
    new_tokenizer = _tokenizer_of(name, new_tokenizers)
    segmentations = segment_new_pieces(old_tokenizer, new_tokenizer)
    has_joint_vocabulary = new_tokenizers.src_vocab_size is None
    if has_joint_vocabulary and new_tokenizers.src is not new_tokenizer:
        segmentations |= segment_new_pieces(old_tokenizers.src, new_tokenizers.src)
    return segmentations


def _log_growth(old_tokenizers: Tokenizers, new_tokenizers: Tokenizers) -> None:
    """Log by how many rows the embeddings grow for an extended vocabulary."""
    num_new = new_tokenizers.tgt.vocab_size - old_tokenizers.tgt.vocab_size
    if new_tokenizers.src_vocab_size is not None:
        num_new += new_tokenizers.src.vocab_size - old_tokenizers.src.vocab_size
    log.info(
        "the tokenizer of the data extends init_from's: the embeddings grow by %d rows", num_new
    )


def _extends(old: Tokenizer, new: Tokenizer) -> bool:
    """Return whether each id of `old` is the id of the same piece in `new`."""
    has_same_controls = old.control_ids == new.control_ids
    first_pieces = new.all_pieces()[: old.vocab_size]
    return has_same_controls and first_pieces == old.all_pieces()


def _check_init_rows(
    init_rows: Mapping[str, str], old_tokenizers: Tokenizers, new_tokenizers: Tokenizers
) -> None:
    """Raise a `ConfigError` unless `init_rows` maps new pieces to pieces of the old model."""
    old_pieces = {*old_tokenizers.src.all_pieces(), *old_tokenizers.tgt.all_pieces()}
    new_pieces = {*new_tokenizers.src.all_pieces(), *new_tokenizers.tgt.all_pieces()} - old_pieces
    for new_piece, old_piece in init_rows.items():
        if new_piece not in new_pieces:
            raise ConfigError(f"init_rows.{new_piece}: {suggest_names(new_piece, new_pieces)}")
        if old_piece not in old_pieces:
            raise ConfigError(
                f"init_rows.{new_piece}={old_piece}: init_from has no piece {old_piece}"
            )


def _compute_new_rows(
    old_rows: Tensor,
    old: Tokenizer,
    new: Tokenizer,
    segmentations: Mapping[str, Sequence[int]],
) -> Tensor:
    """Return a row for each new piece (Gee et al., 2022).

    - A piece that joins old pieces gets the mean of their rows. `segmentations` has the ids of the
      old pieces that a new piece joins, see `segment_new_pieces`.
    - A new language piece gets the mean of the rows of all old language pieces.
    - Other symbols, and pieces of unknown characters, get the mean of the rows of all old pieces.

    `old_rows` is (V, D), or (V,) for a bias. The result for N new pieces is (N, D) or (N,).
    """
    ids_without_text = {*old.control_ids, *old.unused_ids}
    text_ids = [i for i in range(old.vocab_size) if i not in ids_without_text]
    mean_row = old_rows[text_ids].double().mean(dim=0)
    mean_language_row = mean_row
    if old.language_ids:
        mean_language_row = old_rows[list(old.language_ids.values())].double().mean(dim=0)
    rows = []
    num_old = len(old_rows)
    for piece in new.all_pieces()[num_old:]:
        old_ids = segmentations.get(piece)
        if old_ids:
            rows.append(old_rows[old_ids].double().mean(dim=0))
        elif piece in new.language_ids:
            rows.append(mean_language_row)
        else:
            rows.append(mean_row)
    if not rows:
        return old_rows[:0]
    return torch.stack(rows)


def _copy_rows(
    rows: Tensor, old_rows: Tensor, init_rows: Mapping[str, str], old: Tokenizer, new: Tokenizer
) -> None:
    """Copy rows of `old_rows` to `rows`, in place, as `init_rows` says.

    If source and target have separate vocabularies, `init_rows` may have pieces of the other side.
    These pieces are skipped.
    """
    old_ids = {piece: i for i, piece in enumerate(old.all_pieces())}
    new_ids = {piece: i for i, piece in enumerate(new.all_pieces())}
    for new_piece, old_piece in init_rows.items():
        if new_piece in new_ids and old_piece in old_ids:
            rows[new_ids[new_piece]] = old_rows[old_ids[old_piece]].to(rows)


def _shared_ids(old: Tokenizer, new: Tokenizer) -> tuple[Tensor, Tensor]:
    """Return the ids of the pieces that both tokenizers have: their ids in `old`, and in `new`."""
    old_id_by_piece = {piece: old_id for old_id, piece in enumerate(_pieces_and_roles(old))}
    old_ids = []
    new_ids = []
    for new_id, piece in enumerate(_pieces_and_roles(new)):
        if piece in old_id_by_piece:
            old_ids.append(old_id_by_piece[piece])
            new_ids.append(new_id)
    return torch.tensor(old_ids), torch.tensor(new_ids)


def _pieces_and_roles(tokenizer: Tokenizer) -> list[str]:
    """Return all pieces by id, but for each control symbol its role, such as <eos>.

    The pieces of control symbols may differ between tokenizers; their roles do not.
    """
    pieces = list(tokenizer.all_pieces())
    roles = ("<pad>", "<unk>", "<bos>", "<eos>")
    for role, piece_id in zip(roles, tokenizer.control_ids, strict=True):
        if piece_id >= 0:
            pieces[piece_id] = role
    return pieces
