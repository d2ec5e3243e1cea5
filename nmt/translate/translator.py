"""Text to text in Python: a model folder, or several, and the lines to translate or to score."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from nmt.config import Combine, DType, Engine, SearchConfig, TooLong, choose, require, resolve
from nmt.data.languages import (
    DIRECTION,
    LanguagePair,
    Tags,
    choose_tags,
    default_directions,
    encode_sources,
    encode_starts,
    tag_lines,
)
from nmt.data.tokenizer import Tokenizers
from nmt.errors import ConfigError, DataError, NmtError, nearest
from nmt.search.hypotheses import Hypothesis
from nmt.search.stepper import Stepper
from nmt.translate.attention import PairAttention, pair_attention
from nmt.translate.batch_search import BatchSearch
from nmt.translate.context import add_context, join_lines, take_last
from nmt.translate.engines.base import Backend, SearchRequest
from nmt.translate.engines.native import NativeBackend, load_models
from nmt.translate.lines import (
    EMPTY,
    MAX_SOURCE_LENGTH,
    WINDOW_LINES,
    LineOptions,
    LineResult,
    Translation,
    Window,
    check_lines,
    cut_windows,
    encode_window,
    prefetch,
    to_results,
)

_NO_PAIR = Hypothesis([], 0.0, 0.0, True, [])  # of two empty lines, which are certain
_LINE_OPTIONS: dict[str, Any] = {"prefixes": None, "small_first": True}
_LINE_OPTIONS |= {"too_long": TooLong.split, "max_source_length": MAX_SOURCE_LENGTH}
_LINE_OPTIONS |= {"window_lines": WINDOW_LINES, "max_tokens": None}
_DIRECTION: dict[str, Any] = dict.fromkeys(DIRECTION, "")


class TranslationError(NmtError):
    """A sentence that could not be translated."""


class Translator:
    """Translates and scores text with one model or an ensemble.

    It holds no state of a call, so several threads may use it at once. Scores are in nats (natural
    logarithms of probabilities).

    All methods take the same options: a `config` of search, by default the model's; as keywords any
    of its settings, such as beam_size; and those for lines

    - prefixes: the text that each translation is to start with; empty is no prefix.
    - too_long: what happens to a line of more than `max_source_length` tokens, EOS counted: split,
      truncate or error.
    - max_source_length: see `too_long`.
    - max_tokens: bound on a batch: rows * beam * longest source; None is the engine's own.
    - window_lines: lines that are sorted by length and translated at a time.
    - small_first: begin with fewer lines, so that results come soon.
    - src_lang, tgt_lang: the direction, of a model with several; see `choose_tags`.
    - src_tag, tgt_tag: the symbol before each source, and before each translation, instead.

    They raise `ConfigError` for an option that is unknown or out of range, `TypeError` for one of
    another type, `TranslationError` for a sentence that fails, `DataError` for prefixes that are
    not as many as the lines.
    """

    def __init__(
        self,
        engine: Stepper | Backend,
        tokenizer: Tokenizers,
        defaults: SearchConfig,
        directions: Sequence[LanguagePair] = (),
    ) -> None:
        self.backend = engine if isinstance(engine, Backend) else NativeBackend(engine, tokenizer)
        self.tokenizer = tokenizer
        self.defaults = defaults
        self.directions = directions

    @classmethod
    def load(
        cls,
        model_dir: str | Path | Sequence[str | Path],
        *,
        device: str = "auto",
        dtype: DType | str = DType.float32,
        backend: Engine | str = Engine.native,
        combine: Combine | str = Combine.probabilities,
        num_threads: int = 0,
    ) -> Translator:
        """Load a run, a checkpoint or a model folder; several are an ensemble.

        `num_threads` is for backend=ctranslate2 alone, 0 is torch's number; the native one computes
        with torch's threads. Raises `ModelError` for a folder that is none, `DeviceError` for a
        device that is not there.
        """
        folders = [model_dir] if isinstance(model_dir, str | Path) else list(model_dir)
        if choose(Engine, "backend", backend) is Engine.native:
            return cls(*load_models(folders, device=device, dtype=dtype, combine=combine))
        from nmt.translate.engines.ctranslate2 import load_ctranslate2  # an optional dependency

        if len(folders) != 1:
            raise ConfigError(
                f"model_dir names {len(folders)} folders: backend=ctranslate2 has no ensembles; "
                "give one folder, or backend=native"
            )
        loaded = load_ctranslate2(
            resolve(folders[0]),
            device=device,
            dtype=choose(DType, "dtype", dtype),
            num_threads=num_threads,
        )
        return cls(*loaded)

    def search_config(self, config: SearchConfig | None = None, **changes: Any) -> SearchConfig:
        """Return `config`, by default the model's, with those changes that are not None.

        Raises `ConfigError` for a setting that `SearchConfig` does not have.
        """
        return self._split_options(changes, {}, config)[0]

    def choose_tags(self, **names: str) -> Tags:
        """Return the tags of a direction; see `nmt.data.languages.choose_tags`."""
        return choose_tags(self.directions, self.tokenizer, **names)

    @property
    def own_tags(self) -> Tags:
        """The tags that all directions have; where they differ, texts bring theirs."""
        found = {direction.tags for direction in default_directions(self.directions)}
        return found.pop() if len(found) == 1 else Tags()

    def translate(
        self, lines: Iterable[str], config: SearchConfig | None = None, **options: Any
    ) -> list[str]:
        """Return the best translation of each line; an empty line stays empty."""
        return list(self.translate_stream(lines, config, **{"small_first": False, **options}))

    def translate_stream(
        self, lines: Iterable[str], config: SearchConfig | None = None, **options: Any
    ) -> Iterator[str]:
        """Yield the best translation of each line, in order, with memory for `window_lines` lines.

        Lines are read about two windows ahead of what is yielded, in another thread.
        """
        return (result.text for result in self._stream(lines, config, options, best_only=True))

    def n_best(
        self, lines: Iterable[str], config: SearchConfig | None = None, **options: Any
    ) -> list[list[Translation]]:
        """Return up to `beam_size` translations of each line, best first. An empty line has one,
        which is empty.
        """
        return list(self.n_best_stream(lines, config, **{"small_first": False, **options}))

    def n_best_stream(
        self, lines: Iterable[str], config: SearchConfig | None = None, **options: Any
    ) -> Iterator[list[Translation]]:
        """Yield what `n_best` returns, in order, with memory for `window_lines` lines."""
        results = self._stream(lines, config, options, best_only=False)
        return (result.translations for result in results)

    def translate_windows(
        self, windows: Iterable[Window], config: SearchConfig, options: LineOptions
    ) -> Iterator[tuple[Window, list[LineResult]]]:
        """Yield each window with the results of its lines; a sentence that fails has its `error`.

        The next window is read and turned into ids while one is translated. Raises `ConfigError`
        for what the engine cannot do, and what the engine raises when it fails with everything.
        """
        if options.context:
            yield from self._translate_in_context(windows, config, options)
            return
        n_best, tokenizer = options.n_best, self.tokenizer
        if config.sampling:  # draws do not depend on their number; more would go to waste
            config = replace(config, beam_size=n_best)
        self.backend.check(config)
        max_tokens = options.max_tokens or self.backend.max_tokens
        batches = BatchSearch(self.backend, config, n_best, max_tokens, options.with_scores)
        for encoded in prefetch(encode_window(window, tokenizer, options) for window in windows):
            outcomes = batches.translate([s for line in encoded.segments for s in line])
            yield (
                encoded.window,
                to_results(encoded, outcomes, tokenizer, n_best=n_best, alignment=config.alignment),
            )

    def _translate_in_context(
        self, windows: Iterable[Window], config: SearchConfig, options: LineOptions
    ) -> Iterator[tuple[Window, list[LineResult]]]:
        """Do what `translate_windows` does, each line with those before it."""
        alone, most = replace(options, context=0), options.max_source_length - 1
        for window in windows:
            groups = add_context(window, options.context)
            rows = encode_sources(self.tokenizer.src, join_lines(groups), options.tags)
            groups = [g if len(r) <= most else g[-1:] for g, r in zip(groups, rows, strict=True)]
            joined = replace(window, lines=join_lines(groups))
            ((_, found),) = self.translate_windows([joined], config, alone)
            pairs = zip(found, groups, strict=True)
            results = [take_last(result, len(group)) for result, group in pairs]
            again = [i for i, result in enumerate(results) if result is None]
            rest = replace(window, lines=[window.lines[i] for i in again])
            ((_, others),) = self.translate_windows([rest], config, alone)
            for i, other in zip(again, others, strict=True):
                results[i] = take_last(other, 1)
            yield window, [result for result in results if result is not None]  # all

    def score(
        self,
        sources: Iterable[str],
        targets: Iterable[str],
        config: SearchConfig | None = None,
        **options: Any,
    ) -> list[Translation]:
        """Return each target with its scores as a translation of its source, in order.

        `log_prob` and `token_log_probs` are what the model gives the target's tokens and the EOS
        after them, whole lines whatever their length; two empty lines score 0. `score` and
        `alignment` are what search would report. Takes settings of search and `max_tokens`, here
        rows * longest side. Raises `DataError` when there are not as many targets.
        """
        texts = list(check_lines("targets", targets))
        found = self.score_hypotheses(sources, texts, config, **options)
        results = []
        for text, hypothesis in zip(texts, found, strict=True):
            tokens = self.tokenizer.tgt.pieces(hypothesis.tokens[:-1])
            aligned = hypothesis.alignment and hypothesis.alignment[:-1]
            scores = (hypothesis.score, hypothesis.log_prob, tokens, True)
            scored = Translation(text, *scores, hypothesis.token_log_probs, aligned)
            results.append(EMPTY if hypothesis is _NO_PAIR else scored)
        return results

    def score_hypotheses(
        self,
        sources: Iterable[str],
        targets: Iterable[str],
        config: SearchConfig | None = None,
        first_line: int = 0,  # the number of lines before these, for errors
        **options: Any,
    ) -> list[Hypothesis]:
        """Return what `score` returns as ids, EOS last; of two empty lines without a token."""
        config, others = self._split_options(options, {"max_tokens": 4096, **_DIRECTION}, config)
        most = others.pop("max_tokens")
        require(most >= 1, "max_tokens", most, "must be at least 1")
        self.backend.check(config, scoring=True)
        tags = self.choose_tags(**others)
        texts = list(check_lines("sources", sources))
        rows = encode_sources(self.tokenizer.src, texts, tags, first_line=first_line)
        texts = tag_lines(list(check_lines("targets", targets)), tags.tgt)
        ids = self.tokenizer.tgt.encode_batch(texts)
        if len(rows) != len(ids):
            raise DataError(f"{len(rows)} sources and {len(ids)} targets; give as many of each")
        bare = self.tokenizer.tgt.encode(tags.tgt)
        filled = [i for i in range(len(rows)) if rows[i] or ids[i] != bare]
        some = ([rows[i] for i in filled], [ids[i] for i in filled])
        found = dict(zip(filled, self.backend.score(*some, config, most), strict=True))
        return [found.get(i, _NO_PAIR) for i in range(len(rows))]

    def attention(
        self, sources: Iterable[str], targets: Iterable[str] | None = None, *,
        tags: Tags | None = None, **options: Any,
    ) -> list[PairAttention]:  # fmt: skip
        """Return the attention of every layer and head for each source and its target, after their
        `tags`, None for `own_tags`; without `targets`, for the tokens that search finds, with any
        settings of search as `options`.

        Lines are taken whole, whatever their length. Raises `ConfigError` for an ensemble and for
        backend=ctranslate2, `DataError` when there are not as many targets.
        """
        config, _ = self._split_options(options, {}, None)
        tags, tgt = self.own_tags if tags is None else tags, self.tokenizer.tgt
        rows = encode_sources(self.tokenizer.src, list(check_lines("sources", sources)), tags)
        if targets is not None:
            found = tgt.encode_batch(tag_lines(list(check_lines("targets", targets)), tags.tgt))
        else:
            some = [row for row in rows if row]
            begin = encode_starts(tgt, [""], tags.tgt) * len(some)
            request = SearchRequest(some, config, begin, n_best=1)
            best = iter(self.backend.search(request) if some else [])
            found = [
                [t for t in next(best)[0].tokens if t != tgt.eos_id] if row else [] for row in rows
            ]
        if len(rows) != len(found):
            raise DataError(f"{len(rows)} sources and {len(found)} targets; give as many of each")
        pairs = zip(rows, found, strict=True)
        return [pair_attention(self.backend, self.tokenizer, src, tgt) for src, tgt in pairs]

    def _stream(
        self,
        lines: Iterable[str],
        config: SearchConfig | None,
        options: dict[str, Any],
        *,
        best_only: bool,
    ) -> Iterator[LineResult]:
        """Check the options and return the results of lines, where one that failed is an error."""
        config, given = self._split_options(options, {**_LINE_OPTIONS, **_DIRECTION}, config)
        prefixes = given.pop("prefixes")
        if prefixes is not None:
            prefixes = check_lines("prefixes", prefixes)
        cut = {name: given.pop(name) for name in ("window_lines", "small_first")}
        require(cut["window_lines"] >= 1, "window_lines", cut["window_lines"], "must be at least 1")
        given["too_long"] = choose(TooLong, "too_long", given["too_long"])
        n_best = 1 if best_only else config.beam_size
        tags = self.choose_tags(**{name: given.pop(name) for name in _DIRECTION})
        of_lines = LineOptions(n_best=n_best, with_scores=not best_only, tags=tags, **given)
        windows = cut_windows(check_lines("lines", lines), prefixes, **cut)
        return self._results(windows, config, of_lines)

    def _results(
        self, windows: Iterable[Window], config: SearchConfig, options: LineOptions
    ) -> Iterator[LineResult]:
        for window, results in self.translate_windows(windows, config, options):
            for number, result in enumerate(results, start=window.first_line + 1):
                if result.error is not None:
                    raise TranslationError(f"line {number} cannot be translated: {result.error}")
                yield result

    def _split_options(
        self, options: dict[str, Any], others: Mapping[str, Any], config: SearchConfig | None
    ) -> tuple[SearchConfig, dict[str, Any]]:
        """Return `config`, or the model's, with the settings of search among `options`, and all of
        `others`, which holds defaults.
        """
        config = self.defaults if config is None else config
        if not isinstance(config, SearchConfig):
            rule = "give a SearchConfig, or settings such as beam_size=4"
            raise TypeError(f"config={config!r}: {rule}")
        settings = {field.name: getattr(config, field.name) for field in fields(SearchConfig)}
        known = {**settings, **others}
        for key, value in options.items():
            if key not in known:
                raise ConfigError(f"{key}: no such option here; {nearest(key, known)}")
            default = known[key] if known[key] is not None or key == "prefixes" else 1
            if value is not None and default is not None and not _fits(value, default):
                raise TypeError(f"{key}={value!r}: must be of type {type(default).__name__}")
        given = {key: value for key, value in options.items() if value is not None}
        changes = {key: value for key, value in given.items() if key in settings}
        return replace(config, **changes), {key: given.get(key, others[key]) for key in others}


def _fits(value: Any, default: Any) -> bool:
    """Return whether `value` may stand in the place of `default`."""
    if isinstance(default, bool) or isinstance(value, bool):
        return type(default) is type(value)
    if isinstance(default, str):  # a choice by its name
        return isinstance(value, str)
    return isinstance(value, numbers.Real if isinstance(default, float) else numbers.Integral)
