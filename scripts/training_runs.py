"""Helpers of compare.py and compare_fairseq.py: preprocess, run commands of nmt, and score."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from nmt.config import Metric
from nmt.data.text import read_lines
from nmt.evaluate import evaluate
from nmt.runtime.metrics_log import read_metrics_log

SPLITS = {"train": "train", "valid": "val", "test": "test_2016_flickr"}
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
SHARED_SETTINGS = """experiment=multi30k_quick valid_bleu=false tracker=[] num_threads=1
    compile=false keep_best=1 model.positions=sinusoidal optimizer.name=adam"""


def prepare(text_dir: Path, data_dir: Path, vocab_size: int | None) -> None:
    """Preprocess the text files of a folder, unless `data_dir` exists.

    Ends the script if `data_dir` was made from other files or with another vocabulary size.
    """
    text_dir = text_dir.resolve()
    settings = ["experiment=multi30k_quick"]
    if vocab_size is not None:
        settings.append(f"tokenizer.vocab_size={vocab_size}")
    for split, name in SPLITS.items():
        if not list(text_dir.glob(f"{name}.en*")):
            settings += [f"data.{split}.dataset=null", f"data.{split}.num_pairs=2000"]
            continue
        for side, lang in (("src", "en"), ("tgt", "de")):
            path = text_dir / f"{name}.{lang}"
            if not path.exists():
                path = text_dir / f"{name}.{lang}.gz"
            settings.append(f"data.{split}.{side}={path}")
    settings_file = data_dir.with_suffix(".json")  # the settings of an existing `data_dir`
    if not data_dir.exists():
        run_nmt("preprocess", [*settings, f"data_dir={data_dir}"])
        settings_file.write_text(json.dumps(settings) + "\n", encoding="utf-8")
    elif not settings_file.exists() or json.loads(settings_file.read_text("utf-8")) != settings:
        sys.exit(f"{data_dir} has another text or vocabulary size; give another --output")


def run_nmt(name: str, settings: list[str], log: Path | None = None) -> float:
    """Run a command of nmt; return its CPU seconds, child processes included.

    The output of the command goes to the terminal, or to the end of the file `log`. Raises
    `CalledProcessError` if the command fails.
    """
    command = [sys.executable, "-m", "nmt", name, *settings]
    with open(log or os.devnull, "a") as file:
        output = None if log is None else file  # with None, the output goes to the terminal
        process = subprocess.Popen(command, stdout=output, stderr=output)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise subprocess.CalledProcessError(process.returncode, command)
    return usage.ru_utime + usage.ru_stime


def score_test_set(hypotheses: list[str], data_dir: Path) -> dict[str, float]:
    """Return BLEU, lower-cased BLEU and chrF2 of translations of the test set."""
    references = [list(read_lines(data_dir / "test.tgt"))]
    bleu, chrf = evaluate(hypotheses, references, metrics=[Metric.bleu, Metric.chrf])
    (lowercase,) = evaluate(hypotheses, references, metrics=[Metric.bleu], lowercase=True)
    return {"bleu": bleu.value, "bleu_lowercase": lowercase.value, "chrf": chrf.value}


def translate_test_set(
    model_dir: Path, data_dir: Path, output: Path, *, device: str = "cpu", log: Path | None = None
) -> list[str]:
    """Translate the test set with beam 5; return the translations."""
    files = [f"model_dir={model_dir}", f"input={data_dir / 'test.src'}", f"output={output}"]
    settings = ["backend=native", "beam_size=5", "num_threads=1", f"device={device}"]
    run_nmt("translate", [*files, *settings], log)
    return list(read_lines(output))


def last_valid_loss(run_dir: Path) -> float:
    """Return the validation loss that a run logged last."""
    records = read_metrics_log(run_dir / "metrics.jsonl")
    losses = [record["valid_loss"] for record in records if "valid_loss" in record]
    return losses[-1]
