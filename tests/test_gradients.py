"""One update is one update, however its sentences are cut into batches.

The oracle is the mean over all target tokens of the sentences' own losses, each sentence alone and
unpadded, by torch's cross-entropy over whole logits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny_config
from torch import Tensor

from nmt.config import OptimizerConfig, TrainConfig
from nmt.data.binary import write_pairs
from nmt.data.tokenizer import Tokenizer
from nmt.files import write_json
from nmt.training import trainer as training
from nmt.training.trainer import Trainer

LENGTHS = [(1, 1), (40, 2), (2, 45), (3, 3), (7, 1), (1, 30), (12, 12), (5, 1), (60, 60), (2, 2)]
CUTS = {
    "one batch": [range(10)],
    "two": [range(9), range(9, 10)],
    "unequal": [[8], [0, 3, 4, 7, 9], [1, 2, 5, 6]],
    "one by one": [[i] for i in range(10)],
}


@pytest.fixture(scope="module")
def data_dir(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder of ten sentence pairs of very unequal length."""
    folder = tmp_path_factory.mktemp("data")
    draw = np.random.default_rng(0)
    pairs = [
        tuple(draw.integers(4, tokenizer.vocab_size, length - 1).tolist() for length in pair)
        for pair in LENGTHS
    ]
    for split in ("train", "valid"):
        write_pairs(folder / f"{split}-00000.arrow", pairs, tokenizer.vocab_size)
    (folder / "tokenizer.model").write_bytes(tokenizer.model)
    write_json(folder / "meta.json", {"format_version": 1, "src_lang": "en", "tgt_lang": "de"})
    return folder


@pytest.fixture
def trainer(data_dir: Path, tmp_path: Path) -> Trainer:
    """A trainer of that folder with all weights, biases too, away from 0."""
    config = TrainConfig(
        data_dir=str(data_dir),
        run_dir=str(tmp_path),
        model=tiny_config(),
        device="cpu",
        tokens_per_update=1000,
        valid_bleu=False,
    )
    trainer = Trainer(config)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return trainer


@pytest.fixture
def gradients(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Tensor]]:
    """Collect the gradients that reach the optimizer, which then does nothing."""
    collected: list[dict[str, Tensor]] = []

    def collect(optimizer: torch.optim.Optimizer, lr: float) -> None:
        parameters = optimizer.param_groups[0]["params"]
        collected.append({str(i): p.grad.clone() for i, p in enumerate(parameters)})
        optimizer.zero_grad(set_to_none=True)

    monkeypatch.setattr(training, "step", collect)
    return collected


def oracle(trainer: Trainer) -> dict[str, Tensor]:
    model, tokenizer = trainer.model, trainer.tokenizer
    model.zero_grad()
    total: Any = 0.0
    num_tokens = 0
    for src, tgt in trainer.data:
        source = torch.tensor([[*src.tolist(), tokenizer.eos_id]])
        tgt_in = torch.tensor([[tokenizer.bos_id, *tgt.tolist()]])
        tgt_out = torch.tensor([*tgt.tolist(), tokenizer.eos_id])
        logits = model.logits(model(source, torch.tensor([source.size(1)]), tgt_in))[0]
        total = total + torch.nn.functional.cross_entropy(
            logits, tgt_out, label_smoothing=trainer.config.label_smoothing, reduction="sum"
        )
        num_tokens += len(tgt_out)
    assert num_tokens == sum(tgt for _, tgt in LENGTHS)
    (total / num_tokens).backward()
    found = {str(i): p.grad.clone() for i, p in enumerate(model.parameters()) if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("cut", CUTS)
def test_gradients_are_the_mean_over_all_target_tokens_however_cut(
    trainer: Trainer, gradients: list[dict[str, Tensor]], cut: str
) -> None:
    expected = oracle(trainer)
    trainer._update([np.array(rows, dtype=np.int64) for rows in CUTS[cut]])
    (found,) = gradients
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-6, rtol=1e-4)
    assert max(float(gradient.abs().max()) for gradient in found.values()) > 1e-2


def test_updates_leave_no_gradient_behind(
    trainer: Trainer, gradients: list[dict[str, Tensor]]
) -> None:
    batches = [np.array(rows, dtype=np.int64) for rows in CUTS["two"]]
    trainer._update(batches)
    trainer._update(batches)
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name])


def test_an_update_steps_with_the_rate_of_its_number(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates: list[float] = []
    monkeypatch.setattr(training, "step", lambda optimizer, lr: rates.append(lr))
    trainer.config.optimizer = OptimizerConfig(warmup_steps=4)
    for update in range(3):
        trainer.state.update = update
        trainer._update([np.arange(10)])
    peak = (16 * 4) ** -0.5
    assert rates == pytest.approx([peak / 4, peak / 2, peak * 3 / 4])
