"""Attack nmt-serve while a polite client measures its latency, and reload its models under load.

    python scripts/serve_torture.py --model MODEL [--minutes 10] [--reloads 200] [SETTING ...]

The server may open 1,024 files. One process keeps 1,150 idle connections, pipelines requests
without reading the responses, uploads files that take long to read, sends large texts of unclosed
tags and bodies of 17 MB, and tries wrong keys. Afterwards, the models are loaded again and again,
every second time from a damaged folder. Linux only. The exit status is 1

- if the p99 of the polite client is more than twice its p99 without attacks,
- if a request of the polite client fails,
- if the memory of the server's processes grows by more than 10 %,
- if the log has a traceback or more than 1 MB, or
- if a reload leaves a process.

Server, attacker and polite client share the CPU cores of this machine. The attacker therefore has
the lowest priority, as if it ran elsewhere, and a control phase measures the polite client while
other processes use as much CPU time as the attacks did. The p99 of this phase is printed only.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import multiprocessing
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from processes import BIN, cpu_seconds_of, free_port, is_answering, process_tree

POLITE_KEY = "polite-client"
ATTACKER_KEY = "attacker"
SENTENCE = "A man is standing in front of a house."
NUM_IDLE = 1150
MAX_FILES = 1024
QUIET_SECONDS = 20
PAUSE_SECONDS = 0.05  # the polite client waits this long between two requests
SETTLE_SECONDS = 40  # the server gets this long to end its work on the attacks
JSON_TYPE = {"Content-Type": "application/json"}
FILES = {
    "a.html": b"<a " * 350_000,
    "b.html": b"<p>a" * 250_000,
    "c.html": b"&amp &#" * 150_000,
    "d.srt": b"1\n00:00:01,000 --> 00:00:02,000\n<a \n\n" * 25_000,
    "e.tsv": b'a\t"b\n' * 170_000,
    "f.txt": b"a. " * 350_000,
}


@dataclass
class ServerApi:
    """The server, and the languages of its model."""

    port: int
    source: str
    target: str

    def connect(self) -> http.client.HTTPConnection:
        """Return a connection that is not open yet."""
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def translate(self, text: str, **params: Any) -> tuple[int, bytes]:
        """Return status and body of a translation."""
        languages = {"source": self.source, "target": self.target, "api_key": ATTACKER_KEY}
        connection = self.connect()
        with contextlib.closing(connection):
            body = json.dumps({"q": text, **languages, **params})
            connection.request("POST", "/translate", body, JSON_TYPE)
            response = connection.getresponse()
            return response.status, response.read()


def main() -> None:
    """Attack, reload, print the figures, and exit with 1 if one is too high."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, type=Path, help="model folder with two languages")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--reloads", type=int, default=200)
    parser.add_argument("--source", default="en")
    parser.add_argument("--target", default="de")
    parser.add_argument(
        "settings", nargs="*", help="further settings of nmt-serve, such as backend=native"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(options.model, folder / "model")
        (folder / "keys").write_text(f"{POLITE_KEY}\n{ATTACKER_KEY}\n")
        api = ServerApi(free_port(), options.source, options.target)
        server, log = start_server(folder, api, options.settings)
        try:
            problems = attack(server, api, options.minutes * 60)
            problems += reload_models(server, api, folder / "model", options.reloads)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(90)
        text = log.read_text()
    print(f"log: {len(text)} bytes, {text.count('Traceback')} tracebacks")
    if "Traceback" in text or len(text) > 1_000_000:
        problems.append("log:\n" + text[-3000:])
    print("\n".join(problems) or "no problem")
    sys.exit(1 if problems else 0)


def start_server(folder: Path, api: ServerApi, settings: list[str]) -> tuple[psutil.Process, Path]:
    """Start a server with a limit of open files; return it and its log."""
    log = folder / "log"
    command = [str(BIN / "nmt-serve"), f"model_dir={folder / 'model'}", f"port={api.port}"]
    command += [f"api_keys={folder / 'keys'}", "access_log=false", *settings]
    with open(log, "w") as stream:
        process = subprocess.Popen(command, stderr=stream, preexec_fn=limit_files)
    while not is_answering(f"http://127.0.0.1:{api.port}/health"):
        if process.poll() is not None:
            sys.exit(log.read_text())
        time.sleep(0.3)
    return psutil.Process(process.pid), log


def limit_files() -> None:
    """Let this process open at most `MAX_FILES` files."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_FILES, MAX_FILES))


# --- the polite client


class PoliteClient:
    """Translates one sentence after the other, and records how long each takes."""

    def __init__(self, api: ServerApi) -> None:
        self._api = api
        self.seconds: list[float] = []
        self.failures: list[str] = []

    def ask(self) -> None:
        """Translate a sentence."""
        start = time.monotonic()
        try:
            status, body = self._api.translate(SENTENCE, api_key=POLITE_KEY)
            if status != 200:
                self.failures.append(f"{status} {body[:200]!r}")
        except (OSError, http.client.HTTPException) as error:
            self.failures.append(repr(error))
        self.seconds.append(time.monotonic() - start)
        time.sleep(PAUSE_SECONDS)

    def ask_for(self, seconds: float) -> float:
        """Translate sentences for a time; return the 99th percentile of their durations."""
        self.seconds = []
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.ask()
        return percentile(self.seconds, 0.99)


def percentile(values: list[float], share: float) -> float:
    """Return the value that a share of the values do not exceed."""
    return sorted(values)[int(share * (len(values) - 1))]


def memory_bytes(server: psutil.Process) -> float:
    """Return the proportional set size of a server and its children."""
    total = 0.0
    for process in process_tree(server):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            total += process.memory_full_info().pss
    return total


# --- the attacks


def attack(server: psutil.Process, api: ServerApi, seconds: float) -> list[str]:
    """Run all attacks for a time; return what went wrong."""
    client = PoliteClient(api)
    upload(api, "warm.txt", b"A house.", POLITE_KEY)
    client.ask_for(5)
    quiet = client.ask_for(QUIET_SECONDS)
    memory_before = memory_bytes(server)
    attacker = multiprocessing.get_context("spawn").Process(target=run_attacks, args=(api,))
    attacker.start()
    time.sleep(5)
    cpu_before = cpu_seconds(server, attacker.pid)
    attacked = client.ask_for(seconds)
    cpu_per_second = (cpu_seconds(server, attacker.pid) - cpu_before) / seconds
    num_requests = len(client.seconds)
    median = percentile(client.seconds, 0.5)
    memory_during = memory_bytes(server)
    attacker.kill()
    attacker.join()
    time.sleep(SETTLE_SECONDS)
    memory_after = memory_bytes(server)
    control = measure_control(client, cpu_per_second)
    sizes = [f"{size / 2**20:.0f}" for size in (memory_before, memory_during, memory_after)]
    print(
        f"p99 quiet {quiet * 1000:.0f} ms, attacked {attacked * 1000:.0f} ms "
        f"(median {median * 1000:.0f} ms) in {num_requests} requests, "
        f"control {control * 1000:.0f} ms ({cpu_per_second:.2f} CPU seconds per second); "
        f"memory before, at the end of and after the attacks {', '.join(sizes)} MB",
        flush=True,
    )
    problems = client.failures[:5]
    if attacked > 2 * quiet:
        problems.append("the attacks delayed the polite client")
    if memory_after > 1.1 * memory_before:
        problems.append("the attacks left memory behind")
    return problems


def cpu_seconds(server: psutil.Process, attacker_pid: int | None) -> float:
    """Return the CPU time that the server and the attacker have used."""
    return cpu_seconds_of([*process_tree(server), psutil.Process(attacker_pid)])


def measure_control(client: PoliteClient, cpu_per_second: float) -> float:
    """Return the p99 of the client while two processes use `cpu_per_second` of CPU time."""
    context = multiprocessing.get_context("spawn")
    burners = [
        context.Process(target=burn, args=(cpu_per_second / 2,), daemon=True) for _ in range(2)
    ]
    for burner in burners:
        burner.start()
    time.sleep(2)
    p99 = client.ask_for(QUIET_SECONDS)
    for burner in burners:
        burner.kill()
        burner.join()
    return p99


def burn(cpu_per_second: float) -> None:
    """Use CPU time at a rate, in slices of 50 ms as a search does, until killed."""
    start = time.monotonic()
    while True:
        end = time.process_time() + 0.05
        while time.process_time() < end:
            pass
        planned_seconds = time.process_time() / max(cpu_per_second, 0.01)
        elapsed_seconds = time.monotonic() - start
        time.sleep(max(planned_seconds - elapsed_seconds, 0))


def run_attacks(api: ServerApi) -> None:
    """Run each attack in a thread, again and again, until this process is killed."""
    os.nice(19)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    attacks = [hold_connections, pipeline, upload_files, send_tags, send_large, try_keys]
    for function in attacks:
        threading.Thread(target=repeat, args=(function, api)).start()


def repeat(function: Callable[[ServerApi], None], api: ServerApi) -> None:
    """Call a function again and again, whatever the server does to its connection."""
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException):
            function(api)
        time.sleep(0.2)


def hold_connections(api: ServerApi) -> None:
    """Keep connections open on which nothing is sent."""
    connections = []
    for _ in range(NUM_IDLE):
        connections.append(socket.create_connection(("127.0.0.1", api.port)))
        time.sleep(0.002)
    time.sleep(5)
    for connection in connections:
        connection.close()


def pipeline(api: ServerApi) -> None:
    """Send requests without reading their responses."""
    with socket.create_connection(("127.0.0.1", api.port), timeout=20) as connection:
        for _ in range(2000):
            connection.sendall(b"GET /spec HTTP/1.1\r\nHost: x\r\n\r\n" * 10)
            time.sleep(0.01)


def upload_files(api: ServerApi) -> None:
    """Upload files that take long to read."""
    for name, content in FILES.items():
        with contextlib.suppress(OSError, http.client.HTTPException):
            upload(api, name, content, ATTACKER_KEY)


def upload(api: ServerApi, name: str, content: bytes, key: str) -> int:
    """Upload a file to translate; return the status."""
    params = {"source": api.source, "target": api.target, "api_key": key}
    body = b""
    for field, value in params.items():
        body += f'--x\r\nContent-Disposition: form-data; name="{field}"\r\n\r\n{value}\r\n'.encode()
    disposition = f'form-data; name="file"; filename="{name}"'
    body += (
        f"--x\r\nContent-Disposition: {disposition}\r\n\r\n".encode() + content + b"\r\n--x--\r\n"
    )
    with contextlib.closing(api.connect()) as connection:
        headers = {"Content-Type": "multipart/form-data; boundary=x"}
        connection.request("POST", "/translate_file", body, headers)
        return connection.getresponse().status


def send_tags(api: ServerApi) -> None:
    """Send a text of unclosed tags."""
    api.translate("<a " * 33_000, format="html")


def send_large(api: ServerApi) -> None:
    """Send a body that is too large."""
    status, _ = api.translate("a" * 17_000_000)
    assert status == 413


def try_keys(api: ServerApi) -> None:
    """Send wrong keys."""
    for number in range(20):
        api.translate("a", api_key=f"wrong-{number}")


# --- reloads


def reload_models(
    server: psutil.Process, api: ServerApi, folder: Path, num_reloads: int
) -> list[str]:
    """Load the models again and again under load; return what went wrong."""
    client = PoliteClient(api)
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            client.ask()

    asking = threading.Thread(target=ask)
    asking.start()
    sizes = []
    counts = []
    config = (folder / "config.json").read_bytes()
    for number in range(num_reloads):
        num_done = count_reloads(api)
        is_damaged = number % 2 == 1
        content = b"[damaged" if is_damaged else config
        (folder / "config.json").write_bytes(content)
        server.send_signal(signal.SIGHUP)
        while count_reloads(api) == num_done:
            time.sleep(0.05)
        if number % 20 == 19:
            time.sleep(3)  # for the processes of earlier models to end
            sizes.append(memory_bytes(server) / 2**20)
            counts.append(len(process_tree(server)))
    stop.set()
    asking.join()
    print(
        f"{num_reloads} reloads: {len(client.seconds)} requests, {len(client.failures)} failed; "
        f"processes {counts}, MB {[round(size) for size in sizes]}"
    )
    problems = client.failures[:5]
    if counts and max(counts) > counts[0]:
        problems.append("a reload left a process")
    if sizes and max(sizes[1:], default=0) > 1.1 * sizes[0]:
        problems.append("reloads left memory behind")
    return problems


def count_reloads(api: ServerApi) -> float:
    """Return how many reloads have ended."""
    with contextlib.closing(api.connect()) as connection:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("nmt_reloads_total"))


if __name__ == "__main__":
    main()
