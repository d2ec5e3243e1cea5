"""The README.md of averages and exports: its metadata, data and training cost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from exporting import exported, random_model
from toy import WORDS, command, read_records, read_values, train, write_data

from nmt.checkpoint import load_info
from nmt.config import ExportConfig, ExportFormat
from nmt.data.tokenizer import Tokenizer
from nmt.errors import ModelError
from nmt.export.export_model import export_model
from nmt.model_card import Origin, render_card

SCORE = {"name": "chrF2", "value": 61.5, "signature": "nrefs:1|case:mixed|version:2.6.0"}


def read_card(folder: Path) -> tuple[dict[str, Any], str]:
    """Return the metadata of README.md, which the Hub's library must accept, and the text."""
    content = (folder / "README.md").read_text(encoding="utf-8")
    _, front_matter, text = content.split("---\n", maxsplit=2)
    metadata = yaml.safe_load(front_matter)
    huggingface_hub = pytest.importorskip("huggingface_hub")
    data = huggingface_hub.ModelCard(content).data.to_dict()
    assert data == metadata
    return metadata, text


def write_lines(path: Path, words: list[str]) -> str:
    path.write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two corpora, one of which has pairs that preprocessing drops."""
    folder = tmp_path_factory.mktemp("card")
    sources = [f"{a} {b} {c}" for a in WORDS for b in WORDS for c in WORDS]
    targets = [" ".join(WORDS[word] for word in source.split()) for source in sources]
    arguments = [f"data_dir={folder / 'data'}", "tokenizer.vocab_size=310", "num_threads=1"]
    arguments += ["data.src_lang=en", "data.tgt_lang=de", "data.license=cc0-1.0"]
    for key, size in {"corpora.news": 200, "corpora.chat": 100, "valid": 10}.items():
        for side, lines in {"src": sources, "tgt": targets}.items():
            text = lines[:size] + ([""] * 3 if key == "corpora.chat" else [])
            arguments.append(f"data.{key}.{side}={write_lines(folder / f'{key}.{side}', text)}")
    assert command("preprocess", arguments, "data.corpora.chat.weight=2.5") == 0
    assert train(folder / "data", folder / "run", "max_updates=20") == 0
    return folder / "run"


@pytest.mark.slow
def test_a_checkpoint_is_exported_with_its_data_cost_and_validation_score(run_dir: Path) -> None:
    output = run_dir.parent / "exported"
    export_model(run_dir / "checkpoints/latest", output, ExportConfig())
    metadata, text = read_card(output)
    assert metadata["language"] == ["en", "de"]
    assert metadata["license"] == "cc0-1.0"
    assert metadata["library_name"] == "ctranslate2"
    [result] = metadata["model-index"][0]["results"]
    [metric] = result["metrics"]
    assert metric["value"] == read_records(run_dir, "valid_bleu")[-1]["valid_bleu"]
    assert metric["args"]["signature"].startswith("nrefs:1|case:mixed|eff:no|tok:13a|")
    assert "| chat | 2.5 | 103 | 100 | empty side 3 |" in text
    assert "| news | 1.0 | 200 | 200 | 0 |" in text
    assert "- Updates: 20\n" in text
    num_tokens = text.split("- Tokens, source and target: ")[1].split("\n")[0]
    # an update has at most 200 target tokens, and about 200 source tokens
    assert 6000 < int(num_tokens.replace(",", "")) < 8400
    hours = float(text.split("- Hours, without validation: ")[1].split("\n")[0])
    rates = read_values(run_dir, "tokens_per_second", "tokens_per_second")
    assert hours == pytest.approx(7000 / 4 * sum(1 / rate for rate in rates) / 3600, abs=6e-4)


@pytest.mark.slow
def test_an_average_has_a_card_with_the_scores_that_the_user_adds(run_dir: Path) -> None:
    average = run_dir / "average"
    assert command("average", f"run_dir={run_dir}", "last=1") == 0
    metadata, text = read_card(average)
    assert "model-index" not in metadata
    assert metadata["library_name"] == "nmt"
    assert "The mean of 1 checkpoints" in text
    assert "| chat | 2.5 | 103 | 100 | empty side 3 |" in text
    (average / "scores.json").write_text(json.dumps({"scores": [SCORE]}), encoding="utf-8")
    metadata, _ = read_card(exported(average, ExportFormat.ctranslate2))
    [result] = metadata["model-index"][0]["results"]
    assert result["metrics"][0] == {
        "type": "chrf2",
        "name": "chrF2",
        "value": 61.5,
        "args": {"signature": SCORE["signature"]},
    }
    assert result["dataset"]["type"] == "test"
    (average / "scores.json").write_text('{"scores": [1]}', encoding="utf-8")
    with pytest.raises(ModelError, match=r"scores\.json: write it with nmt-evaluate format=json"):
        exported(average, ExportFormat.ctranslate2)


def test_facts_without_a_source_are_called_unknown(tmp_path: Path, tokenizer: Tokenizer) -> None:
    folder = random_model(tmp_path / "model", tokenizer)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"src_lang": "src"}), encoding="utf-8")
    (folder / "manifest.json").unlink()
    metadata, text = read_card(exported(folder, ExportFormat.huggingface))
    assert metadata["language"] == ["und", "yy"]
    assert metadata["license"] == "unknown"
    assert "Pairs, filters and license: unknown." in text
    assert "- Tokens and hours: unknown" in text


def test_facts_of_a_run_inside_another_run_are_not_mixed(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    for run_dir, rate in {tmp_path: 1, inner: 2}.items():
        (run_dir / "config.yaml").write_text(f"data_dir: missing\nseed: {rate}\n")
        (run_dir / "metrics.jsonl").write_text(json.dumps({"update": 0, "rate": rate}) + "\n")
    info = load_info(random_model(tmp_path / "model", tokenizer))
    for folder in (inner / "average", inner / "checkpoints/step-00000020"):
        origin = Origin.find(folder, info)
        assert origin.settings["seed"] == 2
        assert [record["rate"] for record in origin.records] == [2]


def test_a_card_has_the_training_and_score_of_a_checkpoint_and_the_data_of_its_tokenizer(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    write_data(data_dir, tokenizer, [(3, 3)])
    pairs = {"read": 41, "kept": 40, "dropped": {"empty side": 1}, "corpora": {}}
    report = {"license": "cc0-1.0", "train": pairs}
    (data_dir / "report.json").write_text(json.dumps(report), encoding="utf-8")
    (tmp_path / "config.yaml").write_text(f"data_dir: {data_dir}\n", encoding="utf-8")
    rates = {"tokens_per_second": 1000, "model_flops_per_second": 1e9}
    with (tmp_path / "metrics.jsonl").open("w", encoding="utf-8") as stream:
        for update, hours, bleu in ((10, 1.0, 21.5), (20, 1.5, 32.5), (30, 9.0, 43.5)):
            flops = hours * 3600 * rates["model_flops_per_second"]
            print(json.dumps({"update": update, "model_flops": flops, **rates}), file=stream)
            print(json.dumps({"update": update, "valid_bleu": bleu}), file=stream)
    info = replace(load_info(random_model(tmp_path / "model", tokenizer)), updates=20)
    for folder, scores in (("checkpoints/step-00000020", [32.5]), ("average", [])):
        _, front_matter, text = render_card(tmp_path / folder, info, "# Model").split("---\n")
        index = yaml.safe_load(front_matter).get("model-index", [{"results": []}])
        assert [result["metrics"][0]["value"] for result in index[0]["results"]] == scores
        assert "| all | 1.0 | 41 | 40 | empty side 1 |" in text, folder
        assert "- Tokens, source and target: 5,400,000\n" in text, folder
        assert "- Hours, without validation: 1.500\n" in text, folder
    other_info = replace(info, tokenizer_sha256="0" * 64)
    card = render_card(tmp_path / "average", other_info, "# Model")
    assert "Pairs, filters and license: unknown." in card
    assert "license: unknown" in card


@pytest.mark.slow
def test_data_of_another_tokenizer_is_not_described(run_dir: Path, tokenizer: Tokenizer) -> None:
    folder = random_model(run_dir / "checkpoints/step-00000020b", tokenizer)
    _, text = read_card(exported(folder, ExportFormat.huggingface))
    assert "Pairs, filters and license: unknown." in text
