"""Read the parameters of API requests, check their types and sizes, and admit requests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from starlette.exceptions import HTTPException
from starlette.requests import Request

from nmt.serve.access import RequestContext, get_bearer_token
from nmt.serve.http_errors import HttpError, InvalidRequestError
from nmt.serve.models import TranslationOptions
from nmt.serve.service import Service

_MAX_FORM_FIELDS = 1000
_MAX_JSON_VALUES = 500_000  # limited, since parsing blocks the event loop


def get_service(request: Request) -> Service:
    """Return the service that `make_app` stored in the application."""
    return request.app.state.service  # type: ignore[no-any-return]


def get_context(request: Request) -> RequestContext:
    """Return the context that `Middleware` stored in the ASGI scope of the request."""
    return request.scope["state"]["context"]  # type: ignore[no-any-return]


class Parameters(dict[str, Any]):
    """The parameters of a request. Each method raises a 400 `HttpError` for an invalid value."""

    def text(self, name: str, default: str | None = None) -> str:
        """Return a parameter that is a string.

        A missing or empty parameter gets the value `default`. Without a default, it is an error.
        """
        value = self.get(name)
        if value is None or value == "":
            if default is None:
                raise InvalidRequestError(f"missing {name} parameter")
            return default
        if not isinstance(value, str):
            raise InvalidRequestError(f"{name} is not a string")
        _check_unicode(name, value)
        return value

    def texts(self, name: str) -> list[str]:
        """Return a list of strings; a single string becomes a list of one."""
        value = self.get(name)
        if not value:
            raise InvalidRequestError(f"missing {name} parameter")
        texts = value if isinstance(value, list) else [value]
        for text in texts:
            if not isinstance(text, str):
                raise InvalidRequestError(f"{name} is not a string or list of strings")
            _check_unicode(name, text)
        return texts

    def integer(self, name: str, *, default: int, maximum: int | None = None) -> int:
        """Return an integer from 0 to `maximum`, which may be written as a string of digits."""
        value = self.get(name, default)
        if isinstance(value, (bool, float)):
            raise InvalidRequestError(f"{name} is not an integer")
        try:
            number = int(value)
        except (TypeError, ValueError):
            raise InvalidRequestError(f"{name} is not a number") from None
        is_too_large = maximum is not None and number > maximum
        if number < 0 or is_too_large:
            limit = "0 or more" if maximum is None else f"from 0 to {maximum}"
            raise InvalidRequestError(f"{name} is not {limit}")
        return number

    def flag(self, name: str) -> bool:
        """Return a boolean, false by default."""
        value = self.get(name, False)
        if not isinstance(value, bool):
            raise InvalidRequestError(f"{name} is not true or false")
        return value

    def is_html(self) -> bool:
        """Return whether the parameter `format` is html. The default is text."""
        text_format = self.text("format", default="text")
        if text_format not in ("text", "html"):
            raise HttpError(400, f"{text_format} format is not supported")
        return text_format == "html"


def _check_unicode(name: str, text: str) -> None:
    """Raise a 400 `HttpError` for a text that cannot be encoded in UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{name} has half a surrogate pair at character {error.start}"
        ) from None


@dataclass(frozen=True)
class ApiRequest:
    """A request with its parameters, after `admit` has checked its API key and rate."""

    service: Service
    context: RequestContext
    params: Parameters

    def language_options(self) -> TranslationOptions:
        """Return options with the parameters `source` and `target`, which are required."""
        source = self.params.text("source")
        target = self.params.text("target")
        return TranslationOptions(source=source.lower(), target=target.lower())

    def check_size(
        self, texts: Sequence[str], *, is_list: bool = False, is_file: bool = False
    ) -> None:
        """Raise a 400 `HttpError` if there are too many texts or characters.

        Only lists have a limit on the number of texts.
        """
        batch_limit = self.service.config.batch_limit
        if is_list and batch_limit and len(texts) > batch_limit:
            raise InvalidRequestError(f"{len(texts)} texts exceed the limit of {batch_limit}")
        self.check_characters(sum(map(len, texts)), is_file=is_file)

    def check_characters(self, num_characters: int, *, is_file: bool) -> None:
        """Raise a 400 `HttpError` for too many characters. Files have another limit."""
        limit = self.service.admission.char_limit(self.context, is_file=is_file)
        if limit and num_characters > limit:
            raise InvalidRequestError(f"{num_characters} characters exceed the limit of {limit}")


def admit(request: Request, params: Parameters) -> ApiRequest:
    """Check the API key and the rate of a request. Raises a 4xx `HttpError` to refuse the request.

    The key is the parameter `api_key`, or else the bearer token in the Authorization header.
    """
    service = get_service(request)
    context = get_context(request)
    api_key = params.text("api_key", default="") or get_bearer_token(request)
    service.admission.check(context, api_key)
    return ApiRequest(service, context, params)


async def read_request(request: Request) -> ApiRequest:
    """Read the parameters of a request and admit it.

    If the media type of the body is JSON, the body is an object with the parameters. Otherwise, the
    parameters are the fields of a form in the body and the fields of the query string. Line ends in
    the fields become `\\n`.
    """
    media_type = get_media_type(request)
    if media_type == "application/json" or media_type.endswith("+json"):
        return admit(request, parse_json(await request.body()))
    params = Parameters()
    if media_type == "multipart/form-data":
        try:
            form = await request.form(max_files=1, max_fields=_MAX_FORM_FIELDS)
        except HTTPException as error:
            raise HttpError(400, f"Invalid form: {error.detail}") from None
        params.update(form.items())
    else:
        params.update(_decode_form(await request.body(), "form"))
    params.update(_decode_form(request.scope.get("query_string", b""), "query string"))
    for name, value in params.items():
        if isinstance(value, str):
            params[name] = value.replace("\r\n", "\n").replace("\r", "\n")
    return admit(request, params)


def get_media_type(request: Request) -> str:
    """Return the media type of the body, without parameters such as the charset."""
    return request.headers.get("content-type", "").split(";")[0].strip().lower()


def parse_json(body: bytes) -> Parameters:
    """Return the parameters of a JSON body. Raises a 400 `HttpError` if it is not an object."""
    # Each value in a list or object follows one of these characters, so there are at least as many
    # characters as values. Texts may contain such characters too.
    num_separators = body.count(b",") + body.count(b"[") + body.count(b"{")
    if num_separators > _MAX_JSON_VALUES:
        raise HttpError(400, f"Invalid JSON: more than {_MAX_JSON_VALUES} values")
    try:
        content = json.loads(body.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise HttpError(400, f"Invalid JSON: not UTF-8 (byte {error.start + 1})") from None
    except RecursionError:
        raise HttpError(400, "Invalid JSON: nested too deeply") from None
    except ValueError as error:
        raise HttpError(400, f"Invalid JSON: {error}") from None
    if not isinstance(content, dict):
        raise HttpError(400, "Invalid JSON: send an object with the parameters")
    return Parameters(content)


def _decode_form(content: bytes, form_name: str) -> list[tuple[str, str]]:
    """Return the names and values of URL-encoded fields; `form_name` is for error messages."""
    try:
        return parse_qsl(
            content.decode(),  # raises a ValueError if it is not UTF-8
            keep_blank_values=True,
            errors="strict",
            max_num_fields=_MAX_FORM_FIELDS,
        )
    except ValueError:
        raise HttpError(400, f"Invalid {form_name}: send it URL-encoded, in UTF-8") from None
