"""Figures of runs, from their `metrics.jsonl`, and of a data folder, from its `report.json`."""

from __future__ import annotations

import logging
import math
import os
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nmt.config import RunAxis, VisualizeConfig, resolve_path
from nmt.errors import ConfigError, DataError, NmtError
from nmt.runtime.manifest import read_run_config, verify_checksums
from nmt.runtime.metadata import read_json
from nmt.training.trackers import TrackerThread, close_trackers, installed_trackers
from nmt.visualize.run_table import (
    Records,
    check_has_times,
    find_runs,
    group_by_seed,
    mean_curve,
    read_metrics,
    run_table,
    summarize_run,
)

if TYPE_CHECKING:  # so that HTML pages can use this module without matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from nmt.visualize.style import Style

log = logging.getLogger(__name__)
_UPLOAD_SECONDS = 3600.0  # time limit to upload one run
_LINE_CHARACTERS = 110  # number of characters that fit in the width of a figure
_LEGEND_ENTRY_CHARACTERS = 8  # width of the sample line of a legend entry and of its margins
_TEXT_LINE_INCHES = 0.22


@dataclass(frozen=True)
class MetricChart:
    """A chart of metrics over updates."""

    title: str
    labels: dict[str, str]  # key in metrics.jsonl: label of its curve, "" for a single curve
    is_log_scale: bool = False


_X_LABELS = {
    RunAxis.update: "update",
    RunAxis.cpu_hours: "CPU hours",
    RunAxis.wall_hours: "hours",
}
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


def read_settings(run_dir: Path) -> dict[str, Any]:
    """Read the settings of a run. Raises `DataError` if `run_dir` is not a run of nmt-train."""
    settings = {}
    if (run_dir / "config.yaml").exists():
        settings = read_run_config(run_dir)
    if not all(key in settings for key in ("data_dir", "model", "optimizer")):
        raise DataError(f"{run_dir / 'config.yaml'} is not the config of a run of nmt-train")
    return settings


def read_report(data_dir: str) -> dict[str, Any]:
    """Read `report.json` of a data folder. Raises `DataError` if it does not exist."""
    path = resolve_path(data_dir) / "report.json"
    verify_checksums(path.parent, path.name)
    try:
        return read_json(path)
    except FileNotFoundError:
        raise DataError(
            f"{path} does not exist; give data_dir=FOLDER that nmt-preprocess wrote"
        ) from None


def without_first_tenth(values: list[float]) -> list[float]:
    """Return all values but the first tenth, which may be too large for the scale of a chart."""
    num_skipped = len(values) // 10
    return values[num_skipped:]


def draw_run(config: VisualizeConfig, style: Style) -> Figure:
    """Draw the charts of one run, or compare several runs and print their table.

    Each run has its own color. Runs that differ only in their seed become one curve, their mean,
    within a band of their standard deviation. The curve ends at the last update that all these runs
    have.
    """
    folders = find_runs(config.run_dir)
    runs = [read_metrics(folder) for folder in folders]
    for folder, records in zip(folders, runs, strict=True):
        check_has_times(records, folder, config.x_axis)
    names = _display_names(folders, style)
    newest_update = max(records[-1]["update"] for records in runs)
    index_groups = [[0]]  # groups of indices of runs; here a single run
    if len(runs) > 1:
        summaries = [summarize_run(folder) for folder in folders]
        print(run_table(summaries))
        index_groups = group_by_seed(summaries)
    groups = []
    group_names = []
    for indices in index_groups:
        groups.append([runs[i] for i in indices])
        name = names[indices[0]]
        if len(indices) > 1:
            name += f" (mean of {len(indices)} seeds)"
        # the spaces let a long name, such as a list of settings, break after commas
        name = name.replace(",", ", ")
        group_names.append(textwrap.fill(name, _LINE_CHARACTERS))
    title = _figure_title(group_names, num_runs=len(runs), newest_update=newest_update)
    num_legend_columns = 0
    num_legend_lines = 0
    if len(groups) > 1:
        num_legend_columns, num_legend_lines = _legend_size(group_names)
    num_text_lines = num_legend_lines + title.count("\n")
    figure = style.figure(12, 6.5 + _TEXT_LINE_INCHES * num_text_lines)
    panels = figure.subplots(2, 3).flat
    for axes, chart in zip(panels, METRIC_CHARTS, strict=True):
        _draw_chart(axes, style, chart, groups, group_names, config.x_axis)
    if len(groups) > 1:  # one legend below all charts, since a long name would squeeze a chart
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=num_legend_columns)
    figure.suptitle(title)
    return figure


def _figure_title(group_names: list[str], *, num_runs: int, newest_update: int) -> str:
    """Return the title of a figure of `num_runs` runs, which form the groups `group_names`."""
    if num_runs == 1:
        return f"{group_names[0]} up to update {newest_update:,}"
    title = f"{num_runs} runs up to update {newest_update:,}; dashed: validation"
    if len(group_names) < num_runs:
        title += "; bands: standard deviation over seeds"
    if len(group_names) == 1:  # a single group has no legend that names it
        title = f"{group_names[0]}: {title}"
    return title


