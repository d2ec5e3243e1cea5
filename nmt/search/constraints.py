"""What may not be generated: functions between a step and the choice of the next token.

A further rule is one more function of this kind, given to `search(..., constraints=[...])`.
"""

# B sentences; rows, the hypotheses alive; V vocab

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nmt.errors import ConfigError
from nmt.search.hypotheses import NEVER, Constraint, ControlIds, Live


def forbid(*ids: int) -> Constraint:
    """Never generate these ids."""

    def constraint(log_probs: Tensor, live: Live) -> Tensor:
        for token in ids:
            log_probs[:, token] = NEVER
        return log_probs

    return constraint


def at_least(min_length: int, eos: int) -> Constraint:
    """Do not end before `min_length` tokens, EOS not counted."""

    def constraint(log_probs: Tensor, live: Live) -> Tensor:
        if live.length < min_length:
            log_probs[:, eos] = NEVER
        return log_probs

    return constraint


def force(prefixes: Sequence[Sequence[int]], device: torch.device) -> Constraint:
    """Begin the translation of sentence i with the ids `prefixes[i]`, which may be none.

    A forced token keeps the log-probability that the model gives it.
    """
    longest = max(map(len, prefixes))
    table = torch.tensor(
        [[*prefix, *[-1] * (longest - len(prefix))] for prefix in prefixes], device=device
    )  # (B, longest), -1 where the choice is free

    def constraint(log_probs: Tensor, live: Live) -> Tensor:
        if live.length >= longest:
            return log_probs
        wanted = table[live.sentences, live.length].unsqueeze(1)  # (rows, 1)
        kept = log_probs.gather(1, wanted.clamp(min=0))  # (rows, 1)
        log_probs.masked_fill_(wanted >= 0, NEVER)
        return log_probs.scatter_(1, wanted.clamp(min=0), kept)

    return constraint


def check_prefixes(prefixes: Sequence[Sequence[int]], ids: ControlIds) -> None:
    """Raise a `ConfigError` for a forced prefix that holds a control symbol."""
    names = {ids.pad: "padding", ids.bos: "the start symbol", ids.eos: "the end symbol"}
    for number, prefix in enumerate(prefixes):
        for token in prefix:
            if token in names:
                raise ConfigError(
                    f"the forced prefix of sentence {number} holds id {token}, {names[token]}; "
                    "leave control symbols out"
                )
