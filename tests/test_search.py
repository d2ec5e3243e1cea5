"""Search against the truth: all sequences enumerated, a beam search by lists, and full forward
passes without a cache.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from conftest import BOS, EOS, PAD, UNK, VOCAB_SIZE, random_source, sentences, tiny_model
from torch import Tensor, nn

from nmt.config import SearchConfig
from nmt.data.tokenizer import Tokenizer
from nmt.inference.hypotheses import Hypothesis as Found
from nmt.inference.penalties import length_penalty
from nmt.inference.search import ControlIds, length_limits, search
from nmt.inference.stepper import ModelStepper, Stepper
from nmt.inference.translator import Translator
from nmt.model.transformer import Transformer
from nmt.options import Norm

ALPHAS = [-0.5, 0.0, 0.6, 1.0, 2.0]
IDS = ControlIds(PAD, BOS, EOS)
SYMBOLS = 6
ALLOWED = [UNK, EOS, 4, 5]  # of the six symbols, all but PAD and BOS
Sentence = tuple[int, ...]


def config(beam_size: int, alpha: float = 0.6, *, a: float = 0.0, b: int = 5) -> SearchConfig:
    return SearchConfig(beam_size=beam_size, length_penalty=alpha, max_length_a=a, max_length_b=b)


def find(
    stepper: Stepper, source: tuple[Tensor, Tensor], config: SearchConfig
) -> list[list[Found]]:
    return search(stepper, *source, config, IDS)


@dataclass
class Hypothesis:
    """What the oracles below say of a hypothesis."""

    tokens: list[int]
    log_prob: float
    score: float
    finished: bool


# --- a toy model whose probabilities are a function of source and prefix


@dataclass(frozen=True)
class Taste:
    """How the toy model likes its sentences."""

    eos_bonus: float = 0.0  # above 0 they are short
    sharpness: float = 1.5  # of the choice among symbols
    certain_after: int = 99  # from this length on one word is all but certain


def toy_log_probs(source: Sentence, prefix: Sentence, taste: Taste) -> Any:
    """Draw log-probabilities of the next symbol (6,), PAD and BOS likely too."""
    draw = np.random.default_rng([*source, 99, *prefix])
    logits = draw.normal(size=SYMBOLS) * taste.sharpness
    logits[EOS] += taste.eos_bonus
    if len(prefix) > taste.certain_after:
        logits[4] += 9.0
    return logits - np.log(np.exp(logits).sum())


NO_TASTE = Taste()


@dataclass
class ToyState:
    rows: list[tuple[Sentence, Sentence]]  # source and prefix of each
    num_beams: int = 1


class ToyStepper:
    """Knows every row's source and prefix, so that any row mixed up shows."""

    device = torch.device("cpu")

    def __init__(self, taste: Taste = NO_TASTE) -> None:
        self.taste = taste
        self.num_rows: list[int] = []  # of each step
        self.sources: list[set[Sentence]] = []  # that each step works on

    def start(self, src: Tensor, src_lengths: Tensor) -> ToyState:
        pairs = zip(src.tolist(), src_lengths.tolist(), strict=True)
        return ToyState([(tuple(row[:length]), ()) for row, length in pairs])

    def step(self, tokens: Tensor, state: ToyState) -> Tensor:
        pairs = zip(state.rows, tokens.tolist(), strict=True)
        state.rows = [(source, (*prefix, token)) for (source, prefix), token in pairs]
        self.num_rows.append(len(state.rows))
        self.sources.append({source for source, _ in state.rows})
        table = [toy_log_probs(*row, self.taste) for row in state.rows]
        return torch.tensor(np.array(table), dtype=torch.float32)

    def reorder(self, state: ToyState, rows: Tensor, num_beams: int) -> ToyState:
        kept = [state.rows[row] for row in rows.tolist()]
        for start in range(0, len(kept), num_beams):
            assert len({source for source, _ in kept[start : start + num_beams]}) == 1
        return ToyState(kept, num_beams)


def toy_source(*lengths: int) -> tuple[Tensor, Tensor]:
    return random_source(list(lengths), seed=5)


def source_of(source: tuple[Tensor, Tensor], row: int) -> Sentence:
    return tuple(source[0][row, : source[1][row]].tolist())


def score_of(tokens: Sentence, source: Sentence, taste: Taste = NO_TASTE) -> float:
    """Sum the toy's log-probabilities of `tokens`, in float64."""
    prefixes = [(BOS, *tokens[:i]) for i in range(len(tokens))]
    return sum(
        float(toy_log_probs(source, prefix, taste)[token])
        for prefix, token in zip(prefixes, tokens, strict=True)
    )


