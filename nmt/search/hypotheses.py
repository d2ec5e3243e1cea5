"""What search works on, the hypotheses that are alive in all sentences; what it returns, and how a
hypothesis is scored. The formulas and their derivation are in docs/search.md.
"""

# B sentences, S source, V vocab, N hypotheses; rows, the live hypotheses, sorted by sentence

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nmt.config import Normalization, SearchConfig
from nmt.data.tokenizer import Tokenizers
from nmt.model.fast.top import NEG_INF
from nmt.model.fast.transfer import fetch, send
from nmt.search.stepper import Stepper


@dataclass(frozen=True)
class ControlIds:
    """The control symbols of the target's tokenizer, and of the source's where that is another."""

    pad: int
    bos: int
    eos: int
    src: ControlIds | None = None

    @property
    def never(self) -> list[int]:
        """What no translation holds: padding and BOS, unless decoding starts from EOS."""
        return [self.pad, self.bos] if self.bos != self.eos else [self.pad]

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
class Beam:
    """Hypotheses that are alive, one a row, all of the same length."""

    sentences: Tensor  # (rows,), number of the sentence in the batch, on the host
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

    def select(self, rows: Tensor) -> Beam:
        """Keep the rows given (rows',), on the host, in that order."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        sentences, there = given.pop("sentences")[rows], send(rows, self.sums.device)
        kept = {name: value.index_select(0, there) for name, value in given.items()}
        return Beam(sentences, **kept)

    def extend(self, sums: Tensor, tokens: Tensor, log_probs: Tensor) -> Beam:
        """Add a token to each row; all three are (rows,), of the host or the device."""
        sums, tokens, log_probs = (send(x, self.sums.device) for x in (sums, tokens, log_probs))
        return replace(
            self,
            sums=sums,
            tokens=torch.cat([self.tokens, tokens.unsqueeze(1)], dim=1),
            log_probs=torch.cat([self.log_probs, log_probs.unsqueeze(1)], dim=1),
        )

    def attend(self, weights: Tensor) -> Beam:
        """Record the attention of the step that chooses the next token: (rows, S), or wider, with
        zeros at the end.
        """
        assert self.aligned is not None
        assert self.attended is not None
        weights = weights[:, : self.attended.size(1)]  # (rows, S)
        strongest = weights.argmax(dim=1, keepdim=True)  # (rows, 1)
        aligned = torch.cat([self.aligned, strongest], dim=1)
        return replace(self, aligned=aligned, attended=self.attended + weights)


def normalizer(length: Any, config: SearchConfig) -> Any:
    """Return what the log-probability of `length` tokens, EOS counted, is divided by; `length` is a
    number or a tensor. With `wu` it is ((5 + length) / 6)^alpha (Wu et al., 2016, equation 14).
    """
    if config.normalization is Normalization.wu:
        return ((5 + length) / 6) ** config.length_penalty
    return length if config.normalization is Normalization.average else 1


def score(log_prob: float, length: int, config: SearchConfig, coverage: float = 0.0) -> float:
    """Return (log_prob + reward * length) / normalizer(length) + beta * coverage.

    `log_prob` is in nats; `length` counts EOS; `coverage` comes from `coverage_of`.
    """
    total = (log_prob + config.word_reward * length) / float(normalizer(length, config))
    return total + config.coverage_penalty * coverage


def least_log_prob(scores: Tensor, first: Tensor, last: Tensor, config: SearchConfig) -> Tensor:
    """Return the log-probability that a live hypothesis must exceed to end with a score above each
    of `scores` (N,), when it can have `first` to `last` tokens then, both (N,); all in float64.

    Its log-probability can only fall and its coverage term is at most 0. So the bound is the least
    of g(l) = score * normalizer(l) - reward * l, at one of both ends or where g' is 0.
    """
    lengths = [first] if first is last else [first, last]  # of what ends now there is one
    alpha, reward = config.length_penalty, config.word_reward
    if config.normalization is Normalization.wu and reward and alpha not in (0, 1):
        # g' = score * alpha / 6 * ((5 + l) / 6)^(alpha - 1) - reward
        turn = 6 * (6 * reward / (scores * alpha)) ** (1 / (alpha - 1)) - 5  # NaN where g has none
        turn = turn.nan_to_num(0.0, posinf=0.0).maximum(first).minimum(last)
        lengths += [turn.floor(), turn.ceil()]
    bounds = [scores * normalizer(length, config) - reward * length for length in lengths]
    return torch.stack(bounds).amin(dim=0)


def coverage_of(attended: Tensor, num_words: Tensor) -> Tensor:
    """Return sum_i log(min(sum_j p_ij, 1)) of each hypothesis, (N,) (Wu et al., 2016, equation 14).

    Args:
        attended: attention that each source token got from all target tokens (N, S).
        num_words: source tokens of each, without EOS (N,).
    """
    tiny = torch.finfo(attended.dtype).tiny  # the logarithm of an unseen token stays finite
    logs = attended.clamp(tiny, 1.0).log()  # (N, S)
    is_word = torch.arange(attended.size(1), device=attended.device) < num_words.unsqueeze(1)
    return logs.masked_fill(~is_word, 0.0).sum(dim=1)


Constraint = Callable[[Tensor, Beam], Tensor]
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
    constraints: Sequence[Constraint]  # further ones than the settings ask for
    limits: list[int]  # most tokens of each translation, EOS included
    n_best: int  # results of each sentence, at most
    keys: Sequence[int] = ()  # of each sentence's draws, when sampling
    forced: Tensor | None = None
    """(B, longest prefix), token ids, -1 where the choice is free; on the host."""
    columns: Sequence[int] = ()
    """Place of the first token of each sentence among the tokens of `Beam`, or none for 0 of all.
    """

    def join(self, limits: Sequence[int], column: int, num_dropped: int) -> SearchTask:
        """Return the task with more sentences, whose first tokens stand in `column`, after so many
        columns were dropped at the left.
        """
        before = [self.first_column(i) - num_dropped for i in range(len(self.limits))]
        columns = [*before, *[column] * len(limits)]
        return replace(self, limits=[*self.limits, *limits], columns=columns)

    def first_column(self, sentence: int) -> int:
        """Return the column of a sentence's first token."""
        return self.columns[sentence] if self.columns else 0

    @property
    def needs_attention(self) -> bool:
        """Whether the settings ask for what the attention to the source gives."""
        return self.config.alignment or self.config.coverage_penalty > 0

    def first(self, device: torch.device) -> Beam:
        """Return one hypothesis without a token for each sentence."""
        batch = len(self.limits)
        none = torch.zeros(batch, 0, dtype=torch.long, device=device)
        sums, log_probs = torch.zeros(batch, device=device), torch.zeros(batch, 0, device=device)
        live = Beam(torch.arange(batch), sums, none, log_probs)
        if not self.needs_attention:
            return live
        attended = torch.zeros(batch, self.src.size(1), device=device)
        return replace(live, aligned=none, attended=attended)

    def newest(self, live: Beam) -> Tensor:
        """Return the last token of each hypothesis (rows,), BOS before the first step."""
        if live.length:
            return live.tokens[:, -1]
        return torch.full((len(live),), self.ids.bos, device=live.tokens.device)

    def constrain(
        self, log_probs: Tensor, live: Beam, stepper: Stepper, state: Any
    ) -> tuple[Tensor, Beam]:
        """Return the log-probabilities of the next token (rows, V) with minus infinity for what may
        not be generated, and the hypotheses with the attention of this step recorded.
        """
        if self.needs_attention:
            live = live.attend(stepper.attention(state))
        for token in self.ids.never:
            log_probs[:, token].fill_(NEG_INF)
        if live.length < self.config.min_length:
            log_probs[:, self.ids.eos].fill_(NEG_INF)
        if self.forced is not None and live.length < self.forced.size(1):
            wanted = self.forced[live.sentences, live.length].unsqueeze(1)  # (rows, 1)
            wanted = send(wanted, log_probs.device)
            kept = log_probs.gather(1, wanted.clamp(min=0))  # (rows, 1), as the model gives it
            log_probs.masked_fill_(wanted >= 0, NEG_INF)
            log_probs.scatter_(1, wanted.clamp(min=0), kept)
        for constraint in self.constraints:
            log_probs = constraint(log_probs, live)
        return log_probs, live

    def close(self, live: Beam) -> Iterator[tuple[int, Hypothesis]]:
        """Yield the number of its sentence and the hypothesis of every row; wait once for the
        device.
        """
        given = [live.tokens, live.log_probs]
        if live.attended is not None and live.aligned is not None:
            num_words = send((self.src_lengths - 1)[live.sentences], live.attended.device)
            given += [coverage_of(live.attended, num_words), live.aligned]
        columns: list[Any] = [live.sentences, *fetch(*given)]
        sentences, tokens_of, log_probs_of, *others = (column.tolist() for column in columns)
        coverages, alignments = others or ([0.0] * len(live), None)
        for row, sentence in enumerate(sentences):
            first = self.first_column(sentence)
            tokens, log_probs = tokens_of[row][first:], log_probs_of[row][first:]
            total = math.fsum(log_probs)
            value = score(total, len(tokens), self.config, coverages[row])
            alignment = alignments[row] if alignments and self.config.alignment else None
            finished = tokens[-1] == self.ids.eos
            yield sentence, Hypothesis(tokens, total, value, finished, log_probs, alignment)
