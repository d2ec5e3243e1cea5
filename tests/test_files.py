"""Files and folders are complete or missing, whatever interrupts writing."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch

from nmt.errors import NmtError
from nmt.runtime import files
from nmt.runtime.files import (
    remove_all_temporary,
    replace_file,
    replace_folder,
    replace_link,
    write_json,
)
from nmt.runtime.manifest import MANIFEST

MARKER = "meta.json"


def tree(folder: Path) -> dict[str, str]:
    """Read every file below `folder`; folders are empty strings."""
    return {
        str(path.relative_to(folder)): path.read_text() if path.is_file() else ""
        for path in sorted(folder.rglob("*"))
        if path.name != MANIFEST
    }


def fill(folder: Path, text: str) -> None:
    with replace_folder(folder, marker=MARKER) as temporary:
        (temporary / "deep").mkdir()
        (temporary / "deep/file").write_text(text)
        (temporary / MARKER).write_text('{"format_version": 1}')


def interrupt(folder: Path, error: type[BaseException]) -> None:
    def write() -> None:
        with replace_folder(folder, marker=MARKER) as temporary:
            (temporary / MARKER).write_text('{"format_version": 1}')
            raise error("interrupted")

    with pytest.raises(error, match="interrupted"):
        write()


WRITTEN = {"deep": "", "deep/file": "text", MARKER: '{"format_version": 1}'}


def test_a_folder_appears_whole_with_its_parents_when_its_block_ends(tmp_path: Path) -> None:
    with replace_folder(tmp_path / "new", marker=MARKER) as temporary:
        assert temporary.parent == tmp_path  # the same file system, so that a rename is enough
        assert list(temporary.iterdir()) == []
        assert not (tmp_path / "new").exists()
        safetensors.torch.save_file({"weight": torch.zeros(1)}, temporary / "model.safetensors")
    modes = {(tmp_path / name).stat().st_mode & 0o666 for name in ("new", "new/model.safetensors")}
    assert len(modes) == 1  # every user that can read the folder can read its files
    fill(tmp_path / "a/b/new", "text")
    assert tree(tmp_path / "a/b/new") == WRITTEN
    assert [path.name for path in (tmp_path / "a/b").iterdir()] == ["new"]


def test_an_exception_changes_nothing(tmp_path: Path) -> None:
    for error in (RuntimeError, KeyboardInterrupt, SystemExit):
        interrupt(tmp_path / "new", error)
        interrupt(tmp_path / "a/b/new", error)
        assert tree(tmp_path) == {}
    fill(tmp_path / "data", "text")
    expected = tree(tmp_path)
    interrupt(tmp_path / "data", RuntimeError)
    assert tree(tmp_path) == expected


def test_foreign_and_irreplaceable_folders_are_refused_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home/thesis").write_text("text")
    (tmp_path / "file").write_text("text")
    expected = tree(tmp_path)
    for name in ("home", "file"):
        with (
            pytest.raises(NmtError, match=rf"{name} exists and has no {MARKER}"),
            replace_folder(tmp_path / name, marker=MARKER),
        ):
            pytest.fail("the block must not be entered")
    assert tree(tmp_path) == expected
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(NmtError, match="empty is the current folder"):
        fill(Path("."), "text")
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os.path, "ismount", lambda path: path == tmp_path / "empty")
        with pytest.raises(NmtError, match="empty is a mount point"):
            fill(tmp_path / "empty", "text")
    fill(tmp_path / "empty", "text")
    assert tree(tmp_path / "empty") == WRITTEN


def test_an_old_folder_is_replaced_as_a_whole_over_leftovers_and_behind_a_link(
    tmp_path: Path,
) -> None:
    """A data folder may be a link to another disk. In a container, a new process may have the id of
    a killed one, and so the names of its leftovers.
    """
    fill(tmp_path / "disk/data", "old")
    for suffix in ("tmp", "old"):
        leftover = tmp_path / f"disk/.data.{files._HOST}.{os.getpid()}.{suffix}"
        leftover.mkdir()
        (leftover / "half").write_text("half")
    (tmp_path / "disk/data/stale").write_text("stale")
    (tmp_path / "data").symlink_to("disk/data")
    fill(tmp_path / "data", "text")
    assert tree(tmp_path / "data") == WRITTEN


def test_a_file_is_replaced_completely_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for text in ("old", "new"):
        with replace_file(path) as temporary:
            temporary.write_text(text)
            assert temporary.parent == tmp_path
            assert not path.exists() or path.read_text() == "old"
        assert tree(tmp_path) == {"file": text}
    with contextlib.suppress(RuntimeError), replace_file(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError("interrupted")
    assert tree(tmp_path) == {"file": "new"}


def test_a_link_is_made_and_changed_also_to_a_missing_target(tmp_path: Path) -> None:
    link = tmp_path / "latest"
    (tmp_path / "step-1").mkdir()
    for name in ("gone", "step-1", "also-gone"):
        replace_link(link, name)
        assert os.readlink(link) == name
        assert link.exists() == (name == "step-1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-1"]


def test_equal_json_is_equal_bytes(tmp_path: Path) -> None:
    write_json(tmp_path / "a", {"x": 1, "ü": [2]})
    write_json(tmp_path / "b", {"ü": [2], "x": 1})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert (tmp_path / "a").read_bytes().endswith(b"}\n")
    assert "ü" in (tmp_path / "a").read_text(encoding="utf-8")


def test_leftovers_are_removed_and_renamed_folders_restored(tmp_path: Path) -> None:
    for name, text in (
        (".a.host.7.old", "a"),
        (".b.host.7.old", "stale"),
        (".c.host.7.tmp", "c"),
        ("b", "b"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(text)
    (tmp_path / ".d.host.7.tmp").write_text("half")
    remove_all_temporary(tmp_path)
    assert tree(tmp_path) == {"a": "", "a/file": "a", "b": "", "b/file": "b"}
