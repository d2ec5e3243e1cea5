"""Weights of another toolkit: files that hold tensors and nothing that runs, and the way from their
names, which are brought to those of fairseq and transformers, to ours. Every tensor has to have the
shape that the model's config gives it, and has to be used exactly once.
"""

# V vocab, D d_model, F d_ff

from __future__ import annotations

import argparse
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor
from torch.serialization import safe_globals

from nmt.config import ModelConfig, Norm
from nmt.errors import ModelError

Weights = dict[str, Tensor]
_KINDS = ("weight", "bias")
_HEADS = ("q_proj", "k_proj", "v_proj")
_POSITIONS_TOLERANCE = 2e-3  # of float16, and of large angles in float32


class Sizes(NamedTuple):
    """What the embeddings of a file are."""

    vocab_size: int  # rows of the target's
    src_vocab_size: int | None  # of that of the source, if it has one
    is_tied: bool  # the output layer is the target's embedding


class Tensors:
    """The tensors of a file by name; each is taken once."""

    def __init__(self, path: Path, tensors: Weights) -> None:
        self.path = path
        self._tensors = tensors

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def names(self) -> list[str]:
        """Return the names of what has not been taken."""
        return list(self._tensors)

    def take(self, name: str, *shape: int) -> Tensor:
        """Remove and return a tensor in float32; one that is missing, of another shape, of no
        floating-point type or not finite is a `ModelError`.
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
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ModelError(f"{self.path}: {name} is {kind}; quantized weights are not imported")
        tensor = tensor.float()
        if not torch.isfinite(tensor.sum(dtype=torch.float64)):
            raise ModelError(f"{self.path}: {name} holds numbers that are not finite; use another")
        return tensor

    def rename(self, change: Callable[[str], str]) -> None:
        """Rename all tensors; two of one new name, or what is none, are a `ModelError`."""
        if not all(isinstance(tensor, Tensor) for tensor in self._tensors.values()):
            raise ModelError(f"{self.path} holds something else than weights; it is no model")
        renamed = {change(name): tensor for name, tensor in self._tensors.items()}
        if len(renamed) < len(self._tensors):
            raise ModelError(f"{self.path} holds one tensor under two names; make the file again")
        self._tensors = renamed

    def peek(self, name: str) -> Tensor:
        """Return a matrix and leave it there; a missing one is a `ModelError`."""
        if name not in self._tensors or self._tensors[name].dim() != 2:
            raise ModelError(f"{self.path} lacks the matrix {name}; it is no model of this kind")
        return self._tensors[name]

    def num_rows(self, name: str) -> int:
        """Return the first dimension of a tensor that is there."""
        return self._tensors[name].size(0)

    def are_equal(self, one: str, other: str) -> bool:
        """Return whether two tensors hold the same numbers."""
        a, b = self._tensors[one], self._tensors[other]
        return a.shape == b.shape and (a.data_ptr() == b.data_ptr() or bool((a == b).all()))

    def drop(self, name: str) -> None:
        """Forget a tensor, if it is there, that says nothing new."""
        self._tensors.pop(name, None)

    def move(self, name: str, new_name: str) -> None:
        """Give one tensor another name."""
        self._tensors[new_name] = self._tensors.pop(name)

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor that the file leaves out."""
        self._tensors[name] = tensor

    def has_positions(self, name: str, compute: Callable[[int], Tensor]) -> bool:
        """Return whether a stored table of positions (P, D), possibly with dimensions of one, is
        what `compute(P)` gives; one that is not there is.
        """
        if name not in self._tensors:
            return True
        stored = self._tensors[name].float()
        stored = stored.reshape(-1, stored.size(-1))
        wanted = compute(len(stored))
        fits = stored.shape == wanted.shape
        return fits and bool((stored - wanted).abs().max() <= _POSITIONS_TOLERANCE)

    def settle_bias(self, name: str) -> bool:
        """Rename the bias of the output layer, (V,) or (1, V), to `output.bias`, or forget it if it
        is zero; return whether there is one.
        """
        bias = self._tensors.pop(name, None)
        if bias is None or not bias.any():
            return False
        self._tensors["output.bias"] = bias.flatten()
        return True

    def finish(self) -> None:
        """Raise a `ModelError` that names tensors which nothing has taken."""
        if self._tensors:
            names = ", ".join(sorted(self._tensors)[:3])
            raise ModelError(
                f"{self.path} holds {len(self._tensors)} tensors that this architecture has not: "
                f"{names}"
            )


