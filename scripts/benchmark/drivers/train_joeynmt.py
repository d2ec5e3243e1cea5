"""Trains with JoeyNMT: its training loop, its batches (batch_type: token)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import joeynmt
import torch
import yaml
from joeynmt.config import load_config
from joeynmt.training import TrainManager, train
from turns import Steps, Turns


def main() -> None:
    """Run JoeyNMT's training until nothing more is wanted."""
    turns = Turns()
    torch.set_num_threads(turns.job["threads"])
    count_steps(Steps(turns, joeynmt=joeynmt.__version__, torch=torch.__version__))
    path = Path("joeynmt.yaml").resolve()
    Path("joeynmt").mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(config(turns.job)), encoding="utf-8")
    train(rank=0, world_size=1, cfg=load_config(path), skip_test=True)


def count_steps(steps: Steps) -> None:
    """Count a step when the next one begins: then its batch has been made, and all is done."""
    make_step = TrainManager._train_step
    waiting: list[dict[str, int]] = []

    def counted(self: Any, batch: Any) -> tuple[float, int]:
        if waiting:
            steps.done(**waiting.pop())
        result = make_step(self, batch)
        waiting.append(
            {
                "src_tokens": int(batch.src_mask.sum()),
                "tgt_tokens": int(batch.trg_mask.sum()),
                "positions": batch.src.numel() + batch.trg.numel(),
            }
        )
        return result

    TrainManager._train_step = counted


def config(job: dict[str, Any]) -> dict[str, Any]:
    """Say in JoeyNMT's words what the model, the data and the optimizer are."""
    folder = job["pieces_dir"]
    side = {"level": "word", "lowercase": False, "max_length": 1000}
    side |= {"voc_file": f"{folder}/vocabulary.txt"}
    return {
        "name": "benchmark",
        "model_dir": "joeynmt",
        "use_cuda": False,
        "random_seed": 1,
        "data": {
            "train": f"{folder}/train.src-tgt",
            "dev": f"{folder}/valid.src-tgt",
            "dataset_type": "plain",
            "src": {"lang": "src", **side},
            "trg": {"lang": "tgt", **side},
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
            "encoder": stack(job["model"], "num_encoder_layers"),
            "decoder": stack(job["model"], "num_decoder_layers"),
        },
    }


def stack(model: dict[str, Any], num_layers: str) -> dict[str, Any]:
    """Describe the encoder or the decoder."""
    return {
        "type": "transformer",
        "num_layers": model[num_layers],
        "num_heads": model["num_heads"],
        "hidden_size": model["d_model"],
        "ff_size": model["d_ff"],
        "dropout": model["dropout"],
        "layer_norm": "post",
        "embeddings": {"embedding_dim": model["d_model"], "scale": True, "dropout": 0.0},
    }


main()
