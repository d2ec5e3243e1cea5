"""End a command that is interrupted (Ctrl-C) while it imports modules.

A `KeyboardInterrupt` would show a traceback before `main` can catch it, and extension modules may
turn it into other errors. This module has few imports, so that it is loaded at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

_EXIT_INTERRUPTED = 130  # the same as in nmt.errors, which takes longer to import


@contextlib.contextmanager
def exiting_when_interrupted() -> Iterator[None]:
    """In the block, SIGINT ends this process with one line on stderr.

    Does nothing if SIGINT is ignored, as in background jobs, or has a handler.
    """
    try:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _exit)
    except ValueError:  # only the main thread may set a handler
        pass
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is _exit:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit(*_: object) -> None:
    program = os.path.basename(sys.argv[0])
    with contextlib.suppress(OSError):
        os.write(2, f"{program}: interrupted\n".encode(errors="replace"))
    os._exit(_EXIT_INTERRUPTED)
