"""The trace of some updates of a run."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
from toy import command, train, write_corpus

from nmt.config import TrainConfig
from nmt.errors import ConfigError
from nmt.training import profiling
from nmt.training.profiling import UpdateProfiler


@pytest.mark.slow
def test_a_trace_has_the_updates_that_the_setting_names(tmp_path: Path) -> None:
    assert command("preprocess", write_corpus(tmp_path), "num_threads=1") == 0
    run_dir = tmp_path / "run"
    settings = ["max_updates=6", "valid_bleu=false", "tracker=[]", "device=cpu"]
    for profile, num_updates in (("2:4", 3), ("6:9", 1)):  # the run ends before 9
        train(tmp_path / "data", run_dir, *settings, f"profile={profile}")
        trace = json.loads((run_dir / "trace.json").read_text(encoding="utf-8"))
        names = [event.get("name", "") for event in trace["traceEvents"]]
        assert sum(name.startswith("Optimizer.step") for name in names) == num_updates
        for path in run_dir.rglob("*"):
            if path.is_file():
                path.unlink()


def test_a_trace_is_written_after_the_last_of_its_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = Mock()  # torch's profiler takes a second to start
    monkeypatch.setattr(profiling, "profile", profile)
    profiler = UpdateProfiler(range(2, 4), tmp_path / "trace.json")
    num_calls = []
    for update in (1, 2, 3, 4, 5):
        profiler.start_update(update)
        trace = profile.return_value
        num_calls.append((trace.start.call_count, trace.export_chrome_trace.call_count))
    assert num_calls == [(0, 0), (1, 0), (1, 0), (1, 1), (1, 1)]
    call_names = [name for name, *_ in trace.method_calls]
    assert call_names == ["start", "stop", "export_chrome_trace"]
    trace.export_chrome_trace.assert_called_with(str(tmp_path / "trace.json"))


def test_updates_to_profile_are_a_range() -> None:
    assert TrainConfig(profile="10:20").profiled_updates == range(10, 21)
    assert not TrainConfig().profiled_updates
    for profile in ("10", "20:10", "0:3", "a:b"):
        with pytest.raises(ConfigError, match=f"profile={profile}: must be FIRST:LAST"):
            TrainConfig(profile=profile)
