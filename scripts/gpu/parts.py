"""The parts of scripts/gpu.py. Each is a function that returns figures or raises `PartError`."""

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
TRANSLATION_SECONDS = 180
ENGINES = {  # driver, format of the model, dtype
    "nmt-float32": ("translate_nmt.py", "native", "float32"),
    "nmt-bfloat16": ("translate_nmt.py", "native", "bfloat16"),
    "ctranslate2-float16": ("translate_ctranslate2.py", "ctranslate2", "float16"),
    "transformers-bfloat16": ("translate_transformers.py", "huggingface", "bfloat16"),
}


class PartError(Exception):
    """A part failed, or its figures are wrong; the message has one line."""


class PartSkipped(PartError):
    """A part does not apply to this machine."""


@dataclass(frozen=True)
class Job:
    """Folders, device and sizes of all parts; a rehearsal changes the device and the sizes."""

    output: Path
    text_dir: Path
    device: str = "cuda"
    num_devices: int = 1
    # random text to measure training speed, with a vocabulary as large as WMT's
    num_pairs: int = 40_000
    num_words: int = 40_000
    vocab_size: int = 37_000
    # training speed
    speed_updates: int = 120
    log_every: int = 10
    update_tokens: int = 25_000
    # loss curves in bfloat16 and float32
    curve_updates: int = 300
    # translation speed
    model_updates: int = 300
    num_lines: int = 2_000
    turns: int = 3
    # the Multi30k recipe
    bleu_updates: int = 2_400

    @property
    def is_rehearsal(self) -> bool:
        """Whether all parts run on the CPU, at a tiny size."""
        return self.device == "cpu"

    @property
    def model_settings(self) -> list[str]:
        """Settings that make any model tiny in a rehearsal, otherwise none."""
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
PartFunction = Callable[[Job], dict[str, Any]]


# --- helpers


def run_nmt(name: str, settings: list[str]) -> None:
    """Run `nmt-NAME` in a fork of this process, which has imported everything."""
    from nmt.cli.commands import COMMANDS
    from nmt.cli.main import main

    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        with exiting():
            os._exit(main(COMMANDS[name], settings))
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status:
        raise PartError(f"nmt-{name} ended with exit status {status}")


@contextlib.contextmanager
def exiting() -> Iterator[None]:
    """End this process with status 1 after the block, and print the traceback of an error."""
    try:
        yield
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def train(job: Job, name: str, settings: list[str]) -> list[dict[str, Any]]:
    """Train in the run folder `name`; return the logged metrics of its updates."""
    run_dir = job.output / "runs" / name
    shutil.rmtree(run_dir, ignore_errors=True)  # of an earlier run of this script
    folders = [f"run_dir={run_dir}", f"device={job.device}"]
    run_nmt("train", [*folders, *NO_VALIDATION, *job.model_settings, *settings])
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if "nll" in record]


def speed_figures(records: list[dict[str, Any]]) -> dict[str, float]:
    """Return median speeds over the second half of a run, after compilation, and peak memory."""
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
    """Return versions and the GPU; check that it multiplies matrices of integers exactly."""
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
    """Preprocess the real text, and random text with a large vocabulary; return the seconds."""
    vocab_size = f"tokenizer.vocab_size={job.vocab_size}"
    real_settings = ["experiment=multi30k_quick", *find_text(job.text_dir)]
    if job.is_rehearsal:
        real_settings.append(vocab_size)
    random_settings = [vocab_size, *write_random_text(job)]
    figures = {}
    for name, settings in (("real", real_settings), ("random", random_settings)):
        start_seconds = time.perf_counter()
        data_dir = f"data_dir={job.output / name}"
        run_nmt("preprocess", [*settings, "data.tgt_lang=de", data_dir])
        figures[f"{name}_seconds"] = time.perf_counter() - start_seconds
    return figures


def find_text(folder: Path) -> list[str]:
    """Return settings that name the text files of a folder."""
    settings = []
    for split, names in SPLITS.items():
        for side, lang in (("src", "en"), ("tgt", "de")):
            paths: list[Path] = []
            for name in names:
                paths += sorted(folder.glob(f"{name}.{lang}")) + [*folder.glob(f"{name}.{lang}.gz")]
            if not paths:
                raise PartError(f"{folder} has no {names[0]}.{lang}; give text=FOLDER")
            settings.append(f"data.{split}.{side}={paths[0]}")
    return settings


