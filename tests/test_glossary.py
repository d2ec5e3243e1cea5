"""Glossaries: terms found in a source, search with terms, and translations."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from exporting import short_sentences
from growth import assert_linear_time
from searching import (
    SYMBOLS,
    TOKENIZER,
    ToyStepper,
    assert_same,
    config,
    enumerate_hypotheses,
    find,
    source_ids,
    source_rows,
    toy_source,
)
from tiny import EOS, UNK, tiny_model, train_sentencepiece
from torch import Tensor
from toy import command
from translating import translate, write_lines

from nmt import Translator
from nmt.config import SearchConfig
from nmt.data.lemmas import Lemmas
from nmt.data.tokenizer import Tokenizer
from nmt.errors import ConfigError, NmtError
from nmt.search.glossary import count_terms, encode_spellings, load_glossary, mark_word_ends
from nmt.search.request import SearchRequest
from nmt.search.stepper import ModelStepper
from nmt.search.term_search import SentenceTerms, TermSearch

ALL_END_WORDS = [True] * SYMBOLS
FEW_END_WORDS = [token in (EOS, 4) for token in range(SYMBOLS)]
TERMS: list[list[Any]] = [  # spellings of the terms of a sentence
    [[[4]]],
    [[[4, 5, 4]]],
    [[[5, 5]], [[4]]],
    [[[4]], [[4]]],
    [[[4, 5], [5, 5]], [[UNK, 4]]],
    [[[4, 4]], [[4, 4]]],
]
WIDE_BEAM_TERMS = [pytest.param(terms, marks=pytest.mark.slow) for terms in TERMS[:-2]] + TERMS[-2:]


def contains_terms(
    tokens: Sequence[int], terms: Sequence[Any], ends_previous_word: Sequence[bool]
) -> bool:
    """Return whether tokens that end with EOS contain the terms, each as a whole word.

    A term that is listed n times must end at n places.
    """
    for spellings in terms:
        num_found = 0
        for end in range(1, len(tokens)):
            is_end = any(
                list(tokens[max(0, end - len(ids)) : end]) == list(ids) for ids in spellings
            )
            num_found += is_end and ends_previous_word[tokens[end]]
        if num_found < terms.count(spellings):
            return False
    return tokens[-1] == EOS


class WordContinuingStepper(ToyStepper):
    """A toy model that nearly always continues the word after token 4."""

    def step(self, tokens: Tensor, state: Any) -> Tensor:
        log_probs = super().step(tokens, state)
        after_4 = (tokens == 4).nonzero()
        log_probs[after_4, [token for token in range(SYMBOLS) if FEW_END_WORDS[token]]] -= 9
        return log_probs


def find_with_terms(
    source: Any,
    settings: SearchConfig,
    terms: Sequence[Any],
    ends_previous_word: Sequence[bool],
    stepper: ToyStepper | None = None,
) -> list[Any]:
    request = SearchRequest(source_rows(source), settings)
    sentence_terms = [SentenceTerms(item, ends_previous_word) if item else None for item in terms]
    search = TermSearch(
        stepper or ToyStepper(),
        request,
        TOKENIZER,
        terms=sentence_terms,
        ends_previous_word=ends_previous_word,
    )
    while search.num_live:
        search.step()
    return [search.result(i) for i in range(len(terms))]


@pytest.mark.parametrize("terms", WIDE_BEAM_TERMS, ids=str)
def test_a_wide_beam_finds_the_best_of_all_sequences_with_the_terms(terms: list[Any]) -> None:
    source = toy_source(4, 3)
    for ends_previous_word in (ALL_END_WORDS, [token < 5 for token in range(SYMBOLS)]):
        settings = config(400, b=6)
        results = find_with_terms(source, settings, [terms, None], ends_previous_word)
        expected = []
        for hypothesis in enumerate_hypotheses(source_ids(source, 0), 6, settings):
            if contains_terms(hypothesis.tokens, terms, ends_previous_word):
                expected.append(hypothesis)
        finished = [hypothesis for hypothesis in results[0] if hypothesis.finished]
        assert_same(finished[:20], expected[:20], case=ends_previous_word)


@pytest.mark.parametrize("terms", TERMS, ids=str)
def test_a_narrow_beam_keeps_all_terms_and_leaves_other_sentences_as_they_are(
    terms: list[Any],
) -> None:
    source = toy_source(6, 2, 9, 4)
    for beam_size, ends_previous_word in itertools.product((2, 4), (ALL_END_WORDS, FEW_END_WORDS)):
        settings = config(beam_size, b=14)
        results = find_with_terms(source, settings, [None, terms, None, terms], ends_previous_word)
        plain = find(ToyStepper(), source, settings)
        assert results[0] == plain[0]
        assert results[2] == plain[2]
        for hypotheses in (results[1], results[3]):
            assert contains_terms(hypotheses[0].tokens, terms, ends_previous_word)


def test_a_word_ends_after_a_term_even_if_the_model_prefers_to_continue_it() -> None:
    source = toy_source(4)
    [hypotheses] = find_with_terms(
        source, config(2, b=14), [[[[4]]]], FEW_END_WORDS, WordContinuingStepper()
    )
    assert contains_terms(hypotheses[0].tokens, [[[4]]], FEW_END_WORDS)


def test_the_longest_term_is_found_at_word_boundaries() -> None:
    lines = (
        "New York\tNeuyork",
        "new\tNeu",
        "york\tJork|Jorks",
        "May\tMai\tcase",
        "may\tdarf",
        "haus\tX\tpart",
    )
    lines += ("C++\tC++", "東京\tTokio")
    glossary = load_glossary(lines)
    assert glossary.find("new  york, York and Yorks") == [("Neuyork",), ("Jork", "Jorks")]
    assert glossary.find("May I? I may.") == [("Mai",), ("darf",)]
    assert glossary.find("Das Rathaus am Haus") == [("X",), ("X",)]
    assert glossary.find("New Haus") == [("Neu",), ("X",)]
    assert glossary.find("I write C++.") == [("C++",)]
    assert glossary.find("私は東京にいる") == [("Tokio",)]
    assert glossary.find("") == []
    price = "10\u00a0€｜EUR"  # a space that does not break, and a bar that divides no forms
    assert load_glossary((f"ｅｕｒｏ\t{price}",)).find("the Euro") == [(price,)]
    merged = load_glossary(("a\tb", "a\tc", "a\tb"))
    assert merged.find("A") == [("b", "c")]


@pytest.mark.parametrize(
    "line", ["\tx", "x\t", "x\t|", "x\ty\tbold", "x\ty\x07", "a\u202eb\ty", " \ty"]
)
def test_a_line_without_source_and_target_is_an_error(line: str) -> None:
    with pytest.raises(ConfigError, match=r"^glossary: .*; write "):
        load_glossary((line,))


def test_random_glossaries_are_refused_in_a_line_or_searched() -> None:
    draw = random.Random(3)
    alphabet = "aaaabbbb   |#,é東-'\x00\u202e\ufeff"
    num_valid = 0
    messages = []
    for _ in range(1000):
        lines = []
        for _ in range(draw.randint(0, 3)):
            fields = ["".join(draw.choices(alphabet, k=draw.randint(0, 4))) for _ in range(2)]
            lines.append(draw.choice("\t\t\t\t ").join(fields))
        text = "".join(draw.choices("ab é東-'", k=20))
        try:
            terms = load_glossary(tuple(lines)).find(text)
        except NmtError as error:
            messages.append(str(error))
        else:
            num_valid += bool(terms)
            assert all(target for targets in terms for target in targets)
    assert num_valid > 10
    assert len(messages) > 20
    assert all(message.isprintable() for message in messages)


def test_terms_within_one_character_are_copied_once() -> None:
    glossary = load_glossary(("1\tx\tcase", "2\ty\tcase"))
    assert glossary.keep_case("DRINK ½ CUP", "drink ½ cup") == "drink ½ cup"


@pytest.mark.slow
def test_a_glossary_of_100_000_terms_is_searched_quickly() -> None:
    glossary = load_glossary(tuple(f"term {i}\tZiel {i}" for i in range(100_000)))
    assert glossary.find("a term 99999 and term 7") == [("Ziel 99999",), ("Ziel 7",)]


def test_the_time_for_terms_grows_with_the_length_of_a_line_and_not_faster() -> None:
    glossary = load_glossary(("EU\tUE\tcase", "dog\tHund"))

    def keep_case(size: int) -> None:
        text = "EU " * size
        assert glossary.keep_case(text, text.lower()) == text

    def add_hints(size: int) -> None:
        assert glossary.add_hints("dog {dog} " * size).count("Hund") == size

    assert_linear_time(keep_case, 60_000)
    assert_linear_time(add_hints, 4000)


def test_spellings_are_whole_words_with_and_without_a_capital(tokenizer: Tokenizer) -> None:
    spellings = encode_spellings(("haus", "Tür"), tokenizer)
    assert [tokenizer.decode(ids) for ids in spellings] == ["haus", "Haus", "Tür"]
    ends_word = mark_word_ends(tokenizer)
    assert ends_word[tokenizer.eos_id]
    for ids in spellings:
        assert ends_word[ids[0]]
        assert not any(ends_word[token] for token in ids[1:])


def test_terms_are_counted_as_whole_words_and_as_often_as_in_the_source() -> None:
    glossary = load_glossary(("dog\tHund|Hunde", "C++\tC++", "tokyo\t東京", "us\tuns"))
    assert count_terms(glossary, ["dog dog dog"], ["Hund, hunde und Hunde."]) == (2, 3)
    assert count_terms(glossary, ["a dog"], ["der Hundehund"]) == (0, 1)
    assert count_terms(glossary, ["A DOG"], ["EIN HUND"]) == (1, 1)
    assert count_terms(glossary, ["C++ for us", "tokyo"], ["C++ Uns", "私は東京にいる"]) == (3, 3)
    titled = load_glossary(("light switch\ttoller lichtschalter",))
    assert count_terms(titled, ["A Light Switch Here"], ["Ein Toller Lichtschalter Hier"]) == (1, 1)
    spaced = load_glossary(("ten\t10\u00a0€",))
    assert count_terms(spaced, ["ten ten"], ["10 € 10\u00a0€"]) == (2, 2)
    assert count_terms(glossary, ["none"], ["Hund"]) == (0, 0)


def test_an_error_shows_the_start_of_a_long_glossary() -> None:
    lines = [f"dog {number}\tHund {number}" for number in range(1000)]
    with pytest.raises(
        ConfigError, match=r"^glossary=dog 0\tHund 0,.*\.\.\.: needs beam_size=2"
    ) as e:
        SearchConfig(glossary=lines, beam_size=1)
    assert len(str(e.value)) < 300


def test_terms_are_counted_in_all_forms_of_their_lemmas() -> None:
    pairs = [("Hunde", "Hund"), ("Hunden", "Hund"), ("grüne", "grün"), ("grünen", "grün")]
    lemmas = Lemmas([*pairs, ("Bäume", "Baum"), ("C++s", "C++")])
    glossary = load_glossary(("dog\tHund", "green tree\tgrün Baum|Busch", "C++\tC++"))
    for translation, num_kept in {
        "den Hunden": 1,
        "DEN HUNDEN": 1,
        "Hundenapf": 0,
        "ein Busch, Hund": 2,
        "Grünen Bäume, grüne Hunde": 2,
        "grün, Baum": 0,
        "C++s und C++, Hunde": 2,
    }.items():
        count = count_terms(glossary, ["the dog, a green tree, C++"], [translation], lemmas)
        assert count == (num_kept, 3), translation
    assert count_terms(glossary, ["dog"], ["Hunde"]) == (0, 1)
    assert count_terms(load_glossary(("dog\tHunde",)), ["dog"], ["Hund"], lemmas) == (1, 1)


def test_signs_and_marks_belong_to_words() -> None:
    glossary = load_glossary(("घर\thouse", "İstanbul\tIstanbul", "house\tघर"))
    assert glossary.find("घरों में") == []
    assert glossary.find("घर में, İstanbul'da") == [("house",), ("Istanbul",)]
    assert count_terms(glossary, ["house"], ["घरों में"]).num_translated == 0
    assert count_terms(glossary, ["house"], ["घर में"]).num_translated == 1
    tokenizer = Tokenizer(train_sentencepiece(["घर में घरों"] * 9, vocab_size=12))
    ends_word = dict(zip(tokenizer.all_pieces(), mark_word_ends(tokenizer), strict=True))
    assert {piece for piece, is_end in ends_word.items() if not is_end} >= set("घरों")


def test_an_underscore_belongs_to_a_word_in_search_as_in_counts() -> None:
    assert count_terms(load_glossary(("url\tURL",)), ["the url"], ["URL_x"]) == (0, 1)
    tokenizer = Tokenizer(train_sentencepiece(["ab_c ab ab_c"] * 9, vocab_size=10))
    ends_word = dict(zip(tokenizer.all_pieces(), mark_word_ends(tokenizer), strict=True))
    underscores = [piece for piece in ends_word if piece.startswith("_")]
    assert underscores
    assert not any(ends_word[piece] for piece in underscores)


def test_the_terms_of_given_translations_are_scored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_lines(tmp_path / "src", ["a dog", "two dogs", "no dog"])
    hypotheses = write_lines(tmp_path / "hyp", ["ein Hund", "zwei Hunde", "keine Katze"])
    terms = write_lines(tmp_path / "terms", ["dog\tHund"])
    arguments = [f"hypotheses={hypotheses}", f"references={hypotheses}", f"glossary={terms}"]
    assert command("evaluate", [*arguments, f"src={source}", "format=json"]) == 0
    scores = json.loads(capsys.readouterr().out)["scores"]
    assert scores[-1]["name"] == "terms"
    assert scores[-1]["value"] == 50
    assert scores[-1]["detail"] == {"kept": 1, "total": 2}
    assert command("evaluate", arguments) == 2
    assert "glossary=" in capsys.readouterr().err
    assert command("evaluate", [*arguments[:2], f"src={source}"]) == 2
    assert "src=" in capsys.readouterr().err


def test_translations_that_are_cut_at_the_length_limit_keep_their_terms(
    tokenizer: Tokenizer,
) -> None:
    model = tiny_model(3, sharpness=2.0, vocab_size=tokenizer.vocab_size)
    config = SearchConfig(beam_size=4, max_length_a=0, max_length_b=12, loop_guard=False)
    translator = Translator(ModelStepper(model), tokenizer, config)
    for target in ("tree", "the", "house", "grün", "small", "größer"):
        [translations] = translator.n_best(["the house"], glossary=[f"house\t{target}"])
        assert not translations[0].finished
        assert target in translations[0].text.split(), target


def test_a_term_is_repeated_although_other_repeats_are_forbidden(tokenizer: Tokenizer) -> None:
    model = tiny_model(3, sharpness=2.0, vocab_size=tokenizer.vocab_size)
    config = SearchConfig(beam_size=4, max_length_a=0, max_length_b=60)
    translator = Translator(ModelStepper(model), tokenizer, config)
    term = "das größere grüne haus"  # more than 4 tokens, the n-grams of the second search
    options = {"glossary": [f"house\t{term}"]}
    [twice] = translator.n_best(["house house"], **options)
    assert twice[0].searched_again  # by the loop guard
    assert twice[0].text.lower().count(term) == 2
    [forbidding] = translator.translate(["house house"], **options, no_repeat_ngram=3)
    assert forbidding.lower().count(term) == 2


@pytest.mark.slow
def test_translations_contain_the_terms_of_a_glossary(
    trained_model_dir: Path, tmp_path: Path
) -> None:
    model = trained_model_dir
    lines = short_sentences(20)
    translator = Translator.load(model, device="cpu")
    plain = translator.translate(lines, beam_size=4)
    word = lines[0].split()[0]
    glossary = [f"{word}\tXylophon|Xylophone"]
    results = translator.translate(lines, beam_size=4, glossary=glossary)
    for line, plain_text, text in zip(lines, plain, results, strict=True):
        if word.casefold() in line.casefold().split():
            assert "Xylophon" in text
        else:
            assert text == plain_text
    [prefixed] = translator.translate([lines[0]], prefixes=["x y"], beam_size=4, glossary=glossary)
    assert "Xylophon" in prefixed.removeprefix("x y")
    path = tmp_path / "terms.tsv"
    path.write_text(f"# our words\n\n{glossary[0]}\n", encoding="utf-8")
    source = write_lines(tmp_path / "in", lines)
    arguments = [f"model_dir={model}", f"input={source}", f"output={tmp_path / 'out'}"]
    assert translate(*arguments, f"glossary={path}", "beam_size=4") == 0
    written = (tmp_path / "out").read_text(encoding="utf-8").split("\n")[:-1]
    assert written == results
    for options in ({"beam_size": 1}, {"sampling": True}):
        with pytest.raises(ConfigError, match="glossary=.*needs beam_size=2"):
            translator.translate(lines, glossary=glossary, **options)
