"""The user's mistakes: one line with the value and what to do, exit 2, nothing left behind."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from toy import command, train, write_corpus


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    assert command("preprocess", *write_corpus(folder)) == 0
    assert train(folder / "data", folder / "run", "max_updates=4") == 0
    return folder


@pytest.fixture
def model(root: Path, tmp_path: Path) -> Path:
    """A copy of a model folder, to be damaged."""
    folder = tmp_path / "model"
    shutil.copytree((root / "run/checkpoints/latest").resolve(), folder)
    return folder


LOG = re.compile(r"\d\d:\d\d:\d\d ")


class Refused:
    """Runs a command that must fail as the user's mistake, and checks its one line."""

    def __init__(self, capfd: pytest.CaptureFixture[str], folder: Path) -> None:
        self.capfd = capfd
        self.folder = folder

    def __call__(self, expected: list[str], name: str, *arguments: str) -> None:
        before = sorted(self.folder.rglob("*"))
        self.capfd.readouterr()
        assert command(name, *arguments) == 2
        out, err = self.capfd.readouterr()
        lines = [line for line in err.split("\n") if line and not LOG.match(line)]
        assert len(lines) == 1
        assert lines[0].startswith(f"nmt-{name}: ")
        assert err.rstrip("\n").split("\n")[-1] == lines[0]
        assert "Traceback" not in err
        assert out == ""
        for part in expected:
            assert part in lines[0]
        assert sorted(self.folder.rglob("*")) == before


