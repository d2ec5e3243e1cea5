"""Find the folders of runs, read their metrics, and compare several runs in a table."""

from __future__ import annotations

import glob
import math
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from nmt.config import BestMetric, RunAxis, resolve_path
from nmt.errors import DataError
from nmt.runtime.manifest import read_run_config
from nmt.runtime.metrics_log import read_metrics_log
from nmt.training.trackers import flatten_keys

if TYPE_CHECKING:  # a command that compares no scores need not import sacreBLEU
    from nmt.evaluate import Score

_METRICS = "metrics.jsonl"  # a folder with this file is a run
# The perplexity is exp(loss). This limit of the loss avoids a huge value for an untrained model.
_MAX_EXPONENT = 20.0
_MAX_SETTINGS = 8  # largest number of columns with settings
_MAX_VALUE_LENGTH = 40  # largest number of characters of a setting in the table
# keys of metrics.jsonl
_SECONDS_KEYS = {RunAxis.cpu_hours: "cpu_seconds", RunAxis.wall_hours: "wall_seconds"}
Records = list[dict[str, Any]]


# --- run folders


def find_runs(names: Iterable[str]) -> list[Path]:
    """Return the run folders of `names`, each folder once.

    A name is a run folder, a folder of runs, or a pattern with * or ?. Raises `DataError` if a
    pattern matches no run. A folder without runs is returned as if it were a run; then,
    `read_metrics` raises an error that names the missing file.
    """
    run_dirs: list[Path] = []
    for name in names:
        path = resolve_path(name)
        is_pattern = not path.exists() and ("*" in name or "?" in name)
        if is_pattern:
            runs = _matching_runs(path)
            if not runs:
                raise DataError(f"{name} matches no run of nmt-train; check the pattern")
        else:
            runs = _runs_in(path)
            if not runs:
                runs = [path]  # `read_metrics` raises the error
        run_dirs += runs
    return list(dict.fromkeys(run_dirs))


def _matching_runs(pattern: Path) -> list[Path]:
    """Return the runs in the folders that match a pattern with * and ?."""
    # only brackets are escaped: `glob.escape` would also escape * and ?
    escaped_pattern = str(pattern).replace("[", "[[]")
    runs: list[Path] = []
    for folder in sorted(glob.glob(escaped_pattern)):
        runs += _runs_in(Path(folder))
    return runs


def _runs_in(folder: Path) -> list[Path]:
    """Return `folder` if it is a run, or else the runs up to two levels below it."""
    if (folder / _METRICS).exists():
        return [folder]
    paths = [*folder.glob(f"*/{_METRICS}"), *folder.glob(f"*/*/{_METRICS}")]
    return sorted(path.parent for path in paths)


# --- metrics


def read_metrics(run_dir: Path) -> Records:
    """Read the metrics of a run in order. Raises `DataError` if it has no metrics.

    Leaves out the last line if a running training has not written it completely.
    """
    path = run_dir / _METRICS
    records = read_metrics_log(path) if path.exists() else []
    if not records:
        raise DataError(f"{path} has no metrics yet; give run_dir=FOLDER of a run of nmt-train")
    return records


def read_curve(records: Records, key: str) -> tuple[list[int], list[float]]:
    """Return the updates and the values of a metric.

    `key` is a key of `metrics.jsonl`, or `train_perplexity`, which is computed from `nll`.
    """
    updates = []
    values = []
    for record in _records_with(records, key):
        updates.append(record["update"])
        values.append(_metric_value(record, key))
    return updates, values


def mean_curve(
    runs: Sequence[Records], key: str, x_axis: RunAxis = RunAxis.update
) -> tuple[list[float], list[float], list[float]]:
    """Return the mean of a metric over runs, for the updates that all runs have.

    Returns the positions on the x-axis, the means and the sample standard deviations. A position is
    the update, or the mean of the hours that the runs took up to this update. A deviation is NaN if
    one of the values is not finite, and 0 for a single run.
    """
    records_by_update: dict[int, Records] = {}
    for records in runs:
        for record in _records_with(records, key):
            records_by_update.setdefault(record["update"], []).append(record)
    positions = []
    means = []
    deviations = []
    for update in sorted(records_by_update):
        update_records = records_by_update[update]
        if len(update_records) == len(runs):
            run_positions = [_position(record, x_axis) for record in update_records]
            positions.append(statistics.fmean(run_positions))
            values = [_metric_value(record, key) for record in update_records]
            means.append(statistics.fmean(values))
            deviations.append(_sample_deviation(values))
    return positions, means, deviations


def _sample_deviation(values: list[float]) -> float:
    """Return the sample standard deviation, NaN if a value is not finite, 0 for a single value."""
    if not all(map(math.isfinite, values)):
        return math.nan
    if len(values) == 1:
        return 0.0
    return statistics.stdev(values)


def check_has_times(records: Records, run_dir: Path, x_axis: RunAxis) -> None:
    """Raise `DataError` if the x-axis shows hours that the run has not recorded."""
    if x_axis is RunAxis.update:
        return
    num_measured = len(_records_with(records, _SECONDS_KEYS[x_axis]))
    num_records = len(_records_with(records, "nll")) + len(_records_with(records, "valid_loss"))
    if num_measured < num_records:
        raise DataError(
            f"x_axis={x_axis.value}: {run_dir} has updates without {_SECONDS_KEYS[x_axis]}, which "
            "older versions did not measure; set x_axis=update"
        )


def _records_with(records: Records, key: str) -> Records:
    """Return the records with a metric; see `read_curve` for `key`."""
    recorded_key = "nll" if key == "train_perplexity" else key
    return [record for record in records if isinstance(record.get(recorded_key), int | float)]


