"""The entry points `nmt NAME` and `nmt-NAME`: logs go to stderr, and a mistake of the user is shown
as one line instead of a traceback.
"""

from __future__ import annotations

from nmt.cli.interrupts import ExitWhenInterrupted

with ExitWhenInterrupted():
    import contextlib
    import errno
    import functools
    import gc
    import importlib
    import logging
    import os
    import sys
    from collections.abc import Callable, Sequence
    from typing import TYPE_CHECKING, Any

    from nmt import __version__
    from nmt.cli.commands import COMMANDS, Command, command_help, list_commands
    from nmt.config import iterate_settings
    from nmt.errors import (
        EXIT_DONE,
        EXIT_INTERRUPTED,
        EXIT_USER,
        LINE_ERRORS,
        NmtError,
        escape_controls,
        suggest_names,
    )

if TYPE_CHECKING:
    from nmt.cli.compose import ComposedCommand

_QUIET_WORDS = ("-q", "--quiet", "quiet=true")
_VERBOSE_WORDS = ("-v", "-verbose", "--verbose", "verbose=true")
_LEVEL_VARIABLE = "NMT_LOG_LEVEL"
_COMMAND_OF_OTHER_NAME = {  # commands of other toolkits, and ours
    "generate": "translate",
    "interactive": "translate",
    "decode": "translate",
    "infer": "translate",
    "test": "evaluate",
    "prepare": "preprocess",
    "prepare-data": "preprocess",
    "build-vocab": "preprocess",
    "convert": "import",
}
_ERRORS_WITHOUT_TRACEBACK = (*LINE_ERRORS, OSError, KeyboardInterrupt)


def __getattr__(name: str) -> Callable[[], int]:
    """Return the entry point of `nmt-NAME`, which setup.cfg names `nmt.cli.main:NAME`.

    The name of an entry point ends with an underscore if NAME is a keyword of Python.
    """
    command = COMMANDS.get(name.removesuffix("_"))
    if command is None:
        raise AttributeError(name)
    return functools.partial(main, command)


def nmt() -> int:
    """Run `nmt NAME ...` or `nmt help NAME`; without a name, list the commands."""
    words = sys.argv[1:] or ["--help"]
    if words[0] == "help":
        words = [*words[1:], "--help"]
    name = words[0].removeprefix("nmt-")
    if name in COMMANDS:
        return main(COMMANDS[name], words[1:])
    return main(None, [name])


def main(command: Command | None, argv: Sequence[str] | None = None) -> int:
    """Run a command with the words that follow its name; return the exit status.

    `command` is None for `nmt --help`, `nmt --version` and unknown names. `argv` holds the words
    and is by default `sys.argv[1:]`.
    """
    words, level = _read_verbosity(list(sys.argv[1:] if argv is None else argv))
    if sys.stderr is None:  # closed with 2>&-; the next opened file would get its descriptor
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    try:
        log_to_stderr(level)
        if "-h" in words or "--help" in words:
            if command is None:
                print(list_commands())
            else:
                print(command_help(command, _composed_values(command, words)))
        elif "--version" in words:
            print(f"nmt {__version__}")
        elif command is None:
            name = _COMMAND_OF_OTHER_NAME.get(words[0], words[0])
            suggestion = suggest_names(name, COMMANDS, "nmt --help lists all")
            raise NmtError(f"no command {words[0]}; {suggestion}")
        else:
            with ExitWhenInterrupted():
                from nmt.cli.compose import compose_command  # imports Hydra
            run = functools.partial(import_and_run, command)
            composed = compose_command(command, words, run)
            if composed is not None:
                run(composed)
        if sys.stdout is not None:  # closed with >&-
            sys.stdout.flush()
    except _ERRORS_WITHOUT_TRACEBACK as error:
        return report_error(error, f"nmt-{command.name}" if command else "nmt")
    return EXIT_DONE


def _composed_values(command: Command, words: list[str]) -> dict[str, Any]:
    """Return the values of all settings, by key, if `words` have settings such as model=tiny.

    Returns nothing without settings, or if one of them is invalid.
    """
    arguments = [word for word in words if "=" in word and not word.startswith(("-", "hydra"))]
    if not arguments:
        return {}
    from nmt.cli.compose import compose_command  # imports Hydra

    try:
        composed = compose_command(command, arguments, lambda _: None)
    except NmtError:
        return {}
    assert composed is not None, "arguments of a sweep"
    return {key: value for key, value, _ in iterate_settings(composed.config)}


def report_error(error: BaseException, program: str) -> int:
    """Print the line for an error that needs no traceback; return the exit status.

    Re-raises an `OSError` without a file name: unless the disk is full, it is a bug.
    """
    if isinstance(error, BrokenPipeError):
        # The reader, for example head, has ended. Python would fail again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE
    message = str(error)
    status = getattr(error, "exit_status", EXIT_USER)
    if isinstance(error, OSError):
        if error.filename is None and error.errno != errno.ENOSPC:
            raise error
        message = f"{error.filename or 'output'}: {error.strerror}"
    elif isinstance(error, KeyboardInterrupt):
        message = "interrupted"
        status = EXIT_INTERRUPTED
    with contextlib.suppress(OSError):  # stderr may be full too; the exit status shows the error
        print(escape_controls(f"{program}: {message}"), file=sys.stderr)
    return status


def import_and_run(command: Command, composed: ComposedCommand) -> Any:
    """Run a command; return its result, which is a score for nmt-train and else None."""
    if not logging.getLogger("nmt").handlers:  # a launcher of Hydra has started this process
        log_to_stderr()
    run = import_function(command)
    if composed.preparation is None:
        return run(composed.config)
    return run(composed.config, composed.config_yaml, composed.preparation)


def import_function(command: Command) -> Callable[..., Any]:
    """Import the function that runs a command.

    Turns garbage collection off during the imports and excludes the imported objects from later
    collections, because traversing torch's objects repeatedly takes 0.35 of 1.2 s.
    """
    module, function = command.run.split(":")
    is_first_import = module not in sys.modules
    gc.disable()
    try:
        with ExitWhenInterrupted():
            run: Callable[..., Any] = getattr(importlib.import_module(module), function)
    finally:
        gc.enable()
    if is_first_import:  # a second command would freeze the garbage of the first one
        gc.freeze()
    return run


class _EscapingFormatter(logging.Formatter):
    """Escapes control characters, which file names and input text may contain."""

    def format(self, record: logging.LogRecord) -> str:
        return escape_controls(super().format(record))


def _read_verbosity(words: list[str]) -> tuple[list[str], int]:
    """Remove the words that set how much is logged; return the others and the level.

    The level is also set in the environment, for the processes that the command starts.
    """
    level = logging.INFO
    other_words = []
    for word in words:
        if word in _QUIET_WORDS:
            level = logging.WARNING
        elif word in _VERBOSE_WORDS:
            level = logging.DEBUG
        else:
            other_words.append(word)
    os.environ[_LEVEL_VARIABLE] = str(level)
    return other_words, level


def log_to_stderr(level: int | None = None) -> None:
    """Write the logs of nmt to stderr: all of rank 0, and warnings of other ranks.

    By default, `level` is the level of the command that started this process.
    """
    if level is None:
        level = int(os.environ.get(_LEVEL_VARIABLE, logging.INFO))
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_EscapingFormatter("%(asctime)s %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("nmt")
    logger.handlers = [handler]
    is_main = os.environ.get("RANK", "0") == "0"
    logger.setLevel(level if is_main else logging.WARNING)
    logger.propagate = False
