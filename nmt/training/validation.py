"""The validation loss, and BLEU by decoding the validation set."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nmt.config import SearchConfig
from nmt.data.batch import make_batch
from nmt.data.batching import bucket
from nmt.data.binary import ParallelData
from nmt.data.corpus import open_bytes, read_lines
from nmt.data.tokenizer import Tokenizer
from nmt.evaluate import bleu, check_tokenizer, tokenizer_for
from nmt.inference.stepper import ModelStepper
from nmt.inference.translator import Translator
from nmt.model.transformer import Transformer
from nmt.training.loss import smoothed_cross_entropy


@torch.inference_mode()
def validation_loss(
    model: Transformer, data: ParallelData, tokenizer: Tokenizer, max_tokens: int
) -> dict[str, Any]:
    """Return nats a target token without smoothing, and the perplexity, in float32 and without
    dropout.
    """
    device = model.embedding.weight.device
    model.eval()
    nll_sum, num_tokens = 0.0, 0
    lengths = data.lengths()
    for rows in bucket(lengths, max(max_tokens, int(lengths.max())), np.arange(len(data))):
        batch = make_batch([data[int(i)] for i in rows], tokenizer).to(device)
        hidden = model(batch.src, batch.src_lengths, batch.tgt_in)
        weight = model.embedding.weight
        _, nll, count = smoothed_cross_entropy(
            hidden, weight, batch.tgt_out, smoothing=0.0, pad_id=tokenizer.pad_id
        )
        nll_sum, num_tokens = nll_sum + nll.item(), num_tokens + count
    loss = nll_sum / num_tokens
    return {"valid_loss": loss, "valid_perplexity": math.exp(min(loss, 700.0))}


def check_bleu(data_dir: Path, tgt_lang: str) -> None:
    """Raise an `NmtError` when `validation_bleu` would lack a file or BLEU's tokenizer."""
    check_tokenizer(tokenizer_for(tgt_lang))
    for name in ("valid.src", "valid.tgt"):
        open_bytes(data_dir / name).close()


def validation_bleu(
    model: Transformer, tokenizer: Tokenizer, data_dir: Path, tgt_lang: str, config: SearchConfig
) -> dict[str, Any]:
    """Translate `valid.src` and score it against `valid.tgt`; both are raw text."""
    translator = Translator(ModelStepper(model), tokenizer, config)
    hypotheses = translator.translate(list(read_lines(data_dir / "valid.src")))
    references = list(read_lines(data_dir / "valid.tgt"))
    exact = sum(h == r for h, r in zip(hypotheses, references, strict=True)) / len(references)
    score = bleu(hypotheses, [references], tokenize=tokenizer_for(tgt_lang))
    return {"valid_bleu": score, "valid_exact_match": exact}
