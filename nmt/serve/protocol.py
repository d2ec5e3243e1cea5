"""HTTP/1.1 parsed by httptools, with limits on the size and time of a request head."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_MAX_HEAD_BYTES = 65536  # of request line and headers, or of trailers
_HEAD_SECONDS = 20.0  # from the end of the previous request to the end of the headers


class BoundedProtocol(HttpToolsProtocol):
    """Closes connections whose request head is too large or too slow.

    uvicorn and httptools accept heads of any size and wait for them forever.
    """

    _num_head_bytes = 0  # received since the last bytes of a body or the end of a request
    _head_timeout: asyncio.TimerHandle | None = None  # while the connection waits for a head

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to wait for the first request."""
        super().connection_made(transport)
        self._start_head_timeout()

    def on_headers_complete(self) -> None:
        """Stop the timeout of the head."""
        if self._head_timeout is not None:
            self._head_timeout.cancel()
            self._head_timeout = None
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Do not count bytes of the body."""
        self._num_head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Count the next head from 0."""
        self._num_head_bytes = 0
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        """Parse data; answer a head that is too large with status 400."""
        self._num_head_bytes += len(data)
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._start_head_timeout()
        if self._num_head_bytes > _MAX_HEAD_BYTES:
            self.send_400_response("The head of the request is too large.")

    def _start_head_timeout(self) -> None:
        if self._head_timeout is None:
            close = self.timeout_keep_alive_handler
            self._head_timeout = self.loop.call_later(_HEAD_SECONDS, close)
