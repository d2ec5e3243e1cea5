"""Ensembles of models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from searching import (
    LENGTHS,
    assert_same,
    config,
    decided_model,
    find,
    save_tiny,
    score_ids,
    teacher_forced,
)
from tiny import random_source, sentences, tokenizer_config

from nmt.config import Combine, Norm
from nmt.data.tokenizer import Tokenizer
from nmt.data.vocabulary import train_tokenizer
from nmt.errors import ConfigError, ModelError
from nmt.search.stepper import EnsembleStepper, ModelStepper
from nmt.translate.engines.native import load_models

MODELS = [decided_model(seed=1), decided_model(Norm.pre, seed=2), decided_model(seed=3, d_model=8)]


@torch.no_grad()
def test_search_and_scoring_use_the_mean_over_the_models() -> None:
    source = random_source(LENGTHS[:2])
    count = 0
    for combine, beam_size in [(Combine.probabilities, 1), (Combine.log_probabilities, 4)]:
        stepper = EnsembleStepper([ModelStepper(model) for model in MODELS], combine)
        settings = config(beam_size, a=1.0, b=8, alignment=True, coverage_penalty=0.2)
        for row, hypotheses in enumerate(find(stepper, source, settings)):
            for h in hypotheses:
                model_log_probs = [teacher_forced(m, source, row, h.tokens) for m in MODELS]
                log_probs = np.array(model_log_probs)  # (models, T)
                expected = log_probs.mean(axis=0)
                if combine is Combine.probabilities:
                    expected = np.log(np.exp(log_probs).mean(axis=0))
                assert h.token_log_probs == pytest.approx(expected.tolist(), abs=1e-4)
            finished = [h for h in hypotheses if h.finished]
            rows = [source[0][row, : source[1][row] - 1].tolist()] * len(finished)
            targets = [h.tokens[:-1] for h in finished]
            rescored = score_ids(stepper, rows, targets, settings)
            assert_same(rescored, finished, tolerance=1e-4)
            count += len(finished)
    assert count > 3


def test_folders_load_as_an_ensemble_with_the_settings_of_the_first(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    folders = [save_tiny(tmp_path / str(i), tokenizer, i, beam_size=i + 2) for i in range(2)]
    loaded = load_models(folders, device="cpu", combine="log_probabilities")
    assert isinstance(loaded.backend.stepper, EnsembleStepper)
    assert loaded.backend.stepper.combine is Combine.log_probabilities
    assert len(loaded.backend.stepper.members) == 2
    assert loaded.defaults.beam_size == 2
    assert isinstance(load_models(folders[:1], device="cpu").backend.stepper, ModelStepper)


def test_models_with_different_tokenizers_are_refused_in_one_line(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    other_tokenizer = train_tokenizer(sentences(100, seed=3), tokenizer_config())
    first = save_tiny(tmp_path / "first", tokenizer, 0, 1)
    second = save_tiny(tmp_path / "second", other_tokenizer, 0, 1)
    with pytest.raises(ModelError, match="second has a different tokenizer from .*first") as caught:
        load_models([first, second], device="cpu")
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="name at least one"):
        load_models([], device="cpu")
