"""Access to the server: API keys, and limits on the rate and the size of requests."""

from __future__ import annotations

import asyncio
import functools
import hmac
import ipaddress
import math
import time
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request
from starlette.types import Message, Receive

from nmt.config import ServeConfig, read_text_file
from nmt.errors import ConfigError
from nmt.serve.http_errors import HttpError, TooManyRequestsError

_MAX_CLIENTS = 10_000  # number of clients to remember; the least recent ones are forgotten
_MAX_TRIED_KEYS_PER_MINUTE = 20  # number of keys that a client may try
_MAX_HELD_BYTES = 256 << 20  # total size of the bodies of all open requests
_MEMORY_RETRY_SECONDS = 5  # a client may repeat a request that exceeded `_MAX_HELD_BYTES`
_MIN_WAIT_SECONDS = 0.001  # even after the deadline, data that has already arrived is read
_MAX_KEY_FIELDS = 3  # a line in a file of keys has a key and up to two limits


@dataclass(frozen=True)
class Key:
    """An API key and its limits."""

    secret: str
    name: str  # shown in logs instead of the secret
    requests_per_minute: int = 0  # 0: no limit
    char_limit: int | None = None  # characters of a request; 0: no limit, None: the server's limit


def read_keys(path: str) -> list[Key]:
    """Read a file with lines of the form `KEY [requests per minute] [characters per request]`.

    Text after # is a comment. Raises `ConfigError` for an invalid line or a file without keys.
    """
    keys = []
    for line_number, line in enumerate(read_text_file(path, "api_keys").splitlines(), start=1):
        without_comment = line.partition("#")[0]
        fields = without_comment.split()
        if not fields:
            continue
        are_numbers = all(text.isascii() and text.isdigit() for text in fields[1:])
        if len(fields) > _MAX_KEY_FIELDS or not are_numbers:
            raise ConfigError(
                f"{path}, line {line_number}: "
                "write KEY, or KEY REQUESTS_PER_MINUTE, or KEY REQUESTS_PER_MINUTE MAX_CHARACTERS"
            )
        key = Key(secret=fields[0], name=f"key-{line_number}")
        if len(fields) > 1:
            key = replace(key, requests_per_minute=int(fields[1]))
        if len(fields) > 2:
            key = replace(key, char_limit=int(fields[2]))
        keys.append(key)
    if not keys:
        raise ConfigError(f"api_keys={path}: has no key; write one key per line")
    return keys


def is_same_secret(secret: str, candidate: str) -> bool:
    """Compare two secrets in constant time, so that the time does not reveal where they differ."""
    return hmac.compare_digest(secret.encode(), candidate.encode("utf-8", "replace"))


def get_bearer_token(request: Request) -> str:
    """Return the token in the Authorization header of a request, or "" without the header."""
    return request.headers.get("authorization", "").removeprefix("Bearer ")


def get_client_name(request: Request) -> str:
    """Return the address or network of the client, to which the limits on requests apply."""
    return client_network(request.client.host if request.client else "unknown")


@functools.lru_cache(maxsize=1024)
def client_network(address: str) -> str:
    """Return an IPv4 address unchanged, and the /64 network of an IPv6 address.

    One client may own a whole /64 network.
    """
    try:
        ip_address = ipaddress.ip_address(address)
    except ValueError:
        return address
    if ip_address.version == 4:
        return str(ip_address)
    if ip_address.ipv4_mapped is not None:
        return str(ip_address.ipv4_mapped)
    return str(ipaddress.ip_network((ip_address, 64), strict=False))


@dataclass
class _TokenBucket:
    """The number of requests that a client may send now, which grows at the allowed rate."""

    num_requests: float
    updated_at: float  # `time.monotonic()` of the latest update


class RateLimits:
    """Limits the requests per minute of each client with token buckets."""

    def __init__(self) -> None:
        self._buckets: OrderedDict[str, _TokenBucket] = OrderedDict()  # least recently used first

    def check(self, client: str, per_minute: int) -> None:
        """Count a request. Raises a 429 `HttpError` above the limit `per_minute`; 0: no limit."""
        if per_minute == 0:
            return
        current_time = time.monotonic()
        bucket = self._buckets.setdefault(client, _TokenBucket(per_minute, current_time))
        self._buckets.move_to_end(client)
        if len(self._buckets) > _MAX_CLIENTS:
            self._buckets.popitem(last=False)
        refill = (current_time - bucket.updated_at) * per_minute / 60
        bucket.num_requests = min(per_minute, bucket.num_requests + refill)
        bucket.updated_at = current_time
        if bucket.num_requests < 1:
            seconds_until_next = (1 - bucket.num_requests) * 60 / per_minute
            raise TooManyRequestsError(
                f"the limit is {per_minute} requests per minute",
                retry_seconds=math.ceil(seconds_until_next),
            )
        bucket.num_requests -= 1


