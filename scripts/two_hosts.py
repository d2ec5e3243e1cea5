"""Run nmt on two hosts, network namespaces of this machine, and cause failures. Linux and root.

    python scripts/two_hosts.py train
    python scripts/two_hosts.py preprocess text.src text.tgt --kills 10 --turns 5

`train` runs the torchrun command of docs/training.md with gloo and one rank on each host. It loses
a rank, each host and the network; training continues by torchrun's restarts, or when the command is
started again. The final weights must be bit-identical to a run of two ranks on one machine.

`preprocess` uses a Dask cluster with a worker on each host, and the scheduler and the command on
host 0, as in docs/clusters.md. It compares CPU time with `num_threads=2` on one machine, kills
workers at random moments, then the scheduler. Every data folder must be byte-identical.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kill_and_resume import BIN, SETTINGS, environment_of, last_line, newest_checkpoint, read_from

TRAIN_SETTINGS = [
    *SETTINGS,
    "max_updates=1000",
    "checkpoint_every_updates=10",
    "validate_every_updates=100",
]
TORCHRUN_PORT = 29400
DASK_PORT = 8786
# otherwise torch 2.13 does not send a restarted host the address of rank 0
RESTARTABLE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
END_SECONDS = 90  # for torchrun to end after a failure: timeout_seconds, and its own grace period
QUIET = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


@dataclass(frozen=True)
class Host:
    """A network namespace with a host name and an address."""

    number: int

    @property
    def name(self) -> str:
        """Name of the namespace and of the host in it."""
        return f"nmt-host-{self.number}"

    @property
    def address(self) -> str:
        """Address of its network card."""
        return f"10.77.0.{self.number + 1}"

    def command(self, *words: str) -> list[str]:
        """Return a command that runs `words` on this host."""
        script = f'echo {self.name} > /proc/sys/kernel/hostname; exec "$@"'
        namespace = ["ip", "netns", "exec", self.name, "unshare", "--uts"]
        return [*namespace, "sh", "-c", script, "sh", *words]

    def pids(self) -> list[int]:
        """Return the processes of this host."""
        return [int(pid) for pid in run("ip", "netns", "pids", self.name).split()]

    def kill_all(self) -> None:
        """Kill all processes of this host."""
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)

    def set_link(self, state: str) -> None:
        """Set the network card up or down."""
        run("ip", "-n", self.name, "link", "set", "eth0", state)


HOST_0 = Host(0)
HOST_1 = Host(1)
HOSTS = (HOST_0, HOST_1)


@contextlib.contextmanager
def network() -> Iterator[None]:
    """Make the two hosts with a cable between them; remove them at the end."""
    remove_network()
    try:
        addresses = "".join(f"{host.address} {host.name}\n" for host in HOSTS)
        for host in HOSTS:
            run("ip", "netns", "add", host.name)
            etc = Path("/etc/netns") / host.name  # `ip netns exec` mounts it over /etc
            etc.mkdir(parents=True)
            (etc / "hosts").write_text(f"127.0.0.1 localhost\n{addresses}", encoding="utf-8")
        peer = ["type", "veth", "peer", "name", "eth0", "netns", HOST_1.name]
        run("ip", "link", "add", "eth0", "netns", HOST_0.name, *peer)
        for host in HOSTS:
            run("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
            run("ip", "-n", host.name, "link", "set", "lo", "up")
            host.set_link("up")
        yield
    finally:
        remove_network()


def remove_network() -> None:
    """Remove the hosts with all their processes."""
    namespaces = run("ip", "netns", "list").split()
    for host in HOSTS:
        if host.name in namespaces:
            host.kill_all()
            run("ip", "netns", "delete", host.name)
        shutil.rmtree(Path("/etc/netns") / host.name, ignore_errors=True)


def run(*command: str) -> str:
    """Run a command and return its output."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> int:
    """Run the command named first; return 0 if its results are identical."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="lose ranks, hosts and the network during training")
    train.add_argument("--folder", type=Path, help="for the runs; default: a new one")
    preprocess = commands.add_parser("preprocess", help="lose workers and the scheduler of Dask")
    preprocess.add_argument("src", type=Path)
    preprocess.add_argument("tgt", type=Path)
    preprocess.add_argument("--kills", type=int, default=10)
    preprocess.add_argument("--turns", type=int, default=5)
    preprocess.add_argument("--shard-pairs", type=int, default=10_000)
    preprocess.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    # remove the hosts also after SIGTERM
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if options.command == "train":
        return train_on_two_hosts(options.folder or Path(tempfile.mkdtemp(prefix="nmt-two-hosts-")))
    with tempfile.TemporaryDirectory(prefix="nmt-two-hosts-") as folder, network():
        return preprocess_on_two_hosts(Path(folder), options)


# --- training


def train_on_two_hosts(folder: Path) -> int:
    """Train without failures on one machine and with failures on two hosts; compare the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    print(f"runs and logs: {folder}", flush=True)
    data_dir = f"data_dir={folder / 'data'}"
    run(str(BIN / "nmt-preprocess"), "data=numbers", data_dir)
    one_machine_run = [f"run_dir={folder / 'whole'}", "devices=2"]
    run(str(BIN / "nmt-train"), *TRAIN_SETTINGS, data_dir, *one_machine_run)
    with network():
        cause_failures(TrainingRun(folder, data_dir))
    weights = "checkpoints/latest/model.safetensors"
    is_same = (folder / "whole" / weights).read_bytes() == (folder / "0" / weights).read_bytes()
    print("the weights are", "the same" if is_same else "NOT the same", "as without failures")
    has_one_writer = not (folder / "1").exists()
    print("host 1 wrote", "nothing" if has_one_writer else "to its run_dir")
    return 0 if is_same and has_one_writer else 1


