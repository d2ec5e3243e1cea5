"""Translate lines in context, with models that were trained on documents (`data.context`).

The model reads a line after the lines before it, with separators between the lines, and repeats the
separators in the translation. The translation of the last line follows the last separator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from nmt.config import LINE_SEPARATORS, SearchConfig, require_valid
from nmt.data.languages import Tags, encode_sources, find_line_separator
from nmt.data.tokenizer import Tokenizers
from nmt.errors import ConfigError
from nmt.search.glossary import load_glossary
from nmt.translate.options import LineOptions
from nmt.translate.recasing import apply_case, to_sentence_case
from nmt.translate.results import LineResult
from nmt.translate.windows import Window, choose_case, is_copied

WindowResults = Iterator[tuple[Window, list[LineResult]]]
"""Windows with the results of their lines."""
_MAX_CONTEXT = 100  # lines


def check_context(context: int, tokenizer: Tokenizers) -> None:
    """Raise a `ConfigError` if a model cannot read `context` lines before each line."""
    require_valid(0 <= context <= _MAX_CONTEXT, "context", context, f"must be 0 to {_MAX_CONTEXT}")
    if context and not find_common_separator(tokenizer):
        raise ConfigError(
            f"context={context}: the model has no {LINE_SEPARATORS[0]}; train it on data that "
            "nmt-preprocess prepared with data.context"
        )


def find_common_separator(tokenizer: Tokenizers) -> str:
    """Return the separator of lines that both tokenizers have, or an empty text."""
    separator = find_line_separator(tokenizer.src)
    return separator if find_line_separator(tokenizer.tgt) == separator else ""


def translate_in_context(
    windows: Iterable[Window],
    translate_windows: Callable[[Iterable[Window], SearchConfig, LineOptions], WindowResults],
    tokenizer: Tokenizers,
    config: SearchConfig,
    options: LineOptions,
) -> WindowResults:
    """Translate each line together with the `options.context` lines before it.

    If that fails, translates the line without context. `translate_windows` translates without
    context.
    """
    separator = find_common_separator(tokenizer)
    line_options = replace(options, context=0, recase=False)  # `recase_groups` recases

    def translate_lines(window: Window, lines: list[str]) -> list[LineResult]:
        window = replace(window, lines=lines)
        [(_, results)] = translate_windows([window], config, line_options)
        return results

    for window in windows:
        groups = add_context(
            window,
            options.context,
            copy_symbols=options.copy_symbols,
            protect=config.protect,
        )
        cases = [""] * len(groups)
        if options.recase:
            groups, cases = recase_groups(groups, config)
        groups = drop_long_context(
            groups,
            tokenizer,
            options.tags,
            max_source_length=options.max_source_length,
            hints=config.hints,
        )
        group_results = translate_lines(window, join_lines(groups, separator))
        results = []
        for result, group, case in zip(group_results, groups, cases, strict=True):
            results.append(take_last(result, len(group), separator, case))
        retried = [i for i, result in enumerate(results) if result is None]
        retried_results = translate_lines(window, [groups[i][-1] for i in retried])
        for i, result in zip(retried, retried_results, strict=True):
            results[i] = take_last(result, 1, separator, cases[i])
        yield window, list(filter(None, results))  # every line has a result now


def add_context(
    window: Window, context: int, *, copy_symbols: bool = True, protect: bool = False
) -> list[list[str]]:
    """Return for each line of the window a group: up to `context` lines before it, and the line.

    Context does not reach beyond an empty line. Lines that are copied instead of translated get no
    context; see `LineOptions` for `copy_symbols` and `protect`.
    """
    lines = [*window.context, *window.lines]
    groups = []
    for i in range(len(window.context), len(lines)):
        start = i
        is_empty = not lines[i].strip()
        if not is_empty and not (copy_symbols and is_copied(lines[i], protect=protect)):
            earliest_start = max(i - context, 0)
            while start > earliest_start and lines[start - 1].strip():
                start -= 1
        groups.append(lines[start : i + 1])
    return groups


def recase_groups(
    groups: Sequence[Sequence[str]], search: SearchConfig
) -> tuple[list[list[str]], list[str]]:
    """Return the groups in ordinary case, and for each group the case of its last line.

    `take_last` applies the case to the translation. See `nmt.translate.recasing`.
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
    """Reduce each group with more than `max_source_length` tokens to its last line.

    The tokens of `hints` (see `SearchConfig.hints`) and EOS count, too.
    """
    glossary = load_glossary(tuple(hints))
    lines = join_lines(groups, find_common_separator(tokenizer))
    hinted_lines = [glossary.add_hints(line) for line in lines]
    group_ids = encode_sources(tokenizer.src, hinted_lines, tags)
    short_groups = []
    for group, ids in zip(groups, group_ids, strict=True):
        num_tokens = len(ids) + 1  # with EOS
        short_groups.append(list(group[-1:] if num_tokens > max_source_length else group))
    return short_groups


def join_lines(groups: Sequence[Sequence[str]], separator: str) -> list[str]:
    """Return the text of each group of lines, with `separator` between the lines."""
    return [f" {separator} ".join(group) for group in groups]


def take_last(
    result: LineResult, num_lines: int, separator: str, case: str = ""
) -> LineResult | None:
    """Return the result of the last line, given the `result` of a group of `num_lines` lines.

    The text of the last line gets the `case` that `recase_groups` returned. Returns None if the
    translation of several lines failed, is unfinished, has a wrong number of separators, or has no
    text after the last separator. A group of one line always has a result, without separators.
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
