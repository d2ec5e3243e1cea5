"""The CTranslate2 engine: search and scoring with a converted model.

CTranslate2 implements its own beam search. This module translates settings into arguments of
CTranslate2, and keeps the order and the scores of the hypotheses that CTranslate2 returns.
docs/export.md lists the differences from the native engine.
"""

# B sentences, S source tokens without EOS, T target tokens

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from nmt.checkpoint import (
    EXPORT_INFO,
    describe_other_models,
    find_model,
    load_export_info,
    load_info,
    load_model_tokenizers,
)
from nmt.config import DType, ExportFormat, Quantization, SearchConfig
from nmt.data.tokenizer import Tokenizers
from nmt.errors import ConfigError, DataError, DeviceError, ModelError, to_one_line
from nmt.export.conversion import convert_once, remove_conversion
from nmt.runtime.distributed import find_device
from nmt.runtime.metadata import read_json, to_dataclass
from nmt.runtime.reading import check_regular
from nmt.search.constraints import forbidden_ids, phrase_sequences, suppressed_ids
from nmt.search.hypotheses import Hypothesis, shift_alignment
from nmt.search.request import Ids, SearchRequest
from nmt.translate.engines.base import LoadedModel, find_model_directions
from nmt.translate.engines.model_bin import check_model_bin

log = logging.getLogger(__name__)

_MAX_SCORED_TOKENS = 1024  # maximum size of a batch, whose logits are in memory at once
_CPU_BATCH_TOKENS = 6144
_MIN_INT8_BATCH_TOKENS = 1536
_GPU_BATCH_TOKENS = 65536  # an estimate, not measured
_MAX_REASON_CHARACTERS = 200  # maximum length of an error message of CTranslate2


