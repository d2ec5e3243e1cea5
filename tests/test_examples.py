"""The scripts in scripts/examples/ give their documented results."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parent.parent / "scripts/examples"


def test_the_copy_task_gives_the_numbers_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("copy_task", EXAMPLES / "copy_task.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", ["copy_task.py"])
    module.main()
    assert capsys.readouterr().out.splitlines()[-1] == "1 2 3 4 5 6 7 8 9 10"
