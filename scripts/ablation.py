"""What layers and methods are worth on Multi30k en-de: the same text, pieces and updates for each.

    python scripts/ablation.py --text multi30k --output build/ablation --table docs/ablation.md
    python scripts/ablation.py ... --only baseline R-Drop --seeds 1

The baseline is a small model that learns fast: `experiment=multi30k_quick` with 3+3 layers of 128
and the other settings of `BASELINE`, one thread. A variant changes some of them. Its last
checkpoint translates test_2016_flickr with beam 5. A row has means over the seeds, each with half
of its 95 % interval (Student's t), and how far the BLEU is from that of the baseline, called noise
where it is not beyond the 95 % interval of the difference (t with pooled variance). A run sees the
text two and a half times, so that what works against overfitting (R-Drop, BPE-dropout) can only
lose. Variants with x2 or x4 in their names have so many times the updates, and are compared with
the baseline that has as many.

Results are appended to docs/ablation.jsonl (`--results`), with the date, version and processor.
What is there is not done again, and what was interrupted goes on; processes with other `--seeds`
may run side by side.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import sys
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from statistics import fmean, stdev

import torch
from compare_learning import one_thread, prepare, run

import nmt
from nmt.checkpoint import checkpoint_update, list_checkpoints, load_weights
from nmt.config import Metric
from nmt.data.text import read_lines
from nmt.evaluate import evaluate
from nmt.runtime.metrics_log import read_metrics_log

UPDATES, TOKENS = 1000, 700
BASELINE = f"""model.d_model=128 model.d_ff=512 model.dropout=0.1 optimizer.warmup_steps=300
    optimizer.peak_learning_rate=0.0035 tokens_per_update={TOKENS}
    max_tokens=1000 valid_bleu=false tracker=[] keep_last=1 average_last=1 num_threads=1
    device=cpu"""
VARIANTS = {
    "baseline": "",
    "post-norm": "model.norm=post",
    "sinusoidal_concat": "model.positions=sinusoidal_concat",
    "learned positions": "model.positions=learned",
    "relative positions": "model.positions=relative",
    "rotary positions": "model.positions=rotary",
    "ALiBi": "model.positions=alibi",
    "RMS norm": "model.norm_layer=rms",
    "SwiGLU, as many parameters": "model.activation=swiglu model.d_ff=344",
    "QK-norm": "model.qk_norm=true",
    "one head of keys": "model.num_kv_heads=1",
    "5+1 layers": "model.num_encoder_layers=5 model.num_decoder_layers=1",
    "R-Drop": "r_drop=5",
    "BPE-dropout": "subword_sampling=0.1",
    "Muon": "optimizer.name=muon",
    "rotary positions and Muon": "model.positions=rotary optimizer.name=muon",
    "word dropout": "noise.word_dropout=0.1",
    "EMA": "ema_decay=0.999",
} | {
    f"{name} {longer}": settings  # methods that need more updates to gain from
    for longer in ("x2", "x4")
    for name, settings in (
        ("baseline", ""),
        ("R-Drop", "r_drop=5"),
        ("BPE-dropout", "subword_sampling=0.1"),
        ("dropout 0.2", "model.dropout=0.2"),
    )
}
T_95 = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306]  # of 1, 2, ... degrees of freedom
FIGURES = {"valid_loss": 3, "bleu": 2, "bleu_lowercase": 2, "chrf": 2, "tokens_per_cpu_second": 0}


@dataclass
class Result:
    """A run: what it was, and its figures in nats a token, points and target tokens."""

    variant: str
    seed: int
    updates: int
    valid_loss: float
    bleu: float
    bleu_lowercase: float
    chrf: float
    tokens_per_cpu_second: float  # of training
    parameters: int
    about: str  # when, with what


def main() -> None:
    """Run what is asked for, and write the table of all that is done."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--text", type=Path, required=True, help="folder with train.en[.gz], ...")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--results", type=Path, default=Path("docs/ablation.jsonl"))
    parser.add_argument("--table", type=Path, help="Markdown file")
    quick = [name for name in VARIANTS if times(name) == 1]
    parser.add_argument("--only", nargs="*", default=quick, choices=list(VARIANTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    options = parser.parse_args()
    data_dir = options.output / "data"
    prepare(options.text, data_dir)
    for seed in options.seeds:  # a first row of each comes before the second
        for name in options.only:
            done = {(result.variant, result.seed) for result in load(options.results)}
            if (name, seed) not in done:
                folder = options.output / f"{name.replace(' ', '-')}-{seed}"
                line = json.dumps(asdict(measure(folder, data_dir, name, seed))) + "\n"
                with options.results.open("a", encoding="utf-8") as file:
                    file.write(line)
    text = table(load(options.results))
    print(text)
    if options.table:
        options.table.write_text(text, encoding="utf-8")


def load(path: Path) -> list[Result]:
    """Return all results that a file has."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [Result(**json.loads(line)) for line in lines]


def measure(folder: Path, data_dir: Path, name: str, seed: int) -> Result:
    """Train a variant, translate the test set and score it."""
    updates = UPDATES * times(name)
    nmt_train = [sys.executable, "-m", "nmt", "train", "experiment=multi30k_quick", *settings(name)]
    nmt_train += [f"data_dir={data_dir}", f"run_dir={folder}", f"seed={seed}"]
    nmt_train += [f"max_updates={updates}", f"validate_every_updates={updates}"]
    done, start = list_checkpoints(folder), cpu_seconds()
    run(nmt_train)
    seconds = cpu_seconds() - start
    before = checkpoint_update(done[-1]) if done else 0
    records = read_metrics_log(folder / "metrics.jsonl")
    tokens = TOKENS * (records[-1]["update"] - before)
    output, model = folder / "test.de", list_checkpoints(folder)[-1]
    run([sys.executable, "-m", "nmt", "translate", f"model_dir={model}", "beam_size=5",
         f"input={data_dir / 'test.src'}", f"output={output}", "num_threads=1"])  # fmt: skip
    lines, references = list(read_lines(output)), [list(read_lines(data_dir / "test.tgt"))]
    metrics = [Metric.bleu, Metric.chrf]
    bleu, chrf = (score.value for score in evaluate(lines, references, metrics=metrics))
    lower = evaluate(lines, references, metrics=metrics[:1], lowercase=True)[0].value
    losses = [record["valid_loss"] for record in records if "valid_loss" in record]
    size = sum(t.numel() for t in load_weights(model).values())
    speed = round(tokens / max(seconds, 1e-9), 1)
    about = f"{date.today()}, nmt {nmt.__version__}, torch {torch.__version__}, "
    about += f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return Result(name, seed, updates, losses[-1], bleu, lower, chrf, speed, size, about)


def settings(name: str) -> list[str]:
    """Return the settings of a variant: those of the baseline, some of them changed."""
    pairs = (setting.split("=", 1) for setting in f"{BASELINE} {VARIANTS[name]}".split())
    return [f"{key}={value}" for key, value in dict(pairs).items()]


def times(name: str) -> int:
    """Return how many times the updates of the baseline a variant has."""
    return int(name[-1]) if name.endswith((" x2", " x4")) else 1


def cpu_seconds() -> float:
    """Return the processor time of the commands so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def table(results: list[Result]) -> str:
    """Return the table of results, as Markdown."""
    found = {name: [one for one in results if one.variant == name] for name in VARIANTS}
    heads = ["variant", "seeds", "parameters", "validation loss", "BLEU", "lower-cased", "chrF2",
             "tokens a CPU-second", "BLEU over baseline"]  # fmt: skip
    rows = []
    for name, ours in found.items():
        if not ours:
            continue
        row = [name, str(len(ours)), f"{ours[0].parameters:,}"]
        for key, digits in FIGURES.items():
            row.append(mean_and_half([getattr(result, key) for result in ours], digits))
        peer = "baseline" if times(name) == 1 else f"baseline x{times(name)}"
        bleu, base = ([one.bleu for one in found[key]] for key in (name, peer))
        rows.append([*row, "" if name == peer or not base else difference(bleu, base)])
    text = (__doc__ or "").split("\n\n")
    about = [f"{UPDATES} updates of {TOKENS} target tokens. Measured with:", ""]
    about += [f"- {line}" for line in sorted({result.about for result in results})]
    lines = ["# Layers and methods on Multi30k en-de", "", text[1], "", text[2], "", *about, ""]
    lines += [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)]
    return "\n".join([*lines, ""])


def t_95(freedom: int) -> float:
    """Return the bound of 95 % of Student's t; beyond the table its last, which is wider."""
    return T_95[min(freedom, len(T_95)) - 1]


def mean_and_half(values: list[float], digits: int) -> str:
    """Return the mean, and half of its 95 % interval where there is more than one value."""
    text = f"{fmean(values):.{digits}f}"
    if len(values) > 1:
        half = t_95(len(values) - 1) * stdev(values) / math.sqrt(len(values))
        text += f" ± {half:.{digits}f}"
    return text


def difference(values: list[float], base: list[float]) -> str:
    """Return the difference of the means, and whether it is noise."""
    found, freedom = fmean(values) - fmean(base), len(values) + len(base) - 2
    if min(len(values), len(base)) < 2:
        return f"{found:+.2f} (one seed)"
    squares = sum((len(x) - 1) * stdev(x) ** 2 for x in (values, base))
    error = math.sqrt(squares / freedom * (1 / len(values) + 1 / len(base)))
    return f"{found:+.2f}{'' if abs(found) > t_95(freedom) * error else ' (noise)'}"


if __name__ == "__main__":
    os.environ.update(one_thread())
    main()
