"""What search knows of a model: three calls, two more when it asks for attention, and one to score
given text. `ModelStepper` is the one for a Transformer.
"""

# B sentences, S source, T target, D d_model, V vocab
# rows, the live hypotheses, sorted by sentence; a sentence has as many as are alive

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nmt.model.fast import FastTransformer
from nmt.model.fast.cache import DecoderCache
from nmt.model.fast.packing import pack
from nmt.model.transformer import AttentionRecord, alignment_layer

MAX_LOGITS = 1 << 24  # of one piece when scoring, 64 MiB in float32


class Stepper(Protocol):
    """A model that predicts one token at a time; an ensemble is one more of these."""

    device: torch.device

    def start(self, src: Tensor, src_lengths: Tensor) -> Any:
        """Encode source ids (B, S) and return the state of B rows, one a sentence."""

    def step(self, tokens: Tensor, state: Any) -> Tensor:
        """Add the newest `tokens` (rows,) and return log-probabilities of the next (rows, V) in
        float32.
        """

    def reorder(self, state: Any, rows: Tensor) -> Any:
        """Go on with these rows (rows',), sorted by sentence; one may stand there repeatedly."""


class AttentiveStepper(Stepper, Protocol):
    """A stepper that can also say what it attends to."""

    def watch(self, state: Any) -> None:
        """Record attention in every step from now on."""

    def attention(self, state: Any) -> Tensor:
        """Return the attention of the last step to the source (rows, S), each row a sum of 1, in
        float32; it may be wider, with zeros at the end.
        """


@dataclass(frozen=True)
class Scored:
    """What a model says of given targets."""

    log_probs: Tensor  # (B, T), nats, of each token
    attention: Tensor | None  # (B, T, S), when asked for


class Scorer(Protocol):
    """A model that judges given text."""

    device: torch.device

    def score(
        self, src: Tensor, src_lengths: Tensor, tgt_in: Tensor, tgt_out: Tensor, *, attention: bool
    ) -> Scored:
        """Score `tgt_out` (B, T) after BOS and what stands before each token, `tgt_in` (B, T)."""


class Model(AttentiveStepper, Scorer, Protocol):
    """All that search and scoring may ask of a model, or of an ensemble."""


@dataclass
class ModelState:
    """The encoded sentences and the cached target positions of their hypotheses."""

    cache: DecoderCache
    record: AttentionRecord | None = None  # of the last step, when watched


class ModelStepper:
    """Steps through a `Transformer` with a cache of keys and values."""

    def __init__(self, model: FastTransformer, dtype: torch.dtype = torch.float32) -> None:
        self.model = model.eval()
        self.dtype = dtype
        self.device = model.embedding.weight.device
        layer: Any = model.decoder_layers[alignment_layer(model.config.num_decoder_layers)]
        self.aligner: nn.Module = layer.cross_attention

    def start(self, src: Tensor, src_lengths: Tensor) -> ModelState:
        """See `Stepper.start`."""
        with self._autocast():
            return ModelState(self.model.start(src.to(self.device), src_lengths))

    def step(self, tokens: Tensor, state: ModelState) -> Tensor:
        """See `Stepper.step`."""
        with self._autocast():
            hidden = self.model.step(tokens, state.cache, state.record)  # (rows, D)
            logits = self.model.logits(hidden)  # (rows, V)
        return torch.log_softmax(logits.float(), dim=-1)

    def reorder(self, state: ModelState, rows: Tensor) -> ModelState:
        """See `Stepper.reorder`; the state is changed in place."""
        state.cache.reorder(rows)
        return state

    def watch(self, state: ModelState) -> None:
        """See `AttentiveStepper.watch`."""
        state.record = {self.aligner: None}

    def attention(self, state: ModelState) -> Tensor:
        """See `AttentiveStepper.attention`."""
        assert state.record is not None
        weights = state.record[self.aligner]  # (rows, H, 1, S)
        assert weights is not None
        return weights.mean(dim=1)[:, -1]  # (rows, S)

    @torch.inference_mode()
    def score(
        self, src: Tensor, src_lengths: Tensor, tgt_in: Tensor, tgt_out: Tensor, *, attention: bool
    ) -> Scored:
        """See `Scorer.score`; logits are formed in pieces, so that memory stays bounded."""
        record: AttentionRecord | None = {self.aligner: None} if attention else None
        sources = pack(src_lengths.tolist()).to(self.device)
        targets = pack([tgt_in.size(1)] * tgt_in.size(0)).to(self.device)  # padding is harmless
        wanted_ids = tgt_out.to(self.device).flatten()  # (B * T,)
        with self._autocast():
            hidden = self.model(
                sources.unpad(src.to(self.device)),
                sources,
                tgt_in.to(self.device).flatten(),
                targets,
                record,
            )  # (B * T, D)
            size = max(1, MAX_LOGITS // self.model.embedding.weight.size(0))
            losses = [
                F.cross_entropy(self.model.logits(part).float(), wanted, reduction="none")
                for part, wanted in zip(
                    torch.split(hidden, size), torch.split(wanted_ids, size), strict=True
                )
            ]
        log_probs = -torch.cat(losses).view(tgt_out.shape)  # (B, T)
        weights = None if record is None else record[self.aligner]  # (B, H, T, S)
        return Scored(log_probs, None if weights is None else weights.mean(dim=1))

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.dtype is torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)
