"""Encode the pairs of a span into a shard of token ids, with counts for the report.

For speed, lines are encoded word by word if possible: each distinct word is segmented once and then
looked up. SentencePiece gives the same ids for whole lines under three conditions, which
`cuts_at_spaces` tests: the model is BPE, no piece crosses a space, and SentencePiece normalizes
spaces by its default rules.
"""

# In shapes, N is the number of lines or pairs of a chunk and V the size of the vocabulary.

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from nmt.config import NORMALIZATIONS, PreprocessConfig
from nmt.data.languages import tag_lines
from nmt.data.shards import ShardFile, ShardWriter
from nmt.data.tokenizer import Tokenizer, load_tokenizers
from nmt.data.vocabulary import ModelProto, read_proto
from nmt.data.word_links import mark_word_starts, parse_links
from nmt.errors import DataError
from nmt.preprocess.characters import LineSet
from nmt.preprocess.chunks import Chunk, Span
from nmt.preprocess.clean import clean
from nmt.preprocess.clean_chunk import CleanChunk
from nmt.preprocess.duplicates import HashWriter, hash_all_units, read_repeats
from nmt.preprocess.filters import drop_by_text, drop_by_tokens
from nmt.preprocess.held_out import collect_lines, read_held_out, read_taken_sentences
from nmt.preprocess.statistics import PLAIN, HeldOutFinder, Statistics, count_chunk, token_kinds
from nmt.preprocess.workspace import Job, Task
from nmt.runtime.files import replace_file

Array = np.ndarray[Any, np.dtype[Any]]
_SPACE = "▁"  # a space in pieces
_MAX_CACHED_WORDS = 1 << 17  # about 25 MB
_END_OF_LINE = "\n"


