"""Words of other toolkits, and YAML files of the user."""

from __future__ import annotations

import os
import re
from operator import attrgetter
from pathlib import Path

import pytest
from test_config import assert_refused, composed

from nmt.cli.arguments import parse_argument
from nmt.cli.commands import COMMANDS
from nmt.cli.main import main
from nmt.config import ADVICE_FOR_KEY, OUR_KEY, DType, Schedule
from nmt.errors import ConfigError


def test_words_of_other_toolkits_mean_our_settings() -> None:
    for command, typed, expected in (
        (
            "train",
            "gpus=2 beam=5 --bf16 max_steps=100k warmup=4K dropout=0.3 "
            "--optimizer.schedule=cosine --seed 1234567890123456789",
            {
                "devices": 2,
                "search.beam_size": 5,
                "dtype": DType.bfloat16,
                "max_updates": 100_000,
                "optimizer.warmup_steps": 4000,
                "model.dropout": 0.3,
                "optimizer.schedule": Schedule.cosine,
                "seed": 1234567890123456789,
            },
        ),
        (
            "train",
            "gpus=0 bf16 max_updates=1e5 --model=tiny save_dir=runs/1e5",
            {
                "device": "cpu",
                "dtype": DType.bfloat16,
                "max_updates": 100_000,
                "model.d_model": 128,
                "run_dir": "runs/1e5",
            },
        ),
        ("train", "dtype=fp16 max_updates=1_500", {"dtype": DType.float16, "max_updates": 1500}),
        ("train", "--precision fp32 ++max_updates=3", {"dtype": DType.float32, "max_updates": 3}),
        (
            "translate",
            "--beam_size 4 --sampling --seed 3 run_dir=runs/x",
            {"beam_size": 4, "sampling": True, "seed": 3, "model_dir": ["runs/x"]},
        ),
        ("translate", "--beam-size=4 alpha=-1", {"beam_size": 4, "length_penalty": -1.0}),
        ("translate", "--alpha -1", {"length_penalty": -1.0}),
        (
            "preprocess",
            "vocab_size=8k train_src=a train_tgt=b",
            {"tokenizer.vocab_size": 8000, "data.train.src": ["a"], "data.train.tgt": ["b"]},
        ),
        ("average", "checkpoints=a,b", {"checkpoints": ["a,b"]}),
    ):
        config = composed(command, typed.split())
        for key, value in expected.items():
            assert attrgetter(key)(config) == value, (command, typed, key)


def test_every_word_of_another_toolkit_leads_to_a_setting_of_some_command() -> None:
    names = {setting.key for command in COMMANDS.values() for setting in command.accepted_settings}
    for word, key in OUR_KEY.items():
        assert any(f".{name}".endswith(f".{key}") for name in names) or key == "experiment", word
    for word, advice_texts in ADVICE_FOR_KEY.items():
        expected = {advice.format(value="1") for advice in advice_texts}
        for command in COMMANDS.values():
            if expected:  # not printed by any command before
                try:
                    parse_argument(f"{word}=1", command)
                except ConfigError as error:
                    expected.discard(str(error).partition("; ")[2])
        assert not expected, word


def test_advice_to_save_nothing_is_accepted() -> None:
    for word in ("no_save", "no_epoch_checkpoints"):
        [advice] = ADVICE_FOR_KEY[word]
        config = composed("train", advice.removeprefix("write ").split())
        assert (config.keep_last, config.average_last) == (1, 1)


def test_quantization_none_is_float32() -> None:
    quantization = composed("export", "quantization=none").quantization
    assert quantization is composed("export", "quantization=fp32").quantization
    assert quantization.value == "float32"


@pytest.mark.slow
def test_every_command_refuses_an_unknown_setting_in_a_short_line() -> None:
    for name in COMMANDS:
        with pytest.raises(Exception, match="xyzzy") as error:
            composed(name, "xyzzy=1")
        assert len(str(error.value)) < 200, name


# --- YAML of the user


