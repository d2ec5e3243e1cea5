"""Translate a line together with the lines before it, for models trained on documents
(`data.context`).

The model reads the lines with separators between them and repeats them in the translation. The
translation of the last line follows the last separator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nmt.config import SEPARATORS, SearchConfig, require_valid
from nmt.data.languages import Tags, encode_sources, find_separator
from nmt.data.tokenizer import Tokenizers
from nmt.errors import ConfigError
from nmt.search.glossary import load_glossary
from nmt.translate.recasing import apply_case, to_sentence_case
from nmt.translate.results import LineResult
from nmt.translate.windows import Window, choose_case, is_copied

_MAX_CONTEXT = 100  # lines


def check_context(context: int, tokenizer: Tokenizers) -> None:
    """Raise a `ConfigError` if a model cannot read `context` lines before each line."""
    require_valid(0 <= context <= _MAX_CONTEXT, "context", context, f"must be 0 to {_MAX_CONTEXT}")
    if context and not find_common_separator(tokenizer):
        raise ConfigError(
            f"context={context}: the model has no {SEPARATORS[0]}; train it on data that "
            "nmt-preprocess prepared with data.context"
        )


def find_common_separator(tokenizer: Tokenizers) -> str:
    """Return the separator of lines on both sides of a model, or an empty text."""
    separator = find_separator(tokenizer.src)
    return separator if find_separator(tokenizer.tgt) == separator else ""


def add_context(
    window: Window, context: int, *, copy_symbols: bool = True, protect: bool = False
) -> list[list[str]]:
    """Return a group for each line of the window: up to `context` lines before it, and the line.

    Context ends at an empty line. A line that is copied gets no context; see `LineOptions` for
    `copy_symbols` and `protect`.
    """
    lines = [*window.context, *window.lines]
    groups = []
    for i in range(len(window.context), len(lines)):
        earliest = max(i - context, 0)
        if not lines[i].strip() or (copy_symbols and is_copied(lines[i], protect=protect)):
            earliest = i
        start = i
        while start > earliest and lines[start - 1].strip():
            start -= 1
        groups.append(lines[start : i + 1])
    return groups


def recase_groups(
    groups: Sequence[Sequence[str]], search: SearchConfig
) -> tuple[list[list[str]], list[str]]:
    """Return groups whose lines are in ordinary case, and the case of the last line of each.

    The translation of the last line gets this case. See `nmt.translate.recasing`.
    """
    terms = load_glossary(tuple(search.glossary))
    recased_groups = []
    cases = []
    for group in groups:
        recased_lines = []
        for line in group:
            case = choose_case(line, protect=search.protect)
            if case:
                line = terms.keep_case(line, to_sentence_case(line))
            recased_lines.append(line)
        recased_groups.append(recased_lines)
        cases.append(case)
    return recased_groups, cases


def drop_long_context(
    groups: Sequence[Sequence[str]],
    tokenizer: Tokenizers,
    tags: Tags,
    *,
    max_source_length: int,
    hints: Sequence[str] = (),
) -> list[list[str]]:
    """Return the groups; of one with more than `max_source_length` tokens, only the last line.

    The tokens of `hints`, see `SearchConfig.hints`, count too.
    """
    glossary = load_glossary(tuple(hints))
    lines = join_lines(groups, find_common_separator(tokenizer))
    hinted_lines = [glossary.add_hints(line) for line in lines]
    group_ids = encode_sources(tokenizer.src, hinted_lines, tags)
    short_groups = []
    for group, ids in zip(groups, group_ids, strict=True):
        is_long = len(ids) + 1 > max_source_length  # 1: EOS
        short_groups.append(list(group[-1:] if is_long else group))
    return short_groups


def join_lines(groups: Sequence[Sequence[str]], separator: str) -> list[str]:
    """Return the text of each group of lines, with `separator` between the lines."""
    return [f" {separator} ".join(group) for group in groups]


def take_last(
    result: LineResult, num_lines: int, separator: str, case: str = ""
) -> LineResult | None:
    """Return the result of the last line, from the `result` of `num_lines` lines together.

    Its text gets the `case` that `recase_groups` returns.

    Returns None if their translation failed, is unfinished, has a wrong number of separators, or
    has no text after the last one. A single line always has a result; separators in it are removed.
    """
    if result.error is not None:
        return result if num_lines == 1 else None
    best = result.translations[0]
    texts = [text.strip() for text in result.text.split(separator)]
    if num_lines == 1:
        last_text = " ".join(filter(None, texts))
    elif len(texts) == num_lines and texts[-1] and best.finished:
        last_text = texts[-1]
    else:
        return None
    if case:
        last_text = apply_case(last_text, case)
    return replace(result, translations=[replace(best, text=last_text)])
