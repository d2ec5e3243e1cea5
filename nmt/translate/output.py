"""How the result of a line is written: plain text, or one JSON object."""

from __future__ import annotations

import json
from typing import Any

from nmt.config import OutputFormat
from nmt.translate.results import LineResult, Translation


def to_line(result: LineResult, index: int, output_format: OutputFormat) -> bytes:
    """Return the line, with its end, that answers line `index` (from 0)."""
    if output_format is OutputFormat.text:
        return result.text.encode("utf-8") + b"\n"
    return json.dumps(_to_json(result, index), ensure_ascii=False).encode("utf-8") + b"\n"


def _to_json(result: LineResult, index: int) -> dict[str, Any]:
    content: dict[str, Any] = {"index": index}
    if result.error is not None:
        content["error"] = result.error
    if result.num_parts > 1:
        content["num_parts"] = result.num_parts
    if result.num_left_out:
        content["num_left_out"] = result.num_left_out
    if result.source_tokens:
        content["source_tokens"] = result.source_tokens
    content["hypotheses"] = [_hypothesis(t) for t in result.translations]
    return content


def _hypothesis(translation: Translation) -> dict[str, Any]:
    content: dict[str, Any] = {
        "text": translation.text,
        "score": translation.score,
        "log_prob": translation.log_prob,
        "tokens": translation.tokens,
        "token_log_probs": translation.token_log_probs,
        "finished": translation.finished,
    }
    if translation.alignment is not None:
        content["alignment"] = translation.alignment
    return content
