"""Search over a toy model against the truth: all sequences enumerated, and a beam by lists."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import BOS, EOS, PAD, UNK, VOCAB_SIZE
from searching import (
    ALLOWED,
    NO_TASTE,
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
    source_of,
    toy_log_probs,
    toy_source,
)
from torch import Tensor

from nmt.config import Normalization
from nmt.errors import ModelError
from nmt.search.search import length_limits

RULES: dict[str, dict[str, Any]] = {
    **{f"wu{alpha}": {"alpha": alpha} for alpha in (-0.5, 0.0, 0.6, 1.0, 2.0)},
    "average": {"normalization": Normalization.average},
    "none": {"normalization": Normalization.none},
    "reward": {"normalization": Normalization.none, "word_reward": 0.8},
    "wu reward": {"alpha": 0.6, "word_reward": 0.5},
    "wu2 reward": {"alpha": 2.0, "word_reward": 2.0},
    "fine for words": {"alpha": -0.5, "word_reward": -0.7},
    "coverage": {"alpha": 0.6, "coverage_penalty": 0.4, "alignment": True},
    "least": {"alpha": 1.0, "min_length": 2},
}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())


@every_rule
def test_a_beam_as_wide_as_all_prefixes_finds_the_truth(rule: dict[str, Any]) -> None:
    source = toy_source(4, 2)
    settings = config(400, **rule)
    for row, found in enumerate(find(ToyStepper(), source, settings)):
        expected = enumerate_all(source_of(source, row), 5, settings)
        assert len(expected) == sum(3**n for n in range(settings.min_length, 6))
        assert_same(found, expected)


@every_rule
def test_of_a_wide_beam_the_best_are_kept(rule: dict[str, Any]) -> None:
    """All prefixes fit a beam of 4 * 81, but not all hypotheses."""
    source, settings = toy_source(3), config(4 * 81, **rule)
    (found,) = find(ToyStepper(), source, settings)
    assert_same(found, enumerate_all(source_of(source, 0), 5, settings)[: 4 * 81])


@pytest.mark.parametrize("beam_size", [2, 3, 5])
@every_rule
@pytest.mark.parametrize("taste", TASTES)
def test_beam_search_equals_one_by_lists_that_never_stops_early(
    beam_size: int, rule: dict[str, Any], taste: Taste
) -> None:
    source = toy_source(6, 2, 9, 4, 1, 3)
    settings = config(beam_size, a=2.0, b=3, **rule)
    limits = [2 * (length - 1) + 3 for length in source[1].tolist()]
    found = find(ToyStepper(taste), source, settings)
    for row, (hypotheses, limit) in enumerate(zip(found, limits, strict=True)):
        expected, _ = beam_by_lists(source_of(source, row), limit, settings, taste)
        assert_same(hypotheses, expected)


@every_rule
@pytest.mark.parametrize("taste", TASTES)
def test_search_ends_with_the_first_step_after_which_nothing_better_can_come(
    rule: dict[str, Any], taste: Taste
) -> None:
    settings = config(3, b=12, **rule)
    for length in (6, 2, 9):
        stepper, source = ToyStepper(taste), toy_source(length)
        find(stepper, source, settings)
        _, num_steps = beam_by_lists(source_of(source, 0), 12, settings, taste)
        assert len(stepper.num_rows) == num_steps


@pytest.mark.parametrize("taste", TASTES)
def test_a_beam_of_one_is_greedy(taste: Taste) -> None:
    source, settings = toy_source(6, 2, 9, 4), config(1, 0.6, a=1.0, b=3)
    found = find(ToyStepper(taste), source, settings)
    for row, (hypothesis,) in enumerate(found):
        tokens: Sentence = ()
        while len(tokens) < source[1][row] - 1 + 3 and EOS not in tokens:
            log_probs = toy_log_probs(source_of(source, row), (BOS, *tokens), taste)
            tokens = (*tokens, max(ALLOWED, key=lambda symbol: log_probs[symbol]))
        assert_same([hypothesis], [judge(tokens, source_of(source, row), settings, taste)])


# --- what holds for all results


@pytest.mark.parametrize("beam_size", [2, 5, 50])
@every_rule
def test_hypotheses_are_sorted_and_none_comes_twice(beam_size: int, rule: dict[str, Any]) -> None:
    for hypotheses in find(ToyStepper(), toy_source(5, 2, 3), config(beam_size, **rule)):
        assert len({tuple(h.tokens) for h in hypotheses}) == len(hypotheses) == beam_size
        for kind in (True, False):
            scores = [h.score for h in hypotheses if h.finished is kind]
            assert scores == sorted(scores, reverse=True)
        flags = [h.finished for h in hypotheses]
        assert flags == sorted(flags, reverse=True)
        for h in hypotheses:
            assert h.finished == (h.tokens[-1] == EOS)
            assert not {PAD, BOS} & set(h.tokens)
            assert EOS not in h.tokens[:-1]
            assert len(h.token_log_probs) == len(h.tokens)
            assert h.log_prob == pytest.approx(sum(h.token_log_probs), abs=1e-9)


@pytest.mark.parametrize("beam_size", [1, 3])
def test_each_sentence_has_its_own_limit_and_hypotheses_that_meet_it_are_unfinished(
    beam_size: int,
) -> None:
    settings = config(beam_size, a=1.5, b=2)
    source = toy_source(7, 1, 4)
    assert length_limits(source[1], settings) == [9 + 2, 0 + 2, 4 + 2]
    found = find(ToyStepper(Taste(eos_bonus=-50.0)), source, settings)
    for hypotheses, limit in zip(found, [11, 2, 6], strict=True):
        assert len(hypotheses) == beam_size
        assert {len(h.tokens) for h in hypotheses} == {limit}
        assert not any(h.finished for h in hypotheses)


@pytest.mark.parametrize("beam_size", [1, 4])
def test_eos_at_the_limit_finishes(beam_size: int) -> None:
    found = find(ToyStepper(Taste(eos_bonus=50.0)), toy_source(3, 1), config(beam_size, b=1))
    assert [(h[0].tokens, h[0].finished) for h in found] == [([EOS], True)] * 2


@pytest.mark.parametrize("beam_size", [1, 3])
def test_sentences_that_are_done_leave_the_batch(beam_size: int) -> None:
    stepper, source = ToyStepper(Taste(eos_bonus=-50.0)), toy_source(9, 2, 5)
    find(stepper, source, config(beam_size, a=1.0, b=3))
    limits = [11, 4, 7]
    for step, sources in enumerate(stepper.sources, start=1):
        left = [row for row in range(3) if limits[row] >= step]
        assert sources == {source_of(source, row) for row in left}
        beams = 1 if step == 1 else beam_size
        assert stepper.num_rows[step - 1] == len(left) * beams
    assert len(stepper.num_rows) == 11


@pytest.mark.parametrize("beam_size", [1, 4])
def test_search_stops_when_nothing_better_can_come(beam_size: int) -> None:
    stepper = ToyStepper(Taste(eos_bonus=8.0))
    find(stepper, toy_source(3, 5), config(beam_size, b=200))
    assert len(stepper.num_rows) < 20


@pytest.mark.parametrize("taste", TASTES[1:3])
@every_rule
def test_finished_hypotheses_do_not_change_while_search_goes_on(
    rule: dict[str, Any], taste: Taste
) -> None:
    """With a higher limit the sentence goes on longer; what has ended before stays as it was."""
    source, ended, num_steps = toy_source(5), [], []
    for limit in (5, 9):
        stepper = ToyStepper(taste)
        (found,) = find(stepper, source, config(300, b=limit, **rule))
        num_steps.append(len(stepper.num_rows))
        ended.append({tuple(h.tokens): h for h in found if h.finished and len(h.tokens) < 5})
    assert num_steps[0] == 5 < num_steps[1]
    assert len(ended[1]) > 5
    assert set(ended[1]) <= set(ended[0])
    for tokens, h in ended[1].items():
        assert h == ended[0][tokens]


# --- ties and broken models


class Undecided(ToyStepper):
    """Finds everything equally likely, or is not a number at all."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def step(self, tokens: Tensor, state: ToyState) -> Tensor:
        return torch.full((super().step(tokens, state).size(0), VOCAB_SIZE), self.value)


