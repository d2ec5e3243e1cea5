"""The native engine: search and scoring with PyTorch, by one model or an ensemble."""

# In shapes: B sentences, S source tokens and T target tokens, both with EOS

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from nmt.checkpoint import (
    build_model,
    describe_other_models,
    find_model,
    load_info,
    load_model_tokenizers,
    load_weights,
)
from nmt.config import Combine, DType, SearchConfig, choose, resolve_path
from nmt.data.batch import bucket_by_length, pad, pad_source
from nmt.data.tokenizer import Tokenizers
from nmt.errors import ConfigError, ModelError
from nmt.model.fast import prepare_for_inference
from nmt.model.fast.transfer import to_cpu
from nmt.runtime.distributed import find_device, find_dtype, keep_freed_memory
from nmt.search.beam import BeamSearch
from nmt.search.hypotheses import Hypothesis, shift_alignment
from nmt.search.request import Ids, SearchRequest
from nmt.search.scoring import coverage_score
from nmt.search.search import search
from nmt.search.stepper import EnsembleStepper, ModelStepper, Stepper
from nmt.translate.engines.base import LoadedModel, find_model_directions
from nmt.translate.loops import needs_second_search

log = logging.getLogger(__name__)

_CPU_BATCH_TOKENS = 16384  # tokens of a batch; 8192 are 5 to 10 % slower, 32768 no faster
_GPU_BATCH_TOKENS = 65536  # tokens of a batch; an estimate, not measured


class NativeBackend:
    """Searches and scores with PyTorch; supports every setting of `SearchConfig`.

    Args:
        stepper: computes the log-probabilities of tokens, with one model or an ensemble.
        tokenizers: the tokenizers of source and target.
    """

    num_workers = 1  # a single search already uses all threads in its matrix multiplications

    def __init__(self, stepper: Stepper, tokenizers: Tokenizers) -> None:
        self.stepper = stepper
        self.tokenizers = tokenizers
        self.max_tokens = _GPU_BATCH_TOKENS if stepper.device.type == "cuda" else _CPU_BATCH_TOKENS

    def check(self, config: SearchConfig, *, scoring: bool = False) -> None:
        """Accept every setting; see `Backend.check`."""

    def search(self, request: SearchRequest) -> list[list[Hypothesis]]:
        """See `Backend.search`."""
        hypotheses = search(self.stepper, request, self.tokenizers)
        if request.config.loop_guard and not request.needs_log_probs:
            self._score_loops(request, hypotheses)
        return hypotheses

    def _score_loops(self, request: SearchRequest, hypotheses: list[list[Hypothesis]]) -> None:
        """Add log-probabilities to greedy translations that loop or are cut off.

        `replace_loops` compares these translations with the results of a second search by their
        log-probabilities, which greedy search does not compute.
        """
        indices = []
        targets = []
        for i, [hypothesis] in enumerate(hypotheses):  # greedy search returns one per source
            if needs_second_search(request.sources[i], hypothesis):
                target = hypothesis.tokens
                if hypothesis.finished:
                    target = target[:-1]  # `score` adds EOS
                indices.append(i)
                targets.append(target)
        sources = [request.sources[i] for i in indices]
        scored_hypotheses = self.score(sources, targets, request.config, self.max_tokens)
        for i, scored_hypothesis in zip(indices, scored_hypotheses, strict=True):
            [hypothesis] = hypotheses[i]
            num_tokens = len(hypothesis.tokens)  # without EOS if the hypothesis is unfinished
            log_probs = scored_hypothesis.token_log_probs[:num_tokens]
            hypotheses[i] = [replace(hypothesis, log_prob=math.fsum(log_probs))]

    def can_join(self, request: SearchRequest) -> bool:
        """Return whether a running search of `request` accepts more sentences."""
        return request.can_join(self.tokenizers)

    def begin(self, request: SearchRequest) -> BeamSearch:
        """Begin a search that the caller advances. Sentences can join between its steps."""
        return BeamSearch(self.stepper, request, self.tokenizers)

    def score(
        self, sources: Sequence[Ids], targets: Sequence[Ids], config: SearchConfig, max_tokens: int
    ) -> list[Hypothesis]:
        """See `Backend.score`. Each batch takes one forward pass with teacher forcing."""
        if not sources:
            return []
        pairs = zip(sources, targets, strict=True)
        # (pairs, 2), with EOS
        lengths = np.array([(len(src) + 1, len(tgt) + 1) for src, tgt in pairs], dtype=np.int32)
        max_tokens = max(max_tokens, int(lengths.max()))  # the longest pair must fit
        hypotheses: dict[int, Hypothesis] = {}
        input_order = np.arange(len(lengths))
        for batch in bucket_by_length(lengths, max_tokens, order=input_order):
            indices = batch.tolist()
            batch_sources = [sources[i] for i in indices]
            batch_targets = [targets[i] for i in indices]
            batch_hypotheses = self._score_batch(batch_sources, batch_targets, config)
            hypotheses.update(zip(indices, batch_hypotheses, strict=True))
        return [hypotheses[i] for i in range(len(sources))]

    def _score_batch(
        self, sources: list[Ids], targets: list[Ids], config: SearchConfig
    ) -> list[Hypothesis]:
        """Score a batch of pairs in one forward pass."""
        tgt_tokenizer = self.tokenizers.tgt
        pad_id = tgt_tokenizer.pad_id
        src, src_lengths = pad_source(sources, self.tokenizers)  # (B, S), (B,)
        tgt_in = pad(targets, pad_id=pad_id, bos=tgt_tokenizer.bos_id)  # (B, T)
        tgt_out = pad(targets, pad_id=pad_id, eos=tgt_tokenizer.eos_id)  # (B, T)
        scores = self.stepper.score(
            src, src_lengths, tgt_in, tgt_out, with_attention=config.needs_attention
        )
        attention = None
        if scores.attention is None:
            [log_probs] = to_cpu(scores.log_probs)  # (B, T)
        else:
            log_probs, attention = to_cpu(scores.log_probs, scores.attention)  # (B, T), (B, T, S)
        hypotheses = []
        for i, target in enumerate(targets):
            length = len(target) + 1
            tokens: list[int] = tgt_out[i, :length].tolist()
            coverage = 0.0
            alignment = None
            if attention is not None:
                weights = attention[i, :length]  # (T, S)
                attention_sums = weights.sum(dim=0, keepdim=True)  # (1, S)
                num_src_tokens = src_lengths[i] - 1  # a scalar tensor, without EOS
                coverage = float(coverage_score(attention_sums, num_src_tokens.unsqueeze(0)))
                alignment = weights.argmax(dim=1).tolist()
                if self.stepper.shifts_alignment:
                    alignment = shift_alignment(
                        alignment, tokens, tgt_tokenizer.eos_id, int(num_src_tokens)
                    )
            hypothesis = Hypothesis.from_tokens(
                tokens,
                log_probs[i, :length].tolist(),
                config,
                eos_id=tgt_tokenizer.eos_id,
                coverage=coverage,
                alignment=alignment,
            )
            hypotheses.append(hypothesis)
        return hypotheses


