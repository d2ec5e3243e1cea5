"""The models that are served, and the directions in which they translate."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import torch

from nmt.config import Engine, ServeConfig
from nmt.data.language_codes import shorten_codes
from nmt.data.languages import Tags, find_source_prefix, list_language_directions
from nmt.documents.html_tokens import extract_visible_text
from nmt.documents.texts import is_symbols_only
from nmt.errors import ConfigError, ModelError, list_first
from nmt.search.glossary import Glossary
from nmt.serve.http_errors import HttpError, UnsupportedLanguageError
from nmt.serve.languages import DETECTION_CHARACTERS, Languages
from nmt.serve.queues import BatchOptions
from nmt.serve.worker_pool import WorkerPool, count_workers
from nmt.translate.engines.auto import choose_engine
from nmt.translate.options import LineOptions
from nmt.translate.translator import Translator

log = logging.getLogger(__name__)

_MAX_LOGGED_DIRECTIONS = 50


@dataclass(frozen=True, kw_only=True)
class TranslationOptions:
    """How to translate the texts of a request."""

    source: str  # a language code, or "auto"
    target: str
    is_html: bool = False
    n_best: int = 1
    with_scores: bool = False
    split_sentences: bool | None = None  # None for the setting of the server
    prefix: str = ""  # text with which the translation must begin; for a single sentence
    search_changes: dict[str, Any] = field(default_factory=dict)
    """Settings of search that replace those of the model."""
    glossary: Glossary | None = None


@dataclass(frozen=True)
class Direction:
    """A model and the tags that make it translate from one language to another."""

    translator: Translator
    folder: str
    tags: Tags = Tags()  # noqa: RUF009  # immutable
    _batch_options: dict[Hashable, BatchOptions] = field(default_factory=dict, compare=False)
    """Cache of `make_batch_options`."""

    @property
    def source_prefix(self) -> str:
        """Text before each sentence in the input of the model, such as a tag."""
        return find_source_prefix(self.translator.tokenizer.src, self.tags)

    def make_batch_options(
        self, options: TranslationOptions, *, alignment: bool, max_source_length: int
    ) -> BatchOptions:
        """Return the batch options of a request; sentences with equal options can share a batch.

        `n_best` is at most the number of results of the model's beam, since a larger beam could
        change the best translation.
        """
        has_prefix = bool(options.prefix)
        cache_key = (
            options.n_best,
            options.with_scores,
            alignment,
            max_source_length,
            has_prefix,
        )
        # options with search changes are not cached, since the cache would grow without a limit
        if not options.search_changes and cache_key in self._batch_options:
            return self._batch_options[cache_key]
        search_changes = dict(options.search_changes)
        if alignment:
            search_changes["alignment"] = True
        search = self.translator.search_config(**search_changes)
        n_best = options.n_best
        if not search.sampling:
            n_best = min(n_best, search.max_results)
        line_options = LineOptions(
            n_best=n_best, with_scores=options.with_scores, max_source_length=max_source_length
        )
        batch_options = BatchOptions(
            self.translator, search, line_options, self.tags, has_prefix=has_prefix
        )
        if not options.search_changes:
            self._batch_options[cache_key] = batch_options
        return batch_options


Directions = dict[tuple[str, str], Direction]
"""Directions, keyed by the codes of source and target language."""


class ResolvedDirection(NamedTuple):
    """The direction in which a text is translated."""

    source: str  # language code
    confidence: float  # how certain the detected source is, 0 to 100; 0 if it was not detected
    direction: Direction | None  # None if the text is not translated


class Models:
    """All models of the server. A reload replaces the whole object.

    Args:
        directions: the directions of the models.
        pool: the worker processes that hold the models; None if this process holds them.
    """

    def __init__(self, directions: Directions, pool: WorkerPool | None = None) -> None:
        self.directions = directions
        self.pool = pool
        self.languages = Languages(directions.keys())

    @classmethod
    def load(cls, config: ServeConfig) -> Models:
        """Load every folder of `model_dir`.

        Raises the exceptions of `Translator.load`, and `ConfigError` if two models have the same
        direction.
        """
        # PyTorch keeps a pool of OpenMP threads for each thread that has computed something. The
        # thread that loads the models ends afterwards, and its pool too. With more OpenMP threads
        # than cores, the speed halves.
        with ThreadPoolExecutor(1) as executor:
            return executor.submit(cls._load, config).result()

    @classmethod
    def _load(cls, config: ServeConfig) -> Models:
        """Load every folder in this thread; see `load`."""
        num_workers = count_workers(config)
        pool = None
        if num_workers:
            pool = WorkerPool(config, num_workers)
            translators = pool.make_translators()
        else:
            translators = [_load_translator(folder, config) for folder in config.model_dir]
        directions: Directions = {}
        for folder, translator in zip(config.model_dir, translators, strict=True):
            if config.protect:  # raise the `ConfigError` now, instead of for each request
                translator.backend.check(translator.search_config(protect=True))
            _add_directions(directions, translator, folder)
        for folder, translator in zip(config.model_dir, translators, strict=True):
            _add_language_directions(directions, translator, folder)
        directions = _shorten_codes(directions)
        names = [f"{source}-{target}" for source, target in directions]
        log.info("directions: %s", list_first(names, _MAX_LOGGED_DIRECTIONS))
        return cls(directions, pool)

    def resolve_direction(self, text: str, options: TranslationOptions) -> ResolvedDirection:
        """Return the direction of a text. Detects its language if the source is "auto".

        Raises a 400 `HttpError` if the languages are not served.
        """
        source, target = self._find_codes(options)
        if is_symbols_only(text):
            # there is nothing to translate, and no language to detect: report English
            return ResolvedDirection(source or "en", 0.0, None)
        confidence = 0.0
        if source is None:
            sample = extract_visible_text(text, DETECTION_CHARACTERS) if options.is_html else text
            source, confidence = self.languages.detect_source(sample, target)
        direction = self.directions.get((source, target))
        # a text that is already in the target language needs no direction
        if direction is None and source != target:
            raise HttpError(400, f"this server does not translate {source} to {target}")
        return ResolvedDirection(source, confidence, direction)

    def check_languages(self, options: TranslationOptions) -> None:
        """Raise a 400 `HttpError` if the languages of a request are not served."""
        if options.source == "auto":
            self._find_codes(options)
        else:
            self.resolve_direction("text", options)  # the text matters only for source=auto

    def _find_codes(self, options: TranslationOptions) -> tuple[str | None, str]:
        """Return the served codes of source and target; None for a source to detect.

        Raises a 400 `HttpError` if a language is not served.
        """
        languages = self.languages
        source = None
        if options.source != "auto":
            source = languages.find_code(options.source)
            if source is None:
                raise UnsupportedLanguageError(options.source, languages.sources)
        target = languages.find_code(options.target)
        if target is None:
            raise UnsupportedLanguageError(options.target, languages.codes)
        return source, target


def choose_serve_engine(config: ServeConfig) -> ServeConfig:
    """Replace backend=auto by backend=native unless CTranslate2 can run all models."""
    if config.backend is not Engine.auto:
        return config
    # only CTranslate2 has quantization
    native_config = replace(config, backend=Engine.native, quantization=None)
    if config.glossaries is not None:  # CTranslate2 has no glossaries
        return native_config
    for folder in config.model_dir:
        choice = choose_engine(
            [folder],
            device=config.device,
            dtype=config.dtype,
            quantization=config.quantization,
        )
        if choice.backend is Engine.native:
            return native_config
    return config


def _load_translator(folder: str, config: ServeConfig) -> Translator:
    """Load the model in a folder."""
    # at least 2 threads, one of which is for urgent requests
    num_threads = max(config.num_threads or torch.get_num_threads(), 2)
    return Translator.load(
        folder,
        device=config.device,
        dtype=config.dtype,
        backend=config.backend,
        quantization=config.quantization,
        num_threads=num_threads,
    )


def _add_directions(directions: Directions, translator: Translator, folder: str) -> None:
    """Add the directions of a model.

    If the model has several tags for the same two languages, uses the first ones.
    """
    if not translator.directions:
        raise ModelError(
            f"{folder} does not name its two languages; set them in its config.json, such as "
            '"src_lang": "en", "tgt_lang": "de"'
        )
    for language_pair in translator.directions:
        codes = (language_pair.src_lang, language_pair.tgt_lang)
        if codes not in directions:
            directions[codes] = Direction(translator, folder, language_pair.tags)
        elif directions[codes].translator is not translator:
            raise ConfigError(
                f"model_dir: {folder} and {directions[codes].folder} both translate "
                f"{language_pair.src_lang} to {language_pair.tgt_lang}; leave one out"
            )


def _add_language_directions(directions: Directions, translator: Translator, folder: str) -> None:
    """Add the directions of M2M100 or NLLB that the model was not fine-tuned on."""
    model_tags = {language_pair.tags for language_pair in translator.directions}
    for language_pair in list_language_directions(translator.tokenizer.src):
        if language_pair.tags not in model_tags:
            codes = (language_pair.src_lang, language_pair.tgt_lang)
            directions.setdefault(codes, Direction(translator, folder, language_pair.tags))


def _shorten_codes(directions: Directions) -> Directions:
    """Shorten language codes, but keep those whose short form belongs to another direction."""
    short_codes = shorten_codes(set(chain.from_iterable(directions)))
    renamed: Directions = {}
    for (source, target), direction in directions.items():
        short_pair = (short_codes.get(source, source), short_codes.get(target, target))
        if short_pair in directions:
            renamed[source, target] = direction
        else:
            renamed[short_pair] = direction
    return renamed
