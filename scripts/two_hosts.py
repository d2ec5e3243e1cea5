"""Trains on two hosts that are network namespaces, loses each of them, and compares the weights.

Each host has its own name and address; a pair of virtual network cards joins them. On both runs the
command of docs/training.md: torchrun, one rank a host, gloo. The run loses a rank, a host, and the
network; it goes on by torchrun's restarts and when the commands are typed again. In the end its
weights must be, bit for bit, those of an unbroken run of two ranks on one machine. Linux and root.

    python scripts/two_hosts.py
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hosts import HOSTS, Host, network, shell
from kill_and_resume import BIN, SETTINGS, last_line, newest_checkpoint, read_from

LENGTH = ["max_updates=1000", "checkpoint_every_updates=10", "validate_every_updates=100"]
PORT = 29400
# without it, torch 2.13 does not tell a host that comes back where rank 0 is
JOIN_AGAIN = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
END_SECONDS = 90  # timeout_seconds, and what torchrun allows its rank to end
SAID = "nmt-train: "


def main() -> int:
    """Train, lose, go on, compare; 0 if the weights are the same."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, help="where the runs go; default: a new one")
    folder: Path = parser.parse_args().folder or Path(tempfile.mkdtemp(prefix="nmt-two-hosts-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"runs and logs: {folder}", flush=True)
    data = f"data_dir={folder / 'data'}"
    quiet = {"check": True, "stderr": subprocess.DEVNULL}
    subprocess.run([BIN / "nmt-preprocess", "data=numbers", data], **quiet)
    whole = [
        BIN / "nmt-train",
        *SETTINGS,
        *LENGTH,
        data,
        "devices=2",
        f"run_dir={folder / 'whole'}",
    ]
    subprocess.run(whole, **quiet)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # cleaning up
    with network():
        lose_and_go_on(Run(folder, data))
    weights = "checkpoints/latest/model.safetensors"
    is_same = (folder / "whole" / weights).read_bytes() == (folder / "0" / weights).read_bytes()
    print("the weights are", "the same" if is_same else "NOT the same", "as without a break")
    is_alone = not (folder / "1").exists()
    print("host 1 wrote", "nothing" if is_alone else "to its run_dir")
    return 0 if is_same and is_alone else 1


def lose_and_go_on(run: Run) -> None:
    """Break the run at four places and let it go on."""
    one, other = HOSTS
    run.start(one, restarts=3)
    run.start(other, restarts=3)
    run.reach(100)
    os.kill(run.rank(other), signal.SIGKILL)
    run.goes_on("rank 1 killed")
    run.reach(250)
    other.lose()
    time.sleep(5)
    run.start(other, restarts=3)
    run.goes_on("host 1 lost, its command typed again")
    run.reach(400)
    one.lose()
    run.ends("host 0 lost", other)
    run.start(one)
    run.start(other)
    run.reach(550)
    other.lose()
    run.ends("host 1 lost, no restarts", one)
    run.start(one)
    run.start(other)
    run.reach(700)
    shell("ip", "-n", other.name, "link", "set", "eth0", "down")
    run.ends("network cut", one)
    run.rank_ends(other)
    shell("ip", "-n", other.name, "link", "set", "eth0", "up")
    run.ends("network mended", other)
    run.start(one)
    run.start(other)
    run.ends("to the end", one, other)


class Run:
    """The two commands of one run; each host has its own run_dir."""

    def __init__(self, folder: Path, data: str) -> None:
        self.folder, self.data = folder, data
        self.processes: dict[Host, subprocess.Popen[bytes]] = {}
        self.offset = 0

    def log(self, host: Host) -> Path:
        """Return where a host's screen is kept."""
        return self.folder / f"host-{host.number}.log"

    def start(self, host: Host, *, restarts: int = 0) -> None:
        """Type the command on a host."""
        command = [
            str(BIN / "torchrun"),
            *("--nnodes=2", "--nproc-per-node=1", f"--max-restarts={restarts}"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint={HOSTS[0].name}:{PORT}", "--rdzv-id=1"),
            *("--no-python", str(BIN / "nmt-train"), *SETTINGS, *LENGTH, self.data),
            f"run_dir={self.folder / str(host.number)}",
        ]
        with self.log(host).open("ab") as file:
            self.processes[host] = subprocess.Popen(
                host.inside(*command),
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **JOIN_AGAIN},
            )

    def reach(self, update: int) -> None:
        """Wait for the checkpoint of `update`."""
        end_seconds = time.monotonic() + 240
        while newest_checkpoint(self.folder / "0") < update:
            if time.monotonic() > end_seconds:
                raise TimeoutError(f"update {update} was not reached; see {self.folder}/*.log")
            time.sleep(0.05)

    def rank(self, host: Host) -> int:
        """Return the process of the rank on a host."""
        return max(pid for pid in host.pids() if b"RANK" in environment_names(pid))

    def rank_ends(self, host: Host) -> None:
        """Wait until the rank on `host` has ended, whatever torchrun does there."""
        end_seconds = time.monotonic() + END_SECONDS
        while any(b"RANK" in environment_names(pid) for pid in host.pids()):
            if time.monotonic() > end_seconds:
                raise TimeoutError(f"the rank on {host.name} did not end; see {self.log(host)}")
            time.sleep(0.1)
        print(f"network cut: the rank on host {host.number} has ended as well", flush=True)

    def goes_on(self, what: str) -> None:
        """Print how long it takes until the run is further than it was."""
        start_seconds = time.perf_counter()
        update = newest_checkpoint(self.folder / "0")
        self.reach(update + 20)
        seconds = time.perf_counter() - start_seconds
        print(f"{what} at update {update}: went on by itself within {seconds:.0f} s", flush=True)

    def ends(self, what: str, *hosts: Host) -> None:
        """Wait until the commands on `hosts` have ended; print how."""
        start_seconds = time.perf_counter()
        update = newest_checkpoint(self.folder / "0")
        for host in hosts:
            offset = self.log(host).stat().st_size
            status = self.processes[host].wait(600 if what == "to the end" else END_SECONDS)
            seconds = time.perf_counter() - start_seconds
            said = read_from(self.log(host), offset).decode(errors="replace").split("\n")
            lines = [line for line in said if line.startswith(SAID)] or [last_line(self.log(host))]
            print(
                f"{what} at update {update}: host {host.number} ended after {seconds:.0f} s with "
                f"status {status}: {lines[0][:160]}",
                flush=True,
            )


def environment_names(pid: int) -> set[bytes]:
    """Return the names of a process's variables."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return set()
    return {entry.partition(b"=")[0] for entry in entries}


if __name__ == "__main__":
    sys.exit(main())
