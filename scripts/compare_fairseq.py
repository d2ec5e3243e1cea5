"""Train nmt and fairseq on the same data, for `compare.py fairseq`."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import psutil
from processes import tree_cpu_seconds
from training_runs import (
    SHARED_SETTINGS,
    last_valid_loss,
    run_nmt,
    score_test_set,
    translate_test_set,
)

from nmt.data.binary import ParallelData
from nmt.data.text import read_lines
from nmt.data.tokenizer import Tokenizer

NUM_AVERAGED = 8
MAX_TOKENS = 2250  # a batch is an update, of 2,003 target tokens in nmt and 2,020 in fairseq
SAME_SCHEDULE = f"""{SHARED_SETTINGS} device=cpu dtype=float32
    optimizer.schedule=inverse_sqrt optimizer.peak_learning_rate=0.002
    optimizer.warmup_steps=600 optimizer.max_grad_norm=1 tokens_per_update=2000
    max_tokens={MAX_TOKENS}"""
SAME_TIME = f"""{SHARED_SETTINGS} device=cpu dtype=float32 model.dropout=0.1
    optimizer.peak_learning_rate=0.00206 optimizer.warmup_steps=600"""
# fairseq drops the last sentences of a test set whose size is not a multiple of
# `--required-batch-size-multiple`, which is 8 by default
FAIRSEQ_DATA = """--dataset-impl raw --source-lang src --target-lang tgt --task translation --cpu
    --required-batch-size-multiple 1"""
FAIRSEQ_SIZES = {"layers": 3, "embed-dim": 192, "ffn-embed-dim": 768, "attention-heads": 4}
FAIRSEQ_TRAIN = f"""{FAIRSEQ_DATA}
    --num-workers 0 --no-epoch-checkpoints --no-progress-bar --log-format json --log-interval 50
    --arch transformer --share-all-embeddings
    --encoder-normalize-before --decoder-normalize-before
    --criterion label_smoothed_cross_entropy --label-smoothing 0.1 --clip-norm 1
    --optimizer adam --adam-betas (0.9,0.98) --adam-eps 1e-9 --lr 0.002
    --lr-scheduler inverse_sqrt --warmup-updates 600 --max-tokens {MAX_TOKENS}"""
FAIRSEQ_AVERAGE = """
import sys, torch
states = [torch.load(path, map_location="cpu", weights_only=False) for path in sys.argv[2:]]
for name, value in states[0]["model"].items():
    if value.is_floating_point():
        value.copy_(sum(state["model"][name].double() for state in states) / len(states))
