"""A toy model whose probabilities are a function of source and prefix, and slow searches over it:
the oracles of the tests of search.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tiny import BOS, EOS, PAD, UNK, hidden_states, plain, random_source, tiny_model
from torch import Tensor, nn

from nmt.checkpoint import ModelInfo, save_model
from nmt.config import Norm, SearchConfig, Stop
from nmt.data.tokenizer import Tokenizer
from nmt.model.fast import FastTransformer
from nmt.search.hypotheses import Hypothesis
from nmt.search.request import SearchRequest
from nmt.search.search import search
from nmt.search.stepper import Stepper
from nmt.translate.engines.native import NativeBackend

_CONTROL = SimpleNamespace(pad_id=PAD, bos_id=BOS, eos_id=EOS)
TOKENIZER: Any = SimpleNamespace(src=_CONTROL, tgt=_CONTROL)  # for searches over ids
SYMBOLS = 6
ALLOWED = [UNK, EOS, 4, 5]  # of the six symbols, all but PAD and BOS
Sentence = tuple[int, ...]
Source = tuple[Tensor, Tensor]  # ids (B, S) and lengths (B,)


def config(
    beam_size: int,
    alpha: float = 0.6,
    *,
    a: float = 0.0,
    b: int = 5,
    stop: Stop = Stop.exact,
    **changes: Any,
) -> SearchConfig:
    return SearchConfig(
        beam_size=beam_size,
        length_penalty=alpha,
        max_length_a=a,
        max_length_b=b,
        stop=stop,
        **changes,
    )


def find(
    stepper: Stepper, source: Source, config: SearchConfig, **more: Any
) -> list[list[Hypothesis]]:
    return search(stepper, SearchRequest(source_rows(source), config, **more), TOKENIZER)


def source_rows(source: Source) -> list[list[int]]:
    """Return the ids of each sentence without EOS and padding."""
    pairs = zip(source[0].tolist(), source[1].tolist(), strict=True)
    return [row[: length - 1] for row, length in pairs]


def score_ids(
    stepper: Stepper,
    rows: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    config: SearchConfig,
    max_tokens: int = 4096,
) -> list[Hypothesis]:
    """Score pairs of ids as the native backend does, with `TOKENIZER`."""
    return NativeBackend(stepper, TOKENIZER).score(rows, targets, config, max_tokens)


@dataclass(frozen=True)
class Taste:
    """How the toy model likes its sentences."""

    eos_bonus: float = 0.0  # above 0 they are short
    sharpness: float = 1.5  # of the choice among symbols
    certain_after: int = 99  # from this length on one word is all but certain


NO_TASTE = Taste()
TASTES = [
    Taste(eos_bonus=-3.0),
    Taste(),
    Taste(eos_bonus=1.5),
    Taste(eos_bonus=1.5, certain_after=2),
    Taste(eos_bonus=-1.0, sharpness=4.0),
]


@functools.cache
def toy_log_probs(source: Sentence, prefix: Sentence, taste: Taste = NO_TASTE) -> Any:
    """Draw log-probabilities of the next symbol (6,), PAD and BOS likely too."""
    draw = np.random.default_rng([*source, 99, *prefix])
    logits = draw.normal(size=SYMBOLS) * taste.sharpness
    logits[EOS] += taste.eos_bonus
    if len(prefix) > taste.certain_after:
        logits[4] += 9.0
    return logits - np.log(np.exp(logits).sum())


@functools.cache
def toy_attention(source: Sentence, prefix: Sentence) -> Any:
    """Draw the attention weights of the step after `prefix` over the source (S,)."""
    weights = np.random.default_rng([7, *source, 99, *prefix]).exponential(size=len(source))
    return weights / weights.sum()


@dataclass
class ToyState:
    rows: list[tuple[Sentence, Sentence]]  # source and prefix of each
    is_watched: bool = False


class ToyStepper:
    """Knows every row's source and prefix, so that any row mixed up shows."""

    device = torch.device("cpu")

    def __init__(self, taste: Taste = NO_TASTE) -> None:
        self.taste = taste
        self.num_rows: list[int] = []  # of each step
        self.sources: list[set[Sentence]] = []  # that each step works on
        self.width = 0

    def start(self, src: Tensor, src_lengths: Tensor, *, attention: bool = False) -> ToyState:
        pairs = zip(src.tolist(), src_lengths.tolist(), strict=True)
        self.width = src.size(1)
        return ToyState([(tuple(row[:length]), ()) for row, length in pairs], attention)

    def step(self, tokens: Tensor, state: ToyState) -> Tensor:
        pairs = zip(state.rows, tokens.tolist(), strict=True)
        state.rows = [(source, (*prefix, token)) for (source, prefix), token in pairs]
        self.num_rows.append(len(state.rows))
        self.sources.append({source for source, _ in state.rows})
        table = [toy_log_probs(*row, self.taste) for row in state.rows]
        return torch.tensor(np.array(table), dtype=torch.float32)

    def reorder(self, state: ToyState, rows: Tensor) -> ToyState:
        return ToyState([state.rows[row] for row in rows.tolist()], state.is_watched)

    def attention(self, state: ToyState) -> Tensor:
        assert state.is_watched
        table = torch.zeros(len(state.rows), self.width)
        for row, (source, prefix) in enumerate(state.rows):
            table[row, : len(source)] = torch.from_numpy(toy_attention(source, prefix))
        return table


