"""Measures `nmt-serve`: throughput and latency beside `nmt-translate`, and beside LibreTranslate
with the same weights on the same cores.

    python scripts/benchmark/serve.py --model RUN --input LINES [--install] [--threads 2 1]

Servers take turns (A B A B), so that other work on the machine meets all of them. Each turn sends
the lines, one a request, from 1, 8 and 32 clients. LibreTranslate runs from an environment of its
own: `--install` makes one under ~/.cache/nmt-benchmark. Every load is bounded by the lines given.
The last table has what the server is to reach; on a busy machine only ratios of CPU time count.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from nmt.checkpoint import find_model, load_info
from nmt.config import DType, ExportConfig, ExportFormat, Quantization
from nmt.export.export_model import export_model
from nmt.translate.translator import Translator

CLIENTS = (1, 8, 32)
_ALONE = 100  # lines that are sent one after the other
LIBRETRANSLATE = "libretranslate==1.9.6"
# It fetches models that find sentences; here every line is one, which costs it nothing
_LIBRETRANSLATE_PROGRAM = """
import sys
from argostranslate import sbd
sbd.MiniSBDSentencizer.__init__ = lambda self, pkg: None
sbd.MiniSBDSentencizer.split_sentences = lambda self, text: [text]
from libretranslate import init
init.boot = lambda *args, **kwargs: None  # looks for more models on the net
from libretranslate.main import main
sys.argv[0] = "libretranslate"
main()
"""


@dataclass
class Turns:
    """What the turns of one server with one number of clients gave."""

    lines_per_second: list[float] = field(default_factory=list)
    cpu_milliseconds: list[float] = field(default_factory=list)  # of a line, of the server alone
    milliseconds: list[float] = field(default_factory=list)  # of every request

    def add(self, num_lines: int, seconds: float, cpu_seconds: float) -> None:
        """Add a turn."""
        self.lines_per_second.append(num_lines / seconds)
        self.cpu_milliseconds.append(cpu_seconds / num_lines * 1000)

    def percentile(self, share: float) -> float:
        """Return the latency that this share of all requests had at most."""
        ranked = sorted(self.milliseconds)
        return ranked[min(int(share * len(ranked)), len(ranked) - 1)]


def main() -> None:
    """Measure and print a table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="run, checkpoint or model folder")
    parser.add_argument("--input", required=True, type=Path, help="lines to translate")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--lines", type=int, default=320, help="of the input, for each turn")
    parser.add_argument("--threads", type=int, nargs="+", default=[2])
    parser.add_argument("--libretranslate", help="Python of an environment that has it")
    parser.add_argument("--install", action="store_true", help="make that environment")
    options = parser.parse_args()
    lines = options.input.read_text(encoding="utf-8").split("\n")[: options.lines]
    python = options.libretranslate
    if options.install:
        python = str(install_libretranslate())
    for threads in options.threads:
        with tempfile.TemporaryDirectory() as folder:
            print(f"\n{threads} compute threads\n")
            filled = [line for line in lines if line]
            print(measure(options, filled, threads, python, Path(folder)), flush=True)


def measure(
    options: argparse.Namespace, lines: list[str], threads: int, python: str | None, folder: Path
) -> str:
    """Start all servers, let them take turns, and return the tables."""
    info = load_info(find_model(Path(options.model)))
    exported = folder / "int8"
    config = ExportConfig(format=ExportFormat.ctranslate2, quantization=Quantization.int8)
    export_model(find_model(Path(options.model)), exported, config)
    with contextlib.ExitStack() as stack:
        servers = {
            "nmt-serve, float32": stack.enter_context(our_server(options.model, [], threads)),
            "nmt-serve, int8": stack.enter_context(
                our_server(str(exported), ["backend=ctranslate2"], threads)
            ),
        }
        if python is not None:
            package = make_argos_package(exported, info.src_lang, info.tgt_lang, folder)
            servers["LibreTranslate, int8"] = stack.enter_context(
                libretranslate(python, package, folder, threads)
            )
        translators = {
            "nmt-translate, float32": Translator.load(options.model, device="cpu"),
            "nmt-translate, int8": Translator.load(
                exported,
                device="cpu",
                dtype=DType.float32,
                backend="ctranslate2",
                num_threads=threads,
            ),
        }
        torch.set_num_threads(threads)  # now: CTranslate2 has set its own number, 1, for all
        pair = (info.src_lang, info.tgt_lang)
        return take_turns(servers, translators, lines, pair, options.turns)


