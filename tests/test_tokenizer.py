"""The tokenizer: text never becomes a control symbol, every character survives, sizes explained."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import sentences, tokenizer_config

from nmt.data.tokenizer import Tokenizer
from nmt.data.vocabulary import train_tokenizer
from nmt.errors import ConfigError, DataError, ModelError

TYPED = ["<s> </s> <pad> <unk> ▁", "</s>", "a</s>b", "<s>", "<pad><pad>", "<0x0A>"]
RARE = ["😀 👩‍👩‍👧", "漢字 かな", "ᚠᚢᚦ", "𓀀𓁐", "Ωμέγα", "x́", "ﷺ", "🇩🇪"]


def train(size: int, *, count: int = 200) -> Tokenizer:
    return train_tokenizer(sentences(count), tokenizer_config(vocab_size=size))


def control_ids(tokenizer: Tokenizer) -> set[int]:
    return {tokenizer.pad_id, tokenizer.unk_id, tokenizer.bos_id, tokenizer.eos_id}


def test_control_symbols_have_four_ids_of_their_own(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.pad_id, tokenizer.unk_id, tokenizer.bos_id, tokenizer.eos_id]
    assert ids == [0, 1, 2, 3]
    assert tokenizer.vocab_size == 330


@pytest.mark.parametrize("text", TYPED)
def test_control_symbols_typed_as_text_stay_text(tokenizer: Tokenizer, text: str) -> None:
    (in_batch,) = tokenizer.encode_batch([text], num_threads=1)
    for ids in (tokenizer.encode(text), in_batch, tokenizer.encode(f"the {text} tree")):
        assert ids
        assert not set(ids) & control_ids(tokenizer)
    shown = text.replace("▁", " ").strip()
    assert tokenizer.decode(tokenizer.encode(text)) == shown


def test_control_symbols_in_the_training_text_stay_text() -> None:
    text = ["<s> the </s> tree <pad> <unk>"] * 50 + sentences(100)
    tokenizer = train_tokenizer(text, tokenizer_config())
    ids = tokenizer.encode("<s> the </s> tree <pad> <unk>")
    assert not set(ids) & control_ids(tokenizer)
    assert tokenizer.decode(ids) == "<s> the </s> tree <pad> <unk>"


@pytest.mark.parametrize("text", [*RARE, *sentences(5, seed=9), "ünïcödé GROß"])
def test_text_comes_back_byte_for_byte_without_an_unknown(text: str) -> None:
    config = tokenizer_config(normalization="identity")
    tokenizer = train_tokenizer(sentences(200), config)
    ids = tokenizer.encode(text)
    assert tokenizer.unk_id not in ids
    assert tokenizer.decode(ids) == text


def test_emoji_survive_the_default_normalisation(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("tree 😀 ᚠ")
    assert tokenizer.unk_id not in ids
    assert tokenizer.decode(ids) == "tree 😀 ᚠ"


def test_a_batch_is_encoded_as_its_sentences_are(tokenizer: Tokenizer) -> None:
    texts = [*sentences(20, seed=3), "", "  "]
    assert tokenizer.encode_batch(texts, num_threads=2) == [tokenizer.encode(t) for t in texts]
    assert tokenizer.encode_batch([]) == []
    assert tokenizer.encode("") == tokenizer.encode("  ") == []


def test_decode_never_yields_a_line_break(tokenizer: Tokenizer) -> None:
    (a,) = tokenizer.encode("a")
    byte_ids = {name: i for i, name in enumerate(tokenizer.pieces(range(tokenizer.vocab_size)))}
    assert tokenizer.decode([a, byte_ids["<0x0A>"], a]).split() == ["a", "a"]
    assert tokenizer.decode([a, byte_ids["<0x0D>"], byte_ids["<0x0A>"], a]).split() == ["a", "a"]
    for value in range(256):
        assert not set(tokenizer.decode([a, byte_ids[f"<0x{value:02X}>"], a])) & set("\r\n")


def test_control_symbols_vanish_from_decoded_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the tree")
    framed = [tokenizer.bos_id, *ids, tokenizer.eos_id, tokenizer.pad_id, tokenizer.pad_id]
    assert tokenizer.decode(framed) == "the tree"


# --- training


def test_a_vocabulary_too_large_names_the_largest_which_then_works() -> None:
    with pytest.raises(ConfigError, match=r"vocab_size=9000 is too large") as caught:
        train(9000)
    assert "\n" not in str(caught.value)
    largest = int(re.findall(r"vocab_size=(\d+)", str(caught.value))[-1])
    assert train(largest).vocab_size == largest
    with pytest.raises(ConfigError, match=f"largest possible is {largest}"):
        train(largest + 1)


def test_a_vocabulary_too_small_names_what_is_needed_which_then_works() -> None:
    with pytest.raises(ConfigError, match=r"vocab_size=300 is too small") as caught:
        train_tokenizer(alphabet(), tokenizer_config(vocab_size=300))
    assert "\n" not in str(caught.value)
    found = re.search(r"set it to (\d+) or more", str(caught.value))
    assert found
    config = tokenizer_config(vocab_size=int(found[1]))
    assert train_tokenizer(alphabet(), config)


def alphabet() -> list[str]:
    """Write sentences of 100 different characters."""
    letters = "".join(map(chr, range(0x4E00, 0x4E64)))
    return [letters[i : i + 10] for i in range(90)]


def test_a_corpus_without_text_is_a_data_error() -> None:
    with pytest.raises(DataError) as caught:
        train_tokenizer([], tokenizer_config())
    assert "\n" not in str(caught.value)


def test_training_is_a_function_of_the_corpus_and_the_seed() -> None:
    assert train(320).model == train(320).model
    assert train(320).sha256 == train(320).sha256 != train(321).sha256


# --- files


def test_a_saved_tokenizer_is_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(tokenizer.model)
    loaded = Tokenizer.load(tmp_path / "tokenizer.model")
    assert loaded.sha256 == tokenizer.sha256
    assert loaded.encode("the tree") == tokenizer.encode("the tree")


@pytest.mark.parametrize("content", [None, b"", b"text", b"\xff" * 99])
def test_a_file_that_is_no_tokenizer_is_a_model_error(
    tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "tokenizer.model"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelError, match=re.escape(str(path))):
        Tokenizer.load(path)


def test_half_a_surrogate_pair_is_named_by_text_and_character(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="text 1, from 0, has half .* at character 3"):
        tokenizer.encode_batch(["fine", "bad\ud800"])
