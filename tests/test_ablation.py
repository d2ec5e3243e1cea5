"""The table of scripts/ablation.py has the means, intervals and differences of its runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def ablation(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return __import__("ablation")


def results(ablation: Any, name: str, scores: list[float]) -> list[Any]:
    figures = {"valid_loss": 2.0, "chrf": 60.0, "tokens_per_cpu_second": 1000.0, "about": "now"}
    figures |= {"updates": 10, "parameters": 4_000_000}
    return [
        ablation.Result(name, seed, bleu=score, bleu_lowercase=score + 0.5, **figures)
        for seed, score in enumerate(scores, start=1)
    ]


def read_table(text: str) -> dict[str, list[str]]:
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("|")]
    return {row[0].removeprefix("| "): row[1:] for row in rows[2:]}


def test_a_row_has_means_intervals_and_a_verdict(ablation: Any) -> None:
    found = results(ablation, "baseline", [36.0, 37.0, 38.0])
    found += results(ablation, "R-Drop", [40.0, 41.0, 42.0])
    found += results(ablation, "one head of keys", [36.5, 37.5, 38.5])
    cells = read_table(ablation.table(found + results(ablation, "Muon", [39.0])))
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
    ablation: Any,
) -> None:
    scores = {"baseline": 36.0, "R-Drop x2": 38.0, "baseline x2": 37.0}
    scores["R-Drop x4"] = 40.0  # a baseline x4 is not done
    found = [one for name, score in scores.items() for one in results(ablation, name, [score])]
    last = {name: row[-1] for name, row in read_table(ablation.table(found)).items()}
    assert last == {
        "baseline": " |",
        "baseline x2": " |",
        "R-Drop x2": "+1.00 (one seed) |",
        "R-Drop x4": " |",
    }
    assert [ablation.times(name) for name in ("baseline", "R-Drop x2", "R-Drop x4")] == [1, 2, 4]


def test_what_a_file_of_results_has_is_not_done_again(
    ablation: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    def measure(folder: Path, data_dir: Path, name: str, seed: int) -> Any:
        measured.append((name, seed))
        return results(ablation, name, [30.0] * seed)[-1]

    monkeypatch.setattr(ablation, "prepare", lambda text, data_dir: None)
    monkeypatch.setattr(ablation, "measure", measure)
    file, output = tmp_path / "results.jsonl", tmp_path / "build"
    command = ["ablation", "--text=x", f"--output={output}", f"--results={file}", "--only"]
    for more in (["baseline", "--seeds", "1"], ["baseline", "Muon", "--seeds", "1", "2"]):
        monkeypatch.setattr("sys.argv", command + more)
        ablation.main()
    assert measured == [("baseline", 1), ("Muon", 1), ("baseline", 2), ("Muon", 2)]
    assert len(ablation.load(file)) == 4


def test_every_variant_is_a_setting_of_training(ablation: Any) -> None:
    from nmt.cli.commands import COMMANDS

    accepted = {setting.key for setting in COMMANDS["train"].accepted}
    for name in ablation.VARIANTS:
        keys = [setting.partition("=")[0] for setting in ablation.settings(name)]
        assert set(keys) <= accepted, name
        assert len(set(keys)) == len(keys), name
