"""What search and scoring know of a model, and its two implementations: a Transformer, and several
models with one vocabulary as one.
"""

# B sentences, S source, T target, D d_model, V vocab, M members of an ensemble
# rows, the live hypotheses, sorted by sentence; a sentence has as many as are alive

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nmt.config import Combine, choose
from nmt.model.fast import FastTransformer
from nmt.model.fast.cache import DecoderCache
from nmt.model.fast.packing import pack
from nmt.model.fast.transfer import send
from nmt.model.transformer import AttentionRecord, alignment_layer

MAX_LOGITS = 1 << 24  # computed at a time when scoring, 64 MiB in float32
STEP_ROWS = 128  # of logits that a CPU computes at a time in a step


class Scored(NamedTuple):
    """What a model gives for given targets."""

    log_probs: Tensor  # (B, T), nats, of each token
    attention: Tensor | None  # (B, T, S), when asked for


class Stepper(Protocol):
    """A model that predicts one token at a time, and scores given text."""

    device: torch.device

    def start(self, src: Tensor, src_lengths: Tensor, *, attention: bool = False) -> Any:
        """Encode source ids (B, S) and return the state of B rows, one a sentence. With
        `attention` it is recorded in every step.
        """

    def step(self, tokens: Tensor, state: Any) -> Tensor:
        """Add the newest `tokens` (rows,) and return log-probabilities of the next (rows, V) in
        float32.
        """

    def reorder(self, state: Any, rows: Tensor) -> Any:
        """Go on with these rows (rows',), on the host, sorted by sentence; a row may be given
        repeatedly.
        """

    def join(self, state: Any, src: Tensor, src_lengths: Tensor) -> Any:
        """Go on with further sentences (B, S) after those of `state`, one row each."""

    def attention(self, state: Any) -> Tensor:
        """Return the attention of the last step to the source (rows, S), each row a sum of 1, in
        float32; it may be wider, with zeros at the end.
        """

    def score(
        self, src: Tensor, src_lengths: Tensor, tgt_in: Tensor, tgt_out: Tensor, *, attention: bool
    ) -> Scored:
        """Score `tgt_out` (B, T) after BOS and what stands before each token, `tgt_in` (B, T)."""


class ModelState(NamedTuple):
    """The encoded sentences and the cached target positions of their hypotheses."""

    cache: DecoderCache
    record: AttentionRecord | None  # of the last step, when asked for


class ModelStepper:
    """Steps through a `Transformer` with a cache of keys and values."""

    def __init__(self, model: FastTransformer, dtype: torch.dtype = torch.float32) -> None:
        self.model = model.eval()
        self.dtype = dtype
        self.device = model.embedding.weight.device
        layer: Any = model.decoder_layers[alignment_layer(model.config.num_decoder_layers)]
        self.aligner: nn.Module = layer.cross_attention

    def start(self, src: Tensor, src_lengths: Tensor, *, attention: bool = False) -> ModelState:
        """See `Stepper.start`."""
        with self._autocast():
            cache = self.model.start(send(src, self.device), src_lengths)  # lengths for the host
        return ModelState(cache, {self.aligner: None} if attention else None)

    def step(self, tokens: Tensor, state: ModelState) -> Tensor:
        """See `Stepper.step`."""
        with self._autocast():
            hidden = self.model.step(tokens, state.cache, state.record)  # (rows, D)
            if self.device.type != "cpu" or torch.is_grad_enabled():
                return torch.log_softmax(self.model.logits(hidden).float(), dim=-1)
            # a few rows at a time, so that the processor's cache holds their logits
            log_probs = hidden.new_empty(len(hidden), len(self.model.output_matrix)).float()
            parts = zip(
                torch.split(hidden, STEP_ROWS), torch.split(log_probs, STEP_ROWS), strict=True
            )
            for part, out in parts:
                torch.log_softmax(self.model.logits(part).float(), dim=-1, out=out)
        return log_probs  # (rows, V)

    def reorder(self, state: ModelState, rows: Tensor) -> ModelState:
        """See `Stepper.reorder`; the state is changed in place."""
        state.cache.reorder(rows)
        return state

    def join(self, state: ModelState, src: Tensor, src_lengths: Tensor) -> ModelState:
        """See `Stepper.join`; the state is changed in place."""
        with self._autocast():
            self.model.join(state.cache, send(src, self.device), src_lengths)
        return state

    def attention(self, state: ModelState) -> Tensor:
        """See `Stepper.attention`."""
        assert state.record is not None
        weights = state.record[self.aligner]  # (rows, H, 1, S)
        assert weights is not None
        return F.pad(weights.mean(dim=1)[:, -1], (0, self.model.num_unread))  # (rows, S)

    @torch.inference_mode()
    def score(
        self, src: Tensor, src_lengths: Tensor, tgt_in: Tensor, tgt_out: Tensor, *, attention: bool
    ) -> Scored:
        """See `Stepper.score`; logits are computed in pieces, so that memory stays bounded."""
        record: AttentionRecord | None = {self.aligner: None} if attention else None
        num_unread = self.model.num_unread
        sources = pack((src_lengths - num_unread).tolist()).to(self.device)
        targets = pack([tgt_in.size(1)] * tgt_in.size(0)).to(self.device)  # padding is harmless
        wanted_ids = send(tgt_out, self.device).flatten()  # (B * T,)
        with self._autocast():
            src = send(src[:, : sources.longest], self.device)
            ids = sources.unpad(src), send(tgt_in, self.device).flatten()
            hidden = self.model(ids[0], sources, ids[1], targets, record)  # (B * T, D)
            size = max(1, MAX_LOGITS // self.model.output_matrix.size(0))
            parts = zip(torch.split(hidden, size), torch.split(wanted_ids, size), strict=True)
            losses = [
                F.cross_entropy(self.model.logits(part).float(), wanted, reduction="none")
                for part, wanted in parts
            ]
        log_probs = -torch.cat(losses).view(tgt_out.shape)  # (B, T)
        weights = None if record is None else record[self.aligner]  # (B, H, T, S)
        if weights is not None:
            weights = F.pad(weights.mean(dim=1), (0, num_unread))  # (B, T, S)
        return Scored(log_probs, weights)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.dtype is torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)


