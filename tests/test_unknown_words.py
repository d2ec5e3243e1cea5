"""`unk_replacement`: unknown tokens of a translation become the source words that they align to."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tiny import tiny_model, tokenizer_config
from translating import translate, write_lines

from nmt import Translator
from nmt.checkpoint import ModelInfo, save_model
from nmt.config import SearchConfig, TooLong
from nmt.data.tokenizer import MappedTokenizer, Tokenizer, Vocabulary
from nmt.data.vocabulary import train_tokenizer
from nmt.search.hypotheses import Hypothesis
from nmt.translate.batch_search import Segment
from nmt.translate.options import LineOptions
from nmt.translate.prepared_lines import PreparedLine
from nmt.translate.results import build_line_results
from nmt.translate.unknown_words import SourceWords
from nmt.translate.windows import EncodedWindow, Window, encode_window

LINES = ["the red house sees a tree", "a big tree sees the house", "the house is red and big"]
SOURCE = "the Öl-house sees a Žižek."


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    """A tokenizer whose pieces are words; all others are unknown."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_writer=model,
        model_type="word",
        vocab_size=13,
        pad_id=0,
        unk_id=1,
        bos_id=2,
        eos_id=3,
        minloglevel=2,
    )
    return Tokenizer(model.getvalue())


@pytest.fixture(scope="module")
def pieces() -> Tokenizer:
    """A tokenizer of pieces without bytes, to which other letters are unknown."""
    config = tokenizer_config(vocab_size=34, byte_fallback=False)
    return train_tokenizer([line for line in LINES for _ in range(9)], config)


def replace_unknown(tokenizer: Tokenizer, line: str, target: str, alignment: list[int]) -> str:
    """Return the text of a translation with the given tokens and alignment."""
    ids = tokenizer.encode(line)
    all_pieces = tokenizer.all_pieces()
    tokens = [all_pieces.index(piece) for piece in [*target.split(), "</s>"]]
    assert len(alignment) == len(tokens) - 1, tokenizer.pieces(tokens)
    hypothesis = Hypothesis(
        tokens, log_prob=0, score=0, finished=True, token_log_probs=[], alignment=[*alignment, 0]
    )
    window = Window(0, [line])
    encoded = EncodedWindow(
        window,
        [[Segment(ids, [])]],
        [0],
        [PreparedLine(line, line)],
        num_target_tag_tokens=0,
    )
    settings = {"n_best": 1, "alignment": False, "unk_replacement": True}
    [result] = build_line_results(encoded, [[hypothesis]], tokenizer, **settings)
    assert result.translations[0].alignment is None
    return result.text


def find_word(source_words: SourceWords, tokenizer: Tokenizer, number: int, position: int) -> str:
    """Return the word for an unknown token that is aligned to a token of a segment, or ""."""
    hypothesis = Hypothesis(
        [tokenizer.unk_id],
        log_prob=0,
        score=0,
        finished=False,
        token_log_probs=[],
        alignment=[position],
    )
    return source_words.find_words(number, hypothesis, tokenizer.unk_id).get(0, "")


def test_a_word_that_is_unknown_on_both_sides_is_copied(words: Tokenizer) -> None:
    assert words.pieces(words.encode("the Xaver sees")) == ["▁the", "<unk>", "▁sees"]
    assert (
        replace_unknown(words, "the Xaver sees", "▁sees <unk> ▁the", [0, 1, 2]) == "sees Xaver the"
    )
    assert (
        replace_unknown(words, "the Xaver-1, sees", "<unk> <unk> ▁house", [1, 0, 2])
        == "Xaver-1 the house"
    )
    assert replace_unknown(words, "a X1 X-2 sees", "<unk> ▁the", [1, 0]) == "X1 X-2 the"
    # the end of the sentence has no word
    assert replace_unknown(words, "the Xaver", "<unk> ▁sees", [2, 0]).split() == ["⁇", "sees"]


def test_a_token_inside_a_word_brings_the_whole_word(pieces: Tokenizer) -> None:
    ids = pieces.encode(SOURCE)
    surfaces = [piece.replace("▁", " ") for piece in pieces.split(SOURCE)]
    assert pieces.unk_id in ids
    assert len(surfaces) == len(ids)
    assert "".join(surfaces).strip() == SOURCE
    source_words = SourceWords(SOURCE, [Segment(ids, [])], pieces)
    for position, surface in enumerate(surfaces):
        word = find_word(source_words, pieces, 0, position)
        assert word in ("the", "Öl-house", "sees", "a", "Žižek", "." if "." in surface else "the")
        assert set(surface.strip(" .")) <= set(word)


def test_words_keep_their_vowel_signs(words: Tokenizer) -> None:
    assert replace_unknown(words, "the घरों a", "<unk> ▁the", [1, 0]) == "घरों the"


def test_in_chinese_only_the_unknown_characters_are_copied() -> None:
    config = tokenizer_config(vocab_size=13, byte_fallback=False)
    tokenizer = train_tokenizer(["我爱野家。", "IBM 我"] * 9, config)
    line = "我爱𠮷野家。X-IBM爱"
    ids = tokenizer.encode(line)
    source_words = SourceWords(line, [Segment(ids, [])], tokenizer)
    unknown = [i for i, token in enumerate(ids) if token == tokenizer.unk_id]
    words = [find_word(source_words, tokenizer, 0, position) for position in unknown]
    assert words == ["𠮷", "X-IBM"]
    for unknown_text in ("東京タワー", "漢字Ж漢字", "ー", "Ж漢字"):
        line = f"我{unknown_text}。"
        ids = tokenizer.encode(line)
        source_words = SourceWords(line, [Segment(ids, [])], tokenizer)
        position = ids.index(tokenizer.unk_id)
        assert find_word(source_words, tokenizer, 0, position) == unknown_text


