"""Training goes on from a model: imported ones, with frozen parts, with adapters."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from importing import imported
from test_import_huggingface import MARIAN, write_marian
from tiny import assert_same_tensors, tiny_model
from toy import (
    TINY,
    WORDS,
    assert_same_weights,
    command,
    make_run,
    read_weights,
    train,
    write_corpus,
)

from nmt.checkpoint import load_info
from nmt.config import Adapter, ModelConfig, Part, TrainConfig
from nmt.errors import ConfigError
from nmt.model.fast.layers import FastLinear
from nmt.training.adapters import AdaptedLinear, merged_state_dict, set_trainable_parameters
from nmt.translate.translator import Translator

SHAPE = [option for option in TINY if not option.startswith("model.")]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a few updates, with its data folder."""
    folder = tmp_path_factory.mktemp("base")
    assert command("preprocess", write_corpus(folder)) == 0
    assert train(folder / "data", folder / "run", "max_updates=4", "valid_bleu=false") == 0
    return folder


def tune(base: Path, run_dir: Path, *arguments: str) -> int:
    """Fine-tune the model of `base`, without naming its architecture again."""
    settings = [f"data_dir={base / 'data'}", f"run_dir={run_dir}", f"init_from={base / 'run'}"]
    return command("train", settings, SHAPE, "valid_bleu=false", "max_updates=4", arguments)


def test_an_adapter_computes_nothing_at_first_and_is_merged_exactly() -> None:
    model = tiny_model(norm="pre")
    original = copy.deepcopy(model.state_dict())
    config = TrainConfig(init_from="x", adapter=Adapter.lora, adapter_rank=3)
    set_trainable_parameters(model, config)
    adapted = [module for module in model.modules() if isinstance(module, AdaptedLinear)]
    assert len(adapted) == 2 * 4 + 2 * 6
    for name, parameter in model.named_parameters():
        is_trained = re.search(r"norm|\.(up|down|bias)$|^embedding\.weight$", name) is not None
        assert parameter.requires_grad == is_trained, name
    assert_same_tensors(merged_state_dict(model), original)
    for name, module in model.named_modules():
        if isinstance(module, AdaptedLinear):
            torch.nn.init.normal_(module.up)
            x = torch.randn(5, module.in_features)
            plain = FastLinear(module.in_features, module.out_features)
            plain.weight.data = merged_state_dict(model)[f"{name}.weight"]
            plain.bias.data = module.bias.data
            start = module.out_features // 3
            end = module.out_features
            for activation in ("none", "relu"):
                expected = plain.block(x, start, end, activation=activation)
                actual = module.block(x, start, end, activation=activation)
                torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_parts_are_frozen_with_all_that_they_hold() -> None:
    of_part = {
        Part.encoder: "encoder_",
        Part.decoder: "decoder_",
        Part.embeddings: ("embedding.", "src_embedding."),
    }
    for frozen, prefixes in of_part.items():
        model = tiny_model(src_vocab_size=9, norm="pre")
        set_trainable_parameters(model, TrainConfig(init_from="x", freeze=[frozen]))
        for name, parameter in model.named_parameters():
            assert parameter.requires_grad is not name.startswith(prefixes), (frozen, name)


@pytest.mark.slow
def test_frozen_parts_have_no_gradient_and_stay(base: Path, tmp_path: Path) -> None:
    old = read_weights(base / "run")
    cases = {
        "[encoder,embeddings]": ("encoder_", "embedding."),
        "[decoder]": ("decoder_",),
    }
    for freeze, prefixes in cases.items():
        assert tune(base, tmp_path / freeze, f"freeze={freeze}") == 0
        new = read_weights(tmp_path / freeze)
        for name in old:
            is_frozen = name.startswith(prefixes)
            assert torch.equal(old[name], new[name]) == is_frozen, (freeze, name)
    model = load_info(base / "run/checkpoints/latest").model
    frozen = [Part.encoder, Part.embeddings]
    settings = {"model": model, "init_from": str(base / "run"), "freeze": frozen}
    learner = make_run(base / "data", tmp_path / "none", **settings).learner
    update = next(iter(make_run(base / "data", tmp_path / "none").sampler_at(0).plan_epoch(0)))
    learner.accumulate_gradient(update, learner.batch_maker.make_batches(update))
    for name, parameter in learner.model.named_parameters():
        assert (parameter.grad is None) == name.startswith(("encoder_", "embedding.")), name