def penalized(log_prob: float, length: int, alpha: float) -> float:
    """Wu et al. (2016), equation 14, without coverage."""
    return log_prob / ((5 + length) ** alpha / (5 + 1) ** alpha)


# --- the exhaustive oracle


def enumerate_all(source: Sentence, limit: int, alpha: float) -> list[Hypothesis]:
    """Return every sequence that ends with EOS or meets the limit, best first, finished ones
    before the others.
    """
    found = []
    others = [symbol for symbol in ALLOWED if symbol != EOS]
    for length in range(limit):
        for words in itertools.product(others, repeat=length):
            found.append((*words, EOS))
    found += list(itertools.product(others, repeat=limit))
    hypotheses = []
    for tokens in found:
        log_prob = score_of(tokens, source)
        score = penalized(log_prob, len(tokens), alpha)
        hypotheses.append(Hypothesis(list(tokens), log_prob, score, tokens[-1] == EOS))
    return sorted(hypotheses, key=lambda h: (h.finished, h.score), reverse=True)


def assert_same(
    found: list[Hypothesis], expected: list[Hypothesis], *, tolerance: float = 1e-5
) -> None:
    assert [h.tokens for h in found] == [h.tokens for h in expected]
    assert [h.finished for h in found] == [h.finished for h in expected]
    for name in ("score", "log_prob"):
        values = [getattr(h, name) for h in expected]
        assert [getattr(h, name) for h in found] == pytest.approx(values, abs=tolerance)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_beam_as_wide_as_all_prefixes_finds_the_truth(alpha: float) -> None:
    source = toy_source(4, 2)
    for row, found in enumerate(find(ToyStepper(), source, config(400, alpha))):
        expected = enumerate_all(source_of(source, row), 5, alpha)
        assert len(expected) == 1 + 3 + 9 + 27 + 81 + 243
        assert_same(found, expected)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_of_a_wide_beam_the_best_are_kept(alpha: float) -> None:
    """All prefixes fit a beam of 4 * 81, but not all hypotheses."""
    source = toy_source(3)
    (found,) = find(ToyStepper(), source, config(4 * 81, alpha))
    assert_same(found, enumerate_all(source_of(source, 0), 5, alpha)[: 4 * 81])


# --- beam search by lists, one sentence at a time, that never stops early


TASTES = [
    Taste(eos_bonus=-3.0),
    Taste(),
    Taste(eos_bonus=1.5),
    Taste(eos_bonus=1.5, certain_after=2),
    Taste(eos_bonus=-1.0, sharpness=4.0),
]


def beam_by_lists(
    source: Sentence, limit: int, beam_size: int, alpha: float, taste: Taste
) -> list[Hypothesis]:
    live: list[tuple[float, Sentence]] = [(0.0, ())]
    finished: list[Hypothesis] = []
    for length in range(1, limit + 1):
        extended = []
        for log_prob, tokens in live:
            log_probs = toy_log_probs(source, (BOS, *tokens), taste)
            extended += [(log_prob + log_probs[s], (*tokens, s)) for s in ALLOWED]
        extended.sort(reverse=True)
        for log_prob, tokens in extended[:beam_size]:
            if tokens[-1] == EOS:
                score = penalized(log_prob, length, alpha)
                finished.append(Hypothesis(list(tokens), log_prob, score, True))
        live = [pair for pair in extended if pair[1][-1] != EOS][:beam_size]
    finished.sort(key=lambda h: h.score, reverse=True)
    cut = [Hypothesis(list(t), p, penalized(p, limit, alpha), False) for p, t in live]
    cut.sort(key=lambda h: h.score, reverse=True)
    return (finished + cut)[:beam_size]


@pytest.mark.parametrize("beam_size", [2, 3, 5])
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("taste", TASTES)
def test_beam_search_equals_one_by_lists_that_never_stops_early(
    beam_size: int, alpha: float, taste: Taste
) -> None:
    source = toy_source(6, 2, 9, 4, 1, 3)
    settings = config(beam_size, alpha, a=2.0, b=3)
    limits = [2 * (length - 1) + 3 for length in source[1].tolist()]
    found = find(ToyStepper(taste), source, settings)
    for row, (hypotheses, limit) in enumerate(zip(found, limits, strict=True)):
        expected = beam_by_lists(source_of(source, row), limit, beam_size, alpha, taste)
        assert_same(hypotheses, expected)


