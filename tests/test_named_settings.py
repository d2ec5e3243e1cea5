"""Settings in groups whose names the user chooses: `data.corpora.NAME.src=FILE`, `mix.NAME=2`."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from omegaconf import OmegaConf
from test_config import composed

from nmt.cli.commands import COMMANDS
from nmt.cli.compose import to_config
from nmt.cli.help import command_help
from nmt.config import CorpusConfig, PreprocessConfig, TrainConfig
from nmt.errors import ConfigError


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_a_named_corpus_is_typed_with_and_without_plus(plus: str) -> None:
    typed = ["news.src=a,b.en", "news.tgt=c=d.de", "news.src_tag=<2de>", "web-2.tsv=[x,y]"]
    config, _ = composed("preprocess", *(f"{plus}data.corpora.{setting}" for setting in typed))
    assert config.data.corpora == {
        "news": CorpusConfig(src=["a,b.en"], tgt=["c=d.de"], src_tag="<2de>"),
        "web-2": CorpusConfig(tsv=["x", "y"]),
    }
    assert config.data.corpus == "files"


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_a_mix_is_typed_with_and_without_plus(plus: str) -> None:
    assert composed("train", f"{plus}mix.news=1.5", f"{plus}mix.2023=0")[0].mix == {
        "news": 1.5,
        "2023": 0,
    }


def test_what_is_typed_last_wins() -> None:
    assert composed("train", "mix.news=1", "mix.news=2")[0].mix == {"news": 2}


def test_names_can_come_as_one_mapping() -> None:
    assert composed("train", "mix={news:2,web:0.5}")[0].mix == {"news": 2, "web": 0.5}
    config, _ = composed("preprocess", "data.corpora={news:{src:a,tgt:b}}")
    assert config.data.corpora == {"news": CorpusConfig(src=["a"], tgt=["b"])}


@pytest.mark.parametrize(
    ("command", "argument", "expected"),
    [
        ("preprocess", "data.corpora.news.scr=a", r"did you mean data\.corpora\.news\.src "),
        ("preprocess", "+data.corpora.news.wieght=2", r"mean data\.corpora\.news\.weight "),
        ("preprocess", "data.corpus.news.tsv=a", r"mean data\.corpora\.news\.tsv "),
        ("preprocess", "data.corpora={news:{scr:a,tgt:b}}", r"mean data\.corpora\.news\.src "),
        ("preprocess", "data.corpora.news=a", r"group.*such as data\.corpora\.news\.src"),
        ("preprocess", "data.corpora=a", r"group.*such as data\.corpora\.NAME\.src"),
        ("preprocess", "data.corpora.a.b.tsv=x", r"data\.corpora\.a\.tsv"),
        ("preprocess", "data.corpora.Grüße.tsv=x", "'Grüße' cannot be a name"),
        ("preprocess", "data.corpora.1e5.tsv=x", "'1e5' cannot be a name"),
        ("preprocess", "data.corpora..tsv=x", "'' cannot be a name"),
        ("preprocess", "data.corpora.news.weight=much", r"data\.corpora\.news\.weight"),
        ("train", "mixx.news=2", r"mean mix\.news\?"),
        ("train", "mix.news.weight=2", r"mean mix\.news "),
        ("train", "mix=2", r"such as mix\.NAME"),
        ("train", "mix.news=much", r"mix\.news"),
    ],
)
def test_a_mistake_names_the_nearest_setting(command: str, argument: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as error:
        composed(command, argument)
    assert "\n" not in str(error.value)


def from_yaml(schema: type[Any], **changes: Any) -> Any:
    """Return the config of a command whose YAML sets `changes`."""
    plain = OmegaConf.structured(schema)
    OmegaConf.set_struct(plain, False)
    content = OmegaConf.merge(OmegaConf.to_container(plain), changes)
    return to_config(OmegaConf.create(content), schema)[0]  # type: ignore[arg-type]


def test_a_yaml_names_corpora_and_may_give_one_file_without_a_list() -> None:
    corpora = {"news": {"src": "a.en", "tgt": ["a.de"]}, 2023: {"jsonl": "b.jsonl", "weight": 2}}
    config = from_yaml(PreprocessConfig, data={"corpora": corpora, "valid": {"tsv": "v.tsv"}})
    assert config.data.corpora == {
        "news": CorpusConfig(src=["a.en"], tgt=["a.de"]),
        "2023": CorpusConfig(jsonl=["b.jsonl"], weight=2),
    }
    assert config.data.valid.tsv == ["v.tsv"]
    assert from_yaml(TrainConfig, mix={"news": 2}).mix == {"news": 2}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"corpora": {"news": {"scr": "a"}}}, r"mean data\.corpora\.news\.src "),
        ({"corpora": {"news": {"src": {"file": "a"}}}}, r"data\.corpora\.news\.src"),
        ({"train": {"sorce": "a"}}, r"mean data\.train\.src"),
        ({"corpra": {}}, r"mean data\.corpora"),
    ],
)
def test_a_mistyped_key_of_a_yaml_names_the_nearest(changes: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        from_yaml(PreprocessConfig, data=changes)


def test_help_shows_every_setting_of_a_named_corpus() -> None:
    text = command_help(COMMANDS["preprocess"])
    for field in dataclasses.fields(CorpusConfig):
        assert f"  data.corpora.NAME.{field.name} [" in text
    assert "  mix.NAME  " in command_help(COMMANDS["train"])
