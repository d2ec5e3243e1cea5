"""Apply a function to many items on other machines, with the workers of a running Dask scheduler
(docs/clusters.md).

Dask assigns the items to its workers. If a worker is lost, its items go to another one.
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
from nmt.errors import NmtError, PeerError, to_one_line
from nmt.runtime.pool import (
    ITEMS_PER_WORKER,
    CurrentProcess,
    Item,
    Processes,
    Result,
    Workers,
    map_in_order,
)

log = logging.getLogger(__name__)
_CONNECT_SECONDS = 20
_WAITING_LOG_SECONDS = 30.0  # interval between log lines while the scheduler has no worker


def open_workers(
    scheduler: str | None,
    num_workers: int,
    function_factory: Callable[[], Callable[[Item], Result]],
    *,
    folder: Path | None = None,
) -> Workers[Item, Result]:
    """Return the workers of a Dask scheduler or, without one, of this machine.

    Without a scheduler, starts `num_workers` processes; a single worker runs in this process. With
    a scheduler and a `folder`, each worker checks that it sees the folder.
    """
    if scheduler is not None:
        return DaskWorkers(scheduler, function_factory, folder)
    if num_workers > 1:
        return Processes(num_workers, function_factory)
    return CurrentProcess(function_factory)


class DaskWorkers(Workers[Item, Result]):
    """Applies a function to items on all workers of a scheduler; workers may join later."""

    def __init__(
        self,
        scheduler: str,
        function_factory: Callable[[], Callable[[Item], Result]],
        folder: Path | None,
    ) -> None:
        self._scheduler = scheduler
        self._function_id = uuid.uuid4().hex
        # pickled here, so that a worker can compare versions of nmt before it unpickles the factory
        self._pickled_function_factory = pickle.dumps(function_factory)
        self._client = _connect(scheduler)
        self._marker = None  # a file in `folder`, which each worker looks for
        if folder is not None:
            self._marker = folder / f".seen-{self._function_id}.tmp"
            self._marker.touch()

    def __exit__(self, *exc_info: object) -> None:
        """Disconnect from the scheduler, which then cancels all items."""
        if self._marker is not None:
            self._marker.unlink(missing_ok=True)
        self._client.close(timeout=1)

    def map(self, items: Iterable[Item]) -> Iterator[tuple[Item, Result]]:
        """Yield each item with its result; see `Workers.map`.

        Raises `PeerError` if the scheduler or several workers are lost. Raises `NmtError` if a
        worker has another version of nmt, does not see the folder, or has no memory left.
        """
        from distributed import KilledWorker

        advice = "run the same command to continue"
        scheduler_lost_error = PeerError(f"the scheduler {self._scheduler} is lost; {advice}")
        try:
            yield from map_in_order(
                items, self._submit, self._wait_for_result, get_max_pending=self._get_max_pending
            )
        except KilledWorker as error:
            raise PeerError(
                f"{error.allowed_failures + 1} workers were lost with the same task, probably "
                f"because memory ran out; see the log of {error.last_worker.address}: {advice}"
            ) from None
        except CancelledError:
            raise scheduler_lost_error from None
        except OSError as error:
            is_from_function = error.errno is not None  # errors of Dask have no errno
            if is_from_function:  # for example, the disk is full
                raise
            raise scheduler_lost_error from None
        except MemoryError:
            raise NmtError("a worker has no memory left; give the workers more memory") from None

    def _get_max_pending(self) -> int:
        """Return the maximum number of submitted items for the workers that are connected now."""
        return ITEMS_PER_WORKER * max(1, len(self._client.nthreads()))

    def _submit(self, item: Item) -> Any:
        """Send an item to the scheduler; return the future of its result."""
        return self._client.submit(
            run_task,
            __version__,
            self._marker,
            self._function_id,
            self._pickled_function_factory,
            pickle.dumps(item),
            pure=False,  # a result is not reused for an equal item
        )

    def _wait_for_result(self, future: Any) -> Any:
        """Return the result of a future; log regularly while the scheduler has no worker."""
        while True:
            try:
                return future.result(timeout=_WAITING_LOG_SECONDS)
            except asyncio.TimeoutError:
                if future.done():  # the function itself may have raised a TimeoutError
                    return future.result()
                if not self._client.nthreads():
                    log.info("waiting: the scheduler %s has no worker", self._scheduler)


def _connect(scheduler: str) -> Any:
    """Connect to the scheduler and check its workers.

    Raises `NmtError` if Dask is not installed, if the scheduler does not answer, or if a worker has
    another version of nmt.
    """
    try:
        distributed: Any = importlib.import_module("distributed")
    except ImportError:
        raise NmtError("scheduler needs Dask; install it with: pip install nmt[cluster]") from None
    # hide Dask's tracebacks; our own message has one line
    for name in ("distributed", "distributed.client"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Dask warns if versions of packages differ
            # raises an error if the address is invalid: a client for such an address would hang
            # when it closes
            distributed.comm.get_address_host(scheduler)
            client = distributed.Client(scheduler, timeout=_CONNECT_SECONDS, set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        reason = to_one_line(error, 200)
        raise NmtError(f"scheduler={scheduler}: no scheduler answers there ({reason})") from None
    # Check the versions before the first item is sent, since a worker without nmt cannot unpickle
    # an item. Such a worker returns an exception instead of a version.
    worker_versions = client.run(metadata.version, "nmt", on_error="return")
    for address, version in worker_versions.items():
        if version != __version__:
            client.close(timeout=1)
            raise _version_error(f"worker {address}", version, __version__)
    thread_counts = client.nthreads().values()
    log.info("%d workers; dashboard: %s", len(thread_counts), client.dashboard_link)
    if max(thread_counts, default=1) > 1:
        log.warning("a worker runs one task at a time; start a worker per core, with --nthreads 1")
    return client


def _version_error(worker_name: str, worker_version: str, version: str) -> NmtError:
    """Return the error for a worker whose version of nmt is not the `version` of the client."""
    return NmtError(
        f"{worker_name} has nmt {worker_version}, but the client has {version}; install the same "
        "version"
    )


# --- functions and state of a worker

_lock = threading.Lock()  # held while a thread of this worker runs an item
_newest_function: Callable[[Any], Any] | None = None
_newest_function_id = ""


def run_task(
    version: str,
    marker: Path | None,
    function_id: str,
    pickled_function_factory: bytes,
    pickled_item: bytes,
) -> Any:
    """Apply a function to an item on this worker.

    The factory builds the function for the first item. Later items with the same `function_id` use
    the same function. Raises `NmtError` if this worker does not see the file `marker`, or if the
    client has another `version` of nmt than this worker.
    """
    global _newest_function, _newest_function_id
    worker_name = f"worker {socket.gethostname()}"
    if version != __version__:
        raise _version_error(worker_name, __version__, version)
    if marker is not None and not marker.exists():
        raise NmtError(
            f"{worker_name} does not see {marker.parent}; choose a folder that all machines share"
        )
    with _lock:
        if _newest_function is None or _newest_function_id != function_id:
            _newest_function = None  # free its memory before the next function is built
            try:
                _newest_function = pickle.loads(pickled_function_factory)()
            except NmtError as error:
                raise NmtError(f"{worker_name}: {error}") from None
            _newest_function_id = function_id
        return _newest_function(pickle.loads(pickled_item))
