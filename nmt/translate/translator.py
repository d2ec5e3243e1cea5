"""The Python interface: load a model or an ensemble, translate and score text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nmt.config import (
    Combine,
    DType,
    Engine,
    Quantization,
    SearchConfig,
    SearchOptions,
    choose,
    require_valid,
    resolve_path,
)
from nmt.data.hints import check_hint_symbols
from nmt.data.languages import (
    DIRECTION_OPTIONS,
    LanguagePair,
    Tags,
    choose_tags,
    default_directions,
    encode_sources,
    encode_tag,
    list_language_directions,
    tag_lines,
)
from nmt.data.tokenizer import Tokenizers
from nmt.errors import DataError, NmtError
from nmt.runtime.prefetch import prefetch
from nmt.runtime.signatures import using_verify_key
from nmt.search.constraints import suppressed_ids
from nmt.search.hypotheses import Hypothesis
from nmt.search.stepper import Stepper
from nmt.translate.batch_search import BatchSearch
from nmt.translate.context import check_context, translate_in_context
from nmt.translate.engines.base import Backend
from nmt.translate.engines.load import load_engine
from nmt.translate.engines.native import NativeBackend
from nmt.translate.notebook import NBestList
from nmt.translate.options import (
    LineOptions,
    ScoreOptions,
    TranslateOptions,
    add_search_settings,
    check_options,
    make_line_options,
    select_options,
)
from nmt.translate.pair_scores import MAX_SCORE_TOKENS, score_pairs, scored_translation
from nmt.translate.rerank import Reranker, make_reranker, rank_candidates
from nmt.translate.restoring import restore_lines
from nmt.translate.results import LineResult, Translation, build_line_results
from nmt.translate.windows import (
    WINDOW_LINES,
    EncodedWindow,
    Window,
    WindowReader,
    check_lines,
    encode_window,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from nmt.translate.attention import PairAttention


class TranslationError(NmtError):
    """Raised for a sentence that could not be translated."""


class Translator:
    """Translates and scores text with one model or an ensemble.

    Several threads may use a translator at once: it keeps no state between calls. Scores are
    log-probabilities in nats.

    The methods take `config`, which defaults to the search settings saved with the model. Keyword
    arguments change single settings; see `TranslateOptions` and `ScoreOptions`. The methods raise

    - `ConfigError` for an option that is unknown or out of range,
    - `TypeError` for a value of the wrong type,
    - `TranslationError` for a sentence that fails,
    - `DataError` if the number of prefixes or targets differs from the number of lines.
    """

    def __init__(
        self,
        engine: Stepper | Backend,
        tokenizer: Tokenizers,
        defaults: SearchConfig,
        directions: Sequence[LanguagePair] = (),
        device: str = "auto",
    ) -> None:
        self.backend = engine if isinstance(engine, Backend) else NativeBackend(engine, tokenizer)
        self.tokenizer = tokenizer
        self.defaults = defaults
        self.directions = directions
        self.device = device  # device of the models of rerankers

    def __repr__(self) -> str:
        """Name the directions and the engine."""
        directions = [f"{pair.src_lang} to {pair.tgt_lang}" for pair in self.directions]
        return f"Translator({', '.join(directions)}; {type(self.backend).__name__})"

    @classmethod
    def load(
        cls,
        model_dir: str | Path | Sequence[str | Path],
        *,
        device: str = "auto",
        dtype: DType | str = DType.float32,
        backend: Engine | str = Engine.auto,
        quantization: Quantization | str | None = None,
        combine: Combine | str = Combine.probabilities,
        num_threads: int = 0,
        verify_key: str | Path | None = None,
    ) -> Translator:
        """Load a run, a checkpoint or a model folder; several form an ensemble.

        backend=auto takes CTranslate2 where it supports the request, else the native engine.
        Two arguments only apply to CTranslate2. `quantization` is the number format of the
        converted weights; None selects int8 on a CPU with VNNI, else float32. `num_threads` is the
        number of batches that are translated at a time; 0 selects torch's number of threads.
        `combine` says how an ensemble combines its distributions. `verify_key` is the file of a
        public key; each folder must then have a signature by that key (`nmt-export sign=KEY`).
        Raises `ModelError` for a folder without a model or signature, and `DeviceError` for a
        device that does not exist.
        """
        folders = [model_dir] if isinstance(model_dir, str | Path) else list(model_dir)
        engine = choose(Engine, "backend", backend)
        dtype = choose(DType, "dtype", dtype)
        combine = choose(Combine, "combine", combine)
        if quantization is not None:
            quantization = choose(Quantization, "quantization", quantization)
            problem = "only works with backend=auto or ctranslate2"
            require_valid(engine is not Engine.native, "quantization", quantization, problem)
        key_path = None if verify_key is None else resolve_path(verify_key)
        with using_verify_key(key_path):
            model = load_engine(
                folders,
                engine,
                device=device,
                dtype=dtype,
                combine=combine,
                num_threads=num_threads,
                quantization=quantization,
            )
        return cls(model.backend, model.tokenizer, model.defaults, model.directions, device)

    def search_config(
        self, config: SearchConfig | None = None, **changes: Unpack[SearchOptions]
    ) -> SearchConfig:
        """Return `config` with the changes that are not None.

        `config` defaults to the settings saved with the model.
        """
        return self._update_config(config, check_options(changes, SearchOptions))

    def choose_tags(self, **direction: str) -> Tags:
        """Return the tags of a direction; see `nmt.data.languages.choose_tags`."""
        return choose_tags(self.directions, self.tokenizer, **direction)

    @property
    def common_tags(self) -> Tags:
        """The tags of the default directions if they are equal, else no tags.

        Without common tags, the text itself must contain tags.
        """
        tags = {direction.tags for direction in default_directions(self.directions)}
        return tags.pop() if len(tags) == 1 else Tags()

    def translate(
        self,
        lines: Iterable[str],
        config: SearchConfig | None = None,
        **options: Unpack[TranslateOptions],
    ) -> list[str]:
        """Return the best translation of each line; an empty line stays empty."""
        results = self._translate_lines(lines, config, options, best_only=True, is_stream=False)
        return [result.text for result in results]

    def translate_stream(
        self,
        lines: Iterable[str],
        config: SearchConfig | None = None,
        **options: Unpack[TranslateOptions],
    ) -> Iterator[str]:
        """Yield the best translation of each line, in order; memory holds a few windows of lines.

        The first windows are small, so that results come soon. A thread reads the lines, about two
        windows ahead of the results.
        """
        results = self._translate_lines(lines, config, options, best_only=True, is_stream=True)
        return (result.text for result in results)

    def n_best(
        self,
        lines: Iterable[str],
        config: SearchConfig | None = None,
        **options: Unpack[TranslateOptions],
    ) -> list[NBestList]:
        """Return the translations of each line, best first.

        A line has up to `alternatives` translations if this setting is not 0, up to `candidates`
        with reranking, and otherwise up to `beam_size`. An empty line has one empty translation.
        """
        results = self._translate_lines(lines, config, options, best_only=False, is_stream=False)
        return [NBestList(result.translations, result.source_tokens) for result in results]

    def n_best_stream(
        self,
        lines: Iterable[str],
        config: SearchConfig | None = None,
        **options: Unpack[TranslateOptions],
    ) -> Iterator[NBestList]:
        """Yield the results of `n_best`, in order, as `translate_stream` does."""
        results = self._translate_lines(lines, config, options, best_only=False, is_stream=True)
        return (NBestList(result.translations, result.source_tokens) for result in results)

    def translate_windows(
        self, windows: Iterable[Window], config: SearchConfig, options: LineOptions
    ) -> Iterator[tuple[Window, list[LineResult]]]:
        """Yield each window with the results of its lines.

        A sentence that fails has an `error` in its result. The next window is read and encoded
        while the current one is translated. Raises `ConfigError` for settings that the engine does
        not support, and the exception of an engine that fails with every sentence.
        """
        if options.context:
            yield from translate_in_context(
                windows, self.translate_windows, self.tokenizer, config, options
            )
            return
        reranker = self.load_reranker(options, config)
        num_candidates = options.n_best
        if options.rerank is not None:
            num_candidates = options.rerank.count_candidates(config)
        batches = self._make_batch_search(config, options, num_candidates)
        for encoded in self._encode_windows(windows, config, options):
            window_segments = list(chain.from_iterable(encoded.segments))
            line_results = build_line_results(
                encoded,
                batches.translate(window_segments),
                self.tokenizer,
                n_best=num_candidates,
                alignment=config.alignment,
                unk_replacement=options.unk_replacement,
            )
            if reranker is not None:
                line_results = rank_candidates(
                    reranker,
                    [line.text for line in encoded.lines],
                    line_results,
                    n_best=options.n_best,
                    protect=config.protect,
                    tags=options.tags,
                )
            yield encoded.window, restore_lines(line_results, encoded)

    def _make_batch_search(
        self, config: SearchConfig, options: LineOptions, num_candidates: int
    ) -> BatchSearch:
        """Check the search settings, and return a search for `num_candidates` per segment."""
        if config.sampling:  # samples are independent, so draw only those that are used
            config = replace(config, beam_size=num_candidates)
        if options.unk_replacement:
            config = replace(config, alignment=True)
        self.backend.check(config)
        tag_ids = encode_tag(self.tokenizer.tgt, options.tags.tgt)
        return BatchSearch(
            self.backend,
            config,
            n_best=num_candidates,
            max_tokens=options.max_tokens or self.backend.max_tokens,
            num_forced=len(tag_ids),
            src_tags=self.list_src_tags(options.tags),
            with_scores=options.with_scores or options.rerank is not None,
        )

    def _encode_windows(
        self, windows: Iterable[Window], config: SearchConfig, options: LineOptions
    ) -> Iterable[EncodedWindow]:
        """Return an iterable of encoded windows; a thread encodes up to two windows ahead."""
        options = add_search_settings(options, config)
        encode = partial(encode_window, tokenizers=self.tokenizer, options=options)
        encoded_windows = map(encode, windows)
        if isinstance(windows, list) and len(windows) <= 1:
            return encoded_windows  # for a single window, a thread would only cost time
        return prefetch(encoded_windows)

    def load_reranker(self, options: LineOptions, config: SearchConfig) -> Reranker | None:
        """Return the reranker that the options choose, or None.

        The models of a reranker are loaded once and kept for later calls. Raises a `ConfigError`
        for a reranker that does not suit the model or the search, or cannot be loaded.
        """
        if options.rerank is None:
            return None
        options.rerank.count_candidates(config)  # raises an error if search finds fewer candidates
        return make_reranker(options.rerank, self.find_directions(options.tags), self.device)

    def list_src_tags(self, tags: Tags) -> list[str]:
        """Return the tags that sources may begin with: source tags of `tags` and all directions."""
        src_tags = [direction.src_tag for direction in self.directions]
        return [tag for tag in (tags.src, *tags.src_choices, *src_tags) if tag]

    def find_directions(self, tags: Tags) -> list[LanguagePair]:
        """Return the directions that text with these tags may have."""
        if tags.src_choices:  # the text itself has a tag
            return list(self.directions)
        directions = [direction for direction in self.directions if direction.tags == tags]
        if directions:
            return directions
        # M2M100 or NLLB, fine-tuned on some directions, still has the tags of all its languages
        all_directions = list_language_directions(self.tokenizer.src)
        return [direction for direction in all_directions if direction.tags == tags]

    def score(
        self,
        sources: Iterable[str],
        targets: Iterable[str],
        config: SearchConfig | None = None,
        **options: Unpack[ScoreOptions],
    ) -> list[Translation]:
        """Return each target, scored as a translation of its source, in order.

        `log_prob` and `token_log_probs` are the log-probabilities that the model assigns to the
        tokens of the target and to EOS. `score` and `alignment` are computed as in search. Lines
        are not split, however long. A pair of empty lines has the score 0. `max_tokens` bounds the
        size of a batch: its number of pairs times the tokens of its longest line.
        """
        texts = list(check_lines("targets", targets))
        hypotheses = self.score_hypotheses(sources, texts, config, **options)
        translations = []
        for text, hypothesis in zip(texts, hypotheses, strict=True):
            translations.append(scored_translation(text, hypothesis, self.tokenizer.tgt))
        return translations

    def score_hypotheses(
        self,
        sources: Iterable[str],
        targets: Iterable[str],
        config: SearchConfig | None = None,
        first_line: int = 0,
        **options: Unpack[ScoreOptions],
    ) -> list[Hypothesis]:
        """Score pairs as `score` does, and return the token ids of each target with EOS.

        A pair of empty lines is returned as `EMPTY_PAIR`. `first_line` is the number of lines
        before `sources`, for error messages.
        """
        checked_options = check_options(options, ScoreOptions)
        config = self._update_config(config, checked_options)
        max_tokens = checked_options.get("max_tokens", MAX_SCORE_TOKENS)
        require_valid(max_tokens >= 1, "max_tokens", max_tokens, "must be at least 1")
        self.backend.check(config, scoring=True)
        source_lines = list(check_lines("sources", sources))
        target_lines = list(check_lines("targets", targets))
        _check_numbers(source_lines, target_lines)
        return score_pairs(
            self.backend,
            self.tokenizer,
            source_lines,
            target_lines,
            config,
            tags=self._tags_from(checked_options),
            max_tokens=max_tokens,
            first_line=first_line,
        )

    def attention(
        self,
        sources: Iterable[str],
        targets: Iterable[str] | None = None,
        *,
        tags: Tags | None = None,
        **options: Unpack[SearchOptions],
    ) -> list[PairAttention]:
        """Return the attention weights of every layer and head for each pair of lines.

        `targets` default to the translations that search finds with `options`, and `tags` to
        `common_tags`. Lines are not split, however long. Raises `ConfigError` for an ensemble and
        for backend=ctranslate2; backend=auto computes attention natively.
        """
        # here, since commands that translate and score do not need it
        from nmt.translate.attention import pair_attention, search_targets

        config = self.search_config(**options)
        if tags is None:
            tags = self.common_tags
        source_lines = list(check_lines("sources", sources))
        source_ids = encode_sources(self.tokenizer.src, source_lines, tags)
        if targets is None:
            target_ids = search_targets(self.backend, self.tokenizer, source_ids, config, tags)
        else:
            target_lines = list(check_lines("targets", targets))
            _check_numbers(source_lines, target_lines)
            target_ids = self.tokenizer.tgt.encode_batch(tag_lines(target_lines, tags.tgt))
        attention = []
        for src, tgt in zip(source_ids, target_ids, strict=True):
            attention.append(pair_attention(self.backend, self.tokenizer, src, tgt))
        return attention

    def _translate_lines(
        self,
        lines: Iterable[str],
        config: SearchConfig | None,
        options: TranslateOptions,
        *,
        best_only: bool,
        is_stream: bool,
    ) -> Iterator[LineResult]:
        """Check the options, and return an iterator that translates the lines."""
        checked_options = check_options(options, TranslateOptions)
        config = self._update_config(config, checked_options)
        window_lines = checked_options.get("window_lines", WINDOW_LINES)
        require_valid(window_lines >= 1, "window_lines", window_lines, "must be at least 1")
        prefixes = checked_options.get("prefixes")
        context = checked_options.get("context", 0)
        check_context(context, self.tokenizer)
        if context:
            is_valid = best_only and prefixes is None
            require_valid(is_valid, "context", context, "does not work with prefixes and n_best")
        checked_lines = check_lines("lines", lines)
        if prefixes is not None:
            prefixes = check_lines("prefixes", prefixes)
        windows: Iterable[Window] = WindowReader(
            checked_lines,
            prefixes,
            window_lines=window_lines,
            context=context,
            # with `has_more`, the first windows are small; True: no window ends early
            has_more=(lambda: True) if is_stream else None,
        )
        tags = self._tags_from(checked_options)
        line_options = make_line_options(checked_options, config, tags, best_only=best_only)
        self.load_reranker(line_options, config)  # raises an error before a line is read
        if not is_stream and isinstance(lines, Sequence) and len(lines) <= window_lines:
            windows = list(windows)  # a single window; `_encode_windows` then starts no thread
        return self._raise_errors(windows, config, line_options)

    def _raise_errors(
        self, windows: Iterable[Window], config: SearchConfig, options: LineOptions
    ) -> Iterator[LineResult]:
        """Yield the result of each line; raise `TranslationError` at the first that failed."""
        for window, results in self.translate_windows(windows, config, options):
            for number, result in enumerate(results, start=window.first_line + 1):
                if result.error is not None:
                    raise TranslationError(f"line {number} cannot be translated: {result.error}")
                yield result

    def _update_config(
        self, config: SearchConfig | None, checked_options: Mapping[str, Any]
    ) -> SearchConfig:
        """Return `config` with the search settings among the options.

        `config` defaults to the settings saved with the model.
        """
        if config is None:
            config = self.defaults
        if not isinstance(config, SearchConfig):
            raise TypeError(
                f"config={config!r}: give a SearchConfig, or settings such as beam_size=4"
            )
        changes = select_options(checked_options, SearchOptions)
        if changes:
            config = replace(config, **changes)
        suppressed_ids(config.suppress, self.tokenizer.tgt)  # raises an error for unknown pieces
        if config.hints:
            check_hint_symbols("glossary_mode=soft", self.tokenizer.src)
        return config

    def _tags_from(self, checked_options: Mapping[str, Any]) -> Tags:
        """Return the tags of the direction that the options select."""
        names = checked_options.keys() & set(DIRECTION_OPTIONS)
        return self.choose_tags(**{name: checked_options[name] for name in names})


def _check_numbers(sources: Sequence[str], targets: Sequence[str]) -> None:
    """Raise a `DataError` unless there is one target for each source."""
    if len(targets) != len(sources):
        raise DataError(
            f"{len(sources)} sources and {len(targets)} targets; their numbers must be equal"
        )
