"""Extend the tokenizers of a finished model with symbols, characters and pieces of new text.

No id changes. A new piece joins pieces that are neighbors in the old segmentation of a text. The
new segmentation of a text is the old one without some of its boundaries, because of the scores of
the new pieces:

- In a BPE model, they are lower than all other scores, so the new merges come after the old ones.
- In a unigram model, the score of a new piece is the sum of the scores of the pieces that it joins,
  plus a small bonus for each boundary that it removes.
"""

from __future__ import annotations

import io
import itertools
import logging
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import sentencepiece

from nmt.config import PreprocessConfig, TokenizerConfig
from nmt.data.tokenizer import (
    MappedTokenizer,
    Tokenizer,
    TokenizerPair,
    Tokenizers,
    Vocabulary,
    open_model,
    unused_piece,
)
from nmt.data.vocabulary import (
    ModelProto,
    ReadSide,
    append_symbols,
    list_symbols,
    pad_vocabulary,
    read_proto,
    serialize_piece,
    symbols_missing_in_model,
)
from nmt.errors import ConfigError

log = logging.getLogger(__name__)
# To learn merges, each piece is replaced by one character, its code. The codes begin here.
_FIRST_CODE = 0x20000
_MIN_COUNT = 2  # occurrences in the sample that a new piece needs
_UNKNOWN_PENALTY = 10.0
"""In a unigram model, an unknown character has the lowest score of all pieces minus this number."""
_JOIN_BONUS = 1e-3  # more than the rounding error of the sum of scores of a sentence
_Piece = ModelProto.SentencePiece
_BPE = ModelProto().trainer_spec.BPE
_UNIGRAM = ModelProto().trainer_spec.UNIGRAM


def extend_tokenizers(
    tokenizers: Tokenizers, config: PreprocessConfig, read_side: ReadSide
) -> Tokenizers:
    """Append the symbols of the settings and up to `tokenizer.extend` pieces of the text.

    `tokenizer.extend` limits the pieces of each SentencePiece model. A model for both languages
    learns them from the text of both sides. Raises a `ConfigError` for models of other types than
    bpe and unigram.
    """
    src_symbols, tgt_symbols = list_symbols(config)
    if tokenizers.src.model == tokenizers.tgt.model:
        src_extension = _Extension(tokenizers.src, src_symbols + tgt_symbols)
        src_extension.learn(itertools.chain(read_side("src"), read_side("tgt")), config.tokenizer)
        tgt_extension = src_extension
    else:
        src_extension = _Extension(tokenizers.src, src_symbols)
        src_extension.learn(read_side("src"), config.tokenizer)
        tgt_extension = _Extension(tokenizers.tgt, tgt_symbols)
        tgt_extension.learn(read_side("tgt"), config.tokenizer)
    multiple = config.tokenizer.vocab_multiple
    if not tokenizers.src.is_imported:  # the ids are the ids of the SentencePiece model
        new_src = pad_vocabulary(Tokenizer(src_extension.model), multiple)
        if isinstance(tokenizers, Tokenizer):
            return new_src
        new_tgt = pad_vocabulary(Tokenizer(tgt_extension.model), multiple)
        return TokenizerPair(new_src, new_tgt)
    # the ids of imported tokenizers come from vocabularies, which are extended, too
    assert isinstance(tokenizers, TokenizerPair)
    src_pieces = src_extension.new_pieces
    tgt_pieces = tgt_extension.new_pieces
    if tokenizers.shares_vocabulary:
        joint_pieces = list(dict.fromkeys(src_pieces + tgt_pieces))  # without duplicates
        src_pieces = joint_pieces
        tgt_pieces = joint_pieces
    return TokenizerPair(
        src=_extend_mapped(tokenizers.src, src_extension.model, src_pieces, multiple),
        tgt=_extend_mapped(tokenizers.tgt, tgt_extension.model, tgt_pieces, multiple),
        shares_vocabulary=tokenizers.shares_vocabulary,
    )


def _extend_mapped(
    tokenizer: Tokenizer, model: bytes, new_pieces: Sequence[str], multiple: int
) -> Tokenizer:
    """Append pieces to the vocabulary of an imported model, and unused ids up to a multiple."""
    assert tokenizer.vocabulary is not None
    pieces = [*tokenizer.vocabulary.pieces, *new_pieces]
    num_unused = -len(pieces) % multiple  # up to the next multiple
    size = len(pieces) + num_unused
    pieces += [unused_piece(piece_id) for piece_id in range(len(pieces), size)]
    vocabulary: Vocabulary = replace(tokenizer.vocabulary, pieces=pieces)
    return MappedTokenizer(model, vocabulary, tokenizer.prefix_ids)


