"""The route /v1/attention: attention weights for a sentence and its translation."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from nmt.data.languages import Tags, tag_lines
from nmt.errors import ConfigError
from nmt.serve.http_errors import HttpError, InvalidRequestError
from nmt.serve.parameters import admit, parse_json
from nmt.serve.service import run_unless_disconnected
from nmt.translate.attention import KINDS, attention_shape
from nmt.translate.translator import Translator

_MAX_ATTENTION_TOKENS = 256  # maximum number of tokens of the source, and of the translation
_WEIGHT_DECIMALS = 4  # weights in the response are rounded to this number of decimals


async def attention(request: Request) -> Response:
    """POST /v1/attention."""
    api_request = admit(request, parse_json(await request.body()))
    service = api_request.service
    params = api_request.params
    sentence = params.text("text")
    translation = params.text("translation")
    options = api_request.language_options()
    api_request.check_size([sentence, translation])
    kind = params.text("kind") if "kind" in params else "cross"
    if kind != "all" and kind not in KINDS:
        kinds = ", ".join(KINDS)
        raise InvalidRequestError(f"kind={kind}: give all or one of {kinds}")
    layer = params.integer("layer", default=0)
    head = None  # the mean of all heads
    if params.get("head") is not None:
        head = params.integer("head", default=0)
    direction = service.models.resolve_direction(sentence, options).direction
    if direction is None:
        raise HttpError(404, f"{params['target']} texts are not translated to {params['target']}")
    shape = attention_shape(direction.translator.backend)
    if shape is not None and kind != "all":  # without a shape, `_compute_attention` raises an error
        if shape[kind] == 0:
            raise HttpError(404, f"kind={kind}: the decoder of this model has no self-attention")
        _check_index("layer", layer, shape[kind])
        _check_index("head", head or 0, shape["heads"])
    [src_line] = tag_lines([sentence], direction.tags.src)
    [tgt_line] = tag_lines([translation], direction.tags.tgt)
    computation = service.text_translator.call_function(
        direction, _compute_attention, src_line, tgt_line, kind, layer, head
    )
    return JSONResponse(await run_unless_disconnected(request, computation))


def _check_index(name: str, index: int, count: int) -> None:
    """Raise a 404 `HttpError` if no layer or head has this index."""
    if index >= count:
        raise HttpError(404, f"{name}={index}: no such {name}; the last one is {count - 1}")


def _compute_attention(
    translator: Translator, src_line: str, tgt_line: str, kind: str, layer: int, head: int | None
) -> dict[str, Any]:
    """Return the attention weights of a layer and head, as the JSON object of the response.

    If `head` is None, returns the mean of all heads. If `kind` is "all", returns the weights of all
    layers and heads. The lines begin with the tags of the direction.
    """
    num_src_tokens = len(translator.tokenizer.src.encode(src_line)) + 1  # with EOS
    num_tgt_tokens = len(translator.tokenizer.tgt.encode(tgt_line)) + 1
    num_tokens = max(num_src_tokens, num_tgt_tokens)
    if num_tokens > _MAX_ATTENTION_TOKENS:
        raise ConfigError(
            f"{num_tokens} tokens are more than {_MAX_ATTENTION_TOKENS}; give a shorter sentence"
        )
    [pair] = translator.attention([src_line], [tgt_line], tags=Tags())
    if kind == "all":
        return pair.as_json()
    attention_map = pair.attention_map(kind)
    layer_weights = attention_map.weights[layer]  # (H, rows, columns)
    weights = layer_weights.mean(dim=0) if head is None else layer_weights[head]  # (rows, columns)
    rounded = []
    for row in weights.tolist():
        rounded.append([round(weight, _WEIGHT_DECIMALS) for weight in row])
    return {"rows": attention_map.rows, "columns": attention_map.columns, "weights": rounded}
