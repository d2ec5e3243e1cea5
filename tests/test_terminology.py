"""Hints of glossaries in sources: in training pairs, and in the lines to translate."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
from exporting import random_model
from tiny import sentences, tokenizer_config
from toy import WORDS, assert_resumes_exactly, make_run, train, write_corpus
from toy import command as run_command

from nmt import Translator
from nmt.config import (
    AugmentConfig,
    PreprocessConfig,
    SearchConfig,
    StageConfig,
    TokenizerConfig,
    TokenizerType,
    TooLong,
    TrainConfig,
)
from nmt.data.augment import TextAugmenter
from nmt.data.hints import DONE, SOURCE, TARGET, Term, add_hints, check_hint_symbols, remove_hints
from nmt.data.lemmas import read_lemmas
from nmt.data.terminology import HintSampler
from nmt.data.tokenizer import LANGUAGE_PATTERN, Tokenizer
from nmt.data.vocabulary import train_tokenizer, train_tokenizers
from nmt.data.word_alignment import WordAligner
from nmt.errors import ConfigError, DataError
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
    assert not any(LANGUAGE_PATTERN.fullmatch(symbol) for symbol in SYMBOLS)
    assert LANGUAGE_PATTERN.fullmatch("__en__")


def test_training_pairs_get_hints_of_their_aligned_words(hint_tokenizer: Tokenizer) -> None:
    draw = random.Random(1)
    lines = []
    for _ in range(300):  # in the reverse order: equal positions would align other words
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
    assert num_random / num_terms == pytest.approx(0.5, abs=0.1)


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
    for plain_line, hinted_line in zip(plain, results, strict=True):
        assert hinted_line.source_tokens == plain_line.source_tokens
        for translation in hinted_line:
            assert len(translation.alignment or []) == len(translation.tokens)
            assert all(i < len(hinted_line.source_tokens) for i in translation.alignment or [])


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
    (tmp_path / "lemmas.tsv").write_text("Haus\tHäuschen\nrot\tröt\n", encoding="utf-8")
    settings.append(f"lemmas={tmp_path / 'lemmas.tsv'}")
    assert_resumes_exactly(tmp_path / "data", tmp_path, settings, ends=(4, 8))


ENDINGS = {"one": "a", "two": "e", "of": "o"}  # the word before a noun determines its form
NOUNS = {"animal": ["hund", "katz", "maus"], "thing": ["tisch", "stuhl", "lamp"]}
SMALL_MODEL = ["model.num_encoder_layers=2", "model.num_decoder_layers=2", "model.d_model=64"]
SMALL_MODEL += ["model.d_ff=128", "model.num_heads=4", "model.dropout=0", "label_smoothing=0"]
SMALL_MODEL += ["tokens_per_update=600", "max_tokens=600", "optimizer.warmup_steps=50"]
SMALL_MODEL += ["optimizer.schedule=inverse_sqrt", "optimizer.peak_learning_rate=0.005"]
STEMS = [stem for stems in NOUNS.values() for stem in stems]


def write_lemmas(folder: Path) -> Path:
    """Write the forms and lemmas of all nouns; a lemma is a stem with the ending "u"."""
    lines = ["# form and lemma\n", "\n"]
    for stem in STEMS:
        lines += [f"{stem}{ending}\t{stem}u\n" for ending in ENDINGS.values()]
    path = folder / "lemmas.tsv"
    path.write_text("".join(lines), encoding="utf-8")
    return path


def write_inflected_corpus(folder: Path) -> list[str]:
    """Write pairs whose nouns have several translations, and a form that depends on a neighbor.

    Returns the arguments of nmt-preprocess.
    """
    draw = random.Random(1)
    arguments = [f"tokenizer.symbols=[{','.join(SYMBOLS)}]", f"data_dir={folder / 'data'}"]
    arguments.append("tokenizer.vocab_size=330")
    for split, size in {"train": 1500, "valid": 20, "test": 20}.items():
        lines: dict[str, list[str]] = {"src": [], "tgt": []}
        for _ in range(size):
            src_words = []
            tgt_words = []
            for _ in range(draw.randint(1, 2)):
                determiner = draw.choice(list(ENDINGS))
                noun = draw.choice(list(NOUNS))
                src_words += [determiner, noun]
                tgt_words += [determiner.upper(), draw.choice(NOUNS[noun]) + ENDINGS[determiner]]
            lines["src"].append(" ".join(src_words) + "\n")
            lines["tgt"].append(" ".join(tgt_words) + "\n")
        for side, side_lines in lines.items():
            path = folder / f"{split}.{side}.txt"
            path.write_text("".join(side_lines), encoding="utf-8")
            arguments.append(f"data.{split}.{side}={path}")
    return arguments


def test_most_hints_have_the_lemmas_of_words_that_keep_their_form(
    hint_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    draw = random.Random(1)
    texts = []
    for _ in range(300):
        words = draw.choices(list(WORDS), k=3)
        texts.append((" ".join(words), " ".join(WORDS[word] + "en" for word in words)))
    pairs = [(hint_tokenizer.encode(src), hint_tokenizer.encode(tgt)) for src, tgt in texts]
    size = hint_tokenizer.vocab_size
    aligner = WordAligner(pairs, src_vocab_size=size, tgt_vocab_size=size)
    path = tmp_path / "lemmas.tsv"
    lemmas = {f"{word}en": word for word in WORDS.values()}
    path.write_text("".join(f"{form}\t{lemma}\n" for form, lemma in lemmas.items()))
    draw_hints = HintSampler(hint_tokenizer, aligner, read_lemmas(str(path)))
    num_lemmas = 0
    num_forms = 0
    rngs = [random.Random(i) for i in range(300)]
    hinted_texts = draw_hints(texts, rngs)
    assert hinted_texts != HintSampler(hint_tokenizer, aligner)(texts, rngs)
    for row, (src, tgt) in enumerate(hinted_texts):
        assert HINT.sub(r"\1", src).strip() == texts[row][0]
        random_targets = set()
        for source, target in HINT.findall(src):
            hint_lemmas = [WORDS[word] for word in source.split()]
            if target.split() != hint_lemmas:
                random_targets.add(target)
        # the target keeps its forms: no lemma replaces one
        assert set(tgt.split()) <= set(lemmas) | random_targets
        for source, target in HINT.findall(src):
            word = WORDS.get(source.strip(), "-")  # terms of several words do not count
            num_forms += target == f"{word}en"
            num_lemmas += target == word
    assert num_lemmas > 60
    assert num_lemmas / (num_lemmas + num_forms) == pytest.approx(0.7, abs=0.1)


def test_lemmas_are_found_for_words_with_a_capital_and_in_all_forms(tmp_path: Path) -> None:
    path = tmp_path / "lemmas.tsv"
    lines = ["# UDPipe", "", "Häuser\tHaus\tNOUN", "läuft\tlaufen", "lief\tlaufen"]
    lines += ["Weine\tWein", "weine\tweinen", "Weine\tweinen", "Cafe\u0301s\tCafé"]
    path.write_text("\ufeff" + "\n".join(lines), encoding="utf-8")
    lemmas = read_lemmas(str(path))
    assert lemmas.lemmatize("Läuft die Häuser Weine Cafés") == "laufen die Haus Wein Café"
    assert lemmas.forms("läuft") == ["läuft", "laufen", "lief"]
    assert lemmas.forms("Haus") == ["Haus", "Häuser"]
    assert set(lemmas.forms("Wein")) == {"Wein", "Weine"}
    assert lemmas.forms("die") == ["die"]
    for line in ("Haus", "Haus\t", "\tHaus"):
        path.write_text(f"# a comment\n{line}\n", encoding="utf-8")
        with pytest.raises(DataError, match=r"lemmas.tsv:2: .* is not FORM<TAB>LEMMA"):
            read_lemmas(str(path))
    with pytest.raises(ConfigError, match=r"^lemmas=x.tsv: needs augment.terminology"):
        TrainConfig(lemmas="x.tsv")
    TrainConfig(lemmas="x.tsv", stages={"a": StageConfig(start=1, augment={"terminology": 0.1})})


@pytest.mark.slow
def test_a_model_learns_to_inflect_the_lemmas_of_a_glossary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("preprocess", write_inflected_corpus(tmp_path)) == 0
    lemmas = write_lemmas(tmp_path)
    settings = [f"lemmas={lemmas}", "augment.terminology=0.9", "valid_bleu=false", *SMALL_MODEL]
    assert train(tmp_path / "data", tmp_path / "run", settings, "max_updates=150") == 0
    translator = Translator.load(tmp_path / "run", device="cpu", backend="native")
    lines = [f"{determiner} {noun}" for noun in NOUNS for determiner in ENDINGS]
    num_right = 0
    for index in range(3):
        glossary = [f"{noun}\t{stems[index]}u" for noun, stems in NOUNS.items()]
        translations = translator.translate(lines, glossary=glossary, glossary_mode="soft")
        for line, translation in zip(lines, translations, strict=True):
            determiner, noun = line.split()
            form = NOUNS[noun][index] + ENDINGS[determiner]
            num_right += translation == f"{determiner.upper()} {form}"
    assert num_right >= 16  # of 18; one of 3 would be right by chance

    # a term counts in all forms of its lemma
    arguments = []
    for name, texts in {"src": lines, "out": translations, "terms": glossary}.items():
        path = tmp_path / name
        path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    arguments = [f"src={tmp_path / 'src'}", f"glossary={tmp_path / 'terms'}", "format=json"]
    arguments += [f"{key}={tmp_path / 'out'}" for key in ("hypotheses", "references")]
    for lemma_arguments, num_kept in (([], 0), ([f"lemmas={lemmas}"], 6)):
        capsys.readouterr()
        assert run_command("evaluate", arguments, lemma_arguments) == 0
        [*_, terms] = json.loads(capsys.readouterr().out)["scores"]
        assert terms["detail"] == {"kept": num_kept, "total": 6}
