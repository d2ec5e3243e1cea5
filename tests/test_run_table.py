"""Several runs are compared in one table and one figure, whatever their names are."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from test_config import composed
from toy import TINY, call_before, command, read_records

from nmt.cli import sweep
from nmt.cli.commands import COMMANDS
from nmt.cli.compose import ComposedCommand, compose_command
from nmt.config import RunAxis, Theme, VisualizeConfig
from nmt.errors import EXIT_DONE, EXIT_USER, ConfigError, DataError
from nmt.training import dry_run
from nmt.visualize import run_table, runs
from nmt.visualize.style import Style


def write_run(folder: Path, loss: float, bleu: float = 1.0, settings: str = "seed: 1\n") -> Path:
    """Write a run of two validations, of which the first is the better one."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(settings)
    records = [
        {"update": 5, "nll": loss, "learning_rate": 1e-3, "gradient_norm": 1.0},
        {"update": 5, "valid_loss": loss, "valid_bleu": bleu, "valid_perplexity": 2.0},
        {"update": 10, "valid_loss": loss + 1, "valid_bleu": bleu - 1, "valid_perplexity": 3.0},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


@pytest.fixture
def two_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs s/a=1,seed=1 and s/a=1,seed=2 in the current folder; the first is better."""
    monkeypatch.chdir(tmp_path)
    for seed in (1, 2):
        write_run(Path(f"s/a=1,seed={seed}"), 1.0 * seed, settings=f"seed: {seed}\n")


def test_a_folder_of_runs_and_a_pattern_stand_for_their_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = ["s/a[1]=0,b=1", "s/a[1]=0,b=2", "s/deeper/c"]
    folders = [write_run(tmp_path / name, loss=1.0) for name in names]
    (tmp_path / "s" / "optimization_results.yaml").touch()
    assert run_table.find_runs(["s"]) == folders
    assert run_table.find_runs(["s/a*"]) == folders[:2]
    assert run_table.find_runs(["s/a[1]=0,b=?", names[0]]) == folders[:2]  # each run once
    assert run_table.find_runs(["s/*"]) == folders
    assert run_table.find_runs(["missing"]) == [tmp_path / "missing"]  # its reader names it
    with pytest.raises(DataError, match=r"x\* matches no run"):
        run_table.find_runs(["x*"])


def test_the_table_has_the_settings_that_differ_and_the_best_run_first(tmp_path: Path) -> None:
    settings = "seed: {}\nrun_dir: r{}\nmodel: {{norm: pre, d_model: 8}}\nbest_metric: {}\n"
    low_loss = write_run(tmp_path / "a", 1.25, 10.0, settings.format(1, 1, "loss"))
    high_bleu = write_run(tmp_path / "b", 1.5, 20.0, settings.format(2, 2, "loss"))
    new_run = write_run(tmp_path / "c", 9.0, settings="seed: 3\n")
    (new_run / "metrics.jsonl").write_text('{"update": 1, "nll": 9.0}\n')  # no validation yet
    table = run_table.run_table(map(run_table.summarize_run, [high_bleu, low_loss]))
    header, first, second = [line.split() for line in table.splitlines()]
    assert header == ["seed", "updates", "best", "loss", "best", "BLEU", "run"]
    assert first[:4] == ["1", "10", "1.2500", "10.00"]
    assert second[:4] == ["2", "10", "1.5000", "20.00"]
    assert first[4].endswith("/a")
    table = run_table.run_table(map(run_table.summarize_run, [new_run, low_loss]))
    assert "model.norm" in table
    assert table.splitlines()[-1].split()[:2] == ["3", "1"]  # seed and updates, without scores
    for folder in (low_loss, high_bleu):
        text = (
            (folder / "config.yaml").read_text().replace("best_metric: loss", "best_metric: bleu")
        )
        (folder / "config.yaml").write_text(text)
    table = run_table.run_table(map(run_table.summarize_run, [low_loss, high_bleu]))
    assert table.splitlines()[1].startswith("2 ")  # by BLEU


@pytest.mark.slow
def test_long_names_do_not_squeeze_the_charts_of_runs(tmp_path: Path) -> None:
    style = Style(Theme.light)
    long_name = "model.num_encoder_layers=6," * 7
    for num_runs, name in ((1, "x"), (1, long_name), (8, long_name)):
        folder = tmp_path / f"{num_runs}{name[:1]}"
        names = [str(write_run(folder / f"{name}{i}", 1.0 + i)) for i in range(num_runs)]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            figure = runs.draw_run(VisualizeConfig(run_dir=names), style)
            figure.draw_without_rendering()
        for axes in figure.axes:
            width, height = axes.get_window_extent().size / figure.dpi
            assert width > 3, (num_runs, name)  # inches, of 12
            assert height > 2, (num_runs, name)
        curves = set()
        for line in figure.axes[0].get_lines():
            curves.add((line.get_color(), line.get_linestyle(), line.get_marker()))
        assert len(curves) == 2 * num_runs  # all look different


def test_runs_that_differ_in_their_seed_are_one_curve_with_a_band(tmp_path: Path) -> None:
    folders = []
    for name, loss, settings in (
        ("a1", 1.0, "seed: 1\nlayers: 6\n"),
        ("b1", 5.0, "seed: 1\nlayers: 3\n"),
        ("a2", 4.0, "seed: 2\nlayers: 6\n"),
        ("a1-again", 1.0, "seed: 1\nlayers: 6\n"),  # no new seed
        ("c3", 1.0, "seed: 3\nlayers: 9\n"),  # differs in more than its seed
    ):
        folders.append(str(write_run(tmp_path / name, loss, settings=settings)))
    summaries = [run_table.summarize_run(Path(folder)) for folder in folders]
    assert run_table.group_by_seed(summaries) == [[0, 2], [1], [3], [4]]
    records = [run_table.read_metrics(Path(folder)) for folder in folders]
    records[2].append({"update": 15, "valid_loss": 9.0})  # an update of only one run
    curve = run_table.mean_curve([records[0], records[2]], "valid_loss")
    deviation = 4.5**0.5  # of a sample of two values that differ by 3
    assert curve == ([5, 10], [2.5, 3.5], pytest.approx([deviation, deviation]))
    records[0][-1]["valid_loss"] = math.inf
    updates, _, deviations = run_table.mean_curve([records[0]], "valid_loss")
    assert updates == [5, 10]
    assert deviations[0] == 0.0
    assert math.isnan(deviations[1])
    figure = runs.draw_run(VisualizeConfig(run_dir=folders[:3]), Style(Theme.light))
    [band, *no_bands] = figure.axes[0].collections[:2]
    assert no_bands  # of training and validation
    limits = sorted(set(band.get_paths()[0].vertices[:, 1]))
    assert limits == pytest.approx([2.5 - deviation, 2.5 + deviation])
    [first, second] = [text.get_text() for text in figure.legends[0].get_texts()]
    assert (first, second) == ("a1 (mean of 2 seeds)", "b1")
    assert figure.axes[0].get_legend() is None  # the legend of the figure names the runs
    figure = runs.draw_run(VisualizeConfig(run_dir=folders[:1]), Style(Theme.light))
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert len(labels) == 2  # training and validation


@pytest.mark.slow
def test_curves_are_drawn_over_the_hours_of_a_run(tmp_path: Path) -> None:
    folders = []
    for seed in (1, 2):
        folder = tmp_path / f"seed{seed}"
        folder.mkdir()
        (folder / "config.yaml").write_text(f"seed: {seed}\n")
        records = []
        for update in (5, 10):
            seconds = 360.0 * update * seed
            times = {"cpu_seconds": 2 * seconds, "wall_seconds": seconds}
            records.append({"update": update, "nll": 2.0, **times})
            times = {"cpu_seconds": 2 * seconds + 3600, "wall_seconds": seconds + 1800}
            records.append({"update": update, "valid_loss": 1.0, "valid_bleu": update, **times})
        (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
        folders.append(str(folder))
    for x_axis, label, hours in (
        (RunAxis.update, "update", [[5, 10], [5, 10]]),
        (RunAxis.cpu_hours, "CPU hours", [[2, 3], [2.5, 4]]),  # of seed 1, and the mean of both
        (RunAxis.wall_hours, "hours", [[1, 1.5], [1.25, 2]]),
    ):
        for run_dirs, expected in ((folders[:1], hours[0]), (folders, hours[1])):
            config = VisualizeConfig(run_dir=run_dirs, x_axis=x_axis)
            bleu_axes = runs.draw_run(config, Style(Theme.light)).axes[2]
            [curve] = bleu_axes.get_lines()
            assert bleu_axes.get_xlabel() == label
            assert curve.get_xdata().tolist() == pytest.approx(expected)
            assert curve.get_ydata().tolist() == [5, 10]
    with Path(folders[0], "metrics.jsonl").open("a") as stream:
        stream.write('{"update": 15, "nll": 1.0}\n')
    config = VisualizeConfig(run_dir=folders[:1], x_axis=RunAxis.cpu_hours)
    with pytest.raises(DataError, match="x_axis=cpu_hours: .*seed1 has updates without cpu_sec"):
        runs.draw_run(config, Style(Theme.light))


@pytest.mark.slow
@pytest.mark.usefixtures("two_runs")
def test_what_run_prints_the_table_of_several_runs(capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = "run_dir=[s/a=1,seed=1,s/a=1,seed=2]"
    assert command("visualize", "what=run", run_dir, "output=x.svg") == EXIT_DONE
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in table] == ["seed", "1", "2"]


@pytest.mark.usefixtures("two_runs")
def test_evaluate_compares_runs_and_systems(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("evaluate", "run_dir=s") == EXIT_DONE
    assert capsys.readouterr().out.splitlines()[0].split()[0] == "seed"
    assert command("evaluate", "model_dir=s/*", "format=json") == EXIT_DONE
    compared = json.loads(capsys.readouterr().out)
    assert [run["valid_loss"] for run in compared] == [1.0, 2.0]
    assert command("evaluate", "model_dir=s/a=1,seed=1") == EXIT_USER
    assert "needs src=FILE or data_dir=FOLDER" in capsys.readouterr().err
    references = [f"the {word} tree is here today" for word in ["red", "green", "big", "old"]]
    systems = {"ref": references, "a": references[:3] + ["the"], "b": ["a tree"] * 4}
    for name, lines in systems.items():
        Path(name).write_text("\n".join(lines) + "\n")
    options = ["references=ref", "metrics=chrf", "num_samples=40"]
    assert command("evaluate", "hypotheses=[a,b]", options, "format=json") == EXIT_DONE
    result = json.loads(capsys.readouterr().out)
    assert [score["name"] for score in result["scores"]] == ["a chrF2", "b chrF2"]
    [comparison] = result["comparisons"]
    assert comparison["name"] == "b chrF2"
    assert comparison["baseline"] == result["scores"][0]["value"]
    words = ["hypotheses=[a,b]", "baseline=ref", *options, "format=json"]
    assert command("evaluate", words) == EXIT_DONE
    result = json.loads(capsys.readouterr().out)
    assert [comparison["baseline"] for comparison in result["comparisons"]] == [100.0, 100.0]


@pytest.mark.slow
def test_a_sweep_that_fails_shows_the_runs_before_and_the_file_of_its_sweeper(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    results = Path("runs", "optimization_results.yaml")
    results.parent.mkdir()
    results.touch()
    os.utime(results, (0, 0))  # of an earlier sweep

    def run(composed: ComposedCommand) -> None:
        config = composed.config
        if config.seed == 3:
            results.write_text("best_value: 1")  # as Optuna does after the last run
            raise ConfigError("enough")
        write_run(Path(config.run_dir), 1.0 * config.seed, settings=f"seed: {config.seed}\n")

    for seeds in ("1,2", "1,2,3"):
        shutil.rmtree("s", ignore_errors=True)
        with contextlib.suppress(ConfigError), caplog.at_level(logging.INFO, "nmt"):
            compose_command(COMMANDS["train"], ["-m", "run_dir=s", f"seed={seeds}"], run)
        table = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in table] == ["seed", "1", "2"]
        is_named = "the sweeper found are in runs/optimization_results.yaml" in caplog.text
        assert is_named == (seeds == "1,2,3")


@pytest.mark.usefixtures("two_runs")
def test_a_sweep_ends_with_a_table_of_its_runs_and_the_file_that_its_sweeper_has_written(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    Path("s/failed").mkdir()  # without metrics
    run_dirs = ["s/a=1,seed=2", "s/failed", "s/a=1,seed=1"]
    results = Path("runs", "optimization_results.yaml")
    results.parent.mkdir()
    results.touch()
    for modified_seconds, is_named in ((99, False), (100, True)):
        os.utime(results, (modified_seconds, modified_seconds))
        with caplog.at_level(logging.INFO, "nmt"):
            sweep._report_sweep(run_dirs, start_seconds=100)
        table = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in table] == ["seed", "1", "2"]
        assert (
            f"the best values that the sweeper found are in {results}" in caplog.text
        ) == is_named


@pytest.mark.usefixtures("two_runs")
def test_names_of_existing_runs_may_have_commas() -> None:
    config = composed("visualize", "run_dir=[s/a=1,seed=1,s/a=1,seed=2,s/a=1]")
    assert config.run_dir == ["s/a=1,seed=1", "s/a=1,seed=2", "s/a=1"]


@pytest.mark.slow
def test_runs_of_the_joblib_launcher_log_and_report_errors(
    tmp_path: Path, toy_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    monkeypatch.chdir(tmp_path)
    words = ["-m", *TINY, "max_updates=2", f"data_dir={toy_data}", "run_dir=s", "num_threads=1"]
    words += ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    program = [sys.executable, "-m", "nmt", "train"]
    done = subprocess.run([*program, *words, "seed=1,2"], capture_output=True, text=True)
    assert done.returncode == EXIT_DONE, done.stderr
    assert done.stderr.count("the run ends: 2 updates are done") == 2
    assert len(done.stdout.splitlines()) == 3
    done = subprocess.run([*program, *words, "seed=1,x"], capture_output=True, text=True)
    assert done.returncode == EXIT_USER
    assert done.stderr.splitlines()[-1].startswith("nmt-train: seed: Value 'x'")


@pytest.mark.slow
def test_a_sweep_ends_with_the_table_of_its_runs(
    tmp_path: Path,
    toy_data: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    options = [*TINY, "max_updates=2", f"data_dir={toy_data}", "run_dir=s"]
    write_run(tmp_path / "s" / "earlier", 1.0)
    assert command("train", "-m", "seed=1,2", options) == EXIT_DONE
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["seed", "updates", "best", "loss", "best", "BLEU", "run"]
    losses = []
    for line in table[1:]:
        [record] = read_records(Path(line.split()[-1]), "valid_loss")
        losses.append(record["valid_loss"])
        assert f"{record['valid_loss']:.4f}" in line
    assert len(losses) == 2
    assert losses == sorted(losses)
    shutil.rmtree("s/earlier")
    assert command("evaluate", "run_dir=s", f"data_dir={toy_data}") == EXIT_DONE
    header, *lines = capsys.readouterr().out.splitlines()
    assert "test BLEU" in header
    assert len(lines) == 2


@pytest.mark.slow
def test_a_dry_run_of_a_sweep_measures_runs_of_equal_cost_once(
    tmp_path: Path,
    toy_data: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dry_run, "_results", {})
    measured = []
    call_before(monkeypatch, dry_run, "_measure", lambda *_: measured.append(1))
    options = [word for word in TINY if not word.startswith("model.d_ff=")]
    options += ["max_updates=2", f"data_dir={toy_data}", "run_dir=s", "dry_run=true"]
    assert command("train", "-m", "seed=1,2", "model.d_ff=32,48", *options) == EXIT_DONE
    output = capfd.readouterr()
    assert len(measured) == 2  # of 4 runs: one for each size of the model
    assert output.err.count("memory and speed were measured for an earlier run") == 2
    assert output.out.count("hours:minutes") == 4
    assert not Path("s").exists() or not list(Path("s").rglob("checkpoints"))
