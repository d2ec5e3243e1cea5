"""Text to text: tokenizer, batching by length, search, and the order of lines restored."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from nmt.checkpoint import build_model, find_model, load_info, load_tokenizer, load_weights
from nmt.config import SearchConfig
from nmt.data.batch import pad_source
from nmt.data.batching import bucket
from nmt.data.tokenizer import Tokenizer
from nmt.distributed import find_device, find_dtype
from nmt.inference.search import ControlIds, Hypothesis, search
from nmt.inference.stepper import ModelStepper, Stepper
from nmt.options import DType, resolve

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Translation:
    """One hypothesis as text."""

    text: str
    score: float  # log-probability over the length penalty
    log_prob: float  # nats, EOS counted
    tokens: list[str]  # pieces, without EOS
    finished: bool  # False when the length limit cut it off


EMPTY = Translation("", 0.0, 0.0, [], True)


class Translator:
    """Translates text with one model."""

    def __init__(self, stepper: Stepper, tokenizer: Tokenizer, defaults: SearchConfig) -> None:
        self.stepper = stepper
        self.tokenizer = tokenizer
        self.defaults = defaults
        self._ids = ControlIds(tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id)

    @classmethod
    def load(
        cls, model_dir: str | Path, *, device: str = "auto", dtype: DType | str = DType.float32
    ) -> Translator:
        """Load a run, a checkpoint or a model folder.

        Raises `ModelError` for a folder that is none, `DeviceError` for a device that is not there.
        """
        place = find_device(device)
        folder = find_model(resolve(model_dir))
        info = load_info(folder)
        tokenizer = load_tokenizer(folder, info)
        model = build_model(info, load_weights(folder), place)
        log.info("model %s, %d updates, on %s", folder, info.updates, place)
        return cls(ModelStepper(model, find_dtype(DType(dtype), place)), tokenizer, info.search)

    def translate(
        self,
        lines: Sequence[str],
        *,
        beam_size: int | None = None,
        length_penalty: float | None = None,
        max_tokens: int = 4096,
    ) -> list[str]:
        """Return the best translation of each line; an empty line stays empty.

        `max_tokens` bounds a batch: rows * beam * longest source. What is None comes from the model
        folder.
        """
        config = self.search_config(beam_size=beam_size, length_penalty=length_penalty)
        return [best[0].text for best in self.n_best(lines, config, max_tokens=max_tokens)]

    def search_config(self, **changes: float | None) -> SearchConfig:
        """Return the model's search settings with those changes that are not None."""
        given: dict[str, Any] = {key: v for key, v in changes.items() if v is not None}
        return replace(self.defaults, **given)

    def n_best(
        self, lines: Sequence[str], config: SearchConfig, *, max_tokens: int = 4096
    ) -> list[list[Translation]]:
        """Return up to `config.beam_size` translations of each line, best first."""
        rows = self.tokenizer.encode_batch(lines)
        results: list[list[Translation]] = [[EMPTY] for _ in lines]
        filled = np.array([i for i, row in enumerate(rows) if row], dtype=np.int64)
        if not len(filled):
            return results
        lengths = np.array([[len(rows[i]) + 1] * 2 for i in range(len(rows))], dtype=np.int32)
        most = max(max_tokens // config.beam_size, int(lengths.max()))
        for batch in bucket(lengths, most, filled):
            src, src_lengths = pad_source([rows[i] for i in batch], self.tokenizer)
            found = search(self.stepper, src, src_lengths, config, self._ids)
            for i, hypotheses in zip(batch, found, strict=True):
                results[i] = [self._to_text(hypothesis) for hypothesis in hypotheses]
        return results

    def n_best_stream(
        self, lines: Iterable[str], config: SearchConfig, *, max_tokens: int, window_lines: int
    ) -> Iterator[list[Translation]]:
        """Translate a stream in windows of so many lines, so that memory does not grow with its
        length.
        """
        lines = iter(lines)
        while window := list(islice(lines, window_lines)):
            yield from self.n_best(window, config, max_tokens=max_tokens)

    def _to_text(self, hypothesis: Hypothesis) -> Translation:
        ids = hypothesis.tokens[:-1] if hypothesis.finished else hypothesis.tokens
        text = self.tokenizer.decode(ids)
        pieces = self.tokenizer.pieces(ids)
        return Translation(text, hypothesis.score, hypothesis.log_prob, pieces, hypothesis.finished)
