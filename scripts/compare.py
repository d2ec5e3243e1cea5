"""Compare variants of nmt with each other, and nmt with fairseq.

    python scripts/compare.py variants --text multi30k --output build/ablation
    python scripts/compare.py variants ... --only baseline R-Drop --seeds 1 --table docs/ablation.md
    python scripts/compare.py fairseq --text multi30k --output build/learning --updates 1200 \\
        --fairseq environments/fairseq/bin/python
    python scripts/compare.py fairseq ... --seconds 2100 --change tokens_per_update=1400

`--text` is a folder with train.en and train.de (or .gz); 2,000 pairs are held out if there is no
val.* or test_2016_flickr.*. All runs use one thread, and finished runs are not repeated.

The baseline is a small model that learns fast: `experiment=multi30k_quick` with 3+3 layers of 128,
one thread and the other settings of `BASELINE`. A variant changes some of these settings. Its last
checkpoint translates test_2016_flickr with beam 5. A row of the table has means over the seeds with
half of the 95 % confidence interval (Student's t). Its last column is the difference to the BLEU of
the baseline, marked as noise if it lies within the 95 % interval of the difference (t with pooled
variance). Variants named x2 or x4 have two or four times the updates, and are compared with the
baseline of the same number of updates.

`fairseq` trains models of the same size on the same SentencePiece tokens with both toolkits. With
`--updates`, both have the same schedule. With `--seconds`, both have the same CPU time: nmt has a
cosine schedule that ends with the time, and fairseq is stopped after as much CPU time as nmt used.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from statistics import fmean, stdev, variance

import psutil
import torch
from processes import tree_cpu_seconds

import nmt
from nmt.checkpoint import load_weights
from nmt.config import Metric
from nmt.data.binary import ParallelData
from nmt.data.text import read_lines
from nmt.data.tokenizer import Tokenizer
from nmt.evaluate import evaluate
from nmt.runtime.metrics_log import read_metrics_log

SPLITS = {"train": "train", "valid": "val", "test": "test_2016_flickr"}
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
SHARED_SETTINGS = """experiment=multi30k_quick valid_bleu=false tracker=[] num_threads=1 device=cpu
    keep_best=1"""

# settings of `variants`
UPDATES = 1000
UPDATE_TOKENS = 700
BASELINE = f"""{SHARED_SETTINGS} model.d_model=128 model.d_ff=512 model.dropout=0.1
    optimizer.warmup_steps=300 optimizer.peak_learning_rate=0.0035
    tokens_per_update={UPDATE_TOKENS} max_tokens=1000 keep_last=1 average_last=1"""
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
    "baseline x2": "",
    "R-Drop x2": "r_drop=5",
    "BPE-dropout x2": "subword_sampling=0.1",
    "dropout 0.2 x2": "model.dropout=0.2",
    "baseline x4": "",
    "R-Drop x4": "r_drop=5",
    "BPE-dropout x4": "subword_sampling=0.1",
    "dropout 0.2 x4": "model.dropout=0.2",
}
# 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom
T_QUANTILES = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306]
NUM_DIGITS = {
    "valid_loss": 3,
    "bleu": 2,
    "bleu_lowercase": 2,
    "chrf": 2,
    "tokens_per_cpu_second": 0,
}

# settings of `fairseq`
NUM_AVERAGED = 8
MAX_TOKENS = 2250  # a batch is an update, of 2,003 target tokens in nmt and 2,020 in fairseq
SAME_SCHEDULE = f"""{SHARED_SETTINGS}
    optimizer.schedule=inverse_sqrt optimizer.peak_learning_rate=0.002
    optimizer.warmup_steps=600 optimizer.max_grad_norm=1 tokens_per_update=2000
    max_tokens={MAX_TOKENS}"""
SAME_TIME = f"{SHARED_SETTINGS} model.dropout=0.1"
# fairseq drops the last sentences of a test set whose size is not a multiple of the batch size's
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


@dataclass
class Result:
    """A run of a variant: losses in nats per token, scores in points."""

    variant: str
    seed: int
    updates: int
    valid_loss: float
    bleu: float
    bleu_lowercase: float
    chrf: float
    tokens_per_cpu_second: float  # target tokens of training
    parameters: int
    about: str  # date, versions of nmt and torch, CPU


def main() -> None:
    """Run one of the two comparisons."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    variants = commands.add_parser("variants", help="layers and methods of nmt")
    short_variants = [name for name in VARIANTS if length_factor(name) == 1]
    variants.add_argument("--only", nargs="*", default=short_variants, choices=list(VARIANTS))
    variants.add_argument("--results", type=Path, default=Path("docs/ablation.jsonl"))
    variants.add_argument("--table", type=Path, help="Markdown file to write")
    fairseq = commands.add_parser("fairseq", help="nmt and fairseq")
    budget = fairseq.add_mutually_exclusive_group(required=True)
    budget.add_argument("--updates", type=int, help="updates of each training")
    budget.add_argument("--seconds", type=float, help="CPU seconds of each training")
    fairseq.add_argument("--fairseq", help="Python of an environment with fairseq-fixed")
    fairseq.add_argument("--change", action="append", default=[], help="another setting of nmt")
    for command in (variants, fairseq):
        command.add_argument("--text", type=Path, required=True, help="folder with train.en, ...")
        command.add_argument("--output", type=Path, required=True)
        command.add_argument(
            "--vocab-size", type=int, help="default: as in experiment=multi30k_quick"
        )
        command.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    options = parser.parse_args()
    data_dir = options.output / "data"
    prepare(options.text, data_dir, options.vocab_size)
    if options.command == "variants":
        compare_variants(options, data_dir)
    else:
        compare_with_fairseq(options, data_dir)


