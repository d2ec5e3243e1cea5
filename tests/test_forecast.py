"""What a report foresees of training, against training itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny_config

from nmt.config import ModelConfig, Norm, TrainConfig
from nmt.data.batching import TokenBatchSampler
from nmt.data.bucketing import Lengths, padding_share
from nmt.model.fast import linear
from nmt.model.fast.packing import pack
from nmt.model.transformer import Transformer, num_parameters
from nmt.preprocess import memory
from nmt.preprocess.epoch import forecast_epoch, length_counts
from nmt.preprocess.statistics import NUM_BINS, Statistics, length_bins
from nmt.preprocess.tally import Tally


def counted(lengths: Lengths) -> Statistics:
    """Return what the lengths (N, 2) of pairs, EOS included, are counted to."""
    statistics = Statistics()
    bins = [length_bins(lengths[:, side]) for side in (0, 1)]
    statistics.lengths = Tally.of(bins[0] * NUM_BINS + bins[1])
    for side in (0, 1):
        statistics.sides[side].longest = int(lengths[:, side].max())
    return statistics


@pytest.mark.parametrize("longest", [3, 40, 200])
@pytest.mark.parametrize(("max_tokens", "tokens_per_update"), [(200, 90), (1000, 7000), (4096, 1)])
def test_an_epoch_is_foreseen_as_training_plans_it(
    longest: int, max_tokens: int, tokens_per_update: int
) -> None:
    draw = np.random.default_rng(longest)
    lengths = draw.integers(1, longest + 1, (900, 2), dtype=np.int32)
    forecast = forecast_epoch(
        length_counts([(counted(lengths), 1.0)]),
        max_tokens=max_tokens,
        tokens_per_update=tokens_per_update,
    )
    sampler = TokenBatchSampler(lengths, max_tokens, tokens_per_update=tokens_per_update, seed=1)
    updates = list(sampler.updates(0))
    batches = [rows for update in updates for rows in update.batches]
    assert forecast.num_batches == len(batches)
    assert forecast.padding_share == pytest.approx(padding_share(lengths, batches), abs=1e-12)
    assert forecast.num_tgt_tokens == sum(update.num_tokens for update in updates)
    assert forecast.num_src_tokens == sum(update.num_src_tokens for update in updates)
    assert forecast.num_updates == pytest.approx(len(updates), rel=0.06)
    shapes = [(len(rows), *lengths[rows].max(axis=0).tolist()) for rows in batches]
    rows, src, tgt = forecast.largest
    assert rows * (src + tgt) == max(b * (s + t) for b, s, t in shapes)
    rows, src, tgt = forecast.widest
    squares = rows * (src * src + src * tgt + tgt * tgt)
    assert squares == max(b * (s * s + s * t + t * t) for b, s, t in shapes)


def test_long_lengths_in_bins_change_the_forecast_little() -> None:
    draw = np.random.default_rng(0)
    src = np.clip(draw.lognormal(4, 1, 5000), 1, 2000)
    tgt = np.clip(src * draw.lognormal(0, 0.2, 5000), 1, 2000)
    lengths = np.stack([src, tgt], axis=1).astype(np.int32)
    assert (lengths > 256).mean() > 0.05
    forecast = forecast_epoch(
        length_counts([(counted(lengths), 1.0)]), max_tokens=4096, tokens_per_update=25000
    )
    sampler = TokenBatchSampler(lengths, 4096, tokens_per_update=25000, seed=1)
    updates = list(sampler.updates(0))
    batches = [rows for update in updates for rows in update.batches]
    assert forecast.padding_share == pytest.approx(padding_share(lengths, batches), abs=0.02)
    assert forecast.num_updates == pytest.approx(len(updates), rel=0.03)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {"dropout": 0.1},
    "pre": {"norm": Norm.pre, "dropout": 0.1},
    "uneven": {"num_encoder_layers": 1, "num_decoder_layers": 4, "dropout": 0.1},
    "activation dropout": {"activation_dropout": 0.1, "dropout": 0.1},
    "attention dropout": {"attention_dropout": 0.1, "dropout": 0.1},
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("src_vocab_size", [None, 31])
def test_parameters_are_counted_without_a_model(name: str, src_vocab_size: int | None) -> None:
    config = tiny_config(**VARIANTS[name])
    model = Transformer(config, 23, src_vocab_size=src_vocab_size)
    assert memory.num_parameters(config, src_vocab_size, 23) == num_parameters(model)


def saved_bytes(config: ModelConfig, rows: int, src: int, tgt: int) -> int:
    """Add up what autograd keeps of one forward pass, the weights aside."""
    model = Transformer(config, 23).train()
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept: dict[int, torch.Tensor] = {}  # tensors, so that no storage takes the place of another

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        ids = torch.zeros(rows * src).long(), torch.ones(rows * tgt).long()
        model(ids[0], pack([src] * rows), ids[1], pack([tgt] * rows))
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(("src", "tgt"), [(20, 30), (30, 12)])
def test_activations_are_what_autograd_keeps(
    name: str, src: int, tgt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "is_onednn_faster", lambda: False)  # it keeps rounded copies
    config = tiny_config(d_model=64, d_ff=192, **VARIANTS[name])
    training = TrainConfig(model=config)
    forecast = memory.forecast_memory(
        training, None, 23, batch=(8, src, tgt), product_bytes=memory.FLOAT
    )
    loss = forecast.activations - saved_bytes(config, 8, src, tgt)
    tokens = 8 * tgt
    # logits and their gradient, those of the matrix, and rows of hidden states
    expected = 4 * (3 * tokens * 23 + 23 * 64 + 3 * tokens * 64)
    assert loss == pytest.approx(expected, abs=0.04 * forecast.activations)


def test_memory_grows_with_what_takes_memory() -> None:
    def total(
        batch: tuple[int, int, int] = (500, 10, 10), half: bool = False, **changes: Any
    ) -> int:
        size = memory.HALF if half else memory.FLOAT
        training = TrainConfig(**{"model": ModelConfig(), **changes})
        return memory.forecast_memory(training, None, 8000, batch=batch, product_bytes=size).total

    assert total(activation_checkpointing=True) < total(half=True) < total() < total((600, 10, 10))
    weights = memory.num_parameters(ModelConfig(), None, 8000)
    assert total(ema_decay=0.999) == total() + 4 * weights
