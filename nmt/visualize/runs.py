"""Figures of runs, from their `metrics.jsonl`, and of a data folder, from its `report.json`."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nmt.config import VisualizeConfig, resolve
from nmt.errors import ConfigError, DataError, NmtError
from nmt.runtime.manifest import read_config, verify
from nmt.runtime.metadata import read_json
from nmt.runtime.metrics_log import read_metrics_log
from nmt.training.trackers import Feed, installed_trackers

if TYPE_CHECKING:  # pages use this module without matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from nmt.visualize.style import Style

log = logging.getLogger(__name__)
_UPLOAD_SECONDS = 3600.0  # for all records of a run
Records = list[dict[str, Any]]
CHARTS = {  # title: the keys of metrics.jsonl that are drawn, and the names of their curves
    "loss, nats a token": {"nll": "training", "valid_loss": "validation"},
    "perplexity": {"train_perplexity": "training", "valid_perplexity": "validation"},
    "BLEU of the validation set": {"valid_bleu": "validation"},
    "learning rate": {"learning_rate": ""},
    "gradient norm": {"gradient_norm": ""},
    "tokens a second": {"tokens_per_second": ""},
}


def read_metrics(run_dir: Path) -> Records:
    """Read the records of a run, in order, without the line that is being written.

    Raises `DataError` if there are none.
    """
    path = run_dir / "metrics.jsonl"
    records = read_metrics_log(path) if path.exists() else []
    if not records:
        raise DataError(f"{path} has no metrics yet; give run_dir=FOLDER of a run of nmt-train")
    return records


def read_settings(run_dir: Path) -> dict[str, Any]:
    """Read the settings of a run; raise `DataError` if the folder is no run."""
    settings = {}
    if (run_dir / "config.yaml").exists():
        settings = read_config(run_dir)
    if not {"data_dir", "model", "optimizer"} <= set(settings):
        raise DataError(f"{run_dir / 'config.yaml'} is no config of a run of nmt-train")
    return settings


def read_report(data_dir: str) -> dict[str, Any]:
    """Read the report of a data folder; raise `DataError` if there is none."""
    path = resolve(data_dir) / "report.json"
    verify(path.parent, path.name)
    try:
        return read_json(path)
    except OSError:
        raise DataError(f"{path} is no report; give data_dir=FOLDER of nmt-preprocess") from None


def read_curve(records: Records, key: str) -> tuple[list[int], list[float]]:
    """Return updates and values of a key of `metrics.jsonl`, or of `train_perplexity`."""
    if key == "train_perplexity":
        updates, values = read_curve(records, "nll")
        return updates, [math.exp(min(value, 20.0)) for value in values]
    updates = []
    values = []
    for record in records:
        value = record.get(key)
        if isinstance(value, int | float):
            updates.append(record["update"])
            values.append(value)
    return updates, values


def settled_values(values: list[float]) -> list[float]:
    """Leave out the first tenth, which may be so large that it would flatten the rest."""
    return values[len(values) // 10 :]


def draw_run(config: VisualizeConfig, style: Style) -> Figure:
    """Draw the curves of one run, or of several in one color each."""
    names = []
    runs = []
    for run_dir in config.run_dir:
        folder = resolve(run_dir)
        names.append(folder.name)
        runs.append(read_metrics(folder))
    if len(set(names)) < len(names):
        names = [str(folder) for folder in config.run_dir]
    codes = style.find_fonts(names)
    names = [name.translate(codes) for name in names]
    figure = style.figure(12, 6.5)
    panels = figure.subplots(2, 3).flat
    for i, (title, keys) in enumerate(CHARTS.items()):
        highest = _draw_chart(panels[i], style, runs, names, keys)
        panels[i].set_title(title)
        if title == "perplexity":
            panels[i].set_yscale("log")
            panels[i].yaxis.set_major_formatter("{x:g}")
            panels[i].yaxis.set_minor_formatter("")
        else:
            panels[i].set_ylim(0, 1.05 * highest or None)
    newest = max(records[-1]["update"] for records in runs)
    note = "; dashed: validation" if len(runs) > 1 else ""
    figure.suptitle(f"{', '.join(names)} up to update {newest:,}{note}")
    return figure


def _draw_chart(
    axes: Axes, style: Style, runs: list[Records], names: list[str], keys: dict[str, str]
) -> float:
    """Draw curves of one run in a color each, or of several runs in a color for each run.

    Return the highest settled value.
    """
    is_comparison = len(runs) > 1
    highest = 0.0
    for run, records in enumerate(runs):
        for curve, (key, label) in enumerate(keys.items()):
            updates, values = read_curve(records, key)
            line_style = "o--" if label == "validation" else "-"
            color = style.colors[curve % 6]
            if is_comparison:
                color = style.colors[run % 6]
                label = "_" if curve else names[run]  # matplotlib's legends leave out "_"
            axes.plot(updates, values, line_style, color=color, label=label, markersize=4)
            highest = max([highest, *settled_values(values)])
    axes.set_xlabel("update")
    axes.locator_params(axis="x", nbins=6, integer=True)
    axes.grid()
    if axes.get_legend_handles_labels()[1] and (is_comparison or len(keys) > 1):
        axes.legend()
    return highest


def draw_data(config: VisualizeConfig, style: Style) -> Figure:
    """Draw the lengths of the training sentences, and how many pairs were kept and dropped."""
    report = read_report(config.data_dir)
    train = report["train"]
    figure = style.figure(11, 4)
    length_axes, pair_axes = figure.subplots(1, 2, width_ratios=[1.3, 1])
    for i, side in enumerate(("src", "tgt")):
        lengths = train[side]["lengths"]
        edges = [bar * lengths["bar_width"] for bar in range(len(lengths["bars"]) + 1)]
        language = report[f"{side}_lang"]
        label = f"{language}: median {lengths['median']}, 99 % up to {lengths['p99']}"
        length_axes.stairs(lengths["bars"], edges, color=style.colors[i], label=label, linewidth=2)
    length_axes.set(title="Length of the training sentences", xlabel="tokens, EOS included", ylim=0)
    length_axes.set_ylabel("pairs")
    length_axes.grid()
    length_axes.legend()
    reasons = sorted(train["dropped"], key=train["dropped"].__getitem__)
    counts = [train["dropped"][reason] for reason in reasons] + [train["kept"]]
    colors = [style.colors[1]] * len(reasons) + [style.colors[0]]
    bars = pair_axes.barh([*reasons, "kept"], counts, color=colors)
    pair_axes.bar_label(bars, [f" {count:,}" for count in counts], color=style.ink)
    pair_axes.set(title=f"{train['read']:,} training pairs", xlabel="pairs")
    pair_axes.margins(x=0.2)
    pair_axes.set_ylim(-2, len(counts) + 1)
    return figure


def upload(config: VisualizeConfig) -> None:
    """Send the metrics of runs that trackers lack; raise `NmtError` when a tracker fails."""
    if not config.tracker:
        raise ConfigError("what=upload: name one or more, such as tracker=[wandb,mlflow]")
    for folder in map(resolve, config.run_dir):
        read_metrics(folder)
        for name in installed_trackers(config.tracker):
            feed = Feed(name, folder)
            feed.close(timeout_seconds=_UPLOAD_SECONDS)
            if not feed.is_done:
                raise NmtError(f"tracker={name.value}: not all of {folder} was sent; try again")
            log.info("sent %s to %s", folder, name.value)
