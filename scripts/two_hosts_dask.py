"""Preprocesses on a Dask cluster of two hosts that are network namespaces, and loses parts of it.

Each host has a worker, host 0 also the scheduler and the command, as docs/clusters.md has them. The
CPU time of all processes is compared, in turns, with that of `num_threads=2` on one machine. Then a
worker is killed at random moments, and the scheduler, after which the command is typed again. Every
data folder must be, byte for byte, that of one machine. Linux and root.

    python scripts/two_hosts_dask.py text.src text.tgt --kills 10 --turns 5
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hosts import HOSTS, Host, network
from kill_and_resume import BIN

PORT = 8786
QUIET = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
SCHEDULER = f"tcp://{HOSTS[0].address}:{PORT}"


def main() -> int:
    """Compare, kill, compare; 0 if all folders are the same."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("src", type=Path)
    parser.add_argument("tgt", type=Path)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--shard-pairs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # cleaning up
    with tempfile.TemporaryDirectory(prefix="nmt-two-hosts-") as name, network():
        check = Check(Path(name), options)
        check.start_services()
        check.compare_cpu_time(options.turns)
        check.kill_workers(options.kills, random.Random(options.seed))
        check.lose_scheduler()
        first, *others = check.folders
        different = [folder.name for folder in others if read(folder) != read(first)]
        print(f"{len(others)} folders, byte for byte as the first, but for: {different or 'none'}")
    return 1 if different else 0


class Check:
    """The services of Dask, and the command on one machine or on two hosts."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder = folder
        self.folders: list[Path] = []
        self.arguments = [
            str(BIN / "nmt-preprocess"),
            f"data.train.src={options.src.resolve()}",
            f"data.train.tgt={options.tgt.resolve()}",
            f"shard_pairs={options.shard_pairs}",
            *("data.valid.num_pairs=100", "tokenizer.vocab_size=4000"),
            "tokenizer.max_sentences=20000",
        ]

    def start_services(self) -> None:
        """Start the scheduler, and a worker on each host."""
        dask, quiet = str(BIN / "dask"), "--no-dashboard"
        worker = [dask, "worker", SCHEDULER, "--nthreads", "1", quiet]
        commands = [(HOSTS[0], [dask, "scheduler", "--port", str(PORT), quiet])]
        commands += [(host, worker) for host in HOSTS]
        for number, (host, command) in enumerate(commands):
            place = self.folder / f"service-{number}"
            place.mkdir(exist_ok=True)
            with (place / "log").open("ab") as log:
                subprocess.Popen(host.inside(*command), cwd=place, stdout=log, stderr=log)
        time.sleep(8)

    def command(self, *, on_two_hosts: bool) -> list[str]:
        """Return the command for a new data folder."""
        place = self.folder / f"data-{len(self.folders)}"
        self.folders.append(place)
        command = [*self.arguments, f"data_dir={place}"]
        if on_two_hosts:
            return HOSTS[0].inside(*command, f"scheduler={SCHEDULER}")
        return [*command, "num_threads=2"]

    def compare_cpu_time(self, turns: int) -> None:
        """Print the CPU time on two hosts against that of two processes of one machine."""
        subprocess.run(self.command(on_two_hosts=True), check=True, capture_output=True)  # imports
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(turns):
            for on_two_hosts, measured in seconds.items():
                command, start_seconds = self.command(on_two_hosts=on_two_hosts), cpu_seconds()
                subprocess.run(command, check=True, capture_output=True)
                measured.append(cpu_seconds() - start_seconds)
        ratios = [two / one for one, two in zip(*seconds.values(), strict=True)]
        one, two = map(statistics.median, seconds.values())
        print(
            f"CPU time, medians of {turns} turns: {one:.2f} s with num_threads=2, {two:.2f} s on "
            f"two hosts; ratio {statistics.median(ratios):.3f}, from {min(ratios):.3f} to "
            f"{max(ratios):.3f}",
            flush=True,
        )

    def kill_workers(self, kills: int, draw: random.Random) -> None:
        """Kill a worker at a random moment of a run each; the run must end well."""
        start_seconds = time.perf_counter()
        subprocess.run(self.command(on_two_hosts=True), check=True, capture_output=True)
        whole_seconds = time.perf_counter() - start_seconds
        for _ in range(kills):
            start_seconds = time.perf_counter()
            with subprocess.Popen(self.command(on_two_hosts=True), **QUIET) as run:
                time.sleep(draw.uniform(0, whole_seconds))
                host = draw.choice(HOSTS)
                done = self.done_shards()
                for pid in workers(host):
                    os.kill(pid, signal.SIGKILL)
                status = run.wait()
            self.report(f"worker on host {host.number} killed", status, done, start_seconds)

    def lose_scheduler(self) -> None:
        """Kill the scheduler in the middle of a run, start all again, and repeat the command."""
        command = self.command(on_two_hosts=True)
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as run:
            while len(done := self.done_shards()) < 3:
                time.sleep(0.01)
            for pid in HOSTS[0].pids():
                if b"scheduler" in words(pid):
                    os.kill(pid, signal.SIGKILL)
            errors = run.communicate()[1].split("\n")
        print(f"scheduler killed: status {run.returncode}: {errors[-2]}", flush=True)
        for host in HOSTS:
            host.lose()
        self.start_services()
        start_seconds = time.perf_counter()
        status = subprocess.run(command, **QUIET).returncode
        self.report("command started again", status, done, start_seconds)

    def done_shards(self) -> dict[str, int]:
        """Return the shards of the newest folder that are done, and what each file is."""
        work = self.folders[-1].with_name(f".{self.folders[-1].name}.work")
        names = [path.stem for path in work.glob("records/encode/*.json")]
        return {name: (work / f"data/{name}.arrow").stat().st_ino for name in names}

    def report(self, what: str, status: int, done: dict[str, int], start_seconds: float) -> None:
        """Print how a run ended, and whether it has the shards that were done."""
        paths = {name: self.folders[-1] / f"{name}.arrow" for name in done}
        kept = sum(paths[name].stat().st_ino == number for name, number in done.items())
        seconds = time.perf_counter() - start_seconds
        shards = f"{kept} of {len(done)} shards that were done are the same files"
        print(f"{what}: status {status} after {seconds:.0f} s; {shards}", flush=True)


def words(pid: int) -> list[bytes]:
    """Return the command line of a process, nothing if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def workers(host: Host) -> list[int]:
    """Return the processes that run tasks, which the nanny of a worker starts again."""
    found = []
    for pid in host.pids():
        parent = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        is_tracker = any(b"tracker" in word for word in words(pid))
        if b"worker" in words(parent) and not is_tracker:
            found.append(pid)
    return found


def cpu_seconds() -> float:
    """Return the CPU time of what ran on the hosts and is over, and of what runs there."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    ticks = 0
    for pid in (pid for host in HOSTS for pid in host.pids()):
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return usage.ru_utime + usage.ru_stime + ticks / os.sysconf("SC_CLK_TCK")


def read(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


if __name__ == "__main__":
    sys.exit(main())