@pytest.mark.parametrize("taste", TASTES)
def test_a_beam_of_one_is_greedy(taste: Taste) -> None:
    source = toy_source(6, 2, 9, 4)
    found = find(ToyStepper(taste), source, config(1, 0.6, a=1.0, b=3))
    for row, (hypothesis,) in enumerate(found):
        tokens: Sentence = ()
        while len(tokens) < source[1][row] - 1 + 3 and EOS not in tokens:
            log_probs = toy_log_probs(source_of(source, row), (BOS, *tokens), taste)
            tokens = (*tokens, max(ALLOWED, key=lambda symbol: log_probs[symbol]))
        log_prob = score_of(tokens, source_of(source, row), taste)
        score = penalized(log_prob, len(tokens), 0.6)
        assert_same([hypothesis], [Hypothesis(list(tokens), log_prob, score, EOS in tokens)])


# --- what holds for all results


def test_the_length_penalty_counts_eos() -> None:
    assert length_penalty(1, 0.6) == 1.0
    assert length_penalty(7, 1.0) == pytest.approx(2.0)
    assert length_penalty(7, 0.6) == pytest.approx(2**0.6)
    (found,) = find(ToyStepper(Taste(eos_bonus=20.0)), toy_source(3), config(2, alpha=1.0))
    assert found[0].tokens == [EOS]
    assert found[0].score == found[0].log_prob


@pytest.mark.parametrize("beam_size", [2, 5, 50])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_hypotheses_are_sorted_and_none_comes_twice(beam_size: int, alpha: float) -> None:
    for hypotheses in find(ToyStepper(), toy_source(5, 2, 3), config(beam_size, alpha)):
        assert len({tuple(h.tokens) for h in hypotheses}) == len(hypotheses) == beam_size
        for kind in (True, False):
            scores = [h.score for h in hypotheses if h.finished is kind]
            assert scores == sorted(scores, reverse=True)
        flags = [h.finished for h in hypotheses]
        assert flags == sorted(flags, reverse=True)
        for h in hypotheses:
            assert h.finished == (h.tokens[-1] == EOS)
            assert not {PAD, BOS} & set(h.tokens)
            assert EOS not in h.tokens[:-1]


@pytest.mark.parametrize("beam_size", [1, 3])
def test_each_sentence_has_its_own_limit_and_hypotheses_that_meet_it_are_unfinished(
    beam_size: int,
) -> None:
    settings = config(beam_size, a=1.5, b=2)
    source = toy_source(7, 1, 4)
    assert length_limits(source[1], settings) == [9 + 2, 0 + 2, 4 + 2]
    found = find(ToyStepper(Taste(eos_bonus=-50.0)), source, settings)
    for hypotheses, limit in zip(found, [11, 2, 6], strict=True):
        assert len(hypotheses) == beam_size
        assert {len(h.tokens) for h in hypotheses} == {limit}
        assert not any(h.finished for h in hypotheses)


@pytest.mark.parametrize("beam_size", [1, 4])
def test_eos_at_the_limit_finishes(beam_size: int) -> None:
    found = find(ToyStepper(Taste(eos_bonus=50.0)), toy_source(3, 1), config(beam_size, b=1))
    assert [(h[0].tokens, h[0].finished) for h in found] == [([EOS], True)] * 2


@pytest.mark.parametrize("beam_size", [1, 3])
def test_sentences_that_are_done_leave_the_batch(beam_size: int) -> None:
    stepper, source = ToyStepper(Taste(eos_bonus=-50.0)), toy_source(9, 2, 5)
    find(stepper, source, config(beam_size, a=1.0, b=3))
    limits = [11, 4, 7]
    for step, sources in enumerate(stepper.sources, start=1):
        left = [row for row in range(3) if limits[row] >= step]
        assert sources == {source_of(source, row) for row in left}
        beams = 1 if step == 1 else beam_size
        assert stepper.num_rows[step - 1] == len(left) * beams
    assert len(stepper.num_rows) == 11


@pytest.mark.parametrize("beam_size", [1, 4])
def test_search_stops_when_nothing_better_can_come(beam_size: int) -> None:
    stepper = ToyStepper(Taste(eos_bonus=8.0))
    find(stepper, toy_source(3, 5), config(beam_size, b=200))
    assert len(stepper.num_rows) < 20


# --- a Transformer, untrained but with clear preferences

SOURCES = [9, 2, 6, 1, 4, 12, 3, 7, 2, 5, 10, 8]


