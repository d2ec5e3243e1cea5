"""What an update teaches, here and in fairseq: same text, SentencePiece model, sizes and settings.

    python scripts/compare_learning.py --text multi30k --output build/learning
    python scripts/compare_learning.py ... --fairseq environments/fairseq/bin/python
    python scripts/compare_learning.py ... --change model.positions=sinusoidal_concat

Prints the validation loss of each seed in nats a token, without smoothing, EOS included, after the
last update. A run of 1,200 updates takes about 540 s of CPU time here, and 950 s in fairseq. What
is done is not done again, and what was interrupted goes on.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import fmean

from nmt.data.binary import ParallelData
from nmt.data.text import read_lines
from nmt.data.tokenizer import Tokenizer

SPLITS = {"train": "train", "valid": "val", "test": "test_2016_flickr"}
MAX_TOKENS = 2250  # a batch is an update, of 2,003 target tokens here and 2,020 in fairseq
OURS = """experiment=multi30k_quick optimizer.schedule=inverse_sqrt
    optimizer.peak_learning_rate=0.002 optimizer.warmup_steps=600 optimizer.max_grad_norm=1
    tokens_per_update=2000 checkpoint_every_updates=300 keep_last=1 average_last=1
    valid_bleu=false tracker=[] num_threads=1 device=cpu"""
FAIRSEQ = """--dataset-impl raw --source-lang src --target-lang tgt --task translation --cpu
    --num-workers 0 --no-epoch-checkpoints --no-progress-bar --log-format json --log-interval 50
    --required-batch-size-multiple 1 --arch transformer --share-all-embeddings --dropout 0.2
    --encoder-normalize-before --decoder-normalize-before
    --criterion label_smoothed_cross_entropy --label-smoothing 0.1 --clip-norm 1
    --optimizer adam --adam-betas (0.9,0.98) --adam-eps 1e-9
    --lr 0.002 --lr-scheduler inverse_sqrt --warmup-updates 600 --validate-interval 100000"""
SIZES = {"layers": 3, "embed-dim": 192, "ffn-embed-dim": 768, "attention-heads": 4}


def main() -> None:
    """Run what is asked for, seed by seed, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--text", type=Path, required=True, help="folder with train.en[.gz], ...")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--fairseq", help="Python of an environment with fairseq-fixed")
    parser.add_argument("--change", action="append", default=[], help="setting of ours")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--updates", type=int, default=1200)
    options = parser.parse_args()
    data_dir = options.output / "data"
    prepare(options.text, data_dir)
    name, losses = "-".join(["nmt", *options.change]), []
    for seed in options.seeds:
        run_dir = options.output / f"{options.fairseq and 'fairseq' or name}-{seed}"
        if options.fairseq:
            pieces = write_pieces(data_dir, options.output / "pieces")
            loss = train_fairseq(options.fairseq, pieces, run_dir, seed, options.updates)
        else:
            loss = train_ours(data_dir, run_dir, seed, options.updates, options.change)
        losses.append(loss)
        print(f"{run_dir.name}: {loss:.4f} nats a token, perplexity {math.exp(loss):.3f}")
    print(f"mean of {len(losses)}: {fmean(losses):.4f}")


def prepare(text: Path, data_dir: Path) -> None:
    """Preprocess the text, once."""
    if data_dir.exists():
        return
    files = []
    for split, name in SPLITS.items():
        for side, lang in (("src", "en"), ("tgt", "de")):
            path = next(
                p for p in (text / f"{name}.{lang}", text / f"{name}.{lang}.gz") if p.exists()
            )
            files.append(f"data.{split}.{side}={path}")
    run(
        [
            sys.executable,
            "-m",
            "nmt",
            "preprocess",
            "experiment=multi30k_quick",
            *files,
            f"data_dir={data_dir}",
        ]
    )


def train_ours(data_dir: Path, run_dir: Path, seed: int, updates: int, changes: list[str]) -> float:
    """Train with nmt; return the validation loss after the last update."""
    own = [f"data_dir={data_dir}", f"run_dir={run_dir}", f"seed={seed}", f"max_tokens={MAX_TOKENS}"]
    own += [f"max_updates={updates}", f"validate_every_updates={updates}"]
    run([sys.executable, "-m", "nmt", "train", *OURS.split(), *own, *changes])
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [record for record in map(json.loads, lines) if "valid_loss" in record]
    return float(records[-1]["valid_loss"])


def write_pieces(data_dir: Path, folder: Path) -> Path:
    """Write pairs as pieces, and the whole vocabulary, as fairseq reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.load(data_dir / "tokenizer.model")
    for i, side in enumerate(("src", "tgt")):
        ids: dict[str, list[list[int]]] = {}
        for split in ("train", "valid"):
            data = ParallelData(data_dir, split)
            ids[split] = [data[row][i].tolist() for row in range(len(data))]
        ids["test"] = [tokenizer.encode(line) for line in read_lines(data_dir / f"test.{side}")]
        for split, rows in ids.items():
            text = "".join(f"{' '.join(tokenizer.pieces(row))}\n" for row in rows)
            (folder / f"{split}.src-tgt.{side}").write_text(text, encoding="utf-8")
    names = [x for i, x in enumerate(tokenizer.all_pieces()) if i not in tokenizer.control_ids]
    for side in ("src", "tgt"):
        text = "".join(f"{name} 1\n" for name in names)
        (folder / f"dict.{side}.txt").write_text(text, encoding="utf-8")
    return folder


def train_fairseq(python: str, pieces: Path, run_dir: Path, seed: int, updates: int) -> float:
    """Train with fairseq; return its unsmoothed validation loss, which it reports in bits."""
    log = run_dir / "log.txt"
    found = re.findall(r'"valid_nll_loss": "([\d.]+)"', log.read_text()) if log.exists() else []
    if not found:
        sizes = [f"--{s}-{k}={v}" for s in ("encoder", "decoder") for k, v in SIZES.items()]
        own = [f"--max-update={updates}", f"--seed={seed}", f"--save-dir={run_dir}"]
        own += [f"--max-tokens={MAX_TOKENS}", f"--validate-interval-updates={updates}"]
        command = [python, "-m", "fairseq_cli.train", str(pieces), *FAIRSEQ.split(), *sizes, *own]
        run_dir.mkdir(parents=True, exist_ok=True)
        with log.open("w", encoding="utf-8") as file:
            subprocess.run(command, check=True, stdout=file, stderr=file, env=one_thread())
        found = re.findall(r'"valid_nll_loss": "([\d.]+)"', log.read_text())
    return float(found[-1]) * math.log(2)


def one_thread() -> dict[str, str]:
    """Return the environment with one thread for computing."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def run(command: list[str]) -> None:
    """Run a command of nmt, whose log goes to the terminal."""
    subprocess.run(command, check=True, env=one_thread())


if __name__ == "__main__":
    main()
