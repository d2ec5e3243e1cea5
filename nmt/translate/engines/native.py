"""The native engine: search and scoring with PyTorch, by one model or an ensemble."""

# B sentences, S source, T target; EOS is part of both lengths

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from nmt.checkpoint import (
    build_model,
    find_model,
    load_info,
    load_tokenizer,
    load_weights,
    other_models,
)
from nmt.config import Combine, DType, SearchConfig, choose, resolve
from nmt.data.batch import bucket, pad, pad_source
from nmt.data.tokenizer import Tokenizers
from nmt.errors import ConfigError, ModelError
from nmt.model.fast import freeze
from nmt.model.fast.transfer import fetch
from nmt.runtime.distributed import find_device, find_dtype, keep_freed_memory
from nmt.search.hypotheses import Beam, ControlIds, Hypothesis, SearchTask
from nmt.search.search import BeamSearch, length_limits, search
from nmt.search.stepper import EnsembleStepper, ModelStepper, Stepper
from nmt.translate.engines.base import Ids, LoadedModel, SearchRequest, directions_of

log = logging.getLogger(__name__)

_CPU_TOKENS = 16384  # half as many are 5 to 10 % slower, twice as many no faster
_GPU_TOKENS = 65536  # a guess: it has not been measured


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
                live = Beam(torch.tensor([i]), log_probs.sum(dim=1), tokens, log_probs)
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
