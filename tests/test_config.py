"""Settings: every YAML composes, values keep their types, unknown keys name the nearest, and each
setting declares how a change is treated for work that is resumed.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.resources
import math
import re
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from omegaconf import OmegaConf
from toy import command as run_command

from nmt.cli import compose
from nmt.cli.arguments import GROUPS
from nmt.cli.commands import COMMANDS, command_help, keys_with_resume_rule, list_yaml_names
from nmt.cli.yaml_files import check_content
from nmt.config import (
    BestMetric,
    CorpusConfig,
    ExportFormat,
    ModelConfig,
    Norm,
    Optimizer,
    OptimizerConfig,
    Part,
    PreprocessConfig,
    ResumeRule,
    SearchConfig,
    SplitConfig,
    TokenizerConfig,
    TrainConfig,
    TranslateConfig,
    iterate_settings,
    settings_that_may_change,
    settings_to_compare,
)
from nmt.errors import ConfigError
from nmt.export.export_model import find_unsupported
from nmt.model.transformer import Transformer, count_parameters

REQUIRED = {  # settings without which a command is refused
    "evaluate": ["hypotheses=h", "references=r"],
    "score": ["src=s", "tgt=t"],
    "import": ["input=a"],
    "distill": ["input=a"],
    "backtranslate": ["input=a"],
}
FOLDER = Path(str(importlib.resources.files("nmt.configs")))
CHOICES = [(group, name) for group in GROUPS for name in list_yaml_names(group)]
DOCS = Path(__file__).parents[1] / "docs"


def composed(name: str, *arguments: str | Iterable[str]) -> Any:
    """Return the config that a command would run with; each argument is one word or several."""
    words = list(REQUIRED.get(name, []))
    for argument in arguments:
        words += [argument] if isinstance(argument, str) else argument
    return compose_command(name, words).config


def compose_command(name: str, words: list[str]) -> compose.ComposedCommand:
    """Compose the config of a command that is not a sweep."""
    command = compose.compose_command(COMMANDS[name], words, lambda _: pytest.fail("a sweep"))
    assert command is not None
    return command


def from_yaml(schema: type[Any], **changes: Any) -> Any:
    """Return the config of a command whose YAML sets `changes`."""
    return OmegaConf.to_object(compose.to_settings(changes, schema))


def assert_refused(name: str, arguments: str, *expected: str) -> None:
    """Check that a command refuses arguments, separated by spaces, in one line."""
    with pytest.raises(ConfigError) as error:
        composed(name, arguments.split(" "))
    message = str(error.value)
    assert "\n" not in message, arguments
    for text in expected:
        assert text in message, f"{arguments}: {message}"


# --- the YAML in configs/


def test_typed_files_replace_the_text_of_an_experiment() -> None:
    def sources(*arguments: str | Iterable[str]) -> list[list[str]]:
        data = composed("preprocess", *arguments).data
        return [data.train.text_keys, data.valid.text_keys, data.test.text_keys]

    files = ["data.train.src=a.en", "data.train.tgt=a.de", "data.valid.tsv=v.tsv"]
    for name in ("multi30k", "iwslt14", "homeassistant", "wmt14_en_de_base"):
        assert sources(f"experiment={name}", files) == [["src"], ["tsv"], []], name
    assert sources("experiment=multi30k") == [["dataset"]] * 3
    typed = sources("experiment=multi30k", "data.valid.tsv=v.tsv")
    assert typed == [["dataset"], ["tsv"], ["dataset"]]
    data = composed("preprocess", "experiment=wmt14_en_fr_base", "data.train.dataset_split=x").data
    assert data.train.dataset == "wmt/wmt14"


def test_typed_files_are_not_scored_or_aligned_by_files_of_an_experiment(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    text = {"src": "a.en", "tgt": "a.de", "scores": "a.scores", "alignments": "a.align"}
    path.write_text(yaml.safe_dump({"data": {"train": text}}), encoding="utf-8")
    train = composed("preprocess", f"experiment={path}").data.train
    assert (train.scores, train.alignments) == (["a.scores"], ["a.align"])
    files = ["data.train.src=b.en", "data.train.tgt=b.de"]
    train = composed("preprocess", f"experiment={path}", files).data.train
    assert (train.src, train.scores, train.alignments) == (["b.en"], None, None)
    train = composed("preprocess", f"experiment={path}", "data.train.scores=b.scores").data.train
    assert (train.src, train.scores) == (["a.en"], ["b.scores"])


@pytest.mark.slow
def test_every_yaml_composes_and_has_known_keys() -> None:
    for group, name in CHOICES:
        path = FOLDER / group / f"{name}.yaml"
        check_content(yaml.safe_load(path.read_text(encoding="utf-8")), path)
        assert isinstance(composed("train", f"{group}={name}"), TrainConfig), name
        if group in COMMANDS["preprocess"].config_groups:
            assert isinstance(composed("preprocess", f"{group}={name}"), PreprocessConfig), name
    assert composed("average", "experiment=multi30k").run_dir == "runs/multi30k"
    files = {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.yaml")}
    assert files == {f"{group}/{name}.yaml" for group, name in CHOICES}


def test_commands_without_yaml_files_compose_the_same_settings_with_hydra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_files = [
        name for name, command in COMMANDS.items() if not compose._needs_hydra(command, [])
    ]
    assert "translate" in without_files

    def compose_all() -> list[Any]:
        # the other commands have YAML files, which need Hydra
        configs = [composed(name) for name in without_files]
        return [*configs, composed("translate", "beam_size=3", "output=a", "suppress=[b,c]")]

    without_hydra = compose_all()
    monkeypatch.setattr(compose, "_needs_hydra", lambda *_: True)
    assert compose_all() == without_hydra


def test_base_and_big_spell_out_every_hyperparameter() -> None:
    for name in ("base", "big"):
        content = yaml.safe_load((FOLDER / f"model/{name}.yaml").read_text(encoding="utf-8"))
        for group, schema in (("model", ModelConfig), ("optimizer", OptimizerConfig)):
            assert set(content[group]) == {field.name for field in dataclasses.fields(schema)}
        assert {"beam_size", "length_penalty", "max_length_a"} <= set(content["search"])
        assert {"label_smoothing", "tokens_per_update", "max_updates"} <= set(content)


@pytest.mark.slow
def test_recipes_are_those_of_the_paper() -> None:
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
def test_presets_of_later_layers_have_the_documented_size_and_can_be_exported() -> None:
    sizes = {"small": 10_219_776, "modern": 62_979_456, "deep_shallow": 60_978_688}
    for name, expected in sizes.items():
        config = composed("train", f"model={name}").model
        with torch.device("meta"):
            assert count_parameters(Transformer(config, 37_000)) == expected
        assert not find_unsupported(config, ExportFormat.ctranslate2), name
    config = composed("train", "model=student_tiny").model
    with torch.device("meta"):
        assert count_parameters(Transformer(config, 37_000)) == 18_155_008
    assert not find_unsupported(config, ExportFormat.bergamot)


# --- what users type


@pytest.mark.slow
def test_typed_values_win_over_the_experiment_and_have_the_type_of_their_setting() -> None:
    words = ["max_updates=7", "experiment=multi30k", "model.embedding_dropout=0.2"]
    config = composed("train", words, "optimizer.peak_learning_rate=5e-4", "seed=9", "mix.a=2")
    assert (config.max_updates, config.model.embedding_dropout) == (7, 0.2)
    assert (config.optimizer.peak_learning_rate, config.mix) == (5e-4, {"a": 2})
    assert config.run_dir == "runs/multi30k"
    saved = yaml.safe_load(compose_command("train", words).config_yaml)
    assert set(saved) == {field.name for field in dataclasses.fields(TrainConfig)}
    assert saved["max_updates"] == 7


@pytest.mark.slow
def test_paths_and_lists_need_no_quotes_and_one_element_no_brackets() -> None:
    paths = ["a=b.txt", "a,b.txt", "Grüße.txt", "你好", "~/x y.txt", "it's.txt", "{a}.txt", "a\\b"]
    paths += ["a\\", "'tis", "a\\'b", "#1;2", "'", "'a' or 'b'", '"a", "b"']
    typed = [f"data.corpora.c{i}.dataset={path}" for i, path in enumerate(paths)]
    corpora = composed("preprocess", typed).data.corpora
    assert [corpus.dataset for corpus in corpora.values()] == paths
    for text, expected in {
        "a b": ["a b"],
        "[a,b]": ["a", "b"],
        "[<2de>, {url}]": ["<2de>", "{url}"],
        "[]": [],
        """['a,b',"c"]""": ["a,b", "c"],
    }.items():
        assert composed("average", f"checkpoints={text}").checkpoints == expected
    config = composed("preprocess", "data.train.tsv=a", "data.train.columns=[1,3]")
    assert config.data.train.columns == [1, 3]


def test_files_are_the_corpus_if_files_are_named() -> None:
    config = composed("preprocess", "data.train.src=a", "data.train.tgt=b")
    assert (config.data.corpus, config.tokenizer.vocab_size) == ("files", None)
    assert composed("preprocess").data.corpus == "numbers"
    assert composed("average", "output='a,b'").output == "a,b"


def test_named_settings_are_typed_with_and_without_plus_or_as_one_mapping() -> None:
    typed = ["news.src=a,b.en", "news.tgt=c=d.de", "news.src_tag=<2de>", "web-2.tsv=[x,y]"]
    for plus in ("", "+"):
        config = composed("preprocess", [f"{plus}data.corpora.{setting}" for setting in typed])
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


def test_yaml_names_corpora_and_may_give_one_file_without_a_list() -> None:
    corpora = {"news": {"src": "a.en", "tgt": ["a.de"]}, 2023: {"jsonl": "b.jsonl", "weight": 2}}
    config = from_yaml(PreprocessConfig, data={"corpora": corpora, "valid": {"tsv": "v.tsv"}})
    assert config.data.corpora == {
        "news": CorpusConfig(src=["a.en"], tgt=["a.de"]),
        "2023": CorpusConfig(jsonl=["b.jsonl"], weight=2),
    }
    assert config.data.valid.tsv == ["v.tsv"]
    assert from_yaml(TrainConfig, max_updates=1e5).max_updates == 100_000


def test_help_shows_every_setting() -> None:
    for command in COMMANDS.values():
        text = command_help(command)
        for field in dataclasses.fields(command.schema):
            assert f"  {field.name}" in text, (command.name, field.name)
    text = command_help(COMMANDS["preprocess"])
    for field in dataclasses.fields(CorpusConfig):
        assert f"  data.corpora.NAME.{field.name}" in text
    text = command_help(COMMANDS["train"])
    for line in ("mix.NAME  ", "dropout [0.1]", "eps [1e-09]", "init_from [null]", "norm [post]"):
        assert line in text
    assert "metrics [[bleu,chrf,ter]]" in command_help(COMMANDS["evaluate"])


# --- mistakes


def test_a_mistyped_key_names_the_nearest() -> None:
    for name, argument, expected in [
        ("train", "max_updte=3", "mean max_updates"),
        ("train", "+max_updte=3", "mean max_updates"),
        ("train", "model.d_modell=3", "mean model.d_model?"),
        ("preprocess", "data.train.source=x", "data.train.src"),
        ("train", "model=bas", "mean base?"),
        ("train", "experiment=multi30", "mean multi30k"),
        ("train", "model=", "base"),
        ("train", "model=../model/base", "base"),
        ("preprocess", "+data.corpora.news.wieght=2", "mean data.corpora.news.weight "),
        ("preprocess", "data.corpus.news.tsv=a", "mean data.corpora.news.tsv "),
        ("preprocess", "data.corpora={news:{srcc:a,tgt:b}}", "mean data.corpora.news.src"),
        ("preprocess", "data.corpora.a.b.tsv=x", "data.corpora.a.tsv"),
        ("train", "mixx.news=2", "mean mix.news?"),
        ("train", "mix.news.weight=2", "mean mix.news?"),
    ]:
        assert_refused(name, argument, expected)
    for changes, expected in [
        ({"corpora": {"news": {"srcc": "a"}}}, r"mean data\.corpora\.news\.src"),
        ({"corpora": {"news": {"src": {"file": "a"}}}}, r"data\.corpora\.news\.src"),
        ({"corpra": {}}, r"mean data\.corpora"),
    ]:
        with pytest.raises(ConfigError, match=expected):
            from_yaml(PreprocessConfig, data=changes)


@pytest.mark.slow
def test_a_bad_value_names_key_and_rule() -> None:
    for name, arguments, *expected in [
        ("train", "max_updates=many", "max_updates"),
        ("train", "model.num_heads=7", "model.num_heads=7: must divide model.d_model=512"),
        ("train", "model", "key=value"),
        ("train", "optimizer=adam", "group of settings"),
        ("train", "mix=2", "such as mix.NAME"),
        ("train", "mix.news=much", "mix.news"),
        ("train", "optimizer.name=sgd", "adamw"),
        ("preprocess", "data.corpora.news=a", "group", "such as data.corpora.news.src"),
        ("preprocess", "data.corpora=a", "group", "such as data.corpora.NAME.src"),
        ("preprocess", "data.corpora.Grüße.tsv=x", "data.corpora=Grüße: the name"),
        ("preprocess", "data.corpora.news.weight=much", "data.corpora.news.weight"),
    ]:
        assert_refused(name, arguments, *expected)
    cases: list[tuple[type[Any], dict[str, Any], str]] = [
        (ModelConfig, {"dropout": 1.0}, "model.dropout=1.0: must be from 0 to below 1"),
        (ModelConfig, {"d_model": 0}, "model.d_model=0: must be from 1 to 65536"),
        (OptimizerConfig, {"eps": 0.0}, "optimizer.eps=0.0: must be above 0 and at most 1"),
        (OptimizerConfig, {"weight_decay": 0.01}, "optimizer.name=adamw"),
        (OptimizerConfig, {"max_grad_norm": math.nan}, "max_grad_norm=nan: is not a number"),
        (SearchConfig, {"top_k": 3}, "top_k=3: only works with sampling=true"),
        (TrainConfig, {"mix": {"a": math.nan}}, "mix.a=nan: must be a number from 0"),
        (TrainConfig, {"keep_last": 2}, "average_last=5"),
        (TrainConfig, {"best_metric": BestMetric.bleu, "valid_bleu": False}, "valid_bleu=true"),
        (TokenizerConfig, {"vocab_size": -2 * 10**9}, "vocab_size=-2000000000: must be at least"),
        (SplitConfig, {"src": ["x"]}, "without tgt"),
        (SplitConfig, {"tsv": ["x"], "dataset": "y"}, "both given"),
        (SplitConfig, {"src": ["x"], "tgt": ["x"], "jsonl": ["y"]}, "both given"),
    ]
    for schema, settings, message in cases:
        with pytest.raises(ConfigError, match=re.escape(message)):
            schema(**settings)


def list_numbers(schema: type[Any]) -> Iterator[tuple[type[Any], str]]:
    """Yield every number among the settings of a dataclass and its groups."""
    for name, hint in typing.get_type_hints(schema).items():
        types = typing.get_args(hint) or (hint,)
        if dataclasses.is_dataclass(types[-1]):
            yield from list_numbers(typing.cast(type[Any], types[-1]))
        elif {int, float} & set(types) and typing.get_origin(hint) not in (list, dict):
            yield schema, name


NUMBERS = {number for command in COMMANDS.values() for number in list_numbers(command.schema)}
REQUIRED_SETTINGS: dict[str, dict[str, Any]] = {  # by schema: those it cannot do without
    "EvaluateConfig": {"hypotheses": ["a"], "references": ["b"]},
    "ScoreConfig": {"src": "a", "tgt": "b"},
    "DistillConfig": {"input": ["a"]},
    "BacktranslateConfig": {"input": ["a"]},
}


def assert_out_of_range(schema: type[Any], name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name}=") as error:
        schema(**REQUIRED_SETTINGS.get(schema.__name__, {}), **{name: value})
    assert "\n" not in str(error.value)


def test_choices_in_python_may_be_texts() -> None:
    assert ModelConfig(norm="pre").norm is Norm.pre  # type: ignore[arg-type]
    assert OptimizerConfig(name="muon").name is Optimizer.muon  # type: ignore[arg-type]
    config = TrainConfig(init_from="runs/a", freeze=["encoder"])  # type: ignore[list-item]
    assert config.freeze == [Part.encoder]
    assert config.freeze[0] is Part.encoder
    with pytest.raises(ConfigError, match=r"^optimizer.name=muom: no such choice; .*muon"):
        OptimizerConfig(name="muom")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^stop=: no such choice"):
        SearchConfig(stop="")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config_class", "settings", "message"),
    [
        (TrainConfig, {"max_updates": "20"}, "max_updates='20': must be of type int"),
        (TrainConfig, {"max_updates": ""}, "max_updates='': must be of type int"),
        (ModelConfig, {"dropout": "0.1"}, "dropout='0.1': must be of type float"),
        (SearchConfig, {"sampling": "false"}, "sampling='false': must be of type bool"),
        (SplitConfig, {"src": "a.en", "tgt": "a.de"}, "src='a.en': must be of type list"),
    ],
)
def test_a_text_in_place_of_a_number_flag_or_list_is_refused_in_python(
    config_class: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=f"{message}$"):
        config_class(**settings)


def test_every_bound_of_a_range_is_exact() -> None:
    num_bounds = 0
    for schema, name in NUMBERS:
        [field] = [field for field in dataclasses.fields(schema) if field.name == name]
        bounds = field.metadata["range"]
        hint = typing.get_type_hints(schema)[name]
        step = 1 if int in (hint, *typing.get_args(hint)) else 1e-4
        outside = [bounds.above, bounds.below]
        if bounds.low is not None:
            outside.append(bounds.low - step)
        if bounds.high is not None:
            outside.append(bounds.high + step)
        for value in outside:
            if value is not None:
                num_bounds += 1
                assert_out_of_range(schema, name, value)
    assert num_bounds > 80


def test_every_number_has_bounds_and_a_line_for_a_value_out_of_them() -> None:
    for schema, name in NUMBERS:
        for value in (1e300, -1e300, math.inf, -math.inf, math.nan, 2**63):
            assert_out_of_range(schema, name, value)
    assert len(NUMBERS) > 80


# --- settings that change before work is resumed

RESUMED = {  # commands that resume, with settings that have names of the user
    "preprocess": ["data.corpora.a.tsv=a.tsv", "data.corpora.a.valid.tsv=v.tsv"],
    "train": ["mix.news=2", "stages.late.start=5", "stages.late.mix.news=1"],
    "translate": [],
    "distill": [],
    "backtranslate": [],
}


def change(config: Any, key: str) -> Any:
    """Return a copy of `config` in which the setting `key` has another value."""
    changed = group = copy.deepcopy(config)
    *groups, name = key.split(".")
    for inner in groups:
        group = group[inner] if isinstance(group, dict) else getattr(group, inner)
    members = group if isinstance(group, dict) else vars(group)
    members[name] = "changed"
    return changed


def test_every_setting_is_compared_on_resume_as_it_declares() -> None:
    assert set(RESUMED) == {name for name, command in COMMANDS.items() if command.can_resume}
    for name, arguments in RESUMED.items():
        config = composed(name, arguments)
        compared = settings_to_compare(config)
        for key, _, on_resume in iterate_settings(config):
            is_equal = settings_to_compare(change(config, key)) == compared
            assert is_equal == (on_resume == "accept"), (name, key)
            assert (key in settings_that_may_change(config)) == (on_resume == "log"), (name, key)


def test_a_setting_is_compared_on_resume_unless_it_or_its_group_says_otherwise() -> None:
    for name, on_resume, keys in (
        ("train", "refuse", "model.d_model mix.news stages.late.mix.news"),
        ("train", "log", "max_updates dtype"),
        ("train", "accept", "search.beam_size keep_last device"),
        ("translate", "refuse", "beam_size dtype format"),
        ("translate", "accept", "num_threads max_tokens model_dir"),
        ("preprocess", "refuse", "data.corpora.a.tsv tokenizer.type"),
        ("preprocess", "accept", "data.corpora.a.weight scheduler"),
    ):
        settings = iterate_settings(composed(name, RESUMED[name]))
        declared = {key for key, _, resume_rule in settings if resume_rule == on_resume}
        assert declared >= set(keys.split()), (name, on_resume)


def test_help_and_documentation_list_the_settings_that_may_change() -> None:
    page = (DOCS / "commands.md").read_text(encoding="utf-8")
    for name in RESUMED:
        cells = [f"`nmt-{name}`"]
        for on_resume in typing.get_args(ResumeRule)[1:]:  # log, accept
            keys = keys_with_resume_rule(COMMANDS[name], on_resume)
            cells.append(", ".join(f"`{key}`" for key in keys))
        assert f"| {' | '.join(cells)} |\n" in page, name
        text = " ".join(command_help(COMMANDS[name]).split())
        assert f"when the command resumes: {', '.join(keys)}" in text


@pytest.mark.slow
def test_resumed_commands_treat_changed_settings_as_they_declare(
    toy_data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tiny = ["model.d_model=16", "model.num_heads=2", "model.d_ff=32", "device=cpu", "num_threads=1"]
    tiny += ["valid_bleu=false", "tracker=[]", "tokens_per_update=200", "max_tokens=100"]
    tiny += ["dtype=float32"]  # some CPUs have another default
    run = [f"data_dir={toy_data}", f"run_dir={tmp_path / 'run'}", *tiny]
    assert run_command("train", run, "max_updates=2") == 0
    for changed, status, expected in [
        ("label_smoothing=0.2", 2, "label_smoothing was 0.1, is 0.2"),
        ("mix_temperature=3", 2, "mix_temperature was None, is 3.0"),
        ("keep_last=9", 0, ""),
        ("dtype=bfloat16", 0, "resuming with a changed setting: dtype was float32, is bfloat16"),
    ]:
        capfd.readouterr()
        assert run_command("train", run, "max_updates=2", changed) == status, changed
        error = capfd.readouterr().err
        assert expected in error
        assert ("changed setting" in error) == ("dtype" in changed)


def test_translation_overrides_every_search_setting() -> None:
    search = {field.name for field in dataclasses.fields(SearchConfig)}
    assert search <= {field.name for field in dataclasses.fields(TranslateConfig)}
    assert from_yaml(TranslateConfig, beam_size=7).search_changes() == {"beam_size": 7}
