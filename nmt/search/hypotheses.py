"""What search works on, the hypotheses that are alive in all sentences, and what it returns."""

# B sentences, S source, V vocab; rows, the live hypotheses, sorted by sentence

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nmt.config import SearchConfig
from nmt.data.tokenizer import Tokenizers
from nmt.search.penalties import coverage_of, score
from nmt.search.stepper import Stepper

NEVER = float("-inf")


@dataclass(frozen=True)
class ControlIds:
    """The control symbols of the target's tokenizer, and of the source's where that is another."""

    pad: int
    bos: int
    eos: int
    src: ControlIds | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizers) -> ControlIds:
        """Read them from the model's tokenizer."""
        src, tgt = (cls(t.pad_id, t.bos_id, t.eos_id) for t in (tokenizer.src, tokenizer.tgt))
        return tgt if src == tgt else replace(tgt, src=src)


@dataclass(frozen=True)
class Hypothesis:
    """One token sequence; a forced prefix is part of it, and of its log-probability."""

    tokens: list[int]  # EOS last when finished
    log_prob: float  # nats, the sum of token_log_probs
    score: float  # see docs/search.md
    finished: bool  # False when the length limit cut it off
    token_log_probs: list[float]  # nats, one for each of tokens
    alignment: list[int] | None = None
    """For each token the source position (from 0) that it attends to most; the position after the
    last source token is EOS. None unless the settings ask for it.
    """


@dataclass(frozen=True)
class Live:
    """Hypotheses that are alive, one a row, all of the same length."""

    sentences: Tensor  # (rows,), number of the sentence in the batch
    sums: Tensor  # (rows,), log-probabilities so far; minus infinity for a row without use
    tokens: Tensor  # (rows, length), without BOS
    log_probs: Tensor  # (rows, length), of each token
    aligned: Tensor | None = None  # (rows, length), source position that each attends to most
    attended: Tensor | None = None  # (rows, S), attention that each source position got so far

    def __len__(self) -> int:
        return len(self.sums)

    @property
    def length(self) -> int:
        """Tokens of each hypothesis, BOS not counted."""
        return self.tokens.size(1)

    def select(self, rows: Tensor) -> Live:
        """Keep the rows given (rows',), in that order."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        return Live(**{name: value.index_select(0, rows) for name, value in given.items()})

    def extend(self, sums: Tensor, tokens: Tensor, log_probs: Tensor) -> Live:
        """Add a token to each row; all three are (rows,)."""
        return replace(
            self,
            sums=sums,
            tokens=torch.cat([self.tokens, tokens.unsqueeze(1)], dim=1),
            log_probs=torch.cat([self.log_probs, log_probs.unsqueeze(1)], dim=1),
        )

    def attend(self, weights: Tensor) -> Live:
        """Record the attention of the step that chooses the next token: (rows, S), or wider, with
        zeros at the end.
        """
        assert self.aligned is not None
        assert self.attended is not None
        weights = weights[:, : self.attended.size(1)]  # (rows, S)
        strongest = weights.argmax(dim=1, keepdim=True)  # (rows, 1)
        aligned = torch.cat([self.aligned, strongest], dim=1)
        return replace(self, aligned=aligned, attended=self.attended + weights)


Constraint = Callable[[Tensor, Live], Tensor]
"""Applied between a step and the choice of tokens: takes log-probabilities of the next token
(rows, V), which it may change in place, and the hypotheses so far; returns log-probabilities.

Minus infinity forbids a token. It may lower values but not raise them, since search stops when
nothing better can come; what it lowers is lowered in the results too.
"""


@dataclass(frozen=True)
class SearchTask:
    """A batch of sentences and how to search them."""

    src: Tensor  # (B, S), with EOS
    src_lengths: Tensor  # (B,), EOS included
    config: SearchConfig
    ids: ControlIds
    constraints: tuple[Constraint, ...]
    limits: list[int]  # most tokens of each translation, EOS included
    n_best: int  # results of each sentence, at most
    keys: list[int]  # of each sentence's draws, when sampling

    @property
    def needs_attention(self) -> bool:
        """Whether the settings ask for what the attention to the source gives."""
        return self.config.alignment or self.config.coverage_penalty > 0

    def first(self, device: torch.device) -> Live:
        """Return one hypothesis without a token for each sentence."""
        batch = len(self.limits)
        none = torch.zeros(batch, 0, dtype=torch.long, device=device)
        live = Live(
            sentences=torch.arange(batch, device=device),
            sums=torch.zeros(batch, device=device),
            tokens=none,
            log_probs=torch.zeros(batch, 0, device=device),
        )
        if not self.needs_attention:
            return live
        attended = torch.zeros(batch, self.src.size(1), device=device)
        return replace(live, aligned=none, attended=attended)

    def newest(self, live: Live) -> Tensor:
        """Return the last token of each hypothesis (rows,), BOS before the first step."""
        if live.length:
            return live.tokens[:, -1]
        return torch.full((len(live),), self.ids.bos, device=live.tokens.device)

    def constrain(
        self, log_probs: Tensor, live: Live, stepper: Stepper, state: Any
    ) -> tuple[Tensor, Live]:
        """Return the log-probabilities of the next token (rows, V) as the constraints change them,
        and the hypotheses with the attention of this step recorded.
        """
        if self.needs_attention:
            live = live.attend(stepper.attention(state))
        for constraint in self.constraints:
            log_probs = constraint(log_probs, live)
        return log_probs, live

    def close(self, live: Live) -> Iterator[tuple[int, Hypothesis]]:
        """Yield the number of its sentence and the hypothesis of every row."""
        coverages = [0.0] * len(live)
        if live.attended is not None:
            num_words = (self.src_lengths.to(live.sentences.device) - 1)[live.sentences]
            coverages = coverage_of(live.attended, num_words).tolist()
        alignments: list[list[int] | None] = [None] * len(live)
        if live.aligned is not None and self.config.alignment:
            alignments = live.aligned.tolist()
        columns = (live.sentences.tolist(), live.tokens.tolist(), live.log_probs.tolist())
        for sentence, tokens, log_probs, coverage, alignment in zip(
            *columns, coverages, alignments, strict=True
        ):
            total = math.fsum(log_probs)
            value = score(total, len(tokens), self.config, coverage)
            finished = tokens[-1] == self.ids.eos
            yield sentence, Hypothesis(tokens, total, value, finished, log_probs, alignment)