def cause_failures(training: TrainingRun) -> None:
    """Cause five failures, and let training continue after each."""
    training.start(HOST_0, restarts=3)
    training.start(HOST_1, restarts=3)
    training.wait_for_update(100)
    os.kill(training.rank_pids(HOST_1)[-1], signal.SIGKILL)
    training.expect_progress("rank 1 killed")
    training.wait_for_update(250)
    HOST_1.kill_all()
    time.sleep(5)
    training.start(HOST_1, restarts=3)
    training.expect_progress("host 1 lost, its command started again")
    training.wait_for_update(400)
    HOST_0.kill_all()
    training.expect_end("host 0 lost", HOST_1)
    training.start(HOST_0)
    training.start(HOST_1)
    training.wait_for_update(550)
    HOST_1.kill_all()
    training.expect_end("host 1 lost, no restarts", HOST_0)
    training.start(HOST_0)
    training.start(HOST_1)
    training.wait_for_update(700)
    HOST_1.set_link("down")
    training.expect_end("network cut", HOST_0)
    training.expect_rank_end(HOST_1)
    HOST_1.set_link("up")
    training.expect_end("network restored", HOST_1)
    training.start(HOST_0)
    training.start(HOST_1)
    for host in HOSTS:
        training.expect_end("no further failure", host, seconds=600)


