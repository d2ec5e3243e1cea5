"""The parts of scripts/gpu.py: each does its work, and returns figures or raises a `PartError`."""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
LEFT_OUT = "left out: "
SPLITS = {"train": ["train"], "valid": ["val", "valid"], "test": ["test_2016_flickr", "test"]}
KEEP_QUIET = ["tracker=[]", "valid_bleu=false", "validate_every_updates=1000000"]
KEEP_QUIET += ["checkpoint_every_updates=1000000", "keep_last=1", "average_last=1"]
TINY = ["model.num_encoder_layers=1", "model.num_decoder_layers=1", "model.d_model=16"]
TINY += ["model.d_ff=32", "model.num_heads=2", "num_threads=1", "device=cpu"]


class PartError(Exception):
    """Why a part has no figures, or wrong ones, in one line."""


@dataclass(frozen=True)
class Job:
    """What all parts are told; sizes and the device are all that a rehearsal changes."""

    output: Path
    text: Path
    device: str = "cuda"
    num_devices: int = 1
    pairs: int = 40_000  # drawn, to measure speed with a vocabulary as large as WMT's
    words: int = 40_000
    vocab_size: int = 37_000
    curve_updates: int = 300
    speed_updates: int = 120
    log_every: int = 10
    update_tokens: int = 25_000
    model_updates: int = 600
    lines: int = 4_000
    turns: int = 3
    bleu_updates: int = 3_600

    @property
    def is_rehearsal(self) -> bool:
        """Whether a processor stands for the GPU."""
        return self.device == "cpu"

    @property
    def tiny(self) -> list[str]:
        """Settings that make any model tiny, in a rehearsal."""
        return TINY if self.is_rehearsal else []


REHEARSAL = {"pairs": 60, "words": 200, "vocab_size": 400, "curve_updates": 4, "speed_updates": 4}
REHEARSAL |= {"log_every": 1, "update_tokens": 400, "model_updates": 2, "lines": 4, "turns": 1}
REHEARSAL |= {"bleu_updates": 2}


# --- what parts use


def nmt(name: str, *arguments: object) -> None:
    """Run `nmt-NAME` in a copy of this process, which has everything imported."""
    from nmt.cli.commands import COMMANDS
    from nmt.cli.main import main

    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        with exiting():
            os._exit(main(COMMANDS[name], [str(argument) for argument in arguments]))
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status:
        raise PartError(f"nmt-{name} ended with exit status {status}")


@contextlib.contextmanager
def exiting() -> Iterator[None]:
    """End this process with the block, whatever happens in it."""
    try:
        yield
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def train(job: Job, name: str, *settings: object) -> list[dict[str, Any]]:
    """Train in the run folder `name`; return the lines of metrics of its updates."""
    run_dir = job.output / "runs" / name
    shutil.rmtree(run_dir, ignore_errors=True)  # of a run of this script before
    device = f"device={job.device}"
    nmt("train", f"run_dir={run_dir}", device, *KEEP_QUIET, *job.tiny, *settings)
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if "nll" in record]


