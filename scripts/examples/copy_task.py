"""The copy task of the Annotated Transformer on digits, with the building blocks of nmt.

    python scripts/examples/copy_task.py

Trains a Transformer of two layers to repeat ten numbers, and prints its output for 1 2 ... 10.
Reads like a notebook: the model, a training loop on pairs of one's own, greedy search.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor
from torch.nn import functional as F

from nmt.config import ModelConfig, OptimizerConfig, Schedule, TrainConfig
from nmt.model.transformer import Transformer, causal_mask, padding_mask
from nmt.training.optimizer import make_optimizers
from nmt.training.schedule import learning_rate

# B batch, T length of source and target, V vocabulary: 0 padding, 1 to 10 the numbers, 11 BOS
PAD, BOS, VOCAB_SIZE = 0, 11, 12
LENGTH, BATCH = 10, 40


def greedy(model: Transformer, src: Tensor) -> Tensor:
    """Return the likeliest number after each other, (B, T), for sources (B, T) without padding."""
    sources = padding_mask(torch.full((len(src),), src.size(1)), src.size(1))
    memory = model.encode(src, sources)
    tgt = torch.full((len(src), 1), BOS)
    for length in range(1, src.size(1) + 1):
        hidden = model.decode(tgt, causal_mask(length), memory, sources)
        tgt = torch.cat([tgt, model.logits(hidden[:, -1:]).argmax(-1)], dim=1)
    return tgt[:, 1:]


def train(updates: int, seed: int = 1) -> Transformer:
    """Train on random numbers; the pairs may as well come from anywhere else."""
    torch.manual_seed(seed)
    layers = {"num_encoder_layers": 2, "num_decoder_layers": 2}
    config = TrainConfig(
        model=ModelConfig(**layers, d_model=64, d_ff=256, num_heads=4, dropout=0.0),
        optimizer=OptimizerConfig(
            warmup_steps=100, schedule=Schedule.inverse_sqrt, peak_learning_rate=0.00625
        ),
    )
    model = Transformer(config.model, VOCAB_SIZE)
    (optimizer,) = make_optimizers(model, config.optimizer)
    sources = padding_mask(torch.full((BATCH,), LENGTH), LENGTH)
    for step in range(1, updates + 1):
        src = torch.randint(1, 11, (BATCH, LENGTH))  # (B, T)
        tgt_in = torch.cat([torch.full((BATCH, 1), BOS), src[:, :-1]], dim=1)  # (B, T)
        hidden = model(src, sources, tgt_in, causal_mask(LENGTH))  # (B, T, D)
        loss = F.cross_entropy(model.logits(hidden).flatten(0, 1), src.flatten())  # nats a token
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"update {step}: loss {loss.item():.4f}")
    return model.eval()


def main() -> None:
    """Train, and copy 1 2 ... 10."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=200)
    model = train(parser.parse_args().updates)
    with torch.no_grad():
        (row,) = greedy(model, torch.arange(1, 11)[None]).tolist()
    print(*row)


if __name__ == "__main__":
    main()
