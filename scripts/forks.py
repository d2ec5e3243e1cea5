"""Run commands of nmt in forks of this process, with limits, and kill them at chosen moments."""

from __future__ import annotations

import importlib
import mmap
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nmt.cli.commands import COMMANDS
from nmt.cli.main import main as run_command
from nmt.runtime import files

CPU_SECONDS = 60  # damaged metadata must not make a command compute for longer
MAX_SECONDS = 600
ADDRESS_SPACE_BYTES = 8 << 30
# audit events that precede a change of names in the file system
CHANGE_EVENTS = {
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.symlink",
    "os.link",
    "os.chmod",
    "os.truncate",
}
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
MODULES = """nmt.cli.tasks nmt.cli.train nmt.cli.translate nmt.cli.evaluate nmt.cli.data_folder
    nmt.average nmt.training.train nmt.translate.translator nmt.translate.engines.ctranslate2
    nmt.export.ctranslate2 nmt.preprocess.prepare nmt.visualize.draw nmt.visualize.runs
    nmt.visualize.run_report nmt.visualize.style nmt.serve.server ctranslate2
    torch.utils.tensorboard matplotlib.pyplot sacrebleu"""


@dataclass
class Result:
    """How a command ended: its exit status, negative for a signal, and its output."""

    status: int
    output: bytes
    errors: str

    @property
    def is_refusal(self) -> bool:
        """Whether the command ended with status 2 and a single line of its own."""
        messages = [line for line in self.errors.splitlines() if line.startswith("nmt-")]
        return self.status == 2 and len(messages) == 1 and not self.has_traceback

    @property
    def has_traceback(self) -> bool:
        """Whether an exception was not handled."""
        return "Traceback" in self.errors

    @property
    def error_tail(self) -> str:
        """The end of stderr on one line."""
        return " ".join(self.errors.split())[-300:]


def import_everything() -> None:
    """Import the modules that commands import when they run, so that forks need not."""
    torch.set_num_threads(1)
    for name in MODULES.split():
        importlib.import_module(name)


def run(
    name: str,
    arguments: list[str],
    *,
    call_counter: mmap.mmap | None = None,
    stop_after_seconds: float = 0,
) -> Result:
    """Run `nmt-NAME` in a fork.

    With `call_counter`, the command may be killed, see `kill_at_call`. With `stop_after_seconds`,
    it gets SIGTERM after this time.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        pid = os.fork()
        if pid == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            run_and_exit(name, arguments, call_counter)
        if stop_after_seconds:
            time.sleep(stop_after_seconds)
            os.kill(pid, signal.SIGTERM)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        output.seek(0)
        errors.seek(0)
        return Result(status, output.read(), errors.read().decode("utf-8", "replace"))


def run_and_exit(name: str, arguments: list[str], call_counter: mmap.mmap | None) -> None:
    """Run a command in this process, with limits, and end the process."""
    sys.stdin = open(os.devnull)  # noqa: SIM115
    sys.stdout = os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w")
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    signal.alarm(MAX_SECONDS)
    status = 1
    try:
        if call_counter is not None:
            kill_at_call(call_counter)
        status = run_command(COMMANDS[name], arguments)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def run_and_kill(name: str, arguments: list[str], call: int) -> tuple[int, int]:
    """Run a command and kill it before a call that changes the file system, or never if 0.

    Returns its status and the number of such calls.
    """
    with mmap.mmap(-1, 16) as call_counter:
        call_counter[:8] = call.to_bytes(8, "little")
        result = run(name, arguments, call_counter=call_counter)
        assert result.status in (0, -signal.SIGKILL), result.errors
        return result.status, int.from_bytes(call_counter[8:16], "little")


def kill_at_call(call_counter: mmap.mmap) -> None:
    """Count calls that change the file system, and kill this process just before one of them.

    These calls make, remove or rename files, open them for writing, or flush them to disk.
    `call_counter` is shared memory with two 64-bit numbers: the number of the call before which the
    process is killed, from 1, and the count.
    """

    def count_call() -> None:
        count = int.from_bytes(call_counter[8:16], "little") + 1
        call_counter[8:16] = count.to_bytes(8, "little")
        if call_counter[:8] == call_counter[8:16]:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        flags = 0
        if event == "open":
            flags = arguments[2] or 0  # may be None
        is_opened_for_writing = (flags & WRITE_FLAGS) != 0
        if event in CHANGE_EVENTS or is_opened_for_writing:
            count_call()

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            count_call()
            return function(*arguments)

        return call

    sys.addaudithook(audit)
    os.fsync = counted(os.fsync)
    files._exchange = counted(files._exchange)
