"""The parts of scripts/gpu.py: each returns its figures or raises a `PartError`."""

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
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
SPLITS = {"train": ["train"], "valid": ["val", "valid"], "test": ["test_2016_flickr", "test"]}
NO_VALIDATION = [
    "tracker=[]",
    "valid_bleu=false",
    "validate_every_updates=1000000",
    "checkpoint_every_updates=1000000",
    "keep_last=1",
    "average_last=1",
]
TINY = [
    "model.num_encoder_layers=1",
    "model.num_decoder_layers=1",
    "model.d_model=16",
    "model.d_ff=32",
    "model.num_heads=2",
    "num_threads=1",
    "device=cpu",
]
TRANSLATION_SECONDS = 150
ENGINES = {  # driver, format of the model, dtype
    "nmt-float32": ("translate_nmt.py", "native", "float32"),
    "nmt-bfloat16": ("translate_nmt.py", "native", "bfloat16"),
    "ctranslate2-float16": ("translate_ctranslate2.py", "ctranslate2", "float16"),
    "transformers-bfloat16": ("translate_transformers.py", "huggingface", "bfloat16"),
}


class PartError(Exception):
    """Why a part has no figures, or wrong ones, in one line."""


class PartSkipped(PartError):
    """Why a part does not apply to this machine."""


@dataclass(frozen=True)
class Job:
    """Folders, device and sizes; a rehearsal changes the device and the sizes."""

    output: Path
    text: Path
    device: str = "cuda"
    num_devices: int = 1
    num_pairs: int = 40_000  # random text, to measure speed with a vocabulary as large as WMT's
    num_words: int = 40_000
    vocab_size: int = 37_000
    curve_updates: int = 300
    speed_updates: int = 120
    log_every: int = 10
    update_tokens: int = 25_000
    model_updates: int = 600
    num_lines: int = 4_000
    turns: int = 3
    bleu_updates: int = 3_600

    @property
    def is_rehearsal(self) -> bool:
        """Whether a CPU takes the place of the GPU."""
        return self.device == "cpu"

    @property
    def model_settings(self) -> list[str]:
        """Settings that make any model tiny, in a rehearsal."""
        return TINY if self.is_rehearsal else []


REHEARSAL = {
    "num_pairs": 60,
    "num_words": 200,
    "vocab_size": 400,
    "curve_updates": 4,
    "speed_updates": 4,
    "log_every": 1,
    "update_tokens": 400,
    "model_updates": 2,
    "num_lines": 4,
    "turns": 1,
    "bleu_updates": 2,
}
Part = Callable[[Job], dict[str, Any]]


# --- helpers


def run_nmt(name: str, *arguments: object) -> None:
    """Run `nmt-NAME` in a fork of this process, which has imported everything."""
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
    """End this process after the block, also after an error."""
    try:
        yield
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def train(job: Job, name: str, *settings: object) -> list[dict[str, Any]]:
    """Train in the run folder `name`; return the logged metrics of its updates."""
    run_dir = job.output / "runs" / name
    shutil.rmtree(run_dir, ignore_errors=True)  # of an earlier run of this script
    run_nmt(
        "train",
        f"run_dir={run_dir}",
        f"device={job.device}",
        *NO_VALIDATION,
        *job.model_settings,
        *settings,
    )
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if "nll" in record]


