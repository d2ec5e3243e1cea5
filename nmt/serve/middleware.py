"""The middleware that all requests pass through, and the responses to exceptions."""

from __future__ import annotations

import logging
import re
import secrets
import time
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nmt.errors import ConfigError, DataError, NmtError
from nmt.serve.access import LimitedBody, RequestContext, get_client_name
from nmt.serve.http_errors import (
    ClientDisconnectedError,
    HttpError,
    InvalidRequestError,
    UnsupportedLanguageError,
)
from nmt.serve.monitoring import log_access
from nmt.serve.parameters import get_context, get_service
from nmt.serve.service import Service

log = logging.getLogger(__name__)

_CORS_HEADERS = [
    (b"access-control-allow-origin", b"*"),
    (b"access-control-allow-headers", b"Authorization, Content-Type"),
    (b"access-control-expose-headers", b"X-Request-ID, Retry-After"),
    (b"access-control-allow-methods", b"GET, POST"),
    (b"access-control-max-age", b"1728000"),  # seconds
]
_UPLOAD_ROUTES = ("/translate_file", "/v1/translate")  # accept bodies of `max_file_bytes`
_CLIENT_CLOSED = 499  # status in logs and metrics if the client disconnects before the response
_REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MAX_LOGGED_ERROR_CHARACTERS = 300
_MAX_LOGGED_PATH_CHARACTERS = 200
_MAX_NUMBER_DIGITS = 18  # a number with this many digits exceeds every limit


def is_page(path: str) -> bool:
    """Return whether a path belongs to the web page. All other paths belong to the API."""
    return path in ("/", "/docs") or path.startswith("/static/")


