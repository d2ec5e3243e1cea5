"""The training benchmark: the same model, corpus and batch size for every toolkit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from corpus import PreparedCorpus
from engines import TRAIN
from players import take_turns
from report import Record, Section, median_of, number
from roster import gather, take_limits
from settings import Settings, describe

from nmt.config import ModelConfig
from nmt.training.costs import training_flops


def compare(name: str, model: ModelConfig, corpus: PreparedCorpus, settings: Settings) -> Section:
    """Train a little with every engine in turn; return real tokens a processor second."""
    folder = settings.cache_dir / "jobs" / f"train-{name}"
    job = make_job(model, corpus, settings)
    limit_job = {"rows": settings.batch_tokens, "is_training": True, "times": settings.limit_times}
    players, reasons = gather(TRAIN, job, settings, folder, limit=limit_job)
    facts, turns, failed = take_turns(players, settings.repeats, settings.say)
    limits, limit_turns = take_limits(turns, settings.limit_key)
    clock = settings.clock
    rates = {n: [real(t) / t[f"{clock}_seconds"] for t in some] for n, some in turns.items()}
    flops = flops_a_token(model, corpus)
    section = Section(
        title=f"Training, {name}",
        setting=_setting(name, model, corpus, settings, limits, flops),
        unit=f"real source+target tokens a {'CPU ' if clock == 'cpu' else ''}second",
        rates=rates,
        columns=_columns(turns, clock, flops, limits),
        bars={"best peer": [name for name in rates if TRAIN[name].bar]},
        reasons=reasons | failed,
        raw={"versions": facts, "turns": turns, "limits": limit_turns, "job": job},
    )
    section.raw["commands"] = {p.name: p.command for p in players}
    return section


def make_job(model: ModelConfig, corpus: PreparedCorpus, settings: Settings) -> Record:
    """Return what every driver is told."""
    return {
        "data_dir": str(corpus.data_dir),
        "pieces_dir": str(corpus.pieces_dir),
        "batches": str(corpus.batches(settings.batch_tokens)),
        "vocab_size": corpus.tokenizer.vocab_size,
        "model": describe(model),
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
        "options": {},
    }


def real(turn: Record) -> float:
    """Count the real tokens of a turn, EOS included."""
    return float(turn["src_tokens"] + turn["tgt_tokens"])


def flops_a_token(model: ModelConfig, corpus: PreparedCorpus) -> float:
    """Return the operations of a training step for each real token, the mean over the corpus."""
    lengths = corpus.data.lengths
    return training_flops(model, corpus.tokenizer.vocab_size, lengths) / int(lengths.sum())


def _columns(
    turns: dict[str, list[Record]], clock: str, flops: float, limits: dict[str, float]
) -> dict[str, dict[str, str]]:
    def column(figure: Callable[[Record], float], form: Callable[[float], str]) -> Any:
        return {name: form(value) for name, value in median_of(turns, figure).items()}

    key = f"{clock}_seconds"
    columns = {
        "source": column(lambda t: t["src_tokens"] / t[key], number),
        "target": column(lambda t: t["tgt_tokens"] / t[key], number),
        "both, a second by the clock": column(lambda t: real(t) / t["wall_seconds"], number),
        "padding": column(lambda t: 1 - real(t) / t["positions"], "{:.0%}".format),
        "peak memory": column(lambda t: t["peak_bytes"] / 1e9, "{:.2f} GB".format),
    }
    rates = median_of(turns, lambda t: flops * real(t) / t[key])
    shares = {name: f"{rates[name] / limits[name]:.0%}" for name in rates if name in limits}
    return columns | ({"share of the limit": shares} if shares else {})


def _setting(
    name: str,
    model: ModelConfig,
    corpus: PreparedCorpus,
    settings: Settings,
    limits: dict[str, float],
    flops: float,
) -> str:
    shown = {f"{rate / 1e9:,.1f} GFLOP a second": engine for engine, rate in limits.items()}
    rate = "; ".join(f"{rate} ({engine})" for rate, engine in shown.items()) or "not measured"
    return (
        f"{name}: {model.num_encoder_layers}+{model.num_decoder_layers} layers, d_model "
        f"{model.d_model}, d_ff {model.d_ff}, {model.num_heads} heads; {corpus.source.name}, "
        f"vocabulary {corpus.tokenizer.vocab_size:,}; batches of at most {settings.batch_tokens:,} "
        f"positions a side; {settings.dtype}, {settings.device}, {settings.threads} thread(s); "
        f"{settings.repeats} turns of at least {settings.steps} step(s) and "
        f"{settings.turn_seconds:g} CPU seconds. A real token is "
        f"{flops / 1e6:,.0f} MFLOP; the limit, products of these shapes alone, {rate}."
    )
