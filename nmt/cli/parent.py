"""Ends a rank of nmt-train with its launcher.

This module imports nothing heavy, because a rank uses it before the imports that take seconds.
"""

from __future__ import annotations

import functools
import os
import threading
import time


@functools.cache  # one thread, however often it is called
def exit_with(parent: int) -> None:
    """End this process as soon as process `parent`, its launcher, has ended.

    Without it a rank would train on unnoticed after its launcher was killed.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
