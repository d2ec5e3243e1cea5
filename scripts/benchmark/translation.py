"""The translation benchmark: every engine translates the same lines with the same weights."""

from __future__ import annotations

from corpus import PreparedCorpus
from engines import TRANSLATE
from models import Exports
from players import take_turns
from report import Record, Section, median_of, number
from roster import gather, take_limits
from settings import Settings, describe

from nmt.config import ModelConfig, SearchConfig
from nmt.training.costs import source_shapes, target_shapes

_SENTENCES = 64  # in the batches whose products make the limit


def compare(
    model: ModelConfig,
    exports: Exports,
    corpus: PreparedCorpus,
    settings: Settings,
    *,
    beam_size: int,
    fixed_length: int,
) -> Section:
    """Translate with every engine in turn; return target tokens a processor second.

    `fixed_length` makes every translation so many tokens, EOS among them; 0 leaves it to the model.
    """
    kind = f"fixed-{fixed_length}" if fixed_length else "real"
    folder = settings.cache_dir / "jobs" / f"translate-{beam_size}-{kind}"
    job = make_job(exports, corpus, settings, beam_size=beam_size, fixed_length=fixed_length)
    job["model"] = describe(model)
    limit_job = {"rows": _SENTENCES * beam_size, "is_training": False, "times": 20}
    able = {n: e for n, e in TRANSLATE.items() if e.options["folder"] not in exports.reasons}
    players, reasons = gather(able, job, settings, folder, limit=limit_job)
    for name in settings.choose(TRANSLATE):
        if name not in able:
            reasons[name] = exports.reasons[TRANSLATE[name].options["folder"]]
    facts, turns, failed = take_turns(players, settings.repeats, settings.say)
    limits, limit_turns = take_limits(turns, settings.limit_key)
    key = f"{settings.clock}_seconds"
    rates = {n: [t["tgt_tokens"] / t[key] for t in some] for n, some in turns.items()}
    length = "exactly " + str(fixed_length) if fixed_length else "as many as the model wants"
    search = f"beam {beam_size}" if beam_size > 1 else "greedy"
    section = Section(
        title=f"Translation, {search}, {kind} length",
        setting=f"{len(job['lines'])} lines of {corpus.source.name}, {length} tokens each; "
        f"{settings.device}, {settings.threads} thread(s); {settings.repeats} turns.",
        unit=f"target tokens a {'CPU ' if settings.clock == 'cpu' else ''}second",
        rates=rates,
        columns=_columns(turns, key),
        bars={
            bar: [name for name in rates if TRANSLATE[name].bar == bar]
            for bar in dict.fromkeys(engine.bar for engine in TRANSLATE.values() if engine.bar)
        },
        reasons=reasons | failed,
        raw={"versions": facts, "turns": turns, "limits": limit_turns},
    )
    if limits:
        medians = median_of(turns, lambda t: t["tgt_tokens"] / t[key])
        flops = {
            n: flops_a_token(model, corpus, turns[n], job["lines"], beam_size) for n in medians
        }
        shares = {n: rate * flops[n] / limits[n] for n, rate in medians.items() if n in limits}
        section.columns["share of the limit"] = {n: f"{share:.0%}" for n, share in shares.items()}
    section.raw["commands"] = {p.name: p.command for p in players}
    return section


def make_job(
    exports: Exports,
    corpus: PreparedCorpus,
    settings: Settings,
    *,
    beam_size: int,
    fixed_length: int,
) -> Record:
    """Return what every driver is told."""
    return {
        "folders": exports.folders,
        "pieces_dir": str(corpus.pieces_dir),
        "lines": corpus.test_lines(settings.num_lines),
        "warmup_lines": settings.num_lines // 4,
        "beam_size": beam_size,
        "length_exponent": SearchConfig().length_exponent,
        "fixed_length": fixed_length,
        "threads": settings.threads,
        "device": settings.device,
        "dtype": settings.dtype,
        "vocab_size": corpus.tokenizer.vocab_size,
    }


def flops_a_token(
    model: ModelConfig,
    corpus: PreparedCorpus,
    turns: list[Record],
    lines: list[str],
    beam_size: int,
) -> float:
    """Return the operations of weight products for each target token that comes out: those of the
    source once, those of the target once a beam.
    """
    src_tokens = sum(len(ids) + 1 for ids in corpus.tokenizer.encode_batch(lines))
    vocab_size = corpus.tokenizer.vocab_size
    src_weights = sum(d * e * n for (d, e), n in source_shapes(model).items())
    tgt_weights = sum(d * e * n for (d, e), n in target_shapes(model, vocab_size).items())
    tgt_tokens = sum(turn["tgt_tokens"] for turn in turns) / len(turns)
    return 2.0 * (src_tokens / tgt_tokens * src_weights + beam_size * tgt_weights)


def _columns(turns: dict[str, list[Record]], key: str) -> dict[str, dict[str, str]]:
    def column(figure, form) -> dict[str, str]:
        return {name: form(value) for name, value in median_of(turns, figure).items()}

    return {
        "sentences": column(lambda t: t["sentences"] / t[key], number),
        "tokens a sentence": column(lambda t: t["tgt_tokens"] / t["sentences"], "{:.1f}".format),
        "tokens a second by the clock": column(
            lambda t: t["tgt_tokens"] / t["wall_seconds"], number
        ),
        "peak memory": column(lambda t: t["peak_bytes"] / 1e9, "{:.2f} GB".format),
    }
