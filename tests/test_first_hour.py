"""The first hour with the commands: every hint works, training prepares its data, experiments set
the folders of all commands, and the runs of a sweep have folders of their own.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from test_config import compose_command, composed
from toy import TINY, command, read_records, train, write_corpus

import nmt
from nmt.checkpoint import find_model
from nmt.cli import commands, compose
from nmt.cli.commands import COMMANDS, script_command, shell_command
from nmt.cli.data_folder import ensure_data, train_command
from nmt.cli.main import import_and_run, log_to_stderr, main
from nmt.cli.main import nmt as nmt_alone
from nmt.errors import ConfigError, DataError
from nmt.runtime.distributed import choose_num_processes

HINT = re.compile(r"(?:next|make it with|as this does): (.*?)(?:; its README.*)?$", re.MULTILINE)


def write_experiment(path: Path, corpus: Path) -> None:
    """Write an experiment of the toy corpus and a tiny model."""
    corpus.mkdir(parents=True, exist_ok=True)
    settings = [*write_corpus(corpus), *TINY, "max_updates=4", "valid_bleu=false"]
    config = OmegaConf.from_dotlist([*settings, "data_dir=data/mine", "run_dir=runs/mine"])
    path.parent.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, path)


def follow(hint: str) -> int:
    """Run a hint as a shell would read it."""
    words = shlex.split(hint)
    name, *arguments = words[3:] if words[1:3] == ["-m", "nmt"] else words
    return main(COMMANDS[Path(name).name.removeprefix("nmt-")], arguments)


def last_hint(capfd: pytest.CaptureFixture[str], name: str) -> str:
    """Return the hint that was printed last, which is to run `nmt-NAME`."""
    hint = HINT.findall(capfd.readouterr().err)[-1]
    assert re.search(f"nmt[- ]{name}( |$)", hint), hint
    return str(hint)


@pytest.mark.slow
def test_every_hint_is_the_command_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "it's me"
    write_experiment(home / "my recipes/mine.yaml", tmp_path / "a corpus")
    monkeypatch.chdir(home)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"red house\n")))
    experiment = "experiment=my recipes/mine.yaml"
    data_dir = "data_dir=o'ther one"
    assert command("train", experiment, data_dir, "run_dir=$x y", "dry_run=true") == 2
    assert follow(last_hint(capfd, "preprocess")) == 0
    assert follow(f"{last_hint(capfd, 'train')} 'run_dir=$x y'") == 0
    assert follow(last_hint(capfd, "average")) == 0
    assert follow(last_hint(capfd, "translate")) == 0
    assert command("train", "data_dir=no where") == 2
    hint = last_hint(capfd, "preprocess")
    for name in ("train.src", "train.tgt", "valid.src", "valid.tgt"):
        path = tmp_path / f"a corpus/{name}.txt"
        hint = hint.replace(f"data.{name}=FILE", shlex.quote(f"data.{name}={path}"))
    assert follow(f"{hint} tokenizer.vocab_size=310") == 0
    expected = "model=small 'data_dir=no where' 'run_dir=runs/no where'"
    assert last_hint(capfd, "train").endswith(expected)
    assert (home / "no where/meta.json").is_file()
    hint = shell_command("export", model_dir="$x y", format="ctranslate2")
    assert follow(hint) == 0
    assert follow(last_hint(capfd, "translate")) == 0
    assert (home / "$x y-ctranslate2-float32/nmt.json").is_file()
    assert command("export", "model_dir=$x y", "format=argos") == 0
    *words, package = shlex.split(HINT.findall(capfd.readouterr().err)[-1])
    assert words == ["argospm", "install"]
    assert Path(package).is_file()


def test_the_script_that_makes_files_is_named_as_it_can_be_run_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command("preprocess", "experiment=homeassistant") == 2
    words = shlex.split(HINT.findall(capfd.readouterr().err)[-1])
    assert words[2:] == ["--src", "en", "--tgt", "de"]
    done = subprocess.run([*words[:2], "--help"], capture_output=True)
    assert done.returncode == 0, words


def test_a_run_goes_on_with_the_settings_that_it_has_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text("max_updates: 90\noptimizer: {warmup_steps: 7}\n", "utf-8")
    words = ["experiment=own.yaml", "model=tiny", "data_dir=data/mine", "run_dir=runs/mine"]
    config_yaml = compose_command("train", words).config_yaml
    Path("runs/mine").mkdir(parents=True)
    Path("runs/mine/config.yaml").write_text(config_yaml, "utf-8")
    resumed = compose_command("train", ["run_dir=runs/mine"])
    assert resumed.config_yaml == config_yaml
    assert resumed.config.experiment == "own.yaml"
    assert resumed.preparation is not None
    assert resumed.preparation.arguments == ["experiment=own.yaml"]
    config = composed("train", "run_dir=runs/mine", "max_updates=280")
    assert (config.max_updates, config.data_dir) == (280, "data/mine")
    assert config.optimizer.warmup_steps == 7
    # words that choose YAML files say themselves what to train
    assert composed("train", "run_dir=runs/mine", "model=base").optimizer.warmup_steps == 4000
    assert composed("train", "run_dir=runs/other").data_dir == "data/prepared"
    for key in ("config", "experiment"):
        repeated = composed("train", f"{key}=runs/mine/config.yaml", "run_dir=runs/other")
        assert repeated.model == config.model, key
        assert (repeated.max_updates, repeated.run_dir) == (90, "runs/other"), key


@pytest.mark.slow
def test_a_quiet_command_logs_nothing_but_warnings(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["preprocess", *write_corpus(tmp_path, 60), "num_threads=1"]
    for quiet_word in ("-q", "--quiet", "quiet=true"):
        assert command(*words, "overwrite=true", quiet_word) == 0
        output = capfd.readouterr()
        assert output.err == "", quiet_word
        assert "read" in output.out  # the result
    assert command(*words, "-q", "max_length=0") == 2
    assert "max_length=0" in capfd.readouterr().err
    logger = logging.getLogger("nmt")
    for word, level in (("-v", logging.DEBUG), ("overwrite=true", logging.INFO)):
        assert command(*words, word) == 0
        assert f"wrote {tmp_path}/data; next: " in capfd.readouterr().err
        assert logger.level == level
        log_to_stderr()  # as a process does that the command has started
        assert logger.level == level


def test_a_run_is_not_written_into_a_model_folder(
    toy_data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}", "utf-8")
    assert train(toy_data, tmp_path, TINY) == 2
    expected = f"run_dir={tmp_path} is a checkpoint or model folder; choose another run_dir"
    assert expected in capfd.readouterr().err
    model = tmp_path / "r" / "checkpoints" / "latest"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}", "utf-8")
    (model / "model.safetensors").touch()
    (tmp_path / "config.json").unlink()
    for run_dir in (model.parent, model.parent / "new", model / "new"):
        assert train(toy_data, run_dir, TINY) == 2
        assert "which has models of a run; choose another run_dir" in capfd.readouterr().err
    assert not (model.parent / "new").exists()


def test_more_processes_than_cores_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    for devices in (1, 2):
        assert choose_num_processes(devices, "cpu") == devices
    assert not caplog.messages
    assert choose_num_processes(99, "cpu") == 99
    assert caplog.messages == ["devices=99 processes share 2 CPU cores; devices=2 is faster"]


def test_an_installed_package_says_that_scripts_are_in_the_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    download = "curl --fail -o a.zip https://example.org/a.zip"
    assert script_command(download) == download
    scripts = script_command("python scripts/fetch_homeassistant.py --src en")
    assert scripts.endswith("/scripts/fetch_homeassistant.py --src en")
    monkeypatch.setattr(commands, "__file__", str(tmp_path / "nmt/cli/commands.py"))
    scripts = script_command("python scripts/fetch_homeassistant.py --src en")
    assert scripts.startswith("python scripts/fetch_homeassistant.py --src en (in a clone of nmt")


def test_nmt_lists_its_names() -> None:
    assert dir(nmt) == ["Translator", "__version__", "prepare", "train"]


def test_a_model_file_may_hold_the_settings_of_a_model_at_its_top(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("flat.yaml").write_text("d_model: 48\nnum_heads: 3\nmax_tokens: 77\n", "utf-8")
    config = composed("train", "model=flat.yaml")
    assert (config.model.d_model, config.model.num_heads, config.max_tokens) == (48, 3, 77)
    Path("typo.yaml").write_text("d_model: 48\nnum_head: 3\n", "utf-8")
    with pytest.raises(ConfigError, match="typo.yaml sets num_head, which no command has"):
        composed("train", "model=typo.yaml")


def test_the_command_after_preprocessing_names_a_free_run_and_the_model_to_fine_tune(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text("max_updates: 90\n", "utf-8")
    words = ["experiment=own.yaml", "data_dir=data/mine"]
    config = composed("preprocess", *words)
    assert train_command(config).endswith(" experiment=own.yaml data_dir=data/mine")
    Path("runs/default").mkdir(parents=True)
    assert train_command(config).endswith(" data_dir=data/mine run_dir=runs/default-2")
    Path("runs/default").rmdir()
    assert train_command(composed("preprocess")).endswith(" model=tiny")
    own_text = composed("preprocess", "data.train.src=a.en", "data.train.tgt=a.de")
    assert train_command(own_text).endswith(" model=small")
    Path("runs/old").mkdir()
    config = composed("preprocess", "experiment=finetune", "tokenizer.model=runs/old")
    expected = "experiment=finetune data_dir=data/finetune init_from=runs/old"
    assert train_command(config).endswith(expected)
    words = ["tokenizer.model=runs/old", "tokenizer.extend=10", "data_dir=data/grown"]
    config = composed("preprocess", *words)
    expected = " init_from=runs/old data_dir=data/grown run_dir=runs/grown"
    assert train_command(config).endswith(expected)


def test_a_run_from_another_folder_asks_for_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "runs/mine"
    run_dir.mkdir(parents=True)
    recorded = compose_command("train", ["data_dir=data/mine", "run_dir=runs/mine"])
    (run_dir / "config.yaml").write_text(recorded.config_yaml, "utf-8")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert command("train", "run_dir=../runs/mine") == 2
    advice = (
        "other/data/mine does not exist; give data_dir=FOLDER, the data of run_dir=../runs/mine"
    )
    assert advice in capsys.readouterr().err


def copy_data(data_dir: Path, copy_dir: Path, **changes: str) -> Path:
    """Copy a data folder and change values of its `meta.json`."""
    shutil.copytree(data_dir, copy_dir)
    meta = json.loads((copy_dir / "meta.json").read_text("utf-8"))
    (copy_dir / "meta.json").write_text(json.dumps(meta | changes), "utf-8")
    (copy_dir / "manifest.json").unlink()  # it has the checksum of the old file
    return copy_dir


def test_training_uses_an_existing_data_folder_and_prepares_none_in_a_dry_run(
    toy_data: Path, tmp_path: Path
) -> None:
    def ensure(data_dir: Path, arguments: list[str], *, may_write: bool) -> None:
        words = [f"data_dir={data_dir}", *arguments]
        command = compose_command("train", words)
        assert command.preparation is not None
        ensure_data(command.config, command.preparation, may_write=may_write)

    for arguments in (["experiment=copy"], ["data.train.src=a", "data.train.tgt=b"]):
        ensure(toy_data, arguments, may_write=True)
        with pytest.raises(DataError, match=f"make it with: .*preprocess .*{arguments[0]}"):
            ensure(tmp_path / "missing", arguments, may_write=False)
    assert list(tmp_path.iterdir()) == []
    english_german = copy_data(toy_data, tmp_path / "en-de", src_lang="en", tgt_lang="de")
    for arguments in (["data.src_lang=en", "data.tgt_lang=de"], ["experiment=iwslt14"]):
        ensure(english_german, arguments, may_write=True)  # IWSLT's recipe, not its text
    two_corpora = ["data.corpora.b.src_lang=fr"]
    for name in ("a", "b"):
        two_corpora += [f"data.corpora.{name}.src=s", f"data.corpora.{name}.tgt=t"]
    two_sources = copy_data(toy_data, tmp_path / "en+fr-de", src_lang="en+fr", tgt_lang="de")
    ensure(two_sources, [*two_corpora, "data.src_lang=en", "data.tgt_lang=de"], may_write=True)
    with pytest.raises(DataError, match="from en to de; for data.tgt_lang=fr, give another"):
        ensure(english_german, ["data.tgt_lang=fr"], may_write=True)


@pytest.mark.slow
def test_training_prepares_the_bytes_that_preprocessing_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = [a for a in write_corpus(tmp_path) if not a.startswith("data_dir=")]
    assert command("preprocess", arguments, "data_dir=one") == 0
    run = [*TINY, "max_updates=1", "seed=7", "valid_bleu=false", "run_dir=run"]
    assert command("train", arguments, run, "data_dir=two") == 0
    names = sorted(path.name for path in Path("one").iterdir())
    assert names == sorted(path.name for path in Path("two").iterdir())
    for name in names:
        assert Path("one", name).read_bytes() == Path("two", name).read_bytes(), name


def test_an_experiment_sets_the_folders_of_every_command() -> None:
    assert composed("average", "experiment=copy").run_dir == "runs/copy"
    for name in ("translate", "export", "serve", "score"):
        config = composed(name, "experiment=copy")
        assert config.model_dir in ("runs/copy", ["runs/copy"]), name
    config = composed("translate", "experiment=copy", "model_dir=x")
    assert config.model_dir == ["x"]
    assert config.max_tokens is None  # training sets it in another unit


def test_the_seed_of_an_experiment_is_only_for_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With that seed, nmt-preprocess would write other data than nmt-train prepares."""
    monkeypatch.chdir(tmp_path)
    write_experiment(tmp_path / "mine.yaml", tmp_path / "corpus")
    OmegaConf.save({**OmegaConf.load("mine.yaml"), "seed": 7}, "mine.yaml")
    assert composed("train", "experiment=mine.yaml").seed == 7
    preparation = compose_command("train", ["experiment=mine.yaml"]).preparation
    assert preparation is not None
    assert composed("preprocess", "experiment=mine.yaml") == preparation.config
    assert composed("preprocess", "experiment=mine.yaml", "seed=3").seed == 3


