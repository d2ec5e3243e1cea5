"""The path for one sentence with few hypotheses, against the general one."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from searching import (
    TOKENIZER,
    TOY_SETTINGS,
    ToyStepper,
    config,
    decided_model,
    source_rows,
    toy_source,
)
from tiny import (
    PAD,
    VOCAB_SIZE,
    assert_near,
    hidden_states,
    plain,
    random_source,
    tiny_model,
)
from variants import MODERN, SSRU

from nmt.config import (
    Activation,
    Decoder,
    Norm,
    Normalization,
    NormLayer,
    Positions,
    SearchConfig,
    Stop,
)
from nmt.model.fast import prepare_for_inference
from nmt.model.fast.decode import DecodingState
from nmt.model.fast.layers import FastLinear
from nmt.model.fast.single import SingleState, few_rows_norm
from nmt.model.layers import new_norm
from nmt.search.beam import BeamSearch
from nmt.search.constraints import ForbiddenTokens
from nmt.search.hypotheses import Hypothesis
from nmt.search.request import SearchRequest
from nmt.search.search import search
from nmt.search.single import _find_highest, can_search_one_sentence
from nmt.search.stepper import ModelStepper, Stepper

CPU = torch.device("cpu")
RULES: list[dict[str, Any]] = [
    {},
    {"alpha": 0.0},
    {"alpha": 2.0},
    {"normalization": Normalization.average},
    {"normalization": Normalization.none, "word_reward": 0.8},
]


def search_generally(stepper: Stepper, request: SearchRequest) -> list[Hypothesis]:
    beam_search = BeamSearch(stepper, request, TOKENIZER)
    while beam_search.num_live:
        beam_search.step()
    return beam_search.result(0)


def test_one_sentence_gets_the_hypotheses_of_the_general_search_in_as_many_steps() -> None:
    cases = list(itertools.product(RULES, TOY_SETTINGS, Stop, (2, 3, 8), (1, 2, None)))
    for rule, toy, stop, beam_size, n_best in random.Random(0).sample(cases, len(cases) // 10):
        for length, limit in ((2, 9), (7, 4)):
            settings = config(beam_size, b=limit, stop=stop, **rule)
            request = SearchRequest(source_rows(toy_source(length)), settings, n_best=n_best)
            assert can_search_one_sentence(request, CPU)
            single = ToyStepper(toy)
            general = ToyStepper(toy)
            case = (rule, toy, stop, beam_size, n_best, length)
            [hypotheses] = search(single, request, TOKENIZER)
            assert hypotheses == search_generally(general, request), case
            assert single.num_rows == general.num_rows, case


def test_a_model_translates_a_sentence_as_the_general_path() -> None:
    cases: list[dict[str, Any]] = [{"norm": Norm.post}, {"norm": Norm.pre}, MODERN]
    for changes, beam_size, length in itertools.product(cases, (1, 4), (1, 30)):
        settings = config(beam_size, a=1.0, b=12)
        sources = source_rows(random_source([length]))
        model = decided_model(**changes)
        [expected] = search(ModelStepper(model), SearchRequest(sources * 2, settings), TOKENIZER)[
            :1
        ]
        prepare_for_inference(model)
        with torch.inference_mode():
            state = model.start_single(*random_source([length]))
        assert isinstance(state, SingleState)
        [hypotheses] = search(ModelStepper(model), SearchRequest(sources, settings), TOKENIZER)
        assert [h.tokens for h in hypotheses] == [h.tokens for h in expected], (
            changes,
            beam_size,
            length,
        )
        scores = [h.score for h in hypotheses]
        assert scores == pytest.approx([h.score for h in expected], abs=1e-4)


@pytest.mark.parametrize(
    "max_rows",
    [pytest.param(1, marks=pytest.mark.slow), 3, pytest.param(8, marks=pytest.mark.slow)],
)
@torch.inference_mode()
def test_any_walk_through_the_cache_of_one_sentence_equals_the_plain_model(max_rows: int) -> None:
    draw = torch.Generator().manual_seed(max_rows)
    cases: list[dict[str, Any]] = [
        {"norm": Norm.pre},
        {"norm": Norm.post},
        {"source_eos": False},
        {"decoder": Decoder.ssru},
        {"positions": Positions.rotary},
        {"norm_layer": NormLayer.rms},
        {"activation": Activation.gelu},
        {"activation": Activation.swiglu},
        {"num_kv_heads": 1},
        {"qk_norm": True},
        MODERN,
        SSRU["ssru, modern"],
    ]
    for changes in cases:
        model = tiny_model(**changes)
        twin = plain(model)
        prepare_for_inference(model)
        src, lengths = random_source([9])
        state = model.start_single(src, lengths)
        read_lengths = lengths - int(model.drops_eos)
        assert isinstance(state, SingleState)
        tgt = torch.zeros(1, 0, dtype=torch.long)
        for step in range(70):
            tokens = torch.randint(4, VOCAB_SIZE, (len(tgt),), generator=draw)
            tgt = torch.cat([tgt, tokens.unsqueeze(1)], dim=1)
            log_probs = state.step(tokens)
            num_rows = len(tgt)
            if step % 3 == 0:  # the plain model takes most of the time of this test
                hidden = hidden_states(
                    twin, src.expand(num_rows, -1), read_lengths.expand(num_rows), tgt
                )
                expected = torch.log_softmax(twin.logits(hidden[:, -1]), dim=-1)
                assert_near(log_probs, expected, (changes, step), atol=1e-4)
            rows = torch.randint(
                num_rows, (int(torch.randint(1, max_rows + 1, (), generator=draw)),), generator=draw
            )
            state.reorder(rows)
            tgt = tgt[rows]
            assert state.mask.size(1) <= 2 * (step + 1 + 3 * max_rows) + 64, step


@torch.inference_mode()
def test_models_with_biased_attention_decode_on_the_general_path() -> None:
    for changes in (
        {"positions": Positions.relative},
        MODERN | {"positions": Positions.alibi},
    ):
        model = tiny_model(**changes)
        prepare_for_inference(model)
        assert isinstance(model.start_single(*random_source([5])), DecodingState), changes
    unfrozen = tiny_model()
    assert isinstance(unfrozen.start_single(*random_source([5])), DecodingState)


def test_requests_that_the_path_for_one_sentence_does_not_support_take_the_general_one() -> None:
    source = [[4, 5]]
    small = SearchConfig(beam_size=8)
    assert can_search_one_sentence(SearchRequest(source, small), CPU)
    assert can_search_one_sentence(SearchRequest(source, small, prefixes=[[]]), CPU)
    for request in (
        SearchRequest(source * 2, small),
        SearchRequest(source, SearchConfig(beam_size=9)),
        SearchRequest(source, SearchConfig(sampling=True)),
        SearchRequest(source, SearchConfig(alignment=True)),
        SearchRequest(source, SearchConfig(coverage_penalty=0.1)),
        SearchRequest(source, SearchConfig(min_length=1)),
        SearchRequest(source, small, prefixes=[[4]]),
        SearchRequest(source, small, constraints=[ForbiddenTokens([PAD])]),
    ):
        assert not can_search_one_sentence(request, CPU), request
    assert not can_search_one_sentence(SearchRequest(source, small), torch.device("cuda"))


def test_linear_layers_compute_few_rows_as_many() -> None:
    for inner, outer in ((8, 12), (64, 256), (512, 512), (512, 1200)):
        layer = FastLinear(inner, outer).requires_grad_(False)
        prepare_for_inference(layer)
        for num_rows, activation in itertools.product((1, 2, 5, 8), ("none", "relu")):
            x = torch.randn(num_rows, inner)
            expected = torch.nn.functional.linear(x, layer.weight[:10], layer.bias[:10])
            if activation == "relu":
                expected = expected.relu()
            with torch.inference_mode():
                y = layer.few_rows_function(0, 10, activation)(x)
                everything = layer.few_rows_function(activation=activation)(x)
            assert_near(y, expected, (inner, outer, num_rows), atol=1e-4)
            assert_near(everything[:, :10], expected, (inner, outer, num_rows), atol=1e-4)


def test_an_rms_norm_of_few_rows_equals_the_layer() -> None:
    for size in (6, 512):
        norm = new_norm(NormLayer.rms, size).requires_grad_(False)
        norm.weight.uniform_(0.5, 1.5)
        for scale in (0.0, 1e-3, 1.0, 1e3):  # the mean of squares is 1e-6, and eps is 1e-5
            x = scale * torch.randn(3, size)
            assert_near(few_rows_norm(norm)(x), norm(x), (size, scale), atol=1e-5)


def test_the_highest_values_are_the_first_of_a_stable_sort() -> None:
    draw = np.random.default_rng(1)
    for size, count in itertools.product((3, 100, 255, 256, 300, 5000), (1, 4, 16)):
        for num_distinct in (2, 20, 10**6):
            values = draw.integers(num_distinct, size=size).astype(np.float32)
            values[draw.random(size) < 0.3] = -np.inf
            order = np.argsort(-values, kind="stable")[:count]
            expected = [i for i in order.tolist() if values[i] > -np.inf]
            assert _find_highest(values, count).tolist() == expected, (size, count, num_distinct)
    assert len(_find_highest(np.full(1000, np.nan, dtype=np.float32), 4)) == 0
