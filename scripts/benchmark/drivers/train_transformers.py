"""Trains MarianMT of Hugging Face transformers in a plain loop.

The library has no batches by tokens, so it gets those of nmt, which hold almost no padding.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import MarianConfig, MarianMTModel
from turns import Steps, Turns

PAD, BOS, EOS = 0, 2, 3


def main() -> None:
    """Make one step a batch: attention by SDPA, fused Adam."""
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
        loss.item()  # waits for a GPU
        steps.done(
            src_tokens=int((src != PAD).sum()),
            tgt_tokens=int((tgt_out != PAD).sum()),
            positions=src.numel() + tgt_out.numel(),
            **cuda_peak(device),
        )


def make_config(job: dict) -> MarianConfig:
    """Say in MarianMT's words what the model is."""
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
    """Yield batches of ids again and again."""
    batches = [json.loads(line) for line in path.read_text().splitlines()]
    while True:
        for batch in batches:
            yield batch["src"], batch["tgt"]


def pad(rows: list[list[int]]) -> Tensor:
    """Stack rows to (rows, longest)."""
    longest = max(map(len, rows))
    return torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])


def cuda_peak(device: torch.device) -> dict[str, int]:
    """Return the most memory of tensors on a GPU; nothing for a processor."""
    if device.type == "cpu":
        return {}
    return {"peak_bytes": torch.cuda.max_memory_allocated(device)}


main()
