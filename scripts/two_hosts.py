"""Run nmt on two hosts, simulated by network namespaces, and cause failures. Linux and root only.

    python scripts/two_hosts.py train
    python scripts/two_hosts.py preprocess text.src text.tgt --kills 10 --turns 5

`train` runs the torchrun command of docs/devices.md with gloo and one rank on each host. It kills
a rank and each host, and cuts the network. torchrun restarts the ranks, or the command is started
again. The final weights must be bit-identical to a run of two ranks on one machine.

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

import psutil
from kill_and_resume import SETTINGS, last_line, newest_checkpoint, read_from
from processes import BIN, cpu_seconds_of, environment_of

TRAIN_SETTINGS = [
    *SETTINGS,
    "max_updates=1000",
    "checkpoint_every_updates=10",
    "validate_every_updates=100",
]
TORCHRUN_PORT = 29400
DASK_PORT = 8786
# otherwise torchrun of torch 2.13 does not send a restarted host the address of rank 0
TORCHRUN_ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
END_SECONDS = 90  # torchrun may take timeout_seconds and its grace period to end after a failure
DISCARD_OUTPUT = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


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

    def wrap(self, command: list[str]) -> list[str]:
        """Return the command that runs `command` on this host."""
        script = f'echo {self.name} > /proc/sys/kernel/hostname; exec "$@"'
        enter_namespaces = ["ip", "netns", "exec", self.name, "unshare", "--uts"]
        return [*enter_namespaces, "sh", "-c", script, "sh", *command]

    def pids(self) -> list[int]:
        """Return the ids of the processes on this host."""
        return [int(pid) for pid in run_ip(f"netns pids {self.name}").split()]

    def kill_all(self) -> None:
        """Kill all processes on this host."""
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)

    def set_link(self, state: str) -> None:
        """Set the network card `up` or `down`."""
        run_ip(f"-n {self.name} link set eth0 {state}")


HOST_0 = Host(0)
HOST_1 = Host(1)
HOSTS = (HOST_0, HOST_1)


@contextlib.contextmanager
def network() -> Iterator[None]:
    """Create the two hosts and a network between them; remove them after the block."""
    remove_network()
    try:
        addresses = "".join(f"{host.address} {host.name}\n" for host in HOSTS)
        for host in HOSTS:
            run_ip(f"netns add {host.name}")
            etc = Path("/etc/netns") / host.name  # `ip netns exec` mounts it over /etc
            etc.mkdir(parents=True)
            (etc / "hosts").write_text(f"127.0.0.1 localhost\n{addresses}", encoding="utf-8")
        peer = f"peer name eth0 netns {HOST_1.name}"
        run_ip(f"link add eth0 netns {HOST_0.name} type veth {peer}")
        for host in HOSTS:
            run_ip(f"-n {host.name} address add {host.address}/24 dev eth0")
            run_ip(f"-n {host.name} link set lo up")
            host.set_link("up")
        yield
    finally:
        remove_network()


def remove_network() -> None:
    """Remove the hosts with all their processes."""
    namespaces = run_ip("netns list").split()
    for host in HOSTS:
        if host.name in namespaces:
            host.kill_all()
            run_ip(f"netns delete {host.name}")
        shutil.rmtree(Path("/etc/netns") / host.name, ignore_errors=True)


def run_ip(arguments: str) -> str:
    """Run the ip command of iproute2 and return its output."""
    command = ["ip", *arguments.split()]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> int:
    """Run the subcommand; return 0 if its results are identical."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="kill a rank and hosts, and cut the network")
    train.add_argument("--folder", type=Path, help="folder for the runs (default: a new one)")
    preprocess = commands.add_parser("preprocess", help="kill workers and the scheduler of Dask")
    preprocess.add_argument("src", type=Path)
    preprocess.add_argument("tgt", type=Path)
    preprocess.add_argument("--kills", type=int, default=10)
    preprocess.add_argument("--turns", type=int, default=5)
    preprocess.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    # exit normally after SIGTERM, so that the hosts are removed
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
    one_machine_dir = folder / "one-machine"
    check_run([str(BIN / "nmt-preprocess"), "data=numbers", data_dir])
    settings = [*TRAIN_SETTINGS, data_dir, f"run_dir={one_machine_dir}", "devices=2"]
    check_run([str(BIN / "nmt-train"), *settings])
    with network():
        cause_failures(TrainingRun(folder, data_dir))
    weights = "checkpoints/latest/model.safetensors"
    is_same = (one_machine_dir / weights).read_bytes() == (folder / "0" / weights).read_bytes()
    print(f"the weights are {'' if is_same else 'NOT '}the same as without failures")
    only_rank_0_wrote = not (folder / "1").exists()
    print(f"host 1 wrote {'nothing' if only_rank_0_wrote else 'to its run_dir'}")
    return 0 if is_same and only_rank_0_wrote else 1