class CTranslate2Backend:
    """Searches and scores with a `ctranslate2.Translator`, which several threads may use."""

    def __init__(
        self,
        engine: Any,
        tokenizers: Tokenizers,
        max_positions: int,
        max_tokens: int,
        *,
        shifts_alignment: bool = False,
    ) -> None:
        """Use `engine`, a `ctranslate2.Translator`.

        `shifts_alignment` is the setting `alignment_shift` of the model.
        """
        self.max_tokens = max_tokens
        self.num_workers: int = engine.num_translators
        self._engine = engine
        self._process_id = os.getpid()
        self._tokenizers = tokenizers
        self._src_pieces = tokenizers.src.all_pieces()
        self._tgt_pieces = tokenizers.tgt.all_pieces()
        self._tgt_ids = {piece: token for token, piece in enumerate(self._tgt_pieces)}
        self._max_positions = max_positions
        self._shifts_alignment = shifts_alignment

    def check(self, config: SearchConfig, *, scoring: bool = False) -> None:
        """See `check_search`."""
        check_search(config, scoring=scoring)

    def _check_process(self) -> None:
        """Raise `ConfigError` in a forked process, which lacks the threads of CTranslate2."""
        if os.getpid() != self._process_id:
            raise ConfigError(
                "backend=ctranslate2: this process was forked after the model was loaded; load the "
                "model in each process, or use backend=native"
            )

    def search(self, request: SearchRequest) -> list[list[Hypothesis]]:
        """Return the hypotheses of each sentence in the order of CTranslate2.

        All sentences share the largest of their length limits. A score is log P /
        length^length_exponent. Here, log P does not include the tokens of a forced prefix. Without
        `with_scores`, scores are nan. Hypotheses have no token scores.
        """
        self._check_process()
        if request.constraints:
            raise _unsupported("constraints", list(request.constraints))
        config = request.config
        longest_prefix = max(map(len, request.prefixes), default=0)
        # 0 if the prefixes only consist of tags, which are always forced
        prefix_bias = config.prefix_bias if longest_prefix > request.num_forced else 0.0
        if prefix_bias and request.num_forced:
            raise _unsupported("prefix_bias", prefix_bias, " for models with target tags")
        request.check_prefixes(self._tokenizers)
        self._check_lengths(request.sources)
        source = _to_pieces(request.sources, self._src_pieces)
        target_prefix = None
        if any(request.prefixes):
            target_prefix = _to_pieces(request.prefixes, self._tgt_pieces)
        max_length = min(max(request.length_limits()), self._max_positions - 1)
        results = self._engine.translate_batch(
            source,
            target_prefix,
            max_input_length=0,  # no limit: `_check_lengths` raises an error instead
            max_decoding_length=max_length,
            min_decoding_length=config.min_length,
            no_repeat_ngram_size=config.no_repeat_ngram,
            repetition_penalty=config.repetition_penalty,
            num_hypotheses=request.num_results,
            return_alternatives=config.alternatives > 0,
            prefix_bias_beta=prefix_bias,
            length_penalty=config.length_exponent,
            suppress_sequences=_to_pieces(self._forbidden_sequences(config), self._tgt_pieces),
            return_end_token=True,
            return_scores=request.with_scores,  # True costs greedy search a softmax per step
            return_attention=config.alignment,
            use_vmap=not config.sampling,  # whether to use a shortlist, if the model has one
            **_strategy(config),
        )
        hypotheses = [self._to_hypotheses(result, config) for result in results]
        if self._shifts_alignment and config.alignment:
            for row_hypotheses, pieces in zip(hypotheses, source, strict=True):
                self._shift_alignments(row_hypotheses, num_src=len(pieces))
        elif config.alignment and config.beam_size > 1 and not config.sampling:
            self._correct_alignment(source, hypotheses)
        return hypotheses

    def _forbidden_sequences(self, config: SearchConfig) -> list[list[int]]:
        """Return the ids that no translation contains, and the ids of `forbid` and `suppress`."""
        tokenizer = self._tokenizers.tgt
        single_ids = [*forbidden_ids(tokenizer), *suppressed_ids(config.suppress, tokenizer)]
        sequences = phrase_sequences(config.forbid, tokenizer)
        return [[token] for token in single_ids] + sequences

    def score(
        self, sources: Sequence[Ids], targets: Sequence[Ids], config: SearchConfig, max_tokens: int
    ) -> list[Hypothesis]:
        """See `Backend.score`; scores with teacher forcing, without attention."""
        self._check_process()
        self._check_lengths([*sources, *targets])
        results = self._engine.score_batch(
            _to_pieces(sources, self._src_pieces),
            _to_pieces(targets, self._tgt_pieces),
            max_input_length=0,
            max_batch_size=min(max_tokens, _MAX_SCORED_TOKENS),
            batch_type="tokens",
        )
        eos_id = self._tokenizers.tgt.eos_id
        hypotheses = []
        for target, result in zip(targets, results, strict=True):
            tokens = [*target, eos_id]
            log_probs = list(result.log_probs)
            hypotheses.append(Hypothesis.from_tokens(tokens, log_probs, config, eos_id=eos_id))
        return hypotheses

    def _check_lengths(self, sentences: Sequence[Ids]) -> None:
        """Raise a `DataError` for a sentence of more tokens than the model has positions."""
        longest = max((len(ids) for ids in sentences), default=0)
        if longest >= self._max_positions:
            raise DataError(
                f"a sentence has {longest} tokens and the exported model takes "
                f"{self._max_positions - 1}; export with a larger max_positions"
            )

    def _to_hypotheses(self, result: Any, config: SearchConfig) -> list[Hypothesis]:
        """Return the hypotheses of a `ctranslate2.TranslationResult`."""
        hypotheses = []
        scores = result.scores  # read once, since each access copies; empty without scores
        for i, pieces in enumerate(result.hypotheses):
            tokens = [self._tgt_ids[piece] for piece in pieces]
            score = scores[i] if scores else math.nan
            alignment = None
            if config.alignment:
                alignment = _strongest_positions(result.attention[i])
            hypothesis = Hypothesis(
                tokens=tokens,
                log_prob=score * len(tokens) ** config.length_exponent,
                score=score,
                finished=tokens[-1] == self._tokenizers.tgt.eos_id,
                token_log_probs=[],
                alignment=alignment,
            )
            hypotheses.append(hypothesis)
        return hypotheses

    def _shift_alignments(self, hypotheses: list[Hypothesis], num_src: int) -> None:
        """Apply `shift_alignment` to the hypotheses of a sentence of `num_src` tokens, in place."""
        eos_id = self._tokenizers.tgt.eos_id
        for hypothesis in hypotheses:
            assert hypothesis.alignment is not None
            hypothesis.alignment[:] = shift_alignment(
                hypothesis.alignment, hypothesis.tokens, eos_id, num_src
            )

    def _correct_alignment(
        self, source: list[list[str]], hypotheses: list[list[Hypothesis]]
    ) -> None:
        """Replace the alignment of each first token, in place.

        Beam search of CTranslate2 4.8.5 mixes up the sentences of a batch: the alignment of a first
        token may belong to another sentence. Greedy search returns the right alignment, which only
        depends on the source.
        """
        results = self._engine.translate_batch(
            source,
            beam_size=1,
            max_input_length=0,
            max_decoding_length=1,
            return_end_token=True,
            return_attention=True,
        )
        for result, row_hypotheses in zip(results, hypotheses, strict=True):
            first_position = _strongest_positions(result.attention[0])[0]
            for hypothesis in row_hypotheses:
                assert hypothesis.alignment is not None
                hypothesis.alignment[0] = first_position


