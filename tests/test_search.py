"""Search over a toy model against the truth: all sequences enumerated, and a beam by lists."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from searching import (
    ALLOWED,
    TASTES,
    Sentence,
    Taste,
    ToyState,
    ToyStepper,
    assert_same,
    beam_by_lists,
    config,
    enumerate_all,
    find,
    judge,
    normalized,
    source_of,
    source_rows,
    toy_log_probs,
    toy_source,
)
from tiny import BOS, EOS, UNK, VOCAB_SIZE
from torch import Tensor

from nmt.config import Normalization, Stop
from nmt.errors import ModelError
from nmt.search.request import SearchRequest

RULES: dict[str, dict[str, Any]] = {
    **{f"wu{alpha}": {"alpha": alpha} for alpha in (-0.5, 0.0, 0.6, 1.0, 2.0)},
    "average": {"normalization": Normalization.average},
    "none": {"normalization": Normalization.none},
    "reward": {"normalization": Normalization.none, "word_reward": 0.8},
    "wu reward": {"alpha": 0.6, "word_reward": 0.5},
    "wu2 reward": {"alpha": 2.0, "word_reward": 2.0},
    "fine for words": {"alpha": -0.5, "word_reward": -0.7},
    "coverage": {"alpha": 0.6, "coverage_penalty": 0.4, "alignment": True},
    "some coverage": {"alpha": 1.0, "coverage_penalty": 0.1},
    "least": {"alpha": 1.0, "min_length": 2},
    "least short": {"alpha": -0.5, "min_length": 2},
}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())


@every_rule
def test_a_wide_beam_finds_the_truth(rule: dict[str, Any]) -> None:
    """As wide as all prefixes; and a little less, where they fit but not all hypotheses."""
    for lengths, beam_size in (((4, 2), 400), ((3,), 4 * 81)):
        source, settings = toy_source(*lengths), config(beam_size, **rule)
        for row, found in enumerate(find(ToyStepper(), source, settings)):
            expected = enumerate_all(source_of(source, row), 5, settings)
            assert len(expected) == sum(3**n for n in range(settings.min_length, 6))
            assert_same(found, expected[:beam_size])


@every_rule
def test_beam_search_equals_one_by_lists(rule: dict[str, Any]) -> None:
    source = toy_source(6, 2, 9, 4, 1, 3)
    limits = [2 * (length - 1) + 3 for length in source[1].tolist()]
    for beam_size, taste, stop in itertools.product([2, 5], TASTES, Stop):
        settings = config(beam_size, a=2.0, b=3, stop=stop, **rule)
        found = find(ToyStepper(taste), source, settings)
        for row, (hypotheses, limit) in enumerate(zip(found, limits, strict=True)):
            expected, _ = beam_by_lists(source_of(source, row), limit, settings, taste)
            assert_same(hypotheses, expected, case=(beam_size, taste, stop, row))


@every_rule
def test_search_ends_with_the_first_step_after_which_nothing_better_can_come(
    rule: dict[str, Any],
) -> None:
    for length, taste, stop in itertools.product((6, 2, 9), TASTES, Stop):
        settings = config(3, b=12, stop=stop, **rule)
        stepper, source = ToyStepper(taste), toy_source(length)
        find(stepper, source, settings)
        _, num_steps = beam_by_lists(source_of(source, 0), 12, settings, taste)
        assert len(stepper.num_rows) == num_steps, (length, taste, stop)


def test_stopping_first_takes_fewer_steps_where_longer_hypotheses_score_higher() -> None:
    for rule in RULES.values():
        num_steps = {}
        for stop in Stop:
            stepper = ToyStepper(Taste(eos_bonus=1.5))
            find(stepper, toy_source(6), config(3, b=40, stop=stop, **rule), n_best=1)
            num_steps[stop] = len(stepper.num_rows)
        gains_by_length = rule.get("alpha", 0.6) > 0 or rule.get("word_reward", 0) > 0
        if rule == RULES["none"] or not gains_by_length:
            assert num_steps[Stop.first] == num_steps[Stop.exact], rule
        else:
            assert num_steps[Stop.first] < num_steps[Stop.exact], rule


class Scripted(ToyStepper):
    """Gives each prefix the log-probabilities of a table; all other tokens have none."""

    def __init__(self, script: dict[Sentence, dict[int, float]]) -> None:
        super().__init__()
        self.script = script

    def step(self, tokens: Tensor, state: ToyState) -> Tensor:
        super().step(tokens, state)
        table = torch.full((len(state.rows), VOCAB_SIZE), float("-inf"))
        for row, (_, prefix) in enumerate(state.rows):
            for token, log_prob in self.script.get(prefix[1:], {}).items():
                table[row, token] = log_prob
        return table


@every_rule
def test_a_live_hypothesis_is_dropped_only_when_it_cannot_win_by_the_least(
    rule: dict[str, Any],
) -> None:
    """Two results have ended with 1 and 2 tokens; one more comes near the last of them with 3."""
    if rule.get("coverage_penalty") or rule.get("min_length"):
        return  # the bound is not exact; it would forbid the first result
    settings = config(3, b=3, **rule)
    for n_best, margin in itertools.product((1, 2), (-0.002, -0.00002, 0.00002, 0.002)):
        ended = [normalized(-2.0, 1, settings), normalized(-2.2, 2, settings)]
        worst = sorted(ended, reverse=True)[n_best - 1]
        divisor = normalized(1.0, 3, settings) - normalized(0.0, 3, settings)
        log_prob = (worst + margin) / divisor - 3 * settings.word_reward
        first = min(log_prob, -0.5)  # the rest comes with the second token
        stepper = Scripted(
            {
                (): {EOS: -2.0, 4: -2.2, 5: first},
                (4,): {EOS: 0.0},
                (5,): {5: log_prob - first},
                (5, 5): {EOS: 0.0},
            }
        )
        (found,) = find(stepper, toy_source(2), settings, n_best=n_best)
        wins = [5, 5, EOS] in [h.tokens for h in found]
        assert wins == (margin > 0), (n_best, margin)
        bar_is_known = n_best == 1 and ended[0] >= ended[1]  # else the second token counts
        assert len(stepper.num_rows) <= (3 if wins or not bar_is_known else 2), (n_best, margin)


def test_a_beam_of_one_is_greedy() -> None:
    source, settings = toy_source(6, 2, 9, 4), config(1, 0.6, a=1.0, b=3)
    cases = [
        (t, *case) for t in TASTES for case in enumerate(find(ToyStepper(t), source, settings))
    ]
    for taste, row, (hypothesis,) in cases:
        tokens: Sentence = ()
        while len(tokens) < source[1][row] - 1 + 3 and EOS not in tokens:
            log_probs = toy_log_probs(source_of(source, row), (BOS, *tokens), taste)
            tokens = (*tokens, max(ALLOWED, key=lambda symbol: log_probs[symbol]))
        assert_same([hypothesis], [judge(tokens, source_of(source, row), settings, taste)])


# --- what holds for all results


@pytest.mark.parametrize("beam_size", [1, 3])
def test_each_sentence_has_its_own_limit_and_leaves_the_batch_when_it_is_done(
    beam_size: int,
) -> None:
    settings = config(beam_size, a=1.5, b=2)
    source, limits = toy_source(7, 1, 4), [9 + 2, 0 + 2, 4 + 2]
    assert SearchRequest(source_rows(source), settings).length_limits() == limits
    stepper = ToyStepper(Taste(eos_bonus=-50.0))
    for hypotheses, limit in zip(find(stepper, source, settings), limits, strict=True):
        assert len(hypotheses) == beam_size
        assert {len(h.tokens) for h in hypotheses} == {limit}
        assert not any(h.finished for h in hypotheses)
    for step, sources in enumerate(stepper.sources, start=1):
        left = [row for row in range(3) if limits[row] >= step]
        assert sources == {source_of(source, row) for row in left}
        assert stepper.num_rows[step - 1] == len(left) * (1 if step == 1 else beam_size)
    assert len(stepper.num_rows) == 11


@pytest.mark.slow
@every_rule
def test_fewer_results_are_the_first_of_more_and_found_with_less_work(rule: dict[str, Any]) -> None:
    source, settings = toy_source(4, 2, 7, 1), config(4, a=1.0, b=20, **rule)
    for taste in TASTES:
        everything = ToyStepper(taste)
        expected = find(everything, source, settings)
        for n_best in (1, 2, 9):
            stepper = ToyStepper(taste)
            found = find(stepper, source, settings, n_best=n_best)
            assert found == [hypotheses[:n_best] for hypotheses in expected], (taste, n_best)
            assert sum(stepper.num_rows) <= sum(everything.num_rows)
            if n_best == 1 and taste.eos_bonus > 0 and rule == RULES["wu0.6"]:
                assert sum(stepper.num_rows) < sum(everything.num_rows)


# --- ties and broken models


class Undecided(ToyStepper):
    """Finds everything equally likely, or is not a number at all."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def step(self, tokens: Tensor, state: ToyState) -> Tensor:
        return torch.full((super().step(tokens, state).size(0), VOCAB_SIZE), self.value)


