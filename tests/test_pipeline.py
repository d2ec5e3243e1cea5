"""The commands in a row on a toy corpus: what they write, and that runs resume exactly."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from toy import SIZES, assert_same_weights, command, read_records, read_weights, train, write_corpus

from nmt import Translator
from nmt.data.binary import read_meta


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a data folder, a run of 20 updates and its average."""
    folder = tmp_path_factory.mktemp("pipeline")
    assert command("preprocess", *write_corpus(folder)) == 0
    assert train(folder / "data", folder / "run", "max_updates=20") == 0
    assert command("average", f"run_dir={folder / 'run'}", "last=3") == 0
    return folder


def test_preprocess_counts_and_keeps_the_text_of_held_out_pairs(root: Path) -> None:
    assert read_meta(root / "data")["num_pairs"] == SIZES
    for split in ("valid", "test"):
        for side in ("src", "tgt"):
            kept = (root / f"data/{split}.{side}").read_bytes()
            assert kept == (root / f"{split}.{side}.txt").read_bytes()


def test_preprocess_writes_the_same_bytes_again(root: Path, tmp_path: Path) -> None:
    again = [f"data_dir={tmp_path / 'data'}" if "data_dir" in a else a for a in write_corpus(root)]
    assert command("preprocess", *again) == 0
    names = sorted(path.name for path in (root / "data").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "data").iterdir())
    for name in names:
        assert (tmp_path / "data" / name).read_bytes() == (root / "data" / name).read_bytes()


def test_preprocess_counts_what_it_drops(root: Path, tmp_path: Path) -> None:
    for side in ("src", "tgt"):
        lines = (root / f"train.{side}.txt").read_bytes()
        odd = b"\nx\n" if side == "src" else b"y\nz" + b" long" * 99 + b"\n"
        (tmp_path / f"train.{side}").write_bytes(odd + lines)
    changed = {f"data.train.{side}={tmp_path / f'train.{side}'}" for side in ("src", "tgt")}
    others = [a for a in write_corpus(root) if "train" not in a and "data_dir" not in a]
    folder = tmp_path / "data"
    assert command("preprocess", *others, *changed, f"data_dir={folder}", "max_length=60") == 0
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))["train"]
    assert report["dropped"] == {"empty side": 1, "too long": 1}
    places = {"empty side": ("train.src", 1), "too long": ("train.tgt", 2)}
    for reason, (file, line) in places.items():
        assert report["examples"][reason] == [{"file": str(tmp_path / file), "line": line}]
    assert report["kept"] == report["read"] - 2 == SIZES["train"]


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


def test_each_checkpoint_is_a_model_folder_and_the_newest_are_kept(root: Path) -> None:
    folders = sorted((root / "run/checkpoints").glob("step-*"))
    assert [int(folder.name[5:]) for folder in folders][-5:] == [8, 10, 12, 16, 20]
    for folder in folders:
        names = {path.name for path in folder.iterdir()}
        assert names == {"model.safetensors", "config.json", "tokenizer.model", "trainer.pt"}


