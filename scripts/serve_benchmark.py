"""Measure throughput and latency of nmt-serve, nmt-translate and LibreTranslate.

    python scripts/serve_benchmark.py --model RUN --input LINES [--install] [--threads 2 1]

All of them use the same weights on the same cores, and take turns (A B A B), so that other work on
the machine affects each of them. In a turn, 1, 8 and 32 clients send each line in its own request.
`--install` creates an environment for LibreTranslate in ~/.cache/nmt-benchmark. The last table
compares the results with the targets of nmt-serve; on a busy machine, only its ratios of CPU time
are meaningful.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil
import torch
from processes import BIN, free_port, run_server, tree_cpu_seconds

from nmt.checkpoint import find_model, load_info
from nmt.config import ExportConfig, ExportFormat, Quantization
from nmt.export.export_model import export_model
from nmt.translate.translator import Translator

CLIENTS = (1, 8, 32)
NUM_SINGLE_LINES = 100  # number of lines in a turn with one client
LIBRETRANSLATE = "libretranslate==1.9.6"
LIBRETRANSLATE_ROW = "LibreTranslate, int8"
# Starts LibreTranslate without downloads: each line counts as a sentence, so that no model to split
# sentences is needed, and the search for further models is left out.
LIBRETRANSLATE_PROGRAM = """
import sys
from argostranslate import sbd
sbd.MiniSBDSentencizer.__init__ = lambda self, pkg: None
sbd.MiniSBDSentencizer.split_sentences = lambda self, text: [text]
from libretranslate import init
init.boot = lambda *args, **kwargs: None
from libretranslate.main import main
sys.argv[0] = "libretranslate"
main()
"""
# the heading of the last table; a target is in parentheses
TARGETS_HEADING = [
    "",
    "32 clients over nmt-translate (>= 0.9)",
    "the same by CPU time",
    "ms over Translator.translate (<= 1.5)",
    "the same by CPU time",
    "p95, 8 clients over 1 (<= 3)",
    "over LibreTranslate: lines/s (>= 4), p95",
]


@dataclass
class Measurements:
    """The measurements of a program with a number of clients, over all turns."""

    lines_per_second: list[float] = field(default_factory=list)
    cpu_milliseconds: list[float] = field(default_factory=list)  # per line, without the clients
    latencies: list[float] = field(default_factory=list)  # milliseconds of each request

    def add(self, num_lines: int, seconds: float, cpu_seconds: float) -> None:
        """Add the speed and CPU time of a turn."""
        self.lines_per_second.append(num_lines / seconds)
        self.cpu_milliseconds.append(cpu_seconds / num_lines * 1000)

    def percentile(self, share: float) -> float:
        """Return the latency that a share of all requests, such as 0.95, do not exceed."""
        latencies = sorted(self.latencies)
        return latencies[min(int(share * len(latencies)), len(latencies) - 1)]

    def speed_cells(self) -> str:
        """Return cells with median and range of lines per second, and CPU time per line."""
        speeds = self.lines_per_second
        speed_range = f"{min(speeds):.1f} to {max(speeds):.1f}"
        return f"{median(speeds):.1f} | {speed_range} | {median(self.cpu_milliseconds):.2f}"

    def latency_cells(self) -> str:
        """Return cells with the 50th and the 95th percentile of the latency."""
        return f"{self.percentile(0.5):.1f} | {self.percentile(0.95):.1f}"


@dataclass
class Server:
    """A running server: its port and its main process."""

    port: int
    process: psutil.Process


def main() -> None:
    """Run the benchmark for each number of threads, and print tables as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="run, checkpoint or model folder")
    parser.add_argument("--input", required=True, type=Path, help="lines to translate")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--lines", type=int, default=320, help="lines of the input to use")
    parser.add_argument("--threads", type=int, nargs="+", default=[2])
    parser.add_argument("--install", action="store_true", help="install and measure LibreTranslate")
    options = parser.parse_args()
    first_lines = options.input.read_text(encoding="utf-8").split("\n")[: options.lines]
    lines = [line for line in first_lines if line]
    libretranslate = str(install_libretranslate()) if options.install else ""
    for threads in options.threads:
        with tempfile.TemporaryDirectory() as folder:
            print(f"\n{threads} compute threads\n")
            tables = run_benchmark(options, libretranslate, lines, threads, Path(folder))
            print(tables, flush=True)