@pytest.fixture
def recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an experiment, a model, and an experiment with the name of one of ours."""
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "experiment/mine.yaml": "defaults:\n  - override /data: copy\n  - override /model: narrow\n"
        "run_dir: runs/mine\nmax_updates: 1e3\nsearch: {beam_size: 2}\n",
        "model/narrow.yaml": "# @package _global_\nmodel:\n  d_model: 64\n",
        "experiment/copy.yaml": "max_updates: 7\ndata:\n  src_lang: xx\n",
    }.items():
        path = tmp_path / "my" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path / "my"


@pytest.mark.slow
def test_own_yaml_is_found_by_folder_path_or_search_path(recipes: Path) -> None:
    narrow = "my/model/narrow.yaml"
    for typed in (
        "--config-dir my experiment=mine",
        "--config-dir=my experiment=mine",
        "-cd my experiment=mine",
        "hydra.searchpath=[my] experiment=mine",
        f"hydra.searchpath=[file://{recipes}] experiment=mine",
        f"model={narrow} experiment=my/experiment/mine.yaml",
        f"model={narrow} experiment={recipes}/experiment/mine.yaml",
    ):
        config = composed("train", typed.split())
        assert (config.max_updates, config.search.beam_size) == (1000, 2), typed
        assert (config.model.d_model, config.run_dir) == (64, "runs/mine"), typed
        assert config.experiment == "my/experiment/mine.yaml", typed
    config = composed("train", "experiment=my/experiment/copy.yaml")  # the file of the user
    assert (config.max_updates, config.run_dir) == (7, "runs/default")
    assert composed("preprocess", "experiment=my/experiment/copy.yaml").data.corpus == "files"
    assert composed("translate", "--config-dir", "my", "experiment=mine").model_dir == ["runs/mine"]


def test_mistakes_in_own_yaml_name_the_file_and_the_nearest_key(recipes: Path) -> None:
    for text, *expected in (
        ("max_update: 3", "x.yaml sets max_update, which no command has; did you mean max_updates"),
        (
            "model: {d_modell: 3}",
            "x.yaml: model.d_modell: there is no such setting",
            "model.d_model",
        ),
        ("- a", "x.yaml holds no settings; write lines of key: value"),
        ("a: [", "x.yaml is not valid YAML: "),
        ("max_updates: many", "max_updates"),
        ("model: 3", "model"),
    ):
        (recipes / "x.yaml").write_text(text, encoding="utf-8")
        assert_refused("train", "experiment=my/x.yaml", *expected)
    assert_refused("train", "--config-dir my experiment=min", "experiment=min", "did you mean mine")
    assert_refused("train", "my/x.yaml", "write experiment=my/x.yaml")
    assert_refused(
        "train", "--config-dir none experiment=mine", "no such folder; give --config-dir"
    )
    assert_refused("train", "experiment=none.yaml", "no such choice and no such YAML file")


def test_tab_completion_is_installed_and_knows_keys_and_all_values_of_a_choice(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(COMMANDS["train"], ["-sc", "install=bash"]) == 0
    script = capfd.readouterr().out
    assert re.search(r"complete .*-F hydra_bash_completion.* nmt-train", script), script
    for line, expected in {
        "nmt-train optimizer.na": "optimizer.name=",
        "nmt-train experiment=cop": "experiment=copy",
        "nmt-train optimizer.name=": "adam adamw muon adafactor schedule_free",
        "nmt-train valid_bleu=true best_metric=b": "loss bleu",
        "nmt-translate normalization=": "wu average none",
    }.items():
        command, *_, word = line.split(" ")
        monkeypatch.setitem(os.environ, "COMP_LINE", line)
        assert main(COMMANDS[command.removeprefix("nmt-")], ["-sc", "query=bash"]) == 0
        prefix = f"{word.partition('=')[0]}=" if "=" in word else ""
        words = capfd.readouterr().out.split()
        assert [item.removeprefix(prefix) for item in words] == [
            item.removeprefix(prefix) for item in expected.split()
        ], line
