"""Search over a `Stepper`: greedy, beam and sampling; the contract stands in docs/search.md."""

# B sentences, S source

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nmt.config import SearchConfig
from nmt.errors import ConfigError, ModelError
from nmt.search.beam import beam_search
from nmt.search.constraints import at_least, forbid, force
from nmt.search.hypotheses import Constraint, ControlIds, Hypothesis, Task
from nmt.search.sampling import Sampler, occurrences
from nmt.search.stepper import Stepper
from nmt.search.walk import greedy, walk

__all__ = ["Constraint", "ControlIds", "Hypothesis", "length_limits", "search"]


def length_limits(src_lengths: Tensor, config: SearchConfig) -> list[int]:
    """Return the most tokens of each translation, EOS included: a * source tokens (EOS not counted)
    + b.
    """
    return [
        int(config.max_length_a * (length - 1)) + config.max_length_b
        for length in src_lengths.tolist()
    ]


@torch.inference_mode()
def search(
    stepper: Stepper,
    src: Tensor,
    src_lengths: Tensor,
    config: SearchConfig,
    ids: ControlIds,
    *,
    prefixes: Sequence[Sequence[int]] | None = None,
    keys: Sequence[int] | None = None,
    n_best: int | None = None,
    constraints: Sequence[Constraint] = (),
) -> list[list[Hypothesis]]:
    """Return up to `n_best` hypotheses a sentence, best first; beam size 1 is greedy search. With
    sampling, return `beam_size` draws a sentence, in the order drawn.

    Raises `ConfigError` for a prefix with control symbols, `ModelError` for a model that gives no
    numbers.

    Args:
        stepper: the model.
        src: source ids with EOS, right-padded (B, S).
        src_lengths: real source tokens, EOS included (B,).
        config: how to search.
        ids: control symbols of the tokenizer.
        prefixes: target ids that each translation starts with, possibly none, without BOS.
        keys: a number for each sentence that its draws depend on; without, `occurrences` of src.
        n_best: how many are wanted, None for `beam_size`; fewer are found sooner, and are the first
            of those that more would be.
        constraints: further functions between a step and the choice of tokens.
    """
    prefixes = prefixes or [()] * len(src)
    check_prefixes(prefixes, ids)
    built_in = [forbid(ids.pad, ids.bos)]
    if config.min_length:
        built_in.append(at_least(config.min_length, ids.eos))
    if any(prefixes):
        built_in.append(force(prefixes, stepper.device))
    earliest = [max(config.min_length, len(prefix)) + 1 for prefix in prefixes]
    limits = [max(pair) for pair in zip(length_limits(src_lengths, config), earliest, strict=True)]
    rules = (*built_in, *constraints)
    if config.sampling and keys is None:
        keys = occurrences(src.tolist())
    wanted = min(n_best or config.beam_size, config.beam_size)
    task = Task(src, src_lengths, config, ids, rules, earliest, limits, wanted, list(keys or ()))
    if config.sampling:
        found = walk(stepper, task, Sampler(task), config.beam_size)
    elif config.beam_size == 1:
        found = walk(stepper, task, greedy, 1)
    else:
        found = beam_search(stepper, task)
    _check_numbers(found)
    return found


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


def _check_numbers(found: list[list[Hypothesis]]) -> None:
    for hypotheses in found:
        if not hypotheses or not all(math.isfinite(h.log_prob) for h in hypotheses):
            raise ModelError(
                "the model gives no probabilities (NaN, or none for any token); "
                "use another checkpoint"
            )