class ShardEncoder:
    """Encodes clean pairs and writes them to shards.

    Args:
        job: the job, whose plan folder contains the tokenizers.
        held_out: finds lines of held-out splits in training text. Pass None for the held-out
            splits themselves, whose pairs are never dropped.
    """

    def __init__(self, job: Job, held_out: HeldOutFinder | None) -> None:
        tokenizers = load_tokenizers(job.work.plan)
        self._job = job
        self._held_out = held_out
        self._src_tokenizer = tokenizers.src
        self._tgt_tokenizer = tokenizers.tgt
        self._src_encoder = LineEncoder(tokenizers.src)
        self._tgt_encoder = LineEncoder(tokenizers.tgt)
        self._src_words = WordCounter(tokenizers.src)
        self._tgt_words = WordCounter(tokenizers.tgt)

    def write(
        self,
        name: str,
        chunks: Iterable[CleanChunk],
        hash_writer: HashWriter | None = None,
        *,
        has_alignment: bool = False,
    ) -> tuple[Statistics, list[ShardFile]]:
        """Write pairs to a shard. Returns their statistics, and a list with the shard.

        The list is empty if every pair was dropped: an empty shard has no file. `hash_writer` gets
        the hashes of the pairs that were not dropped. With `has_alignment`, the shard stores the
        word alignments of the chunks.
        """
        statistics = Statistics()
        path = self._job.work.data / f"{name}.arrow"
        token_kinds = (self._src_encoder.token_kinds, self._tgt_encoder.token_kinds)
        with (
            replace_file(path) as temporary,
            ShardWriter(
                temporary,
                self._src_tokenizer.vocab_size,
                self._tgt_tokenizer.vocab_size,
                has_text=self._job.config.keep_text,
                has_alignment=has_alignment,
            ) as writer,
        ):
            for chunk in chunks:
                src, tgt, texts = self._encode(chunk)
                alignment = None
                if has_alignment:
                    alignment = self._number_links(chunk, src, tgt)
                statistics.merge(count_chunk(chunk, (src, tgt), token_kinds, self._held_out))
                if hash_writer is not None:
                    hash_writer.add_all_units(hash_all_units(chunk.src, chunk.tgt))
                writer.add(src, tgt, texts, alignment)
        if writer.shard.pairs == 0:
            path.unlink()
            return statistics, []
        return statistics, [replace(writer.shard, file=path.name)]

    def _encode(
        self, chunk: CleanChunk
    ) -> tuple[EncodedLines, EncodedLines, tuple[list[str], list[str]] | None]:
        """Encode pairs, and drop training pairs by their tokens.

        Returns source ids, target ids, and the text if the shard stores it.
        """
        config = self._job.config
        src_lines, tgt_lines = _add_tags(chunk)
        src = self._src_encoder.encode(src_lines)
        tgt = self._tgt_encoder.encode(tgt_lines)
        has_training_pairs = self._held_out is not None
        if has_training_pairs:
            src, tgt = self._drop_by_tokens(chunk, src, tgt)
        texts = None
        if config.keep_text:
            texts = _add_tags(chunk)  # `src_lines` and `tgt_lines` still have the dropped pairs
        if config.data.context:
            lengths = np.stack([src.lengths, tgt.lengths], axis=1)
            tokenizers = (self._src_tokenizer, self._tgt_tokenizer)
            context = DocumentContext(chunk, lengths, tokenizers, config)
            src = context.join_ids(src, 0)
            tgt = context.join_ids(tgt, 1)
            if texts is not None:
                texts = (context.join_texts(chunk.src, 0), context.join_texts(chunk.tgt, 1))
        return src, tgt, texts

    def _drop_by_tokens(
        self, chunk: CleanChunk, src: EncodedLines, tgt: EncodedLines
    ) -> tuple[EncodedLines, EncodedLines]:
        """Drop pairs from `chunk` by their tokens. Returns the ids of the remaining pairs."""
        tags = chunk.raw_chunk.source.tags
        src_tag_ids = self._src_tokenizer.encode(tags.src)
        tgt_tag_ids = self._tgt_tokenizer.encode(tags.tgt)
        src_unknown = self._src_encoder.count_unknown(src)
        tgt_unknown = self._tgt_encoder.count_unknown(tgt)
        keep = drop_by_tokens(
            chunk,
            lengths=(src.lengths, tgt.lengths),
            tag_lengths=[len(src_tag_ids), len(tgt_tag_ids)],
            unknown=(src_unknown, tgt_unknown),
            config=self._job.config,
        )
        return src.select(keep), tgt.select(keep)

    def _number_links(
        self, chunk: CleanChunk, src: EncodedLines, tgt: EncodedLines
    ) -> EncodedLines:
        """Return the links of each pair as a flat list of source words and target words.

        For example, the links `0-0 1-2` of a pair become 0, 0, 1, 2. The user's files count words
        without the tag of the corpus. A data folder counts the words of the tag too, so the numbers
        are shifted. Some normalizations change the number of words. A pair whose pieces do not form
        as many words as its text gets no links. Raises `DataError` for a link of a word that does
        not exist.
        """
        assert chunk.alignments is not None
        tags = chunk.raw_chunk.source.tags
        src_words = self._src_words.count(chunk.src, src, tags.src)
        tgt_words = self._tgt_words.count(chunk.tgt, tgt, tags.tgt)
        alignments = [np.empty(0, dtype=np.uint16)]  # sets the dtype if there are no pairs
        lengths = []
        for i, line in enumerate(chunk.alignments):
            links = parse_links(line)  # (L, 2): source word and target word of L links
            num_words = [src_words.num_words[i], tgt_words.num_words[i]]
            if (links >= num_words).any():
                location = chunk.locate_pair(i, chunk.raw_chunk.source.alignment_file_index)
                raise DataError(
                    f"{location}: a link is beyond the words of the pair, which count from 0; "
                    "align the text again"
                )
            matches_pieces = src_words.matches_pieces[i] and tgt_words.matches_pieces[i]
            if not matches_pieces:
                links = links[:0]  # (0, 2)
            numbers = links + [src_words.num_tag_words, tgt_words.num_tag_words]
            alignments.append(numbers.astype(np.uint16).ravel())  # (2 * L,)
            lengths.append(numbers.size)
        return EncodedLines(np.concatenate(alignments), _to_offsets(lengths))