def speed_figures(records: list[dict[str, Any]]) -> dict[str, float]:
    """Return medians over the second half of a run, after compilation and warm-up."""
    second_half = records[len(records) // 2 :]
    figures = {}
    for key in ("target_tokens_per_second", "model_flops_per_second", "model_flops_utilisation"):
        figures[key] = statistics.median(record[key] for record in second_half)
    figures["memory_bytes"] = max(record["memory_bytes"] for record in records)
    return figures


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file."""
    return path.read_text(encoding="utf-8").split("\n")[:-1]


# --- the parts


def inspect_machine(job: Job) -> dict[str, Any]:
    """Return versions and the device; check that a matrix multiplication on it is exact."""
    import torch

    figures: dict[str, Any] = {"python": sys.version.split()[0]}
    for name in ("torch", "ctranslate2", "transformers", "sentencepiece"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            figures[name] = importlib.metadata.version(name)
    x = torch.arange(64.0, device=job.device).view(8, 8)
    if not torch.equal((x @ x).cpu(), x.cpu() @ x.cpu()):
        raise PartError("a matrix multiplication of integers below 2^24 is not exact")
    if not job.is_rehearsal:
        properties = torch.cuda.get_device_properties(0)
        figures["gpu"] = properties.name
        figures["memory_bytes"] = properties.total_memory
        figures["devices"] = torch.cuda.device_count()
        figures["cuda"] = torch.version.cuda
        figures["capability"] = list(torch.cuda.get_device_capability(0))
    return figures


def preprocess(job: Job) -> dict[str, Any]:
    """Preprocess the given text, and random text with a large vocabulary; return the seconds."""
    vocab_size = [f"tokenizer.vocab_size={job.vocab_size}"]
    real_settings = ["experiment=multi30k_quick", *find_text(job.text)]
    if job.is_rehearsal:
        real_settings += vocab_size
    figures = {}
    for name, settings in (("real", real_settings), ("drawn", vocab_size + write_random_text(job))):
        start_seconds = time.perf_counter()
        data_dir = f"data_dir={job.output / name}"
        run_nmt("preprocess", *settings, "data.tgt_lang=de", data_dir)
        figures[f"{name}_seconds"] = time.perf_counter() - start_seconds
    return figures


def find_text(folder: Path) -> list[str]:
    """Return settings that name the files of the folder."""
    settings = []
    for split, names in SPLITS.items():
        for side, lang in (("src", "en"), ("tgt", "de")):
            candidates = [folder / f"{name}.{lang}{end}" for name in names for end in ("", ".gz")]
            files = [path for path in candidates if path.exists()]
            if not files:
                raise PartError(f"{folder} has no {names[0]}.{lang}; give text=FOLDER")
            settings.append(f"data.{split}.{side}={files[0]}")
    return settings


def write_random_text(job: Job) -> list[str]:
    """Write sentences of random words; return settings that name the files.

    Lengths are distributed as in WMT, with a mean of 29 tokens a side.
    """
    rng = random.Random(1)
    consonants = "bcdfghjklmnprstvwz"
    syllables = [a + b + c for a in consonants for b in "aeiou" for c in ["", "n", "r", "s", "t"]]
    # Zipf's law
    weights = list(itertools.accumulate((i + 3) ** -0.9 for i in range(job.num_words)))
    folder = job.output / "text"
    folder.mkdir(parents=True, exist_ok=True)
    vocabularies: dict[str, list[str]] = {}
    for side in ("src", "tgt"):
        words: set[str] = set()
        while len(words) < job.num_words:
            words.add("".join(rng.choices(syllables, k=rng.choice((1, 2, 2, 3, 3, 4)))))
        vocabularies[side] = sorted(words)
    settings = []
    for split, num_pairs in (("train", job.num_pairs), ("valid", 64), ("test", 64)):
        lengths = [max(1, min(100, int(rng.lognormvariate(3.0, 0.55)))) for _ in range(num_pairs)]
        for side, vocabulary in vocabularies.items():
            path = folder / f"{split}.{side}"
            with path.open("w", encoding="utf-8") as file:
                for length in lengths:
                    words_of_line = rng.choices(vocabulary, cum_weights=weights, k=length)
                    file.write(" ".join(words_of_line) + "\n")
            settings.append(f"data.{split}.{side}={path}")
    return settings


def run_tests(job: Job) -> dict[str, Any]:
    """Run the tests that need a GPU."""
    marks = "gpu and not slow" if job.is_rehearsal else "gpu"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", marks]
    command.append(str(ROOT / "tests" / "test_gpu.py"))
    environment = os.environ | {"NMT_TEST_DEVICE": job.device}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    print(result.stdout, result.stderr)
    passed = re.search(r"(\d+) passed", result.stdout)
    if result.returncode or passed is None:
        failed = re.findall(r"^FAILED \S+::(\S+)", result.stdout, re.MULTILINE)
        last_line = (result.stdout + result.stderr).strip().split("\n")[-1]
        raise PartError(f"failed: {', '.join(failed)}" if failed else f"pytest: {last_line}")
    return {"passed": int(passed[1])}


def measure_training(job: Job, *, model: str, compiled: bool) -> dict[str, Any]:
    """Train in bfloat16 with one batch an update; return speed, utilization and memory."""
    records = train(
        job,
        f"{model}-{compiled}",
        f"model={model}",
        f"data_dir={job.output / 'drawn'}",
        f"compile={str(compiled).lower()}",
        "dtype=bfloat16",
        f"tokens_per_update={job.update_tokens}",
        f"max_tokens={job.update_tokens}",
        f"max_updates={job.speed_updates}",
        f"log_every_updates={job.log_every}",
    )
    if len(records) != job.speed_updates // job.log_every:
        raise PartError(f"{len(records)} lines of metrics")
    # a wrongly compiled graph may return a gradient of 0
    if not all(record["gradient_norm"] > 0 for record in records):
        raise PartError("the gradient is 0 or not a number")
    return speed_figures(records)


def compare_precision(job: Job) -> dict[str, Any]:
    """Compare loss curves in bfloat16 and float32; another seed in float32 shows the noise."""
    curves = {}
    for name, dtype, seed in (
        ("float32", "float32", 1),
        ("bfloat16", "bfloat16", 1),
        ("noise", "float32", 2),
    ):
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
    final = {name: statistics.fmean(curve[-100:]) for name, curve in curves.items()}
    gap = abs(final["bfloat16"] - final["float32"])
    limit = max(abs(final["noise"] - final["float32"]), 0.01 * final["float32"])
    if not gap <= limit:  # also if a loss is not a number
        raise PartError(f"bfloat16 is {gap:.4f} nats from float32, and {limit:.4f} are allowed")
    return {**final, "gap": gap, "limit": limit, "curves": curves}


def compare_devices(job: Job) -> dict[str, Any]:
    """Compare losses on all devices, connected by NCCL, with those on one."""
    num_devices = 2 if job.is_rehearsal else job.num_devices
    if num_devices < 2:
        raise PartSkipped("there is one device")
    runs = []
    for devices, sharding in ((1, "none"), (num_devices, "none"), (num_devices, "full")):
        records = train(
            job,
            f"devices-{devices}-{sharding}",
            "experiment=multi30k_quick",
            f"data_dir={job.output / 'real'}",
            "dtype=float32",
            "compile=false",
            "model.dropout=0",
            "tokens_per_update=8000",
            "max_tokens=2000",
            "max_updates=8",
            "log_every_updates=1",
            "num_threads=1",
            f"devices={devices}",
            f"sharding={sharding}",
        )
        runs.append(records)
    largest = 0.0
    for single, replicated, sharded in zip(*runs, strict=True):
        for record in (replicated, sharded):
            largest = max(largest, abs(record["loss"] - single["loss"]) / single["loss"])
    if not largest < 1e-3:
        raise PartError(f"losses on {num_devices} devices differ by {largest:.1e} from one device")
    return {"devices": num_devices, "largest_difference": largest} | speed_figures(runs[1])


def compare_translation(job: Job) -> dict[str, Any]:
    """Train base briefly, and translate with beam 4 in turns with other engines."""
    sys.path.insert(0, str(ROOT / "scripts" / "benchmark"))
    from workers import Worker, take_turns

    from nmt.config import SearchConfig

    # the part fails if time runs out, so no round begins after 60 % of it
    deadline = time.perf_counter() + 0.6 * TRANSLATION_SECONDS
    folders = export_base(job)
    data_dir = job.output / "real"
    lines = read_lines(data_dir / "test.src") + read_lines(data_dir / "valid.src")
    lines = list(itertools.islice(itertools.cycle(lines), job.num_lines))
    shared = {
        "folders": folders,
        "device": job.device,
        "beam_size": 4,
        "fixed_length": None,
        "length_exponent": SearchConfig().length_exponent,
        "lines": lines,
        "warmup_lines": min(len(lines), 1024),
        "threads": 1,
    }
    workers = []
    for name, (driver, model_format, dtype) in ENGINES.items():
        engine_job = shared | {"options": {"format": model_format}, "dtype": dtype}
        folder = job.output / "workers"
        workers.append(Worker(name, Path(sys.executable), driver, engine_job, folder))
    _, turns, failures = take_turns(workers, job.turns, print, deadline=deadline)
    rates = {}
    memory_bytes = {}
    for name, records in turns.items():
        if records:
            rates[name] = statistics.median(
                turn["tgt_tokens"] / turn["wall_seconds"] for turn in records
            )
            memory_bytes[name] = max(turn["peak_bytes"] for turn in records)
    if not {"nmt-float32", "nmt-bfloat16"} <= set(rates):
        reasons = "; ".join(f"{name}: {reason}" for name, reason in failures.items())
        raise PartError(f"{reasons}; tokens a second of the others: {rates}")
    return {"tokens_per_second": rates, "memory_bytes": memory_bytes, "failed": failures}


def export_base(job: Job) -> dict[str, str]:
    """Train base briefly and export it; return the folder of each format."""
    train(
        job,
        "base-model",
        "model=base",
        f"data_dir={job.output / 'real'}",
        "model.dropout=0.2",
        "optimizer.warmup_steps=300",
        "tokens_per_update=8000",
        "max_tokens=8000",
        "compile=false",
        f"max_updates={job.model_updates}",
    )
    native = job.output / "runs" / "base-model" / "checkpoints/latest"
    folders = {"native": str(native)}
    for name, quantization in (("ctranslate2", "float16"), ("huggingface", "float32")):
        folders[name] = str(job.output / "exports" / name)
        with contextlib.suppress(PartError):  # the engine then reports that the model is missing
            run_nmt(
                "export",
                f"model_dir={native}",
                f"output={folders[name]}",
                f"format={name}",
                f"quantization={quantization}",
            )
    return folders


def measure_bleu(job: Job) -> dict[str, Any]:
    """Train the recipe of Multi30k from start to end; score its test set in both dtypes."""
    from nmt.evaluate import bleu

    start_seconds = time.perf_counter()
    experiment = "experiment=multi30k_quick"
    data_dir = job.output / "real"
    run_dir = job.output / "runs" / "recipe"
    shutil.rmtree(run_dir, ignore_errors=True)
    settings = [experiment, f"data_dir={data_dir}", f"run_dir={run_dir}", "compile=false"]
    settings += [f"device={job.device}", "tracker=[]", f"max_updates={job.bleu_updates}"]
    if job.is_rehearsal:
        settings += ["checkpoint_every_updates=1", "average_last=2", "keep_last=2"]
    run_nmt("train", *settings, *job.model_settings)
    figures = {"training_seconds": time.perf_counter() - start_seconds}
    run_nmt("average", f"run_dir={run_dir}")
    for dtype in ("float32", "bfloat16"):
        output = job.output / f"test.{dtype}"
        output.unlink(missing_ok=True)
        run_nmt(
            "translate",
            experiment,
            f"model_dir={run_dir}",
            f"input={data_dir / 'test.src'}",
            f"output={output}",
            f"device={job.device}",
            f"dtype={dtype}",
        )
        figures[dtype] = bleu(read_lines(output), [read_lines(data_dir / "test.tgt")])
    return figures


PARTS: dict[str, tuple[Part, int]] = {  # most important first, with limits in seconds
    "machine": (inspect_machine, 30),
    "data": (preprocess, 60),
    "tests": (run_tests, 120),
    "big_plain": (partial(measure_training, model="big", compiled=False), 60),
    "base_plain": (partial(measure_training, model="base", compiled=False), 45),
    "precision": (compare_precision, 60),
    "several_devices": (compare_devices, 60),
    "big_compiled": (partial(measure_training, model="big", compiled=True), 150),
    "base_compiled": (partial(measure_training, model="base", compiled=True), 120),
    "translation": (compare_translation, TRANSLATION_SECONDS),
    "bleu": (measure_bleu, 120),
}
