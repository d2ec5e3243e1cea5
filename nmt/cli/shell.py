"""What every command shares: help, configuration, logging, and one line instead of a traceback for
the user's mistakes.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence

from nmt import __version__
from nmt.cli.command import Command
from nmt.errors import NmtError, RankError, StoppedError

EXIT_OK, EXIT_USER, EXIT_INTERRUPTED = 0, 2, 130
EXIT_BUG = 1  # python's own after a traceback
EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: saved on a signal, to be started again


def main(command: Command, argv: Sequence[str] | None = None) -> int:
    """Run `command` with the arguments of the process and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    program = f"nmt-{command.name}"
    if {"-h", "--help"} & set(arguments):
        return guarded(lambda: _help(command), program)
    if "--version" in arguments:
        return guarded(lambda: print(f"nmt {__version__}"), program)
    return guarded(lambda: _run(command, arguments), program)


def guarded(task: Callable[[], None], program: str) -> int:
    """Call `task` and turn what it raises into an exit status."""
    log_to_stderr()
    try:
        task()
        sys.stdout.flush()
    except NmtError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return EXIT_USER
    except StoppedError as stop:
        print(f"{program}: {stop}", file=sys.stderr)
        return EXIT_STOPPED
    except RankError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return EXIT_BUG
    except BrokenPipeError:
        # the reader, for example head, has what it wants; python would complain once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except OSError as error:
        if error.filename is None and error.errno != errno.ENOSPC:
            raise  # not about a file that the user named
        print(f"{program}: {error.filename or 'output'}: {error.strerror}", file=sys.stderr)
        return EXIT_USER
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return EXIT_OK


def _help(command: Command) -> None:
    from nmt.cli.help import command_help  # which lists YAML files; a run has no need of it

    print(command_help(command))


def _run(command: Command, arguments: list[str]) -> None:
    with _uncollected():
        from nmt.cli.compose import with_config  # Hydra takes a while to import

        run = importlib.import_module(command.module).run
    with_config(command, arguments, run)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Keep what is imported out of garbage collection, which would go over all of torch while it is
    imported, now and then later, and at the end of the process: 0.35 of 1.2 s, for nothing.
    """
    is_first = gc.get_freeze_count() == 0
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
    if is_first:  # later, in a process of several commands, garbage would be kept as well
        gc.freeze()


def log_to_stderr() -> None:
    """Let nmt log to stderr: one of several ranks all, the others warnings alone."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("nmt")
    logger.handlers = [handler]
    is_main = os.environ.get("RANK", "0") == "0"
    logger.setLevel(logging.INFO if is_main else logging.WARNING)
    logger.propagate = False
