"""Trains with OpenNMT-py: its command's loop, its batches (batch_type: tokens)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onmt
import torch
import yaml
from onmt.bin.train import train
from onmt.opts import train_opts
from onmt.trainer import Trainer
from onmt.utils.parse import ArgumentParser
from turns import Steps, Turns, count_steps


def main() -> None:
    """Run onmt_train until the benchmark ends the process."""
    turns = Turns()
    torch.set_num_threads(turns.job["threads"])
    steps = Steps(turns, opennmt=onmt.__version__, torch=torch.__version__)
    count_steps(steps, Trainer, "_gradient_accumulation", count_tokens)
    path = Path("opennmt.yaml").resolve()
    path.write_text(yaml.safe_dump(make_config(turns.job)), encoding="utf-8")
    parser = ArgumentParser()
    train_opts(parser)
    options, _ = parser.parse_known_args(["-config", str(path)])
    train(options)


def count_tokens(trainer: Trainer, batches: list[dict[str, Any]], *_: Any) -> dict[str, int]:
    """Count the tokens and positions of the only batch of an update."""
    (batch,) = batches
    tgt_out = batch["tgt"][:, 1:, 0]  # (B, T), without BOS
    return {
        "src_tokens": int(batch["srclen"].sum()),
        "tgt_tokens": int((tgt_out != trainer.train_loss.padding_idx).sum()),
        "positions": batch["src"].numel() + tgt_out.numel(),
    }


def make_config(job: dict[str, Any]) -> dict[str, Any]:
    """Return OpenNMT-py's options for the model, the data and the optimizer."""
    model = job["model"]
    folder = job["pieces_dir"]
    text = {
        "path_src": f"{folder}/train.src-tgt.src",
        "path_tgt": f"{folder}/train.src-tgt.tgt",
        "transforms": [],
    }
    return {
        "data": {"corpus": text},
        "src_vocab": f"{folder}/vocabulary.txt",
        "tgt_vocab": f"{folder}/vocabulary.txt",
        "share_vocab": True,
        "save_data": "opennmt",
        "save_model": "opennmt/model",
        "world_size": 1,
        "gpu_ranks": [],
        "num_workers": 0,
        "seed": 1,
        "train_steps": 1_000_000,
        "save_checkpoint_steps": 1_000_000,
        "valid_steps": 1_000_000,
        "report_every": 1_000_000,
        "batch_type": "tokens",
        "batch_size": job["batch_tokens"],
        "normalization": "tokens",
        "accum_count": [1],
        "accum_steps": [0],
        "encoder_type": "transformer",
        "decoder_type": "transformer",
        "enc_layers": model["num_encoder_layers"],
        "dec_layers": model["num_decoder_layers"],
        "hidden_size": model["d_model"],
        "word_vec_size": model["d_model"],
        "transformer_ff": model["d_ff"],
        "heads": model["num_heads"],
        "dropout": [model["dropout"]],
        "attention_dropout": [0.0],
        "dropout_steps": [0],
        "position_encoding": True,
        "share_embeddings": True,
        "share_decoder_embeddings": True,
        "label_smoothing": job["label_smoothing"],
        "optim": "adam",
        "adam_beta2": 0.98,
        "learning_rate": job["learning_rate"],
        "decay_method": "none",
        "max_grad_norm": 0,
        "param_init": 0,
        "param_init_glorot": True,
    }


main()