@pytest.mark.slow
def test_a_run_of_an_experiment_is_evaluated_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_experiment(tmp_path / "mine.yaml", tmp_path / "corpus")
    assert command("train", "experiment=mine.yaml") == 0
    assert command("evaluate", "experiment=mine.yaml", "metrics=chrf", "force=true") == 0
    assert "chrF" in capfd.readouterr().out


@pytest.mark.slow
def test_an_average_replaces_nothing_that_was_not_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    toy_data: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("default", "other"):
        run = ["max_updates=8", "valid_bleu=false", f"run_dir=runs/{name}"]
        assert command("train", f"data_dir={toy_data}", TINY, run) == 0
    assert command("average") == 0
    average = Path("runs/default/average")
    modified_time = (average / "config.json").stat().st_mtime_ns
    step = "checkpoints/step-00000004"
    other_checkpoints = f"runs/other/{step},runs/other/checkpoints/step-00000008"
    assert command("average", f"checkpoints=[{other_checkpoints}]") == 0
    assert Path("runs/other/average/config.json").is_file()
    for checkpoints, expected in (
        (other_checkpoints, "runs/other/average exists already; give output="),
        (f"runs/other/{step},runs/default/{step}", "are not of one run; give output="),
        ("runs/other", "are not of one run"),
    ):
        assert command("average", f"checkpoints=[{checkpoints}]") == 2
        assert expected in capfd.readouterr().err
    assert (average / "config.json").stat().st_mtime_ns == modified_time
    # the model of a run is its average until there is a newer checkpoint
    assert find_model(Path("runs/default")) == average.resolve()
    assert train(toy_data, tmp_path / "runs/default", "max_updates=12", "valid_bleu=false") == 0
    assert find_model(Path("runs/default")).name == "step-00000012"
    capfd.readouterr()
    Path("in").write_text("red\n", encoding="utf-8")
    assert command("translate", "input=in") == 0
    assert re.search(
        r"step-00000012, 12 .*; not used: average \(8 updates\)", capfd.readouterr().err
    )
    assert command("average", "best=1") == 0  # now the average is newer
    assert find_model(Path("runs/default")) == average.resolve()