class _Extension:
    """A SentencePiece model to which pieces are added, and the list of its new pieces.

    Attributes:
        model: content of the model file.
        new_pieces: pieces to append to the vocabulary. Language pieces of M2M100 and NLLB and tags
            of OPUS-MT are among them, although the model does not get these.
    """

    def __init__(self, tokenizer: Tokenizer, symbols: Sequence[str]) -> None:
        self._vocabulary = set(tokenizer.all_pieces())
        distinct_symbols = dict.fromkeys(symbols)
        self.new_pieces = [symbol for symbol in distinct_symbols if symbol not in self._vocabulary]
        missing_symbols = symbols_missing_in_model(tokenizer, symbols)
        self.model = append_symbols(tokenizer.model, missing_symbols)
        self._vocabulary.update(self.new_pieces)

    def learn(self, sentences: Iterable[str], config: TokenizerConfig) -> None:
        """Append missing characters, then pieces that join existing ones, most frequent first."""
        assert config.extend is not None
        spec = read_proto(self.model).trainer_spec
        if config.extend > 0 and spec.model_type not in (_BPE, _UNIGRAM):
            raise ConfigError(
                f"tokenizer.extend={config.extend}: the tokenizer is neither bpe nor unigram; set "
                "tokenizer.extend=0, which adds only symbols and tags"
            )
        num_symbols = len(self.new_pieces)
        if config.extend > 0:
            words = self._count_words(sentences)
            characters = self._find_new_characters(words, config.character_coverage)
            characters = characters[: config.extend]
            self._append_characters(characters)
            max_merges = config.extend - len(characters)
            sequences = self._split_words(words)
            self._append_merges(_learn_merges(sequences, max_merges))
        log.info(
            "the tokenizer grows by %d symbols and tags, and %d pieces of the text",
            num_symbols,
            len(self.new_pieces) - num_symbols,
        )

    def _count_words(self, sentences: Iterable[str]) -> Counter[str]:
        """Count the words of normalized sentences, each with ▁ for the space before or after it."""
        word_pattern = re.compile("▁*[^▁]+")
        if read_proto(self.model).trainer_spec.treat_whitespace_as_suffix:
            word_pattern = re.compile("[^▁]+▁*")
        processor = open_model(self.model)
        words: Counter[str] = Counter()
        for sentence in sentences:
            normalized = processor.normalize(sentence)
            words.update(word_pattern.findall(normalized))
        return words

    def _find_new_characters(self, words: Counter[str], coverage: float) -> list[str]:
        """Return the characters that are not pieces yet, the most frequent first.

        Leaves out the rarest of these characters. Together, the ones left out make up at most the
        share 1 - `coverage` of the text.
        """
        characters: Counter[str] = Counter()
        for word, count in words.items():
            for character in word:
                characters[character] += count
        missing = []
        for character, _ in characters.most_common():
            if character not in self._vocabulary:
                missing.append(character)
        max_left_out = int((1 - coverage) * characters.total())  # number of occurrences
        num_left_out = 0
        while missing:
            rarest = missing[-1]
            num_left_out += characters[rarest]
            if num_left_out > max_left_out:
                break
            missing.pop()
        return missing

    def _append_characters(self, characters: Sequence[str]) -> None:
        """Append each character as a piece, with the score of an unknown character."""
        proto = read_proto(self.model)
        lowest = min(_normal_scores(proto).values())
        unknown_score = lowest - _UNKNOWN_PENALTY
        model_pieces = {piece.piece for piece in proto.pieces}
        is_bpe = proto.trainer_spec.model_type == _BPE
        for i, character in enumerate(characters):
            if character not in model_pieces:
                score = unknown_score
                if is_bpe:  # pieces of BPE need different scores
                    score -= i
                self.model += serialize_piece(character, _Piece.NORMAL, score)
        self._add_to_vocabulary(characters)

    def _append_merges(self, merges: Sequence[Sequence[str]]) -> None:
        """Append a piece for each merge, which is a list of the pieces that it joins."""
        proto = read_proto(self.model)
        scores = _normal_scores(proto)
        model_pieces = {piece.piece for piece in proto.pieces}
        lowest = min(scores.values())
        for i, pieces in enumerate(merges, start=1):
            merged = "".join(pieces)
            if merged in model_pieces:  # another merge may give the same text
                continue
            if proto.trainer_spec.model_type == _BPE:
                score = lowest - i
            else:
                num_removed_boundaries = len(pieces) - 1
                sum_of_scores = sum(scores[piece] for piece in pieces)
                score = sum_of_scores + _JOIN_BONUS * num_removed_boundaries
            self.model += serialize_piece(merged, _Piece.NORMAL, score)
            model_pieces.add(merged)
            self._add_to_vocabulary([merged])

    def _add_to_vocabulary(self, pieces: Sequence[str]) -> None:
        """Add pieces that were added to the model, except those that the vocabulary already has."""
        self.new_pieces += [piece for piece in pieces if piece not in self._vocabulary]
        self._vocabulary.update(pieces)

    def _split_words(self, words: Counter[str]) -> Counter[tuple[str, ...]]:
        """Segment words, and count the sequences of neighboring pieces that merges may join.

        Merges join no symbols, bytes and unknown pieces, so these end a sequence.
        """
        processor = _open_for_pieces(self.model)
        normal_pieces = set(_normal_scores(read_proto(self.model)))
        joinable_pieces = normal_pieces & self._vocabulary
        sequences: Counter[tuple[str, ...]] = Counter()
        for word, count in words.items():
            sequence: list[str] = []
            for piece in processor.encode(word, out_type=str):
                if piece in joinable_pieces:
                    sequence.append(piece)
                elif sequence:
                    sequences[tuple(sequence)] += count
                    sequence = []
            if sequence:
                sequences[tuple(sequence)] += count
        return sequences


