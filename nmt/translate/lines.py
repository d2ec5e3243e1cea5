"""From lines of text to parts for the engine, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nmt.config import TooLong, require
from nmt.data.tokenizer import Tokenizers
from nmt.errors import DataError
from nmt.search.search import Hypothesis
from nmt.translate.decoding import Decoder, Failure, Outcome, Part
from nmt.translate.longlines import split_line
from nmt.translate.results import EMPTY, LineResult, to_translations

MAX_SOURCE_LENGTH = 256
"""Tokens; what `nmt-preprocess` keeps of training text by default, EOS included."""
LEAST_SOURCE_LENGTH = 8  # a character is at most 4 bytes, each a token at worst


@dataclass(frozen=True)
class LengthRule:
    """What becomes of a line that is longer than the model was trained for."""

    max_source_length: int = MAX_SOURCE_LENGTH  # tokens, EOS included
    too_long: TooLong = TooLong.split

    def __post_init__(self) -> None:
        most, rule = self.max_source_length, f"must be at least {LEAST_SOURCE_LENGTH}"
        require(most >= LEAST_SOURCE_LENGTH, "max_source_length", most, rule)


@dataclass(frozen=True)
class Encoded:
    """The lines of a window as ids."""

    parts: list[list[Part]]  # of each line: none for an empty one, several for a long one
    num_left_out: dict[int, int]  # tokens cut off, by place in the window


def encode_lines(
    lines: Sequence[str],
    prefixes: Sequence[str] | None,
    tokenizer: Tokenizers,
    rule: LengthRule,
    first_line: int = 0,
) -> Encoded:
    """Turn lines into ids, cut by `rule`; a forced prefix goes to the first part.

    Raises `DataError` for a line that is too long under `too_long=error`; `first_line` is the
    number of lines before these.
    """
    parts: list[list[Part]] = []
    num_left_out: dict[int, int] = {}
    most = rule.max_source_length - 1
    encoded_prefixes = tokenizer.tgt.encode_batch(prefixes) if prefixes is not None else None
    for i, ids in enumerate(tokenizer.src.encode_batch(lines)):
        pieces = [ids] if ids else []
        if len(ids) > most:
            if rule.too_long is TooLong.error:
                raise DataError(
                    f"line {first_line + i + 1} has {len(ids)} tokens, more than "
                    f"max_source_length={rule.max_source_length} allows with the end of the "
                    "sentence; shorten it, or set too_long=split"
                )
            if rule.too_long is TooLong.truncate:
                pieces, num_left_out[i] = [ids[:most]], len(ids) - most
            else:
                pieces = split_line(lines[i], most, tokenizer.src.encode_batch)
        forced = encoded_prefixes[i] if encoded_prefixes is not None else []
        parts.append([Part(piece, [] if k else forced) for k, piece in enumerate(pieces)])
    return Encoded(parts, num_left_out)


def decode_lines(encoded: Encoded, decoder: Decoder, tokenizer: Tokenizers) -> list[LineResult]:
    """Translate the lines of a window; line i of the result is of line i."""
    outcomes = iter(decoder.decode([part for parts in encoded.parts for part in parts]))
    return [
        _line_result(
            parts,
            [next(outcomes) for _ in parts],
            decoder,
            tokenizer,
            encoded.num_left_out.get(i, 0),
        )
        for i, parts in enumerate(encoded.parts)
    ]


def _line_result(
    parts: Sequence[Part],
    outcomes: Sequence[Outcome],
    decoder: Decoder,
    tokenizer: Tokenizers,
    num_left_out: int,
) -> LineResult:
    if not parts:
        return LineResult([EMPTY])
    found: list[list[Hypothesis]] = []
    for outcome in outcomes:
        if isinstance(outcome, Failure):
            return LineResult([], outcome.reason, len(parts), num_left_out)
        found.append(outcome)
    sources = [part.ids for part in parts]
    pieces: list[str] = []
    if decoder.config.alignment:
        eos_id = tokenizer.src.eos_id
        pieces = tokenizer.src.pieces([i for ids in sources for i in [*ids, eos_id]])
    translations = to_translations(found, sources, tokenizer.tgt, decoder.n_best)
    return LineResult(translations, None, len(parts), num_left_out, pieces)
