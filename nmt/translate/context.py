"""Translate lines in context, with models that were trained on documents (`data.context`).

The model reads a line after the lines before it, with separators between the lines, and repeats the
separators in the translation. The translation of the last line follows the last separator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from nmt.config import LINE_SEPARATORS, SearchConfig, require_valid
from nmt.data.languages import Tags, encode_sources, find_line_separator
from nmt.data.tokenizer import Tokenizer, Tokenizers
from nmt.errors import ConfigError
from nmt.search.glossary import load_glossary
from nmt.translate.options import LineOptions
from nmt.translate.recasing import apply_case, find_case, to_sentence_case
from nmt.translate.results import LineResult
from nmt.translate.windows import Window, is_copied

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
    # this function adds the context and recases the lines, so `translate_windows` must not
    line_options = replace(options, context=0, recase=False)

    def translate_lines(window: Window, lines: list[str]) -> list[LineResult]:
        """Translate `lines`, with the other attributes of `window`."""
        window = replace(window, lines=lines)
        [translated_window] = translate_windows([window], config, line_options)
        _, results = translated_window
        return results

    for window in windows:
        groups = add_context(
            window,
            options.context,
            copy_symbols=options.copy_symbols,
            protect=config.protect,
        )
        case_names = [""] * len(groups)
        if options.recase:
            groups, case_names = recase_groups(groups, config, tokenizers.src)
        groups = drop_long_context(
            groups,
            tokenizers,
            options.tags,
            max_source_length=options.max_source_length,
            hints=config.hints,
        )
        group_results = translate_lines(window, join_lines(groups, separator))
        last_results = select_last_lines(group_results, groups, separator, case_names)
        retried_indices = [i for i, result in enumerate(last_results) if result is None]
        retried_lines = [groups[i][-1] for i in retried_indices]
        retried_results = translate_lines(window, retried_lines)
        yield window, replace_missing(last_results, retried_results, separator, case_names)


def add_context(
    window: Window, context: int, *, copy_symbols: bool = True, protect: bool = False
) -> list[list[str]]:
    """Return for each line of the window a group of lines, which ends with this line.

    The group has up to `context` earlier lines: only the lines after the last empty line.
    With `copy_symbols`, lines without words are copied instead of translated and get no context.
    With `protect`, placeholders and tags do not count as words.
    """
    lines = [*window.context, *window.lines]
    groups = []
    for i in range(len(window.context), len(lines)):
        start = i
        is_empty = not lines[i].strip()
        is_untranslated = copy_symbols and is_copied(lines[i], protect=protect)
        if not is_empty and not is_untranslated:
            earlier_lines = lines[max(i - context, 0) : i]
            for line in reversed(earlier_lines):
                if not line.strip():
                    break
                start -= 1
        groups.append(lines[start : i + 1])
    return groups


def recase_groups(
    groups: Sequence[Sequence[str]], search: SearchConfig, tokenizer: Tokenizer
) -> tuple[list[list[str]], list[str]]:
    """Convert the lines of groups to ordinary case, see `nmt.translate.recasing`.

    Returns the new groups, and for each group the name of the former case of its last line: a key
    of `nmt.data.perturb.CASES`, or "" for ordinary case. `select_last_lines` applies these cases to
    the translations.
    """
    glossary = load_glossary(tuple(search.glossary))
    recased_groups = []
    case_names = []
    for group in groups:
        line_cases = [find_case(line) for line in group]
        recased_lines = []
        for line, case_name in zip(group, line_cases, strict=True):
            recased_line = line
            if case_name:
                sentence_case_line = to_sentence_case(line, tokenizer)
                recased_line = glossary.keep_case(line, sentence_case_line)
            recased_lines.append(recased_line)
        recased_groups.append(recased_lines)
        case_names.append(line_cases[-1])
    return recased_groups, case_names


def drop_long_context(
    groups: Sequence[Sequence[str]],
    tokenizers: Tokenizers,
    tags: Tags,
    *,
    max_source_length: int,
    hints: Sequence[str] = (),
) -> list[list[str]]:
    """Reduce each group with more than `max_source_length` tokens to its last line.

    The tokens of `hints` (see `SearchConfig.hints`) and EOS are counted, too.
    """
    glossary = load_glossary(tuple(hints))
    lines = join_lines(groups, find_common_separator(tokenizers))
    hinted_lines = [glossary.add_hints(line) for line in lines]
    group_ids = encode_sources(tokenizers.src, hinted_lines, tags)
    short_groups = []
    for group, ids in zip(groups, group_ids, strict=True):
        num_tokens = len(ids) + 1  # with EOS
        if num_tokens > max_source_length:
            short_groups.append([group[-1]])
        else:
            short_groups.append(list(group))
    return short_groups


def join_lines(groups: Sequence[Sequence[str]], separator: str) -> list[str]:
    """Return the text of each group of lines, with `separator` between the lines."""
    return [f" {separator} ".join(group) for group in groups]


def select_last_lines(
    results: Sequence[LineResult],
    groups: Sequence[Sequence[str]],
    separator: str,
    case_names: Sequence[str],
) -> list[LineResult | None]:
    """Return the result of the last line of each group, given the `results` of the groups.

    The text of a last line gets its case in `case_names`, see `recase_groups`. The result of a
    group of several lines is None if its translation failed, is unfinished, has a wrong number of
    separators, or has no text after the last separator.
    """
    last_results: list[LineResult | None] = []
    for result, group, case_name in zip(results, groups, case_names, strict=True):
        if len(group) == 1:
            last_results.append(remove_separators(result, separator, case_name))
        else:
            last_results.append(_select_last_line(result, len(group), separator, case_name))
    return last_results


def replace_missing(
    results: Sequence[LineResult | None],
    retried_results: Sequence[LineResult],
    separator: str,
    case_names: Sequence[str],
) -> list[LineResult]:
    """Return `results` with each None replaced by the next of `retried_results`.

    `retried_results` has one result for each None: of the same line, translated without context.
    """
    retried = iter(retried_results)
    complete_results = []
    for result, case_name in zip(results, case_names, strict=True):
        if result is None:
            result = remove_separators(next(retried), separator, case_name)
        complete_results.append(result)
    return complete_results


def remove_separators(result: LineResult, separator: str, case_name: str = "") -> LineResult:
    """Remove separators from the translation of a line without context, and apply its case."""
    if result.error is not None:
        return result
    texts = [text.strip() for text in result.text.split(separator)]
    return _replace_text(result, " ".join(filter(None, texts)), case_name)


def _select_last_line(
    result: LineResult, num_lines: int, separator: str, case_name: str
) -> LineResult | None:
    """Return the result of the last of several lines; see `select_last_lines`."""
    if result.error is not None or not result.translations[0].finished:
        return None
    texts = [text.strip() for text in result.text.split(separator)]
    if len(texts) != num_lines or not texts[-1]:
        return None
    return _replace_text(result, texts[-1], case_name)


def _replace_text(result: LineResult, text: str, case_name: str) -> LineResult:
    """Return the result with `text` as its only translation, in the case `case_name`, if any."""
    if case_name:
        text = apply_case(text, case_name)
    best = result.translations[0]
    return replace(result, translations=[replace(best, text=text)])
