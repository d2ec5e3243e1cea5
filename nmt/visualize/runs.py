"""Figures of runs, from their `metrics.jsonl`, and of a data folder, from its `report.json`."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nmt.config import VisualizeConfig, resolve_path
from nmt.errors import ConfigError, DataError, NmtError
from nmt.runtime.manifest import read_config, verify
from nmt.runtime.metadata import read_json
from nmt.runtime.metrics_log import read_metrics_log
from nmt.training.trackers import TrackerThread, installed_trackers

if TYPE_CHECKING:  # HTML pages use this module, and need no matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from nmt.visualize.style import Style

log = logging.getLogger(__name__)
_UPLOAD_SECONDS = 3600.0  # limit for all records of a run
_MAX_EXPONENT = 20.0  # limits the perplexity of an untrained model
Records = list[dict[str, Any]]


@dataclass(frozen=True)
class MetricChart:
    """A chart of metrics over updates."""

    title: str
    labels: dict[str, str]  # key in metrics.jsonl: label of its curve, "" for a single curve
    is_log_scale: bool = False


METRIC_CHARTS = (
    MetricChart("loss, nats a token", {"nll": "training", "valid_loss": "validation"}),
    MetricChart(
        "perplexity",
        {"train_perplexity": "training", "valid_perplexity": "validation"},
        is_log_scale=True,
    ),
    MetricChart("BLEU of the validation set", {"valid_bleu": "validation"}),
    MetricChart("learning rate", {"learning_rate": ""}),
    MetricChart("gradient norm", {"gradient_norm": ""}),
    MetricChart("tokens a second", {"tokens_per_second": ""}),
)


def read_metrics(run_dir: Path) -> Records:
    """Read the metrics of a run in order; raise `DataError` if there are none.

    Leaves out the last line if a running training has not written it completely.
    """
    path = run_dir / "metrics.jsonl"
    records = read_metrics_log(path) if path.exists() else []
    if not records:
        raise DataError(f"{path} has no metrics yet; give run_dir=FOLDER of a run of nmt-train")
    return records


def read_settings(run_dir: Path) -> dict[str, Any]:
    """Read the settings of a run; raise `DataError` if `run_dir` is not a run of nmt-train."""
    settings = {}
    if (run_dir / "config.yaml").exists():
        settings = read_config(run_dir)
    if not all(key in settings for key in ("data_dir", "model", "optimizer")):
        raise DataError(f"{run_dir / 'config.yaml'} is no config of a run of nmt-train")
    return settings


def read_report(data_dir: str) -> dict[str, Any]:
    """Read `report.json` of a data folder; raise `DataError` if it does not exist."""
    path = resolve_path(data_dir) / "report.json"
    verify(path.parent, path.name)
    try:
        return read_json(path)
    except OSError:
        raise DataError(f"{path} is no report; give data_dir=FOLDER of nmt-preprocess") from None


def read_curve(records: Records, key: str) -> tuple[list[int], list[float]]:
    """Return the updates and the values of a metric.

    `key` is a key of `metrics.jsonl`, or `train_perplexity`, which is computed from `nll`.
    """
    if key == "train_perplexity":
        updates, values = read_curve(records, "nll")
        return updates, [math.exp(min(value, _MAX_EXPONENT)) for value in values]
    updates = []
    values = []
    for record in records:
        value = record.get(key)
        if isinstance(value, int | float):
            updates.append(record["update"])
            values.append(value)
    return updates, values


def settled_values(values: list[float]) -> list[float]:
    """Return all values but the first tenth, which may be too large for the scale of a chart."""
    return values[len(values) // 10 :]


def draw_run(config: VisualizeConfig, style: Style) -> Figure:
    """Draw the charts of one run, or of several runs in one color per run."""
    names = []
    runs = []
    for run_dir in config.run_dir:
        folder = resolve_path(run_dir)
        names.append(folder.name)
        runs.append(read_metrics(folder))
    if len(set(names)) < len(names):
        names = [str(folder) for folder in config.run_dir]
    replacements = style.add_fonts_for(names)
    names = [name.translate(replacements) for name in names]
    figure = style.figure(12, 6.5)
    panels = figure.subplots(2, 3).flat
    for axes, chart in zip(panels, METRIC_CHARTS, strict=True):
        highest = _draw_curves(axes, style, runs, names, chart.labels)
        axes.set_title(chart.title)
        if chart.is_log_scale:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("")
        else:
            axes.set_ylim(bottom=0)
            if highest > 0:
                axes.set_ylim(top=1.05 * highest)
    newest = max(records[-1]["update"] for records in runs)
    title = f"{', '.join(names)} up to update {newest:,}"
    if len(runs) > 1:
        title += "; dashed: validation"
    figure.suptitle(title)
    return figure


def _draw_curves(
    axes: Axes, style: Style, runs: list[Records], names: list[str], labels: dict[str, str]
) -> float:
    """Draw one run in a color per metric, or several runs in a color per run.

    Returns the highest settled value.
    """
    is_comparison = len(runs) > 1
    highest = 0.0
    for run_index, records in enumerate(runs):
        for curve_index, (key, metric_label) in enumerate(labels.items()):
            updates, values = read_curve(records, key)
            line_style = "o--" if key.startswith("valid_") else "-"
            color = style.curve_color(curve_index)
            label = metric_label
            if is_comparison:
                color = style.curve_color(run_index)
                label = names[run_index]
                if curve_index > 0:
                    label = "_"  # no entry in the legend, which has one per run
            axes.plot(updates, values, line_style, color=color, label=label, markersize=4)
            highest = max([highest, *settled_values(values)])
    axes.set_xlabel("update")
    axes.locator_params(axis="x", nbins=6, integer=True)
    axes.grid()
    _, legend_labels = axes.get_legend_handles_labels()
    if legend_labels and (is_comparison or len(labels) > 1):
        axes.legend()
    return highest


def draw_data(config: VisualizeConfig, style: Style) -> Figure:
    """Draw the lengths of the training sentences and the numbers of kept and dropped pairs."""
    report = read_report(config.data_dir)
    train = report["train"]
    figure = style.figure(11, 4)
    length_axes, pair_axes = figure.subplots(1, 2, width_ratios=[1.3, 1])
    for i, side in enumerate(("src", "tgt")):
        lengths = train[side]["lengths"]
        edges = np.arange(len(lengths["bars"]) + 1) * lengths["bar_width"]
        language = report[f"{side}_lang"]
        label = f"{language}: median {lengths['median']}, 99 % up to {lengths['p99']}"
        length_axes.stairs(lengths["bars"], edges, color=style.colors[i], label=label, linewidth=2)
    length_axes.set(title="Length of the training sentences", xlabel="tokens, EOS included", ylim=0)
    length_axes.set_ylabel("pairs")
    length_axes.grid()
    length_axes.legend()
    dropped = sorted(train["dropped"].items(), key=lambda item: item[1])
    reasons = [reason for reason, _ in dropped]
    counts = [count for _, count in dropped] + [train["kept"]]
    colors = [style.colors[1]] * len(dropped) + [style.colors[0]]
    bars = pair_axes.barh([*reasons, "kept"], counts, color=colors)
    pair_axes.bar_label(bars, [f" {count:,}" for count in counts], color=style.text_color)
    pair_axes.set(title=f"{train['read']:,} training pairs", xlabel="pairs")
    pair_axes.margins(x=0.2)
    pair_axes.set_ylim(-2, len(counts) + 1)
    return figure


def upload(config: VisualizeConfig) -> None:
    """Send the metrics of runs to trackers, except records that they already have.

    Raises `NmtError` if a tracker does not accept all records.
    """
    if not config.tracker:
        raise ConfigError("what=upload: name one or more, such as tracker=[wandb,mlflow]")
    for folder in map(resolve_path, config.run_dir):
        read_metrics(folder)
        for name in installed_trackers(config.tracker):
            feed = TrackerThread(name, folder)
            feed.close(timeout_seconds=_UPLOAD_SECONDS)  # waits until all records are sent
            if not feed.is_complete:
                raise NmtError(f"tracker={name.value}: not all of {folder} was sent; try again")
            log.info("sent %s to %s", folder, name.value)