def check_search(config: SearchConfig, *, scoring: bool = False) -> None:
    """Raise a `ConfigError` for settings that CTranslate2 does not support."""
    if config.coverage_penalty:
        raise _unsupported("coverage_penalty", config.coverage_penalty)
    if config.word_reward and not scoring:
        raise _unsupported("word_reward", config.word_reward)
    if config.alignment and scoring:
        raise _unsupported("alignment", "true", " in scoring")
    for name in ("min_p", "epsilon"):
        if getattr(config, name):
            raise _unsupported(name, getattr(config, name))
    if config.beam_groups > 1:
        raise _unsupported("beam_groups", config.beam_groups)
    if config.allow_source_repeats:
        raise _unsupported("allow_source_repeats", "true")
    if config.alternatives and config.alignment and config.beam_size > 1:
        # CTranslate2 4.8.5 returns the alignment of another sentence after the prefix
        raise _unsupported("alignment", "true", " for alternatives with a beam")
    is_beam_search = config.beam_size > 1 and not config.sampling
    if config.prefix_bias and not is_beam_search:
        raise _unsupported("prefix_bias", config.prefix_bias, " in greedy search and sampling")
    if config.protect:
        raise _unsupported("protect", "true")
    if config.required_terms:
        raise _unsupported("glossary", f"({len(config.required_terms)} terms)")
    if config.sampling and config.top_k == 1 and config.beam_size > 1:
        raise _unsupported("top_k", 1, " below 2 for several samples")


def _unsupported(name: str, value: object, purpose: str = "") -> ConfigError:
    """Build the error for a setting that CTranslate2 does not have."""
    return ConfigError(
        f"{name}={value}: backend=ctranslate2 has no {name}{purpose}; use backend=native"
    )


def _strategy(config: SearchConfig) -> dict[str, Any]:
    """Return the arguments of CTranslate2 that select beam search, greedy search or sampling."""
    if not config.sampling:
        return {"beam_size": config.beam_size}
    import ctranslate2

    ctranslate2.set_random_seed(config.seed)  # has no effect after the first sample of a process
    return {
        "beam_size": 1,
        "sampling_topk": config.top_k,
        "sampling_topp": config.top_p,
        "sampling_temperature": config.temperature,
    }


