"""Prepare lines for translation: split off text to copy, and convert capitals to ordinary case.

`nmt.translate.restoring` reverses this in the translations.
"""

from __future__ import annotations

from dataclasses import dataclass

from nmt.data.languages import split_tag, tag_lines
from nmt.data.tokenizer import Tokenizer
from nmt.search.glossary import load_glossary
from nmt.search.protect import has_only_protected
from nmt.translate.copied import CopiedEnds, has_no_words, split_ends
from nmt.translate.options import LineOptions
from nmt.translate.recasing import find_case, lower_placeholders, to_sentence_case


@dataclass(frozen=True)
class PreparedLine:
    """A line as the model reads it, and what its translation needs to get back."""

    source: str  # the line itself, without its language tag
    text: str  # the line to translate, with its language tag; empty if nothing is translated
    case: str = ""  # the case for its translation, see `find_case`
    ends: CopiedEnds = CopiedEnds()
    """The text to copy to the ends of the translation. If nothing is translated, the start is the
    whole line."""
    num_tag_tokens: int = 0
    """Number of tokens before the text: of a language tag, or `prefix_ids`. Only set with ends."""


def prepare_line(
    line: str, options: LineOptions, tokenizer: Tokenizer, *, has_prefix: bool = False
) -> PreparedLine:
    """Split off the text to copy, and recase the other text, except terms of the glossary.

    `tokenizer` encodes sources. With `has_prefix`, the translation continues a prefix, and the line
    does not change.
    """
    tag, source = split_tag(line, options.tags)
    if not source.strip():  # a line with only a tag is empty, too
        return PreparedLine(source, "")
    if has_prefix:
        return PreparedLine(source, line)
    # terms keep their case, whether the model gets hints or search requires the translations
    glossary = load_glossary(options.hints or options.required_terms)
    text = source
    ends = CopiedEnds()
    if options.copy_symbols:
        if is_copied(source, protect=options.protect):
            return PreparedLine(source, "", ends=CopiedEnds(start=source))
        possible_ends, middle = split_ends(source)
        # terms in the ends need to be translated
        if not glossary.find_spans(" ".join(possible_ends)):
            ends, text = possible_ends, middle
    case = find_case(text) if options.recase else ""
    if case:
        text = glossary.keep_case(text, to_sentence_case(text, tokenizer))
    if case == "upper":
        text = lower_placeholders(text)
    if not case and not any(ends):
        return PreparedLine(source, line)
    [tagged_text] = tag_lines([text], tag)
    num_tag_tokens = 0
    if any(ends):
        num_tag_tokens = _count_tag_tokens(tag or options.tags.src, tokenizer)
    return PreparedLine(source, tagged_text, case, ends, num_tag_tokens)


def is_copied(line: str, *, protect: bool) -> bool:
    """Return whether a line has no words, so that the setting `copy_symbols` copies it.

    With `protect`, placeholders and tags do not count as words.
    """
    if protect and has_only_protected(line):
        return True
    return has_no_words(line)


def _count_tag_tokens(tag: str, tokenizer: Tokenizer) -> int:
    """Return the number of tokens before the text of a line with a language tag, or without."""
    if tag:
        return len(tokenizer.encode(tag))
    # a tokenizer of an imported model puts these ids before text without a tag
    return len(tokenizer.prefix_ids)
