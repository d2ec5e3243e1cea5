"""Complete hypotheses, which a search returns, and live hypotheses, which it extends."""

# S source; R live hypotheses, sorted by sentence

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nmt.config import SearchConfig
from nmt.errors import ModelError
from nmt.model.fast.transfer import to_device
from nmt.search.scoring import score


@dataclass(frozen=True)
class Hypothesis:
    """A translation as token ids, forced prefix included, with its scores."""

    tokens: list[int]  # EOS last when finished
    log_prob: float  # sum of token_log_probs, in nats
    score: float  # defined in docs/search.md
    finished: bool  # whether it ends with EOS; False if the length limit cut it off
    token_log_probs: list[float]  # one per token, in nats; none if the engine does not report them
    alignment: list[int] | None = None
    """For each token, the source position with the highest attention. Position 0 is the first
    source token, and EOS follows the last source token. None unless `SearchConfig.alignment`.
    """
    searched_again: bool = False  # whether a second search found it, see `replace_loops`

    @property
    def rank(self) -> tuple[bool, float]:
        """Sort key: any finished hypothesis ranks above unfinished ones, then the score decides."""
        return self.finished, self.score

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
        """Build a hypothesis and compute its score; `coverage` comes from `coverage_score`."""
        log_prob = math.fsum(token_log_probs)
        return cls(
            tokens=tokens,
            log_prob=log_prob,
            score=score(log_prob, len(tokens), config, coverage),
            finished=tokens[-1] == eos_id,
            token_log_probs=token_log_probs,
            alignment=alignment if config.alignment else None,
        )


def shift_alignment(
    positions: list[int], tokens: list[int], eos_id: int, num_src: int
) -> list[int]:
    """Return the source position of each of `tokens`, for models with `alignment_shift`.

    In these models, the attention of the step that reads a token aligns the token. No step reads
    the last token. A final EOS is aligned with the EOS of the source. Any other last token gets the
    position of the token before it.

    Args:
        positions: source position with the highest attention in the step that predicts each token.
        tokens: the target ids.
        eos_id: the id of EOS.
        num_src: number of source tokens without EOS.
    """
    if tokens[-1] == eos_id:
        return [*positions[1:], num_src]
    return [*positions[1:], positions[-1]]


def check_finite(hypotheses: list[Hypothesis]) -> None:
    """Raise a `ModelError` if a sentence has no hypotheses, or log-probabilities are not finite."""
    log_probs = [hypothesis.log_prob for hypothesis in hypotheses]
    if not log_probs or not all(map(math.isfinite, log_probs)):
        raise ModelError(
            "the model gives no probabilities (NaN, or none for any token); use another checkpoint"
        )


@dataclass(frozen=True)
class Beam:
    """The live hypotheses of all sentences, one per row, all of the same length."""

    sentences: Tensor  # (R,) on the CPU: index of the sentence in the batch
    total_log_probs: Tensor  # (R,): sum over the tokens so far
    tokens: Tensor  # (R, length), without BOS
    token_log_probs: Tensor  # (R, length)
    alignment: Tensor | None = None  # (R, length): source position with the highest attention
    attention_sums: Tensor | None = None  # (R, S): attention summed over the tokens so far

    @classmethod
    def start(
        cls, num_sentences: int, device: torch.device, *, source_length: int | None = None
    ) -> Beam:
        """Return one empty hypothesis per sentence.

        With `source_length` (S), `record_attention` can be called.
        """
        tokens = torch.zeros(num_sentences, 0, dtype=torch.long, device=device)
        alignment = None
        attention_sums = None
        if source_length is not None:
            alignment = torch.zeros_like(tokens)
            attention_sums = torch.zeros(num_sentences, source_length, device=device)
        return cls(
            sentences=torch.arange(num_sentences),
            total_log_probs=torch.zeros(num_sentences, device=device),
            tokens=tokens,
            token_log_probs=torch.zeros(num_sentences, 0, device=device),
            alignment=alignment,
            attention_sums=attention_sums,
        )

    def __len__(self) -> int:
        return len(self.total_log_probs)

    @property
    def length(self) -> int:
        """Number of tokens of each hypothesis, without BOS."""
        return self.tokens.size(1)

    def select(self, rows: Tensor) -> Beam:
        """Return the hypotheses at `rows` (R',), a tensor of indices on the CPU."""
        index = to_device(rows, self.total_log_probs.device)
        alignment = self.alignment
        attention_sums = self.attention_sums
        if alignment is not None:
            alignment = alignment.index_select(0, index)
        if attention_sums is not None:
            attention_sums = attention_sums.index_select(0, index)
        return Beam(
            sentences=self.sentences[rows],
            total_log_probs=self.total_log_probs.index_select(0, index),
            tokens=self.tokens.index_select(0, index),
            token_log_probs=self.token_log_probs.index_select(0, index),
            alignment=alignment,
            attention_sums=attention_sums,
        )

    def append(self, tokens: Tensor, token_log_probs: Tensor, total_log_probs: Tensor) -> Beam:
        """Return the beam with one more token in each row.

        All arguments are (R,), on the CPU or the device. `total_log_probs` are the sums with the
        new tokens, as computed for the ranking.
        """
        device = self.total_log_probs.device
        new_tokens = to_device(tokens, device).unsqueeze(1)  # (R, 1)
        new_log_probs = to_device(token_log_probs, device).unsqueeze(1)  # (R, 1)
        return replace(
            self,
            total_log_probs=to_device(total_log_probs, device),
            tokens=torch.cat([self.tokens, new_tokens], dim=1),
            token_log_probs=torch.cat([self.token_log_probs, new_log_probs], dim=1),
        )

    def record_attention(self, weights: Tensor) -> Beam:
        """Return the beam with the attention `weights` of the step that predicts the next token.

        `weights` are (R, S or more); columns beyond S belong to padding and are ignored. `append`
        then adds the token.
        """
        assert self.alignment is not None
        assert self.attention_sums is not None
        weights = weights[:, : self.attention_sums.size(1)]  # (R, S)
        strongest = weights.argmax(dim=1, keepdim=True)  # (R, 1)
        return replace(
            self,
            alignment=torch.cat([self.alignment, strongest], dim=1),
            attention_sums=self.attention_sums + weights,
        )
