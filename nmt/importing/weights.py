"""Weights of another toolkit: load files without running code, and convert names and shapes.

The modules for each toolkit rename its tensors to the names of fairseq. `make_state_dict` then
takes every tensor once and checks its shape against the config.
"""

# Shapes: V rows of an embedding, D d_model, P rows of a position table.

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nmt.config import Decoder, ModelConfig, Norm, Positions
from nmt.errors import ModelError
from nmt.runtime.torch_files import load_torch_file

Weights = dict[str, Tensor]
Rule = tuple[str, str | Callable[[re.Match[str]], str]]
"""A pattern and a replacement for `re.sub`, to rename tensors."""
# difference of position tables that counts as rounding, of float16 numbers or of large angles
_POSITIONS_TOLERANCE = 2e-3


@dataclass(frozen=True)
class EmbeddingLayout:
    """The sizes of the embeddings of a model, and which of them are shared."""

    vocab_size: int  # rows of the target's embedding
    src_vocab_size: int | None  # rows of the source's embedding, or None if it is shared
    has_tied_output: bool  # whether the output layer is the target's embedding

    @property
    def shares_embedding(self) -> bool:
        """Whether source and target share an embedding."""
        return self.src_vocab_size is None

    @property
    def num_src_rows(self) -> int:
        """Rows of the embedding of the source, also if it is shared."""
        if self.src_vocab_size is None:
            return self.vocab_size
        return self.src_vocab_size