def test_of_equals_the_first_parent_and_the_lowest_id_win() -> None:
    settings = config(1, b=3, alpha=0.0)
    assert find(Undecided(-3.0), toy_source(3), settings)[0][0].tokens == [UNK] * 3
    (found,) = find(Undecided(-3.0), toy_source(3), replace(settings, beam_size=4))
    ends = [[EOS], [UNK, EOS], [UNK, UNK, EOS], [UNK, UNK, UNK]]
    assert [h.tokens for h in found] == ends  # the ids are UNK 1, EOS 3, 4, 5, ...


def test_of_results_with_equal_scores_the_one_that_ended_first_stands_first() -> None:
    stepper = Scripted({(): {EOS: -1.0, 4: -1.0}, (4,): {EOS: 0.0}})
    (found,) = find(stepper, toy_source(2), config(2, b=4, alpha=0.0))
    assert [h.tokens for h in found] == [[EOS], [4, EOS]]
    (found,) = find(stepper, toy_source(2), config(2, b=4, alpha=0.0), n_best=1)
    assert [h.tokens for h in found] == [[EOS]]
    assert stepper.num_rows[-1] == 1
    assert len(stepper.num_rows) == 2 + 1  # an equal one does not win


def test_a_model_that_gives_no_numbers_is_refused() -> None:
    for value, beam_size in itertools.product((float("nan"), float("-inf")), (1, 4)):
        with pytest.raises(ModelError, match="gives no probabilities"):
            find(Undecided(value), toy_source(3, 2), config(beam_size))
