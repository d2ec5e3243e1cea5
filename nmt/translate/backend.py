"""What `Translator` knows of an engine: search and scoring over ids, one batch at a time.

An engine knows nothing of text, lines or files. `NativeBackend` computes with torch, and is loaded
here; the one that runs an exported model by CTranslate2 has its own file.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from nmt.checkpoint import build_model, find_model, load_info, load_tokenizer, load_weights
from nmt.config import Combine, DType, SearchConfig, choose, resolve
from nmt.data.batch import pad_source
from nmt.data.tokenizer import Tokenizers
from nmt.distributed import find_device, find_dtype, keep_freed_memory
from nmt.errors import ConfigError, ModelError
from nmt.model.fast import freeze
from nmt.search.hypotheses import ControlIds, Hypothesis
from nmt.search.search import search
from nmt.search.stepper import EnsembleStepper, ModelStepper, Stepper
from nmt.translate.scoring import score_pairs

log = logging.getLogger(__name__)

Ids = Sequence[int]
_CPU_TOKENS = 16384  # half as many are 5 to 10 % slower, twice as many no faster
_GPU_TOKENS = 65536  # a guess: it has not been measured


@runtime_checkable
class Backend(Protocol):
    """An engine. Its methods may be called from several threads at once."""

    max_tokens: int  # bound on a batch, rows * beam * longest source, with which it is fastest
    num_workers: int  # batches that it computes at the same time

    def check(self, config: SearchConfig, *, scoring: bool = False) -> None:
        """Raise a `ConfigError` that names option and backend for what it cannot do in search, or
        in scoring; called before the first line is read.
        """

    def search(
        self,
        rows: Sequence[Ids],
        config: SearchConfig,
        prefixes: Sequence[Ids] | None = None,
        *,
        keys: Sequence[int] | None = None,
        n_best: int | None = None,
        with_scores: bool = True,
    ) -> list[list[Hypothesis]]:
        """Return the hypotheses of each row, best first.

        Args:
            rows: source ids of a batch of sentences, without EOS, none of them empty.
            config: how to search.
            prefixes: target ids that each translation starts with, possibly none, without BOS.
            keys: a number for each row that sampling depends on; an engine may ignore it.
            n_best: how many of each row the caller looks at, None for all; more may come.
            with_scores: whether the caller looks at scores; without, an engine may leave
                `token_log_probs` empty and `log_prob` and `score` rough or nan.
        """

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

    def search(
        self,
        rows: Sequence[Ids],
        config: SearchConfig,
        prefixes: Sequence[Ids] | None = None,
        *,
        keys: Sequence[int] | None = None,
        n_best: int | None = None,
        with_scores: bool = True,
    ) -> list[list[Hypothesis]]:
        """See `Backend.search`."""
        src, src_lengths = pad_source(rows, self.tokenizer)  # (B, S), (B,)
        batch = (src, src_lengths, config, self._ids)
        return search(self.stepper, *batch, prefixes=prefixes, keys=keys, n_best=n_best)

    def score(
        self, rows: Sequence[Ids], targets: Sequence[Ids], config: SearchConfig, max_tokens: int
    ) -> list[Hypothesis]:
        """See `Backend.score`."""
        return score_pairs(self.stepper, rows, targets, config, self._ids, max_tokens=max_tokens)


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
    for folder, info in zip(found, infos, strict=True):
        model = build_model(info, load_weights(folder), place)
        freeze(model)
        steppers.append(ModelStepper(model, number_format))
        log.info("model %s, %d updates, on %s", folder, info.updates, place)
    stepper = steppers[0] if len(steppers) == 1 else EnsembleStepper(steppers, combine)
    tokenizer = load_tokenizer(found[0], infos[0])
    return LoadedModel(NativeBackend(stepper, tokenizer), tokenizer, infos[0].search)
