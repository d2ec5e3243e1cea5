"""Who may ask for how much: API keys, requests a minute, bodies of requests."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from starlette.types import Message, Receive

from nmt.config import resolve
from nmt.errors import ConfigError

_MAX_CLIENTS = 10_000  # that limits are kept for
_BUFFERED_BYTES = 256 << 20  # bodies that are held at a time, all requests together


class HttpError(Exception):
    """An answer other than success: the status, the text for `error`, seconds to wait."""

    def __init__(self, status: int, text: str, *, retry_seconds: int | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.retry_seconds = retry_seconds


@dataclass(frozen=True)
class Key:
    """An API key and its limits; None is the server's own."""

    secret: str
    name: str  # for logs: never the key itself
    requests_per_minute: int | None = None
    char_limit: int | None = None


def read_keys(path: str) -> list[Key]:
    """Read a file of keys: `KEY [requests a minute] [characters of a request]`, 0 for no limit.

    Raises `ConfigError` for a line that is something else.
    """
    keys = []
    for number, line in enumerate(_read(path, "api_keys").splitlines(), start=1):
        fields = line.split("#")[0].split()
        if not fields:
            continue
        if len(fields) > 3 or not all(field.isascii() and field.isdigit() for field in fields[1:]):
            raise ConfigError(
                f"{path}, line {number}: write KEY, requests a minute and characters of a request"
            )
        limits = [*map(int, fields[1:]), None, None]
        keys.append(Key(fields[0], f"key-{number}", limits[0], limits[1]))
    if not keys:
        raise ConfigError(f"api_keys={path}: has no key; write one a line")
    return keys


def read_token(path: str) -> str:
    """Read a file that holds one secret."""
    token = _read(path, "metrics_token").strip()
    if not token:
        raise ConfigError(f"metrics_token={path}: is empty; write the token into it")
    return token


def is_same(secret: str, given: str) -> bool:
    """Compare in a time that does not depend on where the two differ."""
    return hmac.compare_digest(secret.encode(), given.encode("utf-8", "replace"))


def find_key(keys: list[Key], given: str) -> Key | None:
    """Return the key that was given; the time does not depend on which it is."""
    found = [key for key in keys if is_same(key.secret, given)]
    return found[0] if found else None


def _read(path: str, setting: str) -> str:
    place: Path = resolve(path)
    try:
        return place.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{setting}={path}: cannot be read ({error})") from None


def network_of(address: str) -> str:
    """Return what limits count for an address: itself, or of IPv6 the 64 bits of its network."""
    try:
        place = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(place, ipaddress.IPv6Address) and place.ipv4_mapped is None:
        return str(ipaddress.ip_network((place, 64), strict=False))
    return str(getattr(place, "ipv4_mapped", None) or place)


class RateLimits:
    """Requests a minute of each client, as a bucket of that size that is always refilled."""

    def __init__(self) -> None:
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # left, when

    def check(self, client: str, per_minute: int) -> None:
        """Count a request; raise a 429 `HttpError` for one too many. 0 is no limit."""
        if per_minute == 0:
            return
        now = time.monotonic()
        left, then = self._buckets.pop(client, (float(per_minute), now))
        left = min(per_minute, left + (now - then) * per_minute / 60)
        allowed = left >= 1
        self._buckets[client] = (left - 1 if allowed else left, now)
        if len(self._buckets) > _MAX_CLIENTS:
            self._buckets.popitem(last=False)
        if not allowed:
            seconds = max(1, round((1 - left) * 60 / per_minute + 0.5))
            raise HttpError(
                429,
                f"Slowdown: {per_minute} requests a minute are the limit",
                retry_seconds=seconds,
            )


class Bodies:
    """Bounds what clients send: size and time of each body, and the memory of all."""

    def __init__(self, timeout_seconds: float) -> None:
        self.held_bytes = 0
        self._timeout_seconds = timeout_seconds

    def limited(self, receive: Receive, body: Body) -> Receive:
        """Return `receive` for one request, with a 408, 413 or 503 `HttpError` for a body beyond
        the bounds.
        """
        until = time.monotonic() + self._timeout_seconds

        async def receive_some() -> Message:
            if body.complete:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), max(until - time.monotonic(), 0.001))
            except asyncio.TimeoutError:
                raise HttpError(
                    408, f"the body took more than {self._timeout_seconds:g} s to arrive"
                ) from None
            body.complete = not message.get("more_body", False)
            size = len(message.get("body", b""))
            body.num_bytes += size
            self.held_bytes += size
            if body.num_bytes > body.most_bytes:
                raise HttpError(413, f"the body is larger than {body.most_bytes} bytes, the limit")
            if self.held_bytes > _BUFFERED_BYTES:
                raise HttpError(503, "too many large requests at a time", retry_seconds=5)
            return message

        return receive_some

    def release(self, body: Body) -> None:
        """Forget the bytes of a request that is answered."""
        self.held_bytes -= body.num_bytes


@dataclass
class Body:
    """What has arrived of a request's body."""

    most_bytes: int
    num_bytes: int = 0
    complete: bool = False
