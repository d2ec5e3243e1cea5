"""Sampling: the distribution of samples, and the inputs that a sample depends on."""

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

from nmt.config import SearchConfig
from nmt.search.sampling import Sampler, make_sampling_keys, truncate
from nmt.search.stepper import ModelStepper

SAMPLING_SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.5},
    "hot": {"temperature": 2.0},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.7},
    "all": {"temperature": 1.5, "top_k": 3, "top_p": 0.8},
    "one": {"top_k": 1},
    "tiny share": {"top_p": 1e-6},
}
every_setting = pytest.mark.parametrize(
    "changes", SAMPLING_SETTINGS.values(), ids=SAMPLING_SETTINGS.keys()
)
NUM_SAMPLES = 4000


def symbol_probabilities(
    source: Sentence,
    prefix: Sentence,
    *,
    temperature: float = 1.0,
    top_k: int = len(ALLOWED_SYMBOLS),
    top_p: float = 1.0,
) -> dict[int, float]:
    """Return the probability of each next symbol, by the definitions of docs/search.md."""
    log_probs = toy_log_probs(source, (BOS, *prefix))
    weights = {symbol: math.exp(log_probs[symbol] / temperature) for symbol in ALLOWED_SYMBOLS}
    most_likely = sorted(weights, key=weights.__getitem__, reverse=True)[:top_k]
    total = sum(weights[symbol] for symbol in most_likely)
    nucleus: dict[int, float] = {}
    for symbol in most_likely:
        if sum(nucleus.values()) < top_p * total:
            nucleus[symbol] = weights[symbol]
    return {symbol: weight / sum(nucleus.values()) for symbol, weight in nucleus.items()}


def sentence_probabilities(
    source: Sentence, limit: int, changes: dict[str, Any]
) -> dict[Sentence, float]:
    """Return the probability of each sentence that ends with EOS or reaches the limit."""
    live: dict[Sentence, float] = {(): 1.0}
    finished: dict[Sentence, float] = {}
    while live:
        prefix, probability = live.popitem()
        for symbol, p in symbol_probabilities(source, prefix, **changes).items():
            sentence = (*prefix, symbol)
            is_finished = symbol == EOS or len(sentence) == limit
            (finished if is_finished else live)[sentence] = probability * p
    return finished


@every_setting
def test_samples_follow_the_distribution_and_have_the_scores_of_the_model(
    changes: dict[str, Any],
) -> None:
    """Temperature, top_k and top_p do not change the scores."""
    source = toy_source(4)
    src = source_ids(source, 0)
    settings = config(NUM_SAMPLES, b=3, sampling=True, **changes)
    (samples,) = find(ToyStepper(), source, settings)
    counts = Counter(tuple(h.tokens) for h in samples)
    expected = sentence_probabilities(src, 3, changes)
    assert sum(expected.values()) == pytest.approx(1.0)
    assert set(counts) <= set(expected)
    for sentence, p in expected.items():
        standard_deviation = math.sqrt(NUM_SAMPLES * p * (1 - p))
        difference = abs(counts[sentence] - NUM_SAMPLES * p)
        assert difference <= 4.5 * standard_deviation + 1, sentence
    expected_samples = [score_by_formula(tuple(h.tokens), src, settings) for h in samples[:40]]
    assert_same(samples[:40], expected_samples)


class FixedStepper(ToyStepper):
    """Gives every prefix the same log-probabilities (1, V)."""

    def __init__(self, log_probs: torch.Tensor) -> None:
        super().__init__()
        self.log_probs = log_probs

    def step(self, tokens: torch.Tensor, state: Any) -> torch.Tensor:
        return self.log_probs.repeat(len(state.rows), 1)


@pytest.mark.slow
def test_tokens_are_as_frequent_as_they_are_probable() -> None:
    log_probs = torch.full((1, 6), float("-inf"))
    log_probs[0, 4:] = torch.tensor([0.9, 0.1]).log()
    for temperature, probability in ((1.0, 0.1), (2.0, 0.25)):
        settings = config(600, b=60, sampling=True, temperature=temperature)
        counts = count_tokens(FixedStepper(log_probs), settings)
        # 2.6 or 3.8 standard deviations
        assert abs(counts[5] / 36_000 - probability) < 0.006, temperature
    log_probs = torch.full((1, 20_000), math.log(1e-12))  # float32 noise would pick some of these
    log_probs[0, :2] = math.log(0.5)
    counts = count_tokens(FixedStepper(log_probs), config(500, b=6, sampling=True))
    assert counts == {1: 3000}  # id 0 is PAD


