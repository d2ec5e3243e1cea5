"""Search and scoring by CTranslate2, of a folder that `nmt-export format=ctranslate2` wrote.

CTranslate2 extends hypotheses as our beam search does, but stops when `beam_size` are finished, and
ranks by log P / length^alpha. They are ranked again by our rule, from its own sums; token scores,
which it does not give, come from scoring the result teacher-forced, for callers that look at them.
"""

# B sentences, S source tokens without EOS, T target tokens with EOS

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from nmt.checkpoint import load_export_info, load_tokenizer
from nmt.config import DType, ExportFormat, SearchConfig
from nmt.data.tokenizer import Tokenizers
from nmt.errors import ConfigError, DataError, DeviceError, ModelError, NmtError
from nmt.runtime.distributed import find_device
from nmt.runtime.metadata import read_json, to_dataclass
from nmt.runtime.reading import check_regular
from nmt.search.constraints import forbidden_ids
from nmt.search.hypotheses import Hypothesis
from nmt.search.request import SearchRequest
from nmt.search.scoring import score
from nmt.translate.engines.base import LoadedModel, directions_of

Ids = Sequence[int]
_SCORED_TOKENS = 1024  # source tokens scored at once: logits of a batch are held whole


@dataclass(frozen=True, kw_only=True)
class _Request(SearchRequest):
    """A request that says all, and what follows from it."""

    prefixes: Sequence[Ids]
    n_best: int
    limits: list[int]  # most tokens of each translation, EOS included

    @property
    def is_beam(self) -> bool:
        """Whether several hypotheses compete."""
        return self.config.beam_size > 1 and not self.config.sampling


class _Found(NamedTuple):
    """A hypothesis as CTranslate2 gives it, one of many that nobody may look at."""

    pieces: list[str]  # EOS last when finished
    log_prob: float  # as CTranslate2 sums it, without a prefix; nan when not asked for
    alignment: list[int] | None


