"""Search over a Transformer against full forward passes without a cache, and over neighbors."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from searching import (
    LENGTHS,
    TOKENIZER,
    Source,
    assert_same,
    config,
    decided_model,
    find,
    score_ids,
    source_rows,
    teacher_forced,
)
from tiny import BOS, random_source
from torch import Tensor

from nmt.config import Norm, Normalization, SearchConfig
from nmt.model.fast import freeze
from nmt.search.beam import BeamSearch
from nmt.search.hypotheses import Hypothesis
from nmt.search.request import SearchRequest
from nmt.search.stepper import EnsembleStepper, ModelStepper

MODES: dict[str, dict[str, Any]] = {
    "greedy": {"beam_size": 1},
    "beam": {"beam_size": 5},
    "coverage": {"beam_size": 5, "coverage_penalty": 0.3, "alignment": True},
    "draws": {"beam_size": 3, "sampling": True, "top_p": 0.9, "temperature": 1.3},
}
every_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())


class Recorder(ModelStepper):
    """Counts how often beams change joined."""

    num_swaps = 0

    def reorder(self, state: Any, rows: Tensor) -> Any:
        self.num_swaps += rows.tolist() != list(range(len(rows)))
        return super().reorder(state, rows)


@pytest.mark.parametrize("norm", [Norm.pre, pytest.param(Norm.post, marks=pytest.mark.slow)])
def test_scores_equal_a_full_forward_pass_over_the_same_tokens(norm: Norm) -> None:
    model, source = decided_model(norm), random_source(LENGTHS)
    for beam_size in (1, 4):
        stepper, settings = Recorder(model), config(beam_size, a=1.0, b=8)
        results, lengths = find(stepper, source, settings), set()
        for row, hypotheses in enumerate(results):
            assert len(hypotheses) == beam_size
            for h in hypotheses:
                lengths.add(len(h.tokens))
                expected = teacher_forced(model, source, row, h.tokens)
                total = sum(expected)
                score = total / ((5 + len(h.tokens)) / 6) ** 0.6
                found = [*h.token_log_probs, h.log_prob, h.score]
                assert found == pytest.approx([*expected, total, score], abs=1e-4)
        assert len(lengths) > 4  # sentences end at different times
        assert {h.finished for hypotheses in results for h in hypotheses} == {True, False}
        assert stepper.num_swaps > 3


def row_alone(source: Source, row: int) -> Source:
    length = source[1][row : row + 1]
    return source[0][row : row + 1, : int(length)], length


@pytest.mark.slow
@every_mode
def test_a_translation_depends_on_no_neighbor(mode: dict[str, Any]) -> None:
    stepper, settings = ModelStepper(decided_model()), config(a=1.0, b=8, **mode)
    src, lengths = random_source([*LENGTHS * 2, 60])
    count = len(LENGTHS) * 2
    expected = [find(stepper, row_alone((src, lengths), i), settings)[0] for i in range(count)]
    shuffled = np.random.default_rng(0).permutation(count).tolist()
    for rows in (shuffled[:20], [4, count, 0, 7], [*range(7)]):
        width = int(lengths[rows].max())
        found = find(stepper, (src[rows, :width], lengths[rows]), settings, keys=[0] * len(rows))
        for row, hypotheses in zip(rows, found, strict=True):
            if row < count:
                assert_same(hypotheses, expected[row])


def scored_again(
    stepper: ModelStepper, source: Source, row: int, found: list[Hypothesis], config: SearchConfig
) -> list[Hypothesis]:
    src = source[0][row, : source[1][row] - 1].tolist()
    targets = [h.tokens[:-1] for h in found]
    return score_ids(stepper, [src] * len(found), targets, config, max_tokens=60)


@pytest.mark.slow
@every_mode
def test_scoring_a_finished_hypothesis_gives_all_that_search_says_of_it(
    mode: dict[str, Any],
) -> None:
    for rule in ({}, {"normalization": Normalization.average}, {"word_reward": 0.3}):
        settings = config(a=1.0, b=8, **mode, **rule)
        stepper, source = ModelStepper(decided_model(Norm.pre)), random_source(LENGTHS)
        found, count = find(stepper, source, settings), 0
        for row, hypotheses in enumerate(found):
            finished = [h for h in hypotheses if h.finished]
            rescored = scored_again(stepper, source, row, finished, settings)
            assert_same(rescored, finished, tolerance=1e-4)
            count += len(finished)
        assert count > 3


def test_scores_are_float32_when_matrix_multiplications_are_bfloat16() -> None:
    model, source = decided_model(), random_source(LENGTHS)
    stepper = ModelStepper(model, torch.bfloat16)
    state = stepper.start(*source, attention=True)
    log_probs = stepper.step(torch.full((len(LENGTHS),), BOS), state)
    assert state.decoding.source_keys_values[0][0].dtype is torch.bfloat16
    assert stepper.attention(state).dtype is torch.float32
    assert log_probs.dtype is torch.float32
    totals = log_probs.double().exp().sum(-1)
    torch.testing.assert_close(totals, torch.ones_like(totals), atol=1e-5, rtol=0)
    (found,) = find(stepper, row_alone(source, 0), config(3, a=1.0, b=8))
    rescored = scored_again(stepper, source, 0, found, config(3))
    assert [h.log_prob for h in found] == pytest.approx([h.log_prob for h in rescored], abs=0.5)


def test_sentences_that_join_a_search_find_what_they_find_alone() -> None:
    draw, num_joined = random.Random(3), 0
    members = [ModelStepper(decided_model(seed=seed)) for seed in (1, 2)]
    for stepper, n_best, alpha in (
        (members[0], 4, 0.6),
        (members[0], 1, -1.0),
        (EnsembleStepper(members), 2, 0.6),
    ):
        settings = config(4, alpha, a=1.0, b=6)
        lengths = [draw.choice([1, 2, 4, 7, 10, 24]) for _ in range(25)]
        source = random_source(lengths, seed=n_best)
        expected = find(stepper, source, settings, n_best=n_best)
        for member in members:
            freeze(member.model)  # the first results are those of modules
        joined = range(3)
        rows = source_rows(source)
        request = SearchRequest(rows[:3], settings, n_best=n_best)
        beams, found = BeamSearch(stepper, request, TOKENIZER), {}
        while beams.num_live:
            found |= {number: beams.result(number) for number in beams.step()}
            if beams.num_live and joined.stop < len(rows) and draw.random() < 0.3:
                joined = range(joined.stop, min(joined.stop + draw.randint(1, 5), len(rows)))
                beams.join(rows[joined.start : joined.stop])
                num_joined += len(joined)
        assert sorted(found) == list(range(joined.stop)), n_best
        for number, hypotheses in found.items():
            case = (type(stepper).__name__, n_best, number)
            assert_same(hypotheses, expected[number], tolerance=1e-4, case=case)
    assert num_joined > 30
