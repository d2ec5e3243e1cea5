"""End a rank of nmt-train when its launcher ends.

A rank calls `end_with_launcher` before imports that take seconds. So this module imports only the
standard library.
"""

from __future__ import annotations

import functools
import os
import threading
import time


@functools.cache  # further calls start no second thread
def end_with_launcher(launcher_pid: int) -> None:
    """Start a thread that ends this process as soon as its launcher has ended.

    Otherwise, a rank would go on training after its launcher was killed.
    """

    def watch() -> None:
        # the parent of this process changes when the launcher ends
        while os.getppid() == launcher_pid:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
