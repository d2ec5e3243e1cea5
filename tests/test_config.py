"""Every YAML composes, unknown keys name the nearest, recipes are the paper's."""

from __future__ import annotations

import copy
import dataclasses
import importlib.resources
import math
import re
import typing
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from omegaconf import OmegaConf

from nmt.cli import compose
from nmt.cli.commands import COMMANDS, choices, command_help
from nmt.cli.yaml_files import check_content
from nmt.config import (
    BestMetric,
    CorpusConfig,
    ExportFormat,
    ModelConfig,
    Optimizer,
    OptimizerConfig,
    PreprocessConfig,
    Schedule,
    SearchConfig,
    SplitConfig,
    TokenizerConfig,
    TrainConfig,
    TranslateConfig,
    iterate_settings,
    settings_to_compare,
    settings_to_log,
)
from nmt.errors import ConfigError
from nmt.export.export_model import find_unsupported
from nmt.model.transformer import Transformer, num_parameters

REQUIRED = {"evaluate": ["hypotheses=h", "references=r"], "score": ["src=s", "tgt=t"]}
FOLDER = Path(str(importlib.resources.files("nmt.configs")))
CHOICES = [(group, name) for group in compose.GROUPS for name in choices(group)]


def composed(name: str, *arguments: str) -> Any:
    """Return the config that a command would run with."""
    seen: list[Any] = []
    everything = [*REQUIRED.get(name, []), *arguments]
    compose.with_config(COMMANDS[name], everything, lambda config, *_: seen.append(config))
    return seen[0]


def from_yaml(schema: type[Any], **changes: Any) -> Any:
    """Return the config of a command whose YAML sets `changes`."""
    plain = OmegaConf.structured(schema)
    OmegaConf.set_struct(plain, False)
    content = OmegaConf.merge(OmegaConf.to_container(plain), changes)
    return compose.to_config(OmegaConf.create(content), schema)[0]  # type: ignore[arg-type]


def assert_refused(command: str, arguments: str, *expected: str) -> None:
    """Check that a command refuses arguments, separated by spaces, in one line."""
    with pytest.raises(ConfigError) as error:
        composed(command, *arguments.split(" "))
    message = str(error.value)
    assert "\n" not in message, arguments
    assert all(part in message for part in expected), f"{arguments}: {message}"


# --- the YAML in configs/


def test_files_that_are_named_replace_the_text_of_an_experiment() -> None:
    for experiment, name in (("multi30k", "bentrevett/multi30k"), ("iwslt14", "bbaaaa/iwslt14")):
        data = composed("preprocess", f"experiment={experiment}").data
        for split in (data.train, data.valid, data.test):
            assert (split.dataset or "").startswith(name), experiment
    files = ["data.train.src=a.en", "data.train.tgt=a.de", "data.valid.tsv=v.tsv"]
    for experiment in ("multi30k", "iwslt14", "homeassistant", "wmt14_en_de_base"):
        data = composed("preprocess", f"experiment={experiment}", *files).data
        assert (data.train.source_keys, data.valid.source_keys, data.test.source_keys) == (
            ["src"],
            ["tsv"],
            [],
        )
    data = composed("preprocess", "experiment=multi30k", "data.valid.tsv=v.tsv").data
    assert (data.train.source_keys, data.valid.source_keys, data.test.source_keys) == (
        ["dataset"],
        ["tsv"],
        ["dataset"],
    )
    part = composed("preprocess", "experiment=wmt14_en_fr_base", "data.train.dataset_split=x").data
    assert part.train.dataset == "wmt/wmt14"