@pytest.mark.parametrize("beam_size", [1, 4])
def test_of_equals_the_first_parent_and_the_lowest_id_win(beam_size: int) -> None:
    (found,) = find(Undecided(-3.0), toy_source(3), config(beam_size, b=3, alpha=0.0))
    if beam_size == 1:
        assert found[0].tokens == [UNK] * 3
        return
    assert [h.tokens for h in found[:1]] == [[EOS]]  # the ids are UNK 1, EOS 3, 4, 5, ...
    words = [h.tokens for h in found[1:]]
    assert words == [[UNK, EOS], [UNK, UNK, EOS], [UNK, UNK, UNK]]


@pytest.mark.parametrize("beam_size", [1, 4])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_model_that_gives_no_numbers_is_refused(beam_size: int, value: float) -> None:
    with pytest.raises(ModelError, match="gives no probabilities"):
        find(Undecided(value), toy_source(3, 2), config(beam_size))


def test_the_taste_of_the_toy_matters() -> None:
    source = toy_source(6, 2, 9, 4)
    results = {
        str([h.tokens for row in find(ToyStepper(taste), source, config(3)) for h in row])
        for taste in [*TASTES, replace(NO_TASTE, sharpness=0.5)]
    }
    assert len(results) == len(TASTES) + 1


@every_rule
@pytest.mark.parametrize("taste", TASTES)
def test_fewer_results_are_the_first_of_more_and_found_with_less_work(
    taste: Taste, rule: dict[str, Any]
) -> None:
    source, settings = toy_source(4, 2, 7, 1), config(4, a=1.0, b=20, **rule)
    everything = ToyStepper(taste)
    expected = find(everything, source, settings)
    for n_best in (1, 2, 4, 9):
        stepper = ToyStepper(taste)
        found = find(stepper, source, settings, n_best=n_best)
        assert found == [hypotheses[:n_best] for hypotheses in expected]
        assert sum(stepper.num_rows) <= sum(everything.num_rows)
        if n_best == 1 and taste.eos_bonus > 0 and rule == RULES["wu0.6"]:
            assert sum(stepper.num_rows) < sum(everything.num_rows)
