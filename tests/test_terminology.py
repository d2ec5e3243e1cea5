"""Hints of glossaries in sources: in training pairs, and in the lines to translate."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from exporting import random_model
from tiny import sentences, tokenizer_config
from toy import WORDS, assert_resumes_exactly, make_run, write_corpus
from toy import command as run_command

from nmt import Translator
from nmt.config import (
    AugmentConfig,
    PreprocessConfig,
    SearchConfig,
    TokenizerConfig,
    TokenizerType,
    TooLong,
)
from nmt.data.augment import TextAugmenter
from nmt.data.terminology import (
    DONE,
    SOURCE,
    TARGET,
    HintSampler,
    Term,
    add_hints,
    check_hint_symbols,
    remove_hints,
)
from nmt.data.tokenizer import LANGUAGE, Tokenizer
from nmt.data.vocabulary import train_tokenizer, train_tokenizers
from nmt.data.word_alignment import WordAligner
from nmt.errors import ConfigError
from nmt.search.glossary import load_glossary
from nmt.search.protect import find_protected
from nmt.search.request import SearchRequest
from nmt.translate.options import LineOptions
from nmt.translate.windows import Window, encode_window

SYMBOLS = [SOURCE, TARGET, DONE]
HINT = re.compile(f"{SOURCE}(.*?){TARGET} (.*?){DONE}")


@pytest.fixture(scope="module")
def hint_tokenizer() -> Tokenizer:
    texts = [*sentences(200), *[" ".join([*WORDS, *WORDS.values()])] * 100]  # words are pieces
    return train_tokenizer(texts, tokenizer_config(byte_fallback=True), SYMBOLS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, hint_tokenizer: Tokenizer) -> Path:
    return random_model(tmp_path_factory.mktemp("terms") / "model", hint_tokenizer)


def test_words_keep_their_pieces_beside_hints(hint_tokenizer: Tokenizer) -> None:
    text = "(the house) sees a tree, house"
    targets = {"the": "das", "house": "grünes Haus", "tree": "Baum"}
    terms = [Term(m.start(), m.end(), targets[m[0]]) for m in re.finditer("the|house|tree", text)]
    assert add_hints(text[5:], [Term(0, 5, "Haus")]) == (
        "__source__ house__target__ Haus__done__) sees a tree, house"
    )
    assert add_hints(text, terms).startswith(
        "(__source__the__target__ das__done____source__ house__target__ grünes Haus__done__) sees"
    )
    for line, line_terms in ((text[1:], [Term(0, 3, "das")]), (text, terms[1:]), (text, [])):
        plain = hint_tokenizer.pieces(hint_tokenizer.encode(line))
        hinted = hint_tokenizer.pieces(hint_tokenizer.encode(add_hints(line, line_terms)))
        without_hints = remove_hints(hinted)
        assert without_hints.pieces == plain
        is_target = False
        for piece, position in zip(hinted, without_hints.positions, strict=True):
            if piece == SOURCE:
                first_position = position
            is_target = is_target or piece == TARGET
            if is_target:  # in a hint, the first piece of the term
                assert position == first_position
            elif piece not in ("▁", SOURCE):
                assert plain[position] == piece
            is_target = is_target and piece != DONE


def test_placeholders_and_addresses_get_no_hints() -> None:
    glossary = load_glossary(("name\tName", "example\tBeispiel", "dog\tHund"))
    for text in ("{{ name }}", "%(name)s", "{name}", "www.example.com/x", "<b name='x'>"):
        hinted = f"{text}{SOURCE} dog{TARGET} Hund{DONE}"
        assert glossary.add_hints(f"{text} dog") == hinted
    assert SOURCE in glossary.add_hints("name")


def test_texts_to_protect_end_before_a_hint(hint_tokenizer: Tokenizer) -> None:
    search = SearchConfig(beam_size=2, protect=True, glossary=["tree\tBaum"], glossary_mode="soft")
    options = LineOptions(hints=tuple(search.hints), protect=True)
    lines = ["tree", "$name tree", "www.example.com tree", "a@b.com tree", "{x} tree tree {y}"]
    encoded = encode_window(Window(0, lines), hint_tokenizer, options)
    request = SearchRequest([segments[0].ids for segments in encoded.segments], search)
    for i, line in enumerate(lines):
        assert request.decode_source(i, hint_tokenizer) == line
        assert request.find_protected(i, hint_tokenizer) == find_protected(line)


def test_the_first_line_of_a_glossary_gives_the_hint() -> None:
    glossary = load_glossary(("dog\tKöter", "dog\tHund"))
    lines = tuple(glossary.select_lines(["a dog"]))
    assert load_glossary(lines).add_hints("dog") == glossary.add_hints("dog")
    assert "Köter" in glossary.add_hints("dog")


def test_vocabularies_that_cannot_separate_the_symbols_are_refused() -> None:
    words = TokenizerConfig(type=TokenizerType.word, min_freq=1, symbols=SYMBOLS)
    tokenizer = train_tokenizers(PreprocessConfig(tokenizer=words), lambda side: ["a dog"])
    with pytest.raises(ConfigError, match=r"glossary_mode=soft needs .*type=bpe or unigram$"):
        check_hint_symbols("glossary_mode=soft", tokenizer.src)
    assert not any(LANGUAGE.fullmatch(symbol) for symbol in SYMBOLS)
    assert LANGUAGE.fullmatch("__en__")


def test_training_pairs_get_hints_of_their_aligned_words(hint_tokenizer: Tokenizer) -> None:
    draw = random.Random(1)
    lines = []
    for _ in range(300):  # words in the reverse order, so that positions alone do not align them
        words = draw.choices(list(WORDS), k=draw.randint(2, 4))
        lines.append((" ".join(words) + ".", " ".join(WORDS[w] for w in reversed(words)) + "."))
    pairs = [(hint_tokenizer.encode(src), hint_tokenizer.encode(tgt)) for src, tgt in lines]
    size = hint_tokenizer.vocab_size
    aligner = WordAligner(pairs, src_vocab_size=size, tgt_vocab_size=size)
    augment = TextAugmenter(AugmentConfig(terminology=0.5), 1, hint_tokenizer, [], 200, aligner)
    num_changed = 0
    num_right = 0
    num_random = 0
    augmented = augment(pairs, 3, range(len(pairs)))
    for row, (src_ids, tgt_ids) in enumerate(augmented):
        assert augment([pairs[row]], 3, [row]) == [(src_ids, tgt_ids)]
        src = hint_tokenizer.decode(src_ids)
        tgt = hint_tokenizer.decode(tgt_ids)
        assert HINT.sub(r"\1", src).strip() == lines[row][0]
        hints = HINT.findall(src)
        assert len(hints) <= 3
        num_changed += len(hints) > 0
        for source, target in hints:
            assert target in tgt
            words = [WORDS[word] for word in reversed(source.split())]
            num_right += " ".join(words) == target
            num_random += target not in lines[row][1]
    assert num_changed > 75
    num_terms = num_right + num_random
    assert num_terms > 75
    assert 0.2 < num_random / num_terms < 0.4


def test_models_without_the_symbols_of_hints_refuse_them(
    tokenizer: Tokenizer, random_data: Path, tmp_path: Path
) -> None:
    translator = Translator.load(random_model(tmp_path / "model", tokenizer), device="cpu")
    message = r"^glossary_mode=soft needs .* tokenizer.symbols=\[__source__,__target__,__done__\]$"
    with pytest.raises(ConfigError, match=message):
        translator.translate(["a"], glossary=["a\tb"], glossary_mode="soft")
    translator.translate(["a"], glossary_mode="soft")  # nothing to add
    with pytest.raises(ConfigError, match=r"^augment.terminology needs .* tokenizer.symbols="):
        make_run(random_data, tmp_path, augment=AugmentConfig(terminology=0.1))


SHORT = {"max_length_a": 0.0, "max_length_b": 8}
GLOSSARY = ["tree\tBaum|Bäume", "house\tHaus"]
LINES = {
    "the small house sees": "the small__source__ house__target__ Haus__done__ sees",
    "House": "__source__ House__target__ Haus__done__",
    "a tree tree": (
        "a__source__ tree__target__ Baum__done____source__ tree__target__ Baum__done__"
    ),
    "the green": "the green",
    "": "",
}


def test_symbols_and_placeholders_of_training_pairs_get_no_hints() -> None:
    config = tokenizer_config(byte_fallback=True)
    tokenizer = train_tokenizer(sentences(200), config, [*SYMBOLS, "<sep>", "[x]"])
    line = "the house <sep> a [x] green {name} tree"
    ids = tokenizer.encode(line)
    size = tokenizer.vocab_size
    aligner = WordAligner([(ids, ids)] * 5, src_vocab_size=size, tgt_vocab_size=size)
    draw = HintSampler(tokenizer, aligner)
    num_hints = 0
    for seed in range(30):
        [(src, tgt)] = draw([(line, line)], [random.Random(seed)])
        assert HINT.sub(r"\1", src).split() == line.split()
        for word in ("<sep>", "[x]", "{name}"):
            assert f" {word} " in tgt
            assert not any(word.strip("<>[]{}") in hint for _, hint in HINT.findall(src))
        num_hints += len(HINT.findall(src))
    assert num_hints > 25


def test_words_of_hints_keep_their_vowel_signs(hint_tokenizer: Tokenizer) -> None:
    src = "in the houses."
    tgt = "घरों में।"
    ids = (hint_tokenizer.encode(src), hint_tokenizer.encode(tgt))  # no pieces but bytes
    size = hint_tokenizer.vocab_size
    aligner = WordAligner([ids] * 3, src_vocab_size=size, tgt_vocab_size=size)
    draw = HintSampler(hint_tokenizer, aligner)
    targets = set()
    for seed in range(30):
        [(hinted, _)] = draw([(src, tgt)], [random.Random(seed)])
        targets.update(word for _, target in HINT.findall(hinted) for word in target.split())
    words = {word for word in targets if not word.isascii() and word[0] in tgt}
    assert words
    assert words <= {"घरों", "में"}


@pytest.mark.parametrize("backend", ["native", "ctranslate2"])
def test_a_soft_glossary_translates_lines_with_hints(model: Path, backend: str) -> None:
    translator = Translator.load(model, device="cpu", backend=backend, num_threads=1)
    for options in ({"beam_size": 2, **SHORT}, {"beam_size": 1, **SHORT}):
        soft = {**options, "glossary": GLOSSARY, "glossary_mode": "soft"}
        expected = translator.translate(list(LINES.values()), **options)
        assert translator.translate(list(LINES), **soft) == expected
        [capitals] = translator.translate(["THE GREEN TREE"], **soft)
        hinted = "The green__source__ tree__target__ Baum__done__"
        assert [capitals] == [translator.translate([hinted], **options)[0].upper()]
    if backend == "native":
        soft["beam_size"] = 2
        assert translator.translate(list(LINES), **soft, protect=True) == translator.translate(
            list(LINES), **soft
        )
    with pytest.raises(ConfigError, match=r"^unk_replacement=true: does not work with glossary"):
        translator.translate(list(LINES), **soft, unk_replacement=True)


def test_alignments_are_without_hints(model: Path) -> None:
    translator = Translator.load(model, device="cpu", backend="native")
    options = {"beam_size": 2, "alignment": True, **SHORT}
    soft = {"glossary": GLOSSARY, "glossary_mode": "soft"}
    plain = translator.n_best(list(LINES), **options)
    results = translator.n_best(list(LINES), **options, **soft)
    for before, after in zip(plain, results, strict=True):
        assert after.source_tokens == before.source_tokens
        for translation in after:
            assert len(translation.alignment or []) == len(translation.tokens)
            assert all(i < len(after.source_tokens) for i in translation.alignment or [])


def test_long_lines_are_divided_between_hints(hint_tokenizer: Tokenizer) -> None:
    line = "the tree. a small house sees the green tree and the house. the tree"
    options = LineOptions(max_source_length=24, hints=tuple(GLOSSARY))
    encoded = encode_window(Window(0, [line]), hint_tokenizer, options)
    texts = [hint_tokenizer.decode(segment.ids) for segment in encoded.segments[0]]
    assert len(texts) > 2
    assert len(HINT.findall(" ".join(texts))) == 5
    assert not any(symbol in HINT.sub("", text) for text in texts for symbol in SYMBOLS)


def test_truncation_cuts_no_hint(hint_tokenizer: Tokenizer) -> None:
    line = "the tree house a tree"
    plain = hint_tokenizer.encode(line)
    glossary = tuple(f"{entry} {entry[-4:]}" for entry in GLOSSARY)  # hints of many pieces
    ids = hint_tokenizer.encode(load_glossary(glossary).add_hints(line))
    for max_source_length in range(8, len(ids) + 1):
        options = LineOptions(
            max_source_length=max_source_length, too_long=TooLong.truncate, hints=glossary
        )
        encoded = encode_window(Window(0, [line]), hint_tokenizer, options)
        [[segment]] = encoded.segments
        assert len(segment.ids) + encoded.num_truncated[0] == len(ids)
        pieces = hint_tokenizer.pieces(segment.ids)
        assert [pieces.count(symbol) for symbol in SYMBOLS] == [pieces.count(SOURCE)] * 3
        plain_pieces = remove_hints(pieces).pieces
        assert plain_pieces == hint_tokenizer.pieces(plain)[: len(plain_pieces)]


@pytest.mark.slow
def test_runs_with_hints_resume_exactly(tmp_path: Path) -> None:
    symbols = f"tokenizer.symbols=[{','.join(SYMBOLS)}]"
    assert run_command("preprocess", write_corpus(tmp_path), symbols) == 0
    settings = ["augment.terminology=0.5", "guided_alignment=0.1", "valid_bleu=false"]
    assert_resumes_exactly(tmp_path / "data", tmp_path, settings, ends=(4, 8))