@pytest.mark.slow
def test_every_yaml_composes_and_sets_what_some_command_has() -> None:
    for command in COMMANDS.values():
        for group, name in CHOICES:
            if command.name == "train" or (command.name == "preprocess" and group != "model"):
                config = composed(command.name, f"{group}={name}")
                assert isinstance(config, command.schema), (command.name, group, name)
    assert composed("average", "experiment=multi30k").run_dir == "runs/multi30k"
    files = {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.yaml")}
    assert files == {f"{group}/{name}.yaml" for group, name in CHOICES}
    for name in files:
        check_content(yaml.safe_load((FOLDER / name).read_text(encoding="utf-8")), FOLDER / name)


def test_base_and_big_spell_out_every_hyperparameter() -> None:
    for name in ("base", "big"):
        content = yaml.safe_load((FOLDER / f"model/{name}.yaml").read_text(encoding="utf-8"))
        for group in ("model", "optimizer"):
            schema = type(getattr(TrainConfig(), group))
            assert set(content[group]) == {field.name for field in dataclasses.fields(schema)}
        papers = {"beam_size", "length_penalty", "normalization", "max_length_a", "max_length_b"}
        assert set(content["search"]) == papers
        more = {"label_smoothing", "tokens_per_update", "max_updates", "average_last"}
        assert more <= set(content)


@pytest.mark.slow
def test_recipes_are_the_papers() -> None:
    assert composed("train", "model=base") == composed("train") == TrainConfig()
    big = composed("train", "model=big")
    assert composed("train", "+model=big") == big
    assert big.model == ModelConfig(d_model=1024, d_ff=4096, num_heads=16, dropout=0.3)
    assert (big.max_updates, big.average_last) == (300_000, 20)
    assert composed("train", "experiment=wmt14_en_fr_big").model.dropout == 0.1
    config = composed("preprocess", "experiment=wmt14_en_fr_big")
    assert (config.data.train.dataset, config.data.train.dataset_config) == ("wmt/wmt14", "fr-en")
    assert config.tokenizer.vocab_size == 32_000


@pytest.mark.slow
def test_presets_of_other_layers_have_the_size_of_base_and_can_be_exported() -> None:
    for name, expected in (("modern", 62_979_456), ("deep_shallow", 60_978_688)):
        config = composed("train", f"model={name}").model
        with torch.device("meta"):
            assert num_parameters(Transformer(config, 37_000)) == expected  # as README.md says
        assert not find_unsupported(config, ExportFormat.ctranslate2), name


def test_the_resolved_yaml_holds_every_setting() -> None:
    texts: list[str] = []
    arguments = ["model=tiny", "seed=9"]
    compose.with_config(COMMANDS["train"], arguments, lambda config, text, _: texts.append(text))
    saved = yaml.safe_load(texts[0])
    assert set(saved) == {field.name for field in dataclasses.fields(TrainConfig)}
    assert (saved["seed"], saved["model"]["d_model"]) == (9, 128)


# --- what users type


@pytest.mark.slow
def test_what_is_typed_wins_over_the_experiment_and_has_its_type() -> None:
    words = ["max_updates=7", "experiment=multi30k", "model.embedding_dropout=0.2"]
    config = composed("train", *words)
    assert (config.max_updates, config.model.embedding_dropout) == (7, 0.2)
    assert config.run_dir == "runs/multi30k"
    typed = ["name=adamw", "weight_decay=0.01", "schedule=inverse_sqrt", "peak_learning_rate=5e-4"]
    config = composed("train", *(f"optimizer.{word}" for word in typed))
    assert config.optimizer == OptimizerConfig(
        name=Optimizer.adamw,
        weight_decay=0.01,
        schedule=Schedule.inverse_sqrt,
        peak_learning_rate=5e-4,
    )


@pytest.mark.slow
def test_paths_and_lists_need_no_quotes_and_one_element_no_brackets() -> None:
    paths = ["a=b.txt", "a,b.txt", "Grüße.txt", "你好", "~/x y.txt", "it's.txt", "{a}.txt", "a\\b"]
    paths += ["a\\", "'tis", "a\\'b", "#1;2", "'", "'a' or 'b'", '"a", "b"']
    typed = [f"data.corpora.c{i}.dataset={path}" for i, path in enumerate(paths)]
    found = composed("preprocess", *typed).data.corpora.values()
    assert [corpus.dataset for corpus in found] == paths
    for typed, expected in {
        "a b": ["a b"],
        "[a,b]": ["a", "b"],
        "[<2de>, {url}]": ["<2de>", "{url}"],
        "[]": [],
        """['a,b',"c"]""": ["a,b", "c"],
    }.items():
        assert composed("average", f"checkpoints={typed}").checkpoints == expected
    config = composed("preprocess", "data.train.tsv=a", "data.train.columns=[1,3]")
    assert config.data.train.columns == [1, 3]


def test_files_are_the_corpus_when_files_are_named() -> None:
    config = composed("preprocess", "data.train.src=a", "data.train.tgt=b")
    assert (config.data.corpus, config.tokenizer.vocab_size) == ("files", 37_000)
    assert composed("preprocess").data.corpus == "numbers"


def test_named_settings_are_typed_with_and_without_plus_or_as_one_mapping() -> None:
    typed = ["news.src=a,b.en", "news.tgt=c=d.de", "news.src_tag=<2de>", "web-2.tsv=[x,y]"]
    for plus in ("", "+"):
        config = composed("preprocess", *(f"{plus}data.corpora.{setting}" for setting in typed))
        assert config.data.corpora == {
            "news": CorpusConfig(src=["a,b.en"], tgt=["c=d.de"], src_tag="<2de>"),
            "web-2": CorpusConfig(tsv=["x", "y"]),
        }
        assert config.data.corpus == "files"
        mix = composed("train", f"{plus}mix.news=1.5", f"{plus}mix.2023=0").mix
        assert mix == {"news": 1.5, "2023": 0}
    assert composed("train", "mix.news=1", "mix.news=2").mix == {"news": 2}
    assert composed("train", "mix={news:2,web:0.5}").mix == {"news": 2, "web": 0.5}
    config = composed("preprocess", "data.corpora={news:{src:a,tgt:b}}")
    assert config.data.corpora == {"news": CorpusConfig(src=["a"], tgt=["b"])}


def test_a_yaml_names_corpora_and_may_give_one_file_without_a_list() -> None:
    corpora = {"news": {"src": "a.en", "tgt": ["a.de"]}, 2023: {"jsonl": "b.jsonl", "weight": 2}}
    config = from_yaml(PreprocessConfig, data={"corpora": corpora, "valid": {"tsv": "v.tsv"}})
    assert config.data.corpora == {
        "news": CorpusConfig(src=["a.en"], tgt=["a.de"]),
        "2023": CorpusConfig(jsonl=["b.jsonl"], weight=2),
    }
    assert config.data.valid.tsv == ["v.tsv"]
    assert from_yaml(TrainConfig, mix={"news": 2}).mix == {"news": 2}


def test_help_shows_every_setting() -> None:
    for command in COMMANDS.values():
        text = command_help(command)
        assert all(f"  {field.name}" in text for field in dataclasses.fields(command.schema))
    text = command_help(COMMANDS["preprocess"])
    for field in dataclasses.fields(CorpusConfig):
        assert f"  data.corpora.NAME.{field.name}" in text
    text = command_help(COMMANDS["train"])
    assert "  mix.NAME  " in text
    for shown in (
        "dropout [0.1]",
        "eps [1e-09]",
        "init_from [null]",
        "norm [post]",
        "tf32 [false]",
    ):
        assert shown in text
    assert "metrics [[bleu,chrf,ter]]" in command_help(COMMANDS["evaluate"])


# --- mistakes


def test_a_mistyped_key_names_the_nearest() -> None:
    for command, argument, expected in [
        ("train", "max_updte=3", "mean max_updates"),
        ("train", "+max_updte=3", "mean max_updates"),
        ("train", "model.d_modell=3", "mean model.d_model "),
        ("preprocess", "data.train.source=x", "data.train.src"),
        ("train", "model=bas", "mean base?"),
        ("train", "experiment=multi30", "mean multi30k"),
        ("train", "model=", "base"),
        ("train", "model=../model/base", "base"),
        ("preprocess", "+data.corpora.news.wieght=2", "mean data.corpora.news.weight "),
        ("preprocess", "data.corpus.news.tsv=a", "mean data.corpora.news.tsv "),
        ("preprocess", "data.corpora={news:{scr:a,tgt:b}}", "mean data.corpora.news.src "),
        ("preprocess", "data.corpora.a.b.tsv=x", "data.corpora.a.tsv"),
        ("train", "mixx.news=2", "mean mix.news?"),
        ("train", "mix.news.weight=2", "mean mix.news "),
    ]:
        assert_refused(command, argument, expected)
    for changes, expected in [
        ({"corpora": {"news": {"scr": "a"}}}, r"mean data\.corpora\.news\.src "),
        ({"corpora": {"news": {"src": {"file": "a"}}}}, r"data\.corpora\.news\.src"),
        ({"corpra": {}}, r"mean data\.corpora"),
    ]:
        with pytest.raises(ConfigError, match=expected):
            from_yaml(PreprocessConfig, data=changes)


@pytest.mark.slow
def test_a_bad_value_names_key_and_rule() -> None:
    for arguments, *expected in [
        ("max_updates=many", "max_updates"),
        ("model.num_heads=7", "model.num_heads=7: must divide model.d_model=512"),
        ("model", "key=value"),
        ("optimizer=adam", "group of settings"),
        ("mix=2", "such as mix.NAME"),
        ("mix.news=much", "mix.news"),
        ("optimizer.name=sgd", "adamw"),
    ]:
        assert_refused("train", arguments, *expected)
    for arguments, *expected in [
        ("data.corpora.news=a", "group", "such as data.corpora.news.src"),
        ("data.corpora=a", "group", "such as data.corpora.NAME.src"),
        ("data.corpora.Grüße.tsv=x", "'Grüße' cannot be a name"),
        ("data.corpora.1e5.tsv=x", "'1e5' cannot be a name"),
        ("data.corpora..tsv=x", "'' cannot be a name"),
        ("data.corpora.news.weight=much", "data.corpora.news.weight"),
    ]:
        assert_refused("preprocess", arguments, *expected)
    nan, inf = math.nan, math.inf
    cases: list[tuple[type[Any], dict[str, Any], str]] = [
        (ModelConfig, {"dropout": 1.0}, "model.dropout=1.0: must be from 0 to below 1"),
        (ModelConfig, {"d_model": 0}, "model.d_model=0: must be from 1 to 65536"),
        (OptimizerConfig, {"eps": 0.0}, "optimizer.eps=0.0: must be above 0 and at most 1"),
        (OptimizerConfig, {"weight_decay": 0.01}, "optimizer.name=adamw"),
        (SearchConfig, {"length_penalty": nan}, "length_penalty=nan: must be from -10 to 10"),
        (SearchConfig, {"top_p": 0.0}, "top_p=0.0: must be above 0 and at most 1"),
        (SearchConfig, {"top_k": 3}, "top_k=3: only works with sampling=true"),
        (TrainConfig, {"seed": -1}, "seed=-1: must be from 0 to 9223372036854775807"),
        (TrainConfig, {"mix": {"a": nan}}, "mix.a=nan: must be a number from 0"),
        (TrainConfig, {"mix_temperature": inf}, "mix_temperature=inf: must be at most"),
        (TrainConfig, {"keep_last": 2}, "average_last=5"),
        (TrainConfig, {"best_metric": BestMetric.bleu, "valid_bleu": False}, "valid_bleu=true"),
        (TokenizerConfig, {"character_coverage": 0.97}, "coverage=0.97: must be from 0.98 to 1"),
        (SplitConfig, {"src": ["x"]}, "without tgt"),
        (SplitConfig, {"tsv": ["x"], "dataset": "y"}, "both given"),
        (SplitConfig, {"src": ["x"], "tgt": ["x"], "jsonl": ["y"]}, "both given"),
    ]
    for schema, settings, message in cases:
        with pytest.raises(ConfigError, match=re.escape(message)):
            schema(**settings)


def test_every_bound_of_a_range_is_exact() -> None:
    for schema in (ModelConfig, OptimizerConfig, SearchConfig, TrainConfig):
        for field in dataclasses.fields(schema):
            bounds = field.metadata["range"]
            low, high, above, below = bounds.low, bounds.high, bounds.above, bounds.below
            is_whole = isinstance(field.default, int)
            step = 1 if is_whole else 1e-4
            outside = [low is not None and low - step, high is not None and high + step]
            for value in [*outside, above, below]:
                if value is not False and value is not None:
                    with pytest.raises(ConfigError, match=f"{field.name}="):
                        schema(**{field.name: int(value) if is_whole else value})
            if field.default is not None and not is_whole and (low, high) != (None, None):
                with pytest.raises(ConfigError, match="nan"):
                    schema(**{field.name: math.nan})


def numbers(schema: type[Any]) -> Iterator[tuple[type[Any], str]]:
    """Yield every setting of a dataclass, those of its groups too, that is a number."""
    for name, hint in typing.get_type_hints(schema).items():
        kinds = typing.get_args(hint) or (hint,)
        if dataclasses.is_dataclass(kinds[-1]):
            yield from numbers(typing.cast(type[Any], kinds[-1]))
        elif {int, float} & set(kinds) and typing.get_origin(hint) not in (list, dict):
            yield schema, name


def test_every_number_has_bounds_and_a_line_for_what_is_beyond() -> None:
    base = {"EvaluateConfig": {"hypotheses": "a", "references": ["b"]}}
    base |= {"ScoreConfig": {"src": "a", "tgt": "b"}}
    base |= {name: {"input": ["a"]} for name in ("DistillConfig", "BacktranslateConfig")}
    found = {setting for command in COMMANDS.values() for setting in numbers(command.schema)}
    for schema, name in found:
        for value in (1e300, -1e300, math.inf, -math.inf, math.nan, 2**63):
            with pytest.raises(ConfigError, match=name) as caught:
                schema(**{**base.get(schema.__name__, {}), name: value})
            assert "\n" not in str(caught.value)
    assert len(found) > 80


# --- settings that change between a command and its resumption

RESUMED = {  # commands that resume, with the settings of a first call
    "preprocess": ["data.corpora.a.tsv=a.tsv", "data.corpora.a.valid.tsv=v.tsv"],
    "train": ["mix.news=2", "stages.late.start=5", "stages.late.mix.news=1"],
    "translate": [],
    "distill": ["input=a"],
    "backtranslate": ["input=a"],
}


def changed(value: Any) -> Any:
    """Return a value that differs from `value`, of the same or a similar type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, Enum):
        return next(choice for choice in type(value) if choice is not value)
    if isinstance(value, (int, float)):
        return value + 1
    return "changed"


def test_every_setting_is_compared_on_resume_as_it_declares() -> None:
    for name, arguments in RESUMED.items():
        first = composed(name, *arguments)
        before = settings_to_compare(first)
        for key, value, on_resume in list(iterate_settings(first)):
            resumed = copy.deepcopy(first)
            parent: Any = resumed
            *groups, last = key.split(".")
            for group in groups:
                parent = parent[group] if isinstance(parent, dict) else getattr(parent, group)
            if isinstance(parent, dict):
                parent[last] = changed(value)
            else:
                setattr(parent, last, changed(value))
            is_equal = settings_to_compare(resumed) == before
            assert is_equal == (on_resume == "free"), (name, key)
            assert (key in settings_to_log(first)) == (on_resume == "log"), (name, key)


def test_settings_declare_their_behavior_on_resume() -> None:
    def behaviors(name: str) -> dict[str, str]:
        settings = iterate_settings(composed(name, *RESUMED[name]))
        return {key: on_resume for key, _, on_resume in settings}

    train = behaviors("train")
    assert train["model.d_model"] == train["mix.news"] == train["stages.late.mix.news"] == "refuse"
    assert train["max_updates"] == train["dtype"] == "log"
    assert train["search.beam_size"] == train["keep_last"] == train["device"] == "free"
    translate = behaviors("translate")
    assert translate["beam_size"] == translate["dtype"] == translate["format"] == "refuse"
    assert translate["num_threads"] == translate["max_tokens"] == translate["model_dir"] == "free"
    preprocess = behaviors("preprocess")
    assert preprocess["data.corpora.a.weight"] == preprocess["scheduler"] == "free"
    assert preprocess["data.corpora.a.tsv"] == preprocess["tokenizer.type"] == "refuse"


def test_commands_that_override_search_settings_take_all_of_them() -> None:
    search = {field.name for field in dataclasses.fields(SearchConfig)}
    translate = {field.name for field in dataclasses.fields(TranslateConfig)}
    assert search <= translate
