"""HTTP/1.1 read by llhttp, through httptools and uvicorn, with limits that these have not."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_MAX_HEAD_BYTES = 65536  # of a request: its line and headers
_HEAD_SECONDS = 20.0  # for it to arrive


class BoundedProtocol(HttpToolsProtocol):
    """HTTP/1.1 by llhttp, which takes and waits for any head; here size (with trailers) and time
    have limits."""

    _num_bytes = 0  # since the last that were of a body or ended a message
    _deadline: asyncio.TimerHandle | None = None  # while a head is waited for

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `HttpToolsProtocol`."""
        super().connection_made(transport)
        self._wait_for_head()

    def on_headers_complete(self) -> None:
        """See `HttpToolsProtocol`."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """See `HttpToolsProtocol`."""
        self._num_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """See `HttpToolsProtocol`."""
        self._num_bytes = 0
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        """See `HttpToolsProtocol`; a head that is too large is answered with 400."""
        self._num_bytes += len(data)
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._wait_for_head()
        if self._num_bytes > _MAX_HEAD_BYTES:
            self.send_400_response("The head of the request is too large.")

    def _wait_for_head(self) -> None:
        if self._deadline is None:
            close = self.timeout_keep_alive_handler
            self._deadline = self.loop.call_later(_HEAD_SECONDS, close)