def run_benchmark(
    options: argparse.Namespace, libretranslate: str, lines: list[str], threads: int, folder: Path
) -> str:
    """Start all servers, run the turns, and return the tables.

    `libretranslate` is the Python of an environment with LibreTranslate, or "" to leave it out.
    """
    model_dir = find_model(Path(options.model))
    info = load_info(model_dir)
    exported = folder / "int8"
    config = ExportConfig(format=ExportFormat.ctranslate2, quantization=Quantization.int8)
    export_model(model_dir, exported, config)
    with contextlib.ExitStack() as stack:
        default_server = start_nmt_serve(threads, f"model_dir={model_dir}")
        native_server = start_nmt_serve(threads, f"model_dir={model_dir}", "backend=native")
        servers = {
            "nmt-serve, default": stack.enter_context(default_server),
            "nmt-serve, native": stack.enter_context(native_server),
        }
        if libretranslate:
            package = make_argos_package(exported, info.src_lang, info.tgt_lang, folder)
            server = start_libretranslate(libretranslate, package, folder, threads)
            servers[LIBRETRANSLATE_ROW] = stack.enter_context(server)
        translators = {
            "nmt-translate, default": Translator.load(model_dir, device="cpu", num_threads=threads),
            "nmt-translate, native": Translator.load(model_dir, device="cpu", backend="native"),
        }
        torch.set_num_threads(threads)  # loading CTranslate2 has set it to 1
        languages = (info.src_lang, info.tgt_lang)
        Turns(lines, languages).run_turn(servers, translators)  # warm up
        turns = Turns(lines, languages)
        for _ in range(options.turns):
            turns.run_turn(servers, translators)
        return turns.report()


class Turns:
    """Measures servers and translators of this process in turn."""

    def __init__(self, lines: list[str], languages: tuple[str, str]) -> None:
        self.lines = lines
        self.languages = languages
        # keyed by server and number of clients
        self.server_measurements: dict[tuple[str, int], Measurements] = {}
        # keyed by translator; all lines in one call, and one line per call
        self.translator_measurements: dict[str, Measurements] = {}
        self.single_line_measurements: dict[str, Measurements] = {}

    def run_turn(self, servers: dict[str, Server], translators: dict[str, Translator]) -> None:
        """Measure each translator, and each server with each number of clients."""
        for name, translator in translators.items():
            self._measure_translator(name, translator)
        for name, server in servers.items():
            for num_clients in CLIENTS:
                self._measure_server(name, server, num_clients)

    def _measure_translator(self, name: str, translator: Translator) -> None:
        measurements = self.translator_measurements.setdefault(name, Measurements())
        start_seconds = time.perf_counter()
        start_cpu = time.process_time()
        translator.translate(self.lines)
        seconds = time.perf_counter() - start_seconds
        measurements.add(len(self.lines), seconds, time.process_time() - start_cpu)
        self._measure_one_by_one(name, translator)

    def _measure_server(self, name: str, server: Server, num_clients: int) -> None:
        measurements = self.server_measurements.setdefault((name, num_clients), Measurements())
        lines = self.lines[:NUM_SINGLE_LINES] if num_clients == 1 else self.lines
        start_cpu = tree_cpu_seconds(server.process)
        start_seconds = time.perf_counter()
        requests = send_requests(server.port, lines, num_clients, self.languages)
        measurements.latencies += asyncio.run(requests)
        seconds = time.perf_counter() - start_seconds
        cpu_seconds = tree_cpu_seconds(server.process) - start_cpu
        measurements.add(len(lines), seconds, cpu_seconds)

    def _measure_one_by_one(self, name: str, translator: Translator) -> None:
        measurements = self.single_line_measurements.setdefault(name, Measurements())
        lines = self.lines[:NUM_SINGLE_LINES]
        turn_start = time.perf_counter()
        start_cpu = time.process_time()
        for line in lines:
            start_seconds = time.perf_counter()
            translator.translate([line])
            measurements.latencies.append((time.perf_counter() - start_seconds) * 1000)
        cpu_seconds = time.process_time() - start_cpu
        measurements.add(len(lines), time.perf_counter() - turn_start, cpu_seconds)

    def report(self) -> str:
        """Return a table of all measurements and a table of the targets, as Markdown."""
        rows = [
            "| | clients | lines/s | range | CPU ms a line | p50 ms | p95 ms |",
            "|---" * 7 + "|",
        ]
        for name, measurements in self.translator_measurements.items():
            rows.append(f"| {name}, all lines | | {measurements.speed_cells()} | | |")
            engine = name.removeprefix("nmt-translate")
            single_calls = self.single_line_measurements[name]
            cells = f"{single_calls.speed_cells()} | {single_calls.latency_cells()}"
            rows.append(f"| Translator.translate([line]){engine} | 1 | {cells} |")
        for (name, num_clients), measurements in self.server_measurements.items():
            cells = f"{measurements.speed_cells()} | {measurements.latency_cells()}"
            rows.append(f"| {name} | {num_clients} | {cells} |")
        rows += ["", f"| {' | '.join(TARGETS_HEADING)} |", "|---" * len(TARGETS_HEADING) + "|"]
        for name in self.translator_measurements:
            rows.append(self.target_row(name))
        return "\n".join(rows)

    def target_row(self, name: str) -> str:
        """Return a row that compares a server of nmt with the translator `name` of its weights."""
        direct = self.translator_measurements[name]
        server_name = name.replace("nmt-translate", "nmt-serve")
        one_client = self.server_measurements[server_name, 1]
        eight_clients = self.server_measurements[server_name, 8]
        many_clients = self.server_measurements[server_name, 32]
        speed = median(many_clients.lines_per_second)
        speed_ratio = speed / median(direct.lines_per_second)
        cpu_ratio = median(direct.cpu_milliseconds) / median(many_clients.cpu_milliseconds)
        single_calls = self.single_line_measurements[name]
        added_milliseconds = one_client.percentile(0.5) - single_calls.percentile(0.5)
        added_cpu = median(one_client.cpu_milliseconds) - median(single_calls.cpu_milliseconds)
        queue_ratio = eight_clients.percentile(0.95) / one_client.percentile(0.95)
        cells = [server_name, f"{speed_ratio:.2f}", f"{cpu_ratio:.2f}"]
        cells += [f"{added_milliseconds:+.1f}", f"{added_cpu:+.1f}", f"{queue_ratio:.1f}", ""]
        peer = self.server_measurements.get((LIBRETRANSLATE_ROW, 32))
        if peer is not None:
            latency_ratio = many_clients.percentile(0.95) / peer.percentile(0.95)
            cells[-1] = f"{speed / median(peer.lines_per_second):.1f}, {latency_ratio:.2f}"
        return f"| {' | '.join(cells)} |"