def count_tokens(stepper: ToyStepper, settings: SearchConfig) -> Counter[int]:
    """Sample translations of one sentence; count the tokens."""
    (samples,) = find(stepper, toy_source(2), settings)
    counts: Counter[int] = Counter()
    for hypothesis in samples:
        counts.update(hypothesis.tokens)
    return counts


def sample(rows: list[int], num_samples: int = 3, **changes: Any) -> list[list[Sentence]]:
    """Sample translations of sentences with the lengths of LENGTHS; the last row has 60 tokens."""
    src, lengths = random_source([*LENGTHS, 60])
    width = int(lengths[rows].max())
    settings = config(num_samples, a=1.0, b=8, sampling=True, **changes)
    results = find(ModelStepper(decided_model()), (src[rows, :width], lengths[rows]), settings)
    return [[tuple(h.tokens) for h in hypotheses] for hypotheses in results]


def test_a_sample_does_not_depend_on_the_batch_or_on_the_number_of_samples() -> None:
    count = len(LENGTHS)
    expected = [sample([row])[0] for row in range(count)]
    assert len(set(map(tuple, expected))) == count
    order = np.random.default_rng(0).permutation(count + 1).tolist()
    for rows in (list(range(count)), order, [3, count]):
        for row, samples in zip(rows, sample(rows), strict=True):
            assert row == count or samples == expected[row]
    more_samples = sample(list(range(count)), num_samples=7)
    assert [samples[:3] for samples in more_samples] == expected


def test_samples_differ_between_seeds_and_between_equal_sentences() -> None:
    rows = [0, 5, 0, 0]
    samples = sample(rows, num_samples=4)
    assert len(set(map(tuple, samples))) == 4
    assert len(set(samples[0])) > 1
    assert sample(rows, num_samples=4) == samples
    assert sample([0], num_samples=4) == samples[:1]
    for row, other_seed in enumerate(sample(rows, num_samples=4, seed=2)):
        assert other_seed != samples[row]
    assert make_sampling_keys([[1, 2], [1], [1, 2], [1, 2], [1]]) == [0, 0, 1, 2, 1]


def test_truncation_keeps_the_most_likely_tokens_and_ties_with_the_last() -> None:
    log_probs = torch.tensor([[0.4, 0.1, 0.1, 0.3, 0.1]]).log()
    for changes, expected in (
        ({"top_k": 2}, [0, 3]),
        ({"top_k": 3}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.39}, [0]),
        ({"top_p": 0.5}, [0, 3]),
        ({"top_k": 2, "top_p": 0.56}, [0]),  # 0.4 / 0.7 of the two most likely
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
        ({"min_p": 0.7}, [0, 3]),
        ({"min_p": 0.2, "epsilon": 0.2}, [0, 3]),
        ({"epsilon": 0.9}, [0]),
        ({"top_k": 2, "epsilon": 0.5}, [0]),  # 0.4 / 0.7
    ):
        logits = truncate(log_probs, config(1, sampling=True, **changes))
        tokens = (logits[0] > float("-inf")).nonzero().flatten().tolist()
        assert tokens == expected, changes


@pytest.mark.slow
def test_min_p_and_epsilon_keep_what_the_warpers_of_transformers_keep() -> None:
    from transformers import EpsilonLogitsWarper, MinPLogitsWarper

    log_probs = (3 * torch.randn(200, 50, generator=torch.Generator().manual_seed(3))).log_softmax(
        1
    )
    for share in (0.01, 0.1, 0.5, 0.9):
        for changes, warper in (
            ({"min_p": share}, MinPLogitsWarper(share)),
            ({"epsilon": share}, EpsilonLogitsWarper(share)),
        ):
            logits = truncate(log_probs, config(1, sampling=True, **changes))
            expected = warper(None, log_probs)
            assert torch.equal(logits.isneginf(), expected.isneginf()), changes


def test_noise_is_as_precise_as_the_log_probabilities() -> None:
    """Subtracts the noise from the log-probabilities, so that 0.001 decides."""
    src, _ = random_source([4])
    settings = config(1, seed=5)
    key = [5, 0, 0, *src[0].tolist()]
    noise = -np.log(np.random.default_rng(key).standard_exponential(1000))
    for best in (3, 500):
        log_probs = torch.from_numpy(-noise)[None].float()
        log_probs[0, best] += 1e-3
        sampler = Sampler(src.tolist(), [0], settings)
        assert sampler.draw(log_probs, torch.tensor([0])).tolist() == [best]
