"""The entry points `nmt NAME` and `nmt-NAME`.

Commands log to stderr, and report a mistake of the user in one line instead of a traceback.
"""

from __future__ import annotations

from nmt.cli.interrupts import ExitWhenInterrupted

with ExitWhenInterrupted():  # Ctrl-C during these imports ends the process without a traceback
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
    from nmt.cli.commands import COMMANDS, Command, command_help, commands_help
    from nmt.config import iterate_settings
    from nmt.errors import (
        EXIT_DONE,
        EXIT_INTERRUPTED,
        EXIT_USER,
        ONE_LINE_ERRORS,
        NmtError,
        escape_controls,
        suggest_names,
    )

if TYPE_CHECKING:
    from nmt.cli.compose import ComposedCommand

_QUIET_WORDS = ("-q", "--quiet", "quiet=true")
_VERBOSE_WORDS = ("-v", "-verbose", "--verbose", "verbose=true")
_LEVEL_VARIABLE = "NMT_LOG_LEVEL"
_COMMAND_TO_SUGGEST = {  # keyed by the name of the command in other toolkits
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
_COMMAND_BY_ALIAS = {"average-checkpoints": "average"}
# `report_error` prints these errors in one line, but raises an `OSError` again if it is a bug
_REPORTED_ERRORS = (*ONE_LINE_ERRORS, OSError, KeyboardInterrupt)


def __getattr__(name: str) -> Callable[[], int]:
    """Return the function that runs the command `name`.

    Python calls `__getattr__` because setup.cfg declares the entry point of `nmt-NAME` as
    `nmt.cli.main:NAME`. The name of `nmt-import` is `import_`, since `import` is a keyword.
    """
    command = COMMANDS.get(name.removesuffix("_"))
    if command is None:
        raise AttributeError(name)
    return functools.partial(main, command)


def nmt() -> int:
    """Run `nmt NAME ...` or `nmt help NAME`; without a name, list the commands."""
    words = sys.argv[1:] or ["--help"]
    if words[0] == "help":
        words = [*words[1:], "--help"]  # `nmt help train` becomes `nmt train --help`
    name = words[0].removeprefix("nmt-")
    name = _COMMAND_BY_ALIAS.get(name, name)
    if name in COMMANDS:
        return main(COMMANDS[name], words[1:])
    return main(None, [name])  # --help, --version or an unknown name


def main(command: Command | None, argv: Sequence[str] | None = None) -> int:
    """Run a command with the words after its name, `argv`, and return the exit status.

    `argv` defaults to `sys.argv[1:]`. `command` is None for `nmt --help`, `nmt --version` and
    unknown names.
    """
    words, level = _read_verbosity(list(sys.argv[1:] if argv is None else argv))
    if sys.stderr is None:
        # The shell has closed file descriptor 2 (2>&-). The next file that is opened gets the
        # number 2, and libraries would write errors into it. So the null device is opened first.
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    try:
        log_to_stderr(level)
        if "-h" in words or "--help" in words:
            if command is None:
                print(commands_help())
            else:
                print(command_help(command, _compose_values(command, words)))
        elif "--version" in words:
            print(f"nmt {__version__}")
        elif command is None:
            name = _COMMAND_TO_SUGGEST.get(words[0], words[0])
            suggestion = suggest_names(name, COMMANDS, "nmt --help lists all")
            raise NmtError(f"no command {words[0]}; {suggestion}")
        else:
            # Collections would delay the imports; `import_function` turns them on again.
            gc.disable()
            with ExitWhenInterrupted():
                from nmt.cli.compose import compose_command  # imports OmegaConf
            run_composed = functools.partial(import_and_run, command)
            # for a sweep, calls `run_composed` for each combination of settings, and returns None
            composed = compose_command(command, words, run_composed)
            if composed is not None:
                run_composed(composed)
        if sys.stdout is not None:  # None if closed by >&-
            sys.stdout.flush()
    except _REPORTED_ERRORS as error:
        return report_error(error, f"nmt-{command.name}" if command else "nmt")
    finally:
        gc.enable()
    return EXIT_DONE


def _compose_values(command: Command, words: list[str]) -> dict[str, Any]:
    """Compose the config of a command from `words`; return the values of all settings, by key.

    A word such as model=tiny sets several values. Returns an empty dictionary if no word sets a
    value, or if a word is invalid.
    """
    arguments = []
    for word in words:
        is_setting_of_nmt = not word.startswith(("-", "hydra"))
        if "=" in word and is_setting_of_nmt:
            arguments.append(word)
    if not arguments:
        return {}
    from nmt.cli.compose import compose_command  # imports OmegaConf

    def ignore(composed: ComposedCommand) -> None:
        """Run nothing; only a sweep would call this function."""

    try:
        composed = compose_command(command, arguments, ignore)
    except NmtError:
        return {}
    assert composed is not None  # `arguments` has no flag, such as the flag that starts a sweep
    return {key: value for key, value, _ in iterate_settings(composed.config)}


def report_error(error: BaseException, program: str) -> int:
    """Print the message of an error in one line; return the exit status.

    An `OSError` that neither names a file nor reports a full disk is a bug, and is raised again.
    """
    if isinstance(error, BrokenPipeError):
        # The reader of stdout, such as `head`, has ended. Python flushes stdout at exit, which
        # would fail again, so stdout becomes the null device.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE
    message = str(error)
    status = getattr(error, "exit_status", EXIT_USER)
    if isinstance(error, OSError):
        is_disk_full = error.errno == errno.ENOSPC
        if error.filename is None and not is_disk_full:
            raise error
        message = f"{error.filename or 'output'}: {error.strerror}"
    elif isinstance(error, KeyboardInterrupt):
        message = "interrupted"
        status = EXIT_INTERRUPTED
    with contextlib.suppress(OSError):  # stderr may be full too; the exit status shows the error
        print(escape_controls(f"{program}: {message}"), file=sys.stderr)
    return status


def import_and_run(command: Command, composed: ComposedCommand) -> Any:
    """Import and run a command.

    Returns the score of nmt-train, which a sweeper of Hydra optimizes, and None for other commands.
    """
    if not logging.getLogger("nmt").handlers:  # in a process that a launcher of Hydra started
        log_to_stderr()
    run_command = import_function(command)
    if composed.preparation is None:
        return run_command(composed.config)
    # nmt-train, which also prepares missing data and saves its config
    return run_command(composed.config, composed.config_yaml, composed.preparation)


def import_function(command: Command) -> Callable[..., Any]:
    """Import the function that runs a command.

    Turns garbage collection off during the imports, and excludes the imported objects from later
    collections. Otherwise, collections take 0.35 s of the 1.2 s of the imports.
    """
    module_name, function_name = command.entry_point.split(":")
    is_first_import = module_name not in sys.modules
    gc.disable()
    try:
        with ExitWhenInterrupted():
            module = importlib.import_module(module_name)
            run_command: Callable[..., Any] = getattr(module, function_name)
        # in later calls, a command has already run in this process, and `gc.freeze` would keep its
        # garbage
        if is_first_import:
            gc.freeze()  # before `gc.enable`, after which the next new object starts a collection
    finally:
        gc.enable()
    return run_command


class _EscapingFormatter(logging.Formatter):
    """Escapes control characters, which file names and input text may contain."""

    def format(self, record: logging.LogRecord) -> str:
        return escape_controls(super().format(record))


def _read_verbosity(words: list[str]) -> tuple[list[str], int]:
    """Remove the words that set the log level; return the other words and the level.

    Also sets the level in the environment, for processes that the command starts.
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
    """Write the logs of nmt to stderr: from `level` up on rank 0, from warnings up on other ranks.

    `level` defaults to the level of the command that started this process.
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