class WordCounts(NamedTuple):
    """The words of one side of N pairs."""

    num_words: list[int]  # for each line, the number of words between spaces, without the tag
    matches_pieces: Array  # (N,), whether the pieces of a line form as many words as its text
    num_tag_words: int


class WordCounter:
    """Counts the words in text and in its pieces."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._is_start = mark_word_starts(tokenizer)  # (V,)

    def count(self, lines: Sequence[str], ids: EncodedLines, tag: str) -> WordCounts:
        """Count the words of N lines without tag. The ids of each line begin with the tag."""
        num_tag_words = int(self._is_start[self._tokenizer.encode(tag)].sum())
        num_words = [len(line.split()) for line in lines]
        num_starts = _count_in_lines(self._is_start[ids.flat], ids)  # (N,), with the tag
        num_words_of_pieces = num_starts - num_tag_words
        return WordCounts(num_words, num_words_of_pieces == num_words, num_tag_words)


def _add_tags(chunk: CleanChunk) -> tuple[list[str], list[str]]:
    """Return source and target lines, each with the tag of its corpus in front, if it has one."""
    tags = chunk.raw_chunk.source.tags
    return tag_lines(chunk.src, tags.src), tag_lines(chunk.tgt, tags.tgt)


class EncodedLines(NamedTuple):
    """The ids of N lines without BOS and EOS, or the numbers of their word alignments."""

    flat: Array  # all lines, one after the other
    offsets: Array  # (N + 1,) index in `flat` at which each line starts, and the end

    @property
    def lengths(self) -> Array:
        """Number of ids of each line, (N,)."""
        return np.diff(self.offsets)

    def select(self, keep: Array) -> EncodedLines:
        """Return the ids of the lines that `keep` (N,) marks."""
        if keep.all():
            return self
        is_kept_id = np.repeat(keep, self.lengths)  # for each id in `flat`
        return EncodedLines(self.flat[is_kept_id], _to_offsets(self.lengths[keep]))


def _to_offsets(lengths: Sequence[int] | Array) -> Array:
    """Return the offsets (N + 1,) of N consecutive lines of these lengths."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def _count_in_lines(flags: Array, lines: EncodedLines) -> Array:
    """Return how many ids of each line are flagged, (N,). `flags` has one flag for each id."""
    # running sums: the number of flagged ids before each id, then the number of all flagged ids
    num_flagged_before = np.concatenate([[0], np.cumsum(flags, dtype=np.int64)])
    return np.diff(num_flagged_before[lines.offsets])