def _metric_value(record: dict[str, Any], key: str) -> float:
    """Return the value of a metric; see `read_curve` for `key`."""
    if key == "train_perplexity":
        return math.exp(min(record["nll"], _MAX_EXPONENT))
    value: float = record[key]
    return value


def _position(record: dict[str, Any], x_axis: RunAxis) -> float:
    """Return the position of a record on the x-axis."""
    if x_axis is RunAxis.update:
        update: int = record["update"]
        return update
    seconds: float = record[_SECONDS_KEYS[x_axis]]
    return seconds / 3600


# --- the table


@dataclass(frozen=True)
class RunSummary:
    """The settings of a run and its best scores on the validation set."""

    folder: Path
    settings: dict[str, Any]  # the keys are dotted: model.d_model; empty without a config
    num_updates: int  # update of the newest record
    best_loss: float | None  # None before the first validation
    best_bleu: float | None
    scores: Sequence[Score] = ()  # scores on a test set, if one was translated

    def sort_key(self) -> float:
        """Return a number that is lower for a better run, by the setting `best_metric`."""
        if self.settings.get("best_metric") == BestMetric.bleu.value:
            return math.inf if self.best_bleu is None else -self.best_bleu
        return math.inf if self.best_loss is None else self.best_loss

    def as_json(self) -> dict[str, Any]:
        """Convert to plain values for `json.dumps`."""
        return {
            "run": os.path.relpath(self.folder),
            "settings": self.settings,
            "updates": self.num_updates,
            "valid_loss": self.best_loss,
            "valid_bleu": self.best_bleu,
            "test": {score.name: score.value for score in self.scores},
        }


def summarize_run(run_dir: Path, scores: Sequence[Score] = ()) -> RunSummary:
    """Read the settings and the best scores of a run. Raises `DataError` if it has no metrics."""
    records = read_metrics(run_dir)
    settings = {}
    if (run_dir / "config.yaml").exists():
        settings = flatten_keys(read_run_config(run_dir))
    _, losses = read_curve(records, "valid_loss")
    _, bleus = read_curve(records, "valid_bleu")
    return RunSummary(
        folder=run_dir,
        settings=settings,
        num_updates=records[-1]["update"],
        best_loss=min(losses, default=None),
        best_bleu=max(bleus, default=None),
        scores=scores,
    )


def run_table(summaries: Iterable[RunSummary]) -> str:
    """Format runs as a table, best first, with a row per run.

    The columns are the settings that differ, the best scores, scores of a test set, and the folder.
    """
    ranked = sorted(summaries, key=RunSummary.sort_key)
    keys = differing_settings([summary.settings for summary in ranked])
    column_keys = keys[:_MAX_SETTINGS]
    score_names = [f"test {score.name}" for score in ranked[0].scores]  # equal in all runs
    headers = [*column_keys, "updates", "best loss", "best BLEU", *score_names, "run"]
    rows = []
    for summary in ranked:
        row = [_setting_text(summary.settings.get(key)) for key in column_keys]
        row.append(f"{summary.num_updates:,}")
        row.append("" if summary.best_loss is None else f"{summary.best_loss:.4f}")
        row.append("" if summary.best_bleu is None else f"{summary.best_bleu:.2f}")
        row += [f"{score.value:.2f}" for score in summary.scores]
        row.append(os.path.relpath(summary.folder))
        rows.append(row)
    num_numeric_columns = 3 + len(score_names)  # with updates, best loss and best BLEU
    alignment = ["left"] * len(column_keys) + ["right"] * num_numeric_columns + ["left"]
    table: str = tabulate(
        rows, headers=headers, colalign=alignment, tablefmt="plain", disable_numparse=True
    )
    if len(keys) > _MAX_SETTINGS:
        table += f"\nother settings that differ: {', '.join(keys[_MAX_SETTINGS:])}"
    return table


def group_by_seed(summaries: Sequence[RunSummary]) -> list[list[int]]:
    """Group runs whose settings differ only in `seed`. Returns the indices of each group's runs.

    All runs of a group have different seeds. A repetition of a run is in another group.
    """
    groups: list[list[int]] = []
    for i, summary in enumerate(summaries):
        for group in groups:
            if _has_new_seed(summary, [summaries[j] for j in group]):
                group.append(i)
                break
        else:  # no group fits
            groups.append([i])
    return groups


def _has_new_seed(summary: RunSummary, group: Sequence[RunSummary]) -> bool:
    """Return whether a run differs from the runs of `group` in its seed only."""
    # the first run is enough, since the other runs of the group differ from it in the seed only
    keys = differing_settings([summary.settings, group[0].settings])
    seeds = [run.settings.get("seed") for run in group]
    return keys == ["seed"] and summary.settings.get("seed") not in seeds


def differing_settings(settings_of_runs: Sequence[dict[str, Any]]) -> list[str]:
    """Return the keys of the settings that differ between runs, except `run_dir`."""
    keys: dict[str, None] = {}  # an ordered set
    for settings in settings_of_runs:
        keys.update(dict.fromkeys(settings))
    differing = []
    for key in keys:
        values = [settings.get(key) for settings in settings_of_runs]
        if key != "run_dir" and any(value != values[0] for value in values):
            differing.append(key)
    return differing


def _setting_text(value: Any) -> str:
    """Write a setting as on the command line, cut off if it is long. None gives ""."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        value = f"[{','.join(map(str, value))}]"
    text = str(value)
    if len(text) > _MAX_VALUE_LENGTH:
        text = f"{text[: _MAX_VALUE_LENGTH - 3]}..."
    return text
