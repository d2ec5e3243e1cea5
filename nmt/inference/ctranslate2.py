"""Search and scoring by CTranslate2, over a folder of `nmt-export format=ctranslate2`.

CTranslate2 extends hypotheses as our beam search does, but stops when `beam_size` are finished, and
ranks by log P / length^alpha. They are ranked again by our rule, from its own sums; token scores,
which it does not give, come from scoring the result teacher-forced, for callers that look at them.
"""

# B sentences, S source tokens without EOS, T target tokens with EOS

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nmt.checkpoint import load_export_info, load_tokenizer
from nmt.config import SearchConfig
from nmt.data.tokenizer import Tokenizers
from nmt.distributed import find_device
from nmt.errors import ConfigError, DataError, DeviceError, ModelError, NmtError
from nmt.inference.backend import Loaded
from nmt.inference.penalties import score
from nmt.inference.search import ControlIds, Hypothesis, check_prefixes, length_limits
from nmt.options import DType, ExportFormat

Ids = Sequence[int]
_SCORED_TOKENS = 1024  # source tokens scored at once: logits of a batch are held whole
_UNSUPPORTED = {"coverage_penalty": 0.0, "word_reward": 0.0}  # with the values that mean "off"


def load_ctranslate2(folder: Path, *, device: str, dtype: DType, num_threads: int) -> Loaded:
    """Load an exported folder.

    `dtype=bfloat16` computes in that type; otherwise weights are computed with as they are stored.
    Raises `ModelError` for another folder, `DeviceError` for a device or type that is not there.
    """
    info, export = load_export_info(folder)
    if export.format is not ExportFormat.ctranslate2:
        raise ModelError(
            f"{folder} is an export of format={export.format.value}; "
            "backend=ctranslate2 needs one of format=ctranslate2"
        )
    tokenizer = load_tokenizer(folder, info)
    engine = _load_engine(folder, device, dtype, num_threads)
    max_tokens = _fastest_batch(engine, info.model.d_model)
    backend = CTranslate2Backend(engine, tokenizer, export.max_positions, max_tokens)
    return Loaded(backend, tokenizer, info.search)


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
    if dtype is DType.bfloat16 and "bfloat16" not in types:
        raise DeviceError(
            f"dtype=bfloat16: CTranslate2 has none on this {place.type}; use dtype=float32"
        )
    try:
        return ctranslate2.Translator(
            str(folder),
            device=place.type,
            device_index=index,
            compute_type="bfloat16" if dtype is DType.bfloat16 else "default",
            intra_threads=num_threads,
        )
    except RuntimeError as error:
        raise ModelError(f"{folder} cannot be loaded by CTranslate2: {error}") from None


def _fastest_batch(engine: Any, d_model: int) -> int:
    """Return the bound on a batch, rows * beam * longest source, that was fastest.

    On a processor, of widths 192 to 512: int8 wants batches that stay in its caches. GPUs were not
    measured.
    """
    if engine.device != "cpu":
        return 65536
    return min(4096, max(1024, 4 * d_model)) if "int8" in engine.compute_type else 4096


@dataclass(frozen=True)
class _Task:
    """A batch of sentences and how to search them."""

    rows: Sequence[Ids]
    prefixes: Sequence[Ids]
    limits: list[int]  # most tokens of each translation, EOS included
    config: SearchConfig
    n_best: int  # hypotheses of each that are looked at
    with_scores: bool

    @property
    def is_beam(self) -> bool:
        """Say whether several hypotheses compete."""
        return self.config.beam_size > 1 and not self.config.sampling


