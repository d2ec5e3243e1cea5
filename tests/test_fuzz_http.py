"""Generated requests, sent raw to the server: it answers or refuses each, and never fails.

`NMT_FUZZ_EXAMPLES=10000 pytest tests/test_fuzz_http.py` sends more requests, and others in each
run; `make torture` does so.
"""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Iterator

import pytest
from fuzzing import example_settings
from hypothesis import given
from hypothesis import strategies as st
from serving import Running, copying, running

from nmt.data.tokenizer import Tokenizer

METHODS = ["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "TRACE", "get", "X-Y", ""]
PATHS = [
    "/",
    "/docs",
    "/spec",
    "/health",
    "/metrics",
    "/languages",
    "/frontend/settings",
    "/detect",
    "/translate",
    "/suggest",
    "/translate_file",
    "/download_file/a/b",
    "/static/page.js",
    "/v1/translate",
    "/v1/attention",
    "/v1/models",
    "/v1/progress/1",
    "/static/../app.py",
    "*",
]
API_PATHS = ("/translate", "/detect", "/suggest", "/v1/translate", "/v1/attention")
PATH_PIECES = [
    "",
    "/",
    "//",
    "%00",
    "%2e%2e",
    "%ff",
    "?q=a",
    "&source=xx",
    "&target=yy",
    "#",
    "\xff",
]
HEADERS = [
    "Expect: 100-continue",
    "Transfer-Encoding: chunked",
    "Content-Encoding: gzip",
    "Authorization: Bearer \xff",
    "X-Request-ID: a b",
    "Range: bytes=0-",
    "Upgrade: h2c",
    "Connection: Upgrade, HTTP2-Settings",
    "Content-Length: 5",
    "Content-Length: -1",
    ":",
    "a",
    "Content-Length: 99999999999999999999",
    "X-Forwarded-For: ::1, x",
    "Accept: \0",
    "Host:",
]
CONTENT_TYPES = [
    "application/json",
    "application/x-www-form-urlencoded",
    "text/plain",
    "a+json",
    "",
    "multipart/form-data; boundary=b",
    "multipart/form-data",
    "text/plain; charset=no",
]
JSON_PIECES = [
    "{",
    "}",
    "[",
    "]",
    ":",
    ",",
    '"q"',
    '"text"',
    '"source"',
    '"target"',
    '"xx"',
    '"yy"',
    '"search"',
    '"n_best"',
    '"stream"',
    '"format"',
    '"html"',
    "true",
    "null",
    "NaN",
    "1e999",
    '{"q":"a","source":"xx","target":"yy"',
    '{"text":"a","source":"xx","target":"yy"',
    "-1",
    '"\\ud800"',
    '"<b>a</i>"',
    "\ufeff",
    '"api_key"',
    '"alternatives"',
    '"head"',
    '"layer"',
]
FORM_PIECES = [
    "q=a",
    "&",
    "=",
    "%",
    "%ff",
    "+",
    "source=xx",
    "target=yy",
    "format=html",
    ";",
    "q[]=a",
]
PART = '--b\r\nContent-Disposition: form-data; name="{}"\r\n\r\n'
MULTIPART_PIECES = [
    PART.format(name) for name in ("q", "source", "target", "format", "columns", "")
]
MULTIPART_PIECES += ['--b\r\nContent-Disposition: form-data; name="file"; filename="a.srt"\r\n\r\n']
MULTIPART_PIECES += [
    "--b--\r\n",
    "--b\r\n",
    "xx\r\n",
    "yy\r\n",
    "\r\n",
    "a",
    "Content-Type: \r\n",
    "\0",
]
PIECES = {
    "application/json": JSON_PIECES,
    "a+json": JSON_PIECES,
    "application/x-www-form-urlencoded": FORM_PIECES,
    "multipart/form-data; boundary=b": MULTIPART_PIECES,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Iterator[Running]:
    models, _ = copying(tokenizer)
    suggestions = tmp_path_factory.mktemp("fuzz") / "suggestions.jsonl"
    with running(models, suggestions=str(suggestions), access_log=True) as server:
        yield server


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """Generate a request: mostly well-formed, with pieces that do not fit together."""
    path = draw(st.sampled_from(PATHS)) + "".join(
        draw(st.lists(st.sampled_from(PATH_PIECES), max_size=3))
    )
    method = "POST" if path.startswith(API_PATHS) else draw(st.sampled_from(METHODS))
    if draw(st.integers(0, 9)) == 0:
        method = draw(st.sampled_from(METHODS))
    version = draw(st.sampled_from(["1.1", "1.1", "1.0", "2.0"]))
    content_type = draw(st.sampled_from(CONTENT_TYPES))
    pieces = st.sampled_from(PIECES.get(content_type, JSON_PIECES + FORM_PIECES)) | st.text(
        max_size=3
    )
    text = "".join(draw(st.lists(pieces, max_size=12)))
    body = (
        text.encode("utf-8", "replace") if draw(st.integers(0, 9)) else draw(st.binary(max_size=50))
    )
    headers = draw(
        st.lists(st.sampled_from(HEADERS), max_size=2) if draw(st.booleans()) else st.just([])
    )
    if not any("Length" in header or "chunked" in header for header in headers):
        headers.append(f"Content-Length: {len(body)}")
    lines = [
        f"{method} {path} HTTP/{version}",
        "Host: x",
        f"Content-Type: {content_type}",
        *headers,
        "Connection: close",
    ]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def send_raw(server: Running, request: bytes) -> bytes:
    """Send a request, end the sending side, and return all that the server sends."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=600) as connection:
        response = b""
        try:
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            while data := connection.recv(65536):
                response += data
        except ConnectionError:  # the server may close before it has read everything
            pass
    return response


def test_no_request_makes_the_server_fail(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    statuses = set()

    @example_settings(120)
    @given(request=requests())
    def run(request: bytes) -> None:
        caplog.clear()
        response = send_raw(server, request)
        for status in re.findall(rb"^HTTP/1\.1 (\d{3})", response, re.MULTILINE):
            statuses.add(int(status))
            assert int(status) < 500, response
        assert b"Traceback" not in response
        for record in caplog.records:
            assert record.exc_info is None, record.getMessage()
            assert record.levelno < logging.ERROR, record.getMessage()

    run()
    assert {200, 400, 404, 405} <= statuses
    assert server.get("/health").status == 200
    assert server.translate("a tree") == "a tree"
