"""The report of a run: one HTML page with its settings in words, data, curves, scores, worst and
best sentences with their attention, and what was slow.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sacrebleu.metrics.chrf import CHRF

from nmt import checkpoint, evaluate
from nmt.config import DEFAULT_DATA_DIR, VisualizeConfig, resolve
from nmt.data.binary import read_held_out, read_meta
from nmt.data.languages import tag_lines
from nmt.errors import ConfigError
from nmt.preprocess.report import report_page as corpus_page
from nmt.runtime.distributed import set_num_threads
from nmt.runtime.pages import page_templates
from nmt.translate.translator import Translator
from nmt.visualize.attention_page import component
from nmt.visualize.runs import CURVES, Records, read_metrics, read_report, read_settings, series

log = logging.getLogger(__name__)
_NUM_WORST, _NUM_BEST = 8, 4  # sentences that are shown
_NUM_BINS = 5  # of lengths
_WIDTH, _HEIGHT, _LEFT, _TOP = 448, 146, 64, 8  # of the plot in a chart of 520 x 190 units


def data_page(config: VisualizeConfig) -> str:
    """Return the report of a data folder, as nmt-preprocess writes it."""
    return corpus_page(read_report(config.data_dir))


def report_page(config: VisualizeConfig) -> str:
    """Return the report of a run; a test set is translated for it. Text is set as text."""
    if len(config.run_dir) != 1:
        raise ConfigError("what=report is of one run; what=run compares several")
    run_dir = resolve(config.run_dir[0])
    records = read_metrics(run_dir)
    trained = read_settings(run_dir)
    places = [resolve(config.data_dir), resolve(trained["data_dir"])]
    if config.data_dir == DEFAULT_DATA_DIR:  # not asked for
        places.reverse()
    data_dir = next((place for place in places if _is_made_for(run_dir, place)), places[0])
    has_data = _is_made_for(run_dir, data_dir)
    test = None
    if has_data:
        set_num_threads(config.num_threads)
        test = translate_test(run_dir, data_dir, config)
    else:
        text = "there is no data folder %s with the run's tokenizer, so the page has no test set"
        log.info(text, data_dir)
    pairs = [] if test is None else test.attention
    template = page_templates(Path(__file__).parent).get_template("run_report.html.j2")
    return template.render(
        name=run_dir.name,
        newest=records[-1]["update"],
        in_words=in_words(trained),
        data=read_report(str(data_dir)) if has_data else None,
        charts=[chart for title, keys in CURVES.items() if (chart := curve(records, title, keys))],
        best=best_figures(records),
        test=test,
        slow=what_was_slow(records),
        pairs=[pair.as_json() for pair in pairs],
        titles=[f"{row.source} → {row.hypothesis}" for row in (test.shown if test else [])],
        component_js=component("attention.js"),
        component_css=component("attention.css"),
    )


def in_words(trained: dict[str, Any]) -> list[str]:
    """Describe the settings of a run in sentences."""
    model, optimizer = trained["model"], trained["optimizer"]
    peak = (
        optimizer.get("peak_learning_rate")
        or (model["d_model"] * optimizer["warmup_steps"]) ** -0.5
    )
    where = {"post": "after the residual sums", "pre": "before the sub-layers"}[model["norm"]]
    sentences = [
        f"A Transformer of {model['num_encoder_layers']} encoder and "
        f"{model['num_decoder_layers']} decoder layers, d_model {model['d_model']}, d_ff "
        f"{model['d_ff']}, {model['num_heads']} heads; "
        f"{model.get('norm_layer', 'layer')} norm {where}; "
        f"{model['positions']} positions; dropout {model['dropout']:g}.",
        f"{optimizer['name']} with beta {optimizer['beta1']:g} and {optimizer['beta2']:g}; "
        f"learning rate {optimizer['schedule']}: up to {peak:.2e} during "
        f"{optimizer['warmup_steps']} updates; label smoothing {trained['label_smoothing']:g}.",
        f"{trained['tokens_per_update']:,} target tokens an update, at most "
        f"{trained['max_updates']:,} updates; seed {trained['seed']}.",
    ]
    if trained.get("init_from"):
        sentences.append(f"It began with the weights of {trained['init_from']}.")
    return sentences


def best_figures(records: Records) -> list[tuple[str, float, int]]:
    """Return the best validation loss, perplexity and BLEU, and the updates they are of."""
    found = []
    names = {"valid_loss": "loss", "valid_perplexity": "perplexity", "valid_bleu": "BLEU"}
    for key, name in names.items():
        updates, values = series(records, key)
        if values:
            value = max(values) if name == "BLEU" else min(values)
            found.append((f"best validation {name}", value, updates[values.index(value)]))
    return found


# --- curves


@dataclass(frozen=True)
class Chart:
    """Curves in a plot of the units of report pages."""

    title: str
    lines: list[tuple[str, str]]  # name, and points as SVG has them
    x_ticks: list[tuple[float, str]]  # place and label
    y_ticks: list[tuple[float, str]]


def curve(records: Records, title: str, keys: dict[str, str]) -> Chart | None:
    """Return the chart of some figures over updates; None where the run has none of them."""
    found = {name: series(records, key) for key, name in keys.items()}
    found = {name: line for name, line in found.items() if line[0]}
    if not found:
        return None
    last = max(updates[-1] for updates, _ in found.values())
    settled = [v for _, values in found.values() for v in values[len(values) // 10 :]]
    highest = max(settled) or 1.0  # of the first values, which may be huge, only a part shows

    def point(update: float, value: float) -> tuple[float, float]:
        share = min(value, highest) / highest
        return _LEFT + _WIDTH * update / last, _TOP + _HEIGHT * (1 - max(share, 0))

    lines = [
        (name, " ".join("{:.1f},{:.1f}".format(*point(u, v)) for u, v in zip(*line, strict=True)))
        for name, line in found.items()
    ]
    x_ticks = [(point(value, 0)[0], f"{value:,.0f}") for value in round_values(last, 6)]
    y_ticks = [(point(0, value)[1], f"{value:g}") for value in round_values(highest, 4)]
    return Chart(title, lines, x_ticks, y_ticks)


def round_values(end: float, most: int) -> list[float]:
    """Return at most `most` + 1 round numbers from 0 to `end`, which is positive."""
    power = 10.0 ** math.floor(math.log10(end / most))
    step = next(digit * power for digit in (1, 2, 5, 10) if digit * power * most >= end)
    return [float(f"{i * step:.12g}") for i in range(int(end / step + 1e-9) + 1)]


# --- the test set


@dataclass(frozen=True)
class ScoredSentence:
    """A sentence of the test set and its translation."""

    source: str
    reference: str
    hypothesis: str
    chrf: float  # of this sentence alone


@dataclass(frozen=True)
class TranslatedSet:
    """The translation of a test set, its scores and the sentences that are shown."""

    split: str
    scores: list[evaluate.Score]
    lengths: list[tuple[str, int, float]]  # source words, sentences, BLEU
    worst: list[ScoredSentence]
    best: list[ScoredSentence]
    attention: list[Any]  # of `shown`

    @property
    def shown(self) -> list[ScoredSentence]:
        """The worst, then the best."""
        return [*self.worst, *self.best]


def translate_test(run_dir: Path, data_dir: Path, config: VisualizeConfig) -> TranslatedSet:
    """Translate the test set of a data folder, or its validation set, and score it."""
    split = config.split if (data_dir / f"{config.split}.src").is_file() else "valid"
    sources, references, hypotheses = list[str](), list[str](), list[str]()
    translator = Translator.load(run_dir, device=config.device)
    for text in read_held_out(data_dir, split):
        log.info("translating %d sentences of %s", len(text.sources), data_dir / f"{split}.src")
        asked: Any = {"src_tag": text.direction.src_tag, "tgt_tag": text.direction.tgt_tag}
        hypotheses += translator.translate(text.sources, beam_size=config.beam_size, **asked)
        references += text.targets
        # of several directions, attention is drawn after the tag
        is_tagged = any(translator.own_tags) or len(translator.directions) < 2
        sources += text.sources if is_tagged else tag_lines(text.sources, asked["src_tag"])
    tokenize = evaluate.tokenizer_for(read_report(str(data_dir))["tgt_lang"])
    metric = CHRF()
    rows = [
        ScoredSentence(source, reference, text, metric.sentence_score(text, [reference]).score)
        for source, reference, text in zip(sources, references, hypotheses, strict=True)
    ]
    ranked = sorted(rows, key=lambda row: row.chrf)
    worst, best = ranked[:_NUM_WORST], ranked[_NUM_WORST:][: -_NUM_BEST - 1 : -1]
    shown = [*worst, *best]
    found = translator.attention([r.source for r in shown], [r.hypothesis for r in shown])
    scores = evaluate.evaluate(hypotheses, [references], tokenize=tokenize, force=True)
    return TranslatedSet(split, scores, by_length(rows, tokenize), worst, best, found)


def _is_made_for(run_dir: Path, data_dir: Path) -> bool:
    if not (data_dir / "report.json").is_file():
        return False
    info = checkpoint.load_info(checkpoint.find_model(run_dir))
    return read_meta(data_dir).tokenizer_sha256 == info.tokenizer_sha256


def by_length(rows: Sequence[ScoredSentence], tokenize: str) -> list[tuple[str, int, float]]:
    """Return the source words, the number of sentences and BLEU of bins with as many each."""
    ordered = sorted(rows, key=lambda row: len(row.source.split()))
    size, found = max(1, math.ceil(len(rows) / _NUM_BINS)), []
    for start in range(0, len(ordered), size):
        part = ordered[start : start + size]
        first, last = (len(row.source.split()) for row in (part[0], part[-1]))
        texts, references = [row.hypothesis for row in part], [row.reference for row in part]
        bleu = evaluate.bleu(texts, [references], tokenize=tokenize)
        found.append((str(first) if first == last else f"{first} to {last}", len(part), bleu))
    return found


def what_was_slow(records: Records) -> list[str]:
    """Say in sentences what took time beside the computation."""
    speeds = series(records, "tokens_per_second")
    sentences = []
    if speeds[1]:
        usual = statistics.median(speeds[1])
        slowest, update = min(zip(speeds[1], speeds[0], strict=True))
        sentences.append(
            f"{usual:,.0f} source and target tokens a second, in the median; the slowest interval, "
            f"which ends at update {update:,}, had {slowest:,.0f} ({slowest / usual:.0%})."
        )
        slow = [u for u, v in zip(*speeds, strict=True) if v < 0.7 * usual]
        if len(slow) > 1:
            sentences.append(
                f"{len(slow)} of {len(speeds[0])} intervals had less than 70 % of that: other work "
                f"on the machine, or long batches (first at update {slow[0]:,})."
            )
    for key, text in (
        ("padding_share", "{:.1%} of all positions were padding."),
        ("model_flops_utilisation", "{:.0%} of the peak throughput was used, in the mean."),
    ):
        values = series(records, key)[1]
        if values:
            sentences.append(text.format(statistics.fmean(values)))
    if total := series(records, "model_flops")[1]:
        sentences.append(f"{total[-1]:.2g} floating-point operations of the model in all.")
    seconds = series(records, "validation_seconds")[1]
    if seconds:
        sentences.append(
            f"{len(seconds)} validations took {sum(seconds):,.0f} seconds, the longest "
            f"{max(seconds):,.1f}."
        )
    return sentences
