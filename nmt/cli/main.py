"""The entry points: `nmt NAME` and `nmt-NAME` for every command, with logs on stderr and one line
instead of a traceback for the user's mistakes.
"""

from __future__ import annotations

import errno
import functools
import gc
import importlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from nmt import __version__  # noqa: F401, which measures from its import on
from nmt.cli.commands import COMMANDS, Command, command_help, list_commands
from nmt.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_USER, LINE_ERRORS, NmtError, nearest

_QUIET = (*LINE_ERRORS, OSError, KeyboardInterrupt)  # one line, no traceback


def __getattr__(name: str) -> Callable[[], int]:
    """Return the entry point of `nmt-NAME`, which setup.cfg names `nmt.cli.main:NAME`, with an
    underscore after a keyword of Python.
    """
    if (command := COMMANDS.get(name.removesuffix("_"))) is not None:
        return functools.partial(main, command)
    raise AttributeError(name)


def nmt() -> int:
    """Dispatch `nmt NAME ...` and `nmt help NAME`; without a name, list the commands."""
    name, *rest = sys.argv[1:] or ["--help"]
    if name == "help":
        name, *rest = [*rest, "--help"]
    name = name.removeprefix("nmt-")
    return main(COMMANDS[name], rest) if name in COMMANDS else main(None, [name])


def main(command: Command | None, argv: Sequence[str] | None = None) -> int:
    """Run `command`, or `nmt` alone, with the arguments of the process; return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if sys.stderr is None:  # closed with 2>&-; the next file that is opened would take its place
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    log_to_stderr()
    try:
        if {"-h", "--help"} & set(arguments):
            print(list_commands() if command is None else command_help(command))
        elif "--version" in arguments:
            print(f"nmt {__version__}")
        elif command is None:
            raise NmtError(f"no command {arguments[0]}; {nearest(arguments[0], COMMANDS)}")
        else:
            from nmt.cli.compose import with_config  # imports Hydra

            with_config(command, arguments, functools.partial(import_and_run, command))
        if sys.stdout is not None:  # closed with >&-
            sys.stdout.flush()
    except _QUIET as error:
        return exit_status(error, f"nmt-{command.name}" if command else "nmt")
    return EXIT_DONE


def exit_status(error: BaseException, program: str) -> int:
    """Print the one line of an error that needs no traceback; return the exit status."""
    if isinstance(error, BrokenPipeError):
        # the reader, for example head, has what it wants; Python would complain again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE
    message, status = "interrupted", EXIT_INTERRUPTED
    if isinstance(error, OSError):
        if error.filename is None and error.errno != errno.ENOSPC:
            raise error  # not about a file that the user named
        message, status = f"{error.filename or 'output'}: {error.strerror}", EXIT_USER
    elif isinstance(error, LINE_ERRORS):
        message, status = str(error), error.exit_status
    print(f"{program}: {message}", file=sys.stderr)
    return status


def import_and_run(command: Command, *configs: Any) -> Any:
    """Run a command and return its score, if any. What it imports is kept out of garbage
    collection, which would traverse all of torch while it is imported, at times later, and at the
    end of the process: 0.35 of 1.2 s.
    """
    module, function = command.run.split(":")
    is_new = module not in sys.modules
    gc.disable()
    try:
        run = getattr(importlib.import_module(module), function)
    finally:
        gc.enable()
    if is_new:  # else garbage of a process of several commands would be kept as well
        gc.freeze()
    return run(*configs)


def log_to_stderr() -> None:
    """Write the logs of nmt to stderr: rank 0 all of them, other ranks only warnings."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("nmt")
    logger.handlers = [handler]
    is_main = os.environ.get("RANK", "0") == "0"
    logger.setLevel(logging.INFO if is_main else logging.WARNING)
    logger.propagate = False
