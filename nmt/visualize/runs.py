"""Figures of runs, from their `metrics.jsonl`, and of a data folder, from its `report.json`."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nmt.config import VisualizeConfig, resolve
from nmt.data.text import read_lines
from nmt.errors import ConfigError, DataError, NmtError
from nmt.runtime.manifest import read_config, verify
from nmt.runtime.metadata import read_json
from nmt.runtime.metrics_log import read_metrics_log
from nmt.training.trackers import Feed, installed_trackers

if TYPE_CHECKING:  # matplotlib, which pages do without
    from matplotlib.figure import Figure

    from nmt.visualize.style import Style

log = logging.getLogger(__name__)
_UPLOAD_SECONDS = 3600.0  # for all of a run
Records = list[dict[str, Any]]
CURVES = {  # title: the keys of metrics.jsonl that are drawn, and their names
    "loss, nats a token": {"nll": "training", "valid_loss": "validation"},
    "perplexity": {"train_perplexity": "training", "valid_perplexity": "validation"},
    "BLEU of the validation set": {"valid_bleu": "validation"},
    "learning rate": {"learning_rate": ""},
    "gradient norm": {"gradient_norm": ""},
    "tokens a second": {"tokens_per_second": ""},
}


def read_metrics(run_dir: Path) -> Records:
    """Read the records of a run in order; the line that is being written is left out.

    Raises `DataError` where there is none.
    """
    path = run_dir / "metrics.jsonl"
    records = read_metrics_log(path) if path.is_file() else []
    if not records:
        raise DataError(f"{path} has no metrics yet; give run_dir=FOLDER of a run of nmt-train")
    return records


def read_settings(run_dir: Path) -> dict[str, Any]:
    """Read the settings of a run; raise `DataError` where there are none."""
    try:
        found = read_config(run_dir)
        assert {"data_dir", "model", "optimizer"} <= set(found)
    except (OSError, AssertionError):
        raise DataError(f"{run_dir / 'config.yaml'} is no config of a run of nmt-train") from None
    return found


def series(records: Records, key: str) -> tuple[list[int], list[float]]:
    """Return updates and values of a figure of `metrics.jsonl`, or of train_perplexity."""
    if key == "train_perplexity":
        updates, values = series(records, "nll")
        return updates, [math.exp(min(value, 20.0)) for value in values]
    found = [(r["update"], r[key]) for r in records if isinstance(r.get(key), int | float)]
    return [update for update, _ in found], [value for _, value in found]


def draw_run(config: VisualizeConfig, style: Style) -> Figure:
    """Draw the curves of one run, or of several in one color each."""
    folders = [resolve(folder) for folder in config.run_dir]
    runs = [read_metrics(folder) for folder in folders]
    names = [folder.name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in config.run_dir]
    codes = style.find_fonts(names)
    figure = style.figure(12, 6.5)
    for axes, (title, keys) in zip(figure.subplots(2, 3).flat, CURVES.items(), strict=True):
        highest = 0.0
        for run, (records, name) in enumerate(zip(runs, names, strict=True)):
            for number, (key, kind) in enumerate(keys.items()):
                updates, values = series(records, key)
                color = style.colors[(run if len(runs) > 1 else number) % 6]
                style_of = "o--" if kind == "validation" else "-"
                label = kind if len(runs) == 1 else name.translate(codes) if not number else None
                axes.plot(updates, values, style_of, color=color, label=label, markersize=4)
                highest = max([highest, *values[len(values) // 10 :]])
        axes.set(title=title, xlabel="update")
        axes.locator_params(axis="x", nbins=6, integer=True)
        if title == "perplexity":
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("")
        else:
            axes.set_ylim(0, 1.05 * highest or None)
        axes.grid()
        if axes.get_legend_handles_labels()[1] and (len(keys) > 1 or len(runs) > 1):
            axes.legend()
    newest = max(records[-1]["update"] for records in runs)
    note = "; dashed: validation" if len(runs) > 1 else ""
    figure.suptitle(f"{', '.join(names).translate(codes)} up to update {newest:,}{note}")
    return figure


def read_texts(data_dir: Path, split: str) -> tuple[list[str], list[str]]:
    """Read the sources and the targets of a held-out set of a data folder."""
    src, tgt = f"{split}.src", f"{split}.tgt"
    verify(data_dir, src, tgt)
    return list(read_lines(data_dir / src)), list(read_lines(data_dir / tgt))


def read_report(data_dir: str) -> dict[str, Any]:
    """Read the report of a data folder; raise `DataError` where there is none."""
    path = resolve(data_dir) / "report.json"
    verify(path.parent, path.name)
    try:
        return read_json(path)
    except OSError:
        raise DataError(f"{path} is no report; give data_dir=FOLDER of nmt-preprocess") from None


def draw_data(config: VisualizeConfig, style: Style) -> Figure:
    """Draw how long the sentences of the training text are, and what became of its pairs."""
    report = read_report(config.data_dir)
    train = report["train"]
    figure = style.figure(11, 4)
    left, right = figure.subplots(1, 2, width_ratios=[1.3, 1])
    for side, language, color in (("src", "src_lang", 0), ("tgt", "tgt_lang", 1)):
        lengths = train[side]["lengths"]
        starts = [i * lengths["bar_width"] for i in range(len(lengths["bars"]) + 1)]
        name = f"{report[language]}: median {lengths['median']}, 99 % up to {lengths['p99']}"
        left.stairs(lengths["bars"], starts, color=style.colors[color], label=name, linewidth=2)
    left.set(title="Length of the training sentences", xlabel="tokens, EOS included", ylim=0)
    left.set_ylabel("pairs")
    left.grid()
    left.legend()
    reasons = sorted(train["dropped"].items(), key=lambda item: item[1])
    bars = [*reasons, ("kept", train["kept"])]
    colors = [style.colors[1]] * len(reasons) + [style.colors[0]]
    found = right.barh([name for name, _ in bars], [n for _, n in bars], color=colors)
    right.bar_label(found, [f" {n:,}" for _, n in bars], color=style.ink)
    right.set(title=f"{train['read']:,} training pairs", xlabel="pairs")
    right.margins(x=0.2)
    right.set_ylim(-2, len(bars) + 1)
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