class TensorFile:
    """The tensors of the file `path`, by name.

    `take` removes a tensor, so that `check_all_taken` can report tensors that the model lacks.
    """

    def __init__(self, path: Path, tensors: Weights) -> None:
        """Raise `ModelError` for tensors that are sparse, nested, expanded or not on the CPU."""
        self.path = path
        self._tensors = tensors
        for name, tensor in tensors.items():
            if isinstance(tensor, Tensor) and not _is_dense(tensor):
                raise ModelError(f"{path}: {name} is not a dense tensor; save the weights again")

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def names(self) -> list[str]:
        """Return the names of the tensors that have not been taken."""
        return list(self._tensors)

    def take(self, name: str, *shape: int) -> Tensor:
        """Remove a tensor and return it in float32.

        Raises `ModelError` if it is missing, has another shape, is quantized or is not finite.
        """
        if name not in self._tensors:
            raise ModelError(
                f"{self.path} lacks {name} of shape {shape}; the file and its config do not belong "
                "together"
            )
        tensor = self._tensors.pop(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{self.path}: {name} has the shape {tuple(tensor.shape)}, its config says {shape}"
            )
        if not tensor.is_floating_point():
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise ModelError(f"{self.path}: {name} is {dtype}; quantized weights are not imported")
        tensor = tensor.float()
        # One infinite number or NaN makes the sum infinite or NaN. Finite float32 numbers have a
        # finite sum in float64.
        if not torch.isfinite(tensor.sum(dtype=torch.float64)):
            raise ModelError(
                f"{self.path}: {name} holds numbers that are not finite; use another file"
            )
        return tensor

    def rename(self, rules: Sequence[Rule]) -> None:
        """Rename all tensors: apply every rule to each name, in the order of the rules.

        Raises `ModelError` if two tensors get the same new name, or a value is not a tensor.
        """
        if not all(isinstance(tensor, Tensor) for tensor in self._tensors.values()):
            raise ModelError(f"{self.path} holds something else than weights; it is not a model")
        renamed: Weights = {}
        for name, tensor in self._tensors.items():
            for pattern, replacement in rules:
                name = re.sub(pattern, replacement, name)
            renamed[name] = tensor
        if len(renamed) < len(self._tensors):
            raise ModelError(
                f"{self.path} holds two tensors for one parameter; make the file again"
            )
        self._tensors = renamed

    def get_matrix(self, name: str) -> Tensor:
        """Return a matrix without removing it. Raises `ModelError` if it is missing."""
        if name not in self._tensors or self._tensors[name].dim() != 2:
            raise ModelError(f"{self.path} lacks the matrix {name}; it is not a model of this kind")
        return self._tensors[name]

    def num_rows(self, name: str) -> int:
        """Return the first dimension of a tensor."""
        return self._tensors[name].size(0)

    def are_equal(self, name: str, other_name: str) -> bool:
        """Return whether two tensors have the same shape and values."""
        tensor = self._tensors[name]
        other_tensor = self._tensors[other_name]
        if tensor.shape != other_tensor.shape:
            return False
        starts_at_same_byte = tensor.data_ptr() == other_tensor.data_ptr()
        if starts_at_same_byte and tensor.stride() == other_tensor.stride():
            return True  # tied tensors share their memory
        return bool((tensor == other_tensor).all())

    def drop(self, name: str) -> None:
        """Remove a tensor that the model does not need, if the file has it."""
        self._tensors.pop(name, None)

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor, or replace the tensor with this name."""
        self._tensors[name] = tensor

    def differs_from_table(self, name: str, compute_table: Callable[[int], Tensor]) -> bool:
        """Return whether the position table `name` of the file differs from `compute_table(P)`.

        The table in the file is (P, D) or (P, 1, D), and the computed table (P, D). Returns False
        if the file has no such table.
        """
        if name not in self._tensors:
            return False
        stored = self._tensors[name].float()
        stored = stored.reshape(-1, stored.size(-1))  # (P, D)
        expected = compute_table(len(stored))
        if stored.shape != expected.shape:
            return True
        largest_difference = (stored - expected).abs().max()
        return not bool(largest_difference <= _POSITIONS_TOLERANCE)  # `not <=` is true for NaN

    def rename_or_drop_output_bias(self, name: str) -> None:
        """Rename `name`, the bias of the output layer, (V,) or (1, V), to `output.bias`.

        Drops a bias of zeros instead: many files store one for architectures without this bias.
        """
        bias = self._tensors.pop(name, None)
        if bias is not None and bias.any():
            self._tensors["output.bias"] = bias.flatten()

    def check_all_taken(self) -> None:
        """Raise `ModelError` if any tensors have not been taken."""
        if self._tensors:
            names = ", ".join(sorted(self._tensors)[:3])
            raise ModelError(
                f"{self.path} holds {len(self._tensors)} tensors that this architecture does not "
                f"have: {names}"
            )


def make_state_dict(
    tensors: TensorFile, config: ModelConfig, embeddings: EmbeddingLayout
) -> Weights:
    """Take all tensors and return them as the state dict of our model.

    The tensors have the names of fairseq, such as `encoder.layers.0.self_attn.q_proj.weight`. Only
    the output layer is called `output.weight` and `output.bias`. docs/formats.md lists our names.
    Raises `ModelError` for a missing tensor, a wrong shape, and a tensor that our model lacks.
    """
    d_model = config.d_model
    state: Weights = {}
    if embeddings.src_vocab_size is not None:
        state["src_embedding.weight"] = tensors.take(
            "encoder.embed_tokens.weight", embeddings.src_vocab_size, d_model
        )
    state["embedding.weight"] = tensors.take(
        "decoder.embed_tokens.weight", embeddings.vocab_size, d_model
    )
    if not config.tied_output:
        state["output_weight"] = tensors.take("output.weight", embeddings.vocab_size, d_model)
    if config.output_bias:
        state["output_bias"] = tensors.take("output.bias", embeddings.vocab_size)
    for i in range(config.num_encoder_layers):
        state |= _take_layer(
            tensors, f"encoder_layers.{i}", f"encoder.layers.{i}", d_model, config.d_ff
        )
    decoder_d_ff = config.decoder_d_ff or config.d_ff
    for i in range(config.num_decoder_layers):
        our_prefix = f"decoder_layers.{i}"
        their_prefix = f"decoder.layers.{i}"
        state |= _take_layer(
            tensors, our_prefix, their_prefix, d_model, decoder_d_ff, config.decoder
        )
        state |= _take_attention(
            tensors, f"{our_prefix}.cross_attention", f"{their_prefix}.encoder_attn", d_model
        )
    if config.positions is Positions.learned:
        for stack in ("encoder", "decoder"):
            state[f"{stack}_positions"] = tensors.take(
                f"{stack}.embed_positions.weight", config.num_positions, d_model
            )
    if config.norm is Norm.pre:
        state |= _take_weight_and_bias(tensors, "encoder_norm", "encoder.layer_norm", d_model)
        state |= _take_weight_and_bias(tensors, "decoder_norm", "decoder.layer_norm", d_model)
    tensors.check_all_taken()
    return state


def _take_layer(
    tensors: TensorFile,
    our_prefix: str,
    their_prefix: str,
    d_model: int,
    d_ff: int,
    decoder: Decoder = Decoder.attention,
) -> Weights:
    """Take the self-attention or the SSRU (simpler simple recurrent unit), and the feed-forward
    network of one layer.

    `our_prefix` and `their_prefix` are the prefixes of our names and of the names in the file.
    """
    if decoder is Decoder.ssru:
        layer = _take_ssru(tensors, f"{our_prefix}.ssru", f"{their_prefix}.ssru", d_model)
    else:
        layer = _take_attention(
            tensors, f"{our_prefix}.self_attention", f"{their_prefix}.self_attn", d_model
        )
    layer |= _take_weight_and_bias(
        tensors, f"{our_prefix}.feed_forward.inner", f"{their_prefix}.fc1", d_ff, d_model
    )
    layer |= _take_weight_and_bias(
        tensors, f"{our_prefix}.feed_forward.outer", f"{their_prefix}.fc2", d_model, d_ff
    )
    layer |= _take_weight_and_bias(
        tensors, f"{our_prefix}.feed_forward_norm", f"{their_prefix}.final_layer_norm", d_model
    )
    return layer


def _take_ssru(tensors: TensorFile, our_prefix: str, their_prefix: str, d_model: int) -> Weights:
    """Take an SSRU and its norm."""
    candidate_weight = tensors.take(f"{their_prefix}.candidate.weight", d_model, d_model)
    ssru = {f"{our_prefix}.candidate.weight": candidate_weight}
    ssru |= _take_weight_and_bias(
        tensors, f"{our_prefix}.forget_gate", f"{their_prefix}.forget_gate", d_model, d_model
    )
    ssru |= _take_weight_and_bias(
        tensors, f"{our_prefix}_norm", f"{their_prefix}_layer_norm", d_model
    )
    return ssru


def _take_attention(
    tensors: TensorFile, our_prefix: str, their_prefix: str, d_model: int
) -> Weights:
    """Take an attention and its norm. Three projections (D, D) become one (3D, D)."""
    projection_weights = []
    projection_biases = []
    for name in ("q_proj", "k_proj", "v_proj"):
        projection_weights.append(tensors.take(f"{their_prefix}.{name}.weight", d_model, d_model))
        projection_biases.append(tensors.take(f"{their_prefix}.{name}.bias", d_model))
    attention = {
        f"{our_prefix}.in_projection.weight": torch.cat(projection_weights),  # (3D, D)
        f"{our_prefix}.in_projection.bias": torch.cat(projection_biases),  # (3D,)
    }
    attention |= _take_weight_and_bias(
        tensors, f"{our_prefix}.out_projection", f"{their_prefix}.out_proj", d_model, d_model
    )
    attention |= _take_weight_and_bias(
        tensors, f"{our_prefix}_norm", f"{their_prefix}_layer_norm", d_model
    )
    return attention


def _take_weight_and_bias(
    tensors: TensorFile, our_prefix: str, their_prefix: str, *shape: int
) -> Weights:
    """Take the weight, of the given shape, and the bias of a linear layer or a layer norm."""
    return {
        f"{our_prefix}.weight": tensors.take(f"{their_prefix}.weight", *shape),
        f"{our_prefix}.bias": tensors.take(f"{their_prefix}.bias", shape[0]),
    }


def drop_tied_copies(tensors: TensorFile, *, must_tie_output: bool = False) -> EmbeddingLayout:
    """Remove copies of the target's embedding. Returns which embeddings remain.

    The embedding of the source or the output layer is such a copy if it has the same values. With
    `must_tie_output`, raises `ModelError` for an output layer with other values.
    """
    src_name = "encoder.embed_tokens.weight"
    tgt_name = "decoder.embed_tokens.weight"
    # an embedding that is missing in the file has the values of "shared.weight"
    if "shared.weight" in tensors:
        shared = tensors.get_matrix("shared.weight")
        for name in (src_name, tgt_name):
            if name not in tensors:
                tensors.add(name, shared)
        tensors.drop("shared.weight")
    vocab_size = len(tensors.get_matrix(tgt_name))
    src_vocab_size: int | None = len(tensors.get_matrix(src_name))
    has_tied_output = "output.weight" not in tensors or tensors.are_equal("output.weight", tgt_name)
    if must_tie_output and not has_tied_output:
        raise ModelError(
            f"{tensors.path} has an output layer that is not the embedding, though its config says "
            "that they are tied; correct the config"
        )
    if has_tied_output:
        tensors.drop("output.weight")
    if tensors.are_equal(src_name, tgt_name):
        tensors.drop(src_name)
        src_vocab_size = None
    return EmbeddingLayout(
        vocab_size=vocab_size, src_vocab_size=src_vocab_size, has_tied_output=has_tied_output
    )


def _is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor is strided, on the CPU, and not expanded.

    An expanded tensor is larger than its storage: a small file could fill the memory.
    """
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return False
    return tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.element_size()


