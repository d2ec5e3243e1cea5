"""Text to text in Python: a model folder, or several, and the lines to translate or to score."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from nmt.config import Combine, DType, Engine, SearchConfig, TooLong, choose, require, resolve
from nmt.data.tokenizer import Tokenizers
from nmt.errors import ConfigError, DataError, NmtError, nearest
from nmt.search.penalties import score
from nmt.search.stepper import Model
from nmt.translate.backend import Backend, NativeBackend
from nmt.translate.decoding import Decoder
from nmt.translate.lines import (
    MAX_SOURCE_LENGTH,
    Encoded,
    LengthRule,
    decode_lines,
    encode_lines,
)
from nmt.translate.loading import load_models
from nmt.translate.results import EMPTY, LineResult, Translation
from nmt.translate.windows import WINDOW_LINES, Window, check_lines, cut_windows, prefetch

_MAX_ROWS = 1024  # pairs scored at a time


class TranslationError(NmtError):
    """A sentence that could not be translated."""


@dataclass(frozen=True, kw_only=True)
class LineOptions:
    """How lines go through the model; none of this changes what a sentence becomes, but for those
    that are too long.
    """

    n_best: int = 1
    """Translations of a line, at most; no more than the beam size."""
    with_scores: bool = True
    """Whether scores are looked at; without, those of some engines are missing, and nan."""
    max_tokens: int | None = None
    """Bound on a batch: rows * beam * longest source, EOS included; None is the engine's own."""
    rule: LengthRule = LengthRule()

    def __post_init__(self) -> None:
        is_valid = self.max_tokens is None or self.max_tokens >= 1
        require(is_valid, "max_tokens", self.max_tokens, "must be at least 1")