def test_translate_answers_line_by_line(
    root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    text = "red house\n\ngreen tree sees\u2028big house\r\n\nlast"

    class Stdin:
        buffer = io.BytesIO(text.encode())

    monkeypatch.setattr(sys, "stdin", Stdin)
    assert command("translate", f"model_dir={root / 'run'}", "device=cpu", "window_lines=2") == 0
    lines = capfd.readouterr().out.split("\n")
    assert lines.pop() == ""
    assert len(lines) == 5
    assert [i for i, line in enumerate(lines) if not line] == [1, 3]


def test_translations_cut_at_the_limit_are_counted(
    root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").write_text("red house sees\n\n", encoding="utf-8")
    places = [f"model_dir={root / 'run'}", f"input={tmp_path / 'in'}", "device=cpu"]
    short = ["max_length_a=0", "max_length_b=1", "format=json"]
    assert command("translate", *places, *short) == 0
    out, err = capfd.readouterr()
    first = json.loads(out.split("\n")[0])["hypotheses"][0]
    assert first["finished"] == (not first["tokens"])
    assert ("met the length limit" in err) == (not first["finished"])


@pytest.mark.parametrize("place", ["run", "run/average", "run/checkpoints/latest"])
def test_a_run_a_model_and_a_checkpoint_translate_in_python(root: Path, place: str) -> None:
    translator = Translator.load(root / place, device="cpu")
    assert len(translator.translate(["red house", ""])) == 2
    assert translator.translate([""]) == [""]
    assert translator.translate([]) == []


def test_evaluate_scores_files_and_models(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same = root / "test.tgt.txt"
    assert command("evaluate", f"hypotheses={same}", f"references={same}", "format=json") == 0
    perfect = json.loads(capsys.readouterr().out)
    assert perfect["scores"][0]["value"] == pytest.approx(100)
    assert "version:" in perfect["scores"][0]["signature"]
    model = [f"model_dir={root / 'run'}", f"src={root / 'test.src.txt'}", "device=cpu"]
    assert command("evaluate", *model, f"references={same}", "metrics=[bleu]") == 0
    assert "BLEU" in capsys.readouterr().out


def test_evaluate_tests_against_a_baseline(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same, other = root / "test.tgt.txt", root / "test.src.txt"
    arguments = [f"hypotheses={same}", f"references={same}", f"baseline={other}", "num_samples=100"]
    assert command("evaluate", *arguments, "format=json", "metrics=[chrf]") == 0
    comparison = json.loads(capsys.readouterr().out)["comparisons"][0]
    assert comparison["p_value"] < 0.05
    assert comparison["difference_low"] > 0


def test_average_takes_the_runs_own_number_by_default(root: Path, tmp_path: Path) -> None:
    assert command("average", f"run_dir={root / 'run'}", f"output={tmp_path / 'five'}") == 0
    assert command("average", f"run_dir={root / 'run'}", "last=5", f"output={tmp_path / 'a'}") == 0
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("five", "a")]
    assert files[0] == files[1]


def test_average_of_the_best_needs_no_more_than_one(root: Path, tmp_path: Path) -> None:
    output = tmp_path / "best"
    assert command("average", f"run_dir={root / 'run'}", "best=1", f"output={output}") == 0
    best = (root / "run/checkpoints/best/model.safetensors").read_bytes()
    assert (output / "model.safetensors").read_bytes() == best


@pytest.mark.parametrize("stop", [7, 10])
def test_a_resumed_run_ends_with_the_same_bits(root: Path, tmp_path: Path, stop: int) -> None:
    assert train(root / "data", tmp_path / "run", f"max_updates={stop}") == 0
    assert train(root / "data", tmp_path / "run", "max_updates=20") == 0
    assert_same_weights(root / "run", tmp_path / "run")


def test_a_resumed_run_logs_each_update_once(root: Path, tmp_path: Path) -> None:
    assert train(root / "data", tmp_path / "run", "max_updates=10") == 0
    assert train(root / "data", tmp_path / "run", "max_updates=20") == 0
    assert [r["update"] for r in read_records(tmp_path / "run", "loss")] == [5, 10, 15, 20]
    assert [r["update"] for r in read_records(tmp_path / "run", "valid_loss")] == [10, 20]


def test_going_further_keeps_the_validation_at_the_old_end(root: Path, tmp_path: Path) -> None:
    assert train(root / "data", tmp_path / "run", "max_updates=14") == 0
    assert train(root / "data", tmp_path / "run", "max_updates=20") == 0
    updates = [r["update"] for r in read_records(tmp_path / "run", "valid_loss")]
    assert updates == [10, 14, 20]
    assert_same_weights(root / "run", tmp_path / "run")


def test_a_short_run_is_averaged_over_what_there_is(root: Path, tmp_path: Path) -> None:
    assert train(root / "data", tmp_path / "run", "max_updates=4") == 0
    assert command("average", f"run_dir={tmp_path / 'run'}") == 0
    latest = (tmp_path / "run/checkpoints/latest/model.safetensors").read_bytes()
    assert (tmp_path / "run/average/model.safetensors").read_bytes() == latest


def test_an_output_that_is_a_pipe_or_a_link_stays_one(root: Path, tmp_path: Path) -> None:
    places = [f"model_dir={root / 'run'}", f"input={root / 'test.src.txt'}", "device=cpu"]
    (tmp_path / "link").symlink_to("file")
    assert command("translate", *places, f"output={tmp_path / 'link'}") == 0
    assert (tmp_path / "link").is_symlink()
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["cat", str(tmp_path / "pipe")], stdout=subprocess.PIPE) as reader:
        assert command("translate", *places, f"output={tmp_path / 'pipe'}") == 0
        assert reader.stdout is not None
        assert reader.stdout.read() == (tmp_path / "file").read_bytes()
    assert (tmp_path / "pipe").is_fifo()


def test_patience_ends_a_run(root: Path, tmp_path: Path) -> None:
    frozen = ["optimizer.learning_rate_scale=1e-12", "patience=2", "validate_every_updates=2"]
    assert (
        train(root / "data", tmp_path / "run", "max_updates=50", *frozen, "valid_bleu=false") == 0
    )
    assert 4 <= read_records(tmp_path / "run", "valid_loss")[-1]["update"] < 50


def test_accumulation_does_not_change_the_run(root: Path, tmp_path: Path) -> None:
    """One batch an update against several small ones: the same sentences, the same gradient."""
    still = ["model.dropout=0", "tokens_per_update=100000", "max_updates=3", "valid_bleu=false"]
    still += ["optimizer.eps=1"]  # linear in the gradient, so that rounding is not blown up
    for name, size in (("one", 100_000), ("many", 60)):
        assert train(root / "data", tmp_path / name, *still, f"max_tokens={size}") == 0
    one, many = read_weights(tmp_path / "one"), read_weights(tmp_path / "many")
    assert max((one[k] - many[k]).abs().max() for k in one) < 1e-6


def test_bfloat16_learns_like_float32(root: Path, tmp_path: Path) -> None:
    options = ["max_updates=20", "model.dropout=0", "valid_bleu=false"]
    for dtype in ("float32", "bfloat16"):
        assert train(root / "data", tmp_path / dtype, *options, f"dtype={dtype}") == 0
    losses = [read_records(tmp_path / d, "loss")[-1]["loss"] for d in ("float32", "bfloat16")]
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
    assert read_weights(tmp_path / "bfloat16")["embedding.weight"].dtype is torch.float32
    translator = Translator.load(tmp_path / "bfloat16", device="cpu", dtype="bfloat16")
    assert len(translator.translate(["red house", "big tree sees"])) == 2


def test_a_dry_run_reports_and_writes_nothing(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("dry_run=true", "max_updates=1000")
    assert train(root / "data", tmp_path / "run", *arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["plan", "memory", "speed", "time"]
    assert lines[0].split()[1:3] == [str(SIZES["train"]), "pairs;"]
    assert not (tmp_path / "run").exists()


def test_a_run_that_is_over_says_so_and_stays_as_it_is(
    root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ("max_updates=8", "validate_every_updates=8")
    assert train(root / "data", tmp_path / "run", *arguments) == 0
    path = tmp_path / "run/checkpoints/latest/model.safetensors"
    before = path.read_bytes()
    assert train(root / "data", tmp_path / "run", *arguments) == 0
    assert "the run was over after 8 updates; raise max_updates" in capfd.readouterr().err
    assert path.read_bytes() == before


def test_a_run_of_the_first_format_goes_on(root: Path, tmp_path: Path) -> None:
    whole, old = tmp_path / "whole", tmp_path / "old"
    assert train(root / "data", whole, "max_updates=8") == 0
    assert train(root / "data", old, "max_updates=4") == 0
    path = old / "checkpoints/step-00000004/trainer.pt"
    content = torch.load(path, weights_only=True)
    learner = content.pop("learner")
    del content["world_size"], content["state"]["bad_updates"], content["state"]["validated"]
    content |= {"format_version": 1, "optimizer": learner["optimizer"], "rng": {}}
    for name in ("ema_decay", "init_from", "optimizer.name"):
        del content["fingerprint"][name]
    torch.save(content, path)
    assert train(root / "data", old, "max_updates=8") == 0
    first, second = (p / "checkpoints/latest/model.safetensors" for p in (whole, old))
    assert first.read_bytes() == second.read_bytes()
