"""Hypotheses: the results of a search, and the beam of those that are still being extended."""

# S source; rows, the live hypotheses, sorted by sentence

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nmt.config import SearchConfig
from nmt.errors import ModelError
from nmt.model.fast.transfer import send
from nmt.search.scoring import score


@dataclass(frozen=True)
class Hypothesis:
    """A translation as token ids, with its scores. A forced prefix is part of it."""

    tokens: list[int]  # EOS last when finished
    log_prob: float  # nats, the sum of token_log_probs
    score: float  # see docs/search.md
    finished: bool  # False when the length limit cut it off
    token_log_probs: list[float]  # nats, one per token; empty if the engine does not report them
    alignment: list[int] | None = None
    """For each token the source position (from 0) with the highest attention; the position after
    the last source token is EOS. None unless the settings ask for it.
    """

    @classmethod
    def from_tokens(
        cls,
        tokens: list[int],
        token_log_probs: list[float],
        config: SearchConfig,
        *,
        eos_id: int,
        coverage: float = 0.0,
        alignment: list[int] | None = None,
    ) -> Hypothesis:
        """Score tokens by `config`; `coverage` comes from `coverage_score`."""
        log_prob = math.fsum(token_log_probs)
        return cls(
            tokens=tokens,
            log_prob=log_prob,
            score=score(log_prob, len(tokens), config, coverage),
            finished=tokens[-1] == eos_id,
            token_log_probs=token_log_probs,
            alignment=alignment if config.alignment else None,
        )


def check_finite(hypotheses: list[Hypothesis]) -> None:
    """Raise a `ModelError` if a sentence has no hypotheses, or one without a log-probability."""
    if not hypotheses or not all(math.isfinite(h.log_prob) for h in hypotheses):
        raise ModelError(
            "the model gives no probabilities (NaN, or none for any token); use another checkpoint"
        )


@dataclass(frozen=True)
class Beam:
    """The live hypotheses of all sentences, one per row, all of the same length."""

    sentences: Tensor  # (rows,), index of the sentence in the batch, on the CPU
    sums: Tensor  # (rows,), log-probability of all tokens so far
    tokens: Tensor  # (rows, length), without BOS
    log_probs: Tensor  # (rows, length), of each token
    alignment: Tensor | None = None  # (rows, length), source position with the highest attention
    attention_sums: Tensor | None = None  # (rows, S), attention to each source position so far

    @classmethod
    def start(
        cls, num_sentences: int, device: torch.device, *, source_length: int | None = None
    ) -> Beam:
        """Return one empty hypothesis per sentence. With `source_length` (S), attention to the
        source can be recorded.
        """
        tokens = torch.zeros(num_sentences, 0, dtype=torch.long, device=device)
        attention_sums = None
        if source_length is not None:
            attention_sums = torch.zeros(num_sentences, source_length, device=device)
        return cls(
            sentences=torch.arange(num_sentences),
            sums=torch.zeros(num_sentences, device=device),
            tokens=tokens,
            log_probs=torch.zeros(num_sentences, 0, device=device),
            alignment=None if source_length is None else tokens,
            attention_sums=attention_sums,
        )

    def __len__(self) -> int:
        return len(self.sums)

    @property
    def length(self) -> int:
        """Number of tokens of each hypothesis, without BOS."""
        return self.tokens.size(1)

    def select(self, rows: Tensor) -> Beam:
        """Keep `rows` (rows',), on the CPU, in that order."""
        index = send(rows, self.sums.device)
        alignment = self.alignment
        attention_sums = self.attention_sums
        if alignment is not None:
            alignment = alignment.index_select(0, index)
        if attention_sums is not None:
            attention_sums = attention_sums.index_select(0, index)
        return Beam(
            sentences=self.sentences[rows],
            sums=self.sums.index_select(0, index),
            tokens=self.tokens.index_select(0, index),
            log_probs=self.log_probs.index_select(0, index),
            alignment=alignment,
            attention_sums=attention_sums,
        )

    def extend(self, sums: Tensor, tokens: Tensor, log_probs: Tensor) -> Beam:
        """Append a token to each row. All arguments are (rows,), on the CPU or the device."""
        device = self.sums.device
        new_tokens = send(tokens, device).unsqueeze(1)  # (rows, 1)
        new_log_probs = send(log_probs, device).unsqueeze(1)  # (rows, 1)
        return replace(
            self,
            sums=send(sums, device),
            tokens=torch.cat([self.tokens, new_tokens], dim=1),
            log_probs=torch.cat([self.log_probs, new_log_probs], dim=1),
        )

    def record_attention(self, weights: Tensor) -> Beam:
        """Record the attention of the step that predicts the next token: (rows, S), or wider with
        zeros in the additional columns.
        """
        assert self.alignment is not None
        assert self.attention_sums is not None
        weights = weights[:, : self.attention_sums.size(1)]  # (rows, S)
        strongest = weights.argmax(dim=1, keepdim=True)  # (rows, 1)
        return replace(
            self,
            alignment=torch.cat([self.alignment, strongest], dim=1),
            attention_sums=self.attention_sums + weights,
        )
