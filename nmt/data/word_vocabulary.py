"""Make SentencePiece models whose pieces are whole words, as in the Annotated Transformer.

SentencePiece's word models only split at spaces. So the normalization rules in the model put spaces
around punctuation. They also put a joiner on each side of a mark that has no space in the text:
"Hi, you!" becomes "Hi ￭, you ￭!￭". The denormalization rules remove the joiners and their spaces.
All rules are part of the model file, so every program that reads SentencePiece models splits and
joins text alike.
"""

from __future__ import annotations

import io
import logging
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from nmt.config import TokenizerConfig, TokenizerType
from nmt.data.tokenizer import Tokenizer, open_model
from nmt.errors import ConfigError

log = logging.getLogger(__name__)
_ModelProto: Any = sentencepiece_model_pb2.ModelProto  # type: ignore[attr-defined]
_JOINER = "￭"  # OpenNMT's Tokenizer has the same joiner
_SPACE = "▁"  # SentencePiece's mark of a space
# SentencePiece's trainer refuses rules that change nothing. So such rules contain this character
# instead of a space during training. After training, it is replaced by a space.
_SPACE_STAND_IN = "\x01"
# the text between punctuation and a word: none, a space, or one of two no-break spaces
_SPACES = ("", " ", "\u00a0", "\u202f")
# Symbols from this character on count as parts of words: arrows, mathematical symbols, emoji
_FIRST_RARE_SYMBOL = "\u2190"
_NUM_CHARACTERS = 0x10000  # the rules concern the basic plane of Unicode
_SUBWORD_JOINER = "@@ "  # subword-nmt and fastBPE write it between the parts of a word


def train_word_tokenizer(
    sentences: Iterable[str],
    config: TokenizerConfig,
    symbols: Sequence[str],
    control_ids: Mapping[str, Any],
) -> Tokenizer:
    """Make a model of the words that occur at least `config.min_freq` times, most frequent first.

    `config.vocab_size` limits the number of pieces. `control_ids` has the arguments
    `pad_id`, `unk_id`, `bos_id` and `eos_id` of SentencePiece's trainer. Raises a `ConfigError` if
    no word is frequent enough.
    """
    distinct_symbols = list(dict.fromkeys(symbols))
    model = _make_empty_model(config.type, distinct_symbols, control_ids)
    processor = open_model(model.SerializeToString())
    counts: Counter[str] = Counter()
    for sentence in sentences:
        counts.update(processor.normalize(sentence).split(_SPACE))
    del counts[""]  # the text before the first ▁
    pieces = {piece.piece for piece in model.pieces}
    words = []
    # most frequent first; words of equal frequency in alphabetical order
    for word in sorted(counts, key=lambda word: (-counts[word], word)):
        if counts[word] >= config.min_freq and _SPACE + word not in pieces:
            words.append(word)
    if not words:
        raise ConfigError(
            f"tokenizer.min_freq={config.min_freq}: no word of the corpus occurs so often; set a "
            "smaller number"
        )
    if config.vocab_size is not None:
        max_words = max(config.vocab_size - len(model.pieces), 1)
        del words[max_words:]
    for word in words:
        model.pieces.add(piece=_SPACE + word, score=0.0)
    model.trainer_spec.vocab_size = len(model.pieces)
    share = sum(counts[word] for word in words) / counts.total()
    message = "%d of %d different words have a piece: %.2f %% of the text"
    log.info(message, len(words), len(counts), 100 * share)
    return Tokenizer(model.SerializeToString(deterministic=True))


