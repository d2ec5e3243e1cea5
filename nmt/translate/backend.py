"""What `Translator` knows of an engine: search and scoring over ids, one batch at a time; the
engine that computes with torch; and segments that go through an engine in batches of similar
length. The engine that runs an exported model by CTranslate2 has its own file.
"""

# B sentences, S source, T target; EOS is part of both lengths

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from nmt.checkpoint import (
    ModelInfo,
    build_model,
    find_model,
    load_info,
    load_tokenizer,
    load_weights,
    other_models,
)
from nmt.config import Combine, DType, SearchConfig, choose, resolve
from nmt.data.batch import bucket, pad, pad_source
from nmt.data.languages import LanguagePair, find_directions
from nmt.data.tokenizer import Tokenizers
from nmt.errors import ConfigError, ModelError
from nmt.model.fast import freeze
from nmt.model.fast.transfer import fetch
from nmt.runtime.distributed import find_device, find_dtype, keep_freed_memory
from nmt.search.hypotheses import ControlIds, Hypothesis, Live, SearchTask
from nmt.search.search import BeamSearch, length_limits, occurrences, search
from nmt.search.stepper import EnsembleStepper, ModelStepper, Stepper

log = logging.getLogger(__name__)

Ids = Sequence[int]
_CPU_TOKENS = 16384  # half as many are 5 to 10 % slower, twice as many no faster
_GPU_TOKENS = 65536  # a guess: it has not been measured
MAX_FAILURES = 32
"""After so many in a row, a segment that was translated before shows whether the engine still
works.
"""


@dataclass(frozen=True)
class SearchRequest:
    """A batch of sentences and how to search them."""

    rows: Sequence[Ids]  # source ids without EOS, at least one each
    config: SearchConfig
    prefixes: Sequence[Ids] | None = None
    """Target ids that each translation starts with, possibly none, without BOS."""
    keys: Sequence[int] | None = None
    """A number for each row that sampling depends on; an engine may ignore it."""
    n_best: int | None = None  # hypotheses of a row that are looked at, None for all
    with_scores: bool = True
    """Whether scores are looked at; without, an engine may leave `token_log_probs` empty and
    `log_prob` and `score` rough or nan.
    """


@runtime_checkable
class Backend(Protocol):
    """An engine. Its methods may be called from several threads at once."""

    max_tokens: int  # bound on a batch, rows * beam * longest source, with which it is fastest
    num_workers: int  # batches that it computes at the same time

    def check(self, config: SearchConfig, *, scoring: bool = False) -> None:
        """Raise a `ConfigError` that names option and backend for what it cannot do in search, or
        in scoring; called before the first line is read.
        """

    def search(self, request: SearchRequest) -> list[list[Hypothesis]]:
        """Return the hypotheses of each row, best first: `n_best`, or more."""

    def score(
        self, rows: Sequence[Ids], targets: Sequence[Ids], config: SearchConfig, max_tokens: int
    ) -> list[Hypothesis]:
        """Return each target, EOS added, as search with `config` would report it.

        Neither `rows` nor `targets` hold EOS; a target may be empty. A batch has at most
        `max_tokens`, rows * longest side.
        """


class LoadedModel(NamedTuple):
    """What model folders give a `Translator`."""

    backend: Backend
    tokenizer: Tokenizers
    defaults: SearchConfig  # of the first folder
    directions: list[LanguagePair]


