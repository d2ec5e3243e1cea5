"""Search over a `Stepper`: greedy, sampling and beam; docs/search.md says what is guaranteed.

Every sentence is searched as if it were alone: its beam, its length limit, its end and its draws
depend on no neighbor, batch or device.
"""

# B live sentences, S source, K beam size, or draws of each sentence (1 when greedy), V vocab
# rows, the live hypotheses, sorted by sentence; in a beam, best first

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from nmt.config import SearchConfig
from nmt.data.batch import pad
from nmt.errors import ConfigError, ModelError
from nmt.model.fast.cache import BeamGrid
from nmt.model.fast.top import NEG_INF, Candidates, best_candidates, likeliest
from nmt.model.fast.transfer import fetch, send
from nmt.search.hypotheses import (
    Beam,
    Constraint,
    ControlIds,
    Hypothesis,
    SearchTask,
    least_log_prob,
)
from nmt.search.stepper import Stepper

_ROUNDING = 1e-3  # relative, far above that of a sum of float32


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
        src: source ids with EOS, right-padded (B, S).
        src_lengths: real source tokens, EOS included (B,).
        prefixes: target ids that each translation starts with, possibly none, without BOS.
        keys: a number for each sentence that its draws depend on; without, `occurrences` of src.
        n_best: how many are wanted, None for `beam_size`; fewer are found sooner, and are the first
            of those that more would be.
        constraints: further functions between a step and the choice of tokens.
    """
    prefixes = prefixes or [()] * len(src)
    check_prefixes(prefixes, ids)
    forced = pad(prefixes, pad_id=-1) if any(prefixes) else None  # (B, longest)
    limits = length_limits(src_lengths, config, prefixes)
    if config.sampling and keys is None:
        keys = occurrences(src.tolist())
    wanted = min(n_best or config.beam_size, config.beam_size)
    batch = (src, src_lengths, config, ids)
    task = SearchTask(*batch, constraints, limits, wanted, keys or (), forced)
    if config.beam_size == 1 or config.sampling:
        return check_found(greedy_or_sampling(stepper, task))
    beams = BeamSearch(stepper, task)
    while beams.num_live:
        beams.step()
    return [beams.result(i) for i in range(len(src))]


def check_found(found: list[list[Hypothesis]]) -> list[list[Hypothesis]]:
    """Return what was found; raise a `ModelError` for a sentence without probabilities."""
    if not all(row and all(math.isfinite(h.log_prob) for h in row) for row in found):
        raise ModelError(
            "the model gives no probabilities (NaN, or none for any token); use another checkpoint"
        )
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


def length_limits(
    src_lengths: Tensor, config: SearchConfig, prefixes: Sequence[Sequence[int]]
) -> list[int]:
    """Return the most tokens of each translation, EOS included: a * source tokens (EOS not counted)
    + b, or more where the least length or a forced prefix needs them.
    """
    pairs = zip(src_lengths.tolist(), prefixes, strict=True)
    a, b, least = config.max_length_a, config.max_length_b, config.min_length
    return [max(int(a * (n - 1)) + b, max(least, len(prefix)) + 1) for n, prefix in pairs]


class BeamSearch:
    """A beam search, a step at a time. Sentences may join it between two steps; each has its first
    token in a column of its own, and its length counts from there.
    """

    def __init__(self, stepper: Stepper, task: SearchTask) -> None:
        self.stepper = stepper
        self.task = task
        self._pools = {i: _Pool(task.n_best) for i in range(len(task.limits))}
        self._last_columns = torch.tensor(task.limits)  # of each sentence
        self._state = stepper.start(task.src, task.src_lengths, attention=task.needs_attention)
        self._live = task.first(stepper.device)
        self._alive = set(range(len(task.limits)))

    @property
    def num_live(self) -> int:
        """Sentences that are not done."""
        return len(self._alive)

    @torch.inference_mode()
    def step(self) -> set[int]:
        """Extend all hypotheses by a token; return the numbers of the sentences that are done."""
        task, live, pools = self.task, self._live, self._pools
        log_probs = self.stepper.step(task.newest(live), self._state)  # (rows, V)
        log_probs, live = task.constrain(log_probs, live, self.stepper, self._state)
        best, ends, goes_on = _extend(live, log_probs, task)  # 3 x (B, 2K)
        sentences = live.sentences[best.rows[:, 0]]  # (B,)
        is_last = (self._last_columns[sentences] == live.length + 1).unsqueeze(1)  # (B, 1)
        over = ends | goes_on & is_last  # what is alive at the limit is a result, if unfinished
        over &= best.sums >= _entries(pools, sentences, live.length + 1, task).unsqueeze(1)
        if over.any():
            _collect(task.close(_take(live, best, over)), pools)
        bars = _bars(pools, sentences, live.length + 1, task).unsqueeze(1)  # (B, 1)
        can_win = goes_on & (best.sums > bars)  # (B, 2K)
        going = can_win & ~is_last  # (B, 2K)
        rows, self._live = best.rows[going], _take(live, best, going)
        if len(rows):
            self._state = self.stepper.reorder(self._state, rows)
        before, self._alive = self._alive, set(self._live.sentences.tolist())
        return before - self._alive

    def result(self, number: int) -> list[Hypothesis]:
        """Return up to `n_best` hypotheses of a sentence that is done, best first, finished ones
        before others, and forget them. Raises a `ModelError` for a model that gives no numbers.
        """
        return check_found([self._pools.pop(number).kept])[0]

    @torch.inference_mode()
    def join(self, src: Tensor, src_lengths: Tensor) -> None:
        """Add sentences (B, S) after those there are, between two steps, while any is not done.

        Only without what depends on a sentence's own step: attention, prefixes, a least length.
        """
        live, device, count = self._live, self.stepper.device, len(self.task.limits)
        unused = min(map(self.task.first_column, self._alive))
        live = replace(live, tokens=live.tokens[:, unused:], log_probs=live.log_probs[:, unused:])
        limits = length_limits(src_lengths, self.task.config, [()] * len(src))
        self.task = self.task.join(limits, live.length, unused)
        last = torch.tensor(limits) + live.length
        self._last_columns = torch.cat([self._last_columns - unused, last])
        self._state = self.stepper.join(self._state, src, src_lengths)
        numbers = range(count, count + len(limits))
        self._pools |= {i: _Pool(self.task.n_best) for i in numbers}
        self._alive |= set(numbers)
        before = torch.full((len(limits), live.length), self.task.ids.bos, device=device)
        zeros = torch.zeros(before.shape, device=device)
        columns = torch.tensor(numbers), zeros.sum(dim=1), before, zeros
        self._live = Beam(*map(torch.cat, zip(vars(live).values(), columns, strict=False)))


@dataclass
class _Pool:
    """The best hypotheses of one sentence that have come to an end, at most `size`."""

    size: int
    kept: list[Hypothesis] = field(default_factory=list)

    @property
    def bar(self) -> float:
        """The score above which a hypothesis gets in."""
        return self.kept[-1].score if len(self.kept) == self.size else NEG_INF


def _entries(
    pools: Mapping[int, _Pool], sentences: Tensor, length: int, task: SearchTask
) -> Tensor:
    """Return a log-probability below which no hypothesis that ends in column `length` is kept, for
    each of `sentences` (B,); a little less than the exact one, since sums are rounded.
    """
    numbers = sentences.tolist()
    full = [len(pools[i].kept) == pools[i].size and pools[i].kept[-1].finished for i in numbers]
    bars = [pools[i].bar if is_full else NEG_INF for i, is_full in zip(numbers, full, strict=True)]
    ends = torch.tensor([length - task.first_column(i) for i in numbers], dtype=torch.float64)
    least = least_log_prob(torch.tensor(bars, dtype=torch.float64), ends, ends, task.config)
    return least - _ROUNDING * (1 + least.abs())


def _bars(pools: Mapping[int, _Pool], sentences: Tensor, length: int, task: SearchTask) -> Tensor:
    """Return the log-probability above which a hypothesis up to column `length` can still become
    one of the results, for each of `sentences` (B,).
    """
    numbers = sentences.tolist()
    bars = [pools[i].bar for i in numbers]
    # where there is a bar, hypotheses may end: no longer prefix or least length is to be met
    first = [length + 1 - task.first_column(i) for i in numbers]
    last = [max(least, task.limits[i]) for i, least in zip(numbers, first, strict=True)]
    columns = torch.tensor([bars, first, last], dtype=torch.float64)
    return least_log_prob(columns[0], columns[1], columns[2], task.config)


def _extend(live: Beam, log_probs: Tensor, task: SearchTask) -> tuple[Candidates, Tensor, Tensor]:
    """Return the best continuations (B, 2K), on the host, and which of them end, and go on.

    A hypothesis ends when EOS is among the K best continuations of its sentence. Of 2 K
    continuations at most K end, so that K can go on: the first K that do not.
    """
    size = task.config.beam_size
    sentences, numbers = torch.unique_consecutive(live.sentences, return_inverse=True)
    grid = BeamGrid(numbers, len(sentences), log_probs.device)
    best = Candidates(*fetch(*best_candidates(live.sums, log_probs, grid, 2 * size)))
    is_end, is_real = best.tokens == task.ids.eos, best.sums > NEG_INF
    goes_on = ~is_end & ((~is_end).cumsum(dim=1) <= size) & is_real
    is_end[:, size:] = False
    return best, is_end & is_real, goes_on


def _take(live: Beam, best: Candidates, chosen: Tensor) -> Beam:
    """Return the continuations where `chosen` (B, 2K) is true as hypotheses."""
    sums, rows, tokens, log_probs = (column[chosen] for column in best)
    return live.select(rows).extend(sums, tokens, log_probs)


def _collect(closed: Iterable[tuple[int, Hypothesis]], pools: Mapping[int, _Pool]) -> None:
    for sentence, hypothesis in closed:
        pool = pools[sentence]
        pool.kept.append(hypothesis)
        pool.kept.sort(key=lambda h: (h.finished, h.score), reverse=True)  # stable: first come
        del pool.kept[pool.size :]


def greedy_or_sampling(stepper: Stepper, task: SearchTask) -> list[list[Hypothesis]]:
    """Extend each hypothesis by its most probable token (the lowest id among equals) until it ends;
    with sampling, `beam_size` hypotheses a sentence, in the order drawn, by a random token.
    """
    sampler, draws = (Sampler(task), task.config.beam_size) if task.config.sampling else (None, 1)
    found: list[dict[int, Hypothesis]] = [{} for _ in task.limits]
    limits = torch.tensor(task.limits)
    state = stepper.start(task.src, task.src_lengths, attention=task.needs_attention)
    live = task.first(stepper.device)
    if draws > 1:
        rows = torch.arange(len(live)).repeat_interleave(draws)
        live, state = live.select(rows), stepper.reorder(state, rows)
    while len(live):
        log_probs = stepper.step(task.newest(live), state)  # (B * K, V)
        log_probs, live = task.constrain(log_probs, live, stepper, state)
        tokens = sampler.draw(log_probs, live.sentences) if sampler else likeliest(log_probs)
        chosen = log_probs.gather(1, tokens.unsqueeze(1)).squeeze(1)  # (B * K,)
        live = live.extend(live.sums + chosen, tokens, chosen)
        is_end = fetch(tokens)[0] == task.ids.eos  # (B * K,)
        is_over = is_end | (limits[live.sentences] == live.length)  # (B * K,)
        over = is_over.nonzero().squeeze(1)
        if not len(over):
            continue
        for row, (sentence, hypothesis) in zip(
            over.tolist(), task.close(live.select(over)), strict=True
        ):  # a draw that was over before stays as it was while others go on
            found[sentence].setdefault(row % draws, hypothesis)
        numbers = live.sentences.tolist()
        going = [row for row, number in enumerate(numbers) if len(found[number]) < draws]
        rows = torch.tensor(going, dtype=torch.long)
        if going and len(going) < len(numbers):
            state = stepper.reorder(state, rows)
        live = live.select(rows)
    return [[row[draw] for draw in range(draws)] for row in found]


class Sampler:
    """Draws the next token of every row.

    Every draw of a sentence has a random generator of its own, seeded with the seed, the source
    ids, the number of the draw and a key that tells equal sentences apart.
    """

    def __init__(self, task: SearchTask) -> None:
        self.config = task.config
        columns = zip(task.keys, task.src.tolist(), task.src_lengths.tolist(), strict=True)
        seeds = [
            [[self.config.seed, key, draw, *row[:length]] for draw in range(self.config.beam_size)]
            for key, row, length in columns
        ]
        self.generators = [list(map(np.random.default_rng, some)) for some in seeds]

    def draw(self, log_probs: Tensor, sentences: Tensor) -> Tensor:
        """Draw from log-probabilities (rows, V) of `sentences` (rows,); return tokens (rows,)."""
        noise = np.empty(log_probs.shape, dtype=np.float32)  # (rows, V)
        for row, sentence in enumerate(sentences.tolist()):
            generator = self.generators[sentence][row % self.config.beam_size]
            # in float64, where no token of many thousands gets an exact 0 by chance
            noise[row] = -np.log(generator.standard_exponential(log_probs.size(1)))
        # the maximum of logits plus Gumbel noise is a draw from their softmax (Gumbel, 1954); other
        # than a sum of probabilities it does not turn over when these differ in the last digit
        gumbel = send(torch.from_numpy(noise), log_probs.device)
        return (narrow(log_probs, self.config) + gumbel).argmax(dim=1)


def narrow(log_probs: Tensor, config: SearchConfig) -> Tensor:
    """Return the logits (rows, V) to draw from: divided by the temperature, then minus infinity for
    all but the `top_k` likeliest, then for all but the likeliest with a share of `top_p` in what is
    left (Fan et al., 2018; Holtzman et al., 2020). Tokens as likely as the last one kept stay too.
    """
    logits = log_probs / config.temperature  # (rows, V)
    if 0 < config.top_k < logits.size(1):
        least = logits.topk(config.top_k).values[:, -1:]  # (rows, 1)
        logits = logits.masked_fill(logits < least, NEG_INF)
    if config.top_p < 1:
        ranked = logits.sort(dim=1, descending=True).values  # (rows, V)
        shares = ranked.softmax(dim=1)
        before = shares.cumsum(dim=1) - shares  # share of the likelier ones
        least = ranked.masked_fill(before >= config.top_p, float("inf")).amin(dim=1, keepdim=True)
        logits = logits.masked_fill(logits < least, NEG_INF)
    return logits


def occurrences(rows: Iterable[Sequence[int]]) -> list[int]:
    """Return for each row of ids how many equal rows precede it.

    As keys they give equal sentences draws of their own, and all others none that depend on their
    place.
    """
    seen: defaultdict[tuple[int, ...], Iterator[int]] = defaultdict(itertools.count)
    return [next(seen[tuple(row)]) for row in rows]
