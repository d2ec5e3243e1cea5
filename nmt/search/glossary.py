"""Glossaries: find terms in a source, and encode their translations."""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from nmt.data.hints import Term, add_hints
from nmt.data.lemmas import Lemmas
from nmt.data.tokenizer import Tokenizer
from nmt.errors import ConfigError
from nmt.search.protect import protected_spans, without_space

if TYPE_CHECKING:
    import regex  # type: ignore[import-untyped]

_CASE = "case"  # flag: the source must have the case of the term
_INSIDE = "part"  # flag: the term is also found inside of words
# a character of a script without spaces between words, which counts as a word
_IDEOGRAPH = "[\u2e80-\u312f\u31a0-\u9fff\uf900-\ufaff]"
_OTHER_WORD = rf"(?:(?!{_IDEOGRAPH})\w)+"  # a word in any other script
_SYMBOL = r"[^\w\s]"  # counts as a word, too
_WORD = f"{_IDEOGRAPH}|{_OTHER_WORD}|{_SYMBOL}"


@lru_cache(maxsize=4096)
def _compile(pattern: str) -> regex.Pattern[str]:
    """Compile a pattern with `regex`. In `re`, \\w does not match vowel signs, such as in Hindi."""
    # here, since most commands have no glossary, and the import takes 8 ms
    import regex

    return regex.compile(pattern)


@dataclass(frozen=True)
class Entry:
    """A line of a glossary."""

    line: str
    source: str
    targets: tuple[str, ...]  # a translation must contain one of these forms
    matches_case: bool = False  # whether `source` is only found in the same case
    matches_inside_words: bool = False  # whether `source` is also found inside of words


def parse_entry(line: str) -> Entry:
    """Parse `source<TAB>target|another form<TAB>flags`; the flags are optional.

    Raises a `ConfigError` for a line without a source or a target, and for unknown flags.
    """
    source, _, remainder = line.partition("\t")
    forms, _, flag_text = remainder.partition("\t")
    source = _normalize(source.strip())
    targets = tuple(form.strip() for form in forms.split("|") if form.strip())
    has_word = _compile(_WORD).search(source) is not None
    is_printable = all(_normalize(text).isprintable() for text in (source, *targets))
    if not has_word or not targets or not is_printable:
        raise ConfigError(
            f"glossary: {line!r:.80} is not SOURCE<TAB>TARGET; write one pair per line"
        )
    flags = set(flag_text.replace(",", " ").split())
    unknown_flags = flags - {_CASE, _INSIDE}
    if unknown_flags:
        flag = min(unknown_flags)
        raise ConfigError(f"glossary: {line!r:.80}: no flag {flag!r:.20}; write case or part")
    return Entry(
        line,
        source,
        targets,
        matches_case=_CASE in flags,
        matches_inside_words=_INSIDE in flags,
    )


def _normalize(text: str) -> str:
    """Return the normal form in which terms are looked up."""
    return unicodedata.normalize("NFKC", text)


class _Match(NamedTuple):
    """An occurrence of a term in a text."""

    start: int  # position of the first character
    end: int  # position after the last character
    entries: list[Entry]  # the entries of the term, all with the same `matches_case`

    @property
    def matches_case(self) -> bool:
        """Whether the entries require the case in which the term was found."""
        return self.entries[0].matches_case

    @property
    def targets(self) -> tuple[str, ...]:
        """The target forms of all entries, each once."""
        targets: list[str] = []
        for entry in self.entries:
            targets += entry.targets
        return tuple(dict.fromkeys(targets))


