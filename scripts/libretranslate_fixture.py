"""A pytest plugin that runs LibreTranslate's own API tests against a server of ours.

    NMT_SERVER=http://127.0.0.1:5000 PYTHONPATH=scripts pytest --noconftest \
        -p libretranslate_fixture .../site-packages/libretranslate/tests/test_api

Its tests use a fixture `client` with the interface of Flask's test client; this one sends real
requests. The server needs models for en to es and es to en.
"""

from __future__ import annotations

import json as json_module
import os
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True)
class Answer:
    """What the tests look at."""

    status_code: int
    data: bytes

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json_module.loads(self.data)


class Client:
    """Sends requests to a running server."""

    def __init__(self, url: str) -> None:
        self._url = url

    def get(self, path: str) -> Answer:
        """Send a GET request."""
        return self._send(urllib.request.Request(self._url + path))

    def post(self, path: str, data: dict[str, str] | None = None, json: Any = None) -> Answer:
        """Send a form, or JSON."""
        body, kind = urllib.parse.urlencode(data or {}), "application/x-www-form-urlencoded"
        if json is not None:
            body, kind = json_module.dumps(json), "application/json"
        headers = {"Content-Type": kind}
        return self._send(urllib.request.Request(self._url + path, body.encode(), headers))

    def _send(self, request: urllib.request.Request) -> Answer:
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return Answer(answer.status, answer.read())
        except urllib.error.HTTPError as error:
            return Answer(error.code, error.read())


@pytest.fixture
def client() -> Client:
    """A client of the server that NMT_SERVER names."""
    return Client(os.environ["NMT_SERVER"].rstrip("/"))