class EnsembleStepper:
    """Averages the probabilities of its members, or their log-probabilities.

    The mean of log-probabilities is not normalized again: a sentence scores the mean of its
    members' scores. Attention is the mean of the members' attention.
    """

    def __init__(
        self, members: Sequence[Stepper], combine: Combine | str = Combine.probabilities
    ) -> None:
        self.members = list(members)
        self.combine = choose(Combine, "combine", combine)
        self.device = self.members[0].device

    def start(self, src: Tensor, src_lengths: Tensor, *, attention: bool = False) -> list[Any]:
        """See `Stepper.start`; the state is that of each member."""
        return [member.start(src, src_lengths, attention=attention) for member in self.members]

    def step(self, tokens: Tensor, state: list[Any]) -> Tensor:
        """See `Stepper.step`."""
        steps = [m.step(tokens, part) for m, part in zip(self.members, state, strict=True)]
        return self._mean(steps)  # (rows, V)

    def reorder(self, state: list[Any], rows: Tensor) -> list[Any]:
        """See `Stepper.reorder`."""
        return [m.reorder(part, rows) for m, part in zip(self.members, state, strict=True)]

    def join(self, state: list[Any], src: Tensor, src_lengths: Tensor) -> list[Any]:
        """See `Stepper.join`."""
        pairs = zip(self.members, state, strict=True)
        return [member.join(part, src, src_lengths) for member, part in pairs]

    def attention(self, state: list[Any]) -> Tensor:
        """See `Stepper.attention`."""
        weights = [m.attention(part) for m, part in zip(self.members, state, strict=True)]
        return torch.stack(weights).mean(dim=0)  # (rows, S)

    def score(
        self, src: Tensor, src_lengths: Tensor, tgt_in: Tensor, tgt_out: Tensor, *, attention: bool
    ) -> Scored:
        """See `Stepper.score`."""
        given = (src, src_lengths, tgt_in, tgt_out)
        scored = [member.score(*given, attention=attention) for member in self.members]
        weights = [part.attention for part in scored if part.attention is not None]
        mean = torch.stack(weights).mean(dim=0) if weights else None  # (B, T, S)
        return Scored(self._mean([part.log_probs for part in scored]), mean)

    def _mean(self, log_probs: list[Tensor]) -> Tensor:
        stacked = torch.stack(log_probs)  # (M, ...)
        if self.combine is Combine.log_probabilities:
            return stacked.mean(dim=0)
        return stacked.logsumexp(dim=0) - math.log(len(log_probs))
