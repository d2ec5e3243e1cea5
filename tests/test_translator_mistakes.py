"""Mistakes in Python, which are to be refused in one line as those of the commands are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nmt.errors import ConfigError
from nmt.translate.translator import Translator


@pytest.fixture(scope="module")
def translator(trained_models: dict[str, Path]) -> Translator:
    return Translator.load(trained_models["post-sinusoidal"], device="cpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"too_long": "spli"}, "too_long=spli: no such choice; did you mean split"),
        ({"normalization": "mean"}, "normalization=mean: no such choice; valid: average"),
        ({"window_lines": 0}, "window_lines=0: must be at least 1"),
        ({"max_tokens": 0}, "max_tokens=0: must be at least 1"),
        ({"max_source_length": 7}, "max_source_length=7: must be at least 8"),
    ],
)
def test_a_wrong_option_in_python_is_refused_by_name(
    translator: Translator, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        translator.translate(["a"], **options)


@pytest.mark.parametrize("key", ["backend", "dtype", "combine"])
def test_loading_refuses_a_choice_that_is_none_by_name(
    trained_models: dict[str, Path], key: str
) -> None:
    folder = trained_models["post-sinusoidal"]
    with pytest.raises(ConfigError, match=f"{key}=xyz: no such choice; valid: "):
        Translator.load([folder, folder], device="cpu", **{key: "xyz"})


def test_a_single_text_is_not_taken_for_lines_of_one_character(translator: Translator) -> None:
    with pytest.raises(ConfigError, match="lines is one text; give a list"):
        translator.translate("the house")
    with pytest.raises(ConfigError, match="lines is one text; give a list"):
        translator.n_best("the house")
    with pytest.raises(ConfigError, match="prefixes is one text; give a list"):
        translator.translate(["the house"], prefixes="x")
    with pytest.raises(ConfigError, match="targets is one text; give a list"):
        translator.score(["a", "b"], "ab")