@torch.no_grad()
def decided_model(norm: Norm = Norm.post) -> Transformer:
    """Make a model whose layers outweigh its embeddings, so that it does not repeat one word."""
    model = tiny_model(1, sharpness=2.0, norm=norm)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.mul_(2.0)
    return model


class Recorder(ModelStepper):
    """Counts how often beams change places."""

    num_swaps = 0

    def reorder(self, state: Any, rows: Tensor, num_beams: int) -> Any:
        self.num_swaps += rows.tolist() != list(range(len(rows)))
        return super().reorder(state, rows, num_beams)


@torch.no_grad()
def teacher_forced(
    model: Transformer, source: tuple[Tensor, Tensor], row: int, tokens: list[int]
) -> float:
    """Score `tokens` by one forward pass over the sentence alone, without padding or cache."""
    length = source[1][row : row + 1]
    tgt_in = torch.tensor([[BOS, *tokens[:-1]]])
    hidden = model(source[0][row : row + 1, : int(length)], length, tgt_in)
    log_probs = model.logits(hidden)[0].double().log_softmax(-1)
    return float(log_probs[torch.arange(len(tokens)), tokens].sum())


@pytest.mark.parametrize("norm", list(Norm))
@pytest.mark.parametrize("beam_size", [1, 2, 5])
def test_scores_equal_a_full_forward_pass_over_the_same_tokens(norm: Norm, beam_size: int) -> None:
    model, source = decided_model(norm), random_source(SOURCES)
    stepper = Recorder(model)
    results = find(stepper, source, config(beam_size, a=1.0, b=8))
    lengths = set()
    for row, hypotheses in enumerate(results):
        assert len(hypotheses) == beam_size
        for h in hypotheses:
            lengths.add(len(h.tokens))
            expected = teacher_forced(model, source, row, h.tokens)
            assert h.log_prob == pytest.approx(expected, abs=1e-4)
            assert h.score == pytest.approx(penalized(expected, len(h.tokens), 0.6), abs=1e-4)
    assert len(lengths) > 4  # sentences end at different times
    assert {h.finished for hypotheses in results for h in hypotheses} == {True, False}
    assert stepper.num_swaps > 3


@torch.no_grad()
def test_greedy_takes_the_argmax_of_a_full_forward_pass_at_every_step() -> None:
    model, source = decided_model(), random_source(SOURCES)
    found = find(ModelStepper(model), source, config(1, a=1.0, b=8))
    for row, (hypothesis,) in enumerate(found):
        length, tokens = source[1][row : row + 1], []
        while len(tokens) < int(length) - 1 + 8 and EOS not in tokens:
            tgt_in = torch.tensor([[BOS, *tokens]])
            logits = model.logits(model(source[0][row : row + 1, : int(length)], length, tgt_in))
            best = logits[0, -1].index_fill(0, torch.tensor([PAD, BOS]), -math.inf)
            tokens.append(int(best.argmax()))
        assert hypothesis.tokens == tokens
        assert hypothesis.finished == (tokens[-1] == EOS)


def alone(model: Transformer, settings: SearchConfig) -> list[list[Hypothesis]]:
    src, lengths = random_source(SOURCES)
    stepper = ModelStepper(model)
    return [
        find(stepper, (src[i : i + 1, :length], lengths[i : i + 1]), settings)[0]
        for i, length in enumerate(SOURCES)
    ]


@pytest.mark.parametrize("beam_size", [1, 5])
def test_a_translation_depends_on_no_neighbour(beam_size: int) -> None:
    model, settings = decided_model(), config(beam_size, a=1.0, b=8)
    src, lengths = random_source([*SOURCES, 200])
    expected, stepper = alone(model, settings), ModelStepper(model)
    everything = list(range(len(SOURCES)))
    shuffled = np.random.default_rng(0).permutation(everything).tolist()
    with_neighbour = [4, len(SOURCES), 0, 7]
    batches = [everything, shuffled, everything[:7], everything[7:], with_neighbour]
    for rows in batches:
        width = int(lengths[rows].max())
        found = find(stepper, (src[rows, :width], lengths[rows]), settings)
        for row, hypotheses in zip(rows, found, strict=True):
            if row < len(SOURCES):
                assert_same(hypotheses, expected[row])