def prepare(text_dir: Path, data_dir: Path, vocab_size: int | None) -> None:
    """Preprocess the text files of a folder, unless `data_dir` exists."""
    if data_dir.exists():
        return
    settings = ["experiment=multi30k_quick", f"data_dir={data_dir}"]
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
    run_nmt("preprocess", settings)


def run_nmt(name: str, settings: list[str]) -> None:
    """Run a command of nmt with its log on the terminal; raise if it fails."""
    subprocess.run([sys.executable, "-m", "nmt", name, *settings], check=True)


def cpu_seconds() -> float:
    """Return the CPU time of all child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def score_test_set(hypotheses: list[str], data_dir: Path) -> dict[str, float]:
    """Return BLEU, lower-cased BLEU and chrF2 of translations of the test set."""
    references = [list(read_lines(data_dir / "test.tgt"))]
    bleu, chrf = evaluate(hypotheses, references, metrics=[Metric.bleu, Metric.chrf])
    (lowercase,) = evaluate(hypotheses, references, metrics=[Metric.bleu], lowercase=True)
    return {"bleu": bleu.value, "bleu_lowercase": lowercase.value, "chrf": chrf.value}


def translate_test_set(model_dir: Path, data_dir: Path, output: Path) -> list[str]:
    """Translate the test set with beam 5; return the translations."""
    files = [f"model_dir={model_dir}", f"input={data_dir / 'test.src'}", f"output={output}"]
    run_nmt("translate", [*files, "backend=native", "beam_size=5", "num_threads=1"])
    return list(read_lines(output))


def last_valid_loss(run_dir: Path) -> float:
    """Return the validation loss that a run logged last."""
    records = read_metrics_log(run_dir / "metrics.jsonl")
    losses = [record["valid_loss"] for record in records if "valid_loss" in record]
    return losses[-1]


# --- variants


def compare_variants(options: argparse.Namespace, data_dir: Path) -> None:
    """Measure the requested variants and print the table of all results."""
    results = load_results(options.results)
    finished = {(result.variant, result.seed) for result in results}
    for seed in options.seeds:
        for name in options.only:
            if (name, seed) in finished:
                continue
            run_dir = options.output / f"{name.replace(' ', '-')}-{seed}"
            result = measure_variant(run_dir, data_dir, name, seed)
            results.append(result)
            with options.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(result)) + "\n")
    page = make_page(results)
    print(page)
    if options.table:
        options.table.write_text(page, encoding="utf-8")


def load_results(path: Path) -> list[Result]:
    """Read all results of a JSON Lines file, none if it does not exist."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [Result(**json.loads(line)) for line in lines]


