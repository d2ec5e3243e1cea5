"""The report of a run, one HTML page.

It has the settings in words, the data, curves, scores, speed, and the worst and best sentences with
their attention.
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
from nmt.config import DEFAULT_DATA_DIR, Engine, VisualizeConfig, resolve_path
from nmt.data.binary import read_held_out, read_meta
from nmt.data.languages import tag_lines
from nmt.errors import ConfigError
from nmt.preprocess.report import render_data_report
from nmt.runtime.distributed import set_num_threads
from nmt.runtime.pages import load_page_templates
from nmt.translate.attention import PairAttention
from nmt.translate.translator import Translator
from nmt.visualize.attention_page import read_attention_script, read_component
from nmt.visualize.run_table import Records, read_curve, read_metrics
from nmt.visualize.runs import (
    METRIC_CHARTS,
    MetricChart,
    read_report,
    read_settings,
    without_first_tenth,
)

log = logging.getLogger(__name__)
_NUM_WORST = 8  # number of worst sentences on the page
_NUM_BEST = 4  # number of best sentences on the page
_NUM_LENGTH_BINS = 5
# An interval between two records is slow if its speed is below this share of the median speed. The
# template of the page calls the share "70 %".
_SLOW_SHARE = 0.7
# size and upper left corner of the plot in a chart of 520 x 190 units
_WIDTH = 448
_HEIGHT = 146
_LEFT = 64
_TOP = 8


def data_page(config: VisualizeConfig) -> str:
    """Return the report of a data folder, as nmt-preprocess writes it."""
    return render_data_report(read_report(config.data_dir))


def report_page(config: VisualizeConfig) -> str:
    """Return the report of a run.

    If the data folder of the run is found, translates its test set, and reports the scores.
    """
    if len(config.run_dir) != 1:
        raise ConfigError("what=report shows a single run; use what=run to compare several")
    run_dir = resolve_path(config.run_dir[0])
    records = read_metrics(run_dir)
    settings = read_settings(run_dir)
    data_dir = _find_data_dir(run_dir, config.data_dir, settings["data_dir"])
    data = None
    test = None
    if data_dir is None:
        log.info("no data folder has the run's tokenizer, so the page has no test set")
    else:
        set_num_threads(config.num_threads)
        data = read_report(str(data_dir))
        test = translate_test(run_dir, data_dir, config)
    charts = [make_chart(records, metric_chart) for metric_chart in METRIC_CHARTS]
    attention_pairs = []
    attention_titles = []
    if test is not None:
        attention_pairs = [pair.as_json() for pair in test.attention]
        for sentence in test.worst + test.best:
            attention_titles.append(f"{sentence.source} → {sentence.hypothesis}")
    template = load_page_templates(Path(__file__).parent).get_template("run_report.html.j2")
    return template.render(
        name=run_dir.name,
        newest=records[-1]["update"],
        settings=settings,
        data=data,
        charts=[chart for chart in charts if chart is not None],
        best=best_validations(records),
        test=test,
        speed=summarize_speed(records),
        pairs=attention_pairs,
        titles=attention_titles,
        component_js=read_attention_script(),
        component_css=read_component("attention.css"),
    )


def _find_data_dir(run_dir: Path, configured_dir: str, training_dir: str) -> Path | None:
    """Return the first data folder that has a report and the run's tokenizer, or None.

    Tries `configured_dir`, the setting of the user, and then `training_dir`, which the run was
    trained on. If `configured_dir` is only the default, `training_dir` comes first.
    """
    folders = [resolve_path(configured_dir), resolve_path(training_dir)]
    if configured_dir == DEFAULT_DATA_DIR:
        folders.reverse()
    info = checkpoint.load_info(checkpoint.find_model(run_dir))
    for folder in folders:
        has_report = (folder / "report.json").exists()
        if has_report and read_meta(folder).tokenizer_sha256 == info.tokenizer_sha256:
            return folder
    return None


def best_validations(records: Records) -> list[tuple[str, float, int]]:
    """Return the best validation loss, perplexity and BLEU, each with its name and its update."""
    rows = []
    names = {"valid_loss": "loss", "valid_perplexity": "perplexity", "valid_bleu": "BLEU"}
    for key, name in names.items():
        updates, values = read_curve(records, key)
        if values:
            choose_best = max if key == "valid_bleu" else min
            best = choose_best(values)
            rows.append((f"best validation {name}", best, updates[values.index(best)]))
    return rows


# --- curves


@dataclass(frozen=True)
class Chart:
    """Curves in a plot, in the units of the page."""

    title: str
    lines: list[tuple[str, str]]  # label, and points in SVG's notation
    x_ticks: list[tuple[float, str]]  # x and label
    y_ticks: list[tuple[float, str]]  # y and label


def make_chart(records: Records, metric_chart: MetricChart) -> Chart | None:
    """Draw the curves of a chart in the units of the page.

    The x-axis ends at the last update. The y-axis ends at the highest value of all curves; the
    first tenth of each curve does not count. Returns None if the run has no metric of the chart.
    """
    curves = {}
    for key, label in metric_chart.labels.items():
        updates, values = read_curve(records, key)
        if updates:
            curves[label] = (updates, values)
    if not curves:
        return None
    last_update = 0
    highest = 0.0
    for updates, values in curves.values():
        last_update = max(last_update, updates[-1])
        # `scale_y` draws higher values in the first tenth at the top of the plot
        highest = max([highest, *without_first_tenth(values)])
    if highest == 0:
        highest = 1.0  # `scale_y` divides by it

    def scale_x(update: float) -> float:
        return _LEFT + _WIDTH * update / last_update

    def scale_y(value: float) -> float:
        share = min(max(value / highest, 0), 1)
        return _TOP + _HEIGHT * (1 - share)  # y grows downwards

    lines = []
    for label, (updates, values) in curves.items():
        points = []
        for update, value in zip(updates, values, strict=True):
            points.append(f"{scale_x(update):.1f},{scale_y(value):.1f}")
        lines.append((label, " ".join(points)))
    return Chart(
        title=metric_chart.title,
        lines=lines,
        x_ticks=[(scale_x(value), f"{value:,.0f}") for value in round_values(last_update, 6)],
        y_ticks=[(scale_y(value), f"{value:g}") for value in round_values(highest, 4)],
    )


def round_values(end: float, max_steps: int) -> list[float]:
    """Return at most `max_steps` + 1 round numbers from 0 to `end`, for the ticks of an axis.

    `end` must be positive. The distance between two numbers is 1, 2 or 5 times a power of ten.
    """
    power = 10.0 ** math.floor(math.log10(end / max_steps))
    step = power
    # find the smallest step for which `max_steps` steps reach `end`
    for factor in (1, 2, 5, 10):
        step = factor * power
        if step * max_steps >= end:
            break
    # 1e-9, since quotients may be slightly too small, such as 0.3 / 0.1 = 2.9999999999999996
    num_steps = int(end / step + 1e-9)
    # 12 digits remove rounding errors, such as 0.30000000000000004
    return [float(f"{i * step:.12g}") for i in range(num_steps + 1)]


# --- the test set


@dataclass(frozen=True)
class ScoredSentence:
    """A sentence of the test set and its translation."""

    source: str
    reference: str
    hypothesis: str
    chrf: float  # chrF of this sentence alone


@dataclass(frozen=True)
class LengthBin:
    """Sentences of similar length, and their BLEU."""

    num_words: str  # words of a source, such as "5 to 8"
    num_sentences: int
    bleu: float


@dataclass(frozen=True)
class TestResult:
    """The scores of a translated test set, and its worst and best sentences."""

    split: str
    scores: list[evaluate.Score]
    length_bins: list[LengthBin]
    worst: list[ScoredSentence]
    best: list[ScoredSentence]
    attention: list[PairAttention]  # attention of the sentences of `worst`, then `best`


def translate_test(run_dir: Path, data_dir: Path, config: VisualizeConfig) -> TestResult:
    """Translate the test set of a data folder, or its validation set, and score it."""
    split: str = config.split
    if not (data_dir / f"{split}.src").exists():
        split = "valid"
    translator = Translator.load(run_dir, device=config.device, backend=Engine.native)
    sources: list[str] = []
    references: list[str] = []
    hypotheses: list[str] = []
    # if the directions of the model have different tags, `Translator.attention` expects the tag of
    # the direction at the start of each source line
    has_common_tags = any(translator.common_tags)
    needs_tags = len(translator.directions) > 1 and not has_common_tags
    for text in read_held_out(data_dir, split):
        log.info("translating %d sentences of %s", len(text.sources), data_dir / f"{split}.src")
        direction = text.direction
        hypotheses += translator.translate(
            text.sources,
            beam_size=config.beam_size,
            src_tag=direction.src_tag,
            tgt_tag=direction.tgt_tag,
        )
        references += text.targets
        if needs_tags:
            sources += tag_lines(text.sources, direction.src_tag)
        else:
            sources += text.sources
    sentences = rank_sentences(sources, references, hypotheses)
    worst = sentences[:_NUM_WORST]
    other_sentences = sentences[_NUM_WORST:]
    best = other_sentences[::-1][:_NUM_BEST]  # the best sentence first
    shown_sentences = worst + best
    bleu_tokenizer = evaluate.choose_bleu_tokenizer(read_report(str(data_dir))["tgt_lang"])
    return TestResult(
        split=split,
        # `force` accepts hypotheses that look tokenized, which a bad model may produce
        scores=evaluate.evaluate(hypotheses, [references], tokenize=bleu_tokenizer, force=True),
        length_bins=score_by_length(sentences, bleu_tokenizer),
        worst=worst,
        best=best,
        attention=translator.attention(
            [sentence.source for sentence in shown_sentences],
            [sentence.hypothesis for sentence in shown_sentences],
        ),
    )


def rank_sentences(
    sources: Sequence[str], references: Sequence[str], hypotheses: Sequence[str]
) -> list[ScoredSentence]:
    """Score each sentence on its own. Returns the sentences from the worst to the best."""
    metric = CHRF()
    sentences = []
    for i, hypothesis in enumerate(hypotheses):
        chrf = metric.sentence_score(hypothesis, [references[i]]).score
        sentences.append(ScoredSentence(sources[i], references[i], hypothesis, chrf))
    return sorted(sentences, key=lambda sentence: sentence.chrf)


def score_by_length(sentences: Sequence[ScoredSentence], bleu_tokenizer: str) -> list[LengthBin]:
    """Divide sentences by length into bins of equal size, and compute the BLEU of each bin.

    `bleu_tokenizer` is the name of a tokenizer of sacreBLEU.
    """
    ordered = sorted(sentences, key=lambda sentence: len(sentence.source.split()))
    bin_size = max(1, math.ceil(len(ordered) / _NUM_LENGTH_BINS))
    bins = []
    for start in range(0, len(ordered), bin_size):
        bin_sentences = ordered[start : start + bin_size]
        shortest = len(bin_sentences[0].source.split())
        longest = len(bin_sentences[-1].source.split())
        num_words = f"{shortest} to {longest}"
        if shortest == longest:
            num_words = str(shortest)
        hypotheses = [sentence.hypothesis for sentence in bin_sentences]
        references = [sentence.reference for sentence in bin_sentences]
        bleu = evaluate.bleu(hypotheses, [references], tokenize=bleu_tokenizer)
        bins.append(LengthBin(num_words, len(bin_sentences), bleu))
    return bins


def summarize_speed(records: Records) -> dict[str, Any]:
    """Return the values of the section on speed, keyed by their names in the template."""
    updates, speeds = read_curve(records, "tokens_per_second")
    median = 0.0
    slowest_update = None
    if speeds:
        median = statistics.median(speeds)
        slowest_update = updates[speeds.index(min(speeds))]
    _, padding_shares = read_curve(records, "padding_share")
    _, utilizations = read_curve(records, "model_flops_utilisation")
    _, flops = read_curve(records, "model_flops")
    _, validation_seconds = read_curve(records, "validation_seconds")
    slow_updates = []
    for update, speed in zip(updates, speeds, strict=True):
        if speed < _SLOW_SHARE * median:
            slow_updates.append(update)
    return {
        "speeds": speeds,
        "median": median,
        "slowest_update": slowest_update,
        "slow_updates": slow_updates,
        "padding_shares": padding_shares,
        "utilizations": utilizations,
        "flops": flops,
        "validation_seconds": validation_seconds,
    }
