"""The table of variants of scripts/compare.py: its means, intervals and differences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return __import__("compare")


def make_results(compare: Any, variant: str, scores: list[float]) -> list[Any]:
    """Return a result for each BLEU score, with seeds from 1."""
    figures: dict[str, Any] = {
        "updates": 10,
        "valid_loss": 2.0,
        "chrf": 60.0,
        "tokens_per_cpu_second": 1000.0,
        "parameters": 4_000_000,
        "about": "now",
    }
    results = []
    for seed, bleu in enumerate(scores, start=1):
        lowercase = bleu + 0.5
        result = compare.Result(variant, seed, bleu=bleu, bleu_lowercase=lowercase, **figures)
        results.append(result)
    return results


def read_table(text: str) -> dict[str, list[str]]:
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("|")]
    return {row[0].removeprefix("| "): row[1:] for row in rows[2:]}


def test_a_row_has_means_intervals_and_a_verdict(compare: Any) -> None:
    results = make_results(compare, "baseline", [36.0, 37.0, 38.0])
    results += make_results(compare, "R-Drop", [40.0, 41.0, 42.0])
    results += make_results(compare, "one head of keys", [36.5, 37.5, 38.5])
    results += make_results(compare, "Muon", [39.0])
    cells = read_table(compare.make_page(results))
    assert list(cells) == ["baseline", "one head of keys", "R-Drop", "Muon"]
    # 95 % of Student's t with 2 degrees of freedom: 4.303 * 1 / sqrt(3) = 2.48
    assert cells["baseline"][3] == "37.00 ± 2.48"
    assert cells["R-Drop"][3:5] == ["41.00 ± 2.48", "41.50 ± 2.48"]
    # with 4: 2.776 * sqrt(2 / 3) = 2.27, below 4 and above 0.5
    assert cells["R-Drop"][-1] == "+4.00 |"
    assert cells["one head of keys"][-1] == "+0.50 (noise) |"
    assert cells["Muon"][-1] == "+2.00 (one seed) |"
    assert all(row[1] == "4,000,000" for row in cells.values())


def test_a_variant_is_compared_with_the_baseline_of_as_many_updates(compare: Any) -> None:
    scores = {"baseline": 36.0, "R-Drop x2": 38.0, "baseline x2": 37.0}
    scores["R-Drop x4"] = 40.0  # without a baseline x4
    results = []
    for name, bleu in scores.items():
        results += make_results(compare, name, [bleu])
    differences = {name: row[-1] for name, row in read_table(compare.make_page(results)).items()}
    assert differences == {
        "baseline": " |",
        "baseline x2": " |",
        "R-Drop x2": "+1.00 (one seed) |",
        "R-Drop x4": " |",
    }
    for name, factor in (("baseline", 1), ("R-Drop x2", 2), ("R-Drop x4", 4)):
        assert compare.length_factor(name) == factor


def test_results_in_the_file_are_not_measured_again(
    compare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    def measure(run_dir: Path, data_dir: Path, name: str, seed: int) -> Any:
        measured.append((name, seed))
        return make_results(compare, name, [30.0] * seed)[-1]

    monkeypatch.setattr(compare, "prepare", lambda text_dir, data_dir, vocab_size: None)
    monkeypatch.setattr(compare, "measure_variant", measure)
    file = tmp_path / "results.jsonl"
    command = ["compare", "variants", "--text=x", f"--output={tmp_path}", f"--results={file}"]
    command.append("--only")
    for arguments in (["baseline", "--seeds", "1"], ["baseline", "Muon", "--seeds", "1", "2"]):
        monkeypatch.setattr("sys.argv", command + arguments)
        compare.main()
    assert measured == [("baseline", 1), ("Muon", 1), ("baseline", 2), ("Muon", 2)]
    assert len(compare.load_results(file)) == 4


def test_every_variant_is_a_setting_of_training(compare: Any) -> None:
    from nmt.cli.commands import COMMANDS

    accepted = {setting.key for setting in COMMANDS["train"].accepted_settings} | {"experiment"}
    for name in compare.VARIANTS:
        keys = [setting.partition("=")[0] for setting in compare.variant_settings(name)]
        assert set(keys) <= accepted, name
        assert len(set(keys)) == len(keys), name