def write_random_text(job: Job) -> list[str]:
    """Write sentences of random words; return settings that name the files.

    Lengths are distributed as in WMT, with a mean of 29 tokens a side.
    """
    rng = random.Random(1)
    letters = itertools.product("bcdfghjklmnprstvwz", "aeiou", ["", "n", "r", "s", "t"])
    syllables = ["".join(syllable) for syllable in letters]
    word_weights = ((rank + 3) ** -0.9 for rank in range(job.num_words))  # Zipf's law
    cumulative_weights = list(itertools.accumulate(word_weights))
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
                    sentence = rng.choices(vocabulary, cum_weights=cumulative_weights, k=length)
                    file.write(" ".join(sentence) + "\n")
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
    num_passed = re.search(r"(\d+) passed", result.stdout)
    if result.returncode or num_passed is None:
        failed_tests = re.findall(r"^FAILED \S+::(\S+)", result.stdout, re.MULTILINE)
        if failed_tests:
            raise PartError(f"failed: {', '.join(failed_tests)}")
        last_line = (result.stdout + result.stderr).strip().split("\n")[-1]
        raise PartError(f"pytest: {last_line}")
    return {"passed": int(num_passed[1])}


def measure_training(job: Job, *, model: str, compiled: bool) -> dict[str, Any]:
    """Train in bfloat16 with one batch an update; return speed, utilization and memory."""
    compile_setting = "false"
    if compiled:
        # null compiles by layer, but nothing on a CPU
        compile_setting = "true" if job.is_rehearsal else "null"
    settings = [
        f"model={model}",
        f"data_dir={job.output / 'random'}",
        f"compile={compile_setting}",
        "dtype=bfloat16",
        f"tokens_per_update={job.update_tokens}",
        f"max_tokens={job.update_tokens}",
        f"max_updates={job.speed_updates}",
        f"log_every_updates={job.log_every}",
    ]
    records = train(job, f"{model}-{compiled}", settings)
    if len(records) != job.speed_updates // job.log_every:
        raise PartError(f"{len(records)} lines of metrics")
    # a miscompiled graph may return a gradient of 0
    if not all(record["gradient_norm"] > 0 for record in records):
        raise PartError("the gradient is 0 or not a number")
    return speed_figures(records)


def compare_precision(job: Job) -> dict[str, Any]:
    """Compare losses in bfloat16 and float32.

    They may differ by 1 %, or by as much as float32 with another seed differs.
    """
    shared_settings = [
        "experiment=multi30k_quick",
        f"data_dir={job.output / 'real'}",
        "compile=false",
        "optimizer.warmup_steps=100",
        "tokens_per_update=4000",
        "max_tokens=4000",
        f"max_updates={job.curve_updates}",
        "log_every_updates=1",
    ]
    runs = {
        "float32": ["dtype=float32", "seed=1"],
        "bfloat16": ["dtype=bfloat16", "seed=1"],
        "other_seed": ["dtype=float32", "seed=2"],
    }
    curves = {}
    final_losses = {}
    for name, settings in runs.items():
        records = train(job, f"curve-{name}", [*shared_settings, *settings])
        curves[name] = [record["nll"] for record in records]
        final_losses[name] = statistics.fmean(curves[name][-100:])
    loss = final_losses["float32"]
    gap = abs(final_losses["bfloat16"] - loss)
    limit = max(abs(final_losses["other_seed"] - loss), 0.01 * loss)
    if not gap <= limit:  # also if a loss is not a number
        raise PartError(f"bfloat16 is {gap:.4f} nats from float32, and {limit:.4f} are allowed")
    return {**final_losses, "gap": gap, "limit": limit, "curves": curves}


def compare_devices(job: Job) -> dict[str, Any]:
    """Compare losses on all devices, connected by NCCL, with losses on one device."""
    num_devices = 2 if job.is_rehearsal else job.num_devices
    if num_devices < 2:
        raise PartSkipped("there is one device")
    shared_settings = [
        "experiment=multi30k_quick",
        f"data_dir={job.output / 'real'}",
        "optimizer.name=adam",  # Muon does not work with sharding=full
        "dtype=float32",
        "compile=false",
        "model.dropout=0",
        "tokens_per_update=8000",
        "max_tokens=2000",
        "max_updates=8",
        "log_every_updates=1",
        "num_threads=1",
    ]

    def train_on(devices: int, sharding: str) -> list[dict[str, Any]]:
        settings = [*shared_settings, f"devices={devices}", f"sharding={sharding}"]
        return train(job, f"devices-{devices}-{sharding}", settings)

    single_records = train_on(1, "none")
    replicated_records = train_on(num_devices, "none")
    sharded_records = train_on(num_devices, "full")
    max_difference = 0.0
    for records in (replicated_records, sharded_records):
        for record, single in zip(records, single_records, strict=True):
            difference = abs(record["loss"] - single["loss"]) / single["loss"]
            max_difference = max(max_difference, difference)
    if not max_difference < 1e-3:
        raise PartError(
            f"losses on {num_devices} devices differ by {max_difference:.1e} from one device"
        )
    figures = {"devices": num_devices, "largest_difference": max_difference}
    return figures | speed_figures(replicated_records)


