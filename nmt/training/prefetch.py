"""Makes what an update reads while the one before is computed.

It knows neither model nor device.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from nmt.data.batching import Update

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Calls `make` for one update ahead, in a thread."""

    def __init__(self, make: Callable[[Update], T]) -> None:
        self._make = make
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._ahead: tuple[Update, Future[T]] | None = None

    def take(self, update: Update, following: Update | None) -> T:
        """Return what `make` gives for `update`, and begin with that of `following`.

        Raises what `make` has raised.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] is not update:
            ahead = None
        made = self._make(update) if ahead is None else ahead[1].result()
        if following is not None:
            self._ahead = following, self._thread.submit(self._make, following)
        return made
