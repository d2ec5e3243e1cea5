"""A request to search: the sentences of a batch, the settings, their constraints and limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nmt.config import SearchConfig
from nmt.data.batch import pad
from nmt.data.tokenizer import Tokenizers
from nmt.errors import ConfigError
from nmt.search.constraints import (
    Constraint,
    ForbiddenTokens,
    ForcedPrefix,
    MinLength,
    forbidden_ids,
)

Ids = Sequence[int]


@dataclass(frozen=True)
class SearchRequest:
    """A batch of sentences to translate, and how."""

    rows: Sequence[Ids]  # source ids without EOS
    config: SearchConfig
    prefixes: Sequence[Ids] = ()
    """Target ids, without BOS, that the translation of each row starts with; may be empty. No
    prefixes at all are the same as an empty one for each row.
    """
    keys: Sequence[int] | None = None
    """For sampling: a number per row that its samples depend on, so that equal rows get different
    samples. None counts the equal rows before. CTranslate2 ignores it.
    """
    n_best: int | None = None  # results per row; None for `beam_size`
    with_scores: bool = True  # False lets an engine omit all scores, which may then be nan
    constraints: Sequence[Constraint] = ()  # in addition to `config`; only the native engine

    @property
    def num_results(self) -> int:
        """Results per row; fewer take less work and are the first of those that more would be."""
        return min(self.n_best or self.config.beam_size, self.config.beam_size)

    def length_limits(self) -> list[int]:
        """Return the maximum number of tokens of each translation, EOS included.

        It is a * source tokens + b, or more where `min_length` or a forced prefix needs it.
        """
        config = self.config
        limits = []
        for i, row in enumerate(self.rows):
            prefix_length = len(self.prefixes[i]) if self.prefixes else 0
            limit = int(config.max_length_a * len(row)) + config.max_length_b
            limits.append(max(limit, config.min_length + 1, prefix_length + 1))
        return limits

    def check_prefixes(self, tokenizer: Tokenizers) -> None:
        """Raise a `ConfigError` if a forced prefix contains a control symbol."""
        names = {
            tokenizer.tgt.pad_id: "padding",
            tokenizer.tgt.bos_id: "the start symbol",
            tokenizer.tgt.eos_id: "the end symbol",
        }
        for number, prefix in enumerate(self.prefixes):
            for token in prefix:
                if token in names:
                    raise ConfigError(
                        f"the forced prefix of sentence {number} contains id {token}, "
                        f"{names[token]}; remove control symbols"
                    )

    def all_constraints(self, tokenizer: Tokenizers) -> list[Constraint]:
        """Return the constraints that settings and prefixes imply, and the additional ones."""
        constraints: list[Constraint] = [ForbiddenTokens(forbidden_ids(tokenizer.tgt))]
        if self.config.min_length:
            constraints.append(MinLength(self.config.min_length, tokenizer.tgt.eos_id))
        if any(self.prefixes):
            constraints.append(ForcedPrefix(pad(self.prefixes, pad_id=-1)))
        return constraints + list(self.constraints)

    def can_join(self, tokenizer: Tokenizers) -> bool:
        """Return whether more sentences can join the search while it runs."""
        if self.config.beam_size == 1 or self.config.sampling or self.config.needs_attention:
            return False
        return all(constraint.can_join for constraint in self.all_constraints(tokenizer))