def test_scores_are_float32_when_products_are_bfloat16() -> None:
    model, source = decided_model(), random_source(SOURCES)
    stepper = ModelStepper(model, torch.bfloat16)
    state = stepper.start(*source)
    log_probs = stepper.step(torch.full((len(SOURCES),), BOS), state)
    assert state.memory.layers[0][0].dtype is torch.bfloat16
    assert log_probs.dtype is torch.float32
    totals = log_probs.double().exp().sum(-1)
    torch.testing.assert_close(totals, torch.ones_like(totals), atol=1e-5, rtol=0)


@torch.inference_mode()
def test_a_stepper_goes_on_with_the_rows_and_sentences_that_are_kept() -> None:
    model, (src, lengths) = decided_model(), random_source([5, 2, 7, 3])
    stepper = ModelStepper(model)
    state = stepper.start(src, lengths)
    sources, history = torch.arange(4), torch.full((4, 1), BOS)
    plan = [  # rows to keep, beams of each sentence
        (torch.arange(4), 1),
        (torch.arange(4).repeat_interleave(2), 2),
        (torch.tensor([1, 0, 3, 3, 4, 5, 7, 6]), 2),
        (torch.tensor([1, 0, 5, 4, 6, 6]), 2),  # the second sentence is done
        (torch.tensor([5, 4]), 2),  # only the last goes on
    ]
    for rows, num_beams in plan:
        found = stepper.step(history[:, -1], state)
        full = model(src[sources], lengths[sources], history)
        expected = model.logits(full)[:, -1].log_softmax(-1)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        state = stepper.reorder(state, rows, num_beams)
        sources, history = sources[rows], history[rows]
        assert state.memory.hidden.size(0) == len(rows) // num_beams
        history = torch.cat([history, torch.randint(4, VOCAB_SIZE, (len(rows), 1))], dim=1)


# --- text


@pytest.fixture
def translator(tokenizer: Tokenizer) -> Translator:
    model = tiny_model(2, sharpness=2.0, vocab_size=tokenizer.vocab_size)
    return Translator(ModelStepper(model), tokenizer, config(3, a=1.0, b=8))


LINES = ["", *sentences(20, seed=8), "   ", "", "the " * 60]


@pytest.mark.parametrize("beam_size", [1, 3])
def test_lines_come_back_in_order_and_the_same_whatever_the_batch(
    translator: Translator, beam_size: int
) -> None:
    expected = [translator.translate([line], beam_size=beam_size)[0] for line in LINES]
    for max_tokens in (1, 100, 100_000):
        found = translator.translate(LINES, beam_size=beam_size, max_tokens=max_tokens)
        assert found == expected
    assert expected[0] == expected[-2] == expected[-3] == ""
    assert len(set(expected)) > 10
    settings = translator.search_config(beam_size=beam_size)
    stream = translator.n_best_stream(iter(LINES), settings, max_tokens=100, window_lines=7)
    assert [best[0].text for best in stream] == expected


def test_the_best_translation_is_the_first_of_n(translator: Translator) -> None:
    n_best = translator.n_best(LINES, translator.search_config())
    assert [best[0].text for best in n_best] == translator.translate(LINES)
    for line, translations in zip(LINES, n_best, strict=True):
        assert len(translations) == (3 if line.strip() else 1)
        scores = [t.score for t in translations if t.finished]
        assert scores == sorted(scores, reverse=True)


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


@pytest.mark.parametrize(("beam_size", "max_length_a"), [(1, 1.0), (3, 1.0), (1, 0.5)])
def test_a_model_that_copies_gives_back_the_text_or_what_the_limit_left_of_it(
    tokenizer: Tokenizer, beam_size: int, max_length_a: float
) -> None:
    settings = config(beam_size, a=max_length_a, b=1)
    translator = Translator(Copier(tokenizer.vocab_size), tokenizer, settings)
    lines = [line for line in LINES if line.strip()]
    for line, translations in zip(lines, translator.n_best(lines, settings), strict=True):
        best, ids = translations[0], tokenizer.encode(line)
        limit = int(max_length_a * len(ids)) + 1
        assert best.finished == (limit > len(ids))
        assert best.text == (line.strip() if best.finished else tokenizer.decode(ids[:limit]))
        assert best.tokens == tokenizer.pieces(ids[:limit])
        assert best.log_prob == pytest.approx(-0.01 * min(len(ids) + 1, limit), abs=1e-4)


def test_what_the_caller_sets_wins_over_the_models_defaults(translator: Translator) -> None:
    assert translator.search_config() == translator.defaults
    changed = translator.search_config(beam_size=1, length_penalty=0.0, max_length_b=None)
    assert (changed.beam_size, changed.length_penalty, changed.max_length_b) == (1, 0.0, 8)
