"""The table of scripts/ablation.py has the means, intervals and differences of its runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def ablation(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return __import__("ablation")


def write_results(ablation: Any, folder: Path, name: str, scores: list[float]) -> None:
    for seed, score in enumerate(scores, start=1):
        run_dir = folder / f"{name.replace(' ', '-')}-{seed}"
        run_dir.mkdir()
        found = ablation.Result(2.0, score, score + 0.5, 60.0, 1000.0, 4_000_000)
        (run_dir / "result.json").write_text(json.dumps(vars(found)))


def test_a_row_has_means_intervals_and_a_verdict(ablation: Any, tmp_path: Path) -> None:
    write_results(ablation, tmp_path, "baseline", [36.0, 37.0, 38.0])
    write_results(ablation, tmp_path, "R-Drop", [40.0, 41.0, 42.0])
    write_results(ablation, tmp_path, "one head of keys", [36.5, 37.5, 38.5])
    write_results(ablation, tmp_path, "Muon", [39.0])
    rows = [line.split(" | ") for line in ablation.table(tmp_path, 10).splitlines() if "|" in line]
    cells = {row[0].removeprefix("| "): row[1:] for row in rows[2:]}
    assert list(cells) == ["baseline", "one head of keys", "R-Drop", "Muon"]
    # 95 % of Student's t with 2 degrees of freedom: 4.303 * 1 / sqrt(3) = 2.48
    assert cells["baseline"][3] == "37.00 ± 2.48"
    assert cells["R-Drop"][3:5] == ["41.00 ± 2.48", "41.50 ± 2.48"]
    # with 4: 2.776 * sqrt(2 / 3) = 2.27, below 4 and above 0.5
    assert cells["R-Drop"][-1] == "+4.00 |"
    assert cells["one head of keys"][-1] == "+0.50 (noise) |"
    assert cells["Muon"][-1] == "+2.00 (one seed) |"
    assert all(row[1] == "4,000,000" for row in cells.values())


def test_a_variant_with_more_updates_is_compared_with_a_baseline_that_has_as_many(
    ablation: Any, tmp_path: Path
) -> None:
    for name, score in (("baseline", 36.0), ("R-Drop x2", 38.0), ("baseline x2", 37.0)):
        write_results(ablation, tmp_path, name, [score])
    write_results(ablation, tmp_path, "R-Drop x4", [40.0])  # a baseline x4 is not done
    rows = [line.split(" | ") for line in ablation.table(tmp_path, 10).splitlines() if "|" in line]
    last = {row[0].removeprefix("| "): row[-1] for row in rows[2:]}
    assert last == {
        "baseline": " |",
        "baseline x2": " |",
        "R-Drop x2": "+1.00 (one seed) |",
        "R-Drop x4": " |",
    }
    assert [ablation.times(name) for name in ("baseline", "R-Drop x2", "R-Drop x4")] == [1, 2, 4]


def test_every_variant_is_a_setting_of_training(ablation: Any) -> None:
    from nmt.cli.commands import COMMANDS

    accepted = {setting.key for setting in COMMANDS["train"].accepted}
    for name, settings in ablation.VARIANTS.items():
        keys = {setting.partition("=")[0] for setting in settings.split()}
        assert keys <= accepted, name