class DocumentContext:
    """Joins each pair of a chunk with the pairs before it, for models that translate documents.

    Line i of a file has up to i mod (data.context + 1) lines of context. With data.context=2, for
    example, the lines 3, 4, 5, 6, ... have up to 0, 1, 2, 0, ... lines of context. So the model
    learns to use any number of lines up to `data.context`. The context does not go beyond an empty
    or a dropped line, and the joined lines never exceed `max_length`.

    Args:
        chunk: the pairs.
        lengths: the numbers of source and target tokens, with tags, without EOS, (N, 2).
        tokenizers: the tokenizers of source and target.
        config: sets `data.context` and `max_length`.
    """

    def __init__(
        self,
        chunk: CleanChunk,
        lengths: Array,
        tokenizers: tuple[Tokenizer, Tokenizer],
        config: PreprocessConfig,
    ) -> None:
        tags = chunk.raw_chunk.source.tags
        # these lists have a value for the source and one for the target
        self._tags = [tags.src, tags.tgt]
        src_tag_ids = tokenizers[0].encode(tags.src)
        tgt_tag_ids = tokenizers[1].encode(tags.tgt)
        self._tag_lengths = [len(src_tag_ids), len(tgt_tag_ids)]
        self._separator = config.data.separator
        self._separator_ids = [tokenizer.encode(self._separator) for tokenizer in tokenizers]
        text_lengths = lengths - self._tag_lengths  # (N, 2)
        separator_lengths = [len(ids) for ids in self._separator_ids]
        lengths_with_separator = text_lengths + separator_lengths
        has_empty_side = (text_lengths == 0).any(axis=1)  # (N,)
        self._starts: list[int] = []  # index of the first pair of each pair's context
        line_numbers = chunk.line_numbers.tolist()
        for i, line_number in enumerate(line_numbers):
            start = i
            total_lengths = lengths[i] + 1  # (2,), 1 for EOS
            max_context = line_number % (config.data.context + 1)
            earliest = max(i - max_context, 0)
            for j in reversed(range(earliest, i)):  # begins with the nearest pair
                total_lengths = total_lengths + lengths_with_separator[j]
                has_gap = line_numbers[j] + 1 != line_numbers[j + 1]  # a dropped line
                has_empty_line = has_empty_side[j] or has_empty_side[j + 1]
                if has_gap or has_empty_line or total_lengths.max() > config.max_length:
                    break
                start = j
            self._starts.append(start)

    def join_ids(self, ids: EncodedLines, side: int) -> EncodedLines:
        """Return the ids of all lines with their context."""
        lines = np.split(ids.flat, ids.offsets[1:-1])  # an array of ids for each line
        separator = np.array(self._separator_ids[side], dtype=ids.flat.dtype)
        arrays = [ids.flat[:0]]  # sets the dtype of the result if there are no lines
        lengths = []
        for i, start in enumerate(self._starts):
            first_line, *further_lines = lines[start : i + 1]  # the context, then line i
            document = [first_line]  # only the first line keeps its tag
            for line in further_lines:
                line_without_tag = line[self._tag_lengths[side] :]
                document += [separator, line_without_tag]
            arrays += document
            lengths.append(sum(map(len, document)))
        return EncodedLines(np.concatenate(arrays), _to_offsets(lengths))

    def join_texts(self, lines: Sequence[str], side: int) -> list[str]:
        """Return the texts of all lines with their context. `lines` have no tags."""
        separator = f" {self._separator} "
        documents = [separator.join(lines[start : i + 1]) for i, start in enumerate(self._starts)]
        return tag_lines(documents, self._tags[side])


