"""Models of other toolkits to import, random and tiny, written as those toolkits write them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from tiny import WORDS, train_sentencepiece

from nmt.config import ImportConfig
from nmt.importing.import_model import import_model


def train_spm(path: Path, seed: int, size: int, **options: Any) -> list[str]:
    """Write a SentencePiece model of a sample of sentences, and return its pieces."""
    draw = random.Random(seed)
    lines = [" ".join(draw.choices(WORDS, k=5)) for _ in range(100)]
    options = {"model_type": "unigram", "hard_vocab_limit": False, "vocab_size": size} | options
    path.write_bytes(train_sentencepiece(lines, num_threads=1, **options))
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    return processor.id_to_piece(list(range(processor.vocab_size())))  # type: ignore[no-any-return]


def shuffled(pieces: list[str], seed: int) -> dict[str, int]:
    """Give pieces ids in another order, control symbols too."""
    order = list(range(len(pieces)))
    random.Random(seed).shuffle(order)
    return dict(zip(pieces, order, strict=True))


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Draw all weights, so that none is a constant and outputs differ."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_positions" not in name:
                scale = 0.5 if parameter.dim() == 1 else parameter.size(-1) ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
                if "norm" in name and name.endswith("weight"):
                    parameter.add_(1.0)


def imported(source: Path, **settings: Any) -> Path:
    """Import the model at `source` to a folder next to it, and return that folder."""
    output = source.with_name(f"{source.name}-imported")
    return import_model(ImportConfig(input=str(source), output=str(output), **settings))