def take_turns(
    servers: dict[str, tuple[int, int]],
    translators: dict[str, Translator],
    lines: list[str],
    pair: tuple[str, str],
    num_turns: int,
) -> str:
    """Measure everything in turn and return the tables."""
    served = {(name, n): Turns() for name in servers for n in CLIENTS}
    direct = {name: Turns() for name in translators}
    alone = {name: Turns() for name in translators}
    for turn in range(num_turns + 1):  # the first warms up
        for name, translator in translators.items():
            start, start_cpu = time.perf_counter(), time.process_time()
            translator.translate(lines)
            seconds, cpu = time.perf_counter() - start, time.process_time() - start_cpu
            for line in lines[:_ALONE]:
                start = time.perf_counter()
                translator.translate([line])
                if turn:
                    alone[name].milliseconds.append((time.perf_counter() - start) * 1000)
            if turn:
                direct[name].add(len(lines), seconds, cpu)
        for name, (port, pid) in servers.items():
            for num_clients in CLIENTS:
                some = lines[:_ALONE] if num_clients == 1 else lines
                start_cpu = cpu_seconds(pid)
                seconds, latencies = asyncio.run(load(port, some, num_clients, pair))
                if turn:
                    turns = served[name, num_clients]
                    turns.add(len(some), seconds, cpu_seconds(pid) - start_cpu)
                    turns.milliseconds += latencies
    return report(served, direct, alone)


async def load(
    port: int, lines: list[str], num_clients: int, pair: tuple[str, str]
) -> tuple[float, list[float]]:
    """Send each line as a request of its own; return the seconds of all and the latency of each."""
    waiting = iter(lines)
    latencies: list[float] = []

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for line in waiting:
            start = time.perf_counter()
            body = json.dumps({"q": line, "source": pair[0], "target": pair[1]}).encode()
            head = f"POST /translate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
            writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
            status = await reader.readline()
            length = 0
            while (header := await reader.readline()) != b"\r\n":
                if header.lower().startswith(b"content-length:"):
                    length = int(header.split(b":")[1])
            answer = await reader.readexactly(length)
            assert b" 200 " in status, (status, answer)
            latencies.append((time.perf_counter() - start) * 1000)
        writer.close()

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(num_clients)))
    return time.perf_counter() - start, latencies


def report(
    served: dict[tuple[str, int], Turns], direct: dict[str, Turns], alone: dict[str, Turns]
) -> str:
    """Return what was measured as Markdown: medians over the turns."""
    rows = ["| | clients | lines/s | range | CPU ms a line | p50 ms | p95 ms |", "|---" * 7 + "|"]
    for name, turns in direct.items():
        rows.append(f"| {name}, all lines | | {_speed(turns)} | | |")
        one = alone[name]
        latency = f"{one.percentile(0.5):.1f} | {one.percentile(0.95):.1f}"
        engine = name.removeprefix("nmt-translate")
        rows.append(f"| Translator.translate([line]){engine} | 1 | | | | {latency} |")
    for (name, num_clients), turns in served.items():
        latency = f"{turns.percentile(0.5):.1f} | {turns.percentile(0.95):.1f}"
        rows.append(f"| {name} | {num_clients} | {_speed(turns)} | {latency} |")
    return "\n".join([*rows, "", *goals(served, direct, alone)])


def goals(
    served: dict[tuple[str, int], Turns], direct: dict[str, Turns], alone: dict[str, Turns]
) -> list[str]:
    """Return the rows of a table with what each of our servers is to reach."""
    rows = [
        "| | 32 clients over nmt-translate (>= 0.8) | the same by CPU time | ms over "
        "Translator.translate (<= 3) | p95, 8 clients over 1 (<= 3) | over LibreTranslate: lines/s "
        "(>= 4), p95 |",
        "|---" * 6 + "|",
    ]
    for name in dict.fromkeys(name for name, _ in served):
        reference = name.replace("nmt-serve", "nmt-translate")
        if reference not in direct:
            continue
        one, eight, many = (served[name, count] for count in CLIENTS)
        share = _median(many.lines_per_second) / _median(direct[reference].lines_per_second)
        cpu = _median(direct[reference].cpu_milliseconds) / _median(many.cpu_milliseconds)
        added = one.percentile(0.5) - alone[reference].percentile(0.5)
        wait = eight.percentile(0.95) / one.percentile(0.95)
        row = f"| {name} | {share:.2f} | {cpu:.2f} | {added:+.1f} | {wait:.1f} |"
        if (other := served.get(("LibreTranslate, int8", CLIENTS[-1]))) is not None:
            gain = _median(many.lines_per_second) / _median(other.lines_per_second)
            row += f" {gain:.1f}, {many.percentile(0.95) / other.percentile(0.95):.2f}"
        rows.append(f"{row} |")
    return rows