def _draw_chart(
    axes: Axes,
    style: Style,
    chart: MetricChart,
    groups: list[list[Records]],
    names: list[str],
    x_axis: RunAxis,
) -> None:
    """Draw a chart of groups of runs. The y-axis fits the curves without their first tenths."""
    highest = _draw_curves(axes, style, groups, names, chart.labels, x_axis)
    axes.set_title(chart.title)
    if chart.is_log_scale:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
    else:
        axes.set_ylim(bottom=0)
        if highest > 0:
            axes.set_ylim(top=1.05 * highest)


def _display_names(folders: list[Path], style: Style) -> list[str]:
    """Return distinct names of the run folders. Characters without a font become codes."""
    names = [folder.name for folder in folders]
    if len(set(names)) < len(names):
        names = [os.path.relpath(folder) for folder in folders]
    replacements = style.add_fonts_for(names)
    return [name.translate(replacements) for name in names]


def _legend_size(names: list[str]) -> tuple[int, int]:
    """Return the number of columns of a legend of wrapped names, and its height in text lines."""
    lines = "\n".join(names).splitlines()
    longest = max(len(line) for line in lines)
    num_columns = max(1, _LINE_CHARACTERS // (longest + _LEGEND_ENTRY_CHARACTERS))
    return num_columns, math.ceil(len(lines) / num_columns)


def _draw_curves(
    axes: Axes,
    style: Style,
    groups: list[list[Records]],
    names: list[str],
    labels: dict[str, str],
    x_axis: RunAxis,
) -> float:
    """Draw a curve for each metric in `labels`, which maps keys of metrics.jsonl to labels.

    A single group has a color for each metric, and several groups have a color each. Returns the
    highest value of all curves without their first tenths.
    """
    is_comparison = len(groups) > 1
    highest = 0.0
    for group_index, runs in enumerate(groups):
        for curve_index, (key, metric_label) in enumerate(labels.items()):
            positions, values, deviations = mean_curve(runs, key, x_axis)
            color_index = curve_index
            label = metric_label
            if is_comparison:
                color_index = group_index
                label = "_"  # not in the legend
                if curve_index == 0:
                    label = names[group_index]
            is_validation = key.startswith("valid_")
            color = style.curve_color(color_index)
            line_style = style.curve_format(color_index, is_dashed=is_validation)
            axes.plot(positions, values, line_style, color=color, label=label, markersize=4)
            if len(runs) > 1:
                low = np.subtract(values, deviations)
                high = np.add(values, deviations)
                axes.fill_between(positions, low, high, color=color, alpha=0.2, linewidth=0)
            highest = max([highest, *without_first_tenth(values)])
    axes.set_xlabel(_X_LABELS[x_axis])
    axes.locator_params(axis="x", nbins=6, integer=x_axis is RunAxis.update)
    if x_axis is not RunAxis.update:
        axes.set_xlim(left=0)
    axes.grid()
    if not is_comparison and len(labels) > 1:
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
    length_axes.set(title="Length of the training sentences", xlabel="tokens, EOS included")
    length_axes.set_ylim(bottom=0)
    length_axes.set_ylabel("pairs")
    length_axes.grid()
    length_axes.legend()
    dropped = train["dropped"]  # the number of dropped pairs by reason
    reasons = sorted(dropped, key=dropped.get)  # the most frequent one last
    counts = [dropped[reason] for reason in reasons] + [train["kept"]]
    colors = [style.colors[1]] * len(reasons) + [style.colors[0]]
    bars = pair_axes.barh([*reasons, "kept"], counts, color=colors)
    pair_axes.bar_label(bars, [f" {count:,}" for count in counts], color=style.text_color)
    pair_axes.set(title=f"{train['read']:,} training pairs", xlabel="pairs")
    pair_axes.margins(x=0.2)
    pair_axes.set_ylim(-2, len(counts) + 1)  # empty rows, so that one or two bars are not too thick
    return figure


def upload(config: VisualizeConfig) -> None:
    """Send the metrics of runs to trackers, except records that they already have.

    A `TrackerThread` sends the records of a run, and closing it waits for the last one. Raises
    `NmtError` if a tracker does not accept all records.
    """
    if not config.tracker:
        raise ConfigError("what=upload: name one or more trackers, such as tracker=[tensorboard]")
    for folder in find_runs(config.run_dir):
        read_metrics(folder)  # raises an error for a run without metrics
        for name in installed_trackers(config.tracker):
            thread = TrackerThread(name, folder)
            close_trackers([thread], timeout_seconds=_UPLOAD_SECONDS)
            if not thread.is_complete:
                raise NmtError(f"tracker={name.value}: not all of {folder} was sent; try again")
            log.info("sent %s to %s", folder, name.value)
