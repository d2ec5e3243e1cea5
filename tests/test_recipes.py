"""The recipes in configs/experiment run from end to end and have the documented sizes."""

from __future__ import annotations

import random
import re
import zipfile
from pathlib import Path

import pytest
import torch
import xxhash
from pages import ROOT
from preprocessing import WORDS, read_back, write_text
from test_config import composed
from toy import TINY, command, write_corpus

from nmt.data.binary import read_held_out
from nmt.model.transformer import Transformer, count_parameters
from nmt.preprocess.characters import normal_form
from nmt.runtime.manifest import read_run_config

SHORT_RUN = [*TINY, "max_updates=8", "validate_every_updates=8", "average_last=2", "tracker=[]"]
SHORT_OUTPUT = ["max_length_a=0", "max_length_b=5"]
PUBLISHED_PARAMETERS = 2_600_000  # of Transformer-Tiny (Wu et al., 2021) on Multi30k


def count_recipe_parameters(experiment: str) -> int:
    """Return the number of parameters of an experiment with a full vocabulary."""
    vocab_size = composed("preprocess", f"experiment={experiment}").tokenizer.vocab_size
    with torch.device("meta"):
        model = Transformer(composed("train", f"experiment={experiment}").model, vocab_size)
    return count_parameters(model)


@pytest.mark.slow
def test_recipes_have_the_documented_numbers_of_parameters() -> None:
    page = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    table = page.split("\n| recipe |")[1].split("\n\n")[0]
    sizes = dict(re.findall(r"^\| `(\w+)`[^|]*\|[^|]*\| ([\d,]+) \|", table, re.MULTILINE))
    assert {"multi30k", "multi30k_large", "multi30k_both", "tatoeba_en_de"} <= sizes.keys()
    for experiment, size in sizes.items():
        assert f"{count_recipe_parameters(experiment):,}" == size, experiment
    for experiment in ("multi30k", "multi30k_both", "multi30k_bisimcut"):
        assert count_recipe_parameters(experiment) <= PUBLISHED_PARAMETERS, experiment
    assert count_recipe_parameters("multi30k_large") > PUBLISHED_PARAMETERS


def test_typed_training_text_keeps_held_out_shares_and_typed_held_out_text_replaces_them() -> None:
    train = ["experiment=tatoeba_en_de", "data.train.src=a.en", "data.train.tgt=a.de"]
    data = composed("preprocess", train).data
    assert data.train.text_keys == ["src"]
    assert data.valid.text_keys == data.test.text_keys == ["num_pairs"]
    data = composed("preprocess", train, "data.valid.tsv=v.tsv").data
    assert data.valid.text_keys == ["tsv"]
    assert data.test.text_keys == ["num_pairs"]


@pytest.mark.slow
def test_tatoeba_runs_from_the_downloaded_archive_to_a_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    draw = random.Random(2)
    lines = []
    for _ in range(700):
        src = " ".join(draw.choices(WORDS, k=draw.randint(2, 6)))
        for _ in range(2):
            tgt = " ".join(draw.choices(WORDS, k=draw.randint(2, 6)))
            lines.append(f"{src}\t{tgt}\tCC-BY 2.0 (France)")
    archive = tmp_path / "data/raw/tatoeba/deu-eng.zip"
    archive.parent.mkdir(parents=True)
    with zipfile.ZipFile(archive, "w") as zip_file:
        zip_file.write(write_text(tmp_path / "deu.txt", lines), "deu.txt")
        zip_file.writestr("_about.txt", "the terms of use\n")
    recipe = "experiment=tatoeba_en_de"
    small = ["tokenizer.vocab_size=310", "num_threads=1", "data.test.num_pairs=0.05"]
    assert command("preprocess", recipe, small) == 0
    assert command("train", recipe, SHORT_RUN) == 0
    assert command("average", recipe) == 0
    test_file = "input=data/tatoeba_en_de/test.src"
    assert command("translate", recipe, test_file, "output=test.de", SHORT_OUTPUT) == 0
    capsys.readouterr()
    reference = "references=data/tatoeba_en_de/test.tgt"
    assert command("evaluate", "hypotheses=test.de", reference) == 0
    assert "BLEU" in capsys.readouterr().out
    [test] = read_held_out(tmp_path / "data/tatoeba_en_de", "test")
    test_forms = set(map(normal_form, test.sources))
    assert 10 < len(test_forms) == len(test.sources)  # one translation of each sentence
    train_sources = [src for src, _ in read_back(tmp_path / "data/tatoeba_en_de")]
    # the rule of docs/results.md
    forms_below_share = set()
    for line in lines:
        form = normal_form(line.split("\t")[0])
        if xxhash.xxh3_64_intdigest(form.encode(), seed=0) / 2**64 < 0.05:
            forms_below_share.add(form)
    assert test_forms <= forms_below_share
    assert len(test_forms) > 0.8 * len(forms_below_share)  # without pairs with a common target
    assert forms_below_share.isdisjoint(map(normal_form, train_sources))


@pytest.mark.slow
def test_multi30k_runs_in_both_directions_then_one_and_to_french(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = [word for word in write_corpus(tmp_path) if re.match(r"data\.(train|valid|test)", word)]
    preparation = ["experiment=multi30k", text, "tokenizer.vocab_size=310", "num_threads=1"]
    assert command("preprocess", preparation) == 0
    assert command("train", "experiment=multi30k_both", SHORT_RUN) == 0
    assert command("train", "experiment=multi30k_bisimcut", SHORT_RUN) == 0
    settings = read_run_config(tmp_path / "runs/multi30k_bisimcut")
    assert settings["init_from"] == composed("train", "experiment=multi30k_both").run_dir
    french = ["data.tgt_lang=fr", "data_dir=data/fr"]
    assert command("preprocess", preparation, french) == 0
    assert command("train", "experiment=multi30k", SHORT_RUN, french, "run_dir=runs/fr") == 0
    assert command("average", "run_dir=runs/fr") == 0
    [test] = read_held_out(tmp_path / "data/fr", "test")
    assert (test.direction.src_lang, test.direction.tgt_lang) == ("en", "fr")
    assert command("evaluate", "model_dir=runs/fr", "data_dir=data/fr", SHORT_OUTPUT) == 0
    assert composed("preprocess", "experiment=multi30k", french).data.train.dataset is not None
