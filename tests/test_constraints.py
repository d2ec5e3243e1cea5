"""Constraints of search: control symbols, lengths, forced prefixes, repeats, forbidden phrases."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from exporting import short_sentences
from searching import (
    Sentence,
    ToySettings,
    ToyStepper,
    assert_same,
    config,
    enumerate_hypotheses,
    find,
    score_by_formula,
    source_ids,
    toy_log_probs,
    toy_source,
)
from tiny import BOS, EOS, PAD, UNK, tiny_model
from torch import Tensor
from translating import translate, write_lines

from nmt import Translator
from nmt.data.tokenizer import MappedTokenizer, Tokenizer, Vocabulary
from nmt.errors import ConfigError
from nmt.search.constraints import (
    ForbiddenSequences,
    NoRepeatedNgrams,
    RepetitionPenalty,
    phrase_sequences,
)
from nmt.search.hypotheses import Beam, Hypothesis
from nmt.search.request import SearchRequest
from nmt.search.search import search
from nmt.search.stepper import ModelStepper

CONTROL_TEXT = "the </s> a <pad> <s> <unk> house</s>"
PREFIXES: list[list[int]] = [[4, 5], [], [5], [UNK, 4, 4, 5, 5, 4, 4]]


@pytest.mark.parametrize("alpha", [-0.5, 0.6])
def test_a_forced_prefix_gives_the_best_hypotheses_that_start_with_it(alpha: float) -> None:
    source = toy_source(4, 2, 3, 5)
    settings = config(400, alpha)
    results = find(ToyStepper(), source, settings, prefixes=PREFIXES)
    for row, prefix in enumerate(PREFIXES[:3]):
        all_hypotheses = enumerate_hypotheses(source_ids(source, row), 5, settings)
        expected = [h for h in all_hypotheses if h.tokens[: len(prefix)] == prefix]
        assert_same(results[row], expected)


@pytest.mark.parametrize("beam_size", [1, 4])
def test_a_prefix_beyond_the_limit_may_still_end(beam_size: int) -> None:
    stepper = ToyStepper(ToySettings(eos_bonus=30.0))
    source = toy_source(4, 2, 3, 5)
    settings = config(beam_size)
    best = find(stepper, source, settings, prefixes=PREFIXES)[3][0]
    assert best.tokens == [*PREFIXES[3], EOS]
    assert best.finished
    assert len(best.tokens) > settings.max_length_b
    assert_same(
        [best], [score_by_formula(tuple(best.tokens), source_ids(source, 3), settings, stepper.toy)]
    )


def test_control_symbols_in_a_prefix_are_refused() -> None:
    for control in (PAD, BOS, EOS):
        with pytest.raises(ConfigError, match=f"prefix of sentence 1 contains id {control}"):
            find(ToyStepper(), toy_source(3, 4), config(2), prefixes=[[4], [4, control]])


@pytest.mark.parametrize("beam_size", [1, 3])
def test_no_translation_is_shorter_than_min_length(beam_size: int) -> None:
    stepper = ToyStepper(ToySettings(eos_bonus=9.0))

    def find_best(**changes: Any) -> list[Hypothesis]:
        results = find(stepper, toy_source(4, 2, 6), config(beam_size, **changes))
        return [hypotheses[0] for hypotheses in results]

    assert {len(h.tokens) for h in find_best(b=9)} == {1}
    best = find_best(b=9, min_length=4)
    assert {len(h.tokens) for h in best} == {5}
    assert all(h.finished for h in best)
    assert find_best(b=2, min_length=4) == best  # also above the limit


def test_a_constraint_of_the_caller_is_a_function_of_log_probabilities_and_beam() -> None:
    source = toy_source(4, 3)
    settings = config(400)

    class NoRepetition:
        can_join = False

        def __call__(self, log_probs: Tensor, beam: Beam) -> Tensor:
            if beam.length:
                log_probs.scatter_(1, beam.tokens[:, -1:], float("-inf"))
            return log_probs

    results = find(ToyStepper(), source, settings, constraints=[NoRepetition()])
    for row, hypotheses in enumerate(results):
        all_hypotheses = enumerate_hypotheses(source_ids(source, row), 5, settings)
        allowed = [h for h in all_hypotheses if all(a != b for a, b in pairwise(h.tokens))]
        assert len(allowed) < len(all_hypotheses)
        assert_same(hypotheses, allowed)


def test_a_constraint_of_the_caller_gets_each_hypothesis_with_its_sentence() -> None:
    source = toy_source(4, 2, 6)
    prefixes: set[tuple[int, Sentence]] = set()

    class CheckRows:
        can_join = False

        def __call__(self, log_probs: Tensor, beam: Beam) -> Tensor:
            for row, sentence in enumerate(beam.sentences.tolist()):
                tokens = tuple(beam.tokens[row].tolist())
                if beam.total_log_probs[row] > float("-inf"):
                    prefixes.add((sentence, tokens))
                    expected = toy_log_probs(source_ids(source, sentence), (BOS, *tokens))[4]
                    assert float(log_probs[row, 4]) == pytest.approx(expected, abs=1e-5)
            return log_probs

    find(ToyStepper(), source, config(3, a=1.0, b=3), constraints=[CheckRows()])
    assert {sentence for sentence, _ in prefixes} == {0, 1, 2}
    assert len(prefixes) > 20


# --- control symbols in text


@pytest.mark.parametrize("beam_size", [1, 3])
def test_control_symbols_in_text_stay_text(tokenizer: Tokenizer, beam_size: int) -> None:
    rows = [tokenizer.encode(CONTROL_TEXT), tokenizer.encode("the house")]
    control = {tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id}
    assert not control & set(rows[0])
    assert tokenizer.decode(rows[0]) == CONTROL_TEXT
    model = tiny_model(2, sharpness=2.0, vocab_size=tokenizer.vocab_size)
    request = SearchRequest(rows, config(beam_size, a=1.0, b=8), prefixes=rows)
    results = search(ModelStepper(model), request, tokenizer)
    for hypotheses, prefix in zip(results, rows, strict=True):
        for h in hypotheses:
            assert h.tokens[: len(prefix)] == prefix
            assert not {tokenizer.pad_id, tokenizer.bos_id} & set(h.tokens)
            assert tokenizer.eos_id not in h.tokens[:-1]
            assert tokenizer.decode(h.tokens[:-1]).startswith(tokenizer.decode(prefix))


# --- repetition


def beam_of(rows: list[list[int]]) -> Beam:
    """Return a beam of one hypothesis per sentence."""
    beam = Beam.start(len(rows), torch.device("cpu"))
    for column in torch.tensor(rows).T:
        beam = beam.append(column, torch.zeros(len(rows)), torch.zeros(len(rows)))
    return beam


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_repetition_equals_the_processors_of_transformers(size: int) -> None:
    from transformers import NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

    generator = torch.Generator().manual_seed(size)
    for length in range(9):
        tokens = torch.randint(4, 8, (20, length), generator=generator)
        beam = beam_of(tokens.tolist())
        log_probs = torch.randn(20, 9, generator=generator).log_softmax(dim=1)
        expected = NoRepeatNGramLogitsProcessor(size)(tokens, log_probs.clone())
        assert torch.equal(NoRepeatedNgrams(size)(log_probs.clone(), beam), expected)
        expected = RepetitionPenaltyLogitsProcessor(size + 0.5)(tokens, log_probs.clone())
        assert torch.equal(RepetitionPenalty(size + 0.5)(log_probs.clone(), beam), expected)


def has_repeated_ngram(tokens: tuple[int, ...] | list[int], size: int) -> bool:
    """Return whether some tokens in a row, EOS excluded, occur twice."""
    text = [token for token in tokens if token != EOS]
    ngrams = [tuple(text[i : i + size]) for i in range(len(text) - size + 1)]
    return len(set(ngrams)) < len(ngrams)


@pytest.mark.parametrize("size", [1, 2])
def test_search_finds_the_best_hypotheses_without_a_repeated_ngram(size: int) -> None:
    source = toy_source(4, 2, 3)
    settings = config(400, 0.6, no_repeat_ngram=size)
    results = find(ToyStepper(), source, settings)
    for row, hypotheses in enumerate(results):
        allowed = []
        for hypothesis in enumerate_hypotheses(source_ids(source, row), 5, settings):
            if not has_repeated_ngram(hypothesis.tokens, size):
                allowed.append(hypothesis)
        assert_same(hypotheses, allowed)


def test_a_forced_prefix_may_repeat_but_what_follows_may_not() -> None:
    source = toy_source(4, 2, 3, 5)
    settings = config(3, no_repeat_ngram=1, repetition_penalty=2.0)
    results = find(ToyStepper(), source, settings, prefixes=PREFIXES)
    for prefix, hypotheses in zip(PREFIXES, results, strict=True):
        for hypothesis in hypotheses:
            assert hypothesis.tokens[: len(prefix)] == prefix
            new_tokens = hypothesis.tokens[len(prefix) :]
            assert not set(new_tokens) & set(prefix) - {EOS}
            assert not has_repeated_ngram(new_tokens, 1)
    without_prefix = find(ToyStepper(), source, config(3))
    assert find(ToyStepper(), source, config(3, no_repeat_ngram=9)) == without_prefix


@pytest.mark.slow
def test_forbidden_sequences_equal_those_of_transformers() -> None:
    from transformers import NoBadWordsLogitsProcessor

    generator = torch.Generator().manual_seed(7)
    sequences = [[5], [6, 4], [7, 7], [4, 5, 6], [6, 7, 4]]
    processor = NoBadWordsLogitsProcessor(sequences, eos_token_id=EOS)
    for length in range(1, 9):
        tokens = torch.randint(4, 8, (30, length), generator=generator)
        log_probs = torch.randn(30, 9, generator=generator).log_softmax(dim=1)
        expected = processor(tokens, log_probs.clone())
        changed = ForbiddenSequences(sequences)(log_probs.clone(), beam_of(tokens.tolist()))
        assert torch.equal(changed, expected)
    log_probs = torch.zeros(1, 9)
    changed = ForbiddenSequences(sequences)(log_probs.clone(), beam_of([[]]))
    assert changed[0].isneginf().nonzero().flatten().tolist() == [5]


def test_a_forbidden_phrase_is_found_wherever_it_stands_in_a_translation_with_a_language(
    tokenizer: Tokenizer,
) -> None:
    """A tokenizer of M2M100 puts the target language before every text; the phrase has none."""
    pieces = [*tokenizer.all_pieces(), "__de__"]
    vocabulary = Vocabulary(
        pieces,
        pad_id=tokenizer.pad_id,
        unk_id=tokenizer.unk_id,
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
        tgt_prefix=[len(pieces) - 1],
    )
    mapped = MappedTokenizer(tokenizer.model, vocabulary, vocabulary.tgt_prefix)
    assert mapped.encode("a dog") == [len(pieces) - 1, *tokenizer.encode("a dog")]
    assert phrase_sequences(["a dog"], mapped) == phrase_sequences(["a dog"], tokenizer)


@pytest.mark.slow
def test_no_translation_contains_a_forbidden_phrase(
    trained_model_dir: Path, tmp_path: Path
) -> None:
    model = trained_model_dir
    lines = short_sentences(20)
    native = Translator.load(model, device="cpu", backend="native")
    plain = native.translate(lines)
    counts = Counter(word for line in plain for word in line.split())
    phrases = [word for word, _ in counts.most_common(2)]
    phrases.append(" ".join(plain[0].split()[:2]))
    for backend in ("native", "ctranslate2"):
        translator = Translator.load(model, device="cpu", backend=backend)
        for beam_size in (1, 3):
            options: Any = {"beam_size": beam_size, "forbid": phrases}
            results = translator.translate(lines, **options)
            assert results != plain
            for line in results:
                assert not set(phrases[:2]) & set(line.split()), (backend, line)
                assert phrases[2] not in line
    # sampling, prefixes, sentences that join, and a single one
    samples = native.translate(lines, sampling=True, beam_size=2, forbid=phrases)
    assert not any(phrases[0] in line.split() for line in samples)
    prefixed = native.translate(lines[:3], prefixes=[phrases[0]] * 3, forbid=phrases[:1])
    for line in prefixed:
        assert line.split()[0] == phrases[0]
        assert phrases[0] not in line.split()[1:]
    assert (
        native.translate(lines[:1], forbid=phrases)
        == native.translate(lines[:4], forbid=phrases)[:1]
    )
    path = tmp_path / "phrases.txt"
    path.write_text("\n".join([*phrases, "", ""]), encoding="utf-8")
    source = write_lines(tmp_path / "in", lines)
    output = tmp_path / "out"
    arguments = [f"model_dir={model}", f"input={source}", f"output={output}", f"forbid={path}"]
    assert translate(*arguments) == 0
    expected = native.translate(lines, forbid=phrases)
    assert output.read_text(encoding="utf-8").split("\n")[:-1] == expected
    with pytest.raises(ConfigError, match="forbid=.*must be a list of texts"):
        native.translate(lines, forbid=[" "])
