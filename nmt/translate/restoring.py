"""Give translations the letter case and the copied ends of their lines.

This reverses what `nmt.translate.prepared_lines` does with the lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from nmt.translate.prepared_lines import PreparedLine
from nmt.translate.recasing import apply_case, restore_placeholders
from nmt.translate.results import LineResult, Translation
from nmt.translate.windows import EncodedWindow

_FULL_STOPS = (".", "。")
_Value = TypeVar("_Value")


def restore_lines(results: Sequence[LineResult], encoded: EncodedWindow) -> list[LineResult]:
    """Return the results of the lines of a window with the case and the ends of the lines."""
    restored = []
    for result, line in zip(results, encoded.lines, strict=True):
        restored.append(
            restore_line(result, line, num_target_tag_tokens=encoded.num_target_tag_tokens)
        )
    return restored


def restore_line(
    result: LineResult, line: PreparedLine, *, num_target_tag_tokens: int = 0
) -> LineResult:
    """Return the result of a line with the case and the ends of the line.

    With an alignment, each word of the ends also becomes a token on both sides. The start comes
    after the language tags. The end comes last, after the EOS of the source.
    `num_target_tag_tokens` is the number of tokens of the tag that translations begin with.
    """
    if not line.case and not any(line.ends):
        return result
    translations = [_restore_text(translation, line) for translation in result.translations]
    result = replace(result, translations=translations)
    if result.source_tokens:
        return _add_end_tokens(result, line, num_target_tag_tokens)
    return result


def _restore_text(translation: Translation, line: PreparedLine) -> Translation:
    """Return a translation with the case and the ends of its line, but without further tokens."""
    if line.ends.continues(line.text):
        translation = _remove_full_stop(translation)
    text = translation.text
    if line.case:
        text = apply_case(text, line.case)
    if line.case == "upper":
        text = restore_placeholders(text, line.source)
    return replace(translation, text=f"{line.ends.start}{text}{line.ends.end}")


def _remove_full_stop(translation: Translation) -> Translation:
    """Remove the full stop at the end of a translation, but not an ellipsis of several.

    Also removes it from the tokens if they are aligned.
    """
    text = translation.text
    if text.endswith("..") or not text.endswith(_FULL_STOPS):
        return translation
    translation = replace(translation, text=text[:-1].rstrip())
    if translation.alignment is None or not translation.tokens[-1].endswith(_FULL_STOPS):
        return translation
    num_kept = len(translation.tokens) - 1
    kept_tokens = translation.tokens[:num_kept]
    shortened_token = translation.tokens[-1][:-1]
    if shortened_token.strip("▁"):
        return replace(translation, tokens=[*kept_tokens, shortened_token])
    log_probs = translation.token_log_probs  # ends with the one of EOS, if it was generated
    return replace(
        translation,
        tokens=kept_tokens,
        token_log_probs=log_probs[:num_kept] + log_probs[num_kept + 1 :],
        alignment=translation.alignment[:num_kept],
    )


def _add_end_tokens(
    result: LineResult, line: PreparedLine, num_target_tag_tokens: int
) -> LineResult:
    """Add a token for each word of the ends to the source and to the aligned translations."""
    start_tokens = [f"▁{word}" for word in line.ends.start.split()]
    end_tokens = [f"▁{word}" for word in line.ends.end.split()]
    source_tokens = _insert_values(
        result.source_tokens,
        start_tokens,
        end_tokens,
        start_index=line.num_tag_tokens,
        end_index=len(result.source_tokens),
    )
    num_start = len(start_tokens)
    start_positions = range(line.num_tag_tokens, line.num_tag_tokens + num_start)
    end_positions = range(len(source_tokens) - len(end_tokens), len(source_tokens))
    translations = []
    for translation in result.translations:
        assert translation.alignment is not None
        alignment = []
        for position in translation.alignment:
            follows_start = position >= line.num_tag_tokens
            alignment.append(position + num_start if follows_start else position)
        insert_ends = partial(
            _insert_values, start_index=num_target_tag_tokens, end_index=len(translation.tokens)
        )
        log_probs = translation.token_log_probs
        if log_probs:  # an engine may leave them out
            log_probs = insert_ends(log_probs, [0.0] * num_start, [0.0] * len(end_tokens))
        aligned = replace(
            translation,
            tokens=insert_ends(translation.tokens, start_tokens, end_tokens),
            token_log_probs=log_probs,
            alignment=insert_ends(alignment, start_positions, end_positions),
        )
        translations.append(aligned)
    return replace(result, translations=translations, source_tokens=source_tokens)


def _insert_values(
    values: Sequence[_Value],
    start_values: Iterable[_Value],
    end_values: Iterable[_Value],
    *,
    start_index: int,
    end_index: int,
) -> list[_Value]:
    """Return `values` with others inserted before two of their indices."""
    tag_values = values[:start_index]
    middle_values = values[start_index:end_index]
    remaining_values = values[end_index:]
    return [*tag_values, *start_values, *middle_values, *end_values, *remaining_values]
