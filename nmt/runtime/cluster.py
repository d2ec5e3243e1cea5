"""Workers on other machines: those of a Dask scheduler, which others started (docs/clusters.md).

A task is a function, which a worker makes once and keeps, and one item. Dask places tasks, and
gives those of a worker that is lost to another.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import pickle
import socket
import threading
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError
from importlib import metadata
from pathlib import Path
from typing import Any

from nmt import __version__
from nmt.errors import NmtError, PeerError
from nmt.runtime.pool import ITEMS_A_WORKER, Item, Processes, Result, Workers, in_order

log = logging.getLogger(__name__)
_CONNECT_SECONDS = 20
_NOTICE_SECONDS = 30.0
_OTHER_VERSION = "{} has nmt {}, and this is {}; install the same"


def open_workers(
    scheduler: str | None,
    num_workers: int,
    make: Callable[[], Callable[[Item], Result]],
    *,
    folder: Path | None = None,
) -> Workers[Item, Result]:
    """Return the workers of a scheduler, all of which must see `folder`; or so many processes, and
    for less than two this one.
    """
    if scheduler is not None:
        return DaskWorkers(scheduler, make, folder)
    return Processes(num_workers, make) if num_workers > 1 else Workers(make)


class DaskWorkers(Workers[Item, Result]):
    """All workers that the scheduler has, also those that join later."""

    def __init__(
        self, scheduler: str, make: Callable[[], Callable[[Item], Result]], folder: Path | None
    ) -> None:
        super().__init__(make)
        self._scheduler, self._key = scheduler, uuid.uuid4().hex
        self._client = _connect(scheduler)
        self._marker = None if folder is None else folder / f".seen-{self._key}.tmp"
        if self._marker is not None:
            self._marker.touch()
        self._function = pickle.dumps(make)

    def __exit__(self, *exc_info: object) -> None:
        """Leave the scheduler, which drops what it was asked for."""
        if self._marker is not None:
            self._marker.unlink(missing_ok=True)
        self._client.close(timeout=1)

    def map(self, items: Iterable[Item]) -> Iterator[tuple[Item, Result]]:
        """Yield each item with its result; see `Workers.map`.

        Raises a `PeerError` when the scheduler is lost, and an `NmtError` for workers that have
        another nmt or do not see the folder.
        """
        from distributed import KilledWorker

        again = "the same command goes on with what is done"

        def most() -> int:
            return ITEMS_A_WORKER * max(1, len(self._client.nthreads()))

        try:
            yield from in_order(self._submit, items, most, self._result)
        except KilledWorker as error:
            raise PeerError(
                f"{error.allowed_failures + 1} workers were lost with the same task, as happens "
                f"when memory runs out; see the log of {error.last_worker.address}: {again}"
            ) from None
        except (CancelledError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # of a task
            raise PeerError(f"the scheduler {self._scheduler} is lost; {again}") from None
        except MemoryError:
            raise NmtError("a worker has no memory left; give workers more") from None

    def _submit(self, item: Item) -> Any:
        work = (__version__, self._marker, self._key, self._function, pickle.dumps(item))
        return self._client.submit(run_task, *work, pure=False)

    def _result(self, future: Any) -> Any:
        while True:
            try:
                return future.result(timeout=_NOTICE_SECONDS)
            except asyncio.TimeoutError:
                if not self._client.nthreads():
                    log.info("waiting: the scheduler %s has no worker", self._scheduler)


def _connect(scheduler: str) -> Any:
    """Return a client of the scheduler; an `NmtError` without one, or without Dask."""
    try:
        distributed: Any = importlib.import_module("distributed")
    except ImportError:
        raise NmtError("scheduler needs Dask; install it with: pip install nmt[cluster]") from None
    for name in ("distributed", "distributed.client"):  # what they log, one line will say
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other versions of packages
            distributed.comm.get_address_host(scheduler)  # a client would fail to end after it
            client = distributed.Client(scheduler, timeout=_CONNECT_SECONDS, set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise NmtError(f"scheduler={scheduler}: no scheduler answers there ({reason})") from None
    versions = client.run(metadata.version, "nmt", on_error="return")  # before they unpickle of it
    for address, version in versions.items():
        if version != __version__:
            client.close(timeout=1)
            raise NmtError(_OTHER_VERSION.format(f"worker {address}", version, __version__))
    num_threads = client.nthreads().values()
    log.info("%d workers; dashboard: %s", len(num_threads), client.dashboard_link)
    if any(number > 1 for number in num_threads):
        log.warning("a worker runs one task at a time; start one a core, with --nthreads 1")
    return client


_lock = threading.Lock()  # workers of several threads take turns
_made: tuple[str, Callable[[Any], Any]] | None = None  # on a worker, with its key


def run_task(version: str, marker: Path | None, key: str, make: bytes, item: bytes) -> Any:
    """Do what a client of `version` asks of this worker: call the function that `make` returns, and
    that is kept under `key`, with `item`.
    """
    global _made
    host = f"worker {socket.gethostname()}"
    if version != __version__:
        raise NmtError(_OTHER_VERSION.format(host, __version__, version))
    if marker is not None and not marker.exists():
        raise NmtError(
            f"{host} does not see {marker.parent}; choose a folder that all machines share"
        )
    with _lock:
        if _made is None or _made[0] != key:
            _made = None  # first, since it may be large
            try:
                _made = key, pickle.loads(make)()
            except NmtError as error:
                raise NmtError(f"{host}: {error}") from None
        return _made[1](pickle.loads(item))