@pytest.mark.slow
def test_a_run_says_why_it_ends_and_is_extended_whatever_its_schedule(
    toy_data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    base = ["valid_bleu=false", "optimizer.warmup_steps=2", "log_every_updates=1"]
    for schedule, expected in (
        ("cosine", "the learning rate now falls until update 8"),
        ("noam", "does not change the learning rate"),
    ):
        run = tmp_path / schedule
        options = [*base, f"optimizer.schedule={schedule}"]
        assert train(toy_data, run, options, "max_updates=4") == 0
        assert "the run ends: 4 updates are done; a larger max_updates" in capfd.readouterr().err
        assert train(toy_data, run, options, "max_updates=8") == 0
        error = capfd.readouterr().err
        assert "resuming with a changed setting: max_updates was 4, is 8" in error
        assert expected in error
        rates = [record["learning_rate"] for record in read_records(run, "nll")]
        assert len(rates) == 8
        assert (rates[3] < rates[4]) == (schedule == "cosine")
    base += ["validate_every_updates=1", "max_updates=90"]
    base += ["optimizer.schedule=cosine", "optimizer.peak_learning_rate=1e-10"]  # no improvement
    for patience in (2, 4, 4):  # the third run was over already
        assert train(toy_data, tmp_path / "early", base, f"patience={patience}") == 0
        error = capfd.readouterr().err
        reason = f"{patience} validations without a better loss (patience={patience})"
        assert f"the run ends: {reason}" in error or f"the run was over: {reason}" in error
        assert "to go on, set patience=0 or a larger number" in error


@pytest.mark.slow
def test_a_sweep_gives_each_run_a_folder_returns_the_score_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, toy_data: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    scores: list[float] = []
    options = [*TINY, "max_updates=2", "valid_bleu=false", f"data_dir={toy_data}", "run_dir=s"]
    options.append("hydra.sweep.dir=${run_dir}")  # Hydra looks the setting up again for each run
    for _ in range(2):
        compose.compose_command(
            COMMANDS["train"],
            ["--multirun", "seed=1,2", *options],
            lambda command: scores.append(import_and_run(COMMANDS["train"], command)),
        )
    assert {path.name for path in Path("s").iterdir()} == {"seed=1", "seed=2"}
    assert scores[0] != scores[1]
    assert scores[:2] == scores[2:]
    (record,) = read_records(Path("s/seed=1"), "valid_loss")  # once, though it was started twice
    assert scores[0] == record["valid_loss"]


@pytest.mark.slow
def test_the_runs_of_a_sweep_have_folders_named_after_the_swept_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_dirs: list[str] = []

    def note(command: compose.ComposedCommand) -> None:
        run_dirs.append(command.config.run_dir)
        if len(run_dirs) == 3:
            raise ConfigError("enough")

    words = ["-m", "run_dir=a b,c", "model=tiny,base", "seed=3"]
    with pytest.raises(ConfigError, match="enough"):
        compose.compose_command(COMMANDS["train"], words, note)
    assert run_dirs == ["a b/model=tiny", "a b/model=base", "c/model=tiny"]


def test_python_m_nmt_and_nmt_help_are_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = subprocess.run([sys.executable, "-m", "nmt", "help", "train"], capture_output=True)
    assert result.returncode == 0
    assert b"nmt-train: Train a Transformer" in result.stdout
    monkeypatch.setattr(sys, "argv", ["nmt", "average-checkpoints", "--help"])
    assert nmt_alone() == 0
    assert capsys.readouterr().out.startswith("nmt-average: ")
    monkeypatch.setattr(sys, "argv", ["nmt", "nmt-train", "max_updates"])
    assert nmt_alone() == 2
    assert "max_updates is not a setting; write max_updates=VALUE" in capsys.readouterr().err
