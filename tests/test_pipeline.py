"""The commands in sequence on a toy corpus: their outputs, and that runs resume exactly."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
import yaml
from toy import assert_same_weights, command, read_records, read_weights, train, write_corpus

from nmt import Translator
from nmt.config import ExportFormat
from nmt.data.binary import read_meta
from nmt.training import preflight

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a data folder, a run of 20 updates and its average."""
    folder = tmp_path_factory.mktemp("pipeline")
    assert command("preprocess", *write_corpus(folder)) == 0
    assert train(folder / "data", folder / "run", "max_updates=20") == 0
    assert command("average", f"run_dir={folder / 'run'}", "last=3") == 0
    return folder


def test_preprocess_keeps_the_text_of_held_out_pairs(root: Path) -> None:
    assert read_meta(root / "data").num_pairs == {"train": 200, "valid": 20, "test": 20}
    for split, side in itertools.product(("valid", "test"), ("src", "tgt")):
        checkpoints = (root / f"data/{split}.{side}").read_bytes()
        assert checkpoints == (root / f"{split}.{side}.txt").read_bytes()


def test_a_run_folder_tells_the_whole_run(root: Path) -> None:
    run = root / "run"
    saved = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    assert saved["model"]["d_model"] == 16
    assert saved["label_smoothing"] == 0.1
    assert [r["update"] for r in read_records(run, "loss")] == [5, 10, 15, 20]
    assert [r["update"] for r in read_records(run, "valid_loss")] == [10, 20]
    keys = {"learning_rate", "gradient_norm", "tokens_per_second", "padding_share", "epoch"}
    assert keys <= set(read_records(run, "loss")[0])
    assert {"valid_perplexity", "valid_bleu"} <= set(read_records(run, "valid_loss")[0])
    assert (run / "checkpoints/latest").resolve().name == "step-00000020"
    assert (run / "checkpoints/best").resolve().is_dir()
    # each checkpoint is a model folder, and the newest are kept
    folders = sorted((run / "checkpoints").glob("step-*"))
    assert [int(folder.name[5:]) for folder in folders][-5:] == [8, 10, 12, 16, 20]
    for folder in folders:
        names = {path.name for path in folder.iterdir()}
        assert names == set(
            ["model.safetensors", "config.json", "tokenizer.model", "trainer.pt", "manifest.json"]
        )


