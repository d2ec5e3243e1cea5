"""Trains MarianMT of Hugging Face transformers in a plain loop.

The library does not form batches by tokens, so it gets batches of nmt, which have little padding.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from transformers import MarianConfig, MarianMTModel
from transformers_batches import BOS, EOS, PAD, pad
from turns import Steps, Turns


def main() -> None:
    """Make one step of each batch, with SDPA attention and fused Adam."""
    turns = Turns()
    job = turns.job
    torch.set_num_threads(job["threads"])
    torch.manual_seed(1)
    device = torch.device(job["device"])
    model = MarianMTModel._from_config(make_config(job), attn_implementation="sdpa")
    model = model.to(device).train()
    optimizer = torch.optim.Adam(
        model.parameters(), lr=job["learning_rate"], betas=(0.9, 0.98), eps=1e-9, fused=True
    )
    steps = Steps(turns, transformers=transformers.__version__, torch=torch.__version__)
    for src_rows, tgt_rows in read_batches(Path(job["batches"])):
        src = pad([[*row, EOS] for row in src_rows]).to(device)
        tgt_in = pad([[BOS, *row] for row in tgt_rows]).to(device)
        tgt_out = pad([[*row, EOS] for row in tgt_rows]).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=job["dtype"] == "bfloat16"):
            logits = model(
                input_ids=src, attention_mask=src != PAD, decoder_input_ids=tgt_in, use_cache=False
            ).logits
            loss = F.cross_entropy(
                logits.flatten(0, 1),
                tgt_out.flatten(),
                ignore_index=PAD,
                label_smoothing=job["label_smoothing"],
            )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()  # wait for the GPU
        steps.done(
            src_tokens=int((src != PAD).sum()),
            tgt_tokens=int((tgt_out != PAD).sum()),
            positions=src.numel() + tgt_out.numel(),
            **cuda_peak(device),
        )


def make_config(job: dict[str, Any]) -> MarianConfig:
    """Return MarianMT's configuration of the model."""
    model = job["model"]
    return MarianConfig(
        vocab_size=job["vocab_size"],
        d_model=model["d_model"],
        encoder_layers=model["num_encoder_layers"],
        decoder_layers=model["num_decoder_layers"],
        encoder_attention_heads=model["num_heads"],
        decoder_attention_heads=model["num_heads"],
        encoder_ffn_dim=model["d_ff"],
        decoder_ffn_dim=model["d_ff"],
        activation_function="relu",
        dropout=model["dropout"],
        attention_dropout=0.0,
        activation_dropout=0.0,
        scale_embedding=True,
        share_encoder_decoder_embeddings=True,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        decoder_start_token_id=BOS,
        forced_eos_token_id=None,
    )


def read_batches(path: Path) -> Iterator[tuple[list[list[int]], list[list[int]]]]:
    """Yield source and target ids of the batches in an endless loop."""
    batches = [json.loads(line) for line in path.read_text().splitlines()]
    while True:
        for batch in batches:
            yield batch["src"], batch["tgt"]


def cuda_peak(device: torch.device) -> dict[str, int]:
    """Return the peak memory of tensors on a GPU, nothing on a CPU."""
    if device.type == "cpu":
        return {}
    return {"peak_bytes": torch.cuda.max_memory_allocated(device)}


main()