def load_models(
    folders: Sequence[str | Path],
    *,
    device: str = "auto",
    dtype: DType | str = DType.float32,
    combine: Combine | str = Combine.probabilities,
) -> LoadedModel:
    """Load runs, checkpoints or model folders for the native engine; several form an ensemble.

    Raises a `ModelError` for a folder without a model and for models with different tokenizers, and
    a `DeviceError` for a device that does not exist.
    """
    if not folders:
        raise ConfigError("model_dir=[]: name at least one run, checkpoint or model folder")
    torch_device = find_device(device)
    torch_dtype = find_dtype(choose(DType, "dtype", dtype), torch_device)
    model_folders = [find_model(resolve_path(folder)) for folder in folders]
    infos = [load_info(folder) for folder in model_folders]
    for folder, info in zip(model_folders, infos, strict=True):
        if info.tokenizer_sha256 != infos[0].tokenizer_sha256:
            raise ModelError(
                f"{folder} has a different tokenizer from {model_folders[0]}; an ensemble needs "
                "models trained on the same data folder"
            )
    if torch_device.type == "cpu":
        keep_freed_memory()  # a search allocates tensors of the same sizes again and again
    steppers: list[Stepper] = []
    for requested, folder, info in zip(folders, model_folders, infos, strict=True):
        model = build_model(info, load_weights(folder), torch_device)
        autocast_dtype = prepare_for_inference(model, torch_dtype)
        steppers.append(ModelStepper(model, autocast_dtype))
        # such as "; not used: checkpoints/best (800 updates)"
        note_on_other_models = describe_other_models(resolve_path(requested), folder)
        log.info(
            "model %s, %d updates, on %s%s",
            folder,
            info.updates,
            torch_device,
            note_on_other_models,
        )
    stepper = steppers[0] if len(steppers) == 1 else EnsembleStepper(steppers, combine)
    tokenizers = load_model_tokenizers(model_folders[0], infos[0])
    backend = NativeBackend(stepper, tokenizers)
    directions = find_model_directions(infos[0], tokenizers)
    return LoadedModel(backend, tokenizers, infos[0].search, directions)