def test_translations_cut_at_the_limit_are_counted(
    root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").write_text("red house sees\n\n", encoding="utf-8")
    arguments = [f"model_dir={root / 'run'}", f"input={tmp_path / 'in'}", "device=cpu"]
    short = ["max_length_a=0", "max_length_b=1", "format=json"]
    assert command("translate", arguments, short) == 0
    out, err = capfd.readouterr()
    first = json.loads(out.split("\n")[0])["hypotheses"][0]
    assert first["finished"] == (not first["tokens"])
    assert ("met the length limit" in err) == (not first["finished"])


def test_a_run_a_model_and_a_checkpoint_translate_in_python(root: Path) -> None:
    for name in ("run", "run/average", "run/checkpoints/latest"):
        translator = Translator.load(root / name, device="cpu", backend="native")
        assert len(translator.translate(["red house", ""])) == 2
        assert translator.translate([""]) == [""]
        assert translator.translate([]) == []


def test_evaluate_scores_files_and_models_and_tests_against_a_baseline(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    references = f"references={root / 'test.tgt.txt'}"
    same = ["format=json", references, f"hypotheses={root / 'test.tgt.txt'}"]
    assert command("evaluate", same) == 0
    perfect = json.loads(capsys.readouterr().out)
    assert perfect["scores"][0]["value"] == pytest.approx(100)
    assert "version:" in perfect["scores"][0]["signature"]
    model = [f"model_dir={root / 'run'}", f"src={root / 'test.src.txt'}", "device=cpu"]
    assert command("evaluate", model, references, "metrics=[bleu]") == 0
    assert "BLEU" in capsys.readouterr().out
    baseline = [f"baseline={root / 'test.src.txt'}", "num_samples=100", "metrics=[bleu]"]
    assert command("evaluate", same, baseline) == 0
    comparison = json.loads(capsys.readouterr().out)["comparisons"][0]
    assert comparison["p_value"] < 0.05
    assert comparison["difference_low"] > 0


def test_average_takes_the_runs_own_number_by_default_and_what_there_is(
    root: Path, tmp_path: Path
) -> None:
    def average(run: Path, name: str, *arguments: str) -> bytes:
        output = tmp_path / name
        assert command("average", f"run_dir={run}", arguments, f"output={output}") == 0
        return (output / "model.safetensors").read_bytes()

    run = root / "run"
    assert average(run, "default") == average(run, "five", "last=5")
    best = (run / "checkpoints/best/model.safetensors").read_bytes()
    assert average(run, "best", "best=1") == best
    short = tmp_path / "run"
    assert train(root / "data", short, "max_updates=4", "valid_bleu=false") == 0
    latest = (short / "checkpoints/latest/model.safetensors").read_bytes()
    assert average(short, "short") == latest


def test_a_resumed_run_ends_with_the_same_bits_and_logs_each_update_once(
    root: Path, tmp_path: Path
) -> None:
    # a validation at an old end stays
    for stop, validated in ((10, [10, 20]), (14, [10, 14, 20])):
        run = tmp_path / str(stop)
        assert train(root / "data", run, f"max_updates={stop}", "valid_bleu=false") == 0
        assert train(root / "data", run, "max_updates=20", "valid_bleu=false") == 0
        assert_same_weights(root / "run", run)
        assert [r["update"] for r in read_records(run, "valid_loss")] == validated
        logged = [r["update"] for r in read_records(run, "loss")]
        assert logged == sorted({5, 10, 15, 20, stop}), stop


def test_an_output_that_is_a_pipe_or_a_link_stays_one(root: Path, tmp_path: Path) -> None:
    arguments = [f"model_dir={root / 'run'}", f"input={root / 'test.src.txt'}", "device=cpu"]
    (tmp_path / "link").symlink_to("file")
    assert command("translate", arguments, f"output={tmp_path / 'link'}") == 0
    assert (tmp_path / "link").is_symlink()
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["cat", str(tmp_path / "pipe")], stdout=subprocess.PIPE) as reader:
        assert command("translate", arguments, f"output={tmp_path / 'pipe'}") == 0
        assert reader.stdout is not None
        assert reader.stdout.read() == (tmp_path / "file").read_bytes()
    assert (tmp_path / "pipe").is_fifo()


def test_bfloat16_learns_like_float32(root: Path, tmp_path: Path) -> None:
    options = ["max_updates=5", "model.dropout=0", "valid_bleu=false"]
    for dtype in ("float32", "bfloat16"):
        assert train(root / "data", tmp_path / dtype, options, f"dtype={dtype}") == 0
    losses = [read_records(tmp_path / d, "loss")[-1]["loss"] for d in ("float32", "bfloat16")]
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
    assert read_weights(tmp_path / "bfloat16")["embedding.weight"].dtype is torch.float32
    translator = Translator.load(
        tmp_path / "bfloat16", device="cpu", dtype="bfloat16", backend="native"
    )
    assert len(translator.translate(["red house", "big tree sees"])) == 2


def test_a_dry_run_reports_and_writes_nothing(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("dry_run=true", "max_updates=1000")
    assert train(root / "data", tmp_path / "run", arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    first_words = [line.split()[0] for line in lines]
    assert first_words[:4] == ["plan", "memory", "speed", "time"]
    assert first_words[4:] == ["export"] * len(ExportFormat)
    assert lines[0].split()[1:3] == ["200", "pairs;"]
    pattern = (
        r"memory  [\d.]+ GB of the process, of [\d.]+ GB, on each device, at the peak; .*needed"
    )
    assert re.fullmatch(pattern, lines[1]), lines[1]
    assert not (tmp_path / "run").exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preflight, "device_memory_bytes", lambda device: 100_000)
        assert train(root / "data", tmp_path / "run", arguments) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "moments take" in error
    assert "set sharding=full on" in error


def test_a_run_that_is_over_says_so_and_stays_as_it_is(
    root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = root / "run/checkpoints/latest/model.safetensors"
    content = path.read_bytes()
    assert train(root / "data", root / "run", "max_updates=20") == 0
    assert "the run was over: 20 updates are done; a larger max_up" in capfd.readouterr().err
    assert path.read_bytes() == content
