"""Checkpoints survive a full disk, a folder that cannot be written and damage, and cost no wait."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from faults import train_and_die
from ranks import child
from toy import assert_same_weights, read_records, train

from nmt import checkpoint, files
from nmt.training.learner import Learner

PLAIN = ["valid_bleu=false", "validate_every_updates=100", "max_updates=12"]
FULL = r"checkpoint of update (\d+) in .*run not written: .+; step-00000004 is the newest"


@pytest.fixture(scope="module")
def whole(toy_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 updates, with checkpoints at 4, 8 and 12."""
    folder = tmp_path_factory.mktemp("checkpoints") / "run"
    assert train(toy_data, folder, *PLAIN) == 0
    return folder


def steps(run_dir: Path) -> list[int]:
    """Return the updates that have a checkpoint; nothing half done lies beside them."""
    found = [path.name for path in (run_dir / "checkpoints").iterdir()]
    assert not [name for name in found if name.startswith(".")]
    return sorted(int(name[5:]) for name in found if name.startswith("step-"))


def before_save(action: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Call `action` with the update of a checkpoint just before it is written."""
    save = checkpoint.save_model

    def acting(folder: Path, *arguments: Any, **named: Any) -> None:
        action(checkpoint.checkpoint_update(folder))
        save(folder, *arguments, **named)

    monkeypatch.setattr(checkpoint, "save_model", acting)


# --- writes that fail


@pytest.fixture
def bound_files() -> Iterator[Callable[[int], None]]:
    """Let no file of this process grow above so many bytes, as on a full disk; -1 ends that."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_failing_write_leaves_the_last_good_checkpoint(
    whole: Path,
    toy_data: Path,
    tmp_path: Path,
    bound_files: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    before_save(lambda update: bound_files(-1 if update == 4 else 20_000), monkeypatch)
    code = train(toy_data, tmp_path / "run", *PLAIN)
    bound_files(-1)
    err = capfd.readouterr().err
    assert code == 2
    assert [int(n) for n in re.findall(FULL + "; the run goes on", err)] == [8, 12]
    assert re.fullmatch(f"nmt-train: {FULL}; free space .*", err.splitlines()[-1])
    assert steps(tmp_path / "run") == [4]
    monkeypatch.undo()
    assert train(toy_data, tmp_path / "run", *PLAIN) == 0
    assert_same_weights(whole, tmp_path / "run")


def test_a_write_that_failed_is_no_error_when_a_later_one_succeeds(
    whole: Path,
    toy_data: Path,
    tmp_path: Path,
    bound_files: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    before_save(lambda update: bound_files(-1 if update == 12 else 20_000), monkeypatch)
    assert train(toy_data, tmp_path / "run", *PLAIN) == 0
    err = capfd.readouterr().err
    assert re.findall(r"checkpoint of update (\d+) .* none before it; the run goes on", err) == [
        "4",
        "8",
    ]
    assert steps(tmp_path / "run") == [12]
    assert_same_weights(whole, tmp_path / "run")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("may not mount a small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(disk: Path) -> None:
    with (disk / "ballast").open("wb", buffering=0) as stream:
        try:
            while stream.write(bytes(4096)):
                pass
        except OSError:
            return


def test_a_full_disk_ends_no_run_and_loses_nothing(
    whole: Path,
    toy_data: Path,
    small_disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    run = small_disk / "run"
    before_save(lambda update: update == 8 and fill(small_disk), monkeypatch)
    assert train(toy_data, run, *PLAIN) == 2
    err = capfd.readouterr().err
    assert "No space left on device" in err.splitlines()[-1]
    assert "12 of 12 updates" in err
    assert steps(run) == [4]
    monkeypatch.undo()
    (small_disk / "ballast").unlink()
    assert train(toy_data, run, *PLAIN) == 0
    assert_same_weights(whole, run)
    assert [r["update"] for r in read_records(run, "nll")][-1] == 12


def test_a_disk_that_is_full_or_read_only_from_the_start_is_one_line(
    toy_data: Path, small_disk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fill(small_disk)
    assert train(toy_data, small_disk / "run", *PLAIN) == 2
    assert "No space left on device" in capfd.readouterr().err.splitlines()[-1]
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert train(toy_data, small_disk / "other", *PLAIN) == 2
    last = capfd.readouterr().err.splitlines()[-1]
    assert re.fullmatch(r"nmt-train: /.*/disk/other.*: Read-only file system", last)


# --- damage


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def remove(path: Path) -> None:
    shutil.rmtree(path.parent)  # and `latest` leads nowhere


def test_a_run_goes_on_from_the_checkpoint_before_one_that_is_damaged_or_gone(
    whole: Path, toy_data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    damages: list[tuple[str, Callable[[Path], None]]] = [
        ("model.safetensors", truncate),
        ("model.safetensors", Path.unlink),
        ("trainer.pt", truncate),
        ("trainer.pt", empty),
        ("trainer.pt", remove),
    ]
    for i, (name, damage) in enumerate(damages):
        run = shutil.copytree(whole, tmp_path / str(i), symlinks=True)
        damage(run / "checkpoints/step-00000012" / name)
        assert train(toy_data, run, *PLAIN) == 0
        err = capfd.readouterr().err
        message = rf"step-00000012/{name} .*; trying the checkpoint before"
        assert bool(re.search(message, err)) == (damage is not remove), (name, damage)
        assert "go on after update 8, from" in err
        assert_same_weights(whole, run)
        assert steps(run) == [4, 8, 12]


def test_a_run_with_damaged_checkpoints_alone_does_not_begin_again(
    whole: Path, toy_data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(whole, tmp_path / "run", symlinks=True)
    for path in run.glob("checkpoints/step-*/trainer.pt"):
        truncate(path)
    assert train(toy_data, run, *PLAIN) == 2
    last = capfd.readouterr().err.splitlines()[-1]
    assert re.fullmatch(
        "nmt-train: no checkpoint in .*run can be read; choose another run_dir", last
    )


def test_a_damaged_checkpoint_does_not_count_among_the_newest_to_keep(
    whole: Path, toy_data: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(whole, tmp_path / "run", symlinks=True)
    truncate(run / "checkpoints/step-00000012/trainer.pt")
    few = ["keep_last=1", "average_last=1", "checkpoint_every_updates=1"]
    with child(
        tmp_path / "log", train_and_die, "update", 3, "0", toy_data, run, *PLAIN, *few
    ) as one:
        assert one.wait() == -9
    found = {int(path.name[5:]) for path in run.glob("checkpoints/step-*")}
    assert found
    assert found <= {9, 10}


# --- never none, and no waiting


def test_there_is_a_whole_checkpoint_after_every_step_of_every_write(
    whole: Path, toy_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, seen = tmp_path / "run", []

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **named: Any) -> Any:
            result = original(*arguments, **named)
            if threading.current_thread().name.startswith("saver"):
                places = run.glob("checkpoints/step-*")
                seen.append(sum(len(list(place.iterdir())) == 4 for place in places))
            return result

        return noted

    for name in ("rename", "replace", "unlink", "rmdir", "mkdir", "fsync"):
        monkeypatch.setattr(os, name, noting(getattr(os, name)))
    few = ["keep_last=1", "average_last=1", "checkpoint_every_updates=1"]
    assert train(toy_data, run, *PLAIN, *few) == 0
    monkeypatch.undo()
    assert 0 not in seen[seen.index(1) :]
    assert max(seen) == 2
    assert len(seen) > 12 * 10
    assert steps(run) == [12]


def test_what_a_kill_left_while_a_folder_was_replaced_is_put_back_or_removed(
    tmp_path: Path,
) -> None:
    for name, number in ((".step-4.77.old", 1), (".step-8.77.old", 2), ("step-8", 3)):
        (tmp_path / name).mkdir()
        files.write_json(tmp_path / name / "config.json", number)
    (tmp_path / ".step-9.77.tmp").mkdir()
    files.remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-4", "step-8"]
    assert (tmp_path / "step-4/config.json").read_text().strip() == "1"
    assert (tmp_path / "step-8/config.json").read_text().strip() == "3"


def test_saving_does_not_hold_up_training(
    whole: Path, toy_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    save, update = checkpoint.save_model, Learner.update

    def slow_save(*arguments: Any, **named: Any) -> None:
        events.append("begin")
        time.sleep(0.3)  # a slow disk
        save(*arguments, **named)
        events.append("end")

    def noted_update(*arguments: Any, **named: Any) -> Any:
        events.append("update")
        return update(*arguments, **named)

    monkeypatch.setattr(checkpoint, "save_model", slow_save)
    monkeypatch.setattr(Learner, "update", noted_update)
    assert train(toy_data, tmp_path / "run", *PLAIN, "max_updates=8") == 0
    begin, end = events.index("begin"), events.index("end")
    assert events[begin:end].count("update") == 4
    # what was written while training went on is what there was when it was saved
    places = [run / "checkpoints/step-00000004" for run in (whole, tmp_path / "run")]
    one, other = (safetensors.torch.load_file(place / "model.safetensors") for place in places)
    assert all(torch.equal(one[name], other[name]) for name in one)
    states = [torch.load(place / "trainer.pt", weights_only=True) for place in places]
    assert torch.equal(*(s["learner"]["optimizer"]["state"][0]["exp_avg"] for s in states))