class KeyRing:
    """Finds the keys that clients send, and limits how many keys a client may try."""

    def __init__(self, keys: list[Key]) -> None:
        self._keys = keys
        self._attempts = RateLimits()
        # pairs of a client and the name of an API key that it has used, the least recent first
        self._used_keys: OrderedDict[tuple[str, str], None] = OrderedDict()

    def find(self, client: str, candidate: str) -> Key | None:
        """Return the key with the secret `candidate`, or None.

        Raises a 429 `HttpError` if the client has tried too many keys in a minute. Keys that the
        client has used before are still accepted: others at its address cannot lock it out.
        """
        # compares with all keys, so that the time does not reveal which one matches
        matching_keys = [key for key in self._keys if is_same_secret(key.secret, candidate)]
        key = matching_keys[0] if matching_keys else None
        if key is None or (client, key.name) not in self._used_keys:
            self._attempts.check(client, _MAX_TRIED_KEYS_PER_MINUTE)
        if key is not None:
            self._used_keys[client, key.name] = None
            self._used_keys.move_to_end((client, key.name))
            if len(self._used_keys) > _MAX_CLIENTS:
                self._used_keys.popitem(last=False)
        return key


@dataclass
class RequestContext:
    """The sender of a request, and the fields of the request in the access log."""

    id: str  # value of the header X-Request-ID
    client: str
    """Name of the API key, or else network of the sender. Limits apply to it, and the scheduler
    takes sentences from all clients in turn."""
    key: Key | None = None
    fields: dict[str, Any] = field(default_factory=dict)  # further fields of the access log


class Admission:
    """Checks the API key of each request, and limits the requests of its client."""

    def __init__(self, config: ServeConfig) -> None:
        """Read the file of keys. Raises `ConfigError` if it is invalid."""
        self._config = config
        self._keys: KeyRing | None = None
        if config.api_keys is not None:
            self._keys = KeyRing(read_keys(config.api_keys))
        self._rate_limits = RateLimits()

    @property
    def has_keys(self) -> bool:
        """Whether the server has API keys."""
        return self._keys is not None

    def check(self, context: RequestContext, secret: str) -> None:
        """Count a request, and store the API key with this secret in `context`.

        `secret` is "" for a request without a key.
        Raises an `HttpError` with status 400 for a missing key, 403 for an unknown key, and 429
        above the limit of the client.
        """
        requests_per_minute = self._config.requests_per_minute
        if self._keys is not None and secret:
            context.key = self._keys.find(context.client, secret.strip())
            if context.key is None:
                raise HttpError(403, "Invalid API key")
            context.client = context.key.name
            requests_per_minute = context.key.requests_per_minute
        elif self._keys is not None and self._config.key_required:
            raise HttpError(400, "This server needs an API key; ask its operator for one")
        self._rate_limits.check(context.client, requests_per_minute)

    def char_limit(self, context: RequestContext, *, is_file: bool = False) -> int:
        """Return the maximum number of characters of a request, 0 for no limit.

        For files and streams (`is_file`), only the limit of the API key applies, since the server
        limits their bytes instead of their characters.
        """
        if context.key is not None and context.key.char_limit is not None:
            return context.key.char_limit
        return 0 if is_file else self._config.char_limit


def read_metrics_token(path: str | None) -> KeyRing | None:
    """Read the file with the bearer token of /metrics, and return a `KeyRing` with this token."""
    if path is None:
        return None
    token = read_text_file(path, "metrics_token").strip()
    if not token:
        raise ConfigError(f"metrics_token={path}: is empty; write the token into it")
    return KeyRing([Key(token, "metrics")])


class BodyLimits:
    """The time limit of a request body, and the memory that all request bodies use."""

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self.held_bytes = 0  # total size of the bodies of unanswered requests


class LimitedBody:
    """Receives the body of a request, with limits on its size and duration."""

    def __init__(self, limits: BodyLimits, receive: Receive, max_bytes: int) -> None:
        self._limits = limits
        self._receive = receive
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._is_complete = False
        self._deadline = time.monotonic() + limits.timeout_seconds

    async def receive(self) -> Message:
        """Return the next ASGI message. Raises a 408, 413 or 503 `HttpError` beyond a limit."""
        if self._is_complete:
            return await self._receive()  # the next message arrives when the client disconnects
        remaining_seconds = max(self._deadline - time.monotonic(), _MIN_WAIT_SECONDS)
        try:
            message = await asyncio.wait_for(self._receive(), remaining_seconds)
        except asyncio.TimeoutError:
            seconds = self._limits.timeout_seconds
            raise HttpError(408, f"the body took more than {seconds:g} s to arrive") from None
        self._is_complete = not message.get("more_body", False)
        num_received = len(message.get("body", b""))
        self._num_bytes += num_received
        self._limits.held_bytes += num_received
        if self._num_bytes > self._max_bytes:
            raise HttpError(413, f"the body is larger than {self._max_bytes} bytes, the limit")
        if self._limits.held_bytes > _MAX_HELD_BYTES:
            text = "too many large requests at a time"
            raise HttpError(503, text, retry_seconds=_MEMORY_RETRY_SECONDS)
        return message

    def release(self) -> None:
        """Subtract the size of the body from `BodyLimits.held_bytes`; called after the response."""
        self._limits.held_bytes -= self._num_bytes
