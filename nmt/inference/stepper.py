"""What search knows of a model: three calls. `ModelStepper` is the one for a Transformer."""

# B sentences, S source, K beams, V vocab; rows = B * K, the beams of a sentence side by side

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from nmt.model.transformer import DecoderCache, Memory, Transformer


class Stepper(Protocol):
    """A model that predicts one token at a time; an ensemble is one more of these."""

    device: torch.device

    def start(self, src: Tensor, src_lengths: Tensor) -> Any:
        """Encode source ids (B, S) and return the state of B rows, one a sentence."""

    def step(self, tokens: Tensor, state: Any) -> Tensor:
        """Add the newest `tokens` (rows,) and return log-probabilities of the next (rows, V) in
        float32.
        """

    def reorder(self, state: Any, rows: Tensor, num_beams: int) -> Any:
        """Keep the rows given (B' * num_beams,), in that order; those of a sentence come from that
        sentence's.
        """


@dataclass
class ModelState:
    """The encoded sentences and the cached target positions of their beams."""

    memory: Memory  # B rows
    cache: DecoderCache  # B * K rows
    num_beams: int


class ModelStepper:
    """Steps through a `Transformer` with a cache of keys and values."""

    def __init__(self, model: Transformer, dtype: torch.dtype = torch.float32) -> None:
        self.model = model.eval()
        self.dtype = dtype
        self.device = model.embedding.weight.device

    def start(self, src: Tensor, src_lengths: Tensor) -> ModelState:
        """See `Stepper.start`."""
        with self._autocast():
            memory = self.model.encode(src.to(self.device), src_lengths.to(self.device))
        return ModelState(memory, DecoderCache(self.model.config.num_decoder_layers), num_beams=1)

    def step(self, tokens: Tensor, state: ModelState) -> Tensor:
        """See `Stepper.step`."""
        with self._autocast():
            hidden = self.model.decode(
                tokens.unsqueeze(1), state.memory, state.cache
            )  # (rows, 1, D)
            logits = self.model.logits(hidden.squeeze(1))  # (rows, V)
        return torch.log_softmax(logits.float(), dim=-1)

    def reorder(self, state: ModelState, rows: Tensor, num_beams: int) -> ModelState:
        """See `Stepper.reorder`."""
        sentences = rows[::num_beams] // state.num_beams  # (B',)
        memory = state.memory
        if len(sentences) != memory.hidden.size(0):
            memory = memory.select(sentences)
        state.cache.reorder(rows)
        return ModelState(memory, state.cache, num_beams)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.dtype is torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)
