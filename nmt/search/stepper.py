"""`Stepper`, the interface between models and search, and its implementations: a Transformer and
an ensemble of models with one vocabulary.
"""

# B sentences, S source, T target, D d_model, V vocab, M members of an ensemble
# R live hypotheses, sorted by sentence; sentences may have different numbers of them

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from nmt.config import Combine, choose
from nmt.errors import ConfigError
from nmt.model.alignment import alignment_attention, mean_alignment
from nmt.model.attention import AttentionWeights
from nmt.model.fast import FastTransformer
from nmt.model.fast.decode import DecodingState
from nmt.model.fast.packing import pack
from nmt.model.fast.single import SingleState
from nmt.model.fast.transfer import to_device

MAX_LOGITS = 1 << 24  # number of logits computed at a time in `score`; they take 64 MiB in float32
STEP_ROWS = 128  # number of hypotheses whose logits a CPU computes at a time in `step`


class Scored(NamedTuple):
    """Return value of `Stepper.score`."""

    log_probs: Tensor  # (B, T): the log-probability of each target token, in nats
    attention: Tensor | None  # (B, T, S): attention to the source, if requested


class Stepper(Protocol):
    """A model that predicts one token at a time, and scores given targets."""

    device: torch.device
    shifts_alignment: bool
    """The setting `alignment_shift` of the model. If True, the attention of a step aligns the token
    that the decoder reads in this step. If False, it aligns the token that the step predicts.
    """

    def start(self, src: Tensor, src_lengths: Tensor, *, with_attention: bool = False) -> Any:
        """Encode source ids (B, S); `src_lengths` (B,) exclude the padding.

        Returns the state of the model with one empty hypothesis per sentence (R = B). With
        `with_attention`, each step records the attention to the source.
        """

    def start_single(self, src: Tensor, src_lengths: Tensor) -> Any:
        """Like `start`, for one sentence with few hypotheses. May be faster on a CPU.

        The returned state supports neither `join` nor `attention`.
        """

    def step(self, tokens: Tensor, state: Any) -> Tensor:
        """Append a token (R,) to each hypothesis.

        Returns the log-probabilities of the next token (R, V), in float32.
        """

    def step_unnormalized(self, tokens: Tensor, state: Any) -> Tensor:
        """Like `step`, but the model may add a constant to each row of the result (R, V).

        The state must be from `start`.
        """

    def reorder(self, state: Any, rows: Tensor) -> Any:
        """Keep the hypotheses at `rows`, in that order; return the new state.

        `rows` (R',) is a CPU tensor, sorted by sentence. A row may be repeated or missing.
        """

    def join(self, state: Any, src: Tensor, src_lengths: Tensor) -> Any:
        """Append sentences (B, S) to `state`, with one empty hypothesis each."""

    def attention(self, state: Any) -> Tensor:
        """Return the attention (R, S) to the source in the last step, in float32.

        Each row sums to 1. The result may have more than S columns, which are 0.
        """

    def score(
        self,
        src: Tensor,
        src_lengths: Tensor,
        tgt_in: Tensor,
        tgt_out: Tensor,
        *,
        with_attention: bool,
    ) -> Scored:
        """Score target ids `tgt_out` (B, T), which end with EOS.

        The decoder reads `tgt_in` (B, T): BOS and the target ids without EOS.
        """


class ModelState(NamedTuple):
    """The state of a `ModelStepper`; its methods change it in place."""

    decoding: DecodingState | SingleState
    attention_out: AttentionWeights | None
    """A dictionary in which the model stores the attention weights of each step, if requested."""


