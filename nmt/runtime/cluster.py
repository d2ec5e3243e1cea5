"""Workers on other machines, of a running Dask scheduler (docs/clusters.md).

Dask assigns the items to its workers, and gives the items of a lost worker to another one.
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
from nmt.runtime.pool import ITEMS_A_WORKER, Item, Processes, Result, Workers, map_in_order

log = logging.getLogger(__name__)
_CONNECT_SECONDS = 20
_WAITING_LOG_SECONDS = 30.0


def open_workers(
    scheduler: str | None,
    num_workers: int,
    make_function: Callable[[], Callable[[Item], Result]],
    *,
    folder: Path | None = None,
) -> Workers[Item, Result]:
    """Return the workers of a Dask scheduler, or `num_workers` processes of this machine.

    `folder` must be visible to the workers of the scheduler. A single worker runs in this process.
    """
    if scheduler is not None:
        return DaskWorkers(scheduler, make_function, folder)
    return Processes(num_workers, make_function) if num_workers > 1 else Workers(make_function)


class DaskWorkers(Workers[Item, Result]):
    """Applies a function to items on all workers of a scheduler, also those that join later."""

    def __init__(
        self,
        scheduler: str,
        make_function: Callable[[], Callable[[Item], Result]],
        folder: Path | None,
    ) -> None:
        super().__init__(make_function)
        self._scheduler = scheduler
        self._key = uuid.uuid4().hex
        self._pickled_make_function = pickle.dumps(make_function)
        self._client = _connect(scheduler)
        self._marker = None  # a file that workers must see
        if folder is not None:
            self._marker = folder / f".seen-{self._key}.tmp"
            self._marker.touch()

    def __exit__(self, *exc_info: object) -> None:
        """Disconnect from the scheduler, which cancels the tasks."""
        if self._marker is not None:
            self._marker.unlink(missing_ok=True)
        self._client.close(timeout=1)

    def map(self, items: Iterable[Item]) -> Iterator[tuple[Item, Result]]:
        """Yield each item with its result; see `Workers.map`.

        Raises `PeerError` if the scheduler is lost, and `NmtError` for workers that have another
        version of nmt or do not see the folder.
        """
        from distributed import KilledWorker

        advice = "run the same command to continue"
        try:
            yield from map_in_order(
                items, self._submit, self._wait_for_result, max_pending=self._max_pending
            )
        except KilledWorker as error:
            raise PeerError(
                f"{error.allowed_failures + 1} workers were lost with the same task, probably "
                f"because memory ran out; see the log of {error.last_worker.address}: {advice}"
            ) from None
        except (CancelledError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # by the function
            raise PeerError(f"the scheduler {self._scheduler} is lost; {advice}") from None
        except MemoryError:
            raise NmtError("a worker has no memory left; give workers more") from None

    def _max_pending(self) -> int:
        return ITEMS_A_WORKER * max(1, len(self._client.nthreads()))

    def _submit(self, item: Item) -> Any:
        return self._client.submit(
            run_task,
            __version__,
            self._marker,
            self._key,
            self._pickled_make_function,
            pickle.dumps(item),
            pure=False,
        )

    def _wait_for_result(self, future: Any) -> Any:
        while True:
            try:
                return future.result(timeout=_WAITING_LOG_SECONDS)
            except asyncio.TimeoutError:
                if not self._client.nthreads():
                    log.info("waiting: the scheduler %s has no worker", self._scheduler)


def _connect(scheduler: str) -> Any:
    """Return a client of the scheduler, whose workers have this version of nmt.

    Raises `NmtError` otherwise, and if Dask is not installed.
    """
    try:
        distributed: Any = importlib.import_module("distributed")
    except ImportError:
        raise NmtError("scheduler needs Dask; install it with: pip install nmt[cluster]") from None
    for name in ("distributed", "distributed.client"):  # our own message has one line
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about other versions of packages
            distributed.comm.get_address_host(scheduler)  # a client would hang at its end
            client = distributed.Client(scheduler, timeout=_CONNECT_SECONDS, set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise NmtError(f"scheduler={scheduler}: no scheduler answers there ({reason})") from None
    # before any task, which a worker without nmt could not unpickle
    versions = client.run(metadata.version, "nmt", on_error="return")
    for address, version in versions.items():
        if version != __version__:
            client.close(timeout=1)
            raise _version_error(f"worker {address}", version, __version__)
    num_threads = client.nthreads().values()
    log.info("%d workers; dashboard: %s", len(num_threads), client.dashboard_link)
    if any(number > 1 for number in num_threads):
        log.warning("a worker runs one task at a time; start one per core, with --nthreads 1")
    return client


def _version_error(worker: str, worker_version: str, version: str) -> NmtError:
    return NmtError(
        f"{worker} has nmt {worker_version}, and this is {version}; install the same version"
    )


# State of a worker

_lock = threading.Lock()  # threads of a worker take turns
_function: Callable[[Any], Any] | None = None
_function_key = ""


def run_task(
    version: str, marker: Path | None, key: str, pickled_make_function: bytes, pickled_item: bytes
) -> Any:
    """Apply a function to an item on this worker, for a client with this `version` of nmt.

    The function is made once for each `key`, and then kept.
    """
    global _function, _function_key
    host = f"worker {socket.gethostname()}"
    if version != __version__:
        raise _version_error(host, __version__, version)
    if marker is not None and not marker.exists():
        raise NmtError(
            f"{host} does not see {marker.parent}; choose a folder that all machines share"
        )
    with _lock:
        if _function is None or _function_key != key:
            _function = None  # free its memory before the next one is made
            try:
                _function = pickle.loads(pickled_make_function)()
            except NmtError as error:
                raise NmtError(f"{host}: {error}") from None
            _function_key = key
        return _function(pickle.loads(pickled_item))