def _to_pieces(sentences: Sequence[Ids], pieces: list[str]) -> list[list[str]]:
    """Return the pieces of each sentence, the input of CTranslate2; `pieces` is the vocabulary."""
    sentence_pieces = []
    for ids in sentences:
        sentence_pieces.append([pieces[token] for token in ids])
    return sentence_pieces


def _strongest_positions(attention: list[list[float]]) -> list[int]:
    """Return the source position with the highest attention for each target token.

    `attention` (T, S) does not contain the weights of EOS, which has the position S.
    """
    weights = np.asarray(attention, dtype=np.float32)  # (T, S)
    # the weights of a target token sum to 1
    eos_weights = 1 - weights.sum(axis=1, keepdims=True)  # (T, 1)
    positions = np.concatenate([weights, eos_weights], axis=1).argmax(axis=1)  # (T,)
    return positions.tolist()  # type: ignore[no-any-return]


def default_quantization(dtype: DType = DType.float32) -> Quantization:
    """Return int8 if the CPU has VNNI instructions, which multiply int8, else float32.

    With `dtype` bfloat16 or float16, in which CTranslate2 then computes, returns float32.
    """
    if dtype in (DType.bfloat16, DType.float16):
        return Quantization.float32
    try:
        cpu_info = Path("/proc/cpuinfo").read_text(encoding="utf-8")  # Linux only
    except OSError:
        return Quantization.float32
    return Quantization.int8 if has_vnni(cpu_info) else Quantization.float32


def has_vnni(cpu_info: str) -> bool:
    """Return whether the text of /proc/cpuinfo lists VNNI instructions."""
    for line in cpu_info.splitlines():
        if line.startswith("flags"):
            return not {"avx512_vnni", "avx_vnni"}.isdisjoint(line.split())
    return False


def load_ctranslate2(
    folder: Path,
    *,
    device: str,
    dtype: DType,
    num_threads: int,
    quantization: Quantization | None = None,
) -> LoadedModel:
    """Load an exported folder, or a run, checkpoint or model folder, which is converted once.

    With `dtype` bfloat16 or float16, computes in that type, and otherwise in the type of the stored
    weights. `quantization` is the type of the weights of a new conversion, by default
    `default_quantization`. Raises a `ModelError` for a folder without a model, and a `DeviceError`
    for a device that does not exist or does not support the type.
    """
    placement = find_placement(device, dtype)
    num_threads = num_threads or torch.get_num_threads()
    if (folder / EXPORT_INFO).exists():
        if quantization is not None:
            raise ConfigError(
                f"quantization={quantization.value}: {folder} is converted already; give the "
                "model that it was made from, or leave quantization out"
            )
        return _load_export(folder, placement, num_threads)
    model_folder = find_model(folder)
    quantization = quantization or default_quantization(dtype)
    converted = convert_once(model_folder, quantization)
    try:
        model = _load_export(converted, placement, num_threads)
    except ModelError as error:
        log.warning("%s; converting the model again", error)
        remove_conversion(converted)
        model = _load_export(convert_once(model_folder, quantization), placement, num_threads)
    log.info(
        "model %s, %d updates, on %s by CTranslate2 in %s%s",
        model_folder,
        load_info(model_folder).updates,
        placement.device_type,
        quantization.value,
        describe_other_models(folder, model_folder),
    )
    return model