def toy_source(*lengths: int) -> Source:
    return random_source(list(lengths), seed=5)


def source_of(source: Source, row: int) -> Sentence:
    return tuple(source[0][row, : source[1][row]].tolist())


def normalized(log_prob: float, length: int, settings: SearchConfig) -> float:
    """Return the score without coverage."""
    divisor = {
        "wu": (5 + length) ** settings.length_penalty / (5 + 1) ** settings.length_penalty,
        "average": length,
        "none": 1,
    }[settings.normalization.value]
    return (log_prob + settings.word_reward * length) / divisor


def judge(
    tokens: Sentence, source: Sentence, settings: SearchConfig, taste: Taste = NO_TASTE
) -> Hypothesis:
    """Score a translation in float64, by the formulas of docs/search.md."""
    prefixes = [(BOS, *tokens[:i]) for i in range(len(tokens))]
    pairs = zip(prefixes, tokens, strict=True)
    log_probs = [float(toy_log_probs(source, prefix, taste)[token]) for prefix, token in pairs]
    weights = np.array([toy_attention(source, prefix) for prefix in prefixes])  # (T, S)
    total = sum(log_probs)
    coverage = sum(math.log(min(p, 1.0)) for p in weights.sum(axis=0)[:-1])  # without EOS
    score = normalized(total, len(tokens), settings) + settings.coverage_penalty * coverage
    alignment = weights.argmax(axis=1).tolist() if settings.alignment else None
    return Hypothesis(list(tokens), total, score, tokens[-1] == EOS, log_probs, alignment)


def enumerate_all(source: Sentence, limit: int, settings: SearchConfig) -> list[Hypothesis]:
    """Return every sequence that ends with EOS or meets the limit, best first, finished ones
    before the others.
    """
    others = [symbol for symbol in ALLOWED if symbol != EOS]
    found: list[Sentence] = []
    for length in range(settings.min_length, limit):
        found += [(*words, EOS) for words in itertools.product(others, repeat=length)]
    found += list(itertools.product(others, repeat=limit))
    hypotheses = [judge(tokens, source, settings) for tokens in found]
    return sorted(hypotheses, key=lambda h: (h.finished, h.score), reverse=True)


