"""Search over a Transformer: scores equal full forward passes, and do not depend on the batch."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
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
    token_ids,
)
from tiny import BOS, EOS, random_source
from torch import Tensor

from nmt.config import Norm, Normalization, SearchConfig
from nmt.model.fast import prepare_for_inference
from nmt.search.beam import BeamSearch
from nmt.search.hypotheses import Hypothesis
from nmt.search.request import SearchRequest
from nmt.search.search import search
from nmt.search.stepper import EnsembleStepper, ModelStepper

MODES: dict[str, dict[str, Any]] = {
    "greedy": {"beam_size": 1},
    "beam": {"beam_size": 5},
    "coverage": {"beam_size": 5, "coverage_penalty": 0.3, "alignment": True},
    "draws": {"beam_size": 3, "sampling": True, "top_p": 0.9, "temperature": 1.3},
}
every_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())


class ReorderCounter(ModelStepper):
    """Counts the steps after which the rows of the cache are reordered."""

    num_reorders = 0

    def reorder(self, state: Any, rows: Tensor) -> Any:
        if rows.tolist() != list(range(len(rows))):
            self.num_reorders += 1
        return super().reorder(state, rows)


@pytest.mark.parametrize("norm", [Norm.pre, pytest.param(Norm.post, marks=pytest.mark.slow)])
def test_scores_equal_a_full_forward_pass_over_the_same_tokens(norm: Norm) -> None:
    model = decided_model(norm)
    source = random_source(LENGTHS)
    for beam_size in (1, 4):
        stepper = ReorderCounter(model)
        results = find(stepper, source, config(beam_size, a=1.0, b=8))
        lengths = set()
        for row, hypotheses in enumerate(results):
            assert len(hypotheses) == beam_size
            for h in hypotheses:
                lengths.add(len(h.tokens))
                expected = teacher_forced(model, source, row, h.tokens)
                total = sum(expected)
                score = total / ((5 + len(h.tokens)) / 6) ** 0.6
                assert h.token_log_probs == pytest.approx(expected, abs=1e-4)
                assert [h.log_prob, h.score] == pytest.approx([total, score], abs=1e-4)
        assert len(lengths) > 4  # sentences end at different times
        assert {h.finished for hypotheses in results for h in hypotheses} == {True, False}
        assert stepper.num_reorders > 3


def single_row(source: Source, row: int) -> Source:
    length = source[1][row : row + 1]
    return source[0][row : row + 1, : int(length)], length


@pytest.mark.slow
@every_mode
def test_a_translation_does_not_depend_on_its_batch(mode: dict[str, Any]) -> None:
    stepper = ModelStepper(decided_model())
    settings = config(a=1.0, b=8, **mode)
    src, lengths = random_source([*LENGTHS * 2, 60])
    count = len(LENGTHS) * 2
    expected = [find(stepper, single_row((src, lengths), i), settings)[0] for i in range(count)]
    shuffled = np.random.default_rng(0).permutation(count).tolist()
    for rows in (shuffled[:20], [4, count, 0, 7], [*range(7)]):
        width = int(lengths[rows].max())
        results = find(
            stepper, (src[rows, :width], lengths[rows]), settings, sampling_keys=[0] * len(rows)
        )
        for row, hypotheses in zip(rows, results, strict=True):
            if row < count:
                assert_same(hypotheses, expected[row])


def rescore(
    stepper: ModelStepper,
    source: Source,
    row: int,
    hypotheses: list[Hypothesis],
    config: SearchConfig,
) -> list[Hypothesis]:
    """Score the tokens of finished hypotheses again, as nmt-score does."""
    src = source[0][row, : source[1][row] - 1].tolist()
    targets = [h.tokens[:-1] for h in hypotheses]
    return score_ids(stepper, [src] * len(hypotheses), targets, config, max_tokens=60)


@pytest.mark.slow
@every_mode
def test_scoring_a_finished_hypothesis_gives_the_same_fields_as_search(
    mode: dict[str, Any],
) -> None:
    for rule in ({}, {"normalization": Normalization.average}, {"word_reward": 0.3}):
        settings = config(a=1.0, b=8, **mode, **rule)
        stepper = ModelStepper(decided_model(Norm.pre))
        source = random_source(LENGTHS)
        count = 0
        for row, hypotheses in enumerate(find(stepper, source, settings)):
            finished = [h for h in hypotheses if h.finished]
            rescored = rescore(stepper, source, row, finished, settings)
            assert_same(rescored, finished, tolerance=1e-4)
            count += len(finished)
        assert count > 3


def test_scores_are_float32_when_matrix_multiplications_are_bfloat16() -> None:
    source = random_source(LENGTHS)
    stepper = ModelStepper(decided_model(), torch.bfloat16)
    state = stepper.start(*source, with_attention=True)
    log_probs = stepper.step(torch.full((len(LENGTHS),), BOS), state)
    assert state.decoding.source_keys_values[0][0].dtype is torch.bfloat16
    assert stepper.attention(state).dtype is torch.float32
    assert log_probs.dtype is torch.float32
    totals = log_probs.double().exp().sum(-1)
    torch.testing.assert_close(totals, torch.ones_like(totals), atol=1e-5, rtol=0)
    (hypotheses,) = find(stepper, single_row(source, 0), config(3, a=1.0, b=8))
    rescored = rescore(stepper, source, 0, hypotheses, config(3))
    assert [h.log_prob for h in hypotheses] == pytest.approx(
        [h.log_prob for h in rescored], abs=0.5
    )


def test_sentences_that_join_a_running_search_get_the_same_results() -> None:
    rng = random.Random(3)
    num_joined = 0
    members = [ModelStepper(decided_model(seed=seed)) for seed in (1, 2)]
    for stepper, n_best, alpha in (
        (members[0], 4, 0.6),
        (members[0], 1, -1.0),
        (EnsembleStepper(members), 2, 0.6),
    ):
        settings = config(4, alpha, a=1.0, b=6)
        lengths = [rng.choice([1, 2, 4, 7, 10, 24]) for _ in range(15)]
        source = random_source(lengths, seed=n_best)
        expected = find(stepper, source, settings, n_best=n_best)
        for member in members:
            # only now, since the expected results come from modules
            prepare_for_inference(member.model)
        rows = source_rows(source)
        num_started = 3
        request = SearchRequest(rows[:num_started], settings, n_best=n_best)
        beams = BeamSearch(stepper, request, TOKENIZER)
        results = {}
        while beams.num_live:
            for number in beams.step():
                results[number] = beams.result(number)
            if beams.num_live and num_started < len(rows) and rng.random() < 0.3:
                new_rows = rows[num_started : num_started + rng.randint(1, 5)]
                beams.join(new_rows)
                num_started += len(new_rows)
                num_joined += len(new_rows)
        assert sorted(results) == list(range(num_started)), n_best
        for number, hypotheses in results.items():
            case = (type(stepper).__name__, n_best, number)
            assert_same(hypotheses, expected[number], tolerance=1e-4, case=case)
    assert num_joined > 18


def test_sentences_may_join_when_those_that_began_the_search_are_complete() -> None:
    stepper = ModelStepper(decided_model(Norm.pre))
    settings = config(4, a=1.0, b=2)
    source = random_source([2, 24, 4])
    expected = find(stepper, source, settings)
    # the second sentence has results long after the first one is complete
    assert len(expected[1][-1].tokens) > 2 * len(expected[0][-1].tokens)
    prepare_for_inference(stepper.model)
    rows = source_rows(source)
    beams = BeamSearch(stepper, SearchRequest(rows[:1], settings), TOKENIZER)
    assert beams.step() == set()
    beams.join(rows[1:2])
    complete_sentences: set[int] = set()
    while 0 not in complete_sentences:
        complete_sentences |= beams.step()
    assert complete_sentences == {0}
    beams.join(rows[2:])
    while beams.num_live:
        beams.step()
    for number in range(3):
        assert_same(beams.result(number), expected[number], tolerance=1e-4, case=number)


def test_no_sentence_joins_a_search_that_would_take_its_padding_for_a_repeated_eos() -> None:
    """The decoder of imported M2M100, NLLB and fairseq models starts with EOS."""
    control = SimpleNamespace(**{**vars(TOKENIZER.tgt), "bos_id": EOS})
    starts_with_eos: Any = SimpleNamespace(src=control, tgt=control)
    stepper = ModelStepper(decided_model(seed=1))
    rows = source_rows(random_source([3, 5, 4, 2, 6], seed=3))
    cases: list[dict[str, Any]] = [{}, {"no_repeat_ngram": 1}, {"repetition_penalty": 3.0}]
    for changes in cases:
        settings = config(3, a=1.0, b=6, **changes)
        request = SearchRequest(rows, settings)
        expected = search(stepper, request, starts_with_eos)
        beams = BeamSearch(stepper, replace(request, sources=rows[:2]), starts_with_eos)
        assert beams.step() == set()
        beams.join(rows[2:])
        results = {}
        while beams.num_live:
            for number in beams.step():
                results[number] = beams.result(number)
        is_equal = token_ids([results[number] for number in range(len(rows))]) == token_ids(
            expected
        )
        assert request.can_join(starts_with_eos) == is_equal, changes
        assert request.can_join(TOKENIZER), changes
