"""Several models with one vocabulary as one model."""

# B sentences, S source, T target, V vocab, M members; rows, the hypotheses alive

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nmt.config import Combine, choose
from nmt.search.stepper import Model, Scored


class EnsembleStepper:
    """Asks every member and takes the mean of probabilities, or of log-probabilities.

    The mean of log-probabilities is not normalised again: a sentence scores the mean of what the
    members score it. Attention is the mean of the members' attention.
    """

    def __init__(
        self, members: Sequence[Model], combine: Combine | str = Combine.probabilities
    ) -> None:
        self.members = list(members)
        self.combine = choose(Combine, "combine", combine)
        self.device = self.members[0].device

    def start(self, src: Tensor, src_lengths: Tensor) -> list[Any]:
        """See `Stepper.start`; the state is that of each member."""
        return [member.start(src, src_lengths) for member in self.members]

    def step(self, tokens: Tensor, state: list[Any]) -> Tensor:
        """See `Stepper.step`."""
        pairs = zip(self.members, state, strict=True)
        return self._mean([member.step(tokens, part) for member, part in pairs])  # (rows, V)

    def reorder(self, state: list[Any], rows: Tensor) -> list[Any]:
        """See `Stepper.reorder`."""
        pairs = zip(self.members, state, strict=True)
        return [member.reorder(part, rows) for member, part in pairs]

    def watch(self, state: list[Any]) -> None:
        """See `AttentiveStepper.watch`."""
        for member, part in zip(self.members, state, strict=True):
            member.watch(part)

    def attention(self, state: list[Any]) -> Tensor:
        """See `AttentiveStepper.attention`."""
        pairs = zip(self.members, state, strict=True)
        weights = [member.attention(part) for member, part in pairs]
        return torch.stack(weights).mean(dim=0)  # (rows, S)

    def score(
        self, src: Tensor, src_lengths: Tensor, tgt_in: Tensor, tgt_out: Tensor, *, attention: bool
    ) -> Scored:
        """See `Scorer.score`."""
        scored = [
            member.score(src, src_lengths, tgt_in, tgt_out, attention=attention)
            for member in self.members
        ]
        weights = [part.attention for part in scored if part.attention is not None]
        mean = torch.stack(weights).mean(dim=0) if weights else None  # (B, T, S)
        return Scored(self._mean([part.log_probs for part in scored]), mean)

    def _mean(self, log_probs: list[Tensor]) -> Tensor:
        stacked = torch.stack(log_probs)  # (M, ...)
        if self.combine is Combine.log_probabilities:
            return stacked.mean(dim=0)
        return stacked.logsumexp(dim=0) - math.log(len(log_probs))
