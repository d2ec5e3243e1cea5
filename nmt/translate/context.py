"""Translate lines in context, with models that were trained on documents (`data.context`).

The model reads a line after the lines before it, with separators between the lines, and repeats the
separators in the translation. The translation of the last line follows the last separator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from nmt.config import LINE_SEPARATORS, SearchConfig, require_valid
from nmt.data.languages import encode_sources, find_line_separator
from nmt.data.tokenizer import Tokenizers
from nmt.errors import ConfigError
from nmt.search.glossary import load_glossary
from nmt.translate.options import LineOptions, add_search_settings
from nmt.translate.prepared_lines import PreparedLine, is_copied, prepare_line
from nmt.translate.restoring import restore_line
from nmt.translate.results import LineResult
from nmt.translate.windows import Window

WindowResults = Iterator[tuple[Window, list[LineResult]]]
"""Windows with the results of their lines."""
_MAX_CONTEXT = 100  # lines


def check_context(context: int, tokenizers: Tokenizers) -> None:
    """Raise a `ConfigError` if a model cannot read `context` lines before each line."""
    require_valid(0 <= context <= _MAX_CONTEXT, "context", context, f"must be 0 to {_MAX_CONTEXT}")
    if context and not find_common_separator(tokenizers):
        raise ConfigError(
            f"context={context}: the model has no {LINE_SEPARATORS[0]}; train it on data that "
            "nmt-preprocess prepared with data.context"
        )


def find_common_separator(tokenizers: Tokenizers) -> str:
    """Return the separator of lines that both tokenizers have, or an empty text."""
    src_separator = find_line_separator(tokenizers.src)
    tgt_separator = find_line_separator(tokenizers.tgt)
    return src_separator if src_separator == tgt_separator else ""


def translate_in_context(
    windows: Iterable[Window],
    translate_windows: Callable[[Iterable[Window], SearchConfig, LineOptions], WindowResults],
    tokenizers: Tokenizers,
    config: SearchConfig,
    options: LineOptions,
) -> WindowResults:
    """Translate each line together with the `options.context` lines before it.

    If that gives no result for the line (see `select_last_lines`), translates the line without
    context. `translate_windows` is a function that translates each line of windows on its own.
    """
    separator = find_common_separator(tokenizers)
    options = add_search_settings(options, config)
    # the lines are prepared before they are joined, and their translations are restored here
    joined_options = replace(options, context=0, recase=False, copy_symbols=False)

    def translate_lines(window: Window, lines: list[str]) -> list[LineResult]:
        """Translate `lines`, with the other attributes of `window`."""
        window = replace(window, lines=lines)
        [translated_window] = translate_windows([window], config, joined_options)
        _, results = translated_window
        return results

    for window in windows:
        line_groups = add_context(window, options)
        groups, last_lines = prepare_groups(line_groups, tokenizers, options)
        group_results = translate_lines(window, join_lines(groups, separator))
        last_results = select_last_lines(group_results, groups, separator)
        retried_indices = [i for i, result in enumerate(last_results) if result is None]
        retried_lines = [groups[i][-1] for i in retried_indices]
        retried_results = translate_lines(window, retried_lines)
        results = replace_missing(last_results, retried_results, separator)
        yield window, list(map(restore_line, results, last_lines))


def add_context(window: Window, options: LineOptions) -> list[list[str]]:
    """Return for each line of the window a group of lines, which ends with this line.

    The group has up to `options.context` earlier lines: only the lines after the last empty line.
    A line that is copied instead of translated gets no context.
    """
    lines = [*window.context, *window.lines]
    groups = []
    for i in range(len(window.context), len(lines)):
        start = i
        is_empty = not lines[i].strip()
        is_untranslated = options.copy_symbols and is_copied(lines[i], protect=options.protect)
        if not is_empty and not is_untranslated:
            earlier_lines = lines[max(i - options.context, 0) : i]
            for line in reversed(earlier_lines):
                if not line.strip():
                    break
                start -= 1
        groups.append(lines[start : i + 1])
    return groups


def prepare_groups(
    line_groups: Sequence[Sequence[str]], tokenizers: Tokenizers, options: LineOptions
) -> tuple[list[list[str]], list[PreparedLine]]:
    """Prepare the lines of groups, see `nmt.translate.prepared_lines`.

    Returns the texts of each group, and the last line of each group, which restores its
    translation. A line without words stays in the context of other lines. A group that is too long
    is reduced to its last line.
    """
    groups = []
    last_lines = []
    for lines in line_groups:
        *context_lines, last_line = [prepare_line(line, options, tokenizers.src) for line in lines]
        texts = [line.text or line.source for line in context_lines]
        groups.append([*texts, last_line.text])
        last_lines.append(last_line)
    return _drop_long_context(groups, tokenizers, options), last_lines


def _drop_long_context(
    groups: Sequence[Sequence[str]], tokenizers: Tokenizers, options: LineOptions
) -> list[list[str]]:
    """Reduce each group with more than `max_source_length` tokens to its last line.

    The tokens of hints of a glossary and EOS are counted, too.
    """
    glossary = load_glossary(options.hints)
    lines = join_lines(groups, find_common_separator(tokenizers))
    hinted_lines = [glossary.add_hints(line) for line in lines]
    group_ids = encode_sources(tokenizers.src, hinted_lines, options.tags)
    short_groups = []
    for group, ids in zip(groups, group_ids, strict=True):
        num_tokens = len(ids) + 1  # with EOS
        if num_tokens > options.max_source_length:
            short_groups.append([group[-1]])
        else:
            short_groups.append(list(group))
    return short_groups


def join_lines(groups: Sequence[Sequence[str]], separator: str) -> list[str]:
    """Return the text of each group of lines, with `separator` between the lines."""
    return [f" {separator} ".join(group) for group in groups]


def select_last_lines(
    results: Sequence[LineResult], groups: Sequence[Sequence[str]], separator: str
) -> list[LineResult | None]:
    """Return the result of the last line of each group, given the `results` of the groups.

    The result of a group of several lines is None if its translation failed, is unfinished, has a
    wrong number of separators, or has no text after the last separator.
    """
    last_results: list[LineResult | None] = []
    for result, group in zip(results, groups, strict=True):
        if len(group) == 1:
            last_results.append(remove_separators(result, separator))
        else:
            last_results.append(_select_last_line(result, len(group), separator))
    return last_results


def replace_missing(
    results: Sequence[LineResult | None], retried_results: Sequence[LineResult], separator: str
) -> list[LineResult]:
    """Return `results` with each None replaced by the next of `retried_results`.

    `retried_results` has one result for each None: of the same line, translated without context.
    """
    retried = iter(retried_results)
    complete_results = []
    for result in results:
        if result is None:
            result = remove_separators(next(retried), separator)
        complete_results.append(result)
    return complete_results


def remove_separators(result: LineResult, separator: str) -> LineResult:
    """Remove separators from the translation of a line without context."""
    if result.error is not None:
        return result
    texts = [text.strip() for text in result.text.split(separator)]
    return _replace_text(result, " ".join(filter(None, texts)))


def _select_last_line(result: LineResult, num_lines: int, separator: str) -> LineResult | None:
    """Return the result of the last of several lines; see `select_last_lines`."""
    if result.error is not None or not result.translations[0].finished:
        return None
    texts = [text.strip() for text in result.text.split(separator)]
    if len(texts) != num_lines or not texts[-1]:
        return None
    return _replace_text(result, texts[-1])


def _replace_text(result: LineResult, text: str) -> LineResult:
    """Return the result with `text` as its only translation."""
    best = result.translations[0]
    return replace(result, translations=[replace(best, text=text)])
