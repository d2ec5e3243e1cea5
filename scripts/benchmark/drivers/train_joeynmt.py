"""Trains with JoeyNMT: its training loop, its batches (batch_type: token)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import joeynmt
import torch
import yaml
from joeynmt.config import load_config
from joeynmt.training import TrainManager, train
from turns import Steps, Turns, count_steps


def main() -> None:
    """Run JoeyNMT's training until the benchmark ends the process."""
    turns = Turns()
    torch.set_num_threads(turns.job["threads"])
    steps = Steps(turns, joeynmt=joeynmt.__version__, torch=torch.__version__)
    count_steps(steps, TrainManager, "_train_step", count_tokens)
    path = Path("joeynmt.yaml").resolve()
    Path("joeynmt").mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(make_config(turns.job)), encoding="utf-8")
    train(rank=0, world_size=1, cfg=load_config(path), skip_test=True)


def count_tokens(_: TrainManager, batch: Any) -> dict[str, int]:
    """Count the tokens and positions of a batch."""
    return {
        "src_tokens": int(batch.src_mask.sum()),
        "tgt_tokens": int(batch.trg_mask.sum()),
        "positions": batch.src.numel() + batch.trg.numel(),
    }


def make_config(job: dict[str, Any]) -> dict[str, Any]:
    """Return JoeyNMT's configuration of the model, the data and the optimizer."""
    folder = job["pieces_dir"]
    text = {
        "level": "word",
        "lowercase": False,
        "max_length": 1000,
        "voc_file": f"{folder}/vocabulary.txt",
    }
    return {
        "name": "benchmark",
        "model_dir": "joeynmt",
        "use_cuda": False,
        "random_seed": 1,
        "data": {
            "train": f"{folder}/train.src-tgt",
            "dev": f"{folder}/valid.src-tgt",
            "dataset_type": "plain",
            "src": {"lang": "src", **text},
            "trg": {"lang": "tgt", **text},
        },
        "testing": {"beam_size": 1, "batch_size": 64, "eval_metrics": ["bleu"]},
        "training": {
            "normalization": "tokens",
            "loss": "crossentropy",
            "label_smoothing": job["label_smoothing"],
            "optimizer": "adam",
            "adam_betas": [0.9, 0.98],
            "learning_rate": job["learning_rate"],
            "scheduling": "noam",
            "batch_size": job["batch_tokens"],
            "batch_type": "token",
            "batch_multiplier": 1,
            "epochs": 1000,
            "updates": 1_000_000,
            "validation_freq": 1_000_000,
            "logging_freq": 1_000_000,
            "early_stopping_metric": "ppl",
            "overwrite": True,
        },
        "model": {
            "initializer": "xavier_uniform",
            "embed_initializer": "xavier_uniform",
            "tied_embeddings": True,
            "tied_softmax": True,
            "encoder": layers_config(job["model"], "num_encoder_layers"),
            "decoder": layers_config(job["model"], "num_decoder_layers"),
        },
    }


def layers_config(model: dict[str, Any], num_layers_key: str) -> dict[str, Any]:
    """Return the configuration of the encoder or the decoder."""
    return {
        "type": "transformer",
        "num_layers": model[num_layers_key],
        "num_heads": model["num_heads"],
        "hidden_size": model["d_model"],
        "ff_size": model["d_ff"],
        "dropout": model["dropout"],
        "layer_norm": "post",
        "embeddings": {"embedding_dim": model["d_model"], "scale": True, "dropout": 0.0},
    }


main()
