"""The copy task of the Annotated Transformer on digits, with the building blocks of nmt.

    python scripts/examples/copy_task.py

Trains a Transformer of two layers to repeat ten numbers, and prints its output for 1 2 ... 10.
Shows the model, a training loop on your own data and greedy search, without the commands of nmt.
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

# B batch, T length of source and target, D d_model
# vocabulary: 0 is padding, 1 to 10 are the numbers, 11 is BOS
BOS = 11
VOCAB_SIZE = 12
LENGTH = 10
BATCH_SIZE = 40


def greedy_search(model: Transformer, src: Tensor) -> Tensor:
    """Return the output (B, T) for sources (B, T) without padding: the most likely numbers."""
    src_mask = padding_mask(torch.full((len(src),), src.size(1)), src.size(1))
    memory = model.encode(src, src_mask)
    tgt = torch.full((len(src), 1), BOS)
    for length in range(1, src.size(1) + 1):
        hidden = model.decode(tgt, causal_mask(length), memory, src_mask)
        tgt = torch.cat([tgt, model.logits(hidden[:, -1:]).argmax(-1)], dim=1)
    return tgt[:, 1:]


def train(num_updates: int, seed: int = 1) -> Transformer:
    """Train on random numbers; replace `src` and `tgt_in` with your own data."""
    torch.manual_seed(seed)
    config = TrainConfig(
        model=ModelConfig(
            num_encoder_layers=2,
            num_decoder_layers=2,
            d_model=64,
            d_ff=256,
            num_heads=4,
            dropout=0.0,
        ),
        optimizer=OptimizerConfig(
            warmup_steps=100, schedule=Schedule.inverse_sqrt, peak_learning_rate=0.00625
        ),
    )
    model = Transformer(config.model, VOCAB_SIZE)
    (optimizer,) = make_optimizers(model, config.optimizer)
    src_mask = padding_mask(torch.full((BATCH_SIZE,), LENGTH), LENGTH)
    for step in range(1, num_updates + 1):
        src = torch.randint(1, 11, (BATCH_SIZE, LENGTH))  # (B, T)
        tgt_in = torch.cat([torch.full((BATCH_SIZE, 1), BOS), src[:, :-1]], dim=1)  # (B, T)
        hidden = model(src, src_mask, tgt_in, causal_mask(LENGTH))  # (B, T, D)
        loss = F.cross_entropy(model.logits(hidden).flatten(0, 1), src.flatten())  # nats per token
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
        output = greedy_search(model, torch.arange(1, 11)[None])
    print(" ".join(map(str, output[0].tolist())))


if __name__ == "__main__":
    main()
