"""The Python interface: load a model or an ensemble, translate and score text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nmt.config import (
    Combine,
    DType,
    Engine,
    Quantization,
    RerankConfig,
    Reranking,
    RerankOptions,
    SearchConfig,
    SearchOptions,
    TooLong,
    choose,
    require_valid,
    resolve_path,
)
from nmt.data.languages import (
    DIRECTION_OPTIONS,
    LanguagePair,
    Tags,
    choose_tags,
    default_directions,
    encode_sources,
    encode_starts,
    list_language_directions,
    tag_lines,
)
from nmt.data.terminology import check_hint_symbols
from nmt.data.tokenizer import Tokenizers
from nmt.errors import ConfigError, DataError, NmtError
from nmt.runtime.prefetch import prefetch
from nmt.runtime.signatures import using_verify_key
from nmt.search.constraints import suppressed_ids
from nmt.search.hypotheses import Hypothesis
from nmt.search.request import SearchRequest
from nmt.search.stepper import Stepper
from nmt.translate.attention import PairAttention, pair_attention
from nmt.translate.batch_search import BatchSearch
from nmt.translate.context import (
    add_context,
    check_context,
    drop_long_context,
    find_common_separator,
    join_lines,
    recase_groups,
    take_last,
)
from nmt.translate.engines.auto import load_auto
from nmt.translate.engines.base import Backend
from nmt.translate.engines.ctranslate2 import load_ctranslate2
from nmt.translate.engines.native import NativeBackend, load_models
from nmt.translate.loops import search_without_loops
from nmt.translate.notebook import NBestList
from nmt.translate.options import (
    MAX_SOURCE_LENGTH,
    LineOptions,
    ScoreOptions,
    TranslateOptions,
    check_options,
)
from nmt.translate.pair_scores import EMPTY_PAIR, MAX_SCORE_TOKENS, score_pairs
from nmt.translate.rerank import Reranker, make_reranker, rank_candidates
from nmt.translate.results import (
    EMPTY,
    LineResult,
    Translation,
    apply_cases,
    build_line_results,
)
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


class TranslationError(NmtError):
    """Raised for a sentence that could not be translated."""


class Translator:
    """Translates and scores text with one model or an ensemble.

    Several threads may use a translator at once: it keeps no state between calls. Scores are
    log-probabilities in nats.

    The methods take `config`, the search settings (default: the ones saved with the model), and
    keyword arguments that change single settings; see `TranslateOptions` and `ScoreOptions`. They
    raise `ConfigError` for an option that is unknown or out of range, `TypeError` for a value of
    the wrong type, `TranslationError` for a sentence that fails, and `DataError` when the number
    of prefixes or targets differs from the number of lines.
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
        `combine` says how an ensemble combines its distributions. With `verify_key`, the file of a
        public key, a folder must have its signature (`nmt-export sign=KEY`). Raises
        `ModelError` for a folder without a model or signature, and `DeviceError` for a device that
        does not exist.
        """
        folders = [model_dir] if isinstance(model_dir, str | Path) else list(model_dir)
        engine = choose(Engine, "backend", backend)
        dtype = choose(DType, "dtype", dtype)
        combine = choose(Combine, "combine", combine)
        if quantization is not None:
            quantization = choose(Quantization, "quantization", quantization)
            rule = "only works with backend=auto or ctranslate2"
            require_valid(engine is not Engine.native, "quantization", quantization, rule)
        key_path = None if verify_key is None else resolve_path(verify_key)
        with using_verify_key(key_path):
            if engine is Engine.native:
                model = load_models(folders, device=device, dtype=dtype, combine=combine)
            elif engine is Engine.auto:
                model = load_auto(
                    folders,
                    device=device,
                    dtype=dtype,
                    combine=combine,
                    num_threads=num_threads,
                    quantization=quantization,
                )
            else:
                if len(folders) != 1:
                    raise ConfigError(
                        f"model_dir names {len(folders)} folders: backend=ctranslate2 has no "
                        "ensembles; give one folder, or backend=native"
                    )
                model = load_ctranslate2(
                    resolve_path(folders[0]),
                    device=device,
                    dtype=dtype,
                    num_threads=num_threads,
                    quantization=quantization,
                )
        return cls(model.backend, model.tokenizer, model.defaults, model.directions, device)

    def search_config(
        self, config: SearchConfig | None = None, **changes: Unpack[SearchOptions]
    ) -> SearchConfig:
        """Return `config`, by default the model's, with the changes that are not None."""
        return self._update_config(config, check_options(changes, SearchOptions))

    def choose_tags(self, **direction: str) -> Tags:
        """Return the tags of a direction; see `nmt.data.languages.choose_tags`."""
        return choose_tags(self.directions, self.tokenizer, **direction)

    @property
    def common_tags(self) -> Tags:
        """The tags of the default directions if all of these have the same tags.

        Otherwise there are no common tags, and the text itself must contain tags.
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

        These are up to `alternatives` if that is not 0, with reranking up to `candidates`, and
        otherwise up to `beam_size`. An empty line has a single empty translation.
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
            yield from self._translate_in_context(windows, config, options)
            return
        num_candidates = options.n_best
        reranker = self.load_reranker(options, config)
        if options.rerank is not None:
            num_candidates = options.rerank.count_candidates(config)
        if config.sampling:  # draw no more samples than needed; they are independent
            config = replace(config, beam_size=num_candidates)
        search_config = config
        if options.unk_replacement:
            search_config = replace(config, alignment=True)
        self.backend.check(search_config)
        [forced_start] = encode_starts(self.tokenizer.tgt, [""], options.tags.tgt)  # ids of the tag
        batches = BatchSearch(
            self.backend,
            search_config,
            n_best=num_candidates,
            max_tokens=options.max_tokens or self.backend.max_tokens,
            num_forced=len(forced_start),
            src_tags=self.list_src_tags(options.tags),
            with_scores=options.with_scores or reranker is not None,
        )
        options = replace(
            options,
            protect=config.protect,
            hints=tuple(config.hints),
            required_terms=tuple(config.required_terms),
        )
        encode = partial(encode_window, tokenizer=self.tokenizer, options=options)
        encoded_windows: Iterable[EncodedWindow] = map(encode, windows)
        # starting a thread for a single window would only cost time
        if not isinstance(windows, list) or len(windows) > 1:
            encoded_windows = prefetch(encoded_windows)
        for encoded in encoded_windows:
            segments = [segment for line in encoded.segments for segment in line]
            line_results = build_line_results(
                encoded,
                batches.translate(segments),
                self.tokenizer,
                n_best=num_candidates,
                alignment=config.alignment,
                unk_replacement=options.unk_replacement,
            )
            if reranker is not None:
                line_results = rank_candidates(
                    reranker, encoded.texts, line_results, n_best=options.n_best
                )
            yield encoded.window, apply_cases(line_results, encoded.cases)

    def load_reranker(self, options: LineOptions, config: SearchConfig) -> Reranker | None:
        """Return the reranker that the options choose, if any; it keeps its models for later calls.

        Raises a `ConfigError` for a reranker that does not suit the model or the search, or cannot
        be loaded.
        """
        if options.rerank is None:
            return None
        options.rerank.count_candidates(config)  # raises an error if the search has fewer
        return make_reranker(options.rerank, self.find_languages(options.tags), self.device)

    def list_src_tags(self, tags: Tags) -> list[str]:
        """Return the tags that sources may begin with: source tags of `tags` and all directions."""
        src_tags = [direction.src_tag for direction in self.directions]
        return [tag for tag in (tags.src, *tags.choices, *src_tags) if tag]

    def find_languages(self, tags: Tags) -> list[LanguagePair]:
        """Return the directions that text with these tags may have."""
        if tags.choices:  # the text itself has a tag
            return list(self.directions)
        directions = [direction for direction in self.directions if direction.tags == tags]
        if directions:
            return directions
        # an old direction of M2M100 or NLLB, fine-tuned on other directions
        languages = list_language_directions(self.tokenizer.src)
        return [direction for direction in languages if direction.tags == tags]

    def _translate_in_context(
        self, windows: Iterable[Window], config: SearchConfig, options: LineOptions
    ) -> Iterator[tuple[Window, list[LineResult]]]:
        """Translate each line together with the lines before it, or without them if that fails."""
        separator = find_common_separator(self.tokenizer)
        line_options = replace(options, context=0, recase=False)  # `recase_groups` does it

        def translate_lines(window: Window, lines: list[str]) -> list[LineResult]:
            window = replace(window, lines=lines)
            [(_, results)] = self.translate_windows([window], config, line_options)
            return results

        for window in windows:
            groups = add_context(
                window,
                options.context,
                copy_symbols=options.copy_symbols,
                protect=config.protect,
            )
            cases = [""] * len(groups)
            if options.recase:
                groups, cases = recase_groups(groups, config)
            groups = drop_long_context(
                groups,
                self.tokenizer,
                options.tags,
                max_source_length=options.max_source_length,
                hints=config.hints,
            )
            group_results = translate_lines(window, join_lines(groups, separator))
            results = []
            for result, group, case in zip(group_results, groups, cases, strict=True):
                results.append(take_last(result, len(group), separator, case))
            retried = [i for i, result in enumerate(results) if result is None]
            retried_results = translate_lines(window, [groups[i][-1] for i in retried])
            for i, result in zip(retried, retried_results, strict=True):
                results[i] = take_last(result, 1, separator, cases[i])
            yield window, list(filter(None, results))  # every line has a result now

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
        are scored whole, however long. A pair of empty lines has the score 0. `max_tokens` bounds
        the size of a batch: pairs * longest side.
        """
        texts = list(check_lines("targets", targets))
        hypotheses = self.score_hypotheses(sources, texts, config, **options)
        translations = []
        for text, hypothesis in zip(texts, hypotheses, strict=True):
            if hypothesis is EMPTY_PAIR:
                translations.append(EMPTY)
                continue
            alignment = hypothesis.alignment
            # EOS counts in the scores, but is left out of the tokens, as in the results of search
            translation = Translation(
                text=text,
                score=hypothesis.score,
                log_prob=hypothesis.log_prob,
                tokens=self.tokenizer.tgt.pieces(hypothesis.tokens[:-1]),
                finished=True,
                token_log_probs=hypothesis.token_log_probs,
                alignment=None if alignment is None else alignment[:-1],
            )
            translations.append(translation)
        return translations

    def score_hypotheses(
        self,
        sources: Iterable[str],
        targets: Iterable[str],
        config: SearchConfig | None = None,
        first_line: int = 0,
        **options: Unpack[ScoreOptions],
    ) -> list[Hypothesis]:
        """Score pairs as `score` does; return token ids with EOS, or no ids for two empty lines.

        `first_line` is the number of lines before these, for error messages.
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

        `targets` default to the translations that search finds with `options`. Lines get `tags`, by
        default `common_tags`, and are used whole, however long. Raises `ConfigError` for an
        ensemble and for backend=ctranslate2; backend=auto computes attention natively.
        """
        config = self.search_config(**options)
        if tags is None:
            tags = self.common_tags
        source_lines = list(check_lines("sources", sources))
        source_ids = encode_sources(self.tokenizer.src, source_lines, tags)
        if targets is None:
            target_ids = self._search_targets(source_ids, config, tags)
        else:
            target_lines = list(check_lines("targets", targets))
            _check_numbers(source_lines, target_lines)
            target_ids = self.tokenizer.tgt.encode_batch(tag_lines(target_lines, tags.tgt))
        attention = []
        for src, tgt in zip(source_ids, target_ids, strict=True):
            attention.append(pair_attention(self.backend, self.tokenizer, src, tgt))
        return attention

    def _search_targets(
        self, source_ids: list[list[int]], config: SearchConfig, tags: Tags
    ) -> list[list[int]]:
        """Return the ids of the best translation of each source, without EOS."""
        tokenizer = self.tokenizer.tgt
        target_ids: list[list[int]] = [[] for _ in source_ids]
        searched = [i for i, ids in enumerate(source_ids) if ids]
        if searched:
            request = SearchRequest(
                [source_ids[i] for i in searched],
                config,
                # each target begins with the tag of its language, if the model has tags
                prefixes=encode_starts(tokenizer, [""], tags.tgt) * len(searched),
                n_best=1,
            )
            results = search_without_loops(self.backend, request)
            for i, hypotheses in zip(searched, results, strict=True):
                target_ids[i] = [id for id in hypotheses[0].tokens if id != tokenizer.eos_id]
        return target_ids

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
        is_plain = context == 0 or (best_only and prefixes is None)
        require_valid(is_plain, "context", context, "does not work with prefixes and n_best")
        windows: Iterable[Window] = WindowReader(
            check_lines("lines", lines),
            None if prefixes is None else check_lines("prefixes", prefixes),
            window_lines=window_lines,
            context=context,
            # a stream begins with small windows, but no window ends to avoid waiting for a line
            has_more=(lambda: True) if is_stream else None,
        )
        rerank = self._rerank_from(checked_options)
        n_best = 1
        if not best_only:
            n_best = config.max_results if rerank is None else rerank.count_candidates(config)
        line_options = LineOptions(
            n_best=n_best,
            with_scores=not best_only,
            max_tokens=checked_options.get("max_tokens"),
            too_long=choose(TooLong, "too_long", checked_options.get("too_long", TooLong.split)),
            max_source_length=checked_options.get("max_source_length", MAX_SOURCE_LENGTH),
            recase=checked_options.get("recase", True),
            copy_symbols=checked_options.get("copy_symbols", True),
            unk_replacement=checked_options.get("unk_replacement", False),
            rerank=rerank,
            tags=self._tags_from(checked_options),
            context=context,
        )
        self.load_reranker(line_options, config)  # raises an error before a line is read
        if not is_stream and isinstance(lines, Sequence) and len(lines) <= window_lines:
            windows = list(windows)  # a single window, for which no thread has to read ahead
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
        """Return `config`, by default the model's, with the search settings of the options."""
        if config is None:
            config = self.defaults
        if not isinstance(config, SearchConfig):
            raise TypeError(
                f"config={config!r}: give a SearchConfig, or settings such as beam_size=4"
            )
        names = SearchOptions.__annotations__.keys() & checked_options.keys()
        if names:
            config = replace(config, **{name: checked_options[name] for name in names})
        suppressed_ids(config.suppress, self.tokenizer.tgt)  # raises an error for unknown pieces
        if config.hints:
            check_hint_symbols("glossary_mode=soft", self.tokenizer.src)
        return config

    def _rerank_from(self, checked_options: Mapping[str, Any]) -> RerankConfig | None:
        """Return the settings of reranking among the options; None if they do not rerank."""
        names = RerankOptions.__annotations__.keys() & checked_options.keys()
        if not names:
            return None
        config = RerankConfig(**{name: checked_options[name] for name in names})
        return None if config.rerank is Reranking.none else config

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