def _make_empty_model(
    tokenizer_type: TokenizerType, symbols: list[str], control_ids: Mapping[str, Any]
) -> Any:
    """Return a model with rules, control symbols and `symbols`, but without words."""
    characters = [chr(code) for code in range(_NUM_CHARACTERS)]
    normalization = {char: " " for char in characters if char.isspace() and char != " "}
    denormalization = {_SUBWORD_JOINER: ""}
    if tokenizer_type is TokenizerType.word:
        punctuation = [char for char in characters if _is_punctuation(char)]
        normalization |= _split_rules(punctuation, symbols)
        denormalization = _join_rules(punctuation, symbols)
    model_file = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder:
        normalization_file = _write_rules(Path(folder) / "normalization.tsv", normalization)
        denormalization_file = _write_rules(Path(folder) / "denormalization.tsv", denormalization)
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["word"]),  # the trainer refuses an empty text
            model_writer=model_file,
            model_type="word",
            use_all_vocab=True,
            unk_surface=" ⁇",  # decoded text of <unk>; the next word begins with a space
            normalization_rule_tsv=normalization_file,
            denormalization_rule_tsv=denormalization_file,
            user_defined_symbols=symbols,
            minloglevel=2,
            **control_ids,
        )
    model = _ModelProto.FromString(model_file.getvalue())
    for piece in list(model.pieces):
        if piece.type == piece.NORMAL:  # "word"
            model.pieces.remove(piece)
    for spec in (model.normalizer_spec, model.denormalizer_spec):
        spec.ClearField("normalization_rule_tsv")  # the name of a temporary file
        # The bytes are the length of the index (4 bytes), the index, and the results of the rules.
        content = spec.precompiled_charsmap
        index_end = 4 + int.from_bytes(content[:4], "little")
        results = content[index_end:].replace(_SPACE_STAND_IN.encode(), b" ")
        spec.precompiled_charsmap = content[:index_end] + results
    return model


def _is_punctuation(char: str) -> bool:
    """Return whether a character is a token of its own: punctuation, currency and other signs."""
    # a fixed version of Unicode, so that models do not depend on the version of Python
    category = unicodedata.ucd_3_2_0.category(char)
    if char in (_JOINER, _SPACE):
        return False
    is_common_symbol = category.startswith("S") and char < _FIRST_RARE_SYMBOL
    return category.startswith("P") or is_common_symbol


def _split_rules(punctuation: Sequence[str], symbols: Sequence[str]) -> dict[str, str]:
    """Return normalization rules that put spaces and joiners around punctuation.

    SentencePiece applies the longest rule that matches, so a rule is needed for each space that may
    precede or follow a mark.
    """
    rules = {_JOINER: "■"}  # NFKC does the same
    for char in punctuation:
        for left_space in _SPACES:
            for right_space in _SPACES:
                token = char if left_space else _JOINER + char
                if not right_space:
                    token += _JOINER
                rules[left_space + char + right_space] = f" {token} "
        rules[f" {char} "] = f"{_SPACE_STAND_IN}{char} "  # changes nothing
    # If a symbol begins with punctuation, the rule of this mark would divide it. These rules are
    # longer and keep the symbol whole.
    for symbol in symbols:
        for left_space in _SPACES[1:]:  # all but the empty text
            rules[left_space + symbol] = _SPACE_STAND_IN + symbol
    return rules


def _join_rules(punctuation: Sequence[str], symbols: Sequence[str]) -> dict[str, str]:
    """Return denormalization rules that invert `_split_rules`.

    If there is a space between two marks, the rule of the first mark matches it. The rule of the
    second mark then finds no space, and adds a joiner before this mark. So between two marks, only
    a joiner after the first mark means that there is no space: "a. (b" becomes "a ￭. ￭(￭ b", and
    "a.(b" becomes "a ￭.￭ ￭(￭ b".
    """
    rules = {f"{char} {_JOINER}": f"{char} " for char in punctuation}
    for symbol in symbols:  # a symbol may end with punctuation
        rules[f"{symbol} {_JOINER}"] = symbol
    # The rules with _SPACE are for words that replace unknown tokens. SentencePiece does not decode
    # the _SPACE of these words.
    for joiner in (
        _JOINER,
        f" {_JOINER}",
        f"{_JOINER} ",
        f"{_SPACE}{_JOINER}",
        f"{_JOINER}{_SPACE}",
    ):
        rules[joiner] = ""
    rules[f"{_JOINER} {_JOINER}"] = ""
    return rules


def _write_rules(path: Path, rules: Mapping[str, str]) -> str:
    """Write rules as SentencePiece reads them, with hexadecimal code points; return the path."""
    lines = []
    for old, new in rules.items():
        lines.append(f"{_code_points(old)}\t{_code_points(new)}\n")
    path.write_text("".join(lines), encoding="ascii")
    return str(path)


def _code_points(text: str) -> str:
    """Return the code points of a text as hexadecimal numbers, separated by spaces."""
    return " ".join(f"{ord(char):X}" for char in text)