class CTranslate2Backend:
    """Searches with a `ctranslate2.Translator`, which may be used by several threads."""

    def __init__(
        self, engine: Any, tokenizer: Tokenizers, max_positions: int, max_tokens: int
    ) -> None:
        self.max_tokens = max_tokens
        self.num_workers: int = engine.num_translators
        self._engine = engine
        self._src_pieces, self._pieces = tokenizer.src.all_pieces(), tokenizer.tgt.all_pieces()
        self._ids = {piece: i for i, piece in enumerate(self._pieces)}
        self._tokenizer = tokenizer
        self._eos = self._pieces[tokenizer.tgt.eos_id]
        self._max_positions = max_positions
        self._forbidden = [[self._pieces[token]] for token in forbidden_ids(tokenizer.tgt)]

    def check(self, config: SearchConfig, *, scoring: bool = False) -> None:
        """Refuse penalties that CTranslate2 has not; scoring has no attention."""
        for key in ("coverage_penalty", "alignment" if scoring else "word_reward"):
            value, where = getattr(config, key), " in scoring" if scoring else ""
            if value:
                shown = str(value).lower()
                raise ConfigError(
                    f"{key}={shown}: backend=ctranslate2 has no {key}{where}; use backend=native"
                )

    def search(self, request: SearchRequest) -> list[list[Hypothesis]]:
        """Return at most `n_best` hypotheses a row; `keys` say nothing to CTranslate2, whose draws
        depend on all that it drew before.
        """
        rows, config = request.rows, request.config
        prefixes = request.prefixes or [()] * len(rows)
        request.check_prefixes(self._tokenizer)
        self._check_lengths(rows)
        limits = request.length_limits()
        known = vars(request) | {"prefixes": prefixes, "n_best": request.n_best or config.beam_size}
        whole = _Request(**known, limits=[min(limit, self._max_positions - 1) for limit in limits])
        found: list[list[_Found]] = [[] for _ in rows]
        for has_prefix in (False, True):  # a prefix changes how its batch is searched
            some = [i for i, prefix in enumerate(prefixes) if bool(prefix) is has_prefix]
            if some:
                self._search(whole, some, found)
        return self._finish(whole, found)

    def score(
        self, rows: Sequence[Ids], targets: Sequence[Ids], config: SearchConfig, max_tokens: int
    ) -> list[Hypothesis]:
        """Score teacher-forced, without attention."""
        self._check_lengths([*rows, *targets])
        pieces = [[self._pieces[i] for i in target] for target in targets]
        scored = self._score(rows, pieces, max_tokens)
        found = [_Found([*target, self._eos], math.nan, None) for target in pieces]
        return [self._close(h, part, config) for h, part in zip(found, scored, strict=True)]

    def _score(
        self, rows: Sequence[Ids], targets: list[list[str]], max_tokens: int = _SCORED_TOKENS
    ) -> list[list[float]]:
        results = self._engine.score_batch(
            [[self._src_pieces[i] for i in row] for row in rows],
            targets,
            max_input_length=0,
            max_batch_size=min(max_tokens, _SCORED_TOKENS),
            batch_type="tokens",
        )
        return [list(result.log_probs) for result in results]

    def _search(self, request: _Request, some: list[int], found: list[list[_Found]]) -> None:
        """Fill `found` for the rows `some`, each with its own length limit.

        CTranslate2 has one limit a batch. What has ended in time is what a search up to the row's
        own limit would have found. Where one result is wanted and none has, the best is cut at the
        limit; of a beam that is near what such a search gives. Where several are wanted, the row is
        searched again, since cut hypotheses may be equal.
        """
        again: dict[int, list[int]] = {}
        results = self._call(request, some, max(request.limits[i] for i in some))
        for i, hypotheses in zip(some, results, strict=True):
            limit = request.limits[i]
            fitting = [hypothesis for hypothesis in hypotheses if len(hypothesis.pieces) <= limit]
            if len(fitting) >= min(request.n_best, len(hypotheses)):
                found[i] = fitting
            elif not request.is_beam:
                found[i] = [_cut(hypothesis, limit) for hypothesis in hypotheses]
            elif request.n_best == 1:
                found[i] = [_cut(hypotheses[0], limit)]
            else:
                again.setdefault(limit, []).append(i)
        for limit, late in again.items():
            for i, hypotheses in zip(late, self._call(request, late, limit), strict=True):
                found[i] = hypotheses

    def _call(self, request: _Request, some: list[int], limit: int) -> list[list[_Found]]:
        """Search the rows `some` with one limit; return everything that was found for each."""
        config, draws = request.config, 1
        if config.sampling:
            import ctranslate2

            draws = config.beam_size
            ctranslate2.set_random_seed(config.seed)  # has no effect after its first draw
            strategy = {"sampling_topk": config.top_k, "sampling_topp": config.top_p}
            strategy |= {"beam_size": 1, "sampling_temperature": config.temperature}
        else:
            # with an exponent of 0 it ranks as we do, and ends once so many are sure to be the best
            asked = request.n_best if config.length_exponent == 0 else config.beam_size
            strategy = {"beam_size": config.beam_size, "num_hypotheses": asked}
        repeated = [i for i in some for _ in range(draws)]
        source = [[self._src_pieces[token] for token in request.rows[i]] for i in repeated]
        forced = [[self._pieces[token] for token in request.prefixes[i]] for i in repeated]
        results = self._engine.translate_batch(
            source,
            forced if any(forced) else None,
            max_input_length=0,
            max_decoding_length=limit,
            min_decoding_length=config.min_length,
            return_end_token=True,
            return_scores=request.is_beam,  # which cost greedy search a softmax a step
            return_attention=config.alignment,
            suppress_sequences=self._forbidden,
            length_penalty=config.length_exponent,
            **strategy,
        )
        exponent, aligned = config.length_exponent, config.alignment
        found = [_read(result, exponent, aligned=aligned) for result in results]
        if config.alignment and request.is_beam:
            found = self._correct(found, source)
        return [sum(found[k : k + draws], []) for k in range(0, len(found), draws)]

    def _correct(self, found: list[list[_Found]], source: list[list[str]]) -> list[list[_Found]]:
        """Put in what the first target token of each sentence attends to most.

        A beam search of several sentences reports that of another sentence (CTranslate2 4.8.5),
        greedy search the right one; it depends on no token that is chosen.
        """
        options = {"max_input_length": 0, "beam_size": 1, "max_decoding_length": 1}
        options |= {"return_end_token": True, "return_attention": True}
        results = self._engine.translate_batch(source, **options)
        firsts = [_align(result.attention[0])[:1] for result in results]
        return [
            [h._replace(alignment=first + (h.alignment or [])[1:]) for h in hypotheses]
            for first, hypotheses in zip(firsts, found, strict=True)
        ]

    def _finish(self, request: _Request, found: list[list[_Found]]) -> list[list[Hypothesis]]:
        """Return the best of each row, by our rule, with token scores if somebody looks at them."""
        config = request.config
        if request.is_beam:
            if any(request.prefixes):  # which CTranslate2's sums leave out
                sums = map(math.fsum, self._token_scores(request, found))
                found = [[h._replace(log_prob=next(sums)) for h in row] for row in found]
            for row in found:
                row.sort(key=lambda h: score(h.log_prob, len(h.pieces), config), reverse=True)
                row.sort(key=self._is_finished, reverse=True)  # stable
        best = [row[: request.n_best] for row in found]
        scores = self._token_scores(request, best) if request.with_scores else repeat([])
        return [[self._close(h, next(scores), config) for h in row] for row in best]

    def _token_scores(self, request: _Request, found: list[list[_Found]]) -> Iterator[list[float]]:
        """Return what the model says of the tokens of each hypothesis, row after row."""
        pairs = [(row, h) for row, some in zip(request.rows, found, strict=True) for h in some]
        targets = [h.pieces[:-1] if self._is_finished(h) else h.pieces for _, h in pairs]
        scored = self._score([row for row, _ in pairs], targets)
        # no EOS after what is unfinished
        return (scores[: len(h.pieces)] for scores, (_, h) in zip(scored, pairs, strict=True))

    def _close(self, found: _Found, scores: list[float], config: SearchConfig) -> Hypothesis:
        tokens = [self._ids[piece] for piece in found.pieces]
        total = math.fsum(scores) if scores else found.log_prob
        value, finished = score(total, len(tokens), config), self._is_finished(found)
        return Hypothesis(tokens, total, value, finished, scores, found.alignment)

    def _is_finished(self, found: _Found) -> bool:
        return found.pieces[-1] == self._eos

    def _check_lengths(self, rows: Sequence[Ids]) -> None:
        longest = max(map(len, rows), default=0)
        if longest >= self._max_positions:
            raise DataError(
                f"a sentence has {longest} tokens and the exported model takes "
                f"{self._max_positions - 1}; export with a larger max_positions"
            )