class ModelStepper:
    """Predicts with a `Transformer` and a cache of keys and values.

    `dtype` is the number format for autocast.
    """

    def __init__(self, model: FastTransformer, dtype: torch.dtype = torch.float32) -> None:
        self.model = model.eval()
        self.dtype = dtype
        self.device = model.embedding.weight.device
        self._alignment_module = alignment_attention(model)
        self.shifts_alignment = model.config.alignment_shift

    def start(
        self, src: Tensor, src_lengths: Tensor, *, with_attention: bool = False
    ) -> ModelState:
        """See `Stepper.start`; `src_lengths` is on the CPU."""
        with self._autocast():
            decoding = self.model.start(to_device(src, self.device), src_lengths)
        attention_out = self._make_attention_out() if with_attention else None
        return ModelState(decoding, attention_out)

    def start_single(self, src: Tensor, src_lengths: Tensor) -> ModelState:
        """See `Stepper.start_single`."""
        with self._autocast():
            decoding = self.model.start_single(to_device(src, self.device), src_lengths)
        return ModelState(decoding, None)

    def step(self, tokens: Tensor, state: ModelState) -> Tensor:
        """See `Stepper.step`."""
        if isinstance(state.decoding, SingleState):
            # without autocast, since the layers of `SingleState` already compute in `dtype`
            return state.decoding.step(tokens)
        with self._autocast():
            hidden = self.model.step(tokens, state.decoding, state.attention_out)  # (R, D)
            # autograd does not support `out=`, which the loop below uses
            if self.device.type != "cpu" or torch.is_grad_enabled():
                return torch.log_softmax(self.model.logits(hidden).float(), dim=-1)
            # on a CPU, compute a few rows at a time, so that the logits stay in the caches
            log_probs = torch.empty(len(hidden), len(self.model.output_matrix))
            for start in range(0, len(hidden), STEP_ROWS):
                block = slice(start, start + STEP_ROWS)
                logits = self.model.logits(hidden[block]).float()
                torch.log_softmax(logits, dim=-1, out=log_probs[block])
        return log_probs  # (R, V)

    def step_unnormalized(self, tokens: Tensor, state: ModelState) -> Tensor:
        """See `Stepper.step_unnormalized`; the state must be from `start`."""
        assert isinstance(state.decoding, DecodingState)
        with self._autocast():
            hidden = self.model.step(tokens, state.decoding, state.attention_out)  # (R, D)
            return self.model.logits(hidden).float()  # (R, V)

    def reorder(self, state: ModelState, rows: Tensor) -> ModelState:
        """See `Stepper.reorder`."""
        state.decoding.reorder(rows)
        return state

    def join(self, state: ModelState, src: Tensor, src_lengths: Tensor) -> ModelState:
        """See `Stepper.join`."""
        assert isinstance(state.decoding, DecodingState)
        with self._autocast():
            self.model.join(state.decoding, to_device(src, self.device), src_lengths)
        return state

    def attention(self, state: ModelState) -> Tensor:
        """See `Stepper.attention`."""
        assert state.attention_out is not None
        weights = self._attention_to_source(state.attention_out)  # (R, 1, S)
        return weights.squeeze(1)  # (R, S)

    @torch.inference_mode()
    def score(
        self,
        src: Tensor,
        src_lengths: Tensor,
        tgt_in: Tensor,
        tgt_out: Tensor,
        *,
        with_attention: bool,
    ) -> Scored:
        """See `Stepper.score`; computes `MAX_LOGITS` logits at a time to bound the memory."""
        attention_out = self._make_attention_out() if with_attention else None
        # (B,), without EOS for models whose encoder does not read it
        encoded_lengths = self.model.encoded_lengths(src_lengths)
        src_packing = pack(encoded_lengths.tolist()).to(self.device)
        # Targets are packed together with their padding. The padding follows the tokens of its
        # target, so a causal decoder does not attend to it.
        num_sentences, tgt_length = tgt_in.shape
        tgt_packing = pack([tgt_length] * num_sentences).to(self.device)
        target_ids = to_device(tgt_out, self.device).flatten()  # (B * T,)
        with self._autocast():
            padded_src = to_device(src[:, : src_packing.longest], self.device)  # (B, S)
            src_ids = src_packing.unpad(padded_src)
            tgt_ids = to_device(tgt_in, self.device).flatten()
            hidden = self.model(src_ids, src_packing, tgt_ids, tgt_packing, attention_out)
            vocab_size = self.model.output_matrix.size(0)
            num_rows = max(1, MAX_LOGITS // vocab_size)
            losses = []
            for start in range(0, len(hidden), num_rows):
                block = slice(start, start + num_rows)
                logits = self.model.logits(hidden[block]).float()
                losses.append(F.cross_entropy(logits, target_ids[block], reduction="none"))
        log_probs = -torch.cat(losses).view(tgt_out.shape)  # (B, T)
        if attention_out is None:
            return Scored(log_probs, None)
        return Scored(log_probs, self._attention_to_source(attention_out))

    def _make_attention_out(self) -> AttentionWeights:
        """Return a dictionary in which the model stores the weights of `_alignment_module`."""
        return {self._alignment_module: None}  # None until the model runs

    def _attention_to_source(self, attention_out: AttentionWeights) -> Tensor:
        """Return the weights in `attention_out`, averaged over heads that align words, (B, T, S).

        If the encoder of the model does not read EOS, adds a column of zeros for EOS.
        """
        weights = attention_out[self._alignment_module]  # (B, H, T, S)
        assert weights is not None
        mean = mean_alignment(weights, self.model.config)  # (B, T, S)
        return F.pad(mean, (0, 1)) if self.model.drops_eos else mean

    def _autocast(self) -> AbstractContextManager[Any]:
        """Return a context manager for computing in `dtype`."""
        if self.dtype is torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)


