"""HTTP/1.1 connections parsed by httptools, with limits on the resources of a client.

uvicorn itself has no limits: it reads heads of any size and any number of pipelined requests, waits
forever for a client, and accepts connections until the process can open no more files.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sized
from typing import Any, cast

from uvicorn import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from nmt.serve.monitoring import OncePerMinute

log = logging.getLogger(__name__)
log.addFilter(OncePerMinute())

_MAX_HEAD_BYTES = 65536  # size of request line and headers, or of trailers
_HEAD_SECONDS = 20.0  # time from the end of a request to the end of the next headers
_MAX_PIPELINED_REQUESTS = 16  # number of requests that wait for the response to an earlier one
# a client has to receive at least `_MIN_WRITTEN_BYTES` of its response every `_WRITE_SECONDS`
_MIN_WRITTEN_BYTES = 16384
_WRITE_SECONDS = 30.0
# limits on the remaining body of a refused request, which is discarded
_MAX_DISCARDED_BYTES = 256 << 20
_DISCARD_SECONDS = 20.0
_CLOSE_ONE_IN = 16
"""If the maximum number of connections is open, a new connection closes up to 1/16 of the others.
Only connections that wait for their clients are closed.
"""
_UNAVAILABLE = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"content-length: 19\r\nconnection: close\r\n\r\nService Unavailable"
)


class BoundedProtocol(HttpToolsProtocol):
    """A connection that is closed when its client exceeds a limit.

    At most `config.limit_concurrency` connections are open. A further connection closes the
    connections that have waited longest for their clients. If no connection waits for its client,
    the further connection gets status 503.

    Attributes of uvicorn's class: `cycle` is the newest request with its response, or None before
    the first request. `cycle.message_event` wakes up the application. `pipeline` is the queue of
    requests that wait for the response to an earlier one. `flow` pauses reading and writing.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.last_active = self.loop.time()
        self._max_connections = config.limit_concurrency
        # turns off uvicorn's limit, which refuses requests instead of connections
        self.limit_concurrency = None
        # maximum size of the head that is being received: the number of bytes received since the
        # end of the last request or part of a body
        self._num_head_bytes = 0
        self._num_discarded_bytes = 0
        # whether the connection or a request was refused before all data was read
        self._is_refused = False
        self._head_timeout: asyncio.TimerHandle | None = None
        """Set while the connection waits for the head of a request."""
        self._write_timeout: asyncio.TimerHandle | None = None
        """Set while the client does not receive its response."""
        self._discard_timeout: asyncio.TimerHandle | None = None
        """Set while data is discarded before the connection closes."""

    @property
    def _is_idle(self) -> bool:
        """Whether all requests were answered."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def is_waiting_for_client(self) -> bool:
        """Whether the client has to act next: to send more data, or to receive a response."""
        return self._is_idle or self.cycle.more_body or self.flow.write_paused

    @property
    def has_unread_data(self) -> bool:
        """Whether the client may have sent data that the server will not read."""
        if self._is_refused:
            return True  # the rest of the refused request
        if self.cycle is None:
            return False
        return self.cycle.more_body or self.flow.read_paused

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request, unless there are too many connections."""
        wrapped_transport = _ResponseTransport(transport, self)
        super().connection_made(cast(asyncio.Transport, wrapped_transport))
        self.flow = _FlowControl(transport, self.pipeline)  # instead of uvicorn's `FlowControl`
        self._start_head_timeout()
        if self._max_connections is not None and len(self.connections) > self._max_connections:
            self._close_longest_waiting(self._max_connections)

    def _close_longest_waiting(self, max_connections: int) -> None:
        """Close the connections that have waited longest for their client.

        Closes several at a time, since each call goes through all open connections. If no
        connection waits for its client, refuses this connection.
        """
        log.warning(
            "%d connections are open, the maximum: a new one closes idle ones, or gets status 503",
            max_connections,
        )
        waiting_connections = []
        for connection in self.connections:
            assert isinstance(connection, BoundedProtocol)
            if connection is not self and connection.is_waiting_for_client:
                waiting_connections.append(connection)
        waiting_connections.sort(key=lambda connection: connection.last_active)
        num_closed = max(max_connections // _CLOSE_ONE_IN, 1)
        for connection in waiting_connections[:num_closed]:
            self.connections.discard(connection)  # closed in the next turn of the loop
            connection.transport.abort()
        if not waiting_connections:
            self._is_refused = True
            self.transport.write(_UNAVAILABLE)
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timeouts."""
        for timeout in (self._head_timeout, self._write_timeout, self._discard_timeout):
            if timeout is not None:
                timeout.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse data; answer a head that is too large with status 400."""
        self.last_active = self.loop.time()
        if self.transport.is_closing():
            self._num_discarded_bytes += len(data)
            if self._num_discarded_bytes > _MAX_DISCARDED_BYTES:
                self.transport.abort()
            return
        self._num_head_bytes += len(data)
        super().data_received(data)
        if self._is_idle:
            self._start_head_timeout()
        if self._num_head_bytes > _MAX_HEAD_BYTES:
            self.send_400_response("The head of the request is too large.")

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that cannot be parsed, and close the connection."""
        if self.transport.is_closing():
            return
        self._is_refused = True
        has_started = False
        if not self._is_idle:
            has_started = self.cycle.response_started
            self.cycle.disconnected = True  # so that the application writes no response
            self.cycle.message_event.set()
        # If a response has started, or an earlier request waits for its response, the client would
        # mistake a response with status 400 for that response.
        is_ambiguous = has_started or bool(self.pipeline)
        if is_ambiguous:
            self.transport.abort()
        else:
            super().send_400_response(msg)

    def on_headers_complete(self) -> None:
        """Stop the timeout of the head.

        Raises an exception, which httptools reports, if too many requests wait.
        """
        if self._head_timeout is not None:
            self._head_timeout.cancel()
            self._head_timeout = None
        super().on_headers_complete()
        if len(self.pipeline) > _MAX_PIPELINED_REQUESTS:
            raise ValueError("too many pipelined requests")

    def on_body(self, body: bytes) -> None:
        """Receive a part of a body, which does not count as head."""
        self._num_head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Begin to count the bytes of the next head."""
        self._num_head_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Start the next pipelined request, or wait for a request."""
        self.last_active = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Wait until the client has received a part of its response."""
        super().pause_writing()
        self.start_write_timeout()

    def resume_writing(self) -> None:
        """Continue to write the response, or to read requests after it."""
        self.last_active = self.loop.time()
        super().resume_writing()
        if self._write_timeout is not None:
            self._write_timeout.cancel()
            self._write_timeout = None
        if self._is_idle:
            self.flow.resume_reading()

    def start_write_timeout(self) -> None:
        """Close the connection if its client does not receive the buffered data fast enough."""
        if self._write_timeout is None:
            num_bytes = self.transport.get_write_buffer_size()
            self._write_timeout = self.loop.call_later(
                _WRITE_SECONDS, self._check_written, num_bytes
            )

    def _check_written(self, old_num_bytes: int) -> None:
        """Close the connection unless the buffer has shrunk enough from `old_num_bytes`."""
        self._write_timeout = None
        # When all bytes are sent, this timeout is canceled, so some are left now. If fewer bytes
        # than `_MIN_WRITTEN_BYTES` were left at first, the difference below is negative, and the
        # connection is closed. A discarded request has a shorter timeout of its own.
        if self.transport.get_write_buffer_size() > old_num_bytes - _MIN_WRITTEN_BYTES:
            self.transport.abort()
        else:
            self.start_write_timeout()

    def start_discard_timeout(self) -> None:
        """Close the connection if its client does not close it within `_DISCARD_SECONDS`."""
        self._discard_timeout = self.loop.call_later(_DISCARD_SECONDS, self.transport.abort)

    def _start_head_timeout(self) -> None:
        """Close the connection if no complete head arrives within `_HEAD_SECONDS`."""
        if self._head_timeout is None:
            close = self.timeout_keep_alive_handler  # uvicorn's method to close idle connections
            self._head_timeout = self.loop.call_later(_HEAD_SECONDS, close)


class _FlowControl(FlowControl):
    """Reads nothing while requests are queued or the client does not receive its response."""

    def __init__(self, transport: asyncio.Transport, pipeline: Sized) -> None:
        super().__init__(transport)
        self._pipeline = pipeline

    def resume_reading(self) -> None:
        """Continue to read, unless there is a reason to wait."""
        if not self._pipeline and not self.write_paused:
            super().resume_reading()


class _ResponseTransport:
    """The transport of a connection, with changes of `write` and `close`.

    uvicorn writes the head and the body of a response separately. This class sends them together,
    since each write to the socket takes as long as parsing a request, and may wake up the client.

    If a socket is closed while data is unread, the client gets a reset, and may lose the response.
    In this case, `close` only stops writing, and discards the data that arrives.
    """

    def __init__(self, transport: asyncio.Transport, protocol: BoundedProtocol) -> None:
        self._transport = transport
        self._protocol = protocol
        self._is_discarding = False
        self._unsent = b""  # written in this turn of the event loop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send data together with the next data, or at the end of this turn of the event loop."""
        if self._unsent:
            self._transport.write(self._unsent + data)
            self._unsent = b""
        elif data:
            self._unsent = data
            self._protocol.loop.call_soon(self._send)

    def _send(self) -> None:
        """Send the data that is left."""
        if self._unsent:
            self._transport.write(self._unsent)
            self._unsent = b""

    def close(self) -> None:
        """Send the buffered data, and close the connection."""
        if self.is_closing():
            return
        self._send()
        if self._protocol.has_unread_data:
            self._is_discarding = True
            self._transport.write_eof()
            self._transport.resume_reading()
            self._protocol.start_discard_timeout()
        else:
            self._transport.close()
        # `write_eof` and `close` still send the data in the buffer
        if self._transport.get_write_buffer_size():
            self._protocol.start_write_timeout()

    def is_closing(self) -> bool:
        """Return whether the server has stopped writing."""
        return self._is_discarding or self._transport.is_closing()
