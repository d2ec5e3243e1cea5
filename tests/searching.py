"""A toy model for tests of search, and slow searches over it that are easy to verify.

The toy model draws the probabilities of the next symbol at random, seeded by source and prefix.
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

_PIECES = ["<pad>", "<unk>", "<s>", "</s>", "a", "b"]
_CONTROL = SimpleNamespace(
    pad_id=PAD, bos_id=BOS, eos_id=EOS, unused_ids=[], all_pieces=lambda: _PIECES
)
TOKENIZER: Any = SimpleNamespace(src=_CONTROL, tgt=_CONTROL)  # for searches over ids
SYMBOLS = 6
ALLOWED_SYMBOLS = [UNK, EOS, 4, 5]  # all but PAD and BOS
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
class ToySettings:
    """Settings of the toy model."""

    eos_bonus: float = 0.0  # added to the logit of EOS: above 0, sentences are short
    sharpness: float = 1.5  # standard deviation of the logits
    certain_after: int = 99  # from this length on, symbol 4 is nearly certain


DEFAULT_TOY = ToySettings()
TOY_SETTINGS = [
    ToySettings(eos_bonus=-3.0),
    ToySettings(),
    ToySettings(eos_bonus=1.5),
    ToySettings(eos_bonus=1.5, certain_after=2),
    ToySettings(eos_bonus=-1.0, sharpness=4.0),
]


@functools.cache
def toy_log_probs(source: Sentence, prefix: Sentence, toy: ToySettings = DEFAULT_TOY) -> Any:
    """Return the log-probabilities of the next symbol (6,); PAD and BOS have some, too."""
    rng = np.random.default_rng([*source, 99, *prefix])
    logits = rng.normal(size=SYMBOLS) * toy.sharpness
    logits[EOS] += toy.eos_bonus
    if len(prefix) > toy.certain_after:
        logits[4] += 9.0
    return logits - np.log(np.exp(logits).sum())


@functools.cache
def toy_attention(source: Sentence, prefix: Sentence) -> Any:
    """Return the attention weights of the step after `prefix` over the source (S,)."""
    weights = np.random.default_rng([7, *source, 99, *prefix]).exponential(size=len(source))
    return weights / weights.sum()


@dataclass
class ToyState:
    rows: list[tuple[Sentence, Sentence]]  # source and prefix
    with_attention: bool = False


class ToyStepper:
    """Steps the toy model; its state holds source and prefix, so that mixed-up rows are noticed."""

    device = torch.device("cpu")
    shifts_alignment = False

    def __init__(self, toy: ToySettings = DEFAULT_TOY) -> None:
        self.toy = toy
        self.num_rows: list[int] = []  # one entry per step
        self.sources: list[set[Sentence]] = []  # one entry per step
        self.width = 0  # of the padded sources

    def start(self, src: Tensor, src_lengths: Tensor, *, with_attention: bool = False) -> ToyState:
        pairs = zip(src.tolist(), src_lengths.tolist(), strict=True)
        self.width = src.size(1)
        return ToyState([(tuple(row[:length]), ()) for row, length in pairs], with_attention)

    def start_single(self, src: Tensor, src_lengths: Tensor) -> ToyState:
        return self.start(src, src_lengths)

    def step(self, tokens: Tensor, state: ToyState) -> Tensor:
        pairs = zip(state.rows, tokens.tolist(), strict=True)
        state.rows = [(source, (*prefix, token)) for (source, prefix), token in pairs]
        self.num_rows.append(len(state.rows))
        self.sources.append({source for source, _ in state.rows})
        log_probs = [toy_log_probs(source, prefix, self.toy) for source, prefix in state.rows]
        return torch.tensor(np.array(log_probs), dtype=torch.float32)

    def step_unnormalized(self, tokens: Tensor, state: Any) -> Tensor:
        return self.step(tokens, state) + 3.0

    def reorder(self, state: ToyState, rows: Tensor) -> ToyState:
        return ToyState([state.rows[row] for row in rows.tolist()], state.with_attention)

    def attention(self, state: ToyState) -> Tensor:
        assert state.with_attention
        weights = torch.zeros(len(state.rows), self.width)
        for row, (source, prefix) in enumerate(state.rows):
            weights[row, : len(source)] = torch.from_numpy(toy_attention(source, prefix))
        return weights


def toy_source(*lengths: int) -> Source:
    return random_source(list(lengths), seed=5)


def source_ids(source: Source, row: int) -> Sentence:
    return tuple(source[0][row, : source[1][row]].tolist())


def normalized(log_prob: float, length: int, settings: SearchConfig) -> float:
    """Return the normalized score, without the coverage penalty."""
    divisor = {
        "wu": (5 + length) ** settings.length_penalty / (5 + 1) ** settings.length_penalty,
        "average": length,
        "none": 1,
    }[settings.normalization.value]
    return (log_prob + settings.word_reward * length) / divisor


def score_by_formula(
    tokens: Sentence, source: Sentence, settings: SearchConfig, toy: ToySettings = DEFAULT_TOY
) -> Hypothesis:
    """Score a translation in float64, by the formulas of docs/search.md."""
    log_probs = []
    attention = []
    for i, token in enumerate(tokens):
        prefix = (BOS, *tokens[:i])
        log_probs.append(float(toy_log_probs(source, prefix, toy)[token]))
        attention.append(toy_attention(source, prefix))
    weights = np.array(attention)  # (T, S)
    total = sum(log_probs)
    coverage = sum(math.log(min(p, 1.0)) for p in weights.sum(axis=0)[:-1])  # without EOS
    score = normalized(total, len(tokens), settings) + settings.coverage_penalty * coverage
    alignment = weights.argmax(axis=1).tolist() if settings.alignment else None
    return Hypothesis(list(tokens), total, score, tokens[-1] == EOS, log_probs, alignment)


def enumerate_hypotheses(source: Sentence, limit: int, settings: SearchConfig) -> list[Hypothesis]:
    """Return all sequences that end with EOS or reach the limit.

    They are in the order of search results: finished hypotheses first, then by score.
    """
    words = [symbol for symbol in ALLOWED_SYMBOLS if symbol != EOS]
    sentences: list[Sentence] = []
    for length in range(settings.min_length, limit):
        sentences += [(*prefix, EOS) for prefix in itertools.product(words, repeat=length)]
    sentences += itertools.product(words, repeat=limit)
    hypotheses = [score_by_formula(tokens, source, settings) for tokens in sentences]
    return sorted(hypotheses, key=lambda h: (h.finished, h.score), reverse=True)


def beam_by_lists(
    source: Sentence, limit: int, settings: SearchConfig, toy: ToySettings = DEFAULT_TOY
) -> tuple[list[Hypothesis], int]:
    """Search one sentence with a beam; also return the number of steps after which search ends.

    With `stop=exact`, goes on to the limit and only counts the steps until no live hypothesis can
    become a result.
    """
    live: list[tuple[float, Sentence]] = [(0.0, ())]
    finished: list[Hypothesis] = []
    num_steps = limit
    for length in range(1, limit + 1):
        extended = []
        for log_prob, tokens in live:
            log_probs = toy_log_probs(source, (BOS, *tokens), toy)
            symbols = [s for s in ALLOWED_SYMBOLS if s != EOS or length > settings.min_length]
            extended += [(log_prob + log_probs[s], (*tokens, s)) for s in symbols]
        extended.sort(reverse=True)
        for _, tokens in extended[: settings.beam_size]:
            if tokens[-1] == EOS:
                finished.append(score_by_formula(tokens, source, settings, toy))
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
        if all(normalized(live[0][0], n, settings) <= worst for n in lengths):
            num_steps = min(num_steps, length)
    unfinished = [score_by_formula(tokens, source, settings, toy) for _, tokens in live]
    unfinished.sort(key=lambda h: h.score, reverse=True)
    return (finished + unfinished)[: settings.beam_size], num_steps


def assert_same(
    hypotheses: Sequence[Hypothesis],
    expected: Sequence[Hypothesis],
    *,
    tolerance: float = 1e-5,
    case: object = "",
) -> None:
    """Compare all fields, scores up to a tolerance; a failure names `case`."""
    assert len(hypotheses) == len(expected), case
    for hypothesis, reference in zip(hypotheses, expected, strict=True):
        assert hypothesis.tokens == reference.tokens, case
        assert hypothesis.finished == reference.finished, case
        assert hypothesis.alignment == reference.alignment, case
        # pytest.approx is slow, and some tests compare hundreds of hypotheses
        differences = np.subtract(scores_of(hypothesis), scores_of(reference))
        assert np.abs(differences).max() <= tolerance, case


def token_ids(results: Sequence[Sequence[Hypothesis]]) -> list[list[list[int]]]:
    """Return the ids of all hypotheses of each sentence."""
    return [[hypothesis.tokens for hypothesis in hypotheses] for hypotheses in results]


def scores_of(hypothesis: Hypothesis) -> list[float]:
    return [hypothesis.score, hypothesis.log_prob, *hypothesis.token_log_probs]


# --- a Transformer with random weights and sharp distributions

LENGTHS = [9, 2, 6, 1, 4, 12, 3, 7, 2, 5, 10, 8]


@torch.no_grad()
def decided_model(norm: Norm = Norm.post, seed: int = 1, **changes: Any) -> FastTransformer:
    """Make a model with large weights in its layers, so that it does not repeat a single word."""
    model = tiny_model(seed, sharpness=2.0, norm=norm, **changes)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.mul_(2.0)
    return model


@torch.no_grad()
def teacher_forced(
    model: FastTransformer, source: Source, row: int, tokens: list[int]
) -> list[float]:
    """Return the log-probabilities of `tokens`, by one forward pass of the plain model."""
    length = source[1][row : row + 1]
    tgt_in = torch.tensor([[BOS, *tokens[:-1]]])
    hidden = hidden_states(plain(model), source[0][row : row + 1, : int(length)], length, tgt_in)
    log_probs = model.logits(hidden)[0].double().log_softmax(-1)
    token_log_probs: list[float] = log_probs[torch.arange(len(tokens)), tokens].tolist()
    return token_log_probs


def save_tiny(folder: Path, tokenizer: Tokenizer, seed: int = 1, beam_size: int = 4) -> Path:
    """Save a `decided_model`; return its folder."""
    model = decided_model(seed=seed, vocab_size=tokenizer.vocab_size)
    info = ModelInfo(
        model.config,
        config(beam_size, a=1.0, b=8),
        tokenizer.vocab_size,
        updates=1,
        src_lang="en",
        tgt_lang="de",
        tokenizer_sha256=tokenizer.sha256,
    )
    save_model(folder, model.state_dict(), info, tokenizer)
    return folder


class Copier(ToyStepper):
    """Copies the source: each of its tokens is far more likely than others."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size

    def step(self, tokens: Tensor, state: ToyState) -> Tensor:
        super().step(tokens, state)
        log_probs = torch.full((len(state.rows), self.vocab_size), -20.0)
        for row, (source, prefix) in enumerate(state.rows):
            log_probs[row, source[min(len(prefix), len(source)) - 1]] = -0.01
        return log_probs
