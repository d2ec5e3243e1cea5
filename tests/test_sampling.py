"""Sampling: the distribution of the draws, and the values that a draw depends on."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from searching import (
    ALLOWED_SYMBOLS,
    LENGTHS,
    Sentence,
    ToyStepper,
    assert_same,
    config,
    decided_model,
    find,
    score_by_formula,
    source_ids,
    toy_log_probs,
    toy_source,
)
from tiny import BOS, EOS, random_source

from nmt.search.sampling import Sampler, count_repeats, truncate
from nmt.search.stepper import ModelStepper

CUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.5},
    "hot": {"temperature": 2.0},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.7},
    "all": {"temperature": 1.5, "top_k": 3, "top_p": 0.8},
    "one": {"top_k": 1},
    "tiny share": {"top_p": 1e-6},
}
every_cut = pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
DRAWS = 4000


def exact(source: Sentence, prefix: Sentence, cut: dict[str, Any]) -> dict[int, float]:
    """Return the probability of each next symbol, token by token as docs/search.md says."""
    log_probs = toy_log_probs(source, (BOS, *prefix))
    temperature = cut.get("temperature", 1.0)
    weights = {s: math.exp(log_probs[s] / temperature) for s in ALLOWED_SYMBOLS}
    ranked = sorted(weights, key=lambda s: -weights[s])[: cut.get("top_k", 0) or None]
    total, share, kept = sum(weights[s] for s in ranked), 0.0, []
    for symbol in ranked:
        if share >= cut.get("top_p", 1.0):
            break
        kept.append(symbol)
        share += weights[symbol] / total
    mass = sum(weights[s] for s in kept)
    return {s: weights[s] / mass for s in kept}


def exact_sentences(source: Sentence, limit: int, cut: dict[str, Any]) -> dict[Sentence, float]:
    live: dict[Sentence, float] = {(): 1.0}
    done: dict[Sentence, float] = {}
    for length in range(1, limit + 1):
        extended = {
            (*prefix, symbol): p * q
            for prefix, p in live.items()
            for symbol, q in exact(source, prefix, cut).items()
        }
        over = {s: p for s, p in extended.items() if s[-1] == EOS or length == limit}
        done |= over
        live = {s: p for s, p in extended.items() if s not in over}
    return done


@every_cut
def test_draws_follow_the_exact_distribution_and_are_scored_without_temperature_and_cuts(
    cut: dict[str, Any],
) -> None:
    source, settings = toy_source(4), config(DRAWS, b=3, sampling=True, **cut)
    (found,) = find(ToyStepper(), source, settings)
    counts = Counter(tuple(h.tokens) for h in found)
    expected = exact_sentences(source_ids(source, 0), 3, cut)
    assert sum(expected.values()) == pytest.approx(1.0)
    assert set(counts) <= set(expected)
    for sentence, p in expected.items():
        spread = math.sqrt(DRAWS * p * (1 - p))
        assert abs(counts[sentence] - DRAWS * p) <= 4.5 * spread + 1, sentence
    judged = [
        score_by_formula(tuple(h.tokens), source_ids(source, 0), settings) for h in found[:40]
    ]
    assert_same(found[:40], judged)


class _Fixed(ToyStepper):
    def __init__(self, log_probs: torch.Tensor) -> None:
        super().__init__()
        self.table = log_probs

    def step(self, tokens: torch.Tensor, state: Any) -> torch.Tensor:
        return self.table.repeat(len(state.rows), 1)


@pytest.mark.slow
def test_each_token_is_drawn_with_its_share_and_of_many_none_is_favored() -> None:
    log_probs = torch.full((1, 6), float("-inf"))
    log_probs[0, 4:] = torch.tensor([0.9, 0.1]).log()
    for temperature, share in ((1.0, 0.1), (2.0, 0.25)):
        settings = config(600, b=60, sampling=True, temperature=temperature)
        (found,) = find(_Fixed(log_probs), toy_source(2), settings)
        counts = Counter(token for h in found for token in h.tokens)
        assert abs(counts[5] / 36_000 - share) < 0.006, temperature  # 2.6 or 3.8 deviations
    log_probs = torch.full((1, 20_000), math.log(1e-12))  # float32 noise would pick some of these
    log_probs[0, :2] = math.log(0.5)
    (found,) = find(_Fixed(log_probs), toy_source(2), config(500, b=6, sampling=True))
    assert Counter(token for h in found for token in h.tokens) == {1: 3000}  # id 0 is PAD


def drawn(rows: list[int], draws: int = 3, **changes: Any) -> list[list[Sentence]]:
    """Draw translations of some of the sentences of LENGTHS, and a long one."""
    src, lengths = random_source([*LENGTHS, 60])
    width = int(lengths[rows].max())
    settings = config(draws, a=1.0, b=8, sampling=True, **changes)
    found = find(ModelStepper(decided_model()), (src[rows, :width], lengths[rows]), settings)
    return [[tuple(h.tokens) for h in hypotheses] for hypotheses in found]


def test_a_draw_depends_on_no_neighbour_and_not_on_the_number_of_draws() -> None:
    count = len(LENGTHS)
    alone = [drawn([row])[0] for row in range(count)]
    assert len({tuple(draws) for draws in alone}) == count
    order = np.random.default_rng(0).permutation(count + 1).tolist()
    for rows in (list(range(count)), order, [3, count]):
        for row, draws in zip(rows, drawn(rows), strict=True):
            assert row == count or draws == alone[row]
    more = drawn(list(range(count)), draws=7)
    assert [draws[:3] for draws in more] == alone


def test_seeds_draws_and_equal_sentences_differ() -> None:
    once = drawn([0, 5, 0, 0], draws=4)
    assert len({tuple(draws) for draws in once}) == 4
    assert len(set(once[0])) > 1
    assert drawn([0, 5, 0, 0], draws=4) == once
    assert drawn([0], draws=4) == once[:1]
    other = drawn([0, 5, 0, 0], draws=4, seed=2)
    assert all(a != b for a, b in zip(once, other, strict=True))
    assert count_repeats([[1, 2], [1], [1, 2], [1, 2], [1]]) == [0, 0, 1, 2, 1]


def test_the_narrowed_choice_keeps_the_likeliest_and_those_as_likely_as_the_last() -> None:
    log_probs = torch.tensor([[0.4, 0.1, 0.1, 0.3, 0.1]]).log()
    for cut, kept in (
        ({"top_k": 2}, [0, 3]),
        ({"top_k": 3}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.39}, [0]),
        ({"top_p": 0.5}, [0, 3]),
        ({"top_k": 2, "top_p": 0.56}, [0]),  # of the two left 0.4 / 0.7 is enough
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
    ):
        logits = truncate(log_probs, config(1, sampling=True, **cut))
        assert (logits[0] > float("-inf")).nonzero().flatten().tolist() == kept, cut


def test_noise_is_as_exact_as_the_log_probabilities() -> None:
    """Log-probabilities that undo the noise of each token, except a thousandth for one."""
    src, _ = random_source([4])
    settings = config(1, seed=5)
    key = [5, 0, 0, *src[0].tolist()]
    noise = -np.log(np.random.default_rng(key).standard_exponential(1000))
    for best in (3, 500):
        log_probs = torch.from_numpy(-noise)[None].float()
        log_probs[0, best] += 1e-3
        sampler = Sampler(src.tolist(), [0], settings)
        assert sampler.draw(log_probs, torch.tensor([0])).tolist() == [best]