def measure_variant(run_dir: Path, data_dir: Path, name: str, seed: int) -> Result:
    """Train a variant, translate the test set with its last checkpoint and score it."""
    updates = UPDATES * length_factor(name)
    start_seconds = cpu_seconds()
    settings = variant_settings(name)
    settings += [f"data_dir={data_dir}", f"run_dir={run_dir}", f"seed={seed}"]
    settings += [f"max_updates={updates}", f"validate_every_updates={updates}"]
    run_nmt("train", settings)
    tokens_per_second = UPDATE_TOKENS * updates / (cpu_seconds() - start_seconds)
    model_dir = run_dir / "checkpoints" / "latest"
    hypotheses = translate_test_set(model_dir, data_dir, run_dir / "test.de")
    about = f"{date.today()}, nmt {nmt.__version__}, torch {torch.__version__}, "
    about += f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return Result(
        variant=name,
        seed=seed,
        updates=updates,
        valid_loss=last_valid_loss(run_dir),
        tokens_per_cpu_second=round(tokens_per_second, 1),
        parameters=sum(weight.numel() for weight in load_weights(model_dir).values()),
        about=about,
        **score_test_set(hypotheses, data_dir),
    )


def variant_settings(name: str) -> list[str]:
    """Return the settings of the baseline, changed by a variant."""
    settings = {}
    for setting in f"{BASELINE} {VARIANTS[name]}".split():
        key, _, value = setting.partition("=")
        settings[key] = value
    return [f"{key}={value}" for key, value in settings.items()]


def length_factor(name: str) -> int:
    """Return the number of updates of a variant over the number of the baseline."""
    return int(name[-1]) if name.endswith((" x2", " x4")) else 1


def make_page(results: list[Result]) -> str:
    """Return the page docs/ablation.md: the method and a table of all results."""
    method = (__doc__ or "").split("\n\n")[3]
    machines = sorted({result.about for result in results})
    heading = ["variant", "seeds", "parameters", "validation loss", "BLEU", "lower-cased", "chrF2"]
    heading += ["tokens a CPU-second", "BLEU over baseline"]
    lines = [
        "# Layers and methods on Multi30k en-de",
        "",
        "    python scripts/compare.py variants --text multi30k --output build/ablation",
        "",
        method,
        "",
        f"{UPDATES} updates of {UPDATE_TOKENS} target tokens. Measured with:",
        "",
        *(f"- {machine}" for machine in machines),
        "",
        f"| {' | '.join(heading)} |",
        "|" + " --- |" * len(heading),
    ]
    results_by_variant: dict[str, list[Result]] = {name: [] for name in VARIANTS}
    for result in results:
        results_by_variant[result.variant].append(result)
    for name, variant_results in results_by_variant.items():
        factor = length_factor(name)
        baseline = "baseline" if factor == 1 else f"baseline x{factor}"
        baseline_results = [] if name == baseline else results_by_variant[baseline]
        if variant_results:
            row = make_row(variant_results, baseline_results)
            lines.append(f"| {' | '.join(row)} |")
    return "\n".join([*lines, ""])


def make_row(results: list[Result], baseline_results: list[Result]) -> list[str]:
    """Return the cells of a variant; without results of the baseline, the last cell is empty."""
    row = [results[0].variant, str(len(results)), f"{results[0].parameters:,}"]
    for key, digits in NUM_DIGITS.items():
        row.append(format_mean([getattr(result, key) for result in results], digits))
    difference = ""
    if baseline_results:
        baseline_bleu = [result.bleu for result in baseline_results]
        difference = format_difference([result.bleu for result in results], baseline_bleu)
    return [*row, difference]