class Translator:
    """Translates and scores text with one model or an ensemble.

    It holds no state of a call, so several threads may use it at once. Scores are in nats (natural
    logarithms of probabilities).
    """

    def __init__(
        self, engine: Model | Backend, tokenizer: Tokenizers, defaults: SearchConfig
    ) -> None:
        self.backend = engine if isinstance(engine, Backend) else NativeBackend(engine, tokenizer)
        self.tokenizer = tokenizer
        self.defaults = defaults

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
            models = load_models(folders, device=device, dtype=dtype, combine=combine)
            return cls(models.stepper, models.tokenizer, models.defaults)
        from nmt.translate.exported import load_ctranslate2  # an optional dependency

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
        return cls(loaded.backend, loaded.tokenizer, loaded.defaults)

    def search_config(self, **changes: Any) -> SearchConfig:
        """Return the model's search settings with those changes that are not None.

        Raises `ConfigError` for a setting that `SearchConfig` does not have.
        """
        known = {field.name for field in fields(SearchConfig)}
        for key in changes:
            if key not in known:
                raise ConfigError(f"{key}: search has no such setting; {nearest(key, known)}")
        return replace(self.defaults, **{k: v for k, v in changes.items() if v is not None})

    def translate(self, lines: Iterable[str], **options: Any) -> list[str]:
        """Return the best translation of each line; an empty line stays empty.

        Takes the options of `translate_stream`.
        """
        return list(self.translate_stream(lines, small_first=False, **options))

    def translate_stream(
        self,
        lines: Iterable[str],
        *,
        prefixes: Iterable[str] | None = None,
        too_long: TooLong | str = TooLong.split,
        max_source_length: int = MAX_SOURCE_LENGTH,
        max_tokens: int | None = None,
        window_lines: int = WINDOW_LINES,
        small_first: bool = True,
        **search: Any,
    ) -> Iterator[str]:
        """Yield the best translation of each line, in order, with memory for `window_lines` lines.

        Raises `TranslationError` for a sentence that fails; `DataError` for prefixes that are not
        as many as the lines.

        Args:
            lines: text; read about two windows ahead of what is yielded, in another thread.
            prefixes: the text that each translation is to start with; empty is no prefix.
            too_long: what becomes of a line of more than `max_source_length` tokens, EOS counted.
            max_source_length: see `too_long`.
            max_tokens: bound on a batch: rows * beam * longest source; None is the engine's own.
            window_lines: lines that are sorted by length and translated at a time.
            small_first: begin with fewer lines, so that results come soon.
            search: settings of `SearchConfig`, such as beam_size; the others are the model's.
        """
        config = self.search_config(**search)
        rule = LengthRule(max_source_length, choose(TooLong, "too_long", too_long))
        options = LineOptions(with_scores=False, max_tokens=max_tokens, rule=rule)
        windows = cut_windows(lines, prefixes, window_lines=window_lines, small_first=small_first)
        for result in self._results(windows, config, options, with_prefixes=prefixes is not None):
            yield result.text

    def n_best(
        self,
        lines: Iterable[str],
        config: SearchConfig | None = None,
        *,
        prefixes: Iterable[str] | None = None,
        max_tokens: int | None = None,
    ) -> list[list[Translation]]:
        """Return up to `config.beam_size` translations of each line, best first; None is what the
        model's settings say. An empty line has one, which is empty.
        """
        return list(
            self.n_best_stream(
                lines, config, prefixes=prefixes, max_tokens=max_tokens, small_first=False
            )
        )

    def n_best_stream(
        self,
        lines: Iterable[str],
        config: SearchConfig | None = None,
        *,
        prefixes: Iterable[str] | None = None,
        max_tokens: int | None = None,
        window_lines: int = WINDOW_LINES,
        small_first: bool = True,
    ) -> Iterator[list[Translation]]:
        """Yield what `n_best` returns, in order, with memory for `window_lines` lines."""
        config = config or self.defaults
        options = LineOptions(n_best=config.beam_size, max_tokens=max_tokens)
        windows = cut_windows(lines, prefixes, window_lines=window_lines, small_first=small_first)
        for result in self._results(windows, config, options, with_prefixes=prefixes is not None):
            yield result.translations

    def translate_windows(
        self,
        windows: Iterable[Window],
        config: SearchConfig,
        options: LineOptions,
        *,
        with_prefixes: bool = False,
    ) -> Iterator[tuple[Window, list[LineResult]]]:
        """Yield each window with the results of its lines; a sentence that fails has its `error`.

        The next window is read and turned into ids while one is translated. Raises `ConfigError`
        for what the engine cannot do, and what the engine raises when it fails with everything.
        """
        if config.sampling:  # draws do not depend on their number; more would go to waste
            config = replace(config, beam_size=options.n_best)
        self.backend.check(config, with_prefixes=with_prefixes)
        max_tokens = options.max_tokens or self.backend.max_tokens
        decoder = Decoder(self.backend, config, options.n_best, max_tokens, options.with_scores)
        for window, encoded in prefetch(self._encode(windows, options.rule)):
            yield window, decode_lines(encoded, decoder, self.tokenizer)

    def score(
        self, sources: Iterable[str], targets: Iterable[str], **search: Any
    ) -> list[Translation]:
        """Return each target with its scores as a translation of its source, in order.

        `log_prob` and `token_log_probs` are what the model gives the target's tokens and the EOS
        after them, whole lines whatever their length; two empty lines score 0. `score` is
        normalised as search does it, without a coverage penalty. Raises `DataError` when there are
        not as many targets.
        """
        config = self.search_config(**search)
        rows = self.tokenizer.src.encode_batch(list(check_lines("sources", sources)))
        texts = list(check_lines("targets", targets))
        ids = self.tokenizer.tgt.encode_batch(texts)
        if len(rows) != len(ids):
            raise DataError(f"{len(rows)} sources and {len(ids)} targets; give as many of each")
        filled = [i for i in range(len(rows)) if rows[i] or ids[i]]
        results = [EMPTY] * len(rows)
        for start in range(0, len(filled), _MAX_ROWS):
            some = filled[start : start + _MAX_ROWS]
            found = self.backend.score([rows[i] for i in some], [ids[i] for i in some])
            for i, log_probs in zip(some, found, strict=True):
                total = sum(log_probs)
                value = score(total, len(log_probs), config)
                pieces = self.tokenizer.tgt.pieces(ids[i])
                results[i] = Translation(texts[i], value, total, pieces, True, log_probs)
        return results

    def _results(
        self,
        windows: Iterable[Window],
        config: SearchConfig,
        options: LineOptions,
        *,
        with_prefixes: bool,
    ) -> Iterator[LineResult]:
        """Yield the result of each line; one that failed is a `TranslationError`."""
        for window, results in self.translate_windows(
            windows, config, options, with_prefixes=with_prefixes
        ):
            for number, result in enumerate(results, start=window.first_line + 1):
                if result.error is not None:
                    raise TranslationError(f"line {number} cannot be translated: {result.error}")
                yield result

    def _encode(
        self, windows: Iterable[Window], rule: LengthRule
    ) -> Iterator[tuple[Window, Encoded]]:
        for window in windows:
            yield (
                window,
                encode_lines(
                    window.lines, window.prefixes, self.tokenizer, rule, window.first_line
                ),
            )
