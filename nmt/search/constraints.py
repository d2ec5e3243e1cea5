"""Constraints of a search: rules for the next token of a translation.

To add a constraint, write a class here, and add it in `SearchRequest.all_constraints`.
"""

# In shapes: B sentences, R live hypotheses, N n-grams or sequences, V vocabulary size

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nmt.data.tokenizer import Tokenizer, Tokenizers
from nmt.errors import ConfigError, suggest_names
from nmt.model.fast.top import NEG_INF
from nmt.model.fast.transfer import to_device
from nmt.search.hypotheses import Beam


class Constraint(Protocol):
    """Changes log-probabilities of the next token before search chooses a token.

    Minus infinity forbids a token. The log-probabilities of hypotheses include the changes. A
    constraint must not raise a value above 0: search drops hypotheses on the assumption that their
    log-probability cannot grow.
    """

    @property
    def can_join(self) -> bool:
        """Whether the constraint also works after sentences have joined a running search.

        `beam.tokens` has a column for each step of the search, `beam.length` columns in all. A
        sentence that joined later has BOS in the columns of earlier steps. So a constraint must
        return False if it uses `beam.length` as the number of tokens of a hypothesis, or if it
        looks up data by the number of a sentence.
        """

    def __call__(self, log_probs: Tensor, beam: Beam) -> Tensor:
        """Return changed log-probabilities (R, V) of the token after each hypothesis of `beam`.

        May change `log_probs` (R, V) in place.
        """


@dataclass(frozen=True)
class ForbiddenTokens:
    """Forbids some tokens at every position."""

    tokens: list[int]
    can_join = True

    def __call__(self, log_probs: Tensor, beam: Beam) -> Tensor:
        # token by token: to index with a list, torch would copy the list to the GPU
        for token in self.tokens:
            log_probs[:, token].fill_(NEG_INF)
        return log_probs


@dataclass(frozen=True)
class MinLength:
    """Forbids EOS before a translation has `min_length` tokens."""

    min_length: int
    eos_id: int
    can_join = False

    def __call__(self, log_probs: Tensor, beam: Beam) -> Tensor:
        if beam.length < self.min_length:
            log_probs[:, self.eos_id].fill_(NEG_INF)
        return log_probs


@dataclass(frozen=True)
class NoRepeatedNgrams:
    """Forbids each token that would repeat an n-gram of `size` tokens."""

    size: int
    can_join = True

    def __call__(self, log_probs: Tensor, beam: Beam) -> Tensor:
        if beam.length < self.size:
            return log_probs
        ngrams = beam.tokens.unfold(1, self.size, 1)  # (R, N, size)
        # the last size - 1 tokens, which the next token would complete to an n-gram
        suffix_start = beam.length - (self.size - 1)
        suffixes = beam.tokens[:, suffix_start:].unsqueeze(1)  # (R, 1, size - 1)
        ngram_beginnings = ngrams[..., :-1]  # (R, N, size - 1)
        begins_with_suffix = (ngram_beginnings == suffixes).all(dim=-1)  # (R, N)
        rows, positions = begins_with_suffix.nonzero(as_tuple=True)
        repeating_tokens = ngrams[rows, positions, -1]
        log_probs[rows, repeating_tokens] = NEG_INF
        return log_probs


@dataclass(frozen=True)
class NoNgramsBeyondSource:
    """Forbids repeating n-grams of `size` tokens more often than the source does.

    An n-gram may occur as often as in the source, and at least once. The next token is forbidden if
    it would complete one more occurrence.
    """

    size: int
    allowed_counts: Sequence[Counter[tuple[int, ...]]]
    """For each sentence, how often each n-gram occurs in its source. The n-grams are target ids."""
    can_join = False

    def __call__(self, log_probs: Tensor, beam: Beam) -> Tensor:
        if beam.length < self.size:
            return log_probs
        forbidden_rows = []
        forbidden_tokens = []
        sentences = beam.sentences.tolist()
        for row, tokens in enumerate(beam.tokens.tolist()):
            allowed = self.allowed_counts[sentences[row]]
            suffix_start = len(tokens) - (self.size - 1)
            suffix = tuple(tokens[suffix_start:])
            for ngram, count in count_ngrams(tokens, self.size).items():
                max_count = max(1, allowed[ngram])  # `allowed` has 0 for an n-gram that it lacks
                if ngram[:-1] == suffix and count >= max_count:
                    forbidden_rows.append(row)
                    forbidden_tokens.append(ngram[-1])
        log_probs[forbidden_rows, forbidden_tokens] = NEG_INF
        return log_probs