class NativeBackend:
    """Searches with torch: one model, or an ensemble."""

    num_workers = 1  # torch computes one matrix multiplication with several threads

    def __init__(self, stepper: Stepper, tokenizer: Tokenizers) -> None:
        self.stepper = stepper
        self.max_tokens = _GPU_TOKENS if stepper.device.type == "cuda" else _CPU_TOKENS
        self.tokenizer = tokenizer
        self._ids = ControlIds.of(tokenizer)

    def check(self, config: SearchConfig, *, scoring: bool = False) -> None:
        """Accept everything that `SearchConfig` accepts."""

    def search(self, request: SearchRequest) -> list[list[Hypothesis]]:
        """Search by `nmt.search`."""
        src = pad_source(request.rows, self.tokenizer)  # (B, S), (B,)
        named = {name: getattr(request, name) for name in ("prefixes", "keys", "n_best")}
        return search(self.stepper, *src, request.config, self._ids, **named)

    def can_join(self, config: SearchConfig) -> bool:
        """Whether sentences may join a search with these settings while it goes on."""
        others = config.sampling or config.alignment or config.min_length
        return config.beam_size > 1 and not others and config.coverage_penalty == 0

    def begin(self, rows: Sequence[Ids], config: SearchConfig, n_best: int) -> BeamSearch:
        """Begin a search that sentences may join."""
        src, lengths = pad_source(rows, self.tokenizer)  # (B, S), (B,)
        limits = length_limits(lengths, config, [()] * len(rows))
        task = SearchTask(src, lengths, config, self._ids, (), limits, n_best)
        return BeamSearch(self.stepper, task)

    def score(
        self, rows: Sequence[Ids], targets: Sequence[Ids], config: SearchConfig, max_tokens: int
    ) -> list[Hypothesis]:
        """Score by one forward pass a batch (teacher forcing)."""
        if not rows:
            return []
        found: dict[int, Hypothesis] = {}
        ids, pairs = self._ids, zip(rows, targets, strict=True)
        lengths = np.array([(len(s) + 1, len(t) + 1) for s, t in pairs], dtype=np.int32)
        for batch in bucket(lengths, max(max_tokens, int(lengths.max())), np.arange(len(lengths))):
            source = pad_source([rows[i] for i in batch], self.tokenizer)  # (B, S), (B,)
            outputs = [targets[i] for i in batch]
            tgt_in = pad(outputs, pad_id=ids.pad, bos=ids.bos)  # (B, T)
            tgt_out = pad(outputs, pad_id=ids.pad, eos=ids.eos)  # (B, T)
            task = SearchTask(*source, config, ids, (), lengths[batch, 1].tolist(), n_best=1)
            attends = task.needs_attention
            scored = self.stepper.score(*source, tgt_in, tgt_out, attention=attends)
            of_all, *attention = fetch(*(x for x in scored if x is not None))  # (B, T), [(B, T, S)]
            for i, length in enumerate(task.limits):
                row = slice(i, i + 1)
                log_probs, tokens = of_all[row, :length], tgt_out[row, :length]  # (1, T)
                live = Live(torch.tensor([i]), log_probs.sum(dim=1), tokens, log_probs)
                if attention:
                    weights = attention[0][row, :length]  # (1, T, S)
                    live = replace(live, aligned=weights.argmax(dim=2), attended=weights.sum(dim=1))
                found |= {int(batch[i]): hypothesis for _, hypothesis in task.close(live)}
        return [found[i] for i in range(len(rows))]


def load_models(
    folders: Sequence[str | Path],
    *,
    device: str = "auto",
    dtype: DType | str = DType.float32,
    combine: Combine | str = Combine.probabilities,
) -> LoadedModel:
    """Load runs, checkpoints or model folders for the native backend; several are an ensemble.

    Raises `ModelError` for a folder that is none or has another tokenizer than the first, and
    `DeviceError` for a device that is not there.
    """
    if not folders:
        raise ConfigError("model_dir=[]: name at least one run, checkpoint or model folder")
    place = find_device(device)
    number_format = find_dtype(choose(DType, "dtype", dtype), place)
    found = [find_model(resolve(folder)) for folder in folders]
    infos = [load_info(folder) for folder in found]
    for folder, info in zip(found, infos, strict=True):
        if info.tokenizer_sha256 != infos[0].tokenizer_sha256:
            raise ModelError(
                f"{folder} has another tokenizer than {found[0]}; an ensemble needs models "
                "trained on the same data folder"
            )
    if place.type == "cpu":
        keep_freed_memory()
    steppers: list[Stepper] = []
    for given, folder, info in zip(folders, found, infos, strict=True):
        model = build_model(info, load_weights(folder), place)
        steppers.append(ModelStepper(model, freeze(model, number_format)))
        others = other_models(resolve(given), folder)
        log.info("model %s, %d updates, on %s%s", folder, info.updates, place, others)
    stepper = steppers[0] if len(steppers) == 1 else EnsembleStepper(steppers, combine)
    tokenizer = load_tokenizer(found[0], infos[0])
    backend = NativeBackend(stepper, tokenizer)
    return LoadedModel(backend, tokenizer, infos[0].search, directions_of(infos[0], tokenizer))


def directions_of(info: ModelInfo, tokenizer: Tokenizers) -> list[LanguagePair]:
    """Return the directions of a model; see `find_directions`."""
    return find_directions(info.directions, info.src_lang, info.tgt_lang, tokenizer.src)


@dataclass(frozen=True)
class Segment:
    """One line, or a part of a long one."""

    ids: list[int]  # of the source, without EOS, at least one
    prefix: list[int]  # target ids that the translation starts with; may be empty


@dataclass(frozen=True)
class Failure:
    """Why a segment has no translation."""

    reason: str


