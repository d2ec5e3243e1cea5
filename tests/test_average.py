"""Averaged checkpoints are the arithmetic mean; checkpoints of different models are refused."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tiny import (
    VOCAB_SIZE,
    assert_same_tensors,
    hidden_states,
    random_source,
    random_target,
    sentences,
    tiny_config,
    tiny_model,
    tokenizer_config,
)
from torch import Tensor

from nmt.average import average, average_weights, find_best_checkpoints, find_newest_checkpoints
from nmt.checkpoint import (
    ModelInfo,
    build_model,
    describe_other_models,
    find_model,
    load_info,
    load_model_tokenizers,
    load_weights,
    save_model,
)
from nmt.config import BestMetric, Norm, Positions, SearchConfig
from nmt.data.tokenizer import Tokenizer
from nmt.data.vocabulary import train_tokenizer
from nmt.errors import ModelError
from nmt.model.transformer import Transformer
from nmt.runtime.manifest import write_manifest


def info(tokenizer: Tokenizer, **changes: Any) -> ModelInfo:
    settings: dict[str, Any] = {
        "model": tiny_config(),
        "search": SearchConfig(beam_size=3),
        "vocab_size": VOCAB_SIZE,
        "src_lang": "en",
        "tgt_lang": "de",
        "tokenizer_sha256": tokenizer.sha256,
        "updates": 7,
    }
    return ModelInfo(**settings | changes)


def save(
    folder: Path,
    tokenizer: Tokenizer,
    *,
    seed: int = 0,
    weights: dict[str, Tensor] | None = None,
    **changes: Any,
) -> Path:
    """Write a model folder of random weights, or of those given."""
    tensors = tiny_model(seed).state_dict() if weights is None else weights
    save_model(folder, tensors, info(tokenizer, **changes), tokenizer)
    return folder


def load(folder: Path) -> Transformer:
    return build_model(load_info(folder), load_weights(folder), torch.device("cpu")).eval()


# --- one model folder


@pytest.mark.slow
def test_a_loaded_model_gives_the_logits_of_the_saved_one(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    for norm, positions in itertools.product(Norm, Positions):
        model = tiny_model(3, norm=norm, positions=positions)
        folder = save(tmp_path / "m", tokenizer, weights=model.state_dict(), model=model.config)
        stored = load_weights(folder)
        loaded = load(folder)
        for name, tensor in stored.items():  # the shared matrix is stored once
            assert (VOCAB_SIZE in tensor.shape) == (name == "embedding.weight"), name
        src, lengths = random_source([6, 3])
        tgt = random_target(2, 5)
        with torch.no_grad():
            loaded_hidden = hidden_states(loaded, src, lengths, tgt)
            expected = hidden_states(model, src, lengths, tgt)
            assert torch.equal(loaded.logits(loaded_hidden), model.logits(expected)), (
                norm,
                positions,
            )
        assert load_info(folder) == info(tokenizer, model=model.config)
        assert load_model_tokenizers(folder, load_info(folder)).model == tokenizer.model


def test_a_run_folder_loads_its_newest_model(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for name, updates in (("best", 3), ("latest", 4), ("../average", 4), ("latest", 6)):
        newest = save(tmp_path / "checkpoints" / name, tokenizer, updates=updates)
        assert find_model(tmp_path) == newest.resolve(), name
        if name == "../average":  # of the newest checkpoint, whichever was copied last
            (tmp_path / "checkpoints/latest/config.json").touch()
            assert find_model(tmp_path) == newest.resolve()
    (tmp_path / "average").joinpath("config.json").touch()  # of older checkpoints, but made now
    assert find_model(tmp_path) == (tmp_path / "average").resolve()
    assert describe_other_models(tmp_path, (tmp_path / "average").resolve()) == ""  # as expected
    description = describe_other_models(tmp_path, newest.resolve())
    assert description == "; not used: average (4 updates), checkpoints/best (3 updates)"
    assert describe_other_models(newest, newest) == ""
    with pytest.raises(ModelError, match=r"no config\.json"):
        find_model(tmp_path / "checkpoints")


# --- the mean


def test_the_average_is_the_arithmetic_mean_and_keeps_the_bits_of_equal_checkpoints(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    folders = [save(tmp_path / str(i), tokenizer, seed=i, updates=10 + i % 3) for i in range(7)]
    loaded = list(map(load_weights, folders))
    for count in (1, 2, 3, 7):
        average(folders[:count], tmp_path / "average")
        for name, tensor in load_weights(tmp_path / "average").items():
            exact = torch.stack([weights[name].double() for weights in loaded[:count]]).mean(0)
            assert tensor.dtype is torch.float32
            torch.testing.assert_close(tensor, exact.float(), rtol=1e-7, atol=1e-9)
        average(folders[:1] * count, tmp_path / "copies")
        assert_same_tensors(load_weights(tmp_path / "copies"), loaded[0], count)
    assert (tmp_path / "average/tokenizer.model").read_bytes() == tokenizer.model
    assert load_info(tmp_path / "average") == replace(load_info(folders[0]), updates=12)
    assert load(tmp_path / "average")
    search = SearchConfig(length_penalty=1.0)
    save(folders[2], tokenizer, weights=loaded[2], updates=12, search=search)
    average(folders[:3], tmp_path / "average")
    assert load_info(tmp_path / "average").search == search  # of the newest
    # summed in float64: in float32 the sum of these would already be infinite
    name = "embedding.weight"
    large = torch.full_like(loaded[0]["embedding.weight"], 3e38)
    for i, value in enumerate((large, large / 2)):
        save(folders[i], tokenizer, weights={**loaded[0], name: value})
    assert torch.allclose(average_weights(folders[:2])[name], 0.75 * large)


# --- models that do not match


def assert_refused(folders: list[Path], match: str) -> None:
    """Average must fail, and leave no file behind."""
    root = folders[0].parent
    files = sorted(root.rglob("*"))
    with pytest.raises(ModelError, match=match) as caught:
        average(folders, root / "average")
    assert "\n" not in str(caught.value)
    assert sorted(root.rglob("*")) == files


def test_another_architecture_or_vocabulary_is_refused(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    changes: list[dict[str, Any]] = [{"d_ff": 64}, {"num_heads": 2}]
    changes += [{"norm": Norm.pre}, {"positions": Positions.sinusoidal_concat}]
    first = save(tmp_path / "0", tokenizer)
    for change in changes:
        model = tiny_model(1, **change)
        second = save(tmp_path / "1", tokenizer, weights=model.state_dict(), model=model.config)
        assert_refused([first, first, second], match=rf"{re.escape(str(second))}.* architecture")
    other_tokenizer = train_tokenizer(sentences(150, seed=5), tokenizer_config())
    assert other_tokenizer.vocab_size == tokenizer.vocab_size
    assert_refused([first, save(tmp_path / "1", other_tokenizer)], match="different vocabularies")


def test_other_tensors_are_refused_by_name(tokenizer: Tokenizer, tmp_path: Path) -> None:
    name = "encoder_layers.0.feed_forward.outer.bias"
    complete = tiny_model().state_dict()
    lacking = dict(complete)
    del lacking[name]
    reshaped = {**complete, name: torch.zeros(1)}  # it could be broadcast
    wrong = [(lacking, name), (reshaped, name), ({**complete, "odd": torch.zeros(3)}, "odd")]
    first = save(tmp_path / "0", tokenizer)
    for weights, named in wrong:
        folders = [first, save(tmp_path / "1", tokenizer, weights=weights)]
        assert_refused(folders, match=re.escape(named))
        assert_refused(folders[::-1], match=re.escape(named))


def test_missing_and_damaged_files_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    first = save(tmp_path / "0", tokenizer)
    second = save(tmp_path / "1", tokenizer)
    assert_refused([first, tmp_path / "none"], match="none does not exist")
    content = (second / "model.safetensors").read_bytes()
    (second / "model.safetensors").write_bytes(content[:-10])
    assert_refused([first, second], match="damaged")
    weights = load_weights(first)
    weights.pop("embedding.weight")
    safetensors.torch.save_file(weights, first / "model.safetensors")
    write_manifest(first)
    with pytest.raises(ModelError, match="embedding"):
        load(first)


# --- which checkpoints


@pytest.fixture
def run_dir(tokenizer: Tokenizer, tmp_path: Path) -> Path:
    """A run with checkpoints at updates 2, 4, 10, 100000000 and 6, not in the order of writing."""
    for update in (10, 2, 100_000_000, 4, 6):
        save(tmp_path / f"checkpoints/step-{update:08d}", tokenizer, updates=update)
    (tmp_path / "checkpoints/latest").symlink_to("step-00000010")
    (tmp_path / "checkpoints/.step-00000012.1.tmp").mkdir()
    (tmp_path / "checkpoints/step-00000012").mkdir()  # without config.json: not whole
    records: list[dict[str, float]] = [
        {"update": 2, "valid_loss": 5.0, "valid_bleu": 1.0},
        {"update": 3, "valid_loss": 0.1, "valid_bleu": 99.0},  # its checkpoint is gone
        {"update": 4, "valid_loss": 2.0, "valid_bleu": 30.0},
        {"update": 6, "valid_loss": 1.0, "valid_bleu": 20.0},
        {"update": 10, "loss": 0.0},  # not validated
        {"update": 100_000_000, "valid_loss": 3.0, "valid_bleu": 3.0},
    ]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "metrics.jsonl").write_text(lines, encoding="utf-8")
    return tmp_path


def updates(folders: list[Path]) -> list[int]:
    return [load_info(folder).updates for folder in folders]


def test_the_last_checkpoints_are_the_newest_and_the_best_those_with_the_best_scores(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert updates(find_newest_checkpoints(run_dir, 2)) == [10, 100_000_000]
    assert updates(find_newest_checkpoints(run_dir, 5)) == [2, 4, 6, 10, 100_000_000]
    assert updates(find_best_checkpoints(run_dir, 2, BestMetric.loss)) == [6, 4]
    assert updates(find_best_checkpoints(run_dir, 3, BestMetric.bleu)) == [4, 6, 100_000_000]
    assert "checkpoints 3, among the 3 best, were removed; keep_best=3" in caplog.text
    (run_dir / "checkpoints/step-00000004").rename(run_dir / "checkpoints/step-00000003")
    caplog.clear()
    assert updates(find_best_checkpoints(run_dir, 1, BestMetric.bleu)) == [4]
    assert not caplog.records


def test_too_few_checkpoints_are_refused_with_both_numbers(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has 5 suitable checkpoints, 6 are needed"):
        find_newest_checkpoints(run_dir, 6)
    with pytest.raises(ModelError, match="has 4 suitable checkpoints, 5 are needed"):
        find_best_checkpoints(run_dir, 5, BestMetric.loss)
    (run_dir / "metrics.jsonl").unlink()
    with pytest.raises(ModelError, match="metrics.jsonl"):
        find_best_checkpoints(run_dir, 1, BestMetric.loss)