# --- files of weights


def find_pt_file(path: Path) -> Path:
    """Return the file `path`, or the only `.pt` file in the folder `path`.

    Raises `ModelError` for a folder without such a file, or with several.
    """
    if not path.is_dir():
        return path
    files = sorted(path.glob("*.pt"))
    if len(files) != 1:
        names = ", ".join(file.name for file in files) if files else "none"
        raise ModelError(f"{path} must hold one .pt file, but holds {names}; give input=FILE")
    return files[0]


def load_pickle(path: Path) -> dict[str, Any]:
    """Read the dictionary that `torch.save` wrote: tensors, primitives and `argparse.Namespace`.

    No code of the file runs. Raises `ModelError` for a file that is damaged or needs other classes.
    """
    try:
        return load_torch_file(path, use_mmap=True)
    except pickle.UnpicklingError as error:
        # torch's message names the class, for example as "GLOBAL os.system"
        match = re.search(r"(?:GLOBAL|class) (?P<name>[\w.]+)", str(error))
        class_name = match["name"] if match else "an object that is not a tensor"
        raise ModelError(
            f"{path} wants to load {class_name}, and nmt runs no code of files; save the weights "
            "only, for example as safetensors"
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ModelError(f"{path} cannot be read ({reason}); copy it again") from None