@dataclass(frozen=True)
class RepetitionPenalty:
    """Multiplies the log-probability of each token that the hypothesis already contains.

    Source: Keskar et al. (2019).
    """

    factor: float  # >= 1
    can_join = True

    def __call__(self, log_probs: Tensor, beam: Beam) -> Tensor:
        penalized = log_probs.gather(1, beam.tokens) * self.factor  # (R, length)
        # in place; a token that occurs several times gets the same value each time, so it is
        # penalized once
        return log_probs.scatter_(1, beam.tokens, penalized)


@dataclass(frozen=True)
class ForbiddenSequences:
    """Forbids some sequences of tokens.

    If a hypothesis ends with all tokens of a sequence but the last, the last one is forbidden.
    """

    sequences: list[list[int]]
    can_join = True

    def __call__(self, log_probs: Tensor, beam: Beam) -> Tensor:
        by_length: dict[int, list[list[int]]] = {}
        for sequence in self.sequences:
            by_length.setdefault(len(sequence), []).append(sequence)
        for length, sequences in by_length.items():
            if beam.length < length - 1:
                continue
            ids = torch.tensor(sequences, device=log_probs.device)  # (N, length)
            suffix_start = beam.length - (length - 1)
            suffixes = beam.tokens[:, suffix_start:].unsqueeze(1)  # (R, 1, length - 1)
            is_match = (suffixes == ids[:, :-1]).all(dim=-1)  # (R, N)
            rows, indices = is_match.nonzero(as_tuple=True)
            last_tokens = ids[indices, -1]
            log_probs[rows, last_tokens] = NEG_INF
        return log_probs


@dataclass(frozen=True)
class ForcedPrefix:
    """Forces the tokens of each sentence's prefix by forbidding all other tokens."""

    prefixes: Tensor  # (B, longest prefix), padded with -1, on the CPU
    can_join = False

    def __call__(self, log_probs: Tensor, beam: Beam) -> Tensor:
        if beam.length >= self.prefixes.size(1):
            return log_probs
        # (R, 1), -1 after the end of a prefix
        forced = self.prefixes[beam.sentences, beam.length].unsqueeze(1)
        forced = to_device(forced, log_probs.device)
        has_forced_token = forced >= 0  # (R, 1)
        tokens = forced.clamp(min=0)  # (R, 1); rows without a forced token have token 0
        values = log_probs.gather(1, tokens)  # (R, 1)
        # in place: forbid all tokens of rows with a forced token, then restore this token; rows
        # without one do not change
        log_probs.masked_fill_(has_forced_token, NEG_INF)
        return log_probs.scatter_(1, tokens, values)


@dataclass(frozen=True)
class PrefixBias:
    """Makes the tokens of a prefix more probable (Arivazhagan et al., 2020, "Re-Translation
    Strategies for Long Form, Simultaneous, Spoken Language Translation").

    While a hypothesis agrees with the prefix, the probability p of each next token becomes
    (1 - bias) p, and the next token of the prefix gets `bias` in addition.
    """

    prefixes: Tensor  # (B, longest prefix), padded with -1, on the CPU
    bias: float  # 0 < bias < 1
    can_join = False

    def __call__(self, log_probs: Tensor, beam: Beam) -> Tensor:
        length = beam.length
        if length >= self.prefixes.size(1):
            return log_probs
        prefixes = to_device(self.prefixes[beam.sentences, : length + 1], log_probs.device)
        next_token = prefixes[:, length:]  # (R, 1), -1 after the end of a prefix
        agrees = (beam.tokens == prefixes[:, :length]).all(dim=1, keepdim=True)  # (R, 1)
        has_next_token = next_token >= 0  # (R, 1)
        index = next_token.clamp(min=0)  # (R, 1), token 0 after the end of a prefix
        reduced = log_probs + math.log1p(-self.bias)  # (R, V), log((1 - bias) p)
        log_bias = torch.tensor(math.log(self.bias), device=log_probs.device)
        reduced_next = reduced.gather(1, index)  # (R, 1), log((1 - bias) p) of the next token
        raised_next = reduced_next.logaddexp(log_bias)  # (R, 1), log((1 - bias) p + bias)
        biased = reduced.scatter(1, index, raised_next)  # (R, V)
        return torch.where(agrees & has_next_token, biased, log_probs)