def check_run(command: list[str]) -> None:
    """Run a command without its output; raise if it fails."""
    subprocess.run(command, check=True, capture_output=True)


def cause_failures(training: TrainingRun) -> None:
    """Cause five failures, and let training continue after each of them."""
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
    """The torchrun commands of one training run; each host has its own run_dir and log."""

    def __init__(self, folder: Path, data_dir: str) -> None:
        self.folder = folder
        self.data_dir = data_dir
        self.processes: dict[Host, subprocess.Popen[bytes]] = {}

    def log(self, host: Host) -> Path:
        """Return the log of a host."""
        return self.folder / f"host-{host.number}.log"

    def start(self, host: Host, *, restarts: int = 0) -> None:
        """Start torchrun on a host; it may restart the ranks `restarts` times."""
        command = [
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
        ]
        environment = os.environ | TORCHRUN_ENVIRONMENT
        with self.log(host).open("ab") as file:
            self.processes[host] = subprocess.Popen(
                host.wrap(command), stdout=file, stderr=subprocess.STDOUT, env=environment
            )

    def newest_checkpoint(self) -> int:
        """Return the update of the newest checkpoint; rank 0 writes it on host 0."""
        return newest_checkpoint(self.folder / "0")

    def wait_for_update(self, update: int) -> None:
        """Wait for the checkpoint of an update."""
        deadline = time.monotonic() + 240
        while self.newest_checkpoint() < update:
            if time.monotonic() > deadline:
                raise TimeoutError(f"update {update} was not reached; see {self.folder}/*.log")
            time.sleep(0.05)

    def rank_pids(self, host: Host) -> list[int]:
        """Return the ids of the processes on a host that torchrun started as ranks."""
        return sorted(pid for pid in host.pids() if "RANK" in environment_of(pid))

    def expect_progress(self, failure: str) -> None:
        """Wait until training has made 20 more updates after a failure; print how long it took."""
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
    """Compare CPU time, kill workers and the scheduler; return 0 if all data folders are equal."""
    cluster = Cluster(folder, options)
    cluster.start_services()
    cluster.compare_cpu_time(options.turns)
    cluster.kill_workers(options.kills, random.Random(options.seed))
    cluster.kill_scheduler()
    expected = read_folder(cluster.data_dirs[0])
    differing = [path.name for path in cluster.data_dirs if read_folder(path) != expected]
    print(f"{len(cluster.data_dirs)} data folders, different from the first: {differing or 'none'}")
    return 1 if differing else 0