class Middleware:
    """An ASGI application that passes requests on to `app`, the application with the routes.

    Gives each request an id, limits the body, adds headers to the response, and counts and logs the
    request.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.monotonic()
        request = Request(scope)
        context = _make_context(request)
        state = scope.setdefault("state", {})
        state["context"] = context  # `get_context` returns it
        max_bytes = self._service.config.max_body_bytes
        if scope["path"] in _UPLOAD_ROUTES:
            max_bytes = max(max_bytes, self._service.config.max_file_bytes)
        body = LimitedBody(self._service.body_limits, receive, max_bytes)
        sender = _ResponseSender(send, context.id, allow_all_origins=not is_page(scope["path"]))
        try:
            app = self._choose_app(request, context, max_bytes)
            await app(scope, body.receive, sender)
        except Exception:
            # After `_respond_to_bug` has sent a response, Starlette raises the exception again. If
            # no response was sent, `_respond_to_bug` itself has failed. uvicorn then logs the
            # exception and answers 500.
            if sender.status is None:
                sender.status = 500
                raise
        finally:
            body.release()
            status = sender.status or _CLIENT_CLOSED
            self._report(scope, context, status, time.monotonic() - start)

    def _choose_app(self, request: Request, context: RequestContext, max_bytes: int) -> ASGIApp:
        """Return the application that answers a request: usually the application with the routes.

        A CORS preflight request and a request whose body is too large do not reach the routes. For
        these, returns a response, which is an ASGI application, too.
        """
        if request.method == "OPTIONS" and not is_page(request.scope["path"]):
            return Response(status_code=204)
        content_length = request.headers.get("content-length", "0")
        # Python refuses to convert thousands of digits, and the first ones are enough
        first_digits = content_length[:_MAX_NUMBER_DIGITS]
        if content_length.isdigit() and int(first_digits) > max_bytes:
            error = HttpError(413, f"the body is larger than {max_bytes} bytes, the limit")
            return _make_error_response(context, error)
        return self._app

    def _report(self, scope: Scope, context: RequestContext, status: int, seconds: float) -> None:
        """Count a request in the metrics and write it to the access log."""
        route = scope.get("route")  # set by Starlette if a route matches the path
        route_path = "other" if route is None else route.path
        self._service.metrics.requests.labels(scope["method"], route_path, status).inc()
        if self._service.config.access_log:
            path = scope["path"][:_MAX_LOGGED_PATH_CHARACTERS]
            if "download" in route_path:  # the path is a secret that gives access to the file
                path = route_path
            fields = {
                "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "id": context.id,
                "client": context.client,
                "method": scope["method"],
                "path": path,
                "status": status,
                "ms": round(seconds * 1000, 1),
            }
            log_access(fields | context.fields)


def _make_context(request: Request) -> RequestContext:
    """Return the context of a request, with the id that the client sent, or else a random id."""
    request_id = request.headers.get("x-request-id", "")
    if not _REQUEST_ID.fullmatch(request_id):
        request_id = secrets.token_hex(8)
    return RequestContext(id=request_id, client=get_client_name(request))


class _ResponseSender:
    """Sends a response with the headers of the server, and records its status."""

    def __init__(self, send: Send, request_id: str, *, allow_all_origins: bool) -> None:
        self.status: int | None = None  # None until a response is sent
        self._send = send
        self._headers = [
            (b"x-request-id", request_id.encode()),
            (b"x-content-type-options", b"nosniff"),
        ]
        if allow_all_origins:
            self._headers += _CORS_HEADERS

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message["headers"], *self._headers]
        await self._send(message)


def _make_error_response(context: RequestContext, error: HttpError) -> Response:
    """Return the response with an error, and add its text to the access log."""
    context.fields.setdefault("error", error.text[:_MAX_LOGGED_ERROR_CHARACTERS])
    content: dict[str, object] = {"error": error.text}
    if isinstance(error, UnsupportedLanguageError):
        content["supported"] = error.supported
    response = JSONResponse(content, error.status)
    if error.retry_seconds:
        response.headers["Retry-After"] = str(error.retry_seconds)
    if error.status in (408, 413):  # the rest of the body is not read
        response.headers["Connection"] = "close"
    return response


# --- exception handlers, see `EXCEPTION_HANDLERS` at the end


async def _respond_to_http_error(request: Request, error: HttpError) -> Response:
    """Handle an error status that a route has chosen."""
    return _make_error_response(get_context(request), error)


async def _respond_to_starlette_error(request: Request, error: HTTPException) -> Response:
    """Handle an unknown path, or a method that a path does not have."""
    http_error = HttpError(error.status_code, error.detail)
    response = _make_error_response(get_context(request), http_error)
    response.headers.update(error.headers or {})
    return response


async def _respond_to_user_error(request: Request, error: NmtError) -> Response:
    """Handle an exception that describes a mistake in the request."""
    return _make_error_response(get_context(request), InvalidRequestError(str(error)))


async def _respond_to_disconnect(request: Request, error: Exception) -> Response:
    """Count a client that has closed the connection.

    The response is not delivered, but its status is written to the access log.
    """
    get_service(request).metrics.disconnects.inc()
    return Response(status_code=_CLIENT_CLOSED)


async def _respond_to_storage_error(request: Request, error: OSError) -> Response:
    """Handle a file of the server that cannot be read or written, such as on a full disk."""
    context = get_context(request)
    log.error("request %s: %s", context.id, error)
    text = f"the server cannot store or read a file; its log has request {context.id}"
    return _make_error_response(context, HttpError(503, text))


async def _respond_to_bug(request: Request, error: Exception) -> Response:
    """Handle every other exception: log it and answer 500."""
    context = get_context(request)
    log.error("request %s failed", context.id, exc_info=error)
    text = f"internal error; the server's log has request {context.id}"
    return _make_error_response(context, HttpError(500, text))


EXCEPTION_HANDLERS: dict[type[Exception], Any] = {
    ClientDisconnect: _respond_to_disconnect,
    ClientDisconnectedError: _respond_to_disconnect,
    HttpError: _respond_to_http_error,
    HTTPException: _respond_to_starlette_error,
    ConfigError: _respond_to_user_error,
    DataError: _respond_to_user_error,
    OSError: _respond_to_storage_error,
    Exception: _respond_to_bug,
}
"""For classes of exceptions, the function that returns the response. For other classes, Starlette
calls the function of the closest base class.
"""
