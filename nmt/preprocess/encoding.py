"""What a worker process does: bytes of a chunk become clean pairs, token ids and counts.

Everything is done for a chunk at a time. It knows nothing of files to write.
"""

# N pairs of a chunk, V vocabulary

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nmt.config import PreprocessConfig
from nmt.data.tokenizer import Tokenizer, load_tokenizers
from nmt.preprocess.cleaned import Cleaned, Mask, Rows
from nmt.preprocess.cleaning import clean
from nmt.preprocess.counts import Counts
from nmt.preprocess.filters import drop_by_tokens
from nmt.preprocess.pieces import Piece, Source
from nmt.preprocess.repeats import Hashes, hash_sides
from nmt.preprocess.statistics import HeldOut, Measurer, Statistics
from nmt.preprocess.words import Ids, LineEncoder, cumulate

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Task:
    """Pairs to encode."""

    piece: Piece
    seen: Mask | None = None  # which of its pairs came before, where such are dropped


@dataclass(frozen=True)
class Encoded:
    """What became of a chunk."""

    src: Ids
    tgt: Ids
    src_text: list[str] | None  # where the text is stored too
    tgt_text: list[str] | None
    counts: Counts
    statistics: Statistics
    rows: Rows  # of the kept pairs in the chunk
    hashes: Hashes | None  # of the kept pairs, where they are counted


class _Side:
    """Encodes one side and counts what the tokenizer does not know."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.encode = LineEncoder(tokenizer).encode
        self._is_unknown = np.zeros(tokenizer.vocab_size, dtype=np.int64)  # (V,)
        self._is_unknown[[tokenizer.unk_id, *tokenizer.byte_ids]] = 1

    def count_unknown(self, ids: Ids) -> Array:
        """Return the number of unknown tokens and bytes of each line, (N,)."""
        return np.diff(cumulate(self._is_unknown[ids.flat])[ids.offsets])


class Encoder:
    """Encodes chunks of training pairs, or of held-out pairs, of which all stay."""

    def __init__(
        self,
        config: PreprocessConfig,
        models: Path,
        *,
        held_out: HeldOut | None,
        has_hashes: bool,
    ) -> None:
        tokenizers = load_tokenizers(models)
        self._config, self._held_out, self._has_hashes = config, held_out, has_hashes
        self._src, self._tgt = _Side(tokenizers.src), _Side(tokenizers.tgt)
        self._measurer = Measurer(tokenizers.src, tokenizers.tgt, held_out)

    def __call__(self, task: Task) -> Encoded:
        """Clean, filter and encode a chunk of training pairs."""
        cleaned = clean(task.piece.chunk, self._config, held_out=False, repeated=task.seen)
        source = task.piece.chunk.source
        src, tgt = self._encode(cleaned, source)
        unknown = (self._src.count_unknown(src), self._tgt.count_unknown(tgt))
        keep = drop_by_tokens(cleaned, (src.lengths, tgt.lengths), unknown, self._config)
        src, tgt = src.select(keep), tgt.select(keep)
        return self._result(cleaned, source, src, tgt)

    def encode_held_out(self, cleaned: Cleaned, source: Source) -> Encoded:
        """Encode clean held-out pairs."""
        return self._result(cleaned, source, *self._encode(cleaned, source))

    def _encode(self, cleaned: Cleaned, source: Source) -> tuple[Ids, Ids]:
        src, tgt = _tagged(cleaned.src, source.src_tag), _tagged(cleaned.tgt, source.tgt_tag)
        return self._src.encode(src), self._tgt.encode(tgt)

    def _result(self, cleaned: Cleaned, source: Source, src: Ids, tgt: Ids) -> Encoded:
        texts = (cleaned.src, cleaned.tgt)
        statistics = self._measurer.measure(
            texts,
            ((src.flat, src.offsets), (tgt.flat, tgt.offsets)),
            file=source.names[0],
            lines=cleaned.lines,
        )
        hashes = hash_sides(*texts) if self._has_hashes else None
        has_text = self._config.keep_text
        return Encoded(
            src,
            tgt,
            _tagged(cleaned.src, source.src_tag) if has_text else None,
            _tagged(cleaned.tgt, source.tgt_tag) if has_text else None,
            cleaned.counts,
            statistics,
            cleaned.rows,
            hashes,
        )


def _tagged(lines: list[str], tag: str | None) -> list[str]:
    return lines if tag is None else [f"{tag} {line}" for line in lines]