def to_state(tensors: Tensors, config: ModelConfig, sizes: Sizes) -> Weights:
    """Take all tensors, named as in fairseq, and return them as our state dict.

    The names are `{encoder,decoder}.layers.N.self_attn.q_proj.weight` and so on, for the output
    layer `output.weight` and `output.bias`; docs/formats.md has ours.
    """
    d_model, state = config.d_model, dict[str, Tensor]()
    vocab_size, src_vocab_size, _ = sizes
    if src_vocab_size is not None:
        taken = tensors.take("encoder.embed_tokens.weight", src_vocab_size, d_model)
        state["src_embedding.weight"] = taken
    state["embedding.weight"] = tensors.take("decoder.embed_tokens.weight", vocab_size, d_model)
    if not config.tied_output:
        state["output_weight"] = tensors.take("output.weight", vocab_size, d_model)
    if config.output_bias:
        state["output_bias"] = tensors.take("output.bias", vocab_size)
    depths = {"encoder": config.num_encoder_layers, "decoder": config.num_decoder_layers}
    for stack, depth in depths.items():
        for i in range(depth):
            _take_layer(tensors, config, f"{stack}.layers.{i}", f"{stack}_layers.{i}", state)
        if config.norm is Norm.pre:
            for kind in _KINDS:
                taken = tensors.take(f"{stack}.layer_norm.{kind}", d_model)
                state[f"{stack}_norm.{kind}"] = taken
    tensors.finish()
    return state


def _take_layer(
    tensors: Tensors, config: ModelConfig, theirs: str, ours: str, state: Weights
) -> None:
    """Take the tensors of one layer; the three projections of an attention become one."""
    d_model, d_ff = config.d_model, config.d_ff
    attentions = {"self_attn": "self_attention"}
    if theirs.startswith("decoder"):
        attentions["encoder_attn"] = "cross_attention"
    for kind in _KINDS:
        rows = (d_model,) if kind == "weight" else ()  # the inner dimension
        for name, own in attentions.items():
            blocks = [f"{theirs}.{name}.{head}.{kind}" for head in _HEADS]
            parts = [tensors.take(block, d_model, *rows) for block in blocks]
            state[f"{ours}.{own}.in_projection.{kind}"] = torch.cat(parts)  # (3D, D)
            output = tensors.take(f"{theirs}.{name}.out_proj.{kind}", d_model, *rows)
            state[f"{ours}.{own}.out_projection.{kind}"] = output
            norm = tensors.take(f"{theirs}.{name}_layer_norm.{kind}", d_model)
            state[f"{ours}.{own}_norm.{kind}"] = norm
        inner = (d_ff, d_model) if rows else (d_ff,)
        outer = (d_model, d_ff) if rows else (d_model,)
        state[f"{ours}.feed_forward.inner.{kind}"] = tensors.take(f"{theirs}.fc1.{kind}", *inner)
        state[f"{ours}.feed_forward.outer.{kind}"] = tensors.take(f"{theirs}.fc2.{kind}", *outer)
        norm = tensors.take(f"{theirs}.final_layer_norm.{kind}", d_model)
        state[f"{ours}.feed_forward_norm.{kind}"] = norm


def settle_embeddings(tensors: Tensors, *, is_tied: bool) -> Sizes:
    """Leave one tensor of each embedding and of the output layer, where files hold copies.

    `is_tied` is what the config says of the output layer; a file that contradicts it is a
    `ModelError`.
    """
    src, tgt = "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"
    for name in (src, tgt):
        if "shared.weight" in tensors and name not in tensors:
            tensors.add(name, tensors.peek("shared.weight"))
    tensors.drop("shared.weight")
    vocab_size, src_vocab_size = len(tensors.peek(tgt)), len(tensors.peek(src))
    has_output = "output.weight" in tensors
    is_same = not has_output or tensors.are_equal("output.weight", tgt)
    if is_tied and not is_same:
        raise ModelError(
            f"{tensors.path} has an output layer that is not the embedding, though its config says "
            "that they are tied; correct the config"
        )
    if is_same:
        tensors.drop("output.weight")
    if tensors.are_equal(src, tgt):
        tensors.drop(src)
        return Sizes(vocab_size, None, is_same)
    return Sizes(vocab_size, src_vocab_size, is_same)


# --- files


def load_safetensors(path: Path) -> Weights:
    """Read the tensors of a file; a damaged one is a `ModelError`."""
    try:
        return safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, OSError) as error:
        raise ModelError(f"{path} cannot be read ({error}); copy it again") from None


def find_pickle(path: Path) -> Path:
    """Return the only `.pt` in a folder; that of several which is meant has to be named."""
    found = [path] if path.is_file() else sorted(path.glob("*.pt"))
    if len(found) != 1:
        names = ", ".join(file.name for file in found) or "none"
        raise ModelError(f"{path} holds not one .pt file ({names}); give input=FILE")
    return found[0]


def load_pickle(path: Path) -> dict[str, Any]:
    """Read the dictionary that `torch.save` wrote: tensors, primitives and `argparse.Namespace`, no
    other class.

    A file that is damaged, or that wants any other class or function, is a `ModelError`; nothing of
    it runs.
    """
    try:
        is_zip = zipfile.is_zipfile(path)
        if is_zip and any(member.compress_type for member in zipfile.ZipFile(path).infolist()):
            raise ValueError("compressed, which torch would take for numbers")
        with safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of files that are refused
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)|class ([\w.]+)", str(error))
        what = found[1] or found[2] if found else "what is no tensor"
        raise ModelError(
            f"{path} wants to load {what}, and nmt runs no code of files; save the weights alone, "
            "for example as safetensors"
        ) from None
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, AttributeError) as error:
        reason = " ".join(str(error).split())[:100]
        raise ModelError(f"{path} cannot be read ({reason}); copy it again") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds no dictionary; it is no model")
    return content
