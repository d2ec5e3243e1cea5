"""Every YAML composes, unknown keys name the nearest, recipes are the paper's."""

from __future__ import annotations

import dataclasses
import importlib.resources
import io
import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml

from nmt.cli import compose
from nmt.cli.commands import COMMANDS
from nmt.cli.help import choices
from nmt.config import ModelConfig, Optimizer, OptimizerConfig, Schedule, SplitConfig, TrainConfig
from nmt.errors import ConfigError

REQUIRED = {"evaluate": ["hypotheses=h", "references=r"], "score": ["src=s", "tgt=t"]}


def composed(name: str, *arguments: str) -> tuple[Any, str]:
    """Return the config that a command would run with, and its YAML."""
    seen: list[tuple[Any, str]] = []
    everything = [*REQUIRED.get(name, []), *arguments]
    compose.with_config(
        COMMANDS[name], everything, lambda config, text, *_: seen.append((config, text))
    )
    return seen[0]


CHOICES = [(group, name) for group in compose.GROUPS for name in choices(group)]


@pytest.mark.parametrize("command", ["preprocess", "train"])
@pytest.mark.parametrize(("group", "name"), CHOICES)
def test_every_yaml_composes(command: str, group: str, name: str) -> None:
    config, _ = composed(command, f"{group}={name}")
    assert isinstance(config, COMMANDS[command].schema)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_takes_an_experiment(command: str) -> None:
    config, _ = composed(command, "experiment=multi30k")
    assert isinstance(config, COMMANDS[command].schema)
    assert getattr(config, "run_dir", "runs/multi30k") == "runs/multi30k"


def test_every_yaml_of_configs_is_a_choice() -> None:
    folder = Path(str(importlib.resources.files("nmt.configs")))
    files = {str(path.relative_to(folder)) for path in folder.rglob("*.yaml")}
    assert files == {f"{g}/{n}.yaml" for g, n in CHOICES}


def test_every_key_of_a_yaml_is_a_setting_of_some_command(tmp_path: Path) -> None:
    known = [f.name for c in COMMANDS.values() for f in dataclasses.fields(c.schema)]
    folder = Path(str(importlib.resources.files("nmt.configs")))
    for group, name in CHOICES:
        content = yaml.safe_load((folder / group / f"{name}.yaml").read_text(encoding="utf-8"))
        assert set(content) - {"defaults"} <= set(known), (group, name)


@pytest.mark.parametrize("argument", ["model=big", "+model=big"])
def test_a_group_is_chosen_with_and_without_plus(argument: str) -> None:
    config, _ = composed("train", argument)
    assert config.model.d_model == 1024
    assert config.average_last == 20


@pytest.mark.parametrize("name", ["base", "big"])
def test_base_and_big_spell_out_every_hyperparameter(name: str) -> None:
    folder = Path(str(importlib.resources.files("nmt.configs")))
    content = yaml.safe_load((folder / f"model/{name}.yaml").read_text(encoding="utf-8"))
    for group in ("model", "optimizer"):
        schema = type(getattr(TrainConfig(), group))
        assert set(content[group]) == {field.name for field in dataclasses.fields(schema)}
    papers = {"beam_size", "length_penalty", "normalization", "max_length_a", "max_length_b"}
    assert set(content["search"]) == papers
    training = {"label_smoothing", "tokens_per_update", "max_updates", "average_last"}
    assert training <= set(content)


def test_base_is_the_default() -> None:
    assert composed("train", "model=base")[0] == TrainConfig()


def test_big_is_the_papers() -> None:
    config, _ = composed("train", "model=big")
    assert config.model == ModelConfig(d_model=1024, d_ff=4096, num_heads=16, dropout=0.3)
    assert config.max_updates == 300_000
    assert composed("train", "experiment=wmt14_en_fr_big")[0].model.dropout == 0.1


def test_the_wmt_runs_read_the_hub() -> None:
    config, _ = composed("preprocess", "experiment=wmt14_en_fr_big")
    assert config.data.train.dataset == "wmt/wmt14"
    assert config.data.train.dataset_config == "fr-en"
    assert config.tokenizer.vocab_size == 32_000
    assert composed("preprocess", "experiment=wmt14_en_de_base")[0].tokenizer.vocab_size == 37_000


def test_what_is_typed_wins_over_the_experiment() -> None:
    config, _ = composed("train", "max_updates=7", "experiment=multi30k", "model.dropout=0.5")
    assert config.max_updates == 7
    assert config.model.dropout == 0.5
    assert config.run_dir == "runs/multi30k"


