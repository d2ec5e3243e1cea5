"""Word alignment and coverage, from the attention of the decoder to the source."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from searching import LENGTHS, Source, assert_same, config, decided_model, find, score_ids
from tiny import BOS, plain, random_source
from torch import Tensor

from nmt.config import Norm
from nmt.errors import ConfigError
from nmt.model.alignment import alignment_layer
from nmt.model.attention import attend, causal_mask
from nmt.model.fast import FastTransformer
from nmt.search.hypotheses import Hypothesis
from nmt.search.stepper import EnsembleStepper, ModelStepper


@torch.no_grad()
def plain_attention(
    model: FastTransformer,
    source: Source,
    row: int,
    tokens: list[int],
    layer: int,
    num_heads: int | None = None,
) -> Tensor:
    """Return the attention to the source (T, S) in the plain model, the mean of the first heads."""
    twin = plain(model)
    length = int(source[1][row])
    module: Any = twin.decoder_layers[layer]
    record: dict[Any, Any] = {module.cross_attention: None}
    tgt_in = torch.tensor([[BOS, *tokens[:-1]]])
    masks = torch.ones(1, length, dtype=torch.bool), causal_mask(len(tokens))
    twin(source[0][row : row + 1, :length], masks[0], tgt_in, masks[1], record)
    return record[module.cross_attention][0][:num_heads].mean(dim=0)


def search_with(model: FastTransformer, source: Source, **changes: Any) -> list[list[Hypothesis]]:
    settings = config(a=1.0, b=8, **{"beam_size": 4, "alignment": True, **changes})
    return find(ModelStepper(model), source, settings)


@pytest.mark.slow
def test_alignment_is_the_strongest_attention_of_each_step() -> None:
    source = random_source(LENGTHS)
    for norm, beam_size in itertools.product(Norm, (1, 4)):
        model = decided_model(norm)
        positions = set[int]()
        for row, hypotheses in enumerate(search_with(model, source, beam_size=beam_size)):
            for h in hypotheses:
                weights = plain_attention(model, source, row, h.tokens, layer=1)
                assert h.alignment is not None
                taken = weights[torch.arange(len(h.tokens)), h.alignment]
                torch.testing.assert_close(taken, weights.amax(dim=1), atol=1e-5, rtol=0)
                positions |= set(h.alignment)
        assert len(positions) > 4, (norm, beam_size)


@pytest.mark.slow
def test_coverage_lowers_the_score_of_translations_that_attend_little_to_source_words() -> None:
    model = decided_model()
    source = random_source(LENGTHS)
    changed = 0
    plain = search_with(model, source)
    covered = search_with(model, source, coverage_penalty=0.5)
    for row, hypotheses in enumerate(covered):
        changed += [h.tokens for h in hypotheses] != [h.tokens for h in plain[row]]
        for h in hypotheses:
            weights = plain_attention(model, source, row, h.tokens, layer=1)
            sums = weights.sum(dim=0)[:-1]  # without EOS
            penalty = float(sums.clamp(max=1.0).log().sum())
            normal = h.log_prob / ((5 + len(h.tokens)) / 6) ** 0.6
            assert h.score == pytest.approx(normal + 0.5 * penalty, abs=1e-4)
    assert changed > 2


def test_asking_for_alignment_changes_nothing_else() -> None:
    model = decided_model()
    source = random_source(LENGTHS)
    for settings in ({"beam_size": 1}, {"beam_size": 4}, {"beam_size": 2, "sampling": True}):
        plain = search_with(model, source, alignment=False, **settings)
        aligned = search_with(model, source, **settings)
        assert [[replace(h, alignment=None) for h in row] for row in aligned] == plain


def test_attention_is_computed_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def count_call(*tensors: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return attend(*tensors, **settings)

    monkeypatch.setattr("nmt.model.fast.decode.attend", count_call)
    model = decided_model()
    source = random_source([4, 3])
    search_with(model, source, alignment=False)
    assert not calls
    first, second = search_with(model, source, beam_size=1)
    assert len(calls) == max(len(first[0].tokens), len(second[0].tokens))  # of one layer


def test_alignment_uses_the_last_layer_of_few_and_the_last_but_one_of_many() -> None:
    assert [alignment_layer(n) for n in (1, 2, 5, 6, 12)] == [0, 1, 4, 4, 10]
    model = decided_model(num_decoder_layers=6)
    source = random_source([6])
    ((h,),) = search_with(model, source, beam_size=1)
    weights = plain_attention(model, source, 0, h.tokens, layer=4)
    assert h.alignment == weights.argmax(dim=1).tolist()


def test_a_model_with_alignment_shift_aligns_a_token_in_the_step_that_reads_it() -> None:
    model = decided_model(alignment_heads=1, alignment_shift=True)
    source = random_source([4, 6])
    for row, hypotheses in enumerate(search_with(model, source)):
        num_src = int(source[1][row]) - 1
        for h in hypotheses:
            weights = plain_attention(model, source, row, h.tokens, layer=1, num_heads=1)
            strongest = weights.argmax(dim=1).tolist()
            assert h.alignment == strongest[1:] + [num_src if h.finished else strongest[-1]]
        finished = [h for h in hypotheses if h.finished]
        rows = [source[0][row, :num_src].tolist()] * len(finished)
        settings = config(a=1.0, b=8, beam_size=4, alignment=True)
        targets = [h.tokens[:-1] for h in finished]
        rescored = score_ids(ModelStepper(model), rows, targets, settings)
        assert_same(rescored, finished, tolerance=1e-4)


def test_models_that_align_in_different_steps_are_one_ensemble_without_alignment() -> None:
    models = [decided_model(), decided_model(seed=2, alignment_shift=True)]
    stepper = EnsembleStepper([ModelStepper(model) for model in models])
    source = random_source([4])
    assert find(stepper, source, config(a=1.0, b=8, beam_size=2))
    settings = config(a=1.0, b=8, beam_size=2, alignment=True)
    with pytest.raises(ConfigError, match="align words in different steps"):
        find(stepper, source, settings)
    with pytest.raises(ConfigError, match="align words in different steps"):
        score_ids(stepper, [[5, 6]], [[7]], settings)