async def send_requests(
    port: int, lines: list[str], num_clients: int, languages: tuple[str, str]
) -> list[float]:
    """Send each line in its own request; return the latencies in milliseconds."""
    unsent_lines = iter(lines)  # shared by all clients
    latencies: list[float] = []
    source, target = languages

    async def run_client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for line in unsent_lines:
            start_seconds = time.perf_counter()
            body = json.dumps({"q": line, "source": source, "target": target}).encode()
            head = f"POST /translate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
            writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
            status = await reader.readline()
            length = 0
            while (header := await reader.readline()) != b"\r\n":
                if header.lower().startswith(b"content-length:"):
                    length = int(header.split(b":")[1])
            response = await reader.readexactly(length)
            assert b" 200 " in status, (status, response)
            latencies.append((time.perf_counter() - start_seconds) * 1000)
        writer.close()

    clients = [run_client() for _ in range(num_clients)]
    await asyncio.gather(*clients)
    return latencies


@contextlib.contextmanager
def start_nmt_serve(threads: int, *settings: str) -> Iterator[Server]:
    """Run nmt-serve during the block."""
    port = free_port()
    command = [str(BIN / "nmt-serve"), f"port={port}", f"num_threads={threads}", *settings]
    command.append("access_log=false")
    with run_server(command, f"http://127.0.0.1:{port}/health") as process:
        yield Server(port, process)


@contextlib.contextmanager
def start_libretranslate(
    python: str, package: Path, folder: Path, threads: int
) -> Iterator[Server]:
    """Run LibreTranslate during the block, with one language package and without downloads."""
    port = free_port()
    home = folder / "home"
    with zipfile.ZipFile(package) as archive:
        archive.extractall(home / "packages")
    environment = os.environ | {
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
    command = [python, "-W", "ignore", "-c", LIBRETRANSLATE_PROGRAM]
    command += ["--host", "127.0.0.1", "--port", str(port), "--disable-web-ui", "--req-limit", "0"]
    url = f"http://127.0.0.1:{port}/languages"
    with run_server(command, url, environment=environment, folder=home) as process:
        yield Server(port, process)


def make_argos_package(exported: Path, source: str, target: str, folder: Path) -> Path:
    """Write an exported model as a language package of LibreTranslate, a zip archive."""
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
    """Create an environment with LibreTranslate from PyPI; return its Python."""
    folder = Path.home() / ".cache/nmt-benchmark/environments/libretranslate"
    python = folder / "bin/python"
    if not (folder / "installed").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", LIBRETRANSLATE], check=True)
        (folder / "installed").touch()
    return python


if __name__ == "__main__":
    main()
