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


def test_what_a_hypothesis_needs_is_the_least_of_all_lengths() -> None:
    draw, inside = random.Random(0), 0
    for _ in range(1500):
        settings = SearchConfig(
            normalization=draw.choice(list(Normalization)),
            length_penalty=draw.choice(
                [-0.5, 0.0, 0.6, 1.0, 2.0, draw.uniform(0, 1), draw.uniform(-3, 3)]
            ),
            word_reward=draw.choice([0.0, draw.uniform(-3, 3), draw.uniform(-0.6, 0.6)]),
        )
        wanted, first = draw.uniform(-9, 3), draw.randint(1, 20)
        last = first + draw.randint(0, 60)
        least = bound(wanted, first, last, settings)

        def best(log_prob: float) -> tuple[float, int]:
            lengths = range(first, last + 1)  # noqa: B023
            return max((score(log_prob, length, settings), length) for length in lengths)  # noqa: B023

        assert best(least + 1e-6)[0] > wanted > best(least - 1e-6)[0]
        inside += first < best(least)[1] < last
    assert inside > 5  # the best length is neither the first nor the last
    assert bound(-math.inf, 3, 9, SearchConfig(word_reward=0.5)) == -math.inf


def test_coverage_counts_what_each_word_was_left_without() -> None:
    attended = torch.tensor([[0.5, 2.0, 0.25, 0.9], [0.1, 0.0, 9.0, 9.0]])
    found = coverage_score(attended, torch.tensor([3, 1]))
    assert found.tolist() == pytest.approx([math.log(0.5) + math.log(0.25), math.log(0.1)])
    unseen = coverage_score(torch.zeros(1, 2), torch.tensor([1]))
    assert -90 < float(unseen) < -80


def test_settings_out_of_range_are_refused_by_name() -> None:
    for key, value in (
        ("beam_size", 0),
        ("length_penalty", math.nan),
        ("length_penalty", 11),
        ("word_reward", math.inf),
        ("coverage_penalty", -0.1),
        ("max_length_a", math.inf),
        ("min_length", -1),
        ("temperature", 0.0),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("seed", -1),
    ):
        with pytest.raises(ConfigError, match=f"{key}={value}"):
            SearchConfig(sampling=True, **{key: value})  # type: ignore[arg-type]
    for key, value in (("temperature", 0.5), ("top_k", 3), ("top_p", 0.5)):
        with pytest.raises(ConfigError, match=f"{key}={value}.*sampling=true"):
            SearchConfig(**{key: value})  # type: ignore[arg-type]
