"""Tokenizers of whole words: text comes back, rare words are unknown, and the commands work."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from toy import TINY, command, write_corpus

from nmt.config import PreprocessConfig, TokenizerConfig, TokenizerType
from nmt.data.tokenizer import Tokenizer, TokenizerPair
from nmt.data.vocabulary import load_with_symbols, train_tokenizers
from nmt.errors import ConfigError
from nmt.translate.translator import Translator

MARKS = [*".,;:!?()[]{}\"'-/%&§°€+=<>…„“«»¿、。"]
LINES = ['He said: "No!" (twice).', "It's 3.5 kg, or 4", "He said no"]


def train(
    lines: list[str], type: str = "word", symbols: tuple[str, ...] = (), **settings: int
) -> Tokenizer:
    """Train a tokenizer of whole words on lines, which both sides have."""
    tokenizer = TokenizerConfig(type=TokenizerType(type), symbols=list(symbols), **settings)
    trained = train_tokenizers(PreprocessConfig(tokenizer=tokenizer), lambda side: lines)
    assert isinstance(trained, Tokenizer)
    return trained


def test_text_comes_back_with_its_spaces_beside_punctuation() -> None:
    draw = random.Random(1)
    lines = []
    for _ in range(300):
        text = "".join(draw.choices(["word", "7", " ", "{url}", *MARKS], k=draw.randint(1, 12)))
        spaced_url = text.replace("{url}", " {url} ")  # a symbol inside a word is not separated
        lines.append(" ".join(spaced_url.split()))
    spaced = "word ! (word) word - word {url}"
    lines += [*LINES, spaced]
    tokenizer = train(lines, symbols=("{url}",), min_freq=1)
    url = tokenizer.encode("{url}")
    for line in lines:
        ids = tokenizer.encode(line)
        assert tokenizer.unk_id not in ids, line
        assert tokenizer.decode(ids) == line
        assert tokenizer.decode_replacing(ids, {}) == line
        assert ids.count(url[0]) == line.count("{url}")
    ids = tokenizer.encode("word\u00a0! (word)\u202fword   -   word\t\u3000{url}")
    assert tokenizer.decode(ids) == spaced


def test_words_and_marks_are_pieces_from_the_most_to_the_least_frequent() -> None:
    tokenizer = train(LINES, min_freq=3)  # both sides have the lines
    assert tokenizer.all_pieces()[4:] == ["▁He", "▁said", "▁￭.￭"]
    assert tokenizer.split("He said x, He") == ["▁He", "▁said", "▁x▁￭,", "▁He"]


def test_rare_words_are_unknown() -> None:
    once = train(LINES, min_freq=1)
    assert once.pieces(once.encode("It's no")) == ["▁It", "▁￭'￭", "▁s", "▁no"]
    largest = train(LINES, min_freq=1, vocab_size=6)
    assert largest.all_pieces()[4:] == ["▁He", "▁said"]
    assert largest.decode(largest.encode("He never said")) == "He ⁇ said"
    # SentencePiece makes neighbors one unknown token
    assert largest.encode("never ever") == [largest.unk_id]
    words = {1: "so", 2: "ever"}
    assert once.decode_replacing(once.encode("(no no"), words) == "(so ever"
    with pytest.raises(ConfigError, match=r"min_freq=9: no word of the corpus occurs so often"):
        train(LINES, min_freq=9)


def test_equal_text_gives_an_equal_model_that_can_be_adopted(tmp_path: Path) -> None:
    tokenizer = train(LINES, symbols=("<2de>",))
    assert tokenizer.model == train(LINES, symbols=("<2de>",)).model
    path = tmp_path / "word.model"
    path.write_bytes(tokenizer.model)
    assert load_with_symbols(path, ["<2de>"]).model == tokenizer.model
    assert tokenizer.unk_id not in tokenizer.encode("<2de> He said")


def test_tokenized_text_is_split_at_spaces_only() -> None:
    line = "the un@@ known wor@@ d , e.g. this ."
    tokenizer = train([line], "space", min_freq=1)
    assert tokenizer.split(line) == [f"▁{token}" for token in line.split()]
    assert tokenizer.decode(tokenizer.encode(line)) == "the unknown word , e.g. this ."


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_freq": 3}, "min_freq=3: needs tokenizer.type=word or tokenizer.type=space"),
        ({"type": TokenizerType.word, "normalization": "nfkc_cf"}, "change the text instead"),
        ({"type": TokenizerType.word, "vocab_size": 4}, "must be at least 5"),
    ],
)
def test_settings_that_words_lack_are_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TokenizerConfig(**settings)


@pytest.mark.slow
def test_the_commands_work_with_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data_dir = f"data_dir={tmp_path / 'data'}"
    run_dir = tmp_path / "run"
    corpus = [word for word in write_corpus(tmp_path) if not word.startswith("tokenizer.")]
    words = ["tokenizer.type=word", "tokenizer.separate=true", "num_threads=1"]
    assert command("preprocess", corpus, words) == 0
    assert "100.000% have a piece" in capsys.readouterr().out
    assert command("train", TINY, data_dir, f"run_dir={run_dir}", "max_updates=12") == 0
    translator = Translator.load(run_dir, device="cpu", backend="native")
    assert isinstance(translator.tokenizer, TokenizerPair)
    assert translator.tokenizer.src.vocab_size == 4 + 6
    [translation] = translator.translate(["red house"])
    assert set(translation.split()) <= {"rot", "grün", "groß", "Haus", "Baum", "sieht"}
    assert command("export", f"model_dir={run_dir}", f"output={tmp_path / 'ct2'}") == 0
    sampling = [data_dir, f"run_dir={tmp_path / 'other'}", "subword_sampling=0.1"]
    assert command("train", TINY, sampling) == 2
    assert "needs a bpe or unigram tokenizer" in capsys.readouterr().err
    src = ["src=the red house", f"model_dir={tmp_path / 'data'}"]
    assert command("visualize", "what=pieces", src, "tgt=Haus") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["<unk>", "▁red", "▁house"]
    ids = translator.tokenizer.src.encode("red house")
    assert lines[1].split() == ["1", *map(str, ids)]
    assert lines[2:] == ["▁Haus", str(translator.tokenizer.tgt.encode("Haus")[0])]
