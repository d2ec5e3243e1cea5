"""The score of a hypothesis, and the upper bound on the score of a live one."""

from __future__ import annotations

import math
import random

import pytest
import torch

from nmt.config import Normalization, SearchConfig
from nmt.errors import ConfigError
from nmt.search.scoring import coverage_score, min_log_prob, score


def test_scores_follow_the_written_formulas() -> None:
    assert score(-6.0, 7, SearchConfig(length_penalty=1.0)) == pytest.approx(-3.0)
    average = SearchConfig(normalization=Normalization.average, length_penalty=9.0)
    assert score(-6.0, 4, average) == pytest.approx(-1.5)
    rewarded = SearchConfig(normalization=Normalization.none, word_reward=0.5)
    assert score(-6.0, 4, rewarded) == pytest.approx(-4.0)
    covered = SearchConfig(length_penalty=1.0, word_reward=1.0, coverage_penalty=0.2)
    assert score(-6.0, 7, covered, coverage=-10.0) == pytest.approx((-6.0 + 7) / 2 - 2.0)


def bound(score: float, min_length: int, max_length: int, config: SearchConfig) -> float:
    values = torch.tensor([[score], [min_length], [max_length]], dtype=torch.float64)
    return float(min_log_prob(values[0], values[1], config, max_lengths=values[2]))


def test_min_log_prob_is_the_least_that_reaches_a_score_at_any_length() -> None:
    rng = random.Random(0)
    num_inside = 0
    for _ in range(1500):
        settings = SearchConfig(
            normalization=rng.choice(list(Normalization)),
            length_penalty=rng.choice(
                [-0.5, 0.0, 0.6, 1.0, 2.0, rng.uniform(0, 1), rng.uniform(-3, 3)]
            ),
            word_reward=rng.choice([0.0, rng.uniform(-3, 3), rng.uniform(-0.6, 0.6)]),
        )
        target_score = rng.uniform(-9, 3)
        min_length = rng.randint(1, 20)
        max_length = min_length + rng.randint(0, 60)
        log_prob = bound(target_score, min_length, max_length, settings)
        lengths = range(min_length, max_length + 1)
        assert max(score(log_prob + 1e-6, length, settings) for length in lengths) > target_score
        assert max(score(log_prob - 1e-6, length, settings) for length in lengths) < target_score
        _, best_length = max((score(log_prob, length, settings), length) for length in lengths)
        if min_length < best_length < max_length:
            num_inside += 1
    assert num_inside > 5  # the best length is not always the first or the last
    assert bound(-math.inf, 3, 9, SearchConfig(word_reward=0.5)) == -math.inf


def test_coverage_penalizes_source_words_with_little_attention() -> None:
    attended = torch.tensor([[0.5, 2.0, 0.25, 0.9], [0.1, 0.0, 9.0, 9.0]])
    scores = coverage_score(attended, torch.tensor([3, 1]))
    assert scores.tolist() == pytest.approx([math.log(0.5) + math.log(0.25), math.log(0.1)])
    unseen = coverage_score(torch.zeros(1, 2), torch.tensor([1]))
    assert -90 < float(unseen) < -80


def test_settings_of_sampling_are_refused_without_sampling() -> None:
    for key, value in (
        ("temperature", 0.5),
        ("top_k", 3),
        ("top_p", 0.5),
        ("min_p", 0.5),
        ("epsilon", 0.1),
    ):
        with pytest.raises(ConfigError, match=f"{key}={value}.*sampling=true"):
            SearchConfig(**{key: value})  # type: ignore[arg-type]