class LineEncoder:
    """Encodes lines of one language with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._typecode = "H" if tokenizer.vocab_size <= 1 << 16 else "i"  # 2 or 4 bytes per id
        self.token_kinds = token_kinds(tokenizer)  # (V,)
        self._encodes_words = cuts_at_spaces(tokenizer)
        # The ids of each word, as bytes. The end of a line counts as a word with the id EOS, since
        # the ids of a text never include EOS.
        self._ids_by_word = {_END_OF_LINE: array(self._typecode, [tokenizer.eos_id]).tobytes()}
        self._older_ids_by_word: dict[str, bytes] = {}

    def encode(self, lines: list[str]) -> EncodedLines:
        """Return the ids of N lines. No line contains a line break."""
        text = "".join([f"{line} {_END_OF_LINE} " for line in lines])
        # SentencePiece also ends a word at "▁", where `split` does not
        if not self._encodes_words or _SPACE in text:
            ids = self._tokenizer.encode_batch(lines, num_threads=1)
            flat = np.array(array(self._typecode, chain.from_iterable(ids)))
            return EncodedLines(flat, _to_offsets([len(line_ids) for line_ids in ids]))
        words = text.removesuffix(" ").split(" ")  # the last word of each line is \n
        self._learn_words(set(words))
        ids_of_words = map(self._ids_by_word.__getitem__, words)
        flat = np.frombuffer(b"".join(ids_of_words), self._typecode)
        is_end = flat == self._tokenizer.eos_id
        ends = np.flatnonzero(is_end)  # (N,)
        # `ends` also counts the EOS of the i lines before line i, which the result does not have
        ends_without_eos = ends - np.arange(len(ends))
        return EncodedLines(flat[~is_end], np.concatenate([[0], ends_without_eos]))

    def _learn_words(self, words: set[str]) -> None:
        """Encode the words that are not cached.

        When the cache is half full, its words become the older words, and the previous older words
        are dropped. A word that occurs again moves back from the older words.
        """
        if len(self._ids_by_word) > _MAX_CACHED_WORDS // 2:
            self._older_ids_by_word = self._ids_by_word
            self._ids_by_word = {}
        new_words = []
        for word in words.difference(self._ids_by_word):
            if word in self._older_ids_by_word:
                self._ids_by_word[word] = self._older_ids_by_word[word]
            else:
                new_words.append(word)
        new_ids = self._tokenizer.encode_batch(new_words, num_threads=1)
        for word, ids in zip(new_words, new_ids, strict=True):
            self._ids_by_word[word] = array(self._typecode, ids).tobytes()

    def count_unknown(self, ids: EncodedLines) -> Array:
        """Return the number of unknown and byte tokens of each line, (N,)."""
        return _count_in_lines(self.token_kinds[ids.flat] != PLAIN, ids)


def cuts_at_spaces(tokenizer: Tokenizer) -> bool:
    """Return whether encoding the words of a line one by one gives the ids of the line.

    BPE models qualify if their merges never cross words. Unigram models do not, since their sums of
    scores may round differently.
    """
    if tokenizer.is_imported:
        return False  # M2M100 or NLLB: the first piece of a line may be a tag
    proto = read_proto(tokenizer.model)
    trainer = proto.trainer_spec
    normalizer = proto.normalizer_spec
    if trainer.model_type != ModelProto().trainer_spec.BPE:
        return False
    if trainer.treat_whitespace_as_suffix:  # pieces end, instead of begin, with a space
        return False
    has_plain_spaces = (
        normalizer.add_dummy_prefix
        and normalizer.remove_extra_whitespaces
        and normalizer.escape_whitespaces
    )
    if normalizer.name not in NORMALIZATIONS or not has_plain_spaces:
        return False
    pieces = tokenizer.all_pieces()
    crosses_spaces = any(_SPACE in piece[1:] for piece in pieces)
    return _SPACE in pieces and not crosses_spaces


def make_encoding_task(job: Job) -> Task:
    """Return a function for `run_stage` that writes the shard of a span and returns a record."""
    config = job.config
    # sentences of the pairs that held-out sets took out of the training text
    taken_lines = read_taken_sentences(job)
    taken_set = LineSet(taken_lines) if taken_lines else None
    drops_duplicates = config.filter.drops_duplicates
    held_out_lines = {split: collect_lines(chunks) for split, chunks in read_held_out(job).items()}
    encoder = ShardEncoder(job, HeldOutFinder(held_out_lines))

    def encode_span(span: Span, chunks: Iterator[Chunk]) -> dict[str, Any]:
        """Write the shard of a span. Returns its statistics, and a list with the shard."""
        repeats = None  # (span.num_pairs,), whether each pair of the span repeats another pair
        if drops_duplicates:
            repeats = read_repeats(job.work.hashes, span.index_overall, span.num_pairs)

        def clean_chunks() -> Iterator[CleanChunk]:
            """Clean the chunks, and drop pairs by their text."""
            for raw_chunk in chunks:
                chunk = clean(raw_chunk, config, held_out=False)
                start = raw_chunk.first_pair - span.first_pair
                is_duplicate = None
                if repeats is not None:
                    is_duplicate = repeats[start : start + raw_chunk.num_pairs]
                drop_by_text(chunk, config, is_duplicate, taken_set)
                yield chunk

        with HashWriter(job.work.hashes, span.index_overall) as hash_writer:
            # if duplicates are not dropped, the report counts them by these hashes
            statistics, shards = encoder.write(
                span.name,
                clean_chunks(),
                None if drops_duplicates else hash_writer,
                has_alignment=config.data.train_split(span.corpus).has_alignment,
            )
        return {
            "statistics": statistics.to_json(),
            "shards": [asdict(shard) for shard in shards],
        }

    return encode_span