_median = statistics.median


def _speed(turns: Turns) -> str:
    speed, cpu = turns.lines_per_second, statistics.median(turns.cpu_milliseconds)
    return f"{statistics.median(speed):.1f} | {min(speed):.1f} to {max(speed):.1f} | {cpu:.2f}"


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process and those that it started have taken."""
    own, children = {}, collections.defaultdict(list)
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            fields = path.read_text().rsplit(")", 1)[1].split()
            number = int(path.parent.name)
            own[number] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            children[int(fields[1])].append(number)
    found = [pid]
    for number in found:  # which grows
        found += children[number]
    return sum(own.get(number, 0.0) for number in found)


@contextlib.contextmanager
def our_server(folder: str, settings: list[str], threads: int) -> Iterator[tuple[int, int]]:
    """Run nmt-serve for the time of the block; yield its port and process."""
    port = free_port()
    command = [
        *(str(Path(sys.executable).with_name("nmt-serve")), f"model_dir={folder}"),
        *(f"port={port}", f"num_threads={threads}", "access_log=false", *settings),
    ]
    with process(command, f"http://127.0.0.1:{port}/health", dict(os.environ)) as pid:
        yield port, pid


@contextlib.contextmanager
def libretranslate(
    python: str, package: Path, folder: Path, threads: int
) -> Iterator[tuple[int, int]]:
    """Run LibreTranslate with one package, and nothing that it would fetch."""
    port, home = free_port(), folder / "home"
    with zipfile.ZipFile(package) as archive:
        archive.extractall(home / "packages")
    environment = dict(os.environ) | {
        "ARGOS_PACKAGES_DIR": str(home / "packages"),
        "XDG_DATA_HOME": str(home),
        "XDG_CONFIG_HOME": str(home),
        "XDG_CACHE_HOME": str(home),
        "HOME": str(home),
        "ARGOS_CHUNK_TYPE": "MINISBD",
        "ARGOS_INTRA_THREADS": str(threads),
        "OMP_NUM_THREADS": str(threads),
        "LT_THREADS": "4",  # its default
    }
    command = [
        python,
        "-W",
        "ignore",
        "-c",
        _LIBRETRANSLATE_PROGRAM,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    command += ["--disable-web-ui", "--req-limit", "0"]
    with process(command, f"http://127.0.0.1:{port}/languages", environment, home) as pid:
        yield port, pid


@contextlib.contextmanager
def process(
    command: list[str], url: str, environment: dict[str, str], folder: Path | None = None
) -> Iterator[int]:
    """Run a server until the block ends; wait until it answers, and yield its process."""
    with tempfile.TemporaryFile() as output:
        running = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, cwd=folder
        )
        try:
            until = time.monotonic() + 180
            while True:
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(url, timeout=5).close()
                    break
                if running.poll() is not None or time.monotonic() > until:
                    output.seek(0)
                    sys.exit(f"{command[0]} did not start:\n{output.read().decode()[-3000:]}")
                time.sleep(0.3)
            yield running.pid
        finally:
            running.terminate()
            try:
                running.wait(20)
            except subprocess.TimeoutExpired:
                running.kill()
                running.wait()


def make_argos_package(exported: Path, source: str, target: str, folder: Path) -> Path:
    """Write the exported model as a package that LibreTranslate installs: a zip of a folder."""
    name = f"{source}_{target}"
    path = folder / f"{name}.argosmodel"
    metadata = {
        "package_version": "1.0",
        "argos_version": "1.9",
        "type": "translate",
        "from_code": source,
        "from_name": source,
        "to_code": target,
        "to_name": target,
    }
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}/metadata.json", json.dumps(metadata))
        archive.write(exported / "tokenizer.model", f"{name}/sentencepiece.model")
        for file in ("model.bin", "config.json", "shared_vocabulary.json"):
            archive.write(exported / file, f"{name}/model/{file}")
    return path


def install_libretranslate() -> Path:
    """Make an environment with LibreTranslate from PyPI; return its Python."""
    folder = Path.home() / ".cache/nmt-benchmark/environments/libretranslate"
    python = folder / "bin/python"
    if not (folder / "installed").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", LIBRETRANSLATE], check=True)
        (folder / "installed").touch()
    return python


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


if __name__ == "__main__":
    main()