def compare_translation(job: Job) -> dict[str, Any]:
    """Train base briefly, and translate with beam 4; nmt and other engines take turns."""
    sys.path.insert(0, str(ROOT / "scripts" / "benchmark"))
    from workers import Worker, take_turns

    from nmt.config import SearchConfig

    # the part fails when its time is over, so no round of turns begins after 60 % of it
    deadline = time.perf_counter() + 0.6 * TRANSLATION_SECONDS
    folders = export_base(job)
    data_dir = job.output / "real"
    lines = read_lines(data_dir / "test.src") + read_lines(data_dir / "valid.src")
    lines = list(itertools.islice(itertools.cycle(lines), job.num_lines))
    shared_job = {
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
        engine_job = shared_job | {"options": {"format": model_format}, "dtype": dtype}
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
    required = {"nmt-float32"} if job.is_rehearsal else {"nmt-float32", "nmt-bfloat16"}
    if not required <= set(rates):  # not every CPU has bfloat16
        reasons = "; ".join(f"{name}: {reason}" for name, reason in failures.items())
        raise PartError(f"{reasons}; tokens per second of other engines: {rates}")
    return {"tokens_per_second": rates, "memory_bytes": memory_bytes, "failed": failures}


def export_base(job: Job) -> dict[str, str]:
    """Train base briefly and export it; return the folder of each format."""
    settings = [
        "model=base",
        f"data_dir={job.output / 'real'}",
        "model.norm=pre",  # a post-norm model does not learn to end its sentences this fast
        "model.dropout=0.2",
        "optimizer.schedule=cosine",
        "optimizer.peak_learning_rate=0.001",
        "optimizer.warmup_steps=50",
        "tokens_per_update=8000",
        "max_tokens=8000",
        "compile=false",
        f"max_updates={job.model_updates}",
    ]
    train(job, "base-model", settings)
    native = job.output / "runs" / "base-model" / "checkpoints/latest"
    folders = {"native": str(native)}
    for name, quantization in (("ctranslate2", "float16"), ("huggingface", "float32")):
        folders[name] = str(job.output / "exports" / name)
        settings = [f"format={name}", f"quantization={quantization}", f"output={folders[name]}"]
        with contextlib.suppress(PartError):  # the engine then reports that the model is missing
            run_nmt("export", [f"model_dir={native}", *settings])
    return folders


def measure_bleu(job: Job) -> dict[str, Any]:
    """Train the recipe of Multi30k; return the BLEU of its test set in float32 and bfloat16."""
    from nmt.evaluate import bleu

    start_seconds = time.perf_counter()
    experiment = "experiment=multi30k_quick"
    data_dir = job.output / "real"
    run_dir = job.output / "runs" / "recipe"
    shutil.rmtree(run_dir, ignore_errors=True)
    settings = [experiment, f"data_dir={data_dir}", f"run_dir={run_dir}", "compile=false"]
    settings += [f"device={job.device}", "tracker=[]", f"max_updates={job.bleu_updates}"]
    settings += job.model_settings
    if job.is_rehearsal:
        settings += ["checkpoint_every_updates=1", "average_last=2", "keep_last=2"]
    run_nmt("train", settings)
    figures = {"training_seconds": time.perf_counter() - start_seconds}
    run_nmt("average", [f"run_dir={run_dir}"])
    for dtype in ("float32", "bfloat16"):
        output = job.output / f"test.{dtype}"
        output.unlink(missing_ok=True)
        settings = [experiment, f"model_dir={run_dir}", f"device={job.device}", f"dtype={dtype}"]
        settings += [f"input={data_dir / 'test.src'}", f"output={output}"]
        run_nmt("translate", settings)
        figures[dtype] = bleu(read_lines(output), [read_lines(data_dir / "test.tgt")])
    return figures


# the most important part first; each with its time limit in seconds
PARTS: dict[str, tuple[PartFunction, int]] = {
    "machine": (inspect_machine, 30),
    "data": (preprocess, 60),
    "tests": (run_tests, 240),
    "big_plain": (partial(measure_training, model="big", compiled=False), 60),
    "base_plain": (partial(measure_training, model="base", compiled=False), 45),
    "precision": (compare_precision, 150),
    "several_devices": (compare_devices, 60),
    "base_compiled": (partial(measure_training, model="base", compiled=True), 120),
    "big_compiled": (partial(measure_training, model="big", compiled=True), 150),
    "translation": (compare_translation, TRANSLATION_SECONDS),
    "bleu": (measure_bleu, 240),
}