def _load_export(folder: Path, placement: Placement, num_threads: int) -> LoadedModel:
    """Check and load an exported folder."""
    info, export = load_export_info(folder)
    if export.format is not ExportFormat.ctranslate2:
        raise ModelError(
            f"{folder} is an export of format={export.format.value}; "
            "backend=ctranslate2 needs one of format=ctranslate2"
        )
    tokenizers = load_model_tokenizers(folder, info)
    for path in folder.iterdir():  # CTranslate2 would wait forever for a named pipe
        check_regular(path)
    _check_engine_config(folder / "config.json")
    check_model_bin(folder / "model.bin", info, tokenizers, export.max_positions)
    engine = _load_engine(folder, placement, num_threads)
    max_tokens = _GPU_BATCH_TOKENS
    if engine.device == "cpu":
        max_tokens = _CPU_BATCH_TOKENS
        if "int8" in engine.compute_type:  # fastest while a batch fits the caches
            max_tokens = max(_MIN_INT8_BATCH_TOKENS, 4 * info.model.d_model)
            max_tokens = min(max_tokens, _CPU_BATCH_TOKENS)
    backend = CTranslate2Backend(
        engine,
        tokenizers,
        export.max_positions,
        max_tokens,
        shifts_alignment=info.model.alignment_shift,
    )
    return LoadedModel(backend, tokenizers, info.search, find_model_directions(info, tokenizers))


@dataclass(frozen=True)
class _EngineConfig:
    """Keys of CTranslate2's `config.json` whose values CTranslate2 does not check."""

    add_source_bos: bool
    add_source_eos: bool
    decoder_start_token: str
    layer_norm_epsilon: float | None = None


def _check_engine_config(path: Path) -> None:
    """Check the keys of `_EngineConfig` in the file `path`."""
    content = read_json(path)
    names = [setting.name for setting in fields(_EngineConfig)]
    values = {name: content[name] for name in names if name in content}
    epsilon = to_dataclass(_EngineConfig, values, path).layer_norm_epsilon
    if epsilon is not None and not 0 < epsilon < 1:
        raise ModelError(f"{path}: layer_norm_epsilon is {epsilon}, must be between 0 and 1")


def _import_ctranslate2() -> Any:
    """Import CTranslate2, which is optional."""
    try:
        import ctranslate2
    except ImportError:
        raise ConfigError("backend=ctranslate2 needs CTranslate2; pip install nmt[fast]") from None
    return ctranslate2


class Placement(NamedTuple):
    """Where CTranslate2 computes, and in which number format."""

    device_type: str
    device_index: int
    compute_type: str  # "default" for the type of the stored weights


def find_placement(device: str, dtype: DType) -> Placement:
    """Return where CTranslate2 computes.

    Raises a `ConfigError` if CTranslate2 is not installed, and a `DeviceError` for a device that
    does not exist or does not support the type.
    """
    ctranslate2 = _import_ctranslate2()
    torch_device = find_device(device)
    if torch_device.type == "mps":
        if device != "auto":
            raise DeviceError(f"device={device}: CTranslate2 does not support mps; use device=cpu")
        torch_device = torch.device("cpu")
    device_type = torch_device.type
    device_index = torch_device.index or 0
    compute_type = "default"
    if dtype in (DType.bfloat16, DType.float16):
        compute_type = dtype.value
        if compute_type not in ctranslate2.get_supported_compute_types(device_type, device_index):
            raise DeviceError(
                f"dtype={compute_type}: CTranslate2 does not support it on this {device_type}; "
                "use dtype=float32"
            )
    return Placement(device_type, device_index, compute_type)


def _load_engine(folder: Path, placement: Placement, num_threads: int) -> Any:
    """Return a `ctranslate2.Translator`, which translates `num_threads` batches at a time."""
    try:
        return _import_ctranslate2().Translator(
            str(folder),
            device=placement.device_type,
            device_index=placement.device_index,
            compute_type=placement.compute_type,
            inter_threads=num_threads if placement.device_type == "cpu" else 1,
            intra_threads=1,  # several threads in one multiplication take twice the CPU time
        )
    except (RuntimeError, ValueError, LookupError, MemoryError) as error:
        reason = to_one_line(error, _MAX_REASON_CHARACTERS)
        raise ModelError(
            f"{folder} cannot be loaded by CTranslate2 ({reason}); export it again"
        ) from None
