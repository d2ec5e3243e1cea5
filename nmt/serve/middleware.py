"""ASGI middleware for all requests: ids, the access log, CORS, limits, and errors as JSON."""

from __future__ import annotations

import logging
import re
import secrets
import time

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nmt.errors import NmtError
from nmt.serve.access import HttpError, LimitedBody
from nmt.serve.monitoring import log_access
from nmt.serve.parameters import context_of, service_of
from nmt.serve.service import RequestContext, Service, client_of

log = logging.getLogger(__name__)

_CORS_HEADERS = [
    (b"access-control-allow-origin", b"*"),
    (b"access-control-allow-headers", b"Authorization, Content-Type"),
    (b"access-control-expose-headers", b"X-Request-ID, Retry-After"),
    (b"access-control-allow-methods", b"GET, POST"),
    (b"access-control-max-age", b"1728000"),
]
_FILE_ROUTES = ("/translate_file", "/v1/translate")
_CLIENT_CLOSED = 499  # status in logs and metrics if the client disconnects before the response
_REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


def is_page(path: str) -> bool:
    """Return whether a path belongs to the web page. All other paths belong to the API."""
    return path in ("/", "/docs") or path.startswith("/static/")


class Middleware:
    """The ASGI application around the routes."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.monotonic()
        request = Request(scope)
        request_id = request.headers.get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = secrets.token_hex(8)
        context = RequestContext(request_id, client_of(request))
        scope.setdefault("state", {})["context"] = context
        max_bytes = self._service.config.max_body_bytes
        if scope["path"] in _FILE_ROUTES:
            max_bytes = max(max_bytes, self._service.config.max_file_bytes)
        body = LimitedBody(self._service.bodies, receive, max_bytes)
        sender = _ResponseSender(send, request_id, allow_all_origins=not is_page(scope["path"]))
        try:
            response = self._choose_response(request, max_bytes)
            await response(scope, body.receive, sender)
        except HttpError as error:
            await _refuse(context, error)(scope, receive, sender)
        except Exception:
            if sender.status == _CLIENT_CLOSED:  # no response yet: uvicorn logs it and answers 500
                raise
            log.exception("request %s failed while it was answered", context.id)
        finally:
            body.release()
            self._report(scope, context, sender.status, time.monotonic() - start)

    def _choose_response(self, request: Request, max_bytes: int) -> ASGIApp:
        if request.method == "OPTIONS" and not is_page(request.scope["path"]):
            return Response(status_code=204)
        content_length = request.headers.get("content-length", "0")
        if content_length.isdigit() and int(content_length[:18]) > max_bytes:
            raise HttpError(413, f"the body is larger than {max_bytes} bytes, the limit")
        return self._app

    def _report(self, scope: Scope, context: RequestContext, status: int, seconds: float) -> None:
        """Count a request in the metrics and write it to the access log."""
        route_path = getattr(scope.get("route"), "path", "other")
        self._service.metrics.requests.labels(scope["method"], route_path, status).inc()
        if self._service.config.access_log:
            is_download = "download" in route_path  # whose path is a secret
            fields = {
                "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "id": context.id,
                "client": context.client,
                "method": scope["method"],
                "path": route_path if is_download else scope["path"][:200],
                "status": status,
                "ms": round(seconds * 1000, 1),
            }
            log_access(fields | context.fields)


class _ResponseSender:
    """Sends a response with the headers of the server, and records its status."""

    def __init__(self, send: Send, request_id: str, *, allow_all_origins: bool) -> None:
        self.status = _CLIENT_CLOSED
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


def _refuse(context: RequestContext, error: HttpError) -> Response:
    context.fields.setdefault("error", error.text[:300])
    response = JSONResponse({"error": error.text}, error.status)
    if error.retry_seconds:
        response.headers["Retry-After"] = str(error.retry_seconds)
    if error.status in (408, 413):  # the rest of the body is not read
        response.headers["Connection"] = "close"
    return response


async def respond_to_http_error(request: Request, error: Exception) -> Response:
    """Handle errors of routes, and of Starlette, such as an unknown path."""
    context = context_of(request)
    if isinstance(error, HTTPException):
        response = _refuse(context, HttpError(error.status_code, error.detail))
        response.headers.update(error.headers or {})
        return response
    assert isinstance(error, HttpError)
    return _refuse(context, error)


async def respond_to_user_error(request: Request, error: Exception) -> Response:
    """Handle errors that name a mistake in the request."""
    assert isinstance(error, NmtError)
    return _refuse(context_of(request), HttpError(400, f"Invalid request: {error}"))


async def respond_to_disconnect(request: Request, error: Exception) -> Response:
    """Handle a client that has closed the connection. The response is not sent any longer."""
    service_of(request).metrics.disconnects.inc()
    return Response(status_code=_CLIENT_CLOSED)


async def respond_to_storage_error(request: Request, error: Exception) -> Response:
    """Handle a file of the server that cannot be read or written, such as on a full disk."""
    context = context_of(request)
    log.error("request %s: %s", context.id, error)
    text = f"the server cannot store or read a file; its log has request {context.id}"
    return _refuse(context, HttpError(503, text))


async def respond_to_bug(request: Request, error: Exception) -> Response:
    """Handle every other exception: log it and answer 500."""
    context = context_of(request)
    log.error("request %s failed", context.id, exc_info=error)
    text = f"internal error; the server's log has request {context.id}"
    return _refuse(context, HttpError(500, text))
