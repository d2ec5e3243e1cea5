"""The tables of scripts/compare.py: means, intervals and differences, and which runs they need."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
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
        result.updates *= compare.length_factor(variant)
        results.append(result)
    return results


def make_page(compare: Any, command: str, results: list[Any]) -> str:
    comparison = compare.COMPARISONS[command]
    page: str = comparison.make_page(comparison, results, 10)
    return page


def read_table(text: str) -> dict[str, list[str]]:
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("|")]
    return {row[0].removeprefix("| "): row[1:] for row in rows[2:]}


def test_a_row_has_means_intervals_and_a_verdict(compare: Any) -> None:
    results = make_results(compare, "baseline", [36.0, 37.0, 38.0])
    results += make_results(compare, "R-Drop", [40.0, 41.0, 42.0])
    results += make_results(compare, "one head of keys", [36.5, 37.5, 38.5])
    results += make_results(compare, "Muon", [39.0])
    cells = read_table(make_page(compare, "variants", results))
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
    differences = {
        name: row[-1] for name, row in read_table(make_page(compare, "variants", results)).items()
    }
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

    def measure(options: Any, data_dir: Path, name: str, seed: int) -> Any:
        measured.append((name, seed, options.updates))
        result = make_results(compare, name, [30.0 + options.updates] * seed)[-1]
        result.updates = options.updates * compare.length_factor(name)
        return result

    monkeypatch.setattr(compare, "prepare", lambda text_dir, data_dir, vocab_size: None)
    monkeypatch.setattr(compare, "measure_variant", measure)
    file = tmp_path / "folder" / "results.jsonl"
    table = tmp_path / "table.md"
    command = ["compare", "variants", "--text=x", f"--output={tmp_path}", f"--results={file}"]
    command += [f"--table={table}", "--updates=7", "--only"]
    for arguments in (
        ["baseline", "--seeds", "1"],
        ["baseline", "Muon", "R-Drop x2", "--seeds", "1", "2"],
        ["baseline", "--seeds", "1", "--updates=8"],
    ):
        monkeypatch.setattr("sys.argv", command + arguments)
        compare.main()
    assert measured == [
        ("baseline", 1, 7),
        ("R-Drop x2", 1, 7),
        ("Muon", 1, 7),
        ("R-Drop x2", 2, 7),
        ("baseline", 2, 7),
        ("Muon", 2, 7),
        ("baseline", 1, 8),
    ]
    assert len(compare.load_results(file)) == 7
    # results of another number of updates are not in the table
    assert list(read_table(table.read_text())) == ["baseline"]
    assert "38.00" in table.read_text()
    assert "\n8 updates of 700 target tokens." in table.read_text()


def test_results_and_data_of_an_output_folder_are_of_one_text(
    compare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(options: Any, data_dir: Path, name: str, seed: int) -> Any:
        return make_results(compare, name, [30.0] * seed)[-1]

    def preprocess(name: str, settings: list[str]) -> float:
        (tmp_path / "runs/data").mkdir(parents=True)
        return 1.0

    monkeypatch.chdir(tmp_path)
    for folder in ("text", "other"):
        Path(folder).mkdir()
        Path(folder, "train.en").touch()
    monkeypatch.setattr(compare, "measure_variant", measure)
    monkeypatch.setattr(sys.modules["training_runs"], "run_nmt", preprocess)
    command = ["compare", "regularization", "--output=runs", "--only=baseline", "--updates=10"]
    for text in ("text", "../" + tmp_path.name + "/text"):
        monkeypatch.setattr("sys.argv", [*command, f"--text={text}"])
        compare.main()
    assert len(compare.load_results(tmp_path / "runs/regularization.jsonl")) == 3
    for arguments in (["--text=other"], ["--text=text", "--vocab-size=8000"]):
        monkeypatch.setattr("sys.argv", command + arguments)
        with pytest.raises(SystemExit, match=r"has another text or vocabulary size"):
            compare.main()


def test_results_of_another_comparison_are_refused_before_training(
    compare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "results.jsonl"
    [result] = make_results(compare, "word dropout", [30.0])
    file.write_text(json.dumps(vars(result)) + "\n")
    monkeypatch.setattr(compare, "prepare", lambda text_dir, data_dir, vocab_size: None)
    monkeypatch.setattr(compare, "measure_variant", lambda *arguments: pytest.fail("trained"))
    command = ["compare", "paper", "--text=x", f"--output={tmp_path}", f"--results={file}"]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit, match="results.jsonl has a result of 'word dropout'; give an"):
        compare.main()


def test_a_failed_training_does_not_stop_the_others(
    compare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def measure(options: Any, data_dir: Path, name: str, seed: int) -> Any:
        if name == "base":
            raise subprocess.CalledProcessError(1, ["nmt"])
        result = make_results(compare, name, [30.0])[0]
        result.updates = options.updates * compare.length_factor(name)
        return result

    monkeypatch.setattr(compare, "prepare", lambda text_dir, data_dir, vocab_size: None)
    monkeypatch.setattr(compare, "measure_variant", measure)
    file = tmp_path / "results.jsonl"
    command = ["compare", "paper", "--text=x", f"--output={tmp_path}", f"--results={file}"]
    command += ["--seeds", "1", "--jobs", "2", "--only", "base", "(A) 1 head", "big x3"]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit, match="1 of 3 trainings failed"):
        compare.main()
    assert list(read_table(capsys.readouterr().out)) == ["(A) 1 head", "big x3"]


def test_an_interrupted_training_has_no_throughput(compare: Any) -> None:
    results = make_results(compare, "baseline", [36.0, 37.0])
    results[0].tokens_per_cpu_second = None
    [row] = read_table(make_page(compare, "variants", results)).values()
    assert row[6] == "1000"
    results[1].tokens_per_cpu_second = None
    [row] = read_table(make_page(compare, "variants", results)).values()
    assert row[6] == ""


def test_an_interrupted_comparison_with_fairseq_trains_again_from_the_start(
    compare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare_fairseq = sys.modules["compare_fairseq"]
    planned = []  # the updates of each training

    def run_nmt(name: str, settings: list[str]) -> float:
        """Return the CPU seconds of a training; one that is resumed takes less."""
        values = dict(setting.split("=", 1) for setting in settings)
        run_dir = Path(values["run_dir"])
        if run_dir.exists():
            return 2.0
        run_dir.mkdir(parents=True)
        updates = int(values["max_updates"])
        if "nmt 60 s" in run_dir.parent.name:
            planned.append(updates)
            raise KeyboardInterrupt
        return 4.0 + updates / 10

    def run_for(command: list[str], log: Path, max_seconds: float) -> float:
        assert not list(log.parent.iterdir())  # no checkpoint from which fairseq would go on
        (log.parent / "checkpoint_last.pt").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(compare_fairseq, "run_nmt", run_nmt)
    monkeypatch.setattr(compare_fairseq, "run_for", run_for)
    monkeypatch.setattr(compare_fairseq, "write_pieces", lambda data_dir, folder: folder)
    options = SimpleNamespace(
        seeds=[1],
        change=[],
        fairseq_change=[],
        updates=None,
        seconds=60.0,
        output=tmp_path,
        fairseq="python",
    )
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            compare_fairseq.compare_with_fairseq(options, tmp_path / "data")
    assert planned == [560, 560]
    (tmp_path / "nmt 60 s 1" / "result.json").write_text('{"cpu_seconds": 60}')
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            compare_fairseq.compare_with_fairseq(options, tmp_path / "data")


def test_every_variant_is_a_setting_of_training(compare: Any) -> None:
    from nmt.cli.commands import COMMANDS

    accepted = {setting.key for setting in COMMANDS["train"].accepted_settings} | {"experiment"}
    for comparison in compare.COMPARISONS.values():
        for name in comparison.variants:
            assert set(compare.variant_settings(comparison, name)) <= accepted, name


def test_rows_of_table_3_are_those_of_the_guide_scaled(compare: Any) -> None:
    """A row changes the settings of the guide's row by a constant factor, and has its figures."""
    page = SCRIPTS.parent / "docs" / "how-to" / "reproduce-table-3.md"
    guide = [line.split("|")[1:-1] for line in page.read_text().splitlines() if "`model." in line]
    guide_rows = [row for row in guide if len(row) == 6]
    comparison = compare.COMPARISONS["paper"]
    settings = {name: compare.variant_settings(comparison, name) for name in compare.PAPER_ROWS}
    base = settings["base"]
    base |= {"model.num_encoder_layers": "3", "model.num_decoder_layers": "3"}
    base |= {"model.head_size": "16", "label_smoothing": "0.1", "model.positions": "sinusoidal"}
    factors = {"d_model": 4, "d_ff": 4, "head_size": 4}
    factors |= {"num_encoder_layers": 2, "num_decoder_layers": 2}
    rows = [name for name in compare.PAPER_ROWS if name not in ("base", "big x3")]
    rows = [name for name in rows if "label smoothing" not in name]
    assert len(rows) == len(guide_rows) == 16
    for name, (group, texts, _, _, perplexity, bleu) in zip(rows, guide_rows, strict=True):
        assert name.startswith(group.strip()), name
        assert compare.PAPER_SCORES[name] == (float(perplexity), float(bleu)), name
        changed = {}
        for setting in texts.replace("`", "").split():
            key, _, value = setting.partition("=")
            factor = factors.get(key.removeprefix("model."))
            changed[key] = value if factor is None else str(int(value) // factor)
        assert changed == {key: settings[name][key] for key in changed}, name
        assert {**base, **changed} == {**base, **settings[name]}, name
    assert compare.PAPER_SCORES["base"] == (4.92, 25.8)
    assert compare.PAPER_SCORES["big x3"] == (4.33, 26.4)


def test_a_row_of_table_3_has_the_paper_s_figures_beside_it(compare: Any) -> None:
    results = make_results(compare, "base", [36.0, 37.0, 38.0])
    results += make_results(compare, "(A) 1 head", [34.0])
    results += make_results(compare, "big x3", [40.0, 41.0, 42.0])
    cells = read_table(make_page(compare, "paper", results))
    # exp(2) = 7.39
    assert cells["base"][2:] == ["7.39 ± 0.00", "37.00 ± 2.48", "", "4.92", "25.8", " |"]
    assert cells["(A) 1 head"][2:] == [
        "7.39",
        "34.00",
        "-3.00 (one seed)",
        "5.29",
        "24.9",
        "-0.9 |",
    ]
    assert cells["big x3"][3:] == ["41.00 ± 2.48", "+4.00", "4.33", "26.4", "+0.6 |"]


@pytest.mark.long
def test_table_3_of_a_tiny_corpus_is_resumed(tmp_path: Path) -> None:
    text_dir = tmp_path / "text"
    text_dir.mkdir()
    for name, num_lines in (("train", 300), ("val", 4), ("test_2016_flickr", 3)):
        for lang in ("en", "de"):
            lines = "".join(f"{lang} word {i % 17} and {i % 23}\n" for i in range(num_lines))
            (text_dir / f"{name}.{lang}").write_text(lines)
    results = tmp_path / "results.jsonl"
    command = [sys.executable, str(SCRIPTS / "compare.py"), "paper", f"--text={text_dir}"]
    command += [f"--output={tmp_path / 'runs'}", f"--results={results}", "--vocab-size=280"]
    command += ["--updates=2", "--seeds", "1", "2", "--only", "base", "--jobs=2"]
    first = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert sorted((line["variant"], line["seed"], line["updates"]) for line in lines) == [
        ("base", 1, 2),
        ("base", 2, 2),
    ]
    # the CPU seconds of one training: more than one, and less than ten minutes
    assert all(4000 / 600 < line["tokens_per_cpu_second"] < 4000 for line in lines)
    assert (tmp_path / "runs" / "base-2-1.log").exists()
    second = subprocess.run(command, capture_output=True, text=True, check=True)
    assert read_table(second.stdout) == read_table(first.stdout)
    assert len(results.read_text().splitlines()) == 2
