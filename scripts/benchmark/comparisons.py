"""The three comparisons of the benchmark: training, translation and start-up.

The engines of one comparison alternate. The limit, which alternates with them, is the rate of the
matrix multiplications of the model's weights, in the fastest library that torch has.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from corpus import PreparedCorpus
from engines import TRAIN, TRANSLATE, Engine, environment_python
from models import Exports
from report import Record, Section, format_number, medians_by_engine
from settings import Settings, describe_model
from workers import Worker, WorkerError, take_turns, worker_environment

from nmt.config import ModelConfig, SearchConfig
from nmt.training.costs import Shape, count_training_flops, source_shapes, target_shapes

LIMIT = "limit"
_OWN_LIMIT = "limit of "  # prefix of an engine that has its own limit
_LIMIT_SENTENCES = 64  # of the batches whose matrix multiplications are the limit of translation
_LIMIT_TRANSLATION_REPEATS = 20
_TOKEN_FORMAT = "{:.1f}".format
_IMPORT_ONLY = "import torch and load the weights"
_IMPORT_TORCH = "import torch"
_TRANSLATE_CODE = """import sys
from nmt import Translator
translator = Translator.load(sys.argv[1], device=sys.argv[2])
print(translator.translate(["A man is riding a bicycle."]))"""
_IMPORT_CODE = "import sys, torch, safetensors.torch; safetensors.torch.load_file(sys.argv[1])"


@dataclass
class Measurement:
    """All turns of one comparison."""

    turns: dict[str, list[Record]]  # by engine
    limits: dict[str, float]  # operations per second of the limit, by engine
    failures: dict[str, str]
    raw: Record


def compare_training(
    name: str, model: ModelConfig, corpus: PreparedCorpus, settings: Settings
) -> Section:
    """Train with every engine in turn; the rates are tokens per second, without padding."""
    job = {
        "data_dir": str(corpus.data_dir),
        "pieces_dir": str(corpus.pieces_dir),
        "batches": str(corpus.write_batches(settings.batch_tokens)),
        "vocab_size": corpus.tokenizer.vocab_size,
        "model": describe_model(model),
        "batch_tokens": settings.batch_tokens,
        "update_tokens": settings.update_tokens,
        "label_smoothing": 0.1,
        "learning_rate": 1e-4,
        "steps": settings.steps,
        "turn_seconds": settings.turn_seconds,
        "warmup_steps": settings.warmup_steps,
        "threads": settings.threads,
        "device": settings.device,
        "dtype": settings.dtype,
    }
    limit_job = {
        "rows": settings.batch_tokens,
        "is_training": True,
        "repeats": settings.limit_repeats,
    }
    folder = settings.cache / "jobs" / f"train-{name}"
    measurement = measure(TRAIN, job, limit_job, settings, folder)
    seconds_key = f"{settings.clock}_seconds"
    lengths = corpus.data.lengths
    flops = count_training_flops(model, corpus.tokenizer.vocab_size, lengths) / int(lengths.sum())

    def rate(turn: Record) -> float:
        return real_tokens(turn) / turn[seconds_key]

    turns = measurement.turns
    columns = {
        "source": column(turns, lambda turn: turn["src_tokens"] / turn[seconds_key]),
        "target": column(turns, lambda turn: turn["tgt_tokens"] / turn[seconds_key]),
        "both, a second by the clock": column(
            turns, lambda turn: real_tokens(turn) / turn["wall_seconds"]
        ),
        "padding": column(
            turns, lambda turn: 1 - real_tokens(turn) / turn["positions"], "{:.0%}".format
        ),
        "peak memory": memory_column(turns),
    }
    shares = {}
    for engine, median in medians_by_engine(turns, rate).items():
        if engine in measurement.limits:
            shares[engine] = f"{flops * median / measurement.limits[engine]:.0%}"
    if shares:
        columns["share of the limit"] = shares
    return Section(
        title=f"Training, {name}",
        setting=f"{name}: {model.num_encoder_layers}+{model.num_decoder_layers} layers, d_model "
        f"{model.d_model}, d_ff {model.d_ff}, {model.num_heads} heads; {corpus.name}, vocabulary "
        f"{corpus.tokenizer.vocab_size:,}; batches of at most {settings.batch_tokens:,} positions "
        f"a side; {settings.dtype}, {settings.device}, {settings.threads} thread(s); "
        f"{settings.repeats} turns of at least {settings.steps} step(s) and "
        f"{settings.turn_seconds:g} CPU seconds. A real token takes {flops / 1e6:,.0f} MFLOP; "
        f"the limit: {describe_limits(measurement.limits)}.",
        unit=f"real source+target tokens a {settings.unit_of_time}",
        rates={engine: [rate(turn) for turn in records] for engine, records in turns.items()},
        columns=columns,
        baselines={"best peer": [engine for engine in turns if TRAIN[engine].baseline]},
        failures=measurement.failures,
        raw=measurement.raw | {"job": job},
    )


def compare_translation(
    model: ModelConfig,
    exports: Exports,
    corpus: PreparedCorpus,
    settings: Settings,
    *,
    beam_size: int,
    fixed_length: int,
) -> Section:
    """Translate with every engine in turn; the rates are target tokens per second.

    With a `fixed_length` above 0, every translation has that many tokens, EOS included.
    """
    length = f"fixed-{fixed_length}" if fixed_length else "real"
    lines = corpus.test_lines(settings.lines)
    job = {
        "model": describe_model(model),
        "folders": exports.folders,
        "pieces_dir": str(corpus.pieces_dir),
        "lines": lines,
        "warmup_lines": settings.lines // 4,
        "beam_size": beam_size,
        "length_exponent": SearchConfig().length_exponent,
        "fixed_length": fixed_length,
        "threads": settings.threads,
        "device": settings.device,
        "dtype": settings.dtype,
        "vocab_size": corpus.tokenizer.vocab_size,
    }
    limit_job = {
        "rows": _LIMIT_SENTENCES * beam_size,
        "is_training": False,
        "repeats": _LIMIT_TRANSLATION_REPEATS,
    }
    engines = {}
    export_failures = {}
    for name, engine in settings.choose(TRANSLATE).items():
        reason = exports.failures.get(engine.options["format"])
        if reason is None:
            engines[name] = engine
        else:
            export_failures[name] = reason
    folder = settings.cache / "jobs" / f"translate-{beam_size}-{length}"
    measurement = measure(engines, job, limit_job, settings, folder)
    seconds_key = f"{settings.clock}_seconds"

    def rate(turn: Record) -> float:
        return turn["tgt_tokens"] / turn[seconds_key]

    turns = measurement.turns
    columns = {
        "sentences": column(turns, lambda turn: turn["sentences"] / turn[seconds_key]),
        "tokens a sentence": column(
            turns, lambda turn: turn["tgt_tokens"] / turn["sentences"], _TOKEN_FORMAT
        ),
        "tokens a second by the clock": column(
            turns, lambda turn: turn["tgt_tokens"] / turn["wall_seconds"]
        ),
        "peak memory": memory_column(turns),
    }
    if measurement.limits:
        shares = {}
        for engine, median in medians_by_engine(turns, rate).items():
            flops = translation_flops(model, corpus, turns[engine], lines, beam_size)
            shares[engine] = f"{median * flops / measurement.limits[engine]:.0%}"
        columns["share of the limit"] = shares
    baselines: dict[str, list[str]] = {}
    for name, engine in TRANSLATE.items():
        if engine.baseline and name in turns:
            baselines.setdefault(engine.baseline, []).append(name)
    search = f"beam {beam_size}" if beam_size > 1 else "greedy"
    length_text = f"exactly {fixed_length} tokens each" if fixed_length else "free lengths"
    return Section(
        title=f"Translation, {search}, {length} length",
        setting=f"{len(lines)} lines of {corpus.name}, {length_text}; {settings.device}, "
        f"{settings.threads} thread(s); {settings.repeats} turns.",
        unit=f"target tokens a {settings.unit_of_time}",
        rates={engine: [rate(turn) for turn in records] for engine, records in turns.items()},
        columns=columns,
        baselines=baselines,
        failures=export_failures | measurement.failures,
        raw=measurement.raw,
    )


def compare_startup(model_dir: Path, settings: Settings) -> Section:
    """Time new processes that translate one line, or only import torch and load the weights."""
    command = [str(Path(sys.executable).parent / "nmt-translate"), f"model_dir={model_dir}"]
    command += [f"device={settings.device}", f"num_threads={settings.threads}"]
    python = [sys.executable, "-c"]
    commands = {
        _IMPORT_TORCH: [*python, "import torch"],
        _IMPORT_ONLY: [*python, _IMPORT_CODE, str(model_dir / "model.safetensors")],
        "nmt-translate": command,
        "nmt-translate backend=auto": [*command, "backend=auto"],
        "Python, Translator.load": [*python, _TRANSLATE_CODE, str(model_dir), settings.device],
    }
    turns: dict[str, list[Record]] = {name: [] for name in commands}
    for turn_number in range(settings.repeats + 1):
        for name, command in commands.items():
            turn = run_timed(command, settings.threads)
            if turn_number > 0:  # the first round only fills the disk cache
                turns[name].append(turn)
    wall_medians = medians_by_engine(turns, lambda turn: turn["wall_seconds"])
    cpu_medians = medians_by_engine(turns, lambda turn: turn["cpu_seconds"])
    ratios = {}
    torch_shares = {}
    for name, seconds in wall_medians.items():
        ratios[name] = f"{seconds / wall_medians[_IMPORT_ONLY]:.2f}"
        torch_shares[name] = f"{cpu_medians[_IMPORT_TORCH] / cpu_medians[name]:.0%}"
    return Section(
        title="Start-up, one line",
        setting=f"A new process, files in the disk cache; {settings.repeats} turns.",
        unit="CPU seconds",
        rates={name: [turn["cpu_seconds"] for turn in turns[name]] for name in commands},
        columns={
            "seconds by the clock": column(turns, lambda turn: turn["wall_seconds"]),
            "ratio of these": ratios,
            "share of import torch": torch_shares,
        },
        baselines={"torch and weights": [_IMPORT_ONLY]},
        lower_is_better=True,
        raw={"turns": turns, "commands": commands},
    )


def measure(
    engines: dict[str, Engine], job: Record, limit_job: Record, settings: Settings, folder: Path
) -> Measurement:
    """Run the requested engines and the limit in turn; install missing environments first."""
    python = Path(sys.executable)
    workers = [Worker(LIMIT, python, "limit.py", job | limit_job, folder)]
    failures = {}
    for name, engine in settings.choose(engines).items():
        try:
            engine_python = environment_python(
                engine.environment, settings.cache, install=not settings.here
            )
        except WorkerError as error:
            failures[name] = str(error)
            settings.say(f"  {name}: {error}")
            continue
        engine_job = job | {"options": engine.options}
        if engine.own_limit:
            limit_name = _OWN_LIMIT + name
            workers.append(Worker(limit_name, python, "limit.py", engine_job | limit_job, folder))
        workers.append(Worker(name, engine_python, engine.driver, engine_job, folder))
    versions, turns, stopped = take_turns(workers, settings.repeats, settings.say)
    rate_key = "flops_per_cpu_second" if settings.clock == "cpu" else "flops_per_second"
    limits, limit_turns = take_limits(turns, rate_key)
    commands = {worker.name: worker.command for worker in workers}
    raw = {"versions": versions, "turns": turns, "limits": limit_turns, "commands": commands}
    return Measurement(turns, limits, failures | stopped, raw)


def take_limits(
    turns: dict[str, list[Record]], rate_key: str
) -> tuple[dict[str, float], dict[str, list[Record]]]:
    """Remove the turns of all limits from `turns`, and return them as the second value.

    The first is the median rate of each engine's limit: its own limit, or the common one.
    """
    limit_turns = {name: turns.pop(name) for name in list(turns) if name.startswith(LIMIT)}
    medians = medians_by_engine(limit_turns, lambda turn: turn[rate_key])
    limits = {}
    for name in turns:
        rate = medians.get(_OWN_LIMIT + name, medians.get(LIMIT))
        if rate is not None:
            limits[name] = rate
    return limits, limit_turns


def describe_limits(limits: dict[str, float]) -> str:
    """Say each different limit once, with one engine that has it."""
    engines = {f"{rate / 1e9:,.1f} GFLOP a second": engine for engine, rate in limits.items()}
    return "; ".join(f"{rate} ({engine})" for rate, engine in engines.items()) or "not measured"


def real_tokens(turn: Record) -> float:
    """Return the number of source and target tokens of a turn, EOS included, without padding."""
    return float(turn["src_tokens"] + turn["tgt_tokens"])


def column(
    turns: dict[str, list[Record]],
    figure: Callable[[Record], float],
    format_figure: Callable[[float], str] = format_number,
) -> dict[str, str]:
    """Return a cell for each engine: the median of a figure over its turns."""
    medians = medians_by_engine(turns, figure)
    return {name: format_figure(median) for name, median in medians.items()}


def memory_column(turns: dict[str, list[Record]]) -> dict[str, str]:
    """Return the cells of the column for peak memory."""
    return column(turns, lambda turn: turn["peak_bytes"] / 1e9, "{:.2f} GB".format)


def translation_flops(
    model: ModelConfig,
    corpus: PreparedCorpus,
    turns: list[Record],
    lines: list[str],
    beam_size: int,
) -> float:
    """Return the operations of matrix multiplications with weights, per target token.

    The encoder runs once for a sentence, the decoder once for each hypothesis of the beam.
    """
    src_tokens = sum(len(ids) + 1 for ids in corpus.tokenizer.encode_batch(lines))
    tgt_tokens = statistics.fmean(turn["tgt_tokens"] for turn in turns)
    src_weights = num_weights(source_shapes(model))
    tgt_weights = num_weights(target_shapes(model, corpus.tokenizer.vocab_size))
    return 2.0 * (src_tokens / tgt_tokens * src_weights + beam_size * tgt_weights)


def num_weights(shapes: dict[Shape, int]) -> int:
    """Return the number of weights; `shapes` counts the matrices of each shape."""
    return sum(rows * columns * count for (rows, columns), count in shapes.items())


def run_timed(command: list[str], threads: int) -> Record:
    """Run a command with one line on stdin; return its wall-clock and CPU seconds."""
    start_seconds = time.perf_counter()
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=worker_environment(threads, is_ours=True),
    )
    assert process.stdin is not None
    assert process.stderr is not None
    process.stdin.write(b"A man is riding a bicycle.\n")
    process.stdin.close()
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{command[0]} failed: {errors.decode(errors='replace')}")
    wall_seconds = time.perf_counter() - start_seconds
    return {"wall_seconds": wall_seconds, "cpu_seconds": usage.ru_utime + usage.ru_stime}
