"""HTTP/1.1 read by llhttp, through httptools and uvicorn, with a limit that these have not."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_MAX_HEAD_BYTES = 65536  # of a request: its line and headers


class BoundedProtocol(HttpToolsProtocol):
    """HTTP/1.1 by llhttp, which takes heads of any size; here they have a limit."""

    _head_bytes = 0  # of a head that is not complete
    _is_in_head = False

    def on_message_begin(self) -> None:
        """See `HttpToolsProtocol`."""
        self._is_in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """See `HttpToolsProtocol`."""
        self._is_in_head = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """See `HttpToolsProtocol`; a head that is too large is answered with 400."""
        super().data_received(data)
        self._head_bytes = self._head_bytes + len(data) if self._is_in_head else 0
        if self._head_bytes > _MAX_HEAD_BYTES:
            self.send_400_response("The head of the request is too large.")