@pytest.mark.slow
def test_adapters_train_what_is_not_frozen_and_resume_exactly(base: Path, tmp_path: Path) -> None:
    old = read_weights(base / "run")
    lora = ["adapter=lora", "adapter_rank=2", "freeze=[encoder]", "max_updates=8"]
    assert tune(base, tmp_path / "whole", lora) == 0
    new = read_weights(tmp_path / "whole")
    assert new.keys() == old.keys()
    for name in old:
        assert torch.equal(old[name], new[name]) == name.startswith("encoder_"), name
    assert tune(base, tmp_path / "parts", lora[:-1], "max_updates=4") == 0
    assert tune(base, tmp_path / "parts", lora) == 0
    assert_same_weights(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.slow
def test_settings_that_contradict_are_refused(base: Path, tmp_path: Path) -> None:
    wrong = {
        "freeze=encoder: needs init_from": {"freeze": [Part.encoder]},
        "adapter=lora: needs init_from": {"adapter": Adapter.lora},
        "leaves nothing to train": {"freeze": list(Part), "init_from": "x"},
        "adapter_rank=32: needs adapter=lora": {"adapter_rank": 32, "init_from": "x"},
        "adapter=lora trains no embeddings": {
            "adapter": Adapter.lora,
            "freeze": [Part.encoder, Part.decoder],
            "init_from": "x",
        },
        "ema_decay=0.9: needs adapter=none": {
            "adapter": Adapter.lora,
            "init_from": "x",
            "ema_decay": 0.9,
        },
    }
    for message, settings in wrong.items():
        with pytest.raises(ConfigError, match=message):
            TrainConfig(**settings)
    assert tune(base, tmp_path / "run", "model.num_decoder_layers=3") == 2
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_an_imported_model_trains_on_translates_and_exports(tmp_path: Path) -> None:
    shape = MARIAN["swish, bias"]
    model_dir = imported(write_marian(tmp_path / "opus", 1, shape))
    arguments = write_corpus(tmp_path)
    arguments.remove("tokenizer.vocab_size=310")
    assert command("preprocess", arguments, f"tokenizer.model={model_dir}") == 0
    folders = [f"data_dir={tmp_path / 'data'}", f"run_dir={tmp_path / 'run'}"]
    rate = ["optimizer.schedule=inverse_sqrt", "optimizer.peak_learning_rate=0.01"]
    assert command("train", folders, SHAPE, rate, f"init_from={model_dir}", "max_updates=20") == 0
    imported_info = load_info(model_dir)
    trained_info = load_info(tmp_path / "run/checkpoints/latest")
    assert trained_info.model == ModelConfig(
        **vars(imported_info.model) | {"dropout": trained_info.model.dropout}
    )
    assert trained_info.search == imported_info.search
    assert trained_info.tokenizer_sha256 == imported_info.tokenizer_sha256
    source = " ".join(WORDS)
    target = " ".join(WORDS.values())
    (old_score,) = Translator.load(model_dir, backend="native").score([source], [target])
    (new_score,) = Translator.load(tmp_path / "run", backend="native").score([source], [target])
    assert new_score.log_prob > old_score.log_prob + 1  # it has learned
    assert command("average", f"run_dir={tmp_path / 'run'}", "last=2") == 0
    for name in ("ctranslate2", "huggingface"):
        output = f"output={tmp_path / name}"
        assert command("export", f"model_dir={tmp_path / 'run'}", f"format={name}", output) == 0
    ours = Translator.load(tmp_path / "run", backend="native").translate([source] * 3)
    theirs = Translator.load(tmp_path / "ctranslate2", backend="ctranslate2")
    assert theirs.translate([source] * 3) == ours
    reimported = imported(tmp_path / "huggingface")
    assert Translator.load(reimported, backend="native").translate([source] * 3) == ours