def speed(records: list[dict[str, Any]]) -> dict[str, float]:
    """Return the medians of the second half of a run, when it is compiled and warm."""
    late = records[len(records) // 2 :]
    keys = ("target_tokens_per_second", "model_flops_per_second", "model_flops_utilisation")
    figures = {key: statistics.median(record[key] for record in late) for key in keys}
    return figures | {"memory_bytes": max(record["memory_bytes"] for record in records)}


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file."""
    return path.read_text(encoding="utf-8").split("\n")[:-1]


# --- the parts, in the order of their worth


def machine(job: Job) -> dict[str, Any]:
    """Say what there is, and that a product on the device is right."""
    import torch

    names = ("torch", "ctranslate2", "transformers", "sentencepiece")
    figures: dict[str, Any] = {"python": sys.version.split()[0]}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            figures[name] = importlib.metadata.version(name)
    x = torch.arange(64.0, device=job.device).view(8, 8)
    if not torch.equal((x @ x).cpu(), x.cpu() @ x.cpu()):
        raise PartError("a product of integers below 2^24 is not exact")
    if not job.is_rehearsal:
        properties = torch.cuda.get_device_properties(0)
        figures |= {"gpu": properties.name, "memory_bytes": properties.total_memory}
        figures |= {"devices": torch.cuda.device_count(), "cuda": torch.version.cuda}
        figures["capability"] = list(torch.cuda.get_device_capability(0))
    return figures


def data(job: Job) -> dict[str, Any]:
    """Preprocess the text given, and text drawn so that its vocabulary is large."""
    seconds = {}
    for name, files in (("real", find_text(job.text)), ("drawn", draw_text(job))):
        start = time.perf_counter()
        own = ["experiment=multi30k_quick"] if name == "real" else []
        if name == "drawn" or job.is_rehearsal:
            own += [f"tokenizer.vocab_size={job.vocab_size}"]
        nmt("preprocess", *own, *files, "data.tgt_lang=de", f"data_dir={job.output / name}")
        seconds[f"{name}_seconds"] = time.perf_counter() - start
    return seconds


def find_text(folder: Path) -> list[str]:
    """Return settings that name the files of the folder."""
    found = []
    for split, names in SPLITS.items():
        for side, lang in (("src", "en"), ("tgt", "de")):
            paths = [folder / f"{name}.{lang}{end}" for name in names for end in ("", ".gz")]
            path = next((path for path in paths if path.exists()), None)
            if path is None:
                raise PartError(f"{folder} has no {names[0]}.{lang}; give text=FOLDER")
            found.append(f"data.{split}.{side}={path}")
    return found


def draw_text(job: Job) -> list[str]:
    """Write sentences of drawn words whose lengths are spread as those of WMT are, 29 tokens a side
    in the mean; return settings that name the files.
    """
    draw = random.Random(1)
    starts, ends = "bcdfghjklmnprstvwz", ["", "n", "r", "s", "t"]
    parts = [a + b + c for a in starts for b in "aeiou" for c in ends]
    places = list(itertools.accumulate((i + 3) ** -0.9 for i in range(job.words)))
    folder, found = job.output / "text", []
    folder.mkdir(parents=True, exist_ok=True)
    words: dict[str, list[str]] = {}
    for side in ("src", "tgt"):
        distinct: set[str] = set()
        while len(distinct) < job.words:
            distinct.add("".join(draw.choices(parts, k=draw.choice((1, 2, 2, 3, 3, 4)))))
        words[side] = sorted(distinct)
    for split, count in (("train", job.pairs), ("valid", 64), ("test", 64)):
        sizes = [max(1, min(100, int(draw.lognormvariate(3.0, 0.55)))) for _ in range(count)]
        for side, some in words.items():
            rows = [" ".join(draw.choices(some, cum_weights=places, k=size)) for size in sizes]
            path = folder / f"{split}.{side}"
            path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
            found.append(f"data.{split}.{side}={path}")
    return found


def tests(job: Job) -> dict[str, Any]:
    """Run the tests that need a GPU."""
    marks = "gpu and not slow" if job.is_rehearsal else "gpu"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", marks]
    command.append(str(ROOT / "tests" / "test_gpu.py"))
    environment = os.environ | {"NMT_TEST_DEVICE": job.device}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    print(result.stdout, result.stderr)
    passed = re.search(r"(\d+) passed", result.stdout + "")
    if result.returncode or passed is None:
        failed = re.findall(r"^FAILED \S+::(\S+)", result.stdout, re.MULTILINE)
        said = (result.stdout + result.stderr).strip().split("\n")[-1]
        raise PartError(f"failed: {', '.join(failed)}" if failed else f"pytest: {said}")
    return {"passed": int(passed[1])}


def base_plain(job: Job) -> dict[str, Any]:
    """Measure base without torch.compile."""
    return measure(job, "base", compiles=False)


def base_compiled(job: Job) -> dict[str, Any]:
    """Measure base with torch.compile."""
    return measure(job, "base", compiles=True)


def big_plain(job: Job) -> dict[str, Any]:
    """Measure big without torch.compile."""
    return measure(job, "big", compiles=False)


def big_compiled(job: Job) -> dict[str, Any]:
    """Measure big with torch.compile."""
    return measure(job, "big", compiles=True)


def measure(job: Job, model: str, *, compiles: bool) -> dict[str, Any]:
    """Train in bfloat16 with a batch an update; return speed, shares of the peaks, and memory."""
    records = train(
        job,
        f"{model}-{compiles}",
        f"model={model}",
        f"data_dir={job.output / 'drawn'}",
        f"compile={str(compiles).lower()}",
        "dtype=bfloat16",
        f"tokens_per_update={job.update_tokens}",
        f"max_tokens={job.update_tokens}",
        f"max_updates={job.speed_updates}",
        f"log_every_updates={job.log_every}",
    )
    if len(records) != job.speed_updates // job.log_every:
        raise PartError(f"{len(records)} lines of metrics")
    if not all(record["gradient_norm"] > 0 for record in records):  # as a broken graph has it
        raise PartError("the gradient is 0 or not a number")
    return speed(records)


def precision(job: Job) -> dict[str, Any]:
    """Compare loss curves in bfloat16 and float32; another seed in float32 shows the noise."""
    runs = {"float32": 1, "bfloat16": 1, "noise": 2}
    curves = {}
    for name, seed in runs.items():
        dtype = "float32" if name == "noise" else name
        records = train(
            job,
            f"curve-{name}",
            "experiment=multi30k_quick",
            f"data_dir={job.output / 'real'}",
            f"dtype={dtype}",
            f"seed={seed}",
            "compile=false",
            "optimizer.warmup_steps=100",
            "tokens_per_update=4000",
            "max_tokens=4000",
            f"max_updates={job.curve_updates}",
            "log_every_updates=1",
        )
        curves[name] = [record["nll"] for record in records]
    late = {name: statistics.fmean(curve[-100:]) for name, curve in curves.items()}
    gap, noise = (abs(late[name] - late["float32"]) for name in ("bfloat16", "noise"))
    limit = max(noise, 0.01 * late["float32"])
    if not gap <= limit:  # not a number, too
        raise PartError(f"bfloat16 is {gap:.4f} nats from float32, and {limit:.4f} are allowed")
    return {**late, "gap": gap, "limit": limit, "curves": curves}


def several_devices(job: Job) -> dict[str, Any]:
    """Compare losses on all devices, which NCCL connects, with those on one."""
    count = 2 if job.is_rehearsal else job.num_devices
    if count < 2:
        raise PartError(LEFT_OUT + "there is one device")
    settings = ["experiment=multi30k_quick", f"data_dir={job.output / 'real'}", "dtype=float32"]
    settings += ["compile=false", "model.dropout=0", "tokens_per_update=8000", "max_tokens=2000"]
    settings += ["max_updates=8", "log_every_updates=1", "num_threads=1"]
    one, all_, parts = (
        train(job, f"devices-{n}-{sharding}", *settings, f"devices={n}", f"sharding={sharding}")
        for n, sharding in ((1, "none"), (count, "none"), (count, "full"))
    )
    losses = [[record["loss"] for record in some] for some in (one, all_, parts)]
    worst = max(abs(x - a) / a for a, *others in zip(*losses, strict=True) for x in others)
    if not worst < 1e-3:
        raise PartError(f"losses on {count} devices differ by {worst:.1e} from those on one")
    return {"devices": count, "largest_difference": worst} | speed(all_)


def translation(job: Job) -> dict[str, Any]:
    """Train base a little, and translate with it in turns with other engines, beam 4."""
    sys.path.insert(0, str(ROOT / "scripts" / "benchmark"))
    from players import Player, take_turns

    from nmt.config import SearchConfig

    start = time.perf_counter()
    settings = ["model=base", f"data_dir={job.output / 'real'}", "model.dropout=0.2"]
    settings += ["optimizer.warmup_steps=300", "tokens_per_update=8000", "max_tokens=8000"]
    settings += ["compile=false", f"max_updates={job.model_updates}"]
    train(job, "base-model", *settings)
    folders, failed = {"native": str(job.output / "runs" / "base-model" / "checkpoints/latest")}, {}
    for kind, form in (("ctranslate2", "float16"), ("huggingface", "float32")):
        folders[kind] = str(job.output / "exports" / kind)
        with contextlib.suppress(PartError):
            given = [f"model_dir={folders['native']}", f"output={folders[kind]}"]
            nmt("export", *given, f"format={kind}", f"quantization={form}")
    lines = read_lines(job.output / "real" / "test.src") + read_lines(
        job.output / "real" / "valid.src"
    )
    lines = list(itertools.islice(itertools.cycle(lines), job.lines))
    shared = {"folders": folders, "device": job.device, "beam_size": 4, "fixed_length": None}
    shared |= {"length_exponent": SearchConfig().length_exponent, "lines": lines}
    shared |= {"warmup_lines": min(len(lines), 1024), "threads": 1}
    engines = {
        "nmt-float32": ("translate_nmt.py", "native", "float32"),
        "nmt-bfloat16": ("translate_nmt.py", "native", "bfloat16"),
        "ctranslate2-float16": ("translate_ctranslate2.py", "ctranslate2", "float16"),
        "transformers-bfloat16": ("translate_transformers.py", "huggingface", "bfloat16"),
    }
    players = [
        Player(
            name,
            Path(sys.executable),
            driver,
            {**shared, "options": {"folder": folder}, "dtype": dtype},
            job.output / "players",
        )
        for name, (driver, folder, dtype) in engines.items()
    ]
    deadline = start + 0.6 * PARTS[translation]  # or nothing would be left of what is measured
    _, turns, failed = take_turns(players, job.turns, print, deadline=deadline)
    rates = {
        name: statistics.median(turn["tgt_tokens"] / turn["wall_seconds"] for turn in some)
        for name, some in turns.items()
        if some
    }
    if not {"nmt-float32", "nmt-bfloat16"} <= set(rates):
        reasons = "; ".join(f"{name}: {why}" for name, why in failed.items())
        raise PartError(f"{reasons}; tokens a second of the others: {rates}")
    memory = {n: max(t["peak_bytes"] for t in some) for n, some in turns.items() if some}
    return {"tokens_per_second": rates, "memory_bytes": memory, "failed": failed}


def bleu(job: Job) -> dict[str, Any]:
    """Train the recipe of Multi30k from end to end; score its test set in both formats."""
    from nmt.evaluate import bleu as score

    start, run_dir = time.perf_counter(), job.output / "runs" / "recipe"
    experiment, data_dir = "experiment=multi30k_quick", job.output / "real"
    shutil.rmtree(run_dir, ignore_errors=True)
    settings = [experiment, f"data_dir={data_dir}", f"run_dir={run_dir}", "compile=false"]
    settings += [f"device={job.device}", "tracker=[]", f"max_updates={job.bleu_updates}"]
    if job.is_rehearsal:
        settings += ["checkpoint_every_updates=1", "average_last=2", "keep_last=2"]
    nmt("train", *settings, *job.tiny)
    seconds = time.perf_counter() - start
    nmt("average", f"run_dir={run_dir}")
    figures = {"training_seconds": seconds}
    for dtype in ("float32", "bfloat16"):
        output = job.output / f"test.{dtype}"
        output.unlink(missing_ok=True)
        given = [f"model_dir={run_dir}", f"input={data_dir / 'test.src'}", f"output={output}"]
        nmt("translate", experiment, *given, f"device={job.device}", f"dtype={dtype}")
        references = read_lines(data_dir / "test.tgt")
        figures[dtype] = score(read_lines(output), [references])
    return figures


PARTS: dict[Callable[[Job], dict[str, Any]], int] = {  # with their limits in seconds
    machine: 30,
    data: 60,
    tests: 120,
    big_plain: 60,
    base_plain: 45,
    precision: 60,
    several_devices: 60,
    big_compiled: 150,
    base_compiled: 120,
    translation: 150,
    bleu: 120,
}
