"""Search over a `Stepper`: greedy, sampling and beam; the contract stands in docs/search.md.

Every draw of a sentence has a random generator of its own, seeded with the seed, the source ids,
the number of the draw and a key that tells equal sentences apart. So it depends on no neighbor,
batch or device.
"""

# B sentences, S source, K draws of each (1 when greedy), V vocab
# rows, the hypotheses alive: when sampling B * K, all draws of a sentence side by side

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from nmt.config import SearchConfig
from nmt.errors import ModelError
from nmt.model.fast.top import likeliest
from nmt.search.beam import beam_search
from nmt.search.constraints import at_least, check_prefixes, forbid, force
from nmt.search.hypotheses import NEVER, Constraint, ControlIds, Hypothesis, SearchTask
from nmt.search.stepper import Stepper


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
    task = SearchTask(src, src_lengths, config, ids, rules, limits, wanted, list(keys or ()))
    uses_beam = config.beam_size > 1 and not config.sampling
    found = beam_search(stepper, task) if uses_beam else greedy_or_sampling(stepper, task)
    if not all(row and all(math.isfinite(h.log_prob) for h in row) for row in found):
        raise ModelError(
            "the model gives no probabilities (NaN, or none for any token); use another checkpoint"
        )
    return found


def length_limits(src_lengths: Tensor, config: SearchConfig) -> list[int]:
    """Return the most tokens of each translation, EOS included: a * source tokens (EOS not counted)
    + b.
    """
    return [
        int(config.max_length_a * (length - 1)) + config.max_length_b
        for length in src_lengths.tolist()
    ]


def greedy_or_sampling(stepper: Stepper, task: SearchTask) -> list[list[Hypothesis]]:
    """Extend each hypothesis by its most probable token (the lowest id among equals) until it ends;
    with sampling, `beam_size` hypotheses a sentence, in the order drawn, by a random token.
    """
    sampler, draws = (Sampler(task), task.config.beam_size) if task.config.sampling else (None, 1)
    found: list[dict[int, Hypothesis]] = [{} for _ in task.limits]
    limits = torch.tensor(task.limits, device=stepper.device)
    state = stepper.start(task.src, task.src_lengths, attention=task.needs_attention)
    live = task.first(stepper.device)
    if draws > 1:
        rows = torch.arange(len(live), device=stepper.device).repeat_interleave(draws)
        live, state = live.select(rows), stepper.reorder(state, rows)
    while len(live):
        log_probs = stepper.step(task.newest(live), state)  # (B * K, V)
        log_probs, live = task.constrain(log_probs, live, stepper, state)
        tokens = sampler.draw(log_probs, live.sentences) if sampler else likeliest(log_probs)
        chosen = log_probs.gather(1, tokens.unsqueeze(1)).squeeze(1)  # (B * K,)
        live = live.extend(live.sums + chosen, tokens, chosen)
        is_over = (tokens == task.ids.eos) | (limits[live.sentences] == live.length)  # (B * K,)
        over = is_over.nonzero().squeeze(1)
        if not len(over):
            continue
        for row, (sentence, hypothesis) in zip(
            over.tolist(), task.close(live.select(over)), strict=True
        ):  # a draw that was over before stays as it was while others go on
            found[sentence].setdefault(row % draws, hypothesis)
        numbers = live.sentences.tolist()
        going = [row for row, number in enumerate(numbers) if len(found[number]) < draws]
        rows = torch.tensor(going, dtype=torch.long, device=stepper.device)
        if going and len(going) < len(numbers):
            state = stepper.reorder(state, rows)
        live = live.select(rows)
    return [[row[draw] for draw in range(draws)] for row in found]


class Sampler:
    """Draws the next token of every row."""

    def __init__(self, task: SearchTask) -> None:
        self.config = task.config
        columns = zip(task.keys, task.src.tolist(), task.src_lengths.tolist(), strict=True)
        self.generators = [
            [
                np.random.default_rng([self.config.seed, key, draw, *row[:length]])
                for draw in range(self.config.beam_size)
            ]
            for key, row, length in columns
        ]

    def draw(self, log_probs: Tensor, sentences: Tensor) -> Tensor:
        """Draw from log-probabilities (rows, V) of `sentences` (rows,); return tokens (rows,)."""
        noise = np.empty(log_probs.shape, dtype=np.float32)  # (rows, V)
        for row, sentence in enumerate(sentences.tolist()):
            generator = self.generators[sentence][row % self.config.beam_size]
            # in float64, where no token of many thousands gets an exact 0 by chance
            noise[row] = -np.log(generator.standard_exponential(log_probs.size(1)))
        # the maximum of logits plus Gumbel noise is a draw from their softmax (Gumbel, 1954); other
        # than a sum of probabilities it does not turn over when these differ in the last digit
        gumbel = torch.from_numpy(noise).to(log_probs.device)
        return (narrow(log_probs, self.config) + gumbel).argmax(dim=1)


def narrow(log_probs: Tensor, config: SearchConfig) -> Tensor:
    """Return the logits (rows, V) to draw from: divided by the temperature, then minus infinity for
    all but the `top_k` likeliest, then for all but the likeliest with a share of `top_p` in what is
    left (Fan et al., 2018; Holtzman et al., 2020). Tokens as likely as the last one kept stay too.
    """
    logits = log_probs / config.temperature  # (rows, V)
    if 0 < config.top_k < logits.size(1):
        least = logits.topk(config.top_k).values[:, -1:]  # (rows, 1)
        logits = logits.masked_fill(logits < least, NEVER)
    if config.top_p < 1:
        ranked = logits.sort(dim=1, descending=True).values  # (rows, V)
        shares = ranked.softmax(dim=1)
        before = shares.cumsum(dim=1) - shares  # share of the likelier ones
        least = ranked.masked_fill(before >= config.top_p, float("inf")).amin(dim=1, keepdim=True)
        logits = logits.masked_fill(logits < least, NEVER)
    return logits


def occurrences(rows: Iterable[Sequence[int]]) -> list[int]:
    """Return for each row of ids how many equal rows precede it.

    As keys they give equal sentences draws of their own, and all others none that depend on their
    place.
    """
    seen: Counter[tuple[int, ...]] = Counter()
    keys = []
    for row in map(tuple, rows):
        keys.append(seen[row])
        seen[row] += 1
    return keys
