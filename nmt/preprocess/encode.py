"""What a worker does: the bytes of a span become clean pairs, token ids and counts, and a shard.

A line is encoded by its words, of which few are new: each is cut once and then looked up. The ids
are those that SentencePiece gives for the whole line. That holds for BPE models whose pieces do not
reach over a space and whose normalization treats spaces as SentencePiece's own rules do;
`cuts_at_spaces` recognizes them.
"""

# N lines or pairs of a chunk, V vocabulary

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from nmt.config import NORMALIZATIONS, PreprocessConfig
from nmt.data.binary import ShardFile, ShardWriter
from nmt.data.languages import SEPARATOR, tag_lines
from nmt.data.tokenizer import Tokenizer, load_tokenizers
from nmt.data.vocabulary import ModelProto, read_proto
from nmt.preprocess.chunks import Chunk, Span
from nmt.preprocess.clean import Cleaned, clean
from nmt.preprocess.duplicates import HashWriter, hash_sides, read_seen
from nmt.preprocess.filters import drop_by_text, drop_by_tokens
from nmt.preprocess.held_out import read_held_out, read_taken, text_of
from nmt.preprocess.statistics import PLAIN, HeldOut, Statistics, measure, token_kinds
from nmt.preprocess.workspace import Job, Task
from nmt.runtime.files import replace_file

Array = np.ndarray[Any, np.dtype[Any]]
_SPACE = "▁"  # stands for a space in pieces; text that holds one is not cut at spaces alone
_MOST_WORDS = 1 << 17  # kept, some 25 MB
_END_OF_LINE = "\n"


class ShardEncoder:
    """Encodes clean pairs and writes them to shards; each process has one.

    `known` finds the lines of held-out splits in training text; None for pairs of these splits
    themselves, of which all stay.
    """

    def __init__(self, job: Job, known: HeldOut | None) -> None:
        tokenizers = load_tokenizers(job.work.plan)
        self._job, self._known = job, known
        self._tokenizers = tokenizers.src, tokenizers.tgt
        self._src, self._tgt = LineEncoder(tokenizers.src), LineEncoder(tokenizers.tgt)

    def write(
        self, name: str, chunks: Iterable[Cleaned], hashes: HashWriter | None = None
    ) -> tuple[Statistics, list[ShardFile]]:
        """Write pairs to a file, if there are any; with `report_only`, count them alone. Those that
        stay are added to `hashes`.
        """
        config, total = self._job.config, Statistics()
        path = self._job.work.data / f"{name}.arrow"
        sizes = [tokenizer.vocab_size for tokenizer in self._tokenizers]
        kinds = self._src.token_kinds, self._tgt.token_kinds
        with (
            replace_file(path) as temporary,
            ShardWriter(temporary, *sizes, has_text=config.keep_text) as writer,
        ):
            for cleaned in chunks:
                src, tgt, texts = self._encode(cleaned)
                total.merge(measure(cleaned, (src, tgt), kinds, self._known))
                if hashes is not None:
                    hashes.add(hash_sides(cleaned.src, cleaned.tgt))
                if not config.report_only:
                    writer.add(src, tgt, texts)
        if writer.shard.pairs == 0:
            path.unlink()
            return total, []
        return total, [replace(writer.shard, file=path.name)]

    def _encode(self, cleaned: Cleaned) -> tuple[Ids, Ids, tuple[list[str], list[str]] | None]:
        """Encode pairs and drop some for their tokens; return the text too where it is stored."""
        config, tags = self._job.config, cleaned.chunk.source.tags[:2]
        sources, targets = _tagged(cleaned)
        src, tgt = self._src.encode(sources), self._tgt.encode(targets)
        if self._known is not None:
            unknown = self._src.count_unknown(src), self._tgt.count_unknown(tgt)
            sizes = [len(t.encode(tag)) for t, tag in zip(self._tokenizers, tags, strict=True)]
            keep = drop_by_tokens(cleaned, (src.lengths, tgt.lengths), sizes, unknown, config)
            src, tgt = src.select(keep), tgt.select(keep)
        texts = _tagged(cleaned) if config.keep_text else None
        if config.data.context:
            lengths = np.stack([src.lengths, tgt.lengths], axis=1)
            contexts = Contexts(cleaned, lengths, self._tokenizers, config)
            src, tgt = contexts.join_ids(src, 0), contexts.join_ids(tgt, 1)
            if texts is not None:
                texts = contexts.join_texts(cleaned.src, 0), contexts.join_texts(cleaned.tgt, 1)
        return src, tgt, texts