class EnsembleStepper:
    """Averages the probabilities or log-probabilities of several models, the members.

    Means of log-probabilities are not renormalized. The log-probability of a sentence is therefore
    the mean of its log-probabilities by the members. Attention is averaged, too.
    """

    def __init__(
        self, members: Sequence[Stepper], combine: Combine | str = Combine.probabilities
    ) -> None:
        self.members = list(members)
        self.combine = choose(Combine, "combine", combine)
        self.device = self.members[0].device
        self.shifts_alignment = self.members[0].shifts_alignment

    def start(self, src: Tensor, src_lengths: Tensor, *, with_attention: bool = False) -> list[Any]:
        """See `Stepper.start`; returns the state of each member."""
        if with_attention:
            self._check_alignment()
        return [
            member.start(src, src_lengths, with_attention=with_attention) for member in self.members
        ]

    def start_single(self, src: Tensor, src_lengths: Tensor) -> list[Any]:
        """See `Stepper.start_single`."""
        return [member.start_single(src, src_lengths) for member in self.members]

    def step(self, tokens: Tensor, state: list[Any]) -> Tensor:
        """See `Stepper.step`."""
        log_probs = [member.step(tokens, state[i]) for i, member in enumerate(self.members)]
        return self._mean(log_probs)  # (R, V)

    def step_unnormalized(self, tokens: Tensor, state: list[Any]) -> Tensor:
        """See `Stepper.step_unnormalized`; members are combined after normalization."""
        return self.step(tokens, state)

    def reorder(self, state: list[Any], rows: Tensor) -> list[Any]:
        """See `Stepper.reorder`."""
        return [member.reorder(state[i], rows) for i, member in enumerate(self.members)]

    def join(self, state: list[Any], src: Tensor, src_lengths: Tensor) -> list[Any]:
        """See `Stepper.join`."""
        return [member.join(state[i], src, src_lengths) for i, member in enumerate(self.members)]

    def attention(self, state: list[Any]) -> Tensor:
        """See `Stepper.attention`."""
        weights = [member.attention(state[i]) for i, member in enumerate(self.members)]
        return torch.stack(weights).mean(dim=0)  # (R, S)

    def score(
        self,
        src: Tensor,
        src_lengths: Tensor,
        tgt_in: Tensor,
        tgt_out: Tensor,
        *,
        with_attention: bool,
    ) -> Scored:
        """See `Stepper.score`."""
        if with_attention:
            self._check_alignment()
        scores = [
            member.score(src, src_lengths, tgt_in, tgt_out, with_attention=with_attention)
            for member in self.members
        ]
        weights = [score.attention for score in scores if score.attention is not None]
        mean = torch.stack(weights).mean(dim=0) if weights else None  # (B, T, S)
        return Scored(self._mean([score.log_probs for score in scores]), mean)

    def _check_alignment(self) -> None:
        """Raise a `ConfigError` if the members differ in `Stepper.shifts_alignment`."""
        if len({member.shifts_alignment for member in self.members}) > 1:
            raise ConfigError(
                "the models align words in different steps (model.alignment_shift); remove "
                "alignment and coverage_penalty, or use models with equal alignment_shift"
            )

    def _mean(self, log_probs: list[Tensor]) -> Tensor:
        """Combine the log-probabilities of the members, tensors of equal shapes."""
        stacked = torch.stack(log_probs)  # (M, ...)
        if self.combine is Combine.log_probabilities:
            return stacked.mean(dim=0)
        # the logarithm of the mean of probabilities
        return stacked.logsumexp(dim=0) - math.log(len(log_probs))
