"""The comparison of latency: each line is translated by itself, as a user who waits for it."""

from __future__ import annotations

from comparisons import column, measure
from corpus import PreparedCorpus
from engines import TRANSLATE
from models import Exports
from report import Record, Section
from settings import Settings, describe_model

from nmt.config import ModelConfig, SearchConfig

_LATENCY_FORMAT = "{:.1f}".format


def compare_latency(
    name: str,
    model: ModelConfig,
    exports: Exports,
    corpus: PreparedCorpus,
    settings: Settings,
    *,
    beam_size: int,
) -> Section:
    """Translate line by line with every engine in turn; the rates are milliseconds per line."""
    job = {
        "model": describe_model(model),
        "folders": exports.folders,
        "pieces_dir": str(corpus.pieces_dir),
        "lines": corpus.test_lines(settings.latency_lines),
        "warmup_lines": max(settings.latency_lines // 4, 1),
        "beam_size": beam_size,
        "length_exponent": SearchConfig().length_exponent,
        "fixed_length": 0,
        "one_by_one": True,
        "threads": settings.threads,
        "device": settings.device,
        "dtype": settings.dtype,
        "vocab_size": corpus.tokenizer.vocab_size,
    }
    engines = {}
    for engine_name, engine in settings.choose(TRANSLATE).items():
        if engine.options["format"] in exports.folders:
            engines[engine_name] = engine
    folder = settings.cache / "jobs" / f"latency-{name}-{beam_size}"
    limit_job = {"rows": beam_size, "is_training": False, "repeats": settings.limit_repeats}
    measurement = measure(engines, job, limit_job, settings, folder)
    turns = measurement.turns
    seconds_key = f"{settings.clock}_seconds"

    def milliseconds(turn: Record) -> float:
        return float(turn[seconds_key] / turn["sentences"] * 1000)

    search = f"beam {beam_size}" if beam_size > 1 else "greedy"
    return Section(
        title=f"One line, {name}, {search}",
        setting=f"{name}: {model.num_encoder_layers}+{model.num_decoder_layers} layers, d_model "
        f"{model.d_model}; {settings.latency_lines} lines of {corpus.name}, one at a time; "
        f"{settings.device}, {settings.threads} thread(s); {settings.repeats} turns.",
        unit=f"{'CPU ' if settings.device == 'cpu' else ''}ms per line",
        rates={engine: [milliseconds(turn) for turn in turns[engine]] for engine in turns},
        columns={
            "p50 ms": column(turns, lambda turn: percentile(turn, 0.5), _LATENCY_FORMAT),
            "p95 ms": column(turns, lambda turn: percentile(turn, 0.95), _LATENCY_FORMAT),
        },
        baselines={
            "CTranslate2 float32": ["ctranslate2"],
            "CTranslate2 int8": ["ctranslate2-int8"],
        },
        failures=measurement.failures,
        raw=measurement.raw,
        lower_is_better=True,
    )


def percentile(turn: Record, share: float) -> float:
    """Return the wall-clock milliseconds that `share` of the lines of a turn do not exceed."""
    latencies = sorted(turn["milliseconds"])
    return float(latencies[min(int(share * len(latencies)), len(latencies) - 1)])
