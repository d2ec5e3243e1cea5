"""Send nmt-serve many requests while clients disconnect and its workers are killed.

    python scripts/serve_soak.py --model RUN --input test.en [--requests 20000] [--kills 7]

64 clients send requests of one to three lines with one of three search settings. After every tenth
request, the client disconnects without waiting for the response. Other responses are compared with
the output of `Translator`. Workers of the server are killed at even intervals. Prints the counts
and the memory of the server's processes. The exit status is 1 if a response is wrong or missing, or
if a second response follows it. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
from processes import BIN, free_port, process_tree, run_server

from nmt import Translator
from nmt.checkpoint import find_model, load_info

SEARCHES: list[dict[str, Any]] = [{}, {"beam_size": 1}, {"beam_size": 2, "length_penalty": 1.0}]
CLIENTS = 64
MAX_DIFFERENT_LINES = 400
NUM_REPORTS = 10


def main() -> None:
    """Serve a model, send the requests, and print the counts of their outcomes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, type=Path, help="run, checkpoint or model folder")
    parser.add_argument("--input", required=True, type=Path, help="lines to translate")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--kills", type=int, default=7, help="number of workers to kill")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    input_lines = options.input.read_text(encoding="utf-8").split("\n")
    lines = sorted({line for line in input_lines if line})[:MAX_DIFFERENT_LINES]
    port = free_port()
    clients = Clients(port, options.model, lines)
    command = [str(BIN / "nmt-serve"), f"model_dir={options.model}", f"port={port}"]
    # only the native engine has worker processes
    command += ["backend=native", "num_threads=2", "access_log=false"]
    url = f"http://127.0.0.1:{port}/health"
    with run_server(command, url) as server, ThreadPoolExecutor(CLIENTS) as pool:
        for number in range(options.requests):
            pool.submit(clients.request, number, f"{options.seed} {number}")
        kill_workers(server, clients, options.requests, options.kills)
    print(dict(clients.counts))
    num_expected = clients.counts["right"] + clients.counts["disconnected"]
    sys.exit(0 if num_expected == options.requests else 1)


class Clients:
    """Sends requests and counts their outcomes."""

    def __init__(self, port: int, model: Path, lines: list[str]) -> None:
        self.port = port
        self.lines = lines
        self.counts: Counter[str] = Counter()
        info = load_info(find_model(model))
        self._languages = {"source": info.src_lang, "target": info.tgt_lang}
        translator = Translator.load(model, device="cpu", backend="native")
        self._translations = [translator.translate(lines, **search) for search in SEARCHES]
        self._lock = threading.Lock()

    def request(self, number: int, seed: str) -> None:
        """Send a request and count its outcome; after every tenth, disconnect at once."""
        rng = random.Random(seed)
        search = rng.randrange(len(SEARCHES))
        indices = rng.choices(range(len(self.lines)), k=rng.randint(1, 3))
        body = {
            "text": [self.lines[i] for i in indices],
            "search": SEARCHES[search],
            "split_sentences": False,
        }
        expected = [self._translations[search][i] for i in indices]
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            content = json.dumps(body | self._languages)
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/translate", content, headers)
            if number % 10 == 9:
                time.sleep(rng.uniform(0, 0.3))
                outcome = "disconnected"
            else:
                outcome = check_response(connection, expected)
        except (OSError, http.client.HTTPException, ValueError) as error:
            outcome = f"lost: {type(error).__name__}"
        finally:
            connection.close()
        with self._lock:
            self.counts[outcome] += 1


def check_response(connection: http.client.HTTPConnection, expected: list[str]) -> str:
    """Read a response; return `right`, `wrong`, `doubled` or the status of an error."""
    response = connection.getresponse()
    content = json.loads(response.read())
    if response.status != 200:
        return f"lost: {response.status} {content}"
    assert connection.sock is not None
    connection.sock.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        if connection.sock.recv(1):
            return "doubled"
    translations = [translation["text"] for translation in content["translations"]]
    return "right" if translations == expected else "wrong"


def kill_workers(server: psutil.Process, clients: Clients, num_requests: int, kills: int) -> None:
    """Kill workers at even intervals until all requests are done; print the memory regularly."""
    rng = random.Random(1)
    start_seconds = time.monotonic()
    num_killed = 0
    num_reports = 0
    while True:
        num_done = clients.counts.total()
        if num_done >= num_requests:
            break
        time.sleep(0.2)
        processes = process_tree(server)
        is_kill_due = num_done * (kills + 1) >= num_requests * (num_killed + 1)
        if num_killed < kills and is_kill_due:
            with contextlib.suppress(psutil.NoSuchProcess):  # a process has ended meanwhile
                workers = [process for process in processes[1:] if not process.children()]
                if workers:
                    rng.choice(workers).kill()
                    num_killed += 1
        if num_done * NUM_REPORTS >= num_requests * num_reports:
            sizes = " ".join(f"{size:.0f}" for size in memory_megabytes(processes))
            seconds = time.monotonic() - start_seconds
            print(f"{seconds:.0f} s, {num_done} done, {num_killed} workers killed, MB: {sizes}")
            sys.stdout.flush()
            num_reports += 1


def memory_megabytes(processes: list[psutil.Process]) -> list[float]:
    """Return the proportional set sizes of running processes, the largest first."""
    sizes = []
    for process in processes:
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            sizes.append(process.memory_full_info().pss / 2**20)
    return sorted(sizes, reverse=True)


if __name__ == "__main__":
    main()
