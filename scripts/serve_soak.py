"""Many clients, some of which hang up, and workers that are killed: what nmt-serve loses of it.

    python scripts/serve_soak.py --model RUN --input test.en [--requests 20000] [--kills 7]

64 clients ask for one to three lines each, with one of three settings of search, and every tenth
hangs up without waiting for the answer. Each answer is compared with that of `nmt-translate`. Now
and then one of the server's workers is killed. Prints the counts and the memory of the server's
processes, and ends with status 1 if an answer is wrong, missing or followed by another. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from serve_clients import wait_for

from nmt import Translator
from nmt.checkpoint import find_model, load_info

SEARCHES: list[dict[str, Any]] = [{}, {"beam_size": 1}, {"beam_size": 2, "length_penalty": 1.0}]
CLIENTS, PORT = 64, 5956


def main() -> None:
    """Serve a model, send it requests, and print what came of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", required=True, type=Path, help="run, checkpoint or model folder")
    parser.add_argument("--input", required=True, type=Path, help="lines to translate")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--kills", type=int, default=7, help="of workers")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    text = options.input.read_text(encoding="utf-8").split("\n")
    lines = sorted({line for line in text if line})[:400]
    translator = Translator.load(options.model, device="cpu")
    info = load_info(find_model(options.model))
    directions = {"source": info.src_lang, "target": info.tgt_lang}
    expected = [translator.translate(lines, **search) for search in SEARCHES]
    server = subprocess.Popen(
        [str(Path(sys.executable).with_name("nmt-serve")), f"model_dir={options.model}"]
        + [f"port={PORT}", "num_threads=2", "access_log=false"]
    )
    try:
        wait_for(server, f"http://127.0.0.1:{PORT}")
        soak = Soak(server.pid, directions, lines, expected)
        with ThreadPoolExecutor(CLIENTS) as clients:
            for number in range(options.requests):
                clients.submit(soak.request, number, f"{options.seed} {number}")
            watch(soak, options.requests, options.kills)
    finally:
        server.terminate()
        server.wait(60)
    print(dict(soak.counts))
    is_whole = soak.counts["right"] + soak.counts["hung up"] == options.requests
    sys.exit(0 if is_whole else 1)


class Soak:
    """Sends requests, and counts what comes of them."""

    def __init__(
        self, pid: int, directions: dict[str, str], lines: list[str], expected: list[list[str]]
    ) -> None:
        self.pid = pid
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._directions, self._lines, self._expected = directions, lines, expected

    def request(self, number: int, seed: str) -> None:
        """Send a request; every tenth client does not wait for the answer."""
        draw = random.Random(seed)
        search = draw.randrange(len(SEARCHES))
        chosen = draw.choices(range(len(self._lines)), k=draw.randint(1, 3))
        text = [self._lines[i] for i in chosen]
        body = {"text": text, "search": SEARCHES[search], "split_sentences": False}
        wanted = [self._expected[search][i] for i in chosen]
        connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=120)
        try:
            sent = json.dumps(body | self._directions)
            connection.request("POST", "/v1/translate", sent, {"Content-Type": "application/json"})
            if number % 10 == 9:
                time.sleep(draw.uniform(0, 0.3))
                found = "hung up"
            else:
                found = self._check(connection, wanted)
        except (OSError, http.client.HTTPException, ValueError) as error:
            found = f"lost: {type(error).__name__}"
        finally:
            connection.close()
        with self._lock:
            self.counts[found] += 1

    def _check(self, connection: http.client.HTTPConnection, wanted: list[str]) -> str:
        answer = connection.getresponse()
        content = json.loads(answer.read())
        if answer.status != 200:
            return f"lost: {answer.status} {content}"
        assert connection.sock is not None
        connection.sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            if connection.sock.recv(1):
                return "doubled"
        return "right" if [one["text"] for one in content["translations"]] == wanted else "wrong"


def watch(soak: Soak, requests: int, kills: int) -> None:
    """Until all requests are done, kill a worker now and then, and print the memory."""
    draw, start = random.Random(1), time.monotonic()
    killed = printed = 0
    while (done := soak.counts.total()) < requests:
        time.sleep(0.2)
        tree = descendants(soak.pid)
        workers = [pid for pid in tree if pid != soak.pid and not children(pid)]
        if done * (kills + 1) >= requests * (killed + 1) and killed < kills and workers:
            os.kill(draw.choice(workers), signal.SIGKILL)
            killed += 1
        if done * 10 >= requests * printed:
            sizes = sorted((memory(pid) for pid in tree), reverse=True)
            text = " ".join(f"{size / 2**20:.0f}" for size in sizes)
            seconds = time.monotonic() - start
            print(f"{seconds:.0f} s, {done} done, {killed} workers killed, MB: {text}", flush=True)
            printed += 1


def children(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    found = []
    with contextlib.suppress(OSError):  # it may have ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def descendants(pid: int) -> list[int]:
    """Return a process and all that descend from it."""
    return [pid] + [one for child in children(pid) for one in descendants(child)]


def memory(pid: int) -> int:
    """Return the proportional set size of a process in bytes, 0 if it has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    main()