torch.save(states[0], sys.argv[1])
"""


def compare_with_fairseq(options: argparse.Namespace, data_dir: Path) -> None:
    """Train with both toolkits for each seed, and print the results of all finished runs."""
    for seed in options.seeds:
        budget = f"{options.updates} updates" if options.updates else f"{options.seconds:g} s"
        folder_name = " ".join(["nmt", *options.change, budget, str(seed)])
        nmt_result = options.output / folder_name / "result.json"
        if not nmt_result.exists():
            train_nmt(options, data_dir, nmt_result.parent, seed)
        folder_name = " ".join(["fairseq", *options.fairseq_change, budget, str(seed)])
        fairseq_result = options.output / folder_name / "result.json"
        if options.fairseq and not fairseq_result.exists():
            nmt_seconds = json.loads(nmt_result.read_text(encoding="utf-8"))["cpu_seconds"]
            train_fairseq(options, data_dir, fairseq_result.parent, seed, nmt_seconds)
    for path in sorted(options.output.glob("*/result.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        cells = [path.parent.name] + [f"{key} {value}" for key, value in result.items()]
        print("\t".join(cells))


def train_nmt(options: argparse.Namespace, data_dir: Path, folder: Path, seed: int) -> None:
    """Train with nmt, average, translate and score; write the result to `folder`.

    Starts again if a training was interrupted, so that the result has the CPU time of all updates.
    """
    shutil.rmtree(folder, ignore_errors=True)
    settings = (SAME_SCHEDULE if options.updates else SAME_TIME).split()
    settings += [f"data_dir={data_dir}", f"seed={seed}", *options.change]
    updates = options.updates or plan_updates(settings, folder, options.seconds)
    run_dir = folder / "run"
    settings += [
        f"run_dir={run_dir}",
        f"max_updates={updates}",
        f"validate_every_updates={updates}",
        f"checkpoint_every_updates={max(1, updates // 60)}",
        f"keep_last={NUM_AVERAGED}",
        f"average_last={NUM_AVERAGED}",
    ]
    train_seconds = run_nmt("train", settings)
    result: dict[str, float] = {
        "updates": updates,
        "cpu_seconds": round(train_seconds),
        "valid_loss": last_valid_loss(run_dir),
    }
    run_nmt("average", [f"run_dir={run_dir}"])
    hypotheses = translate_test_set(run_dir, data_dir, folder / "test.out")
    write_result(folder, result | score_test_set(hypotheses, data_dir))


def plan_updates(settings: list[str], folder: Path, seconds: float) -> int:
    """Estimate by two short runs how many updates take `seconds` of CPU time."""
    run_seconds = {}
    for updates in (10, 40):
        run_dir = Path(f"{folder}-{updates}-updates")
        shutil.rmtree(run_dir, ignore_errors=True)  # a finished run would take no time
        length = [f"max_updates={updates}", f"validate_every_updates={updates}"]
        arguments = [*settings, f"run_dir={run_dir}", *length]
        run_seconds[updates] = run_nmt("train", arguments)
    seconds_per_update = (run_seconds[40] - run_seconds[10]) / 30
    return max(1, 10 + round((seconds - run_seconds[10]) / seconds_per_update))


def train_fairseq(
    options: argparse.Namespace, data_dir: Path, folder: Path, seed: int, nmt_seconds: float
) -> None:
    """Train with fairseq, average its last checkpoints, translate and score.

    With `--seconds`, training may use as much CPU time as nmt used. Starts again if a training was
    interrupted, since fairseq would go on and use the whole time again.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    pieces_dir = write_pieces(data_dir, options.output / "pieces")
    command = [options.fairseq, "-m", "fairseq_cli.train", str(pieces_dir), *FAIRSEQ_TRAIN.split()]
    for side in ("encoder", "decoder"):
        command += [f"--{side}-{key}={value}" for key, value in FAIRSEQ_SIZES.items()]
    command += [f"--{change}" for change in options.fairseq_change]
    command += [f"--seed={seed}", f"--save-dir={folder}", f"--keep-interval-updates={NUM_AVERAGED}"]
    if options.updates:
        save_every = max(1, options.updates // 60)
        max_seconds = math.inf
        command += [f"--max-update={options.updates}", "--dropout=0.2"]
        command += [f"--validate-interval-updates={options.updates}", "--validate-interval=100000"]
    else:
        save_every = max(10, round(options.seconds / 100))
        max_seconds = max(options.seconds, nmt_seconds)
        command += ["--disable-validation", "--dropout=0.1"]
    command.append(f"--save-interval-updates={save_every}")
    log = folder / "log.txt"
    used_seconds = run_for(command, log, max_seconds)
    checkpoints = {}
    for path in folder.glob("checkpoint_*_*.pt"):
        checkpoints[int(path.stem.split("_")[-1])] = path
    if not checkpoints:
        raise SystemExit(
            f"fairseq saved no checkpoint in {used_seconds:.0f} CPU seconds; see {log}"
        )
    result: dict[str, float] = {
        "updates": max(checkpoints),
        "cpu_seconds": round(used_seconds),
    }
    losses = re.findall(r'"valid_nll_loss": "([\d.]+)"', log.read_text(encoding="utf-8"))
    if losses:
        result["valid_loss"] = float(losses[-1]) * math.log(2)  # fairseq logs bits
    average = folder / "average.pt"
    paths = [str(checkpoints[update]) for update in sorted(checkpoints)]
    subprocess.run([options.fairseq, "-c", FAIRSEQ_AVERAGE, str(average), *paths], check=True)
    hypotheses = generate_with_fairseq(options.fairseq, pieces_dir, average, data_dir)
    write_result(folder, result | score_test_set(hypotheses, data_dir))


def run_for(command: list[str], log: Path, max_seconds: float) -> float:
    """Run a command until it ends or has used `max_seconds` of CPU time; return its CPU time."""
    used_seconds = 0.0
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    while process.poll() is None and used_seconds < max_seconds:
        time.sleep(0.2)
        used_seconds = tree_cpu_seconds(psutil.Process(process.pid))
    process.kill()
    process.wait()
    return used_seconds


def write_pieces(data_dir: Path, folder: Path) -> Path:
    """Write the tokens of all pairs, and the vocabulary, in fairseq's format; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.load(data_dir / "tokenizer.model")
    dictionary = ""
    for i, piece in enumerate(tokenizer.all_pieces()):
        if i not in tokenizer.control_ids:
            dictionary += f"{piece} 1\n"
    for index, side in enumerate(("src", "tgt")):
        (folder / f"dict.{side}.txt").write_text(dictionary, encoding="utf-8")
        test_lines = read_lines(data_dir / f"test.{side}")
        split_ids = {"test": [tokenizer.encode(line) for line in test_lines]}
        for split in ("train", "valid"):
            split_ids[split] = [pair[index].tolist() for pair in ParallelData(data_dir, split)]
        for split, sentences in split_ids.items():
            text = "".join(f"{' '.join(tokenizer.pieces(ids))}\n" for ids in sentences)
            (folder / f"{split}.src-tgt.{side}").write_text(text, encoding="utf-8")
    return folder


def generate_with_fairseq(
    python: str, pieces_dir: Path, checkpoint: Path, data_dir: Path
) -> list[str]:
    """Translate the test set with fairseq, beam 5; return the translations as text."""
    command = [python, "-m", "fairseq_cli.generate", str(pieces_dir), *FAIRSEQ_DATA.split()]
    command += ["--gen-subset=test", f"--path={checkpoint}", "--beam=5", "--max-tokens=4000"]
    command += ["--max-len-a=1", "--max-len-b=50"]  # as in nmt
    # checkpoints of fairseq hold objects, which torch does not load by default
    environment = os.environ | {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
    result = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    tokenizer = Tokenizer.load(data_dir / "tokenizer.model")
    ids = {piece: i for i, piece in enumerate(tokenizer.all_pieces())}
    translations = {}
    for line in result.stdout.split("\n"):
        if line.startswith("H-"):
            number, _, text = line.split("\t")
            translations[int(number[2:])] = tokenizer.decode([ids[word] for word in text.split()])
    return [translations[i] for i in range(len(translations))]


def write_result(folder: Path, result: dict[str, float]) -> None:
    """Write the result of a run to result.json."""
    rounded = {key: round(value, 4) for key, value in result.items()}
    (folder / "result.json").write_text(json.dumps(rounded) + "\n", encoding="utf-8")