def _tagged(cleaned: Cleaned) -> tuple[list[str], list[str]]:
    """Return sources and targets, each after the tag of its corpus, if it has one."""
    tags = cleaned.chunk.source.tags
    return tag_lines(cleaned.src, tags.src), tag_lines(cleaned.tgt, tags.tgt)


class Ids(NamedTuple):
    """The ids of N lines without BOS and EOS: those of line i end where line i + 1 starts."""

    flat: Array
    offsets: Array  # (N + 1,)

    @property
    def lengths(self) -> Array:
        """Number of ids of each line, (N,)."""
        return np.diff(self.offsets)

    def select(self, keep: Array) -> Ids:
        """Return the ids of the lines that `keep` (N,) marks."""
        if keep.all():
            return self
        return Ids(self.flat[np.repeat(keep, self.lengths)], _cumulate(self.lengths[keep]))


def _cumulate(lengths: Sequence[int] | Array) -> Array:
    """Return where each of N parts of a row begins, and the end, (N + 1,)."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


class Contexts:
    """The lines before each pair of a chunk, which a model of documents reads and writes with it.

    Line i gets i mod (context + 1) lines, so that the model knows every number of them: those from
    `starts[i]` on, which follow each other without an empty line or one that was left out.

    Args:
        cleaned: the pairs that are kept.
        lengths: their tokens on both sides, tags included, EOS not (N, 2).
        tokenizers: of source and target.
    """

    def __init__(
        self,
        cleaned: Cleaned,
        lengths: Array,
        tokenizers: tuple[Tokenizer, Tokenizer],
        config: PreprocessConfig,
    ) -> None:
        tags = cleaned.chunk.source.tags
        self.tags = (tags.src, tags.tgt)
        self.tag_sizes = [len(t.encode(tag)) for t, tag in zip(tokenizers, self.tags, strict=True)]
        self.separators = [tokenizer.encode(SEPARATOR) for tokenizer in tokenizers]
        bare = lengths - self.tag_sizes  # (N, 2)
        added = bare + [len(separator) for separator in self.separators]
        self.starts: list[int] = []
        lines = cleaned.lines.tolist()
        for i, line in enumerate(lines):
            start, sizes = i, lengths[i] + 1  # with EOS
            for j in range(i - 1, max(i - line % (config.data.context + 1), 0) - 1, -1):
                sizes = sizes + added[j]
                is_apart = lines[j] + 1 != lines[j + 1] or 0 in bare[j : j + 2]
                if is_apart or sizes.max() > config.max_length:
                    break
                start = j
            self.starts.append(start)

    def join_ids(self, ids: Ids, side: int) -> Ids:
        """Return the ids of all lines with their contexts."""
        lines = np.split(ids.flat, ids.offsets[1:-1])
        separator = np.array(self.separators[side], dtype=ids.flat.dtype)
        joined = []
        for i, start in enumerate(self.starts):
            others = (lines[j][self.tag_sizes[side] :] for j in range(start + 1, i + 1))
            joined.append([lines[start], *(part for one in others for part in (separator, one))])
        sizes = [sum(map(len, parts)) for parts in joined]
        every = [part for parts in joined for part in parts]
        return Ids(np.concatenate([ids.flat[:0], *every]), _cumulate(sizes))

    def join_texts(self, lines: Sequence[str], side: int) -> list[str]:
        """Return the texts of all lines with their contexts; `lines` have no tags."""
        joined = [f" {SEPARATOR} ".join(lines[s : i + 1]) for i, s in enumerate(self.starts)]
        return tag_lines(joined, self.tags[side])


class LineEncoder:
    """Encodes lines of one language with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._typecode = "H" if tokenizer.vocab_size <= 1 << 16 else "i"
        self.token_kinds = token_kinds(tokenizer)  # (V,)
        self._has_words = cuts_at_spaces(tokenizer)
        # the ids of words; no text becomes EOS, which ends the lines here
        self._words = {_END_OF_LINE: array(self._typecode, [tokenizer.eos_id]).tobytes()}
        self._older_words: dict[str, bytes] = {}

    def encode(self, lines: list[str]) -> Ids:
        """Return the ids of N lines, none of which holds a line break."""
        text = "".join([f"{line} {_END_OF_LINE} " for line in lines])
        if not self._has_words or _SPACE in text:
            ids = self._tokenizer.encode_batch(lines, 1)
            flat = np.array(array(self._typecode, chain.from_iterable(ids)))
            return Ids(flat, _cumulate(np.fromiter(map(len, ids), np.int64, len(ids))))
        words = text.removesuffix(" ").split(" ")
        self._learn(set(words))
        flat = np.frombuffer(b"".join(map(self._words.__getitem__, words)), self._typecode)
        is_end = flat == self._tokenizer.eos_id
        ends = np.flatnonzero(is_end)
        return Ids(flat[~is_end], np.concatenate([[0], ends - np.arange(len(ends))]))

    def _learn(self, words: set[str]) -> None:
        """Find the ids of words that are new; forget those that did not come again for long."""
        if len(self._words) > _MOST_WORDS // 2:
            self._words, self._older_words = {}, self._words
        new = words.difference(self._words)
        again = new & self._older_words.keys()
        self._words.update((word, self._older_words[word]) for word in again)
        cut = list(new - again)
        ids = self._tokenizer.encode_batch(cut, 1)
        self._words.update(
            (w, array(self._typecode, i).tobytes()) for w, i in zip(cut, ids, strict=True)
        )

    def count_unknown(self, ids: Ids) -> Array:
        """Return the number of unknown tokens and bytes of each line, (N,)."""
        return np.diff(_cumulate(self.token_kinds[ids.flat] != PLAIN)[ids.offsets])