def t_quantile(degrees_of_freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t, or a slightly larger one beyond the table."""
    return T_QUANTILES[min(degrees_of_freedom, len(T_QUANTILES)) - 1]


def format_mean(values: list[float], digits: int) -> str:
    """Format the mean, with half of its 95 % confidence interval if there are several values."""
    text = f"{fmean(values):.{digits}f}"
    if len(values) > 1:
        standard_error = stdev(values) / math.sqrt(len(values))
        text += f" ± {t_quantile(len(values) - 1) * standard_error:.{digits}f}"
    return text


def format_difference(values: list[float], baseline: list[float]) -> str:
    """Format the difference of the means, and whether it is noise (t-test, pooled variance)."""
    difference = fmean(values) - fmean(baseline)
    if min(len(values), len(baseline)) < 2:
        return f"{difference:+.2f} (one seed)"
    degrees_of_freedom = len(values) + len(baseline) - 2
    squares = (len(values) - 1) * variance(values) + (len(baseline) - 1) * variance(baseline)
    pooled_variance = squares / degrees_of_freedom
    standard_error = math.sqrt(pooled_variance * (1 / len(values) + 1 / len(baseline)))
    is_noise = abs(difference) <= t_quantile(degrees_of_freedom) * standard_error
    return f"{difference:+.2f}{' (noise)' if is_noise else ''}"


# --- fairseq


def compare_with_fairseq(options: argparse.Namespace, data_dir: Path) -> None:
    """Train with both toolkits for each seed, and print the results of all finished runs."""
    for seed in options.seeds:
        budget = f"{options.updates} updates" if options.updates else f"{options.seconds:g} s"
        folder_name = " ".join(["nmt", *options.change, budget, str(seed)])
        nmt_result = options.output / folder_name / "result.json"
        if not nmt_result.exists():
            train_nmt(options, data_dir, nmt_result.parent, seed)
        fairseq_result = options.output / f"fairseq {budget} {seed}" / "result.json"
        if options.fairseq and not fairseq_result.exists():
            nmt_seconds = json.loads(nmt_result.read_text(encoding="utf-8"))["cpu_seconds"]
            train_fairseq(options, data_dir, fairseq_result.parent, seed, nmt_seconds)
    for path in sorted(options.output.glob("*/result.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        cells = [path.parent.name] + [f"{key} {value}" for key, value in result.items()]
        print("\t".join(cells))


def train_nmt(options: argparse.Namespace, data_dir: Path, folder: Path, seed: int) -> None:
    """Train with nmt, average, translate and score; write the result to `folder`."""
    settings = (SAME_SCHEDULE if options.updates else SAME_TIME).split()
    settings += [f"data_dir={data_dir}", f"seed={seed}", *options.change]
    updates = options.updates or plan_updates(settings, folder, options.seconds)
    run_dir = folder / "run"
    start_seconds = cpu_seconds()
    settings += [
        f"run_dir={run_dir}",
        f"max_updates={updates}",
        f"validate_every_updates={updates}",
        f"checkpoint_every_updates={max(1, updates // 60)}",
        f"keep_last={NUM_AVERAGED}",
        f"average_last={NUM_AVERAGED}",
    ]
    run_nmt("train", settings)
    result: dict[str, float] = {
        "updates": updates,
        "cpu_seconds": round(cpu_seconds() - start_seconds),
        "valid_loss": last_valid_loss(run_dir),
    }
    run_nmt("average", [f"run_dir={run_dir}"])
    hypotheses = translate_test_set(run_dir, data_dir, folder / "test.out")
    write_result(folder, result | score_test_set(hypotheses, data_dir))


def plan_updates(settings: list[str], folder: Path, seconds: float) -> int:
    """Estimate by two short runs how many updates take `seconds` of CPU time."""
    run_seconds = {}
    for updates in (10, 40):
        start_seconds = cpu_seconds()
        length = [f"max_updates={updates}", f"validate_every_updates={updates}"]
        run_nmt("train", [*settings, f"run_dir={folder}-{updates}-updates", *length])
        run_seconds[updates] = cpu_seconds() - start_seconds
    seconds_per_update = (run_seconds[40] - run_seconds[10]) / 30
    return max(1, 10 + round((seconds - run_seconds[10]) / seconds_per_update))


def train_fairseq(
    options: argparse.Namespace, data_dir: Path, folder: Path, seed: int, nmt_seconds: float
) -> None:
    """Train with fairseq, average its last checkpoints, translate and score.

    With `--seconds`, training may use as much CPU time as nmt used.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pieces_dir = write_pieces(data_dir, options.output / "pieces")
    command = [options.fairseq, "-m", "fairseq_cli.train", str(pieces_dir), *FAIRSEQ_TRAIN.split()]
    for side in ("encoder", "decoder"):
        command += [f"--{side}-{key}={value}" for key, value in FAIRSEQ_SIZES.items()]
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


if __name__ == "__main__":
    os.environ.update(ONE_THREAD)
    main()
