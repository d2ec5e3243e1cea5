"""Checkpoints survive a full disk, a folder that cannot be written and damage, and cost no wait."""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from exporting import random_model
from faults import train_and_die
from ranks import child
from tiny import assert_same_tensors
from toy import assert_same_weights, call_before, read_values, train

from nmt import checkpoint
from nmt.config import TrainConfig
from nmt.data.tokenizer import Tokenizer
from nmt.errors import ModelError
from nmt.runtime.metadata import to_dataclass
from nmt.training import checkpoints, metrics
from nmt.training.checkpoints import Saver, TrainerState, load_checkpoint, load_newest
from nmt.training.learner import Learner
from nmt.training.metrics import MetricsWriter

PLAIN = ["valid_bleu=false", "validate_every_updates=100", "max_updates=12"]
FEW = ["keep_last=1", "average_last=1", "checkpoint_every_updates=1"]


@pytest.fixture(scope="module")
def finished_run(toy_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 updates, with checkpoints at 4, 8 and 12."""
    folder = tmp_path_factory.mktemp("checkpoints") / "run"
    assert train(toy_data, folder, PLAIN) == 0
    return folder


def steps(run_dir: Path) -> list[int]:
    """Return the updates that have a checkpoint; there must be no incomplete folder."""
    updates = []
    for path in sorted((run_dir / "checkpoints").iterdir()):
        assert not path.name.startswith(".")
        if path.name.startswith("step-"):
            updates.append(int(path.name[5:]))
    return updates


def before_save(action: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Call `action` with the update of a checkpoint just before it is written."""

    def act(folder: Path, *_: Any, **__: Any) -> None:
        action(checkpoint.parse_checkpoint_update(folder))

    call_before(monkeypatch, checkpoints, "save_model", act)


def test_a_state_holds_the_operations_of_a_run_of_months() -> None:
    assert to_dataclass(TrainerState, {"flops": 3e20}, Path()).flops == 3e20
    with pytest.raises(Exception, match="num_updates is 9223372036854775808, must be below"):
        to_dataclass(TrainerState, {"num_updates": 1 << 63}, Path())


# --- writes that fail


@pytest.mark.slow
def test_writes_that_fail_leave_the_last_good_checkpoint_and_are_an_error_at_the_end(
    finished_run: Path,
    toy_data: Path,
    tmp_path: Path,
    limit_files: Callable[[int], None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    failed = r"checkpoint of update (\d+) in .*run not written: .+; "
    for good_update, code, failed_updates, newest in (
        (4, 2, ["8", "12"], "step-00000004 is the newest"),
        (12, 0, ["4", "8"], "there is no older checkpoint"),  # a later one succeeds
    ):
        run = tmp_path / str(good_update) / "run"
        with pytest.MonkeyPatch.context() as patch:

            def limit_other_saves(update: int, good_update: int = good_update) -> None:
                limit_files(-1 if update == good_update else 20_000)

            before_save(limit_other_saves, patch)
            assert train(toy_data, run, PLAIN) == code
        limit_files(-1)
        err = capfd.readouterr().err
        assert re.findall(failed + newest + "; the run goes on", err) == failed_updates
        last_line = err.splitlines()[-1]
        assert bool(
            re.fullmatch(f"nmt-train: {failed}{newest}; free disk space .*", last_line)
        ) == bool(code)
        assert steps(run) == [good_update]
        assert train(toy_data, run, PLAIN) == 0
        assert_same_weights(finished_run, run)


@pytest.mark.slow
def test_a_run_folder_that_cannot_be_written_is_one_line(
    toy_data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for name in ("settings/config.yaml", "figures/metrics.jsonl"):
        (tmp_path / name).mkdir(parents=True)
    for name, problem in (
        ("file/run", "run_dir={} cannot be written: Not a directory; fix this, or .*"),
        ("settings", "{}/config.yaml cannot be read: Is a directory; .*"),
        ("figures", "{}/metrics.jsonl cannot be read: Is a directory; .*"),
    ):
        assert train(toy_data, tmp_path / name, PLAIN) == 2
        err = capfd.readouterr().err
        line = err.splitlines()[-1]
        assert re.fullmatch("nmt-train: " + problem.format(tmp_path / name), line)
        assert "Traceback" not in err


def test_a_line_of_metrics_that_is_cut_off_is_left_out(
    tmp_path: Path, limit_files: Callable[[int], None]
) -> None:
    log = MetricsWriter(tmp_path, TrainerState(), TrainConfig(tracker=[]), is_main=True)
    for update in (1, 2, 3):
        path = tmp_path / "metrics.jsonl"
        if update == 2:
            limit_files(path.stat().st_size + 9)
        else:
            limit_files(-1)
        log.write({"update": update, "loss": 1.0})
    assert read_values(tmp_path, "loss") == [1, 3]


def test_the_newest_intact_checkpoint_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [checkpoint.checkpoint_dir(tmp_path, update) for update in (4, 8, 12)]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "config.json").touch()
    damaged_folders: list[Path] = []

    def load(folder: Path) -> Path:
        if folder in damaged_folders:
            raise ModelError(f"{folder} is damaged")
        return folder

    monkeypatch.setattr(checkpoints, "load_checkpoint", load)
    for folder in reversed(folders):
        assert load_newest(tmp_path) == folder
        damaged_folders.append(folder)
    with pytest.raises(ModelError, match="no checkpoint in .* can be read"):
        load_newest(tmp_path)


def test_a_copy_in_host_memory_is_not_changed_by_training() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    state = checkpoints.copy_tree_to_host({"groups": [{"weight": weight}], "step": 3})
    with torch.no_grad():
        weight.zero_()
    assert state["step"] == 3
    assert state["groups"][0]["weight"].tolist() == [1.0, 1.0]
    assert not state["groups"][0]["weight"].requires_grad


def test_metrics_after_the_checkpoint_are_removed_and_its_validation_is_repeated(
    tmp_path: Path,
) -> None:
    config = TrainConfig(tracker=[])
    log = MetricsWriter(tmp_path, TrainerState(), config, is_main=True)
    for update in (1, 2, 3):
        log.write({"update": update, "loss": update})
        log.write({"update": update, "valid_loss": update})
    log.close()
    for num_updates, validated_update, losses, valid_losses in (
        (2, 2, [1, 2], [1, 2]),
        (2, 1, [1, 2], [1]),  # the validation after update 2 was not saved
        (1, 1, [1], [1]),
    ):
        state = TrainerState(num_updates=num_updates, validated_update=validated_update)
        log = MetricsWriter(tmp_path, state, config, is_main=True)
        log.close()
        case = (num_updates, validated_update)
        assert log.lost_validation == (validated_update < num_updates), case
        assert read_values(tmp_path, "loss", "loss") == losses, case
        assert read_values(tmp_path, "valid_loss", "valid_loss") == valid_losses, case


def test_the_time_of_a_run_includes_the_ranks_and_the_processes_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TrainConfig(tracker=[])
    log = MetricsWriter(tmp_path, TrainerState(), config, is_main=True)
    for update in (1, 2):
        times = {"cpu_seconds": 1000.0 * update, "wall_seconds": 500.0 * update}
        log.write({"update": update, "loss": 1.0, **times})
    log.write({"update": 2, "event": "loss spike", "batch": ""})
    log.close()
    state = TrainerState(num_updates=2, validated_update=2)
    clock = MetricsWriter(tmp_path, state, config, is_main=True).clock
    monkeypatch.setattr(metrics, "gather", lambda seconds: [seconds, 3.0])
    sum(range(300_000))  # takes CPU time
    first = clock.read()
    assert 2003 < first["cpu_seconds"] < 2063
    assert 1000 < first["wall_seconds"] < 1060
    second = clock.read()
    assert second["cpu_seconds"] > first["cpu_seconds"]
    state = TrainerState(num_updates=1, validated_update=1)  # what came later was lost in a kill
    clock = MetricsWriter(tmp_path, state, config, is_main=True).clock
    assert 1003 <= clock.read()["cpu_seconds"] < 1063
    assert 500 <= clock.read()["wall_seconds"] < 560


@pytest.mark.slow
def test_a_best_score_of_another_metric_does_not_count(toy_data: Path, tmp_path: Path) -> None:
    options = ["validate_every_updates=2", "checkpoint_every_updates=2", "valid_bleu=true"]
    for max_updates, metric in ((2, "bleu"), (6, "loss")):
        changes = [f"max_updates={max_updates}", f"best_metric={metric}"]
        assert train(toy_data, tmp_path / "run", options, changes) == 0
    losses = read_values(tmp_path / "run", "valid_loss", "valid_loss")
    assert min(losses) == losses[-1]
    assert (tmp_path / "run/checkpoints/best").resolve().name == "step-00000006"


@pytest.mark.slow
def test_a_run_that_was_killed_before_it_linked_its_newest_checkpoint_links_it_later(
    finished_run: Path, toy_data: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished_run, run, symlinks=True)
    newest = steps(run)[-1]
    for old_target in (None, "step-00000001"):
        (run / "checkpoints/latest").unlink()
        if old_target:
            (run / "checkpoints/latest").symlink_to(old_target)
        assert train(toy_data, run, PLAIN) == 0
        assert os.readlink(run / "checkpoints/latest") == f"step-{newest:08d}"


def test_the_newest_intact_checkpoints_and_the_best_are_kept(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    model = random_model(tmp_path / "model", tokenizer)
    info = checkpoint.load_info(model)
    weights = checkpoint.load_weights(model)
    latest = tmp_path / "checkpoints/latest"
    for newest_intact, keep_last, updates, expected in (
        (0, 2, range(1, 7), [2, 5, 6]),
        (2, 1, range(3, 5), [2, 4]),  # all checkpoints after update 2 are damaged
        (2, 2, [5], [2, 5]),  # a damaged one before the next checkpoint
    ):
        saver = Saver(tmp_path, update=newest_intact, keep_last=keep_last)
        if newest_intact:  # the link still led to update 6
            assert latest.resolve().name == "step-00000002"
        for update in updates:
            updated_info = replace(info, updates=update)
            saver.save(weights, updated_info, tokenizer, trainer_content={}, best_updates=[2])
        saver.finish()
        assert steps(tmp_path) == expected
        assert latest.resolve().name == f"step-{expected[-1]:08}"


# --- damage


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.slow
def test_a_run_goes_on_from_the_checkpoint_before_one_that_is_damaged_or_gone(
    finished_run: Path, toy_data: Path, tmp_path: Path, capfd: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def copy(name: str) -> Path:
        return shutil.copytree(finished_run, tmp_path / name, symlinks=True)

    damages: list[tuple[str, Callable[[Path], None], str]] = [
        ("model.safetensors", truncate, "is damaged"),
        ("model.safetensors", Path.unlink, "does not exist"),
        ("trainer.pt", lambda path: os.truncate(path, 0), "is damaged"),
        ("trainer.pt", Path.unlink, "does not exist"),
        ("", shutil.rmtree, ""),  # the target of `latest` is missing
        ("trainer.pt", truncate, "is damaged"),
    ]
    for i, (name, damage, problem) in enumerate(damages):
        run = copy(str(i))
        damage(run / "checkpoints/step-00000012" / name)
        loaded = load_newest(run)
        assert loaded is not None
        assert loaded.state.num_updates == 8, i
        message = rf"step-00000012/{name} {problem}.*; trying the checkpoint before"
        assert bool(re.search(message, caplog.text)) == bool(name), i
        caplog.clear()
    assert train(toy_data, run, PLAIN) == 0
    assert "resuming after update 8 from" in capfd.readouterr().err
    assert_same_weights(finished_run, run)
    assert steps(run) == [4, 8, 12]
    # a damaged one does not count among the newest to keep
    run = copy("few")
    truncate(run / "checkpoints/step-00000012/trainer.pt")
    log = tmp_path / "log"
    with child(log, train_and_die, "update", 3, "0", toy_data, run, PLAIN, FEW) as process:
        assert process.wait() == -9
    updates = {int(path.name[5:]) for path in run.glob("checkpoints/step-*")}
    assert updates in ({9}, {9, 10}, {10})
    # a run with only damaged checkpoints is not started again
    run = copy("run")
    for path in run.glob("checkpoints/step-*/trainer.pt"):
        truncate(path)
    with pytest.raises(ModelError, match="no checkpoint in .*run can be read; choose another run"):
        load_newest(run)


# --- never none, and no waiting


@pytest.mark.slow
def test_there_is_a_whole_checkpoint_after_every_step_of_every_write(
    finished_run: Path, toy_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    counts = []

    def count_complete(*_: Any, **__: Any) -> None:
        if threading.current_thread().name.startswith("saver"):
            folders = run.glob("checkpoints/step-*")
            counts.append(sum(len(os.listdir(folder)) == 5 for folder in folders))

    for name in ("rename", "replace", "unlink", "rmdir", "mkdir", "fsync"):
        call_before(monkeypatch, os, name, count_complete)
    assert train(toy_data, run, PLAIN, FEW) == 0
    monkeypatch.undo()
    assert 0 not in counts[counts.index(1) :]
    assert max(counts) == 2
    assert len(counts) > 12 * 10
    assert steps(run) == [12]


@pytest.mark.slow
def test_saving_does_not_hold_up_training(
    finished_run: Path, toy_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def wait_for_updates(_: int) -> None:
        deadline = time.monotonic() + 300  # a disk so slow that four updates are done meanwhile
        while events.count("update") < 8 and time.monotonic() < deadline:
            time.sleep(0.01)
        events.append("save")

    before_save(wait_for_updates, monkeypatch)
    call_before(monkeypatch, Learner, "update", lambda *_, **__: events.append("update"))
    assert train(toy_data, tmp_path / "run", PLAIN, "max_updates=8") == 0
    assert events[: events.index("save")].count("update") == 8
    # the checkpoint has the weights at the time of saving, not the later ones
    name = "checkpoints/step-00000004"
    assert_same_tensors(
        safetensors.torch.load_file(tmp_path / "run" / name / "model.safetensors"),
        safetensors.torch.load_file(finished_run / name / "model.safetensors"),
    )
    saved = load_checkpoint(tmp_path / "run" / name).learner
    expected = load_checkpoint(finished_run / name).learner
    assert_same_tensors(saved["optimizers"][0]["state"], expected["optimizers"][0]["state"])
