"""End a command that is interrupted (Ctrl-C) while it imports modules.

A `KeyboardInterrupt` would show a traceback before `main` can catch it, and extension modules may
turn it into other errors. This module imports only what Python itself has loaded at its start.
"""

from __future__ import annotations

# `signal` would import `enum`; until then Ctrl-C would show a traceback
import _signal  # type: ignore[import-not-found,unused-ignore]
import os
import sys

_EXIT_INTERRUPTED = 130  # the same as in nmt.errors, which takes longer to import


class ExitWhenInterrupted:
    """A context manager: in the block, SIGINT ends this process with one line on stderr.

    Does nothing if SIGINT is ignored, as in background jobs, or has a handler.
    """

    def __enter__(self) -> None:
        try:
            if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
                _signal.signal(_signal.SIGINT, _exit)
        except ValueError:  # only the main thread may set a handler
            pass

    def __exit__(self, *_: object) -> None:
        if _signal.getsignal(_signal.SIGINT) is _exit:
            _signal.signal(_signal.SIGINT, _signal.default_int_handler)


def _exit(*_: object) -> None:
    program = os.path.basename(sys.argv[0])
    try:  # noqa: SIM105  # contextlib is not loaded yet
        os.write(2, f"{program}: interrupted\n".encode(errors="replace"))
    except OSError:  # stderr is closed or full
        pass
    os._exit(_EXIT_INTERRUPTED)