def test_optimizer_schedule_and_dropout_are_typed_by_name() -> None:
    typed = "name=adamw weight_decay=0.01 schedule=inverse_sqrt peak_learning_rate=5e-4"
    config, _ = composed("train", *(f"optimizer.{word}" for word in typed.split()))
    expected = OptimizerConfig(
        name=Optimizer.adamw,
        weight_decay=0.01,
        schedule=Schedule.inverse_sqrt,
        peak_learning_rate=5e-4,
    )
    assert config.optimizer == expected
    assert composed("train", "model.embedding_dropout=0.2")[0].model.embedding_dropout == 0.2


@pytest.mark.parametrize(
    ("command", "argument", "expected"),
    [
        ("train", "max_update=3", "max_updates"),
        ("train", "+max_update=3", "max_updates"),
        ("train", "model.d_modell=3", "model.d_model"),
        ("train", "beam_size=3", "search.beam_size"),
        ("translate", "model_dirr=x", "model_dir"),
        ("preprocess", "data.train.source=x", "data.train.src"),
        ("train", "model=bas", "base"),
        ("train", "experiment=multi30", "multi30k"),
        ("train", "model=", "base"),
        ("train", "model=../model/base", "base"),
    ],
)
def test_a_mistyped_key_names_the_nearest(command: str, argument: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        composed(command, argument)


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("max_updates=many", "max_updates"),
        ("model.norm=middle", "norm"),
        ("model.num_heads=7", r"model\.num_heads=7: must divide model\.d_model=512"),
        ("model.dropout=1", r"model\.dropout=1"),
        ("optimizer.warmup_steps=0", "warmup_steps=0"),
        ("keep_last=2", "average_last=5"),
        ("best_metric=bleu valid_bleu=false", "valid_bleu=true"),
        ("model", "key=value"),
        ("model.d_model", "key=value"),
        ("optimizer=adam", "group of settings"),
        ("optimizer.name=sgd", "adamw"),
        ("optimizer.weight_decay=0.01", "optimizer.name=adamw"),
    ],
)
def test_a_bad_value_names_key_and_rule(argument: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as error:
        composed("train", *argument.split())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "path",
    [
        "a=b.txt",
        "a,b.txt",
        "Grüße.txt",
        "你好",
        "~/x y.txt",
        "it's.txt",
        "{a}.txt",
        "a\\b",
        "a\\",
        "'tis",
        "a\\'b",
        "#1;2",
    ],
)
def test_any_path_can_be_typed_without_quoting(path: str) -> None:
    assert composed("translate", f"input={path}")[0].input == path


def test_a_list_of_one_needs_no_brackets() -> None:
    assert composed("average", "checkpoints=a b")[0].checkpoints == ["a b"]
    assert composed("average", "checkpoints=[a,b]")[0].checkpoints == ["a", "b"]


def test_elements_of_a_list_need_no_quotes() -> None:
    symbols = composed("preprocess", "tokenizer.symbols=[<2de>, {url}]")[0].tokenizer.symbols
    assert symbols == ["<2de>", "{url}"]
    assert composed("preprocess", "tokenizer.symbols=[]")[0].tokenizer.symbols == []
    columns = composed("preprocess", "data.train.tsv=a", "data.train.columns=[1,3]")
    assert columns[0].data.train.columns == [1, 3]
    quoted = composed("average", """checkpoints=['a,b',"c"]""")[0].checkpoints
    assert quoted == ["a,b", "c"]


def test_files_are_the_corpus_when_files_are_named() -> None:
    config, _ = composed("preprocess", "data.train.src=a", "data.train.tgt=b")
    assert config.data.corpus == "files"
    assert config.tokenizer.vocab_size == 37_000
    assert composed("preprocess")[0].data.corpus == "numbers"


def test_the_resolved_yaml_holds_every_setting() -> None:
    config, text = composed("train", "model=tiny", "seed=9")
    saved = yaml.safe_load(io.StringIO(text))
    assert set(saved) == {field.name for field in dataclasses.fields(config)}
    assert saved["seed"] == 9
    assert saved["model"]["d_model"] == 128


def test_two_sources_for_one_split_are_a_contradiction() -> None:
    for one, other in itertools.permutations(("tsv", "dataset"), 2):
        with pytest.raises(ConfigError, match="both given"):
            SplitConfig(**{one: "x", other: "y"})
    with pytest.raises(ConfigError, match="without tgt"):
        SplitConfig(src="x")