def cuts_at_spaces(tokenizer: Tokenizer) -> bool:
    """Return whether the words of a line can be encoded one by one.

    So it is for BPE, where merges of one word do not look at the next. Not for unigram models,
    whose sums of scores may round another way.
    """
    if tokenizer.vocabulary is not None:  # whose first piece may be a tag
        return False
    proto = read_proto(tokenizer.model)
    trainer = proto.trainer_spec
    normalizer = proto.normalizer_spec
    if trainer.model_type != ModelProto().trainer_spec.BPE or trainer.treat_whitespace_as_suffix:
        return False
    has_plain_spaces = (
        normalizer.add_dummy_prefix
        and normalizer.remove_extra_whitespaces
        and normalizer.escape_whitespaces
    )
    if normalizer.name not in NORMALIZATIONS or not has_plain_spaces:
        return False
    pieces = tokenizer.all_pieces()
    return _SPACE in pieces and not any(_SPACE in piece[1:] for piece in pieces)


def start_encoding(job: Job) -> Task:
    """Return the task that writes the shard of a span; its record has the shard and its counts."""
    config, taken = job.config, read_taken(job)
    drops = config.filter.drops_duplicates
    known = HeldOut({split: text_of(chunks) for split, chunks in read_held_out(job).items()})
    encoder = ShardEncoder(job, known)

    def encode(span: Span, chunks: Iterator[Chunk]) -> dict[str, Any]:
        seen = read_seen(job.work.hashes, span.order, span.num_pairs) if drops else None

        def cleaned() -> Iterator[Cleaned]:
            for chunk in chunks:
                pairs = clean(chunk, config, held_out=False)
                start = chunk.first_pair - span.first_pair
                end = start + chunk.num_pairs
                drop_by_text(pairs, config, None if seen is None else seen[start:end], taken)
                yield pairs

        with HashWriter(job.work.hashes, span.order) as hashes:
            statistics, shards = encoder.write(span.name, cleaned(), None if drops else hashes)
        return {"statistics": statistics.to_json(), "shards": [*map(asdict, shards)]}

    return encode