def beam_by_lists(
    source: Sentence, limit: int, settings: SearchConfig, taste: Taste = NO_TASTE
) -> tuple[list[Hypothesis], int]:
    """Search one sentence with a beam; also return the number of steps after which search ends.

    With `stop=exact`, go on to the limit and only count the steps until nothing better can come.
    """
    live: list[tuple[float, Sentence]] = [(0.0, ())]
    finished: list[Hypothesis] = []
    num_steps = limit
    for length in range(1, limit + 1):
        extended = []
        for log_prob, tokens in live:
            log_probs = toy_log_probs(source, (BOS, *tokens), taste)
            symbols = [s for s in ALLOWED if s != EOS or length > settings.min_length]
            extended += [(log_prob + log_probs[s], (*tokens, s)) for s in symbols]
        extended.sort(reverse=True)
        for _, tokens in extended[: settings.beam_size]:
            if tokens[-1] == EOS:
                finished.append(judge(tokens, source, settings, taste))
        live = [pair for pair in extended if pair[1][-1] != EOS][: settings.beam_size]
        finished.sort(key=lambda h: h.score, reverse=True)
        if len(finished) < settings.beam_size:
            continue
        worst = finished[settings.beam_size - 1].score
        if settings.stop is Stop.first and length < limit:
            live = [pair for pair in live if normalized(pair[0], length + 1, settings) > worst]
            if not live:
                return finished[: settings.beam_size], length
        lengths = range(max(length, settings.min_length) + 1, limit + 1)
        if all(normalized(live[0][0], more, settings) <= worst for more in lengths):
            num_steps = min(num_steps, length)
    cut = [judge(tokens, source, settings, taste) for _, tokens in live]
    cut.sort(key=lambda h: h.score, reverse=True)
    return (finished + cut)[: settings.beam_size], num_steps


def assert_same(
    found: Sequence[Hypothesis],
    expected: Sequence[Hypothesis],
    *,
    tolerance: float = 1e-5,
    case: object = "",
) -> None:
    """Compare all that a hypothesis holds, numbers to a tolerance; `case` is named on failure."""
    for name in ("tokens", "finished", "alignment"):
        assert [getattr(h, name) for h in found] == [getattr(h, name) for h in expected], case
    values, wanted = (
        np.array([x for h in some for x in (h.score, h.log_prob, *h.token_log_probs)])
        for some in (found, expected)
    )
    assert len(values) == len(wanted), case
    assert (np.abs(values - wanted) <= tolerance).all(), case


# --- a Transformer, untrained but with clear preferences

LENGTHS = [9, 2, 6, 1, 4, 12, 3, 7, 2, 5, 10, 8]


@torch.no_grad()
def decided_model(norm: Norm = Norm.post, seed: int = 1, **changes: Any) -> FastTransformer:
    """Make a model whose layers outweigh its embeddings, so that it does not repeat one word."""
    model = tiny_model(seed, sharpness=2.0, norm=norm, **changes)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.mul_(2.0)
    return model


@torch.no_grad()
def teacher_forced(
    model: FastTransformer, source: Source, row: int, tokens: list[int]
) -> list[float]:
    """Score `tokens` by one forward pass of the plain model over one sentence."""
    length = source[1][row : row + 1]
    tgt_in = torch.tensor([[BOS, *tokens[:-1]]])
    hidden = hidden_states(plain(model), source[0][row : row + 1, : int(length)], length, tgt_in)
    log_probs = model.logits(hidden)[0].double().log_softmax(-1)
    chosen: list[float] = log_probs[torch.arange(len(tokens)), tokens].tolist()
    return chosen


def save_tiny(folder: Path, tokenizer: Tokenizer, seed: int = 1, beam_size: int = 4) -> Path:
    """Write a model folder of such a model."""
    model = decided_model(seed=seed, vocab_size=tokenizer.vocab_size)
    names = {"src_lang": "en", "tgt_lang": "de", "tokenizer_sha256": tokenizer.sha256}
    search = config(beam_size, a=1.0, b=8)
    info = ModelInfo(model.config, search, tokenizer.vocab_size, updates=1, **names)
    save_model(folder, model.state_dict(), info, tokenizer)
    return folder


class Copier(ToyStepper):
    """Wants the source, and any other id far less."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size

    def step(self, tokens: Tensor, state: ToyState) -> Tensor:
        super().step(tokens, state)
        log_probs = torch.full((len(state.rows), self.vocab_size), -20.0)
        for row, (source, prefix) in enumerate(state.rows):
            log_probs[row, source[min(len(prefix), len(source)) - 1]] = -0.01
        return log_probs
