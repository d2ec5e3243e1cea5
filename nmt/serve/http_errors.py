"""Exceptions that end a request with an error status, or without a response.

`nmt.serve.middleware` turns them into responses.
"""

from __future__ import annotations


class HttpError(Exception):
    """A response with an error status.

    Args:
        status: the HTTP status code.
        text: the value of `error` in the response.
        retry_seconds: the value of the header Retry-After: when the client may try again.
    """

    def __init__(self, status: int, text: str, *, retry_seconds: int | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.retry_seconds = retry_seconds


class InvalidRequestError(HttpError):
    """A response to a mistake in a request.

    Args:
        problem: the mistake, such as "missing q parameter".
        status: 400; 404 for an unknown name; 409 for values that contradict each other or that the
            model does not support.
    """

    def __init__(self, problem: str, *, status: int = 400) -> None:
        super().__init__(status, f"Invalid request: {problem}")


class UnsupportedLanguageError(HttpError):
    """A 400 response to a language that is not served, with the codes of the served languages."""

    def __init__(self, language: str, supported: list[str]) -> None:
        super().__init__(400, f"{language} is not supported")  # LibreTranslate's text
        self.supported = supported


class TooManyRequestsError(HttpError):
    """A 429 response to a client that sends more than a limit allows."""

    def __init__(self, reason: str, *, retry_seconds: int) -> None:
        super().__init__(429, f"Slowdown: {reason}", retry_seconds=retry_seconds)


class ClientDisconnectedError(Exception):
    """The client closed the connection before the server answered."""