@dataclass(frozen=True)
class AfterPrefix:
    """Applies a constraint to the tokens after each sentence's forced prefix."""

    constraint: Constraint
    prefix_lengths: Tensor  # (B,), on the CPU
    can_join = False

    def __call__(self, log_probs: Tensor, beam: Beam) -> Tensor:
        is_after_prefix = beam.length >= self.prefix_lengths[beam.sentences]  # (R,)
        is_after_prefix = to_device(is_after_prefix, log_probs.device).unsqueeze(1)  # (R, 1)
        # on a copy, since a constraint may change its argument
        constrained = self.constraint(log_probs.clone(), beam)
        return torch.where(is_after_prefix, constrained, log_probs)


def count_ngrams(tokens: Sequence[int], size: int) -> Counter[tuple[int, ...]]:
    """Count the sequences of `size` tokens."""
    num_ngrams = len(tokens) - size + 1  # not positive if there are fewer than `size` tokens
    return Counter(tuple(tokens[start : start + size]) for start in range(num_ngrams))


def to_target_ids(sources: Sequence[Sequence[int]], tokenizers: Tokenizers) -> list[list[int]]:
    """Map source ids to the target ids of the same pieces, or to -1 if the target lacks a piece.

    Each of `sources` has the ids of one sentence.
    """
    if tokenizers.src is tokenizers.tgt:
        return [list(source) for source in sources]
    tgt_ids = {piece: token for token, piece in enumerate(tokenizers.tgt.all_pieces())}
    target_ids = []
    for source in sources:
        source_pieces = tokenizers.src.pieces(source)
        target_ids.append([tgt_ids.get(piece, -1) for piece in source_pieces])
    return target_ids


def phrase_sequences(phrases: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Return the ids of phrases as written, and with the first letter in upper and lower case."""
    sequences = []
    prefix_length = len(tokenizer.prefix_ids)  # such as a tag of the target language
    for phrase in phrases:
        spellings = {phrase, phrase[0].upper() + phrase[1:], phrase[0].lower() + phrase[1:]}
        for ids_with_prefix in tokenizer.encode_batch(sorted(spellings)):
            ids = ids_with_prefix[prefix_length:]
            if ids:
                sequences.append(ids)
    return sequences


def suppressed_ids(pieces: Sequence[str], tokenizer: Tokenizer) -> list[int]:
    """Return the ids of the pieces in the setting `suppress`.

    Raises a `ConfigError` for a piece that is not in the vocabulary, and for EOS.
    """
    if not pieces:
        return []
    all_pieces = tokenizer.all_pieces()
    ids_by_piece = {piece: token for token, piece in enumerate(all_pieces)}
    ids = []
    for piece in pieces:
        if piece not in ids_by_piece:
            hint = suggest_names(piece, all_pieces, "the pieces of the model are in its tokenizer")
            raise ConfigError(f"suppress: {piece!r:.80} is not a piece of the vocabulary; {hint}")
        if ids_by_piece[piece] == tokenizer.eos_id:
            raise ConfigError(
                f"suppress: no translation could end without {piece}; use min_length instead"
            )
        ids.append(ids_by_piece[piece])
    return ids


def forbidden_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the ids that no translation may contain: padding, BOS and unused ids."""
    if tokenizer.bos_id == tokenizer.eos_id:  # true for models whose decoder starts with EOS
        return [tokenizer.pad_id, *tokenizer.unused_ids]
    return [tokenizer.pad_id, tokenizer.bos_id, *tokenizer.unused_ids]