def test_words_of_a_truncated_line_are_found(words: Tokenizer) -> None:
    line = "the Xaver sees Yves and the house"
    options = LineOptions(max_source_length=8, too_long=TooLong.truncate)
    encoded = encode_window(Window(0, [f"{line} {line}"]), words, options)
    source_words = SourceWords(
        encoded.lines[0].text, encoded.segments[0], words, encoded.num_truncated[0]
    )
    surfaces = [find_word(source_words, words, 0, position) for position in range(7)]
    assert surfaces == line.split()


def test_words_of_segments_and_behind_a_prefix_are_found(words: Tokenizer) -> None:
    line = "the Xaver sees Yves"
    tag = words.encode("big")
    segments = [Segment([*tag, *words.encode(t)], []) for t in ("the Xaver", "sees Yves")]
    source_words = SourceWords(line, segments, words)
    expected = [["", "the", "Xaver", ""], ["", "sees", "Yves", ""]]
    for number, words_of_segment in enumerate(expected):
        for position, word in enumerate(words_of_segment):
            assert find_word(source_words, words, number, position) == word
    # segments with other tokens than the line: nothing is replaced
    segments = [Segment(words.encode(t), []) for t in ("the", "Xaver sees", "Yves house")]
    source_words = SourceWords(line, segments, words)
    assert find_word(source_words, words, 1, 0) == ""


def test_an_imported_vocabulary_decodes_words_in_place_of_unknown_tokens(words: Tokenizer) -> None:
    names = ["<pad>", "<unk>", "<s>", "</s>", "__de__", "▁the", "▁house", "▁sees"]
    vocabulary = Vocabulary(names, pad_id=0, unk_id=1, bos_id=2, eos_id=3, tgt_prefix=[4])
    tokenizer = MappedTokenizer(words.model, vocabulary, [])
    ids = [4, 5, 1, 7, 1]
    assert tokenizer.decode_replacing(ids, {2: "Xaver", 4: "<s>"}) == "the Xaver sees <s>"
    assert "⁇" in tokenizer.decode_replacing(ids, {2: "Xaver"})
    assert tokenizer.decode_replacing([5, 6], {}) == tokenizer.decode([5, 6])


def write_unknowing_model(folder: Path, tokenizer: Tokenizer) -> Path:
    """Write a model folder whose translations have many unknown tokens."""
    model = tiny_model(2, sharpness=2.0, vocab_size=tokenizer.vocab_size)
    search = SearchConfig(beam_size=2, max_length_a=0.5, max_length_b=4)
    info = ModelInfo(
        model.config, search, tokenizer.vocab_size, "en", "de", tokenizer.sha256, updates=1
    )
    save_model(folder, dict(model.state_dict()), info, tokenizer)
    return folder


def expected_text(record: dict[str, Any], hypothesis: dict[str, Any], line: str) -> str:
    """Return the text of a hypothesis in JSON, with words of the line for its unknown tokens."""
    output = []
    for token, position in zip(hypothesis["tokens"], hypothesis["alignment"], strict=False):
        word = token.removeprefix("▁")
        if token == "<unk>" and record["source_tokens"][position] != "</s>":
            word = line.split()[position]
        output.append(word.replace("<unk>", "⁇"))
    return " ".join(output)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["native", "ctranslate2"])
def test_commands_and_python_replace_unknown_tokens(
    backend: str, words: Tokenizer, tmp_path: Path
) -> None:
    lines = ["the Xaver sees a Yves", "Zora big", "house Wanda is Vera", "", "the red house"]
    model = write_unknowing_model(tmp_path / "model", words)
    source = write_lines(tmp_path / "in.txt", lines)
    arguments = [f"model_dir={model}", f"input={source}", f"backend={backend}", "loop_guard=false"]
    files = {}
    for name, more in {
        "plain": [],
        "replaced": ["unk_replacement=true"],
        "json": ["unk_replacement=true", "format=json", "alignment=true"],
        "unaligned": ["unk_replacement=true", "format=json"],
    }.items():
        path = tmp_path / name
        assert translate(arguments, more, f"output={path}") == 0
        files[name] = path.read_text(encoding="utf-8").splitlines()
    assert any("⁇" in line for line in files["plain"])
    assert files["plain"] != files["replaced"]
    records = [json.loads(line) for line in files["json"]]
    num_replaced = 0
    for line, text, record in zip(lines, files["replaced"], records, strict=True):
        [hypothesis] = record["hypotheses"]
        assert hypothesis["text"] == text
        if line:
            assert " ".join(text.split()) == expected_text(record, hypothesis, line)
            num_replaced += hypothesis["tokens"].count("<unk>") - text.count("⁇")
    assert num_replaced > 2
    for line in files["unaligned"]:
        assert "alignment" not in json.loads(line)["hypotheses"][0]
    translator = Translator.load(model, device="cpu", backend=backend)
    options: dict[str, Any] = {"loop_guard": False}
    assert translator.translate(lines, **options) == files["plain"]
    assert translator.translate(lines, unk_replacement=True, **options) == files["replaced"]