class CTranslate2Backend:
    """Searches with a `ctranslate2.Translator`, which may be used by several threads."""

    name = "ctranslate2"

    def __init__(
        self, engine: Any, tokenizer: Tokenizers, max_positions: int, max_tokens: int
    ) -> None:
        self.max_tokens = max_tokens
        self._engine = engine
        self._src_pieces, self._pieces = tokenizer.src.all_pieces(), tokenizer.tgt.all_pieces()
        self._ids = {piece: i for i, piece in enumerate(self._pieces)}
        self._control = ControlIds.of(tokenizer)
        self._max_positions = max_positions
        forbidden = (self._control.pad, self._control.bos)
        self._forbidden = [[self._pieces[token]] for token in forbidden]

    def check(self, config: SearchConfig, *, with_prefixes: bool = False) -> None:
        """See `Backend.check`."""
        for key, off in _UNSUPPORTED.items():
            if getattr(config, key) != off:
                raise ConfigError(
                    f"{key}={getattr(config, key)}: backend=ctranslate2 has no {key}; "
                    "use backend=native"
                )

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
        """See `Backend.search`; at most `n_best` hypotheses a row come back, and `keys` say nothing
        to CTranslate2, whose draws depend on all that it drew before.
        """
        prefixes = prefixes or [()] * len(rows)
        check_prefixes(prefixes, self._control)
        self._check_lengths(rows)
        n_best = config.beam_size if n_best is None else n_best
        limits = self._limits(rows, prefixes, config)
        task = _Task(rows, prefixes, limits, config, n_best, with_scores)
        found: list[list[Hypothesis]] = [[] for _ in rows]
        for has_prefix in (False, True):  # a prefix changes how its batch is searched
            some = [i for i, prefix in enumerate(prefixes) if bool(prefix) is has_prefix]
            if some:
                self._search(task, some, found)
        return self._finish(task, found)

    def score(self, rows: Sequence[Ids], targets: Sequence[Ids]) -> list[list[float]]:
        """See `Backend.score`."""
        self._check_lengths(rows)
        self._check_lengths(targets)
        results = self._engine.score_batch(
            [_look_up(self._src_pieces, row) for row in rows],
            [_look_up(self._pieces, target) for target in targets],
            max_input_length=0,
            max_batch_size=_SCORED_TOKENS,
            batch_type="tokens",
        )
        return [list(result.log_probs) for result in results]

    def _search(self, task: _Task, some: list[int], found: list[list[Hypothesis]]) -> None:
        """Fill `found` for the rows `some`, each with its own length limit.

        CTranslate2 has one limit a batch. Without a beam, what passes its own limit is cut there.
        With one, what has ended in time is what a search up to that limit would have found; where
        that is not enough, the row is searched again, since unfinished hypotheses count then.
        """
        again: dict[int, list[int]] = {}
        results = self._call(task, some, max(task.limits[i] for i in some))
        for i, hypotheses in zip(some, results, strict=True):
            limit = task.limits[i]
            fitting = [hypothesis for hypothesis in hypotheses if len(hypothesis.tokens) <= limit]
            if not task.is_beam:
                found[i] = [_cut(hypothesis, limit) for hypothesis in hypotheses]
            elif len(fitting) >= min(task.n_best, len(hypotheses)):
                found[i] = fitting
            else:
                again.setdefault(limit, []).append(i)
        for limit, late in again.items():
            for i, hypotheses in zip(late, self._call(task, late, limit), strict=True):
                found[i] = hypotheses

    def _call(self, task: _Task, some: list[int], limit: int) -> list[list[Hypothesis]]:
        """Search the rows `some` with one limit; return everything that was found for each."""
        config, draws = task.config, 1
        if config.sampling:
            draws = config.beam_size
            _seed(config.seed)
        repeated = [i for i in some for _ in range(draws)]
        source = [_look_up(self._src_pieces, task.rows[i]) for i in repeated]
        forced = [_look_up(self._pieces, task.prefixes[i]) for i in repeated]
        results = self._engine.translate_batch(
            source,
            forced if any(forced) else None,
            max_input_length=0,
            max_decoding_length=limit,
            min_decoding_length=config.min_length,
            return_end_token=True,
            return_scores=task.is_beam,  # which cost greedy search a softmax a step
            return_attention=config.alignment,
            suppress_sequences=self._forbidden,
            length_penalty=config.length_exponent,
            **_strategy(task),
        )
        found = [self._read(result, config) for result in results]
        if config.alignment and task.is_beam:
            firsts = self._first_alignments(source)
            found = [
                [replace(h, alignment=[first, *h.alignment[1:]]) for h in hypotheses]
                for first, hypotheses in zip(firsts, found, strict=True)
            ]
        return [sum(found[k : k + draws], []) for k in range(0, len(found), draws)]

    def _first_alignments(self, source: list[list[str]]) -> list[int]:
        """Return what the first target token of each sentence attends to most.

        A beam search of several sentences reports that of another sentence (CTranslate2 4.8.5),
        greedy search the right one; it depends on no token that is chosen.
        """
        results = self._engine.translate_batch(
            source,
            max_input_length=0,
            beam_size=1,
            max_decoding_length=1,
            return_end_token=True,
            return_attention=True,
        )
        return [_align(result.attention[0])[0] for result in results]

    def _read(self, result: Any, config: SearchConfig) -> list[Hypothesis]:
        """Return the hypotheses of a sentence, with CTranslate2's sums if there are any."""
        found = []
        sums = result.scores or [math.nan] * len(result.hypotheses)
        for k, (pieces, value) in enumerate(zip(result.hypotheses, sums, strict=True)):
            tokens = [self._ids[piece] for piece in pieces]
            total = value * len(tokens) ** config.length_exponent
            finished = tokens[-1] == self._control.eos
            alignment = _align(result.attention[k]) if config.alignment else None
            value = score(total, len(tokens), config)
            found.append(Hypothesis(tokens, total, value, finished, [], alignment))
        return found

    def _finish(self, task: _Task, found: list[list[Hypothesis]]) -> list[list[Hypothesis]]:
        """Return the best of each row, by our rule, with token scores if somebody looks at them."""
        if task.is_beam:
            # CTranslate2's sums leave prefixes out
            self._score_tokens(task, found, [i for i, prefix in enumerate(task.prefixes) if prefix])
            for hypotheses in found:
                hypotheses.sort(key=lambda h: (h.finished, h.score), reverse=True)
        best = [hypotheses[: task.n_best] for hypotheses in found]
        if task.with_scores:
            self._score_tokens(task, best, range(len(best)))
        return best

    def _score_tokens(
        self, task: _Task, found: list[list[Hypothesis]], some: Sequence[int]
    ) -> None:
        """Put what the model says of their tokens into the hypotheses of the rows `some`."""
        pairs = [(task.rows[i], h) for i in some for h in found[i]]
        bare = [h.tokens[:-1] if h.finished else h.tokens for _, h in pairs]
        scored = iter(self.score([row for row, _ in pairs], bare) if pairs else [])
        for i in some:
            found[i] = [_with_scores(h, next(scored), task.config) for h in found[i]]

    def _limits(
        self, rows: Sequence[Ids], prefixes: Sequence[Ids], config: SearchConfig
    ) -> list[int]:
        """Return the most tokens of each translation, EOS included, as the native search has it."""
        lengths = torch.tensor([len(row) + 1 for row in rows])  # (B,)
        return [
            min(max(limit, config.min_length + 1, len(prefix) + 1), self._max_positions - 1)
            for limit, prefix in zip(length_limits(lengths, config), prefixes, strict=True)
        ]

    def _check_lengths(self, rows: Sequence[Ids]) -> None:
        longest = max(map(len, rows), default=0)
        if longest >= self._max_positions:
            raise DataError(
                f"a sentence has {longest} tokens and the exported model takes "
                f"{self._max_positions - 1}; export with a larger max_positions"
            )


