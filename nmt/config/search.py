"""Settings of search.

`SearchConfig` declares each search setting with its default, help and range. Its values are saved
with the model, and can be overridden:

- Commands that translate or score inherit settings from `SearchOverrides` or `ScoringOverrides`.
- The methods of `nmt.Translator` take the settings as keyword arguments, see `SearchOptions`.

A new search setting needs a line in `SearchConfig`, in one of the classes of overrides, and in
`SearchOptions`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, TypedDict

from nmt.config.options import LARGEST_SEED, Settings, option, read_text_file, resolve_path


class Normalization(str, Enum):
    """How the log-probability of a hypothesis is normalized by its length (docs/search.md)."""

    wu = "wu"  # divided by ((5 + length) / 6)^length_penalty, Wu et al. (2016), equation 14
    average = "average"  # divided by the length
    none = "none"


class Stop(str, Enum):
    """When beam search stops (docs/search.md)."""

    first = "first"  # when no hypothesis can become a result if its next token is EOS
    exact = "exact"  # when no hypothesis can become a result at any length


class GlossaryMode(str, Enum):
    """How the terms of a glossary get into translations (docs/control.md)."""

    hard = "hard"  # search requires them
    soft = "soft"  # they become hints in the source, which the model has learned to follow


@dataclass(kw_only=True)
class SearchConfig(Settings):
    """How translations are searched (docs/search.md), saved with the model as its defaults.

    The defaults are the values of section 6.1 of Vaswani et al. (2017).
    """

    beam_size: int = option(
        4,
        "hypotheses per sentence, or samples per sentence with sampling; 1: greedy search",
        low=1,
        high=10_000,
    )
    length_penalty: float = option(
        0.6,
        "normalization=wu: alpha in score = log P / ((5 + length) / 6)^alpha; 0 disables",
        low=-10,
        high=10,
    )
    normalization: Normalization = option(
        Normalization.wu, "length normalization of log P: wu, average or none"
    )
    word_reward: float = option(0.0, "nats added to log P for each token", low=-100, high=100)
    coverage_penalty: float = option(
        0.0, "beta of the coverage penalty of Wu et al. (2016); 0 disables", low=0, high=100
    )
    beam_groups: int = option(
        1,
        "diverse beam search: groups into which the beam is divided; 1: usual beam search",
        low=1,
        high=10_000,
    )
    diversity_penalty: float = option(
        0.5,
        "diverse beam search: nats subtracted from a token each time an earlier group chose it",
        low=0,
        high=1000,
    )
    alternatives: int = option(
        0,
        "number of translations, one for each of the most probable first tokens after the prefix; "
        "0 disables",
        low=0,
        high=10_000,
    )
    prefix_bias: float = option(
        0.0,
        "0 forces the prefix; b above 0 only favors it: the probability p of its next token "
        "becomes (1 - b) p + b",
        low=0,
        below=1,
    )
    stop: Stop = option(
        Stop.first,
        "beam search drops a hypothesis that cannot become a result with one more token (first) or "
        "at any length (exact)",
    )
    max_length_a: float = option(
        1.0, "a in the maximum number of output tokens, a * source tokens + b", low=0, high=1000
    )
    max_length_b: int = option(
        50, "b in the maximum number of output tokens, a * source tokens + b", low=1, high=100_000
    )
    min_length: int = option(0, "minimum number of output tokens, EOS excluded", low=0, high=10_000)
    no_repeat_ngram: int = option(
        0,
        "length of n-grams that may not occur twice in a translation; 0 disables",
        low=0,
        high=1000,
    )
    allow_source_repeats: bool = option(
        False,
        "no_repeat_ngram and the second search of loop_guard allow an n-gram as often as it occurs "
        "in the source",
    )
    repetition_penalty: float = option(
        1.0,
        "factor of the log-probability of tokens that occur in the translation already; 1 disables",
        low=1,
        high=100,
    )
    forbid: list[str] = option([], "phrases that no translation contains, or files of phrases")
    suppress: list[str] = option(
        [], "pieces of the vocabulary that search never chooses, such as <unk>, or files of pieces"
    )
    glossary: list[str] = option(
        [],
        "files of lines SOURCE<TAB>TARGET: if a sentence contains SOURCE, its translation contains "
        "TARGET; see glossary_mode",
    )
    glossary_mode: GlossaryMode = option(
        GlossaryMode.hard,
        "hard (search requires the terms of the glossary) or soft (the terms become hints in the "
        "source, for a model trained with augment.terminology)",
    )
    protect: bool = option(
        False,
        "keep placeholders, tags, addresses and emoji of a sentence, such as {name} and %s; "
        "only beam search",
    )
    sampling: bool = option(False, "sample from the model's distribution instead of beam search")
    temperature: float = option(1.0, "sampling: divisor of the logits", low=0.001, high=1000)
    top_k: int = option(0, "sampling: draw from the k most probable tokens; 0: from all", low=0)
    top_p: float = option(
        1.0,
        "sampling: draw from the most probable tokens that reach this total probability; 1: all",
        above=0,
        high=1,
    )
    min_p: float = option(
        0.0,
        "sampling: draw from tokens with at least this share of the highest probability; 0: all",
        low=0,
        below=1,
    )
    epsilon: float = option(
        0.0, "sampling: draw from tokens of at least this probability; 0: all", low=0, below=1
    )
    seed: int = option(
        1, "sampling: the same seed gives the same samples", low=0, high=LARGEST_SEED
    )
    loop_guard: bool = option(
        True,
        "search again, without repeats, if a translation loops or reaches the length limit",
    )
    alignment: bool = option(
        False, "report for each target token the source token with the highest attention weight"
    )

    def check(self) -> None:
        are_phrases = all(isinstance(phrase, str) and phrase.strip() for phrase in self.forbid)
        self.require(are_phrases, "forbid", "must be a list of texts that are not empty")
        are_pairs = all(isinstance(line, str) and "\t" in line for line in self.glossary)
        problem = "must be a list of SOURCE<TAB>TARGET or, in commands, of files"
        self.require(are_pairs, "glossary", problem)
        if self.required_terms:
            is_beam_search = self.beam_size > 1 and not self.sampling
            self.require(is_beam_search, "glossary", "needs beam_size=2 or more and no sampling")
        if self.protect:
            is_beam_search = self.beam_size > 1 and not self.sampling
            self.require(is_beam_search, "protect", "needs beam_size=2 or more and no sampling")
        if self.beam_groups > 1:
            is_possible = not self.sampling and not self.has_terms
            problem = "does not work with sampling, protect or a glossary"
            self.require(is_possible, "beam_groups", problem)
            problem = f"must divide beam_size={self.beam_size}"
            self.require(self.beam_size % self.beam_groups == 0, "beam_groups", problem)
        else:
            is_default = self.diversity_penalty == SearchConfig.diversity_penalty
            self.require(is_default, "diversity_penalty", "needs beam_groups=2 or more")
        if self.alternatives:
            is_possible = not self.sampling and not self.prefix_bias
            problem = "does not work with sampling or prefix_bias"
            self.require(is_possible, "alternatives", problem)
        if not self.sampling:
            problem = "only works with sampling=true"
            self.require(self.temperature == 1, "temperature", problem)
            self.require(self.top_k == 0, "top_k", problem)
            self.require(self.top_p == 1, "top_p", problem)
            self.require(self.min_p == 0, "min_p", problem)
            self.require(self.epsilon == 0, "epsilon", problem)

    @property
    def has_constraints(self) -> bool:
        """Whether a setting excludes tokens, or changes their probabilities."""
        return (
            self.min_length > 0
            or self.alternatives > 0
            or self.no_repeat_ngram > 0
            or self.repetition_penalty > 1
            or len(self.forbid) > 0
            or len(self.suppress) > 0
            or self.has_terms
        )

    @property
    def has_terms(self) -> bool:
        """Whether sentences may have terms that their translations must contain."""
        return len(self.required_terms) > 0 or self.protect

    @property
    def required_terms(self) -> list[str]:
        """The lines of the glossary whose terms search requires."""
        return self.glossary if self.glossary_mode is GlossaryMode.hard else []

    @property
    def hints(self) -> list[str]:
        """The lines of the glossary whose terms become hints in the source."""
        return self.glossary if self.glossary_mode is GlossaryMode.soft else []

    @property
    def max_results(self) -> int:
        """The number of hypotheses that a search can return for a sentence."""
        if self.alternatives:
            return self.alternatives
        return self.beam_size

    @property
    def rows_per_sentence(self) -> int:
        """The maximum number of live hypotheses of a sentence."""
        if self.alternatives:
            return self.beam_size * self.alternatives  # a beam for each first token
        return self.beam_size

    @property
    def needs_attention(self) -> bool:
        """Whether search and scoring need the attention to the source."""
        return self.alignment or self.coverage_penalty > 0

    @property
    def length_exponent(self) -> float:
        """The exponent p for an engine that ranks by log P / length^p, to rank about like nmt."""
        if self.normalization is Normalization.average:
            return 1.0
        if self.normalization is Normalization.none:
            return 0.0
        # at a length of 12 tokens, length^(0.7 alpha) grows as fast as ((5 + length) / 6)^alpha
        return round(0.7 * self.length_penalty, 3)


def override_search_setting(name: str) -> Any:
    """Declare a setting with the help and range of the setting `name` of `SearchConfig`.

    Its default None keeps the value that is saved with the model.
    """
    metadata = dict(SearchConfig.__dataclass_fields__[name].metadata)
    metadata["help"] += "; null: as saved with the model"
    return field(default=None, metadata=metadata)


@dataclass(kw_only=True)
class ScoringOverrides(Settings):
    """Settings of search that decide the score of a given translation."""

    length_penalty: float | None = override_search_setting("length_penalty")
    normalization: Normalization | None = override_search_setting("normalization")
    word_reward: float | None = override_search_setting("word_reward")
    coverage_penalty: float | None = override_search_setting("coverage_penalty")

    def search_changes(self) -> dict[str, Any]:
        """Return the search settings of this command that are not None."""
        search_keys = {setting.name for setting in fields(SearchConfig)}
        command_keys = sorted(setting.name for setting in fields(self))
        changes = {}
        for key in command_keys:
            value = getattr(self, key)
            if key not in search_keys or value is None:
                continue
            if key in ("forbid", "suppress"):
                value = _read_lines(value, key)
            elif key == "glossary":
                value = read_glossary(value)
            changes[key] = value
        return changes


@dataclass(kw_only=True)
class SearchOverrides(ScoringOverrides):
    """All settings of search except `alignment` and `alternatives`, which change the output."""

    beam_size: int | None = override_search_setting("beam_size")
    beam_groups: int | None = override_search_setting("beam_groups")
    diversity_penalty: float | None = override_search_setting("diversity_penalty")
    prefix_bias: float | None = override_search_setting("prefix_bias")
    stop: Stop | None = override_search_setting("stop")
    max_length_a: float | None = override_search_setting("max_length_a")
    max_length_b: int | None = override_search_setting("max_length_b")
    min_length: int | None = override_search_setting("min_length")
    no_repeat_ngram: int | None = override_search_setting("no_repeat_ngram")
    allow_source_repeats: bool | None = override_search_setting("allow_source_repeats")
    repetition_penalty: float | None = override_search_setting("repetition_penalty")
    forbid: list[str] | None = override_search_setting("forbid")
    suppress: list[str] | None = override_search_setting("suppress")
    glossary: list[str] | None = override_search_setting("glossary")
    glossary_mode: GlossaryMode | None = override_search_setting("glossary_mode")
    protect: bool | None = override_search_setting("protect")
    sampling: bool | None = override_search_setting("sampling")
    temperature: float | None = override_search_setting("temperature")
    top_k: int | None = override_search_setting("top_k")
    top_p: float | None = override_search_setting("top_p")
    min_p: float | None = override_search_setting("min_p")
    epsilon: float | None = override_search_setting("epsilon")
    seed: int | None = override_search_setting("seed")
    loop_guard: bool | None = override_search_setting("loop_guard")


class SearchOptions(TypedDict, total=False):
    """The settings of `SearchConfig` as keyword arguments; None keeps the value of the model.

    `normalization`, `stop` and `glossary_mode` are texts, such as "wu", "first" and "hard".
    """

    beam_size: int | None
    beam_groups: int | None
    diversity_penalty: float | None
    alternatives: int | None
    prefix_bias: float | None
    length_penalty: float | None
    normalization: str | None
    word_reward: float | None
    coverage_penalty: float | None
    stop: str | None
    max_length_a: float | None
    max_length_b: int | None
    min_length: int | None
    no_repeat_ngram: int | None
    allow_source_repeats: bool | None
    repetition_penalty: float | None
    forbid: list[str] | None
    suppress: list[str] | None
    glossary: list[str] | None
    glossary_mode: str | None
    protect: bool | None
    sampling: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    epsilon: float | None
    seed: int | None
    loop_guard: bool | None
    alignment: bool | None


def read_glossary(values: list[str]) -> list[str]:
    """Replace each file name by the lines of the file; leave out empty lines and comments."""
    return [line for line in _read_lines(values, "glossary") if not line.startswith("#")]


def _read_lines(values: list[str], setting: str) -> list[str]:
    """Replace each value that names a file by the lines of the file that are not empty.

    Raises the errors of `read_text_file`.
    """
    all_lines = []
    for value in values:
        if resolve_path(value).is_file():
            lines = read_text_file(value, setting).splitlines()
            all_lines += [line for line in lines if line.strip()]
        else:
            all_lines.append(value)
    return all_lines
