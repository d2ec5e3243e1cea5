"""End a rank of nmt-train when its launcher ends.

This module imports only the standard library, since a rank calls `exit_after_launcher` before
imports that take seconds.
"""

from __future__ import annotations

import functools
import os
import threading
import time

_SECONDS_BETWEEN_CHECKS = 0.5


@functools.cache  # so that a second call does not start a second thread
def exit_after_launcher(launcher_pid: int) -> None:
    """Start a thread that ends this process after its launcher has ended.

    Without it, a rank would continue training after its launcher was killed.
    """

    def watch() -> None:
        # the parent of this process changes when the launcher ends
        while os.getppid() == launcher_pid:
            time.sleep(_SECONDS_BETWEEN_CHECKS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