class Cluster:
    """The scheduler and the workers of Dask, and the nmt-preprocess commands that use them."""

    scheduler_address = f"tcp://{HOST_0.address}:{DASK_PORT}"

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder = folder
        self.data_dirs: list[Path] = []
        self.settings = [
            f"data.train.src={options.src.resolve()}",
            f"data.train.tgt={options.tgt.resolve()}",
            "shard_pairs=10000",
            "data.valid.num_pairs=100",
            "tokenizer.vocab_size=4000",
            "tokenizer.max_sentences=20000",
        ]

    def start_services(self) -> None:
        """Start the scheduler, and a worker on each host."""
        dask = str(BIN / "dask")
        scheduler = [dask, "scheduler", "--port", str(DASK_PORT), "--no-dashboard"]
        worker = [dask, "worker", self.scheduler_address, "--nthreads", "1", "--no-dashboard"]
        self._start_service("scheduler", HOST_0.wrap(scheduler))
        for host in HOSTS:
            self._start_service(f"worker-{host.number}", host.wrap(worker))
        time.sleep(8)

    def _start_service(self, name: str, command: list[str]) -> None:
        """Start a service in a folder of its own, with its log there."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        with (folder / "log").open("ab") as log:
            subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)

    def new_command(self, *, on_two_hosts: bool) -> list[str]:
        """Return the command that preprocesses the text into a new data folder."""
        self.data_dirs.append(self.folder / f"data-{len(self.data_dirs)}")
        data_dir = f"data_dir={self.data_dirs[-1]}"
        command = [str(BIN / "nmt-preprocess"), *self.settings, data_dir]
        if on_two_hosts:
            return HOST_0.wrap([*command, f"scheduler={self.scheduler_address}"])
        return [*command, "num_threads=2"]

    def compare_cpu_time(self, turns: int) -> None:
        """Measure CPU time with num_threads=2 and on two hosts in turn; print the medians."""
        self.measure_cpu_seconds(on_two_hosts=True)  # let the workers import everything
        local_seconds = []
        cluster_seconds = []
        ratios = []
        for _ in range(turns):
            local_seconds.append(self.measure_cpu_seconds(on_two_hosts=False))
            cluster_seconds.append(self.measure_cpu_seconds(on_two_hosts=True))
            ratios.append(cluster_seconds[-1] / local_seconds[-1])
        print(
            f"CPU time, medians of {turns} turns: {statistics.median(local_seconds):.2f} s with "
            f"num_threads=2, {statistics.median(cluster_seconds):.2f} s on two hosts; ratio "
            f"{statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}",
            flush=True,
        )

    def measure_cpu_seconds(self, *, on_two_hosts: bool) -> float:
        """Preprocess once; return the CPU time of the command and of the services."""
        command = self.new_command(on_two_hosts=on_two_hosts)
        start_seconds = total_cpu_seconds()
        check_run(command)
        return total_cpu_seconds() - start_seconds

    def kill_workers(self, kills: int, rng: random.Random) -> None:
        """Kill a worker at a random moment of each of several runs."""
        start_seconds = time.perf_counter()
        check_run(self.new_command(on_two_hosts=True))
        run_seconds = time.perf_counter() - start_seconds
        for _ in range(kills):
            start_seconds = time.perf_counter()
            with subprocess.Popen(self.new_command(on_two_hosts=True), **DISCARD_OUTPUT) as process:
                time.sleep(rng.uniform(0, run_seconds))
                host = rng.choice(HOSTS)
                finished = self.finished_shards()
                for worker in find_workers(host):
                    worker.kill()
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
            for scheduler in find_processes(HOST_0, "scheduler"):
                scheduler.kill()
            _, errors = process.communicate()
        print(f"scheduler killed: status {process.returncode}: {last_line(errors)}", flush=True)
        for host in HOSTS:
            host.kill_all()
        self.start_services()
        start_seconds = time.perf_counter()
        status = subprocess.run(command, **DISCARD_OUTPUT).returncode
        self.report("command started again", status, finished, start_seconds)

    def finished_shards(self) -> dict[str, int]:
        """Return the inode of each finished shard of the newest data folder, by name."""
        data_dir = self.data_dirs[-1]
        work_dir = data_dir.with_name(f".{data_dir.name}.work")
        shards = {}
        for path in work_dir.glob("records/encode/*.json"):
            shards[path.stem] = (work_dir / f"data/{path.stem}.arrow").stat().st_ino
        return shards

    def report(
        self, event: str, status: int, finished: dict[str, int], start_seconds: float
    ) -> None:
        """Print how a run ended, and how many of the `finished` shards were not written again.

        `finished` has the shards that were finished before the failure, with their inodes.
        """
        num_same = 0
        for name, inode in finished.items():
            if (self.data_dirs[-1] / f"{name}.arrow").stat().st_ino == inode:
                num_same += 1
        seconds = time.perf_counter() - start_seconds
        shards = f"{num_same} of {len(finished)} finished shards are the same files"
        print(f"{event}: status {status} after {seconds:.0f} s; {shards}", flush=True)


def find_processes(host: Host, word: str) -> list[psutil.Process]:
    """Return the processes on a host that have `word` as an argument."""
    processes = []
    for pid in host.pids():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            process = psutil.Process(pid)
            if word in process.cmdline():
                processes.append(process)
    return processes


def find_workers(host: Host) -> list[psutil.Process]:
    """Return the processes that run tasks: children of the `dask worker` command."""
    workers = []
    for command in find_processes(host, "worker"):
        for process in command.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if not any("tracker" in argument for argument in process.cmdline()):
                    workers.append(process)
    return workers


def total_cpu_seconds() -> float:
    """Return the CPU time of ended children and of all processes on the hosts."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = usage.ru_utime + usage.ru_stime
    for host in HOSTS:
        seconds += cpu_seconds_of(psutil.Process(pid) for pid in host.pids())
    return seconds


def read_folder(folder: Path) -> dict[str, bytes]:
    """Return the content of each file of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


if __name__ == "__main__":
    sys.exit(main())