def _learn_merges(sequences: Counter[tuple[str, ...]], limit: int) -> list[list[str]]:
    """Learn up to `limit` merges of neighboring pieces by BPE.

    Returns a list of pieces for each merge: those that it joins. SentencePiece learns the merges
    from words in which each piece is replaced by its code.
    """
    distinct_pieces: set[str] = set()
    for sequence in sequences:
        distinct_pieces.update(sequence)
    pieces = sorted(distinct_pieces)
    if not pieces or limit == 0:
        return []
    codes = {piece: chr(_FIRST_CODE + i) for i, piece in enumerate(pieces)}
    pieces_by_code = {code: piece for piece, code in codes.items()}
    word_counts = {}  # keyed by the codes of the word
    for sequence, count in sequences.items():
        word = "".join(codes[piece] for piece in sequence)
        word_counts[word] = count
    num_initial_pieces = len(pieces) + 1  # 1 for the unknown piece
    processor = _train_bpe(word_counts, vocab_size=num_initial_pieces + limit)
    # A piece of the trained model consists of codes. A piece of one code is no merge.
    coded_merges = []
    for i in range(1, processor.vocab_size()):  # without the unknown piece
        coded_piece = processor.id_to_piece(i)
        if len(coded_piece) > 1:
            coded_merges.append(coded_piece)
    coded_counts: Counter[str] = Counter()  # occurrences in the segmented words
    for word, count in word_counts.items():
        for coded_piece in processor.encode(word, out_type=str):
            coded_counts[coded_piece] += count
    # BPE learns the most frequent merge first, so the rarest are the last
    while coded_merges and coded_counts[coded_merges[-1]] < _MIN_COUNT:
        coded_merges.pop()
    merges = []
    for coded_merge in coded_merges:
        merges.append([pieces_by_code[code] for code in coded_merge])
    return merges


def _train_bpe(
    word_counts: dict[str, int], *, vocab_size: int
) -> sentencepiece.SentencePieceProcessor:
    """Train a BPE model of at most `vocab_size` pieces on words, given with their counts."""
    tsv_lines = (f"{word}\t{count}" for word, count in word_counts.items())
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=tsv_lines,
        model_writer=model,
        input_format="tsv",
        model_type="bpe",
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        character_coverage=1.0,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        split_by_unicode_script=False,
        split_by_number=False,
        unk_id=0,
        bos_id=-1,
        eos_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    return open_model(model.getvalue())


def segment_new_pieces(old: Tokenizer, new: Tokenizer) -> dict[str, list[int]]:
    """Return for each new piece of `new` the ids of the pieces of `old` that it joins.

    The list is empty for a piece of unknown characters. Symbols and tags are left out.
    """
    old_ids = {piece: i for i, piece in enumerate(old.all_pieces())}
    processor = _open_for_pieces(old.model)
    new_pieces = set(new.all_pieces()) - old_ids.keys()
    segmentations = {}
    for piece in _normal_scores(read_proto(new.model)):
        if piece in new_pieces:
            segmentation = processor.encode(piece, out_type=str)
            ids = [old_ids[old_piece] for old_piece in segmentation if old_piece in old_ids]
            segmentations[piece] = ids
    return segmentations


def _normal_scores(proto: ModelProto) -> dict[str, float]:
    """Return the score of each piece of type NORMAL, which is neither a symbol nor a byte."""
    return {piece.piece: piece.score for piece in proto.pieces if piece.type == _Piece.NORMAL}


def _open_for_pieces(model: bytes) -> sentencepiece.SentencePieceProcessor:
    """Load a SentencePiece model to segment pieces: without normalization or an added space."""
    proto = read_proto(model)
    spec = proto.normalizer_spec
    spec.precompiled_charsmap = b""
    spec.add_dummy_prefix = False
    spec.remove_extra_whitespaces = False
    return open_model(proto.SerializeToString())