def _look_up(pieces: Sequence[str], ids: Ids) -> list[str]:
    return [pieces[i] for i in ids]


def _seed(seed: int) -> None:
    """Seed CTranslate2's generator, which heeds it up to the first draw of a process alone."""
    import ctranslate2

    ctranslate2.set_random_seed(seed)


def _strategy(task: _Task) -> dict[str, Any]:
    """Return CTranslate2's options for greedy search, beam search or sampling."""
    config = task.config
    if config.sampling:
        return {
            "beam_size": 1,
            "sampling_topk": config.top_k,
            "sampling_topp": config.top_p,
            "sampling_temperature": config.temperature,
        }
    # with an exponent of 0 it ranks as we do, and ends once so many are sure to be the best
    asked = task.n_best if config.length_exponent == 0 else config.beam_size
    return {"beam_size": config.beam_size, "num_hypotheses": asked}


def _cut(found: Hypothesis, limit: int) -> Hypothesis:
    """Return the hypothesis as it was at its length limit; its sums are not known any more."""
    if len(found.tokens) <= limit:
        return found
    alignment = found.alignment[:limit] if found.alignment else found.alignment
    return Hypothesis(found.tokens[:limit], math.nan, math.nan, False, [], alignment)


def _with_scores(found: Hypothesis, log_probs: list[float], config: SearchConfig) -> Hypothesis:
    log_probs = log_probs[: len(found.tokens)]  # no EOS after what is unfinished
    total = math.fsum(log_probs)
    value = score(total, len(found.tokens), config)
    return replace(found, log_prob=total, score=value, token_log_probs=log_probs)


def _align(attention: list[list[float]]) -> list[int]:
    """Return the source position that each target token attends to most, EOS's being S.

    CTranslate2 leaves EOS out of `attention` (T, S); its share is what is missing to 1.
    """
    weights = np.asarray(attention, dtype=np.float32)  # (T, S)
    eos = 1 - weights.sum(axis=1, keepdims=True)  # (T, 1)
    return np.concatenate([weights, eos], axis=1).argmax(axis=1).tolist()  # type: ignore[no-any-return]