@pytest.fixture
def assert_refused(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Refused:
    return Refused(capfd, tmp_path)


def preprocess_arguments(root: Path, folder: Path, **changes: str) -> list[str]:
    arguments = dict(a.split("=", 1) for a in write_corpus(root))
    arguments["data_dir"] = str(folder / "deep/data")
    arguments |= {key.replace("__", "."): value for key, value in changes.items()}
    return [f"{key}={value}" for key, value in arguments.items()]


def test_a_missing_file(root: Path, tmp_path: Path, assert_refused: Refused) -> None:
    arguments = preprocess_arguments(root, tmp_path, data__valid__tgt="no/such.de")
    assert_refused(["no/such.de does not exist", "give"], "preprocess", *arguments)


def test_files_of_unequal_length(root: Path, tmp_path: Path, assert_refused: Refused) -> None:
    (tmp_path / "short.de").write_bytes(b"eins\nzwei\n")
    arguments = preprocess_arguments(root, tmp_path, data__train__tgt=str(tmp_path / "short.de"))
    assert_refused(["200 lines", "short.de 2", "again"], "preprocess", *arguments)


def test_an_empty_corpus(root: Path, tmp_path: Path, assert_refused: Refused) -> None:
    (tmp_path / "empty").write_bytes(b"")
    empty = str(tmp_path / "empty")
    both = {"data__train__src": empty, "data__train__tgt": empty}
    assert_refused(["empty"], "preprocess", *preprocess_arguments(root, tmp_path, **both))
    both = {"data__valid__src": empty, "data__valid__tgt": empty}
    assert_refused(["valid", "empty"], "preprocess", *preprocess_arguments(root, tmp_path, **both))


def test_no_validation_set(root: Path, tmp_path: Path, assert_refused: Refused) -> None:
    arguments = [a for a in preprocess_arguments(root, tmp_path) if "valid" not in a]
    assert_refused(["data.valid.src=FILE"], "preprocess", *arguments)


def test_text_that_is_not_utf8(root: Path, tmp_path: Path, assert_refused: Refused) -> None:
    (tmp_path / "latin").write_bytes(b"ja\n" * 7 + "grün".encode("latin-1") + b"\n")
    arguments = preprocess_arguments(root, tmp_path, data__train__src=str(tmp_path / "latin"))
    assert_refused(["latin:8", "byte 3", "0xfc", "iconv"], "preprocess", *arguments)


def test_every_pair_too_long(root: Path, tmp_path: Path, assert_refused: Refused) -> None:
    arguments = [*preprocess_arguments(root, tmp_path), "max_length=2"]
    assert_refused(["all 200", "too long", "max_length=2"], "preprocess", *arguments)


def test_a_vocabulary_too_large_names_the_largest(
    root: Path, tmp_path: Path, assert_refused: Refused, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = preprocess_arguments(root, tmp_path, tokenizer__vocab_size="37000")
    assert_refused(["vocab_size=37000", "largest possible is"], "preprocess", *arguments)
    assert command("preprocess", *arguments) == 2
    largest = capfd.readouterr().err.rsplit("largest possible is ", 1)[1].split(":")[0]
    arguments = preprocess_arguments(root, tmp_path, tokenizer__vocab_size=largest)
    assert command("preprocess", *arguments) == 0


def test_a_folder_that_is_not_ours_is_not_replaced(
    root: Path, tmp_path: Path, assert_refused: Refused
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home/letter.txt").write_text("dear", encoding="utf-8")
    arguments = preprocess_arguments(root, tmp_path, data_dir=str(tmp_path / "home"))
    assert_refused(["home exists", "choose another"], "preprocess", *arguments)


def test_an_old_data_folder_survives_a_failed_run(root: Path, assert_refused: Refused) -> None:
    before = {path: path.read_bytes() for path in (root / "data").iterdir()}
    arguments = preprocess_arguments(root, root, data__train__src="no/such")
    assert_refused(["no/such"], "preprocess", *arguments, f"data_dir={root / 'data'}")
    assert {path: path.read_bytes() for path in (root / "data").iterdir()} == before


def test_an_unknown_model(assert_refused: Refused) -> None:
    assert_refused(["model=bigg", "did you mean big"], "train", "+model=bigg")


def test_a_mistyped_key(assert_refused: Refused) -> None:
    assert_refused(["max_update", "did you mean max_updates"], "train", "max_update=3")
    assert_refused(["typo", "no such setting"], "train", "+typo=1")


def test_a_missing_data_folder(tmp_path: Path, assert_refused: Refused) -> None:
    places = [f"data_dir={tmp_path / 'none'}", f"run_dir={tmp_path / 'run'}"]
    assert_refused(["none does not exist", "nmt-preprocess"], "train", *places)
    places = [f"data_dir={tmp_path}", f"run_dir={tmp_path / 'run'}"]
    assert_refused(["is no data folder", "nmt-preprocess"], "train", *places)


def test_a_data_folder_of_a_newer_format(
    root: Path, tmp_path: Path, assert_refused: Refused
) -> None:
    shutil.copytree(root / "data", tmp_path / "data")
    meta = json.loads((tmp_path / "data/meta.json").read_text(encoding="utf-8"))
    (tmp_path / "data/meta.json").write_text(json.dumps({**meta, "format_version": 99}))
    places = [f"data_dir={tmp_path / 'data'}", f"run_dir={tmp_path / 'run'}"]
    assert_refused(["format_version 99", "update nmt"], "train", *places)


def test_damaged_arrow_files(root: Path, tmp_path: Path, assert_refused: Refused) -> None:
    shutil.copytree(root / "data", tmp_path / "data")
    os.truncate(tmp_path / "data/train-00000.arrow", 700)
    places = [f"data_dir={tmp_path / 'data'}", f"run_dir={tmp_path / 'run'}"]
    assert_refused(["train-00000.arrow is damaged", "nmt-preprocess"], "train", *places)


def test_batches_too_small_for_the_longest_sentence(
    root: Path, tmp_path: Path, assert_refused: Refused
) -> None:
    places = [f"data_dir={root / 'data'}", f"run_dir={tmp_path / 'run'}"]
    assert_refused(["max_tokens=3", "longest sentence"], "train", *places, "max_tokens=3")


def test_a_device_that_is_not_there(root: Path, tmp_path: Path, assert_refused: Refused) -> None:
    places = [f"data_dir={root / 'data'}", f"run_dir={tmp_path / 'run'}"]
    assert_refused(["device=cuda:77", "device=cpu"], "train", *places, "device=cuda:77")
    assert_refused(["device=gpu", "auto, cpu, cuda"], "train", *places, "device=gpu")
    assert_refused(["device=cuda:77"], "translate", f"model_dir={root / 'run'}", "device=cuda:77")


def test_a_run_folder_of_another_run(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert train(root / "data", root / "run", "max_updates=8", "seed=5") == 2
    assert "seed was 1, is 5" in capfd.readouterr().err


def test_a_loss_that_is_not_finite_stops_before_the_weights(
    root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wild = ["optimizer.learning_rate_scale=1e30", "max_updates=20"]
    assert train(root / "data", tmp_path / "run", *wild) == 2
    assert "not finite" in capfd.readouterr().err


def test_a_model_folder_that_is_none(tmp_path: Path, assert_refused: Refused) -> None:
    assert_refused(["is no model folder"], "translate", f"model_dir={tmp_path}")
    assert_refused(["does not exist"], "translate", f"model_dir={tmp_path / 'none'}")
    assert_refused(["is no run folder"], "average", f"run_dir={tmp_path}")
    assert_refused(["does not exist"], "average", f"run_dir={tmp_path / 'none'}")


def test_damaged_model_folders(root: Path, tmp_path: Path, assert_refused: Refused) -> None:
    source = (root / "run/checkpoints/latest").resolve()
    content = json.loads((source / "config.json").read_text(encoding="utf-8"))
    weights = (source / "model.safetensors").read_bytes()
    wide = {**content, "model": {**content["model"], "d_ff": 64}}
    for number, (file, damage, *expected) in enumerate(
        [
            ("config.json", json.dumps({**content, "format_version": 99}), "version 99", "update"),
            ("config.json", json.dumps(wide), "do not fit"),
            ("config.json", "{", "config.json", "copy"),
            ("tokenizer.model", "nonsense", "tokenizer.model"),
            ("model.safetensors", weights[:1000], "model.safetensors is damaged"),
        ]
    ):
        model = tmp_path / str(number)
        shutil.copytree(source, model)
        data = damage if isinstance(damage, bytes) else damage.encode()
        (model / file).write_bytes(data)
        assert_refused([*expected], "translate", f"model_dir={model}")
    output = f"output={tmp_path / 'average'}"
    assert_refused(["is damaged"], "average", f"checkpoints=[{model}]", output)


def test_more_n_best_than_beam(model: Path, assert_refused: Refused) -> None:
    assert_refused(["n_best=2", "format=json"], "translate", f"model_dir={model}", "n_best=2")
    wide = ["n_best=9", "format=json"]
    assert_refused(["n_best=9", "beam_size=4"], "translate", f"model_dir={model}", *wide)


def test_translate_to_a_folder_that_is_not_there(model: Path, assert_refused: Refused) -> None:
    places = [f"model_dir={model}", f"input={model / 'config.json'}"]
    assert_refused(["does not exist"], "translate", *places, f"output={model / 'no/out.de'}")


def test_translate_of_a_missing_input(model: Path, assert_refused: Refused) -> None:
    places = [f"model_dir={model}", f"output={model.parent / 'out'}"]
    assert_refused(["nothing.en does not exist"], "translate", *places, "input=nothing.en")


def test_evaluate_refuses_unequal_counts(tmp_path: Path, assert_refused: Refused) -> None:
    (tmp_path / "h").write_text("a\nb\n", encoding="utf-8")
    (tmp_path / "r").write_text("a\n", encoding="utf-8")
    places = [f"hypotheses={tmp_path / 'h'}", f"references={tmp_path / 'r'}"]
    assert_refused(["2", "1"], "evaluate", *places)


def test_evaluate_needs_hypotheses_or_a_model(assert_refused: Refused) -> None:
    assert_refused(["hypotheses=FILE"], "evaluate", "references=r")
    assert_refused(["references"], "evaluate", "hypotheses=h")


def test_a_foreign_folder_that_has_a_file_of_our_name(
    root: Path, tmp_path: Path, assert_refused: Refused
) -> None:
    (tmp_path / "config.json").write_text('{"a": 1}', encoding="utf-8")
    (tmp_path / "precious.txt").write_text("keep", encoding="utf-8")
    places = [f"run_dir={root / 'run'}", f"output={tmp_path}"]
    assert_refused(["choose another folder"], "average", *places)


def test_an_average_in_place_of_a_checkpoint(root: Path, assert_refused: Refused) -> None:
    folder = (root / "run/checkpoints/latest").resolve()
    arguments = [f"checkpoints=[{folder}]", f"output={folder}"]
    assert_refused(["is a checkpoint of a run"], "average", *arguments)


def test_damaged_json_and_yaml(root: Path, tmp_path: Path, assert_refused: Refused) -> None:
    for name in ("data", "run"):
        shutil.copytree(root / name, tmp_path / name, symlinks=True)
    (tmp_path / "run/config.yaml").write_text("[", encoding="utf-8")
    assert_refused(["config.yaml is no config"], "average", f"run_dir={tmp_path / 'run'}")
    (tmp_path / "data/meta.json").write_text("{", encoding="utf-8")
    places = [f"data_dir={tmp_path / 'data'}", f"run_dir={tmp_path / 'other'}"]
    assert_refused(["meta.json is damaged"], "train", *places)


def test_a_validation_text_that_is_gone_is_missed_at_the_start(
    root: Path, tmp_path: Path, assert_refused: Refused
) -> None:
    shutil.copytree(root / "data", tmp_path / "data")
    (tmp_path / "data/valid.tgt").unlink()
    places = [f"data_dir={tmp_path / 'data'}", f"run_dir={tmp_path / 'run'}"]
    assert_refused(["valid.tgt does not exist"], "train", *places)


def test_a_file_where_a_run_folder_should_be(
    root: Path, tmp_path: Path, assert_refused: Refused
) -> None:
    (tmp_path / "run").write_text("text", encoding="utf-8")
    places = [f"data_dir={root / 'data'}", f"run_dir={tmp_path / 'run'}"]
    assert_refused([str(tmp_path / "run")], "train", *places)


def test_a_folder_where_an_output_should_be(
    model: Path, tmp_path: Path, assert_refused: Refused
) -> None:
    places = [f"model_dir={model}", f"output={tmp_path}"]
    assert_refused(["is a folder"], "translate", *places)


def test_standard_input_that_is_closed(
    model: Path, assert_refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert_refused(["stdin is closed"], "translate", f"model_dir={model}")


def test_values_out_of_range(assert_refused: Refused) -> None:
    for argument in (
        "seed=-1",
        "tokenizer.max_sentences=-5",
        "tokenizer.character_coverage=7",
        "num_threads=100000",
    ):
        assert_refused([argument.split("=")[0].split(".")[-1], "must"], "preprocess", argument)
    assert_refused(["length_penalty", "must"], "train", "search.length_penalty=nan")