def _read(result: Any, exponent: float, *, aligned: bool) -> list[_Found]:
    """Return the hypotheses of a sentence, whose scores are log P / length^exponent, if given."""
    hypotheses = result.hypotheses
    scores = result.scores or [math.nan] * len(hypotheses)
    alignments = map(_align, result.attention) if aligned else repeat(None)
    columns = zip(hypotheses, scores, alignments, strict=False)
    return [_Found(pieces, value * len(pieces) ** exponent, a) for pieces, value, a in columns]


def _cut(found: _Found, limit: int) -> _Found:
    """Return the hypothesis as it was at its length limit; its sum is not known any more."""
    if len(found.pieces) <= limit:
        return found
    return _Found(found.pieces[:limit], math.nan, found.alignment and found.alignment[:limit])


def _align(attention: list[list[float]]) -> list[int]:
    """Return the source position that each target token attends to most, EOS's being S.

    CTranslate2 leaves EOS out of `attention` (T, S); its share is what is missing to 1.
    """
    weights = np.asarray(attention, dtype=np.float32)  # (T, S)
    eos = 1 - weights.sum(axis=1, keepdims=True)  # (T, 1)
    return np.concatenate([weights, eos], axis=1).argmax(axis=1).tolist()  # type: ignore[no-any-return]


def load_ctranslate2(folder: Path, *, device: str, dtype: DType, num_threads: int) -> LoadedModel:
    """Load an exported folder.

    `dtype=bfloat16` and `float16` compute in that type; others in that of the stored weights.
    Raises `ModelError` for another folder, `DeviceError` for a device or type that is not there.
    """
    info, export = load_export_info(folder)
    if export.format is not ExportFormat.ctranslate2:
        raise ModelError(
            f"{folder} is an export of format={export.format.value}; "
            "backend=ctranslate2 needs one of format=ctranslate2"
        )
    tokenizer = load_tokenizer(folder, info)
    for path in folder.iterdir():  # CTranslate2 would wait for a pipe
        check_regular(path)
    _check_config(folder / "config.json")
    engine = _load_engine(folder, device, dtype, num_threads or torch.get_num_threads())
    max_tokens = 65536  # a guess for GPUs, which were not measured
    if engine.device == "cpu":  # of widths 192 to 512: int8 wants batches that stay in its caches
        is_int8 = "int8" in engine.compute_type
        max_tokens = min(6144, max(1536, 4 * info.model.d_model)) if is_int8 else 6144
    backend = CTranslate2Backend(engine, tokenizer, export.max_positions, max_tokens)
    return LoadedModel(backend, tokenizer, info.search, directions_of(info, tokenizer))


@dataclass(frozen=True)
class _EngineConfig:
    """What CTranslate2 takes from its `config.json` whatever it is."""

    add_source_bos: bool
    add_source_eos: bool
    decoder_start_token: str
    layer_norm_epsilon: float | None = None


def _check_config(path: Path) -> None:
    known = {field.name for field in fields(_EngineConfig)}
    given = {key: value for key, value in read_json(path).items() if key in known}
    epsilon = to_dataclass(_EngineConfig, given, path).layer_norm_epsilon
    if epsilon is not None and not 0 < epsilon < 1:
        raise ModelError(f"{path}: layer_norm_epsilon is {epsilon}, must be between 0 and 1")


def _load_engine(folder: Path, device: str, dtype: DType, num_threads: int) -> Any:
    try:
        import ctranslate2
    except ImportError:
        raise NmtError("backend=ctranslate2 needs CTranslate2; pip install nmt[export]") from None
    place = find_device(device)
    if place.type == "mps":
        if device != "auto":
            raise DeviceError(f"device={device}: CTranslate2 has no mps; use device=cpu")
        place = torch.device("cpu")
    index = place.index or 0
    types = ctranslate2.get_supported_compute_types(place.type, index)
    is_half, name = dtype in (DType.bfloat16, DType.float16), dtype.value
    if is_half and name not in types:
        text = f"dtype={name}: CTranslate2 has none on this {place.type}; use dtype=float32"
        raise DeviceError(text)
    try:
        return ctranslate2.Translator(
            str(folder),
            device=place.type,
            device_index=index,
            compute_type=name if is_half else "default",
            inter_threads=num_threads if place.type == "cpu" else 1,
            intra_threads=1,  # several threads in one multiplication take twice the CPU time
        )
    except (RuntimeError, ValueError, LookupError, MemoryError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(
            f"{folder} cannot be loaded by CTranslate2 ({reason}); export it again"
        ) from None