class Glossary:
    """Finds the source terms of its entries in texts."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.lines: list[str] = []
        self._line_numbers: dict[str, int] = {}
        # keyed by the case-folded words of the source
        self._entries_by_words: dict[tuple[str, ...], list[Entry]] = {}
        # the number of words of the longest source, keyed by the first word
        self._max_words: dict[str, int] = {}
        # the entries with `matches_inside_words`, keyed by the case-folded source
        self._inside_entries: dict[str, list[Entry]] = {}
        self._has_case_sensitive_entries = False
        for entry in entries:
            self._line_numbers.setdefault(entry.line, len(self.lines))
            self.lines.append(entry.line)
            if entry.matches_case:
                self._has_case_sensitive_entries = True
            words = tuple(word.casefold() for word in _compile(_WORD).findall(entry.source))
            self._entries_by_words.setdefault(words, []).append(entry)
            max_words = self._max_words.get(words[0], 0)
            self._max_words[words[0]] = max(len(words), max_words)
            if entry.matches_inside_words:
                self._inside_entries.setdefault(entry.source.casefold(), []).append(entry)
        # longest first, since a pattern takes the first alternative that matches
        alternatives = sorted(map(re.escape, self._inside_entries), key=len, reverse=True)
        self._inside_pattern: re.Pattern[str] | None = None
        if alternatives:
            self._inside_pattern = re.compile("|".join(alternatives))

    def find(self, text: str) -> list[tuple[str, ...]]:
        """Return the target forms of each term that occurs in `text`, in order.

        Of the terms that begin with the same word, only the longest counts. Another term cannot
        begin inside of it, so terms do not overlap.
        """
        return [match.targets for match in self._find_in_normalized(_normalize(text))]

    def add_hints(self, text: str) -> str:
        """Add the first target form of each term to the text, for a model that reads hints.

        Terms within placeholders, tags and addresses get no hints. A text without hints is returned
        unchanged, a text with hints in Unicode normal form NFKC.
        """
        if not self.lines:
            return text
        normalized = _normalize(text)
        protected = protected_spans(normalized)
        terms = []
        for match in self._find_in_normalized(normalized):
            # it suffices to check the last protected span that starts before the end of the term
            num_spans = bisect_left(protected, match.end, key=lambda span: span.start)
            overlaps_protected = num_spans > 0 and protected[num_spans - 1].stop > match.start
            if not overlaps_protected:
                terms.append(Term(match.start, match.end, match.targets[0]))
        return add_hints(normalized, terms) if terms else text

    def find_spans(self, text: str) -> list[range]:
        """Return the span of each term in `text`, which need not be normalized."""
        return [range(match.start, match.end) for match in self._find_in_original(text)]

    def keep_case(self, text: str, recased: str) -> str:
        """Return `recased`, but keep the case of terms of entries with `matches_case`.

        `recased` is `text` in another case.
        """
        if not self._has_case_sensitive_entries or len(recased) != len(text):
            return recased
        segments = []
        position = 0
        for match in self._find_in_original(text):
            # "½" is normalized to three characters, "1⁄2", so several terms may have its span
            is_repeated_span = match.start < position
            if match.matches_case and not is_repeated_span:
                segments.append(recased[position : match.start])
                segments.append(text[match.start : match.end])
                position = match.end
        segments.append(recased[position:])
        return "".join(segments)

    def select_lines(self, texts: Iterable[str]) -> list[str]:
        """Return the lines whose terms occur in `texts`, in the order of the glossary."""
        lines: set[str] = set()
        for text in texts:
            for match in self._find_in_normalized(_normalize(text)):
                lines.update(entry.line for entry in match.entries)
        return sorted(lines, key=self._line_numbers.__getitem__)

    def _find_in_original(self, text: str) -> Iterator[_Match]:
        """Yield each term that occurs in `text`, which need not be normalized.

        The positions of the terms are positions in `text`, not in the normalized text.
        """
        if unicodedata.is_normalized("NFKC", text):
            yield from self._find_in_normalized(text)
            return
        normalized = ""
        spans: list[range] = []  # for each normalized character, the span in `text`
        # visible characters, with their combining marks
        for match in _compile(r"\X").finditer(text):
            character = _normalize(match.group())
            normalized += character
            spans += [range(match.start(), match.end())] * len(character)
        for match in self._find_in_normalized(normalized):
            start = spans[match.start].start
            end = spans[match.end - 1].stop
            yield _Match(start, end, match.entries)

    def _find_in_normalized(self, text: str) -> Iterator[_Match]:
        """Yield each term that occurs in `text`, which must be normalized."""
        word_matches = list(_compile(_WORD).finditer(text))
        words = [match.group().casefold() for match in word_matches]
        word_index = 0  # a term may begin at this word
        while word_index < len(words):
            start = word_matches[word_index].start()
            # find the longest term that begins with this word: try `num_words` words, then fewer
            longest_match = None
            num_remaining_words = len(words) - word_index
            num_words = min(self._max_words.get(words[word_index], 0), num_remaining_words)
            while num_words > 0 and longest_match is None:
                end_index = word_index + num_words
                term_words = tuple(words[word_index:end_index])
                end = word_matches[end_index - 1].end()
                entries = self._entries_by_words.get(term_words, [])
                entries = _choose_entries(entries, text[start:end])
                if entries:
                    longest_match = _Match(start, end, entries)
                else:
                    num_words -= 1
            if longest_match is not None:
                yield longest_match
                word_index += num_words
            else:
                yield from self._find_inside_word(word_matches[word_index])
                word_index += 1

    def _find_inside_word(self, word_match: re.Match[str]) -> Iterator[_Match]:
        """Yield the terms inside a word.

        Skips words whose length changes with case folding, such as "Maß": positions in the folded
        word would not be positions in the word.
        """
        word = word_match.group()
        folded = word.casefold()
        if self._inside_pattern is None or len(folded) != len(word):
            return
        for match in self._inside_pattern.finditer(folded):
            matched = word[match.start() : match.end()]
            entries = _choose_entries(self._inside_entries[match.group()], matched)
            if entries:
                offset = word_match.start()
                yield _Match(offset + match.start(), offset + match.end(), entries)


def _choose_entries(entries: Sequence[Entry], matched: str) -> list[Entry]:
    """Return the case-sensitive entries that match. If none matches, return the other entries.

    The sources of all `entries` are equal to the text `matched`, apart from case and spaces.
    """
    same_case = [entry for entry in entries if entry.matches_case and entry.source == matched]
    return same_case or [entry for entry in entries if not entry.matches_case]


class TermCount(NamedTuple):
    """The return value of `count_terms`."""

    num_translated: int  # terms whose translation contains a target form
    num_terms: int


def count_terms(
    glossary: Glossary,
    sources: Sequence[str],
    translations: Sequence[str],
    lemmas: Lemmas | None = None,
) -> TermCount:
    """Count the terms in `sources`, and the terms that have a target form in the translation.

    A target form must occur as whole words, in one of four spellings: as written, with the first
    word capitalized, with each word capitalized, or in capitals. With `lemmas`, each word may be in
    another form. A term that occurs n times in a source counts n times, and needs n target forms.
    """
    num_translated = 0
    num_terms = 0
    for source, translation in zip(sources, translations, strict=True):
        for targets, count in Counter(glossary.find(source)).items():
            num_terms += count
            pattern = _target_pattern(targets, lemmas)
            num_matches = len(pattern.findall(_normalize(translation)))
            num_translated += min(count, num_matches)
    return TermCount(num_translated=num_translated, num_terms=num_terms)


@lru_cache(maxsize=4096)
def _target_pattern(targets: tuple[str, ...], lemmas: Lemmas | None) -> regex.Pattern[str]:
    """Return a pattern for the occurrences of target forms as whole words."""
    alternatives = []
    for target in sorted(map(_normalize, targets), key=len, reverse=True):
        # each list has a pattern for each word of the target; the pattern matches any form of the
        # word: as written, with a capital first letter, or in capitals
        written = []
        capitalized = []
        capitals = []
        for word in target.split():
            forms = [word] if lemmas is None else lemmas.forms(word)
            capitalized_forms = [form[0].upper() + form[1:] for form in forms]
            forms_in_capitals = [form.upper() for form in forms]
            written.append(_any_form_pattern(forms))
            capitalized.append(_any_form_pattern(capitalized_forms))
            capitals.append(_any_form_pattern(forms_in_capitals))
        first_capitalized = [capitalized[0], *written[1:]]
        for word_patterns in (written, first_capitalized, capitalized, capitals):
            alternatives.append(" ".join(word_patterns))
    return _compile("|".join(alternatives))


def _any_form_pattern(forms: Iterable[str]) -> str:
    """Return a pattern for any of the forms of a word, as a whole word."""
    alternatives = []
    for form in sorted(forms, key=len, reverse=True):
        pattern = re.escape(form)
        if _is_word_character(form[0]):
            pattern = r"(?<!\w)" + pattern
        if _is_word_character(form[-1]):
            pattern += r"(?!\w)"
        alternatives.append(pattern)
    return f"(?:{'|'.join(alternatives)})"


def _is_word_character(character: str) -> bool:
    """Return whether a character may be part of a longer word. An ideograph is a whole word."""
    return bool(_compile(r"\w").match(character)) and not re.match(_IDEOGRAPH, character)


@lru_cache(maxsize=8)
def load_glossary(lines: tuple[str, ...]) -> Glossary:
    """Parse the lines of the setting `glossary`. Raises `ConfigError` for an invalid line."""
    return Glossary(parse_entry(line) for line in lines)


@lru_cache(maxsize=4096)
def encode_spellings(targets: tuple[str, ...], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the ids of target forms, as written and with a capital first letter.

    Leaves out forms that the tokenizer cannot encode. Forms in a script without spaces are also
    encoded without a space in front.
    """
    pieces = tokenizer.all_pieces()
    spellings = []
    for target in targets:
        capitalized = target[0].upper() + target[1:]
        for form in dict.fromkeys([target, capitalized]):
            ids = tokenizer.encode(form)[len(tokenizer.prefix_ids) :]
            if not ids or tokenizer.unk_id in ids:
                continue
            spellings.append(tuple(ids))
            if re.match(_IDEOGRAPH, form):
                spellings.append(without_space(ids, pieces))
    return tuple(dict.fromkeys(spellings))


@lru_cache(maxsize=4)
def mark_word_ends(tokenizer: Tokenizer) -> tuple[bool, ...]:
    """Return for each id whether the word before it is complete, since the id cannot continue it.

    A piece that begins with a letter or digit, or is a byte, may continue the word.
    """
    byte_ids = set(tokenizer.byte_ids)
    ends = []
    for token, piece in enumerate(tokenizer.all_pieces()):
        may_continue_word = _is_word_character(piece[:1]) or token in byte_ids
        ends.append(not may_continue_word)
    return tuple(ends)
