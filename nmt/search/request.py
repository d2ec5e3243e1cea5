"""The input of a search: sentences and settings, and the constraints that the settings describe."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from nmt.config import SearchConfig
from nmt.data.batch import pad
from nmt.data.hints import remove_hints_from_text
from nmt.data.tokenizer import Tokenizers
from nmt.errors import ConfigError
from nmt.search.constraints import (
    AfterPrefix,
    Constraint,
    ForbiddenSequences,
    ForbiddenTokens,
    ForcedPrefix,
    MinLength,
    NoNgramsBeyondSource,
    NoRepeatedNgrams,
    PrefixBias,
    RepetitionPenalty,
    count_ngrams,
    forbidden_ids,
    phrase_sequences,
    suppressed_ids,
    to_target_ids,
)
from nmt.search.glossary import encode_spellings, load_glossary
from nmt.search.protect import ProtectedText, find_protected

Ids = Sequence[int]


@dataclass(frozen=True)
class SearchRequest:
    """A batch of sentences to translate, and the settings of their search."""

    sources: Sequence[Ids]  # source ids of each sentence, without EOS
    config: SearchConfig
    prefixes: Sequence[Ids] = ()
    """For each sentence, the target ids that its translation starts with, without BOS. `()` means
    that no sentence has a prefix.
    """
    num_forced: int = 0
    """Number of tokens at the start of each prefix that are forced even with `prefix_bias`, such as
    a language tag. `prefix_bias` only makes the other tokens of a prefix more probable."""
    src_tags: Sequence[str] = ()
    """Tags that sources may begin with, such as `<2de>`. They need not occur in translations."""
    sampling_keys: Sequence[int] | None = None
    """For sampling: an integer for each sentence, which is part of its random seed. Equal sentences
    with different keys get different samples. The default key of a sentence is the number of equal
    sentences before it in the batch. CTranslate2 ignores the keys.
    """
    n_best: int | None = None  # hypotheses to return per sentence; None for `max_results`
    with_scores: bool = True  # False lets an engine skip the scores, which may then be nan
    constraints: Sequence[Constraint] = ()  # besides the constraints of `config`; native only

    def select(self, indices: Sequence[int]) -> SearchRequest:
        """Return the request for the sentences with these indices."""
        request = replace(self, sources=[self.sources[i] for i in indices])
        if self.prefixes:
            request = replace(request, prefixes=[self.prefixes[i] for i in indices])
        if self.sampling_keys:
            request = replace(request, sampling_keys=[self.sampling_keys[i] for i in indices])
        return request

    @property
    def num_results(self) -> int:
        """Number of hypotheses to return per sentence, at most `max_results`.

        A smaller `n_best` shortens a search, but does not change the hypotheses that are returned.
        """
        if not self.n_best:
            return self.config.max_results
        return min(self.n_best, self.config.max_results)

    @property
    def needs_log_probs(self) -> bool:
        """Whether the search needs log-probabilities, instead of logits.

        Scores, sampling and beam search need log-probabilities, and constraints may need them.
        Otherwise greedy search only needs the most probable token, which has the largest logit.
        """
        config = self.config
        is_greedy = config.beam_size == 1 and not config.sampling
        has_constraints = config.has_constraints or any(self.prefixes) or bool(self.constraints)
        return self.with_scores or not is_greedy or has_constraints

    def length_limits(self) -> list[int]:
        """Return the maximum number of tokens of each translation, EOS included.

        The limit is max_length_a * source tokens + max_length_b, or more where `min_length` or a
        forced prefix needs it.
        """
        config = self.config
        limits = []
        for i, source in enumerate(self.sources):
            limit = int(config.max_length_a * len(source)) + config.max_length_b
            prefix_length = len(self.prefixes[i]) if self.prefixes else 0
            limits.append(max(limit, config.min_length + 1, prefix_length + 1))
        return limits

    def check_prefixes(self, tokenizers: Tokenizers) -> None:
        """Raise a `ConfigError` if a forced prefix contains a control symbol."""
        control_symbols = {
            tokenizers.tgt.pad_id: "padding",
            tokenizers.tgt.bos_id: "the start symbol",
            tokenizers.tgt.eos_id: "the end symbol",
        }
        for number, prefix in enumerate(self.prefixes):
            for token in prefix:
                if token in control_symbols:
                    raise ConfigError(
                        f"the forced prefix of sentence {number} contains id {token}, "
                        f"{control_symbols[token]}; remove control symbols"
                    )

    def decode_source(self, sentence_index: int, tokenizers: Tokenizers) -> str:
        """Return the text of a source, without its tag and without hints (`nmt.data.hints`)."""
        text = tokenizers.src.decode(self.sources[sentence_index])
        if self.config.hints:
            text = remove_hints_from_text(text)
        for tag in self.src_tags:
            if tag and text.startswith(tag):
                return text.removeprefix(tag).removeprefix(" ")
        return text

    def find_protected(self, sentence_index: int, tokenizers: Tokenizers) -> list[ProtectedText]:
        """Return the protected texts of a source, or [] without the setting `protect`."""
        if not self.config.protect:
            return []
        source_text = self.decode_source(sentence_index, tokenizers)
        return find_protected(source_text)  # the function of `nmt.search.protect`

    def find_spellings(
        self, sentence_index: int, tokenizers: Tokenizers
    ) -> list[tuple[tuple[int, ...], ...]]:
        """Return the spellings of the target forms of each glossary term that occurs in a source.

        The result has a tuple for each term, with the ids of each spelling of the term. A
        translation must contain one spelling of each term. Leaves out terms that the target
        tokenizer cannot encode.
        """
        glossary = load_glossary(tuple(self.config.required_terms))
        terms = glossary.find(self.decode_source(sentence_index, tokenizers))
        spellings_of_terms = [encode_spellings(targets, tokenizers.tgt) for targets in terms]
        return [spellings for spellings in spellings_of_terms if spellings]

    def all_constraints(self, tokenizers: Tokenizers) -> list[Constraint]:
        """Return the constraints of the settings and the forced prefixes, then `constraints`."""
        constraints: list[Constraint] = [ForbiddenTokens(forbidden_ids(tokenizers.tgt))]
        if self.config.min_length:
            constraints.append(MinLength(self.config.min_length, tokenizers.tgt.eos_id))
        # constraints that a forced prefix may violate, which apply to the tokens after the prefix
        after_prefix = self._repetition_constraints(tokenizers)
        if self.config.forbid:
            sequences = phrase_sequences(self.config.forbid, tokenizers.tgt)
            after_prefix.append(ForbiddenSequences(sequences))
        if self.config.suppress:
            suppressed = suppressed_ids(self.config.suppress, tokenizers.tgt)
            after_prefix.append(ForbiddenTokens(suppressed))
        if any(self.prefixes):
            forced_prefixes = self.prefixes
            if self.config.prefix_bias:
                # Only the first tokens are forced. `PrefixBias` makes the other tokens of the
                # prefixes more probable, so it applies after the forced tokens.
                forced_prefixes = [prefix[: self.num_forced] for prefix in self.prefixes]
                prefix_bias = PrefixBias(pad(self.prefixes, pad_id=-1), self.config.prefix_bias)
                after_prefix.insert(0, prefix_bias)
            forced_lengths = torch.tensor([len(prefix) for prefix in forced_prefixes])  # (B,)
            after_prefix = [AfterPrefix(constraint, forced_lengths) for constraint in after_prefix]
            constraints.append(ForcedPrefix(pad(forced_prefixes, pad_id=-1)))
        return [*constraints, *after_prefix, *self.constraints]

    def _repetition_constraints(self, tokenizers: Tokenizers) -> list[Constraint]:
        """Return the constraints of `repetition_penalty` and `no_repeat_ngram`."""
        constraints: list[Constraint] = []
        if self.config.repetition_penalty > 1:
            constraints.append(RepetitionPenalty(self.config.repetition_penalty))
        ngram_size = self.config.no_repeat_ngram
        allows_some_repeats = self.config.allow_source_repeats or self.config.has_terms
        if ngram_size and allows_some_repeats:
            allowed_counts = []
            for i, source in enumerate(to_target_ids(self.sources, tokenizers)):
                allowed_counts.append(self._count_allowed_ngrams(i, source, tokenizers))
            constraints.append(NoNgramsBeyondSource(ngram_size, allowed_counts))
        elif ngram_size:
            constraints.append(NoRepeatedNgrams(ngram_size))
        return constraints

    def _count_allowed_ngrams(
        self, sentence_index: int, source: Ids, tokenizers: Tokenizers
    ) -> Counter[tuple[int, ...]]:
        """Return the n-grams that the translation of a sentence may repeat, and how often.

        All other n-grams may occur once. `source` has the source in ids of the target vocabulary.
        """
        ngram_size = self.config.no_repeat_ngram
        counts: Counter[tuple[int, ...]] = Counter()
        # a protected text may occur twice in the source, and must then occur twice in the target
        if self.config.allow_source_repeats or self.find_protected(sentence_index, tokenizers):
            counts = count_ngrams(source, ngram_size)
        if self.config.has_terms:
            for spellings in self.find_spellings(sentence_index, tokenizers):
                for ids in spellings:
                    # no limit, since a term may occur twice, and other words may share its n-grams
                    for ngram in count_ngrams(ids, ngram_size):
                        counts[ngram] = sys.maxsize
        return counts

    def can_join(self, tokenizers: Tokenizers) -> bool:
        """Return whether `BeamSearch.join` can add sentences to the search of this request.

        The server uses this for sentences that arrive during a search.
        """
        config = self.config
        if config.beam_size == 1 or config.sampling:  # not a beam search
            return False
        if config.needs_attention:
            # `Beam.attention_sums` cannot grow for the source tokens of sentences that join
            return False
        if config.has_terms or config.beam_groups > 1 or config.alternatives:
            return False  # `BeamSearch.join` does not support these
        starts_with_eos = tokenizers.tgt.bos_id == tokenizers.tgt.eos_id
        limits_repeats = config.no_repeat_ngram > 0 or config.repetition_penalty > 1
        if starts_with_eos and limits_repeats:
            # `join` pads with BOS; if BOS is EOS, the constraints would count EOS as repeated
            return False
        return all(constraint.can_join for constraint in self.all_constraints(tokenizers))