class TrainingRun:
    """The torchrun commands of one training run; each host has its own run_dir."""

    def __init__(self, folder: Path, data_dir: str) -> None:
        self.folder = folder
        self.data_dir = data_dir
        self.processes: dict[Host, subprocess.Popen[bytes]] = {}

    def log(self, host: Host) -> Path:
        """Return the log of a host."""
        return self.folder / f"host-{host.number}.log"

    def start(self, host: Host, *, restarts: int = 0) -> None:
        """Start the command on a host."""
        command = host.command(
            str(BIN / "torchrun"),
            "--nnodes=2",
            "--nproc-per-node=1",
            f"--max-restarts={restarts}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={HOST_0.name}:{TORCHRUN_PORT}",
            "--rdzv-id=1",
            "--no-python",
            str(BIN / "nmt-train"),
            *TRAIN_SETTINGS,
            self.data_dir,
            f"run_dir={self.folder / str(host.number)}",
        )
        with self.log(host).open("ab") as file:
            self.processes[host] = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | RESTARTABLE
            )

    def newest_checkpoint(self) -> int:
        """Return the update of the newest checkpoint."""
        return newest_checkpoint(self.folder / "0")

    def wait_for_update(self, update: int) -> None:
        """Wait for the checkpoint of an update."""
        deadline = time.monotonic() + 240
        while self.newest_checkpoint() < update:
            if time.monotonic() > deadline:
                raise TimeoutError(f"update {update} was not reached; see {self.folder}/*.log")
            time.sleep(0.05)

    def rank_pids(self, host: Host) -> list[int]:
        """Return the processes on a host that torchrun has started as ranks."""
        return sorted(pid for pid in host.pids() if "RANK" in environment_of(pid))

    def expect_progress(self, failure: str) -> None:
        """Print how long it takes until training has continued after a failure."""
        start_seconds = time.perf_counter()
        update = self.newest_checkpoint()
        self.wait_for_update(update + 20)
        seconds = time.perf_counter() - start_seconds
        print(f"{failure} at update {update}: continued within {seconds:.0f} s", flush=True)

    def expect_rank_end(self, host: Host) -> None:
        """Wait until the rank on a host has ended; torchrun may still be running there."""
        deadline = time.monotonic() + END_SECONDS
        while self.rank_pids(host):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the rank on {host.name} did not end; see {self.log(host)}")
            time.sleep(0.1)
        print(f"network cut: the rank on host {host.number} has ended as well", flush=True)

    def expect_end(self, failure: str, host: Host, *, seconds: float = END_SECONDS) -> None:
        """Wait until the command on a host has ended; print its status and its error."""
        start_seconds = time.perf_counter()
        update = self.newest_checkpoint()
        log_start = self.log(host).stat().st_size
        status = self.processes[host].wait(seconds)
        output = read_from(self.log(host), log_start)
        errors = [line for line in output.split(b"\n") if line.startswith(b"nmt-train: ")]
        message = errors[0].decode(errors="replace") if errors else last_line(output)
        print(
            f"{failure} at update {update}: host {host.number} ended after "
            f"{time.perf_counter() - start_seconds:.0f} s with status {status}: {message[:160]}",
            flush=True,
        )


# --- preprocessing


def preprocess_on_two_hosts(folder: Path, options: argparse.Namespace) -> int:
    """Compare CPU time, kill workers and the scheduler; compare all data folders."""
    cluster = Cluster(folder, options)
    cluster.start_services()
    cluster.compare_cpu_time(options.turns)
    cluster.kill_workers(options.kills, random.Random(options.seed))
    cluster.kill_scheduler()
    expected = read_folder(cluster.data_dirs[0])
    different = [path.name for path in cluster.data_dirs if read_folder(path) != expected]
    print(f"{len(cluster.data_dirs)} data folders, different from the first: {different or 'none'}")
    return 1 if different else 0


