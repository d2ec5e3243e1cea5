"""`python -m nmt.cli.rank CONFIG_FILE LAUNCHER` is what the launcher of `nmt-train`, process number
LAUNCHER, starts for each device. Its imports take seconds, in which it can be asked to end as well.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time


@functools.cache  # asked for again, when all is imported
def end_with(launcher: int) -> None:
    """End with the launcher, however it ends: a rank that outlives it would train unnoticed."""

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(path: str, launcher: str) -> int:
    """Train as one rank with the config in a file; return the exit status."""
    end_with(int(launcher))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the imports without a traceback
    from nmt.cli import train

    signal.signal(signal.SIGINT, signal.default_int_handler)
    return train.main(path)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
