"""The benchmark without other toolkits: its report, its turns, and our own drivers."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from toy import write_corpus

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "scripts" / "benchmark"
sys.path.insert(0, str(FOLDER))

import report  # noqa: E402
from comparisons import take_limits  # noqa: E402
from engines import BENCHMARK, TRAIN, TRANSLATE  # noqa: E402
from settings import parse_model  # noqa: E402
from workers import Worker, WorkerError, take_turns  # noqa: E402


def make_section(**changes: Any) -> report.Section:
    settings: dict[str, Any] = {
        "title": "Work",
        "setting": "one line",
        "unit": "tokens a second",
        "rates": {"ours": [300.0, 500.0, 400.0], "slow": [100.0], "fast": [200.0], "gone": []},
        "columns": {"peak memory": {"ours": "1 GB"}},
        "baselines": {"best peer": ["slow", "fast", "gone"], "unmeasured": ["gone"]},
        "failures": {"gone": "not installed"},
    }
    return report.Section(**settings | changes)


def test_ratio_is_to_the_median_of_the_best_peer() -> None:
    rows = make_section().rows()
    assert [row[0] for row in rows[1:]] == ["ours", "fast", "slow"]
    assert rows[0] == ["engine", "tokens a second", "range", "x best peer", "peak memory"]
    assert rows[1] == ["ours", "400", "300 to 500", "2.00", "1 GB"]
    assert rows[3][3] == "0.50"
    rows = make_section(lower_is_better=True).rows()
    assert [row[0] for row in rows[1:]] == ["slow", "fast", "ours"]
    assert rows[3][3] == "4.00"


def test_report_names_engines_without_figures_and_sizes_are_read_from_text(tmp_path: Path) -> None:
    _, model = parse_model("3+2:64:128:4")
    assert (model.num_encoder_layers, model.num_decoder_layers) == (3, 2)
    assert (model.d_model, model.d_ff, model.num_heads) == (64, 128, 4)
    paths = report.write(tmp_path, "x", {"nmt": "1"}, [make_section()])
    assert "- gone: not installed" in paths[0].read_text("utf-8")
    (section,) = json.loads(paths[1].read_text("utf-8"))["sections"]
    assert section["median"] == {"ours": 400.0, "slow": 100.0, "fast": 200.0}
    assert section["failed"] == {"gone": "not installed"}


def test_engines_with_other_matrix_multiplications_have_limits_of_their_own() -> None:
    turns: dict[str, list[dict[str, Any]]] = {
        "limit": [{"flops": 5.0}, {"flops": 1.0}, {"flops": 3.0}],
        "limit of b": [{"flops": 7.0}],
        "a": [],
        "b": [],
    }
    limits, limit_turns = take_limits(turns, "flops")
    assert limits == {"a": 3.0, "b": 7.0}
    assert set(turns) == {"a", "b"}
    assert set(limit_turns) == {"limit", "limit of b"}
    assert take_limits({"a": []}, "flops") == ({}, {})


def test_every_engine_has_a_driver_and_an_environment() -> None:
    for engine in [*TRAIN.values(), *TRANSLATE.values()]:
        assert (FOLDER / "drivers" / engine.driver).is_file(), engine
        assert engine.environment in ["nmt", *BENCHMARK["environments"]], engine


@pytest.fixture
def drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of drivers: one that counts its turns, and one that dies in its second."""
    folder = tmp_path / "drivers"
    folder.mkdir()
    (folder / "turns.py").write_text((FOLDER / "drivers" / "turns.py").read_text("utf-8"))
    start = "from turns import Turns\nturns = Turns()\nprint('noise')\nturns.ready(version='1')\n"
    (folder / "good.py").write_text(
        start + "n = 0\nwhile True:\n    n += 1\n    turns.end(turn=n)\n"
    )
    (folder / "bad.py").write_text(start + "turns.end(turn=1)\nraise ValueError('too hot')\n")
    monkeypatch.setattr("workers._DRIVERS", folder)
    return folder


def test_workers_take_turns_and_one_that_dies_is_left_out(drivers: Path, tmp_path: Path) -> None:
    job = {"threads": 1}
    workers = [
        Worker(name, Path(sys.executable), f"{name}.py", job, tmp_path) for name in ("bad", "good")
    ]
    messages: list[str] = []
    versions, turns, failures = take_turns(workers, 3, messages.append)
    assert versions["good"]["version"] == "1"
    assert [turn["turn"] for turn in turns["good"]] == [1, 2, 3]
    assert [turn["turn"] for turn in turns["bad"]] == [1]
    assert failures == {"bad": "exit status 1: ValueError: too hot"}
    assert turns["good"][0]["peak_bytes"] > 1e6
    assert turns["good"][0]["cpu_seconds"] < 1
    _, turns, _ = take_turns(workers[1:], 3, messages.append, deadline=0.0)  # long past
    assert [turn["turn"] for turn in turns["good"]] == [1]
    worker = Worker("x", Path(sys.executable), "missing.py", job, tmp_path)
    with pytest.raises(WorkerError, match=r"exit status 2.*missing\.py"):
        worker.start()


def measure(folder: Path, section: str) -> Any:
    """Run one part of the benchmark with nmt only; return the section of its JSON."""
    size = "1+1:16:32:2"
    command = [
        sys.executable,
        str(FOLDER / "run.py"),
        "--only",
        section,
        "--engines",
        "nmt",
        "--here",
    ]
    command += ["--corpus", str(folder / "corpus"), "--src", "src", "--tgt", "tgt"]
    command += ["--vocab-size", "310", "--models", size, "--translate-model", size]
    command += ["--latency-models", size, "--latency-lines", "3"]
    command += ["--model-updates", "3", "--batch-tokens", "200", "--lines", "4", "--beams", "2"]
    command += ["--lengths", "5", "--repeats", "2", "--turn-seconds", "0", "--cache", str(folder)]
    command += ["--output", str(folder), "--name", "figures"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    (section,) = json.loads((folder / "figures.json").read_text("utf-8"))["sections"]
    assert not section["failed"]
    return section


@pytest.mark.long
def test_training_counts_real_tokens_and_translation_of_fixed_length_that_many(
    tmp_path: Path,
) -> None:
    write_corpus(tmp_path)
    (tmp_path / "corpus").mkdir()
    for path in tmp_path.glob("*.txt"):
        name = path.stem.replace("valid", "val")
        (tmp_path / f"corpus/{name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    section = measure(tmp_path, "train")
    assert len(section["turns"]["nmt"]) == len(section["limits"]["limit"]) == 2
    for turn in section["turns"]["nmt"]:
        assert 0 < turn["src_tokens"] + turn["tgt_tokens"] <= turn["positions"] <= 2 * 200
    assert 0 < float(section["columns"]["share of the limit"]["nmt"].rstrip("%")) < 100
    section = measure(tmp_path, "translate")
    assert [turn["tgt_tokens"] for turn in section["turns"]["nmt"]] == [4 * 5, 4 * 5]
    section = measure(tmp_path, "latency")
    for turn in section["turns"]["nmt"]:
        assert turn["sentences"] == len(turn["milliseconds"]) == 3
        assert turn["cpu_seconds"] > 0
        assert turn["wall_seconds"] * 1000 > sum(turn["milliseconds"])
    section = measure(tmp_path, "startup")
    assert section["columns"]["share of import torch"]["import torch"] == "100%"
    assert len(section["turns"]["nmt-translate backend=auto"]) == 2