class Cluster:
    """The services of Dask, and nmt-preprocess on one machine or on two hosts."""

    scheduler = f"tcp://{HOST_0.address}:{DASK_PORT}"

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder = folder
        self.data_dirs: list[Path] = []
        self.settings = [
            f"data.train.src={options.src.resolve()}",
            f"data.train.tgt={options.tgt.resolve()}",
            f"shard_pairs={options.shard_pairs}",
            "data.valid.num_pairs=100",
            "tokenizer.vocab_size=4000",
            "tokenizer.max_sentences=20000",
        ]

    def start_services(self) -> None:
        """Start the scheduler, and a worker on each host."""
        dask = str(BIN / "dask")
        scheduler = [dask, "scheduler", "--port", str(DASK_PORT), "--no-dashboard"]
        worker = [dask, "worker", self.scheduler, "--nthreads", "1", "--no-dashboard"]
        for number, (host, command) in enumerate(
            [(HOST_0, scheduler), (HOST_0, worker), (HOST_1, worker)]
        ):
            folder = self.folder / f"service-{number}"
            folder.mkdir(exist_ok=True)
            with (folder / "log").open("ab") as log:
                subprocess.Popen(host.command(*command), cwd=folder, stdout=log, stderr=log)
        time.sleep(8)

    def new_command(self, *, on_two_hosts: bool) -> list[str]:
        """Return the command for a new data folder."""
        self.data_dirs.append(self.folder / f"data-{len(self.data_dirs)}")
        data_dir = f"data_dir={self.data_dirs[-1]}"
        command = [str(BIN / "nmt-preprocess"), *self.settings, data_dir]
        if on_two_hosts:
            return HOST_0.command(*command, f"scheduler={self.scheduler}")
        return [*command, "num_threads=2"]

    def compare_cpu_time(self, turns: int) -> None:
        """Print the CPU time on two hosts and of two processes on one machine, alternating."""
        run(*self.new_command(on_two_hosts=True))  # let the workers import everything
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(turns):
            for on_two_hosts in (False, True):
                command = self.new_command(on_two_hosts=on_two_hosts)
                start_seconds = cpu_seconds()
                run(*command)
                seconds[on_two_hosts].append(cpu_seconds() - start_seconds)
        ratios = [
            cluster_seconds / local_seconds
            for local_seconds, cluster_seconds in zip(seconds[False], seconds[True], strict=True)
        ]
        print(
            f"CPU time, medians of {turns} turns: {statistics.median(seconds[False]):.2f} s with "
            f"num_threads=2, {statistics.median(seconds[True]):.2f} s on two hosts; ratio "
            f"{statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}",
            flush=True,
        )

    def kill_workers(self, kills: int, rng: random.Random) -> None:
        """Kill a worker at a random moment of each of several runs."""
        start_seconds = time.perf_counter()
        run(*self.new_command(on_two_hosts=True))
        whole_seconds = time.perf_counter() - start_seconds
        for _ in range(kills):
            start_seconds = time.perf_counter()
            with subprocess.Popen(self.new_command(on_two_hosts=True), **QUIET) as process:
                time.sleep(rng.uniform(0, whole_seconds))
                host = rng.choice(HOSTS)
                finished = self.finished_shards()
                for pid in worker_pids(host):
                    os.kill(pid, signal.SIGKILL)
                status = process.wait()
            self.report(f"worker on host {host.number} killed", status, finished, start_seconds)

    def kill_scheduler(self) -> None:
        """Kill the scheduler during a run, restart all services, and repeat the command."""
        command = self.new_command(on_two_hosts=True)
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        ) as process:
            while len(self.finished_shards()) < 3:
                time.sleep(0.01)
            finished = self.finished_shards()
            for pid in HOST_0.pids():
                if b"scheduler" in arguments_of(pid):
                    os.kill(pid, signal.SIGKILL)
            _, errors = process.communicate()
        print(f"scheduler killed: status {process.returncode}: {last_line(errors)}", flush=True)
        for host in HOSTS:
            host.kill_all()
        self.start_services()
        start_seconds = time.perf_counter()
        status = subprocess.run(command, **QUIET).returncode
        self.report("command started again", status, finished, start_seconds)

    def finished_shards(self) -> dict[str, int]:
        """Return the finished shards of the newest data folder, with the inode of each file."""
        data_dir = self.data_dirs[-1]
        work_dir = data_dir.with_name(f".{data_dir.name}.work")
        shards = {}
        for path in work_dir.glob("records/encode/*.json"):
            shards[path.stem] = (work_dir / f"data/{path.stem}.arrow").stat().st_ino
        return shards

    def report(
        self, event: str, status: int, finished: dict[str, int], start_seconds: float
    ) -> None:
        """Print how a run ended, and how many of the finished shards were not written again."""
        num_kept = 0
        for name, inode in finished.items():
            num_kept += (self.data_dirs[-1] / f"{name}.arrow").stat().st_ino == inode
        seconds = time.perf_counter() - start_seconds
        shards = f"{num_kept} of {len(finished)} finished shards are the same files"
        print(f"{event}: status {status} after {seconds:.0f} s; {shards}", flush=True)


def arguments_of(pid: int) -> list[bytes]:
    """Return the command line of a process, empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def stat_of(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def worker_pids(host: Host) -> list[int]:
    """Return the processes that run tasks; the nanny of a worker restarts them."""
    pids = []
    for pid in host.pids():
        parent = int(stat_of(pid)[1])
        is_tracker = any(b"tracker" in word for word in arguments_of(pid))
        if b"worker" in arguments_of(parent) and not is_tracker:
            pids.append(pid)
    return pids


def cpu_seconds() -> float:
    """Return the CPU time of ended children and of all processes on the hosts."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    ticks = 0
    for host in HOSTS:
        for pid in host.pids():
            fields = stat_of(pid)
            ticks += int(fields[11]) + int(fields[12])
    return usage.ru_utime + usage.ru_stime + ticks / os.sysconf("SC_CLK_TCK")


def read_folder(folder: Path) -> dict[str, bytes]:
    """Return the content of each file of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


if __name__ == "__main__":
    sys.exit(main())
