"""End a command that is interrupted by Ctrl-C while it imports modules.

During the imports, a `KeyboardInterrupt` would show a traceback, and extension modules may turn it
into other errors. This module only imports modules that Python loads at startup.
"""

from __future__ import annotations

# not `signal`, which imports `enum`: Ctrl-C during the import of `enum` would show a traceback
import _signal  # type: ignore[import-not-found,unused-ignore]
import os
import sys

# Equal to `nmt.errors.EXIT_INTERRUPTED`. Ctrl-C during the import of `nmt.errors` would show a
# traceback.
_EXIT_INTERRUPTED = 130


class ExitWhenInterrupted:
    """Context manager in whose block SIGINT ends this process, with one line on stderr.

    Does nothing if SIGINT is ignored, as in background jobs, or has another handler already.
    """

    def __enter__(self) -> None:
        try:
            if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
                _signal.signal(_signal.SIGINT, _handle_interrupt)
        except ValueError:  # only the main thread may set a handler
            pass

    def __exit__(self, *_: object) -> None:
        if _signal.getsignal(_signal.SIGINT) is _handle_interrupt:
            _signal.signal(_signal.SIGINT, _signal.default_int_handler)


def _handle_interrupt(*_: object) -> None:
    """Write one line to stderr and end the process without cleanup."""
    program = os.path.basename(sys.argv[0])
    try:  # noqa: SIM105  # contextlib is not loaded yet
        os.write(2, f"{program}: interrupted\n".encode(errors="replace"))
    except OSError:  # stderr is closed or full
        pass
    os._exit(_EXIT_INTERRUPTED)