Outcome = list[Hypothesis] | Failure


@dataclass
class BatchSearch:
    """Searches with fixed settings; remembers whether the engine works at all."""

    backend: Backend
    config: SearchConfig
    n_best: int  # hypotheses of each segment that are looked at
    max_tokens: int  # bound on a batch: rows * beam * longest source, EOS included
    with_scores: bool = True  # whether the scores of hypotheses are looked at
    num_failed: int = 0  # segments that failed in a row, over all threads
    known: Segment | None = None  # one that was translated

    def translate(self, segments: Sequence[Segment]) -> list[Outcome]:
        """Return the hypotheses of each segment, best first, or why there are none. Searches as
        many batches at a time as the engine has workers.

        Raises what the engine raised when it failed with `MAX_FAILURES` segments in a row and with
        one that it translated before.
        """
        results: list[Outcome] = [[] for _ in segments]
        if not segments:
            return results
        lengths = np.array([[len(segment.ids) + 1] * 2 for segment in segments], dtype=np.int32)
        keys = occurrences(segment.ids for segment in segments)
        most = max(self.max_tokens // self.config.beam_size, int(lengths.max()))
        batches = bucket(lengths, most, np.arange(len(segments)))
        rows = [[segments[i] for i in batch] for batch in batches]
        their_keys = [[keys[i] for i in batch] for batch in batches]
        if self.backend.num_workers == 1 or len(batches) == 1:
            found = list(map(self._search, rows, their_keys))
        else:
            with ThreadPoolExecutor(self.backend.num_workers) as pool:
                found = list(pool.map(self._search, rows, their_keys))
        for batch, outcomes in zip(batches, found, strict=True):
            for i, outcome in zip(batch, outcomes, strict=True):
                results[i] = outcome
        return results

    def translate_arriving(
        self,
        segments: Sequence[Segment],
        take: Callable[[int], Sequence[Segment]],
        deliver: Callable[[list[tuple[int, Outcome]]], None],
    ) -> int:
        """Translate segments without prefixes, and those that `take` returns between two steps, by
        a backend whose `can_join` allows it; return their number.

        `take` is given the number of segments that are searched. `deliver` gets the segments that
        are done, by their number, and what `translate` returns for each. Raises what that raises.
        """
        assert isinstance(self.backend, NativeBackend)
        left = dict(enumerate(segments))
        num_taken = len(left)
        try:
            rows = [segment.ids for segment in segments]
            beams = self.backend.begin(rows, self.config, self.n_best)
            while beams.num_live:
                found: list[tuple[int, Outcome]] = [(i, beams.result(i)) for i in beams.step()]
                for number, _ in found:
                    self.known = left.pop(number)
                if found:
                    deliver(found)
                more = take(beams.num_live) if beams.num_live else ()
                left |= enumerate(more, start=num_taken)
                num_taken += len(more)
                if more:
                    rows = [segment.ids for segment in more]
                    beams.join(*pad_source(rows, self.backend.tokenizer))
        except Exception as error:  # whatever it is, sentences are to be translated without others
            log.warning("a search of %d sentences failed (%s); trying again", len(left), error)
        if left:
            deliver(list(zip(left, self.translate(list(left.values())), strict=True)))
        return num_taken

    def _search(self, rows: Sequence[Segment], keys: Sequence[int]) -> list[Outcome]:
        batch = ([row.ids for row in rows], self.config, [row.prefix for row in rows])
        try:
            found = self.backend.search(SearchRequest(*batch, keys, self.n_best, self.with_scores))
        except Exception as error:  # whatever it is, the other segments are to be translated
            if len(rows) == 1:
                self.num_failed += 1
                if self.num_failed >= MAX_FAILURES and not self._still_works():
                    raise
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        else:
            self.num_failed, self.known = 0, rows[0]
            return [*found]
        # outside the except block, where the error would keep the memory of the batch alive
        if len(rows) == 1:
            return [Failure(reason)]
        torch.cuda.empty_cache()  # does nothing without a GPU in use
        log.warning("a batch of %d sentences failed (%s); trying its halves", len(rows), reason)
        half = len(rows) // 2
        return self._search(rows[:half], keys[:half]) + self._search(rows[half:], keys[half:])

    def _still_works(self) -> bool:
        """Try again a segment that was translated; the engine may be broken for good."""
        if self.known is None:
            return False
        try:
            batch = ([self.known.ids], self.config, [self.known.prefix])
            self.backend.search(SearchRequest(*batch, keys=[0]))
        except Exception:  # the same as without a segment to try
            return False
        self.num_failed = 0
        return True
