"""Compare variants of nmt, ways to regularize, the rows of table 3 of the paper, and fairseq.

    python scripts/compare.py variants --text multi30k --output build/ablation
    python scripts/compare.py variants ... --only baseline R-Drop --seeds 1 \\
        --results docs/ablation.jsonl --table docs/ablation.md
    python scripts/compare.py regularization --text multi30k --output build/regular
    python scripts/compare.py paper --text multi30k --output build/table-3 --table build/table-3.md
    python scripts/compare.py paper ... --device cuda --jobs 8 --updates 8000
    python scripts/compare.py fairseq --text multi30k --output build/learning --updates 1200 \\
        --fairseq environments/fairseq/bin/python
    python scripts/compare.py fairseq ... --seconds 2100 --change tokens_per_update=1400

`--text` is a folder with train.en and train.de (or .gz); 2,000 pairs are held out if there is no
val.* or test_2016_flickr.*. All runs use one thread. Runs and results go to `--output`. Finished
runs are not repeated, and an interrupted run is resumed. `--results` continues another file of
results, which must be of the same text. `--jobs` runs several at the same time. The next three
paragraphs describe the tables of `variants`, `paper` and `regularization`, on whose pages they are.

The baseline is a small model that learns fast: `experiment=multi30k_quick` with 3+3 layers of 128,
one thread and the other settings of `BASELINE`. A variant changes some of these settings. Its last
checkpoint translates test_2016_flickr with beam 5. A row of the table has means over the seeds with
half of the 95 % confidence interval (Student's t). Its last column is the difference to the BLEU of
the baseline, marked as noise if it lies within the 95 % interval of the difference (t with pooled
variance). Of 20 variants without an effect, one is expected outside its interval. Variants named x2
or x4 have two or four times the updates, and are compared with the baseline of the same number of
updates.

Table 3 of "Attention Is All You Need" changes the base model in one way at a time. This table
repeats all its rows with a smaller base model: 3+3 layers instead of 6+6, d_model 128 and d_ff 512
instead of 512 and 2048, 8 heads of 16 instead of 64. A row scales the number that the paper changed
by the same factor. As in the paper, models have post-norm, train with the schedule of section 5.3,
and are not averaged; the big model trains three times as long. Perplexity is per token of the
validation set. BLEU is measured on test_2016_flickr with beam 5, while the paper's is measured on
newstest2013. In rows (B) the size of values changes with the size of keys. Means are over the
seeds, with half of the 95 % confidence interval (Student's t); a difference to the BLEU of the base
model is marked as noise if it lies within its 95 % interval (t with pooled variance). Of 20 rows
without an effect, one is expected outside its interval.

The baseline of this table has rotary positions, Muon, dropout 0.1, label smoothing 0.1 and the
other settings of `REGULARIZED`; an epoch of Multi30k has 493,000 target tokens. A variant changes
some of these settings. R-Drop and SimCut run every batch twice, in 2.3 to 2.5 times the time: the
baseline with twice the updates takes a little less. A model is the last checkpoint, or the average
of the last eight, and translates test_2016_flickr with beam 5. The validation loss is the last
checkpoint's. A row has means over the seeds with half of the 95 % confidence interval (Student's
t). Its last column is the difference to the BLEU of the baseline, marked as noise if it lies within
its 95 % interval (t with pooled variance). Of 20 variants without an effect, one is expected
outside its interval.

`fairseq` trains models of the same size on the same SentencePiece tokens with both toolkits. With
`--updates`, both have the same schedule. With `--seconds`, both have the same CPU time: nmt has a
cosine schedule that ends with the time, and fairseq is stopped after as much CPU time as nmt used.
Both train in float32. An interrupted training starts again, so that its CPU time is complete.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from statistics import fmean, stdev, variance

import torch
from compare_fairseq import compare_with_fairseq
from training_runs import (
    ONE_THREAD,
    SHARED_SETTINGS,
    last_valid_loss,
    prepare,
    run_nmt,
    score_test_set,
    translate_test_set,
)

import nmt
from nmt.checkpoint import list_checkpoints, load_weights

# settings of `variants`
BASELINE = f"""{SHARED_SETTINGS} model.d_model=128 model.d_ff=512 model.dropout=0.1
    optimizer.warmup_steps=300 optimizer.peak_learning_rate=0.0035
    tokens_per_update=700 max_tokens=1000 keep_last=1 average_last=1"""
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

# settings of `regularization`
REGULARIZED = f"""{SHARED_SETTINGS} model.d_model=128 model.d_ff=512 model.dropout=0.1
    model.positions=rotary optimizer.name=muon optimizer.warmup_steps=600
    optimizer.peak_learning_rate=0.0035
    tokens_per_update=2000 max_tokens=2250 keep_last=1 average_last=1"""
REGULARIZERS = {
    "baseline": "",
    "baseline x2": "",
    "dropout 0": "model.dropout=0.0",
    "dropout 0.2": "model.dropout=0.2",
    "dropout 0.3": "model.dropout=0.3",
    "label smoothing 0": "label_smoothing=0.0",
    "label smoothing 0.2": "label_smoothing=0.2",
    "BPE-dropout": "subword_sampling=0.1",
    "word dropout": "noise.word_dropout=0.1",
    "R-Drop": "r_drop=5",
    "R-Drop, dropout 0.3": "r_drop=5 model.dropout=0.3",
    "SimCut": "simcut=3",
    "SimCut, dropout 0.3": "simcut=3 model.dropout=0.3",
    "EMA": "ema_decay=0.999",
    "average of 8": "keep_last=8 average_last=8",
    "AdamW": "optimizer.name=adamw",
    "schedule-free AdamW": """optimizer.name=schedule_free optimizer.schedule=constant
        optimizer.peak_learning_rate=0.008 optimizer.beta1=0.95 optimizer.averaging_power=2""",
}

# settings of `paper`
PAPER_BASE = f"""{SHARED_SETTINGS} model.d_model=128 model.d_ff=512 model.num_heads=8
    model.dropout=0.1 model.norm=post
    optimizer.schedule=noam optimizer.peak_learning_rate=null optimizer.warmup_steps=800
    optimizer.max_grad_norm=0
    tokens_per_update=2000 max_tokens=2250 keep_last=1 average_last=1"""
PAPER_ROWS = {
    "base": "",
    "(A) 1 head": "model.num_heads=1",
    "(A) 4 heads": "model.num_heads=4",
    "(A) 16 heads": "model.num_heads=16",
    "(A) 32 heads": "model.num_heads=32",
    "(B) keys of 4": "model.head_size=4",
    "(B) keys of 8": "model.head_size=8",
    "(C) 1+1 layers": "model.num_encoder_layers=1 model.num_decoder_layers=1",
    "(C) 2+2 layers": "model.num_encoder_layers=2 model.num_decoder_layers=2",
    "(C) 4+4 layers": "model.num_encoder_layers=4 model.num_decoder_layers=4",
    "(C) d_model 64": "model.d_model=64",
    "(C) d_model 256": "model.d_model=256",
    "(C) d_ff 256": "model.d_ff=256",
    "(C) d_ff 1024": "model.d_ff=1024",
    "(D) dropout 0": "model.dropout=0.0",
    "(D) dropout 0.2": "model.dropout=0.2",
    "(D) label smoothing 0": "label_smoothing=0.0",
    "(D) label smoothing 0.2": "label_smoothing=0.2",
    "(E) learned positions": "model.positions=learned",
    "big x3": "model.d_model=256 model.d_ff=1024 model.num_heads=16 model.dropout=0.3",
}
# perplexity and BLEU on newstest2013 in table 3 of the paper
PAPER_SCORES = {
    "base": (4.92, 25.8),
    "(A) 1 head": (5.29, 24.9),
    "(A) 4 heads": (5.00, 25.5),
    "(A) 16 heads": (4.91, 25.8),
    "(A) 32 heads": (5.01, 25.4),
    "(B) keys of 4": (5.16, 25.1),
    "(B) keys of 8": (5.01, 25.4),
    "(C) 1+1 layers": (6.11, 23.7),
    "(C) 2+2 layers": (5.19, 25.3),
    "(C) 4+4 layers": (4.88, 25.5),
    "(C) d_model 64": (5.75, 24.5),
    "(C) d_model 256": (4.66, 26.0),
    "(C) d_ff 256": (5.12, 25.4),
    "(C) d_ff 1024": (4.75, 26.2),
    "(D) dropout 0": (5.77, 24.6),
    "(D) dropout 0.2": (4.95, 25.5),
    "(D) label smoothing 0": (4.67, 25.3),
    "(D) label smoothing 0.2": (5.47, 25.7),
    "(E) learned positions": (4.92, 25.7),
    "big x3": (4.33, 26.4),
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
    tokens_per_cpu_second: float | None  # target tokens of training; None if it was interrupted
    parameters: int
    about: str  # see `describe_conditions`


@dataclass
class Comparison:
    """Models that differ from the first one in a few settings, and the page of their results.

    `updates` is the number of updates of a variant whose name does not end in x2, x3 or x4.
    """

    base_settings: str
    variants: dict[str, str]
    default_names: list[str]
    updates: int
    introduction: str
    title: str
    command: str
    method_paragraph: int  # number of the paragraph of the module docstring on the method
    make_page: Callable[[Comparison, list[Result], int], str]


def main() -> None:
    """Run one of the comparisons."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    variants = commands.add_parser("variants", help="layers and methods of nmt")
    paper = commands.add_parser("paper", help="table 3 of the paper at a small size")
    regularization = commands.add_parser("regularization", help="dropout, R-Drop, SimCut, ...")
    fairseq = commands.add_parser("fairseq", help="nmt and fairseq")
    for command in (variants, paper, regularization, fairseq):
        command.add_argument("--text", type=Path, required=True, help="folder with train.en, ...")
        command.add_argument("--output", type=Path, required=True)
        command.add_argument(
            "--vocab-size", type=int, help="default: as in experiment=multi30k_quick"
        )
        command.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    add_comparison_options(variants, COMPARISONS["variants"])
    add_comparison_options(paper, COMPARISONS["paper"])
    add_comparison_options(regularization, COMPARISONS["regularization"])
    budget = fairseq.add_mutually_exclusive_group(required=True)
    budget.add_argument("--updates", type=int, help="updates of each training")
    budget.add_argument("--seconds", type=float, help="CPU seconds of each training")
    fairseq.add_argument("--fairseq", help="Python of an environment with fairseq-fixed")
    fairseq.add_argument("--change", action="append", default=[], help="another setting of nmt")
    fairseq.add_argument(
        "--fairseq-change",
        action="append",
        default=[],
        help="another option of fairseq, without dashes, such as warmup-updates=300",
    )
    options = parser.parse_args()
    data_dir = options.output / "data"
    prepare(options.text, data_dir, options.vocab_size)
    if options.command == "fairseq":
        compare_with_fairseq(options, data_dir)
    else:
        compare_variants(options, data_dir)


def add_comparison_options(command: argparse.ArgumentParser, comparison: Comparison) -> None:
    """Add the options that only comparisons of variants of nmt have."""
    names = list(comparison.variants)
    command.add_argument("--only", nargs="*", default=comparison.default_names, choices=names)
    command.add_argument(
        "--results", type=Path, help="JSON Lines file (default: a file in the output folder)"
    )
    command.add_argument("--table", type=Path, help="Markdown file to write")
    command.add_argument(
        "--updates",
        type=int,
        default=comparison.updates,
        help="updates of each training (default: %(default)s); the table leaves out other results",
    )
    command.add_argument("--device", default="cpu", help="cpu (default), cuda, cuda:1, ...")
    command.add_argument("--jobs", type=int, default=1, help="trainings at the same time")


def compare_variants(options: argparse.Namespace, data_dir: Path) -> None:
    """Measure the requested variants and print the table of all results."""
    comparison = COMPARISONS[options.command]
    results_file = options.results or options.output / f"{options.command}.jsonl"
    results = load_results(results_file)
    for result in results:
        if result.variant not in comparison.variants:
            sys.exit(f"{results_file} has a result of {result.variant!r}; give another --results")
    finished = {(result.variant, result.seed, result.updates) for result in results}
    missing: list[tuple[str, int]] = []  # variants and seeds without a result
    for seed in options.seeds:
        for name in sorted(options.only, key=length_factor, reverse=True):
            updates = options.updates * length_factor(name)
            if (name, seed, updates) not in finished:
                missing.append((name, seed))
    new_results = train_variants(options, data_dir, missing, results_file)
    page = comparison.make_page(comparison, results + new_results, options.updates)
    print(page)
    if options.table:
        options.table.write_text(page, encoding="utf-8")
    num_failures = len(missing) - len(new_results)
    if num_failures:
        sys.exit(f"{num_failures} of {len(missing)} trainings failed; run the command again")


def train_variants(
    options: argparse.Namespace,
    data_dir: Path,
    variants: list[tuple[str, int]],
    results_file: Path,
) -> list[Result]:
    """Measure variants, each with a seed, and append the results to a file.

    Returns the results of the trainings that did not fail.
    """
    results_file.parent.mkdir(parents=True, exist_ok=True)
    results = []
    with ThreadPoolExecutor(options.jobs) as executor:
        names = {}
        for name, seed in variants:
            future = executor.submit(measure_variant, options, data_dir, name, seed)
            names[future] = f"{name}, seed {seed}"
        try:
            for future in as_completed(names):
                if future.exception() is not None:
                    print_progress(f"{names[future]}: {future.exception()!r}")
                    continue
                result = future.result()
                results.append(result)
                with results_file.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(result)) + "\n")
                print_progress(f"{names[future]}: BLEU {result.bleu:.2f}")
        except KeyboardInterrupt:
            executor.shutdown(wait=False, cancel_futures=True)
            raise
    return results


def print_progress(text: str) -> None:
    """Print a line to stderr at once."""
    print(text, file=sys.stderr, flush=True)


def load_results(path: Path) -> list[Result]:
    """Read all results of a JSON Lines file, none if it does not exist."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [Result(**json.loads(line)) for line in lines]


def measure_variant(options: argparse.Namespace, data_dir: Path, name: str, seed: int) -> Result:
    """Train a variant, translate the test set with its last checkpoint or average, and score it.

    With several jobs, the output of the commands goes to a file beside the run.
    """
    updates = options.updates * length_factor(name)
    settings = variant_settings(COMPARISONS[options.command], name)
    name_in_path = re.sub("[^a-zA-Z0-9_.+]+", "-", name).strip("-")
    folder_name = f"{name_in_path}-{updates}-{seed}"
    run_dir = options.output / folder_name
    log = options.output / f"{folder_name}.log" if options.jobs > 1 else None
    has_checkpoint = bool(list_checkpoints(run_dir))
    arguments = [f"{key}={value}" for key, value in settings.items()]
    arguments += [f"data_dir={data_dir}", f"run_dir={run_dir}", f"seed={seed}"]
    arguments += [f"max_updates={updates}", f"validate_every_updates={updates}"]
    arguments += [f"checkpoint_every_updates={max(1, updates // 60)}", f"device={options.device}"]
    if options.device == "cpu":
        arguments.append("dtype=float32")  # so that all CPUs give comparable results
    train_seconds = run_nmt("train", arguments, log)
    tokens_per_second = int(settings["tokens_per_update"]) * updates / train_seconds
    model_dir = run_dir / "checkpoints" / "latest"
    if settings["average_last"] != "1":
        run_nmt("average", [f"run_dir={run_dir}", f"last={settings['average_last']}"], log)
        model_dir = run_dir / "average"
    hypotheses = translate_test_set(
        model_dir, data_dir, run_dir / "test.de", device=options.device, log=log
    )
    return Result(
        variant=name,
        seed=seed,
        updates=updates,
        valid_loss=last_valid_loss(run_dir),
        tokens_per_cpu_second=None if has_checkpoint else round(tokens_per_second, 1),
        parameters=sum(weight.numel() for weight in load_weights(model_dir).values()),
        about=describe_conditions(options.device, options.jobs),
        **score_test_set(hypotheses, data_dir),
    )


def describe_conditions(device: str, num_jobs: int) -> str:
    """Return the date, the versions of nmt and torch, and the CPU or GPU."""
    machine = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    if device.startswith("cuda"):
        machine = f"{torch.cuda.get_device_name(device)}, {num_jobs} jobs"
    versions = f"nmt {nmt.__version__}, torch {torch.__version__}"
    return f"{date.today()}, {versions}, {machine}"


def variant_settings(comparison: Comparison, name: str) -> dict[str, str]:
    """Return the settings of the baseline, changed by a variant."""
    settings = {}
    for setting in f"{comparison.base_settings} {comparison.variants[name]}".split():
        key, _, value = setting.partition("=")
        settings[key] = value
    return settings


def length_factor(name: str) -> int:
    """Return the factor of the number of updates in the name of a variant: 2 for "R-Drop x2"."""
    return int(name[-1]) if name.endswith((" x2", " x3", " x4")) else 1


def results_by_variant(
    comparison: Comparison, results: list[Result], updates: int
) -> dict[str, list[Result]]:
    """Return the results of each variant, without results of another number of updates."""
    variant_results: dict[str, list[Result]] = {name: [] for name in comparison.variants}
    for result in results:
        if result.updates == updates * length_factor(result.variant):
            variant_results[result.variant].append(result)
    return variant_results


def make_variants_page(comparison: Comparison, results: list[Result], updates: int) -> str:
    """Return a page with the method and a table of the results."""
    heading = ["variant", "seeds", "parameters", "validation loss", "BLEU", "lower-cased", "chrF2"]
    heading += ["tokens a CPU-second", "BLEU over baseline"]
    variant_results = results_by_variant(comparison, results, updates)
    rows = []
    for name, results_of_name in variant_results.items():
        factor = length_factor(name)
        baseline = "baseline" if factor == 1 else f"baseline x{factor}"
        baseline_results = [] if name == baseline else variant_results[baseline]
        if results_of_name:
            rows.append(make_row(results_of_name, baseline_results))
    return format_page(describe_method(comparison, variant_results, updates), heading, rows)


def make_row(results: list[Result], baseline_results: list[Result]) -> list[str]:
    """Return the cells of a variant; without results of the baseline, the last cell is empty."""
    row = [results[0].variant, str(len(results)), f"{results[0].parameters:,}"]
    for key, digits in NUM_DIGITS.items():
        values = [getattr(result, key) for result in results]
        row.append(format_mean([value for value in values if value is not None], digits))
    return [*row, compare_bleu(results, baseline_results)]


def make_paper_page(comparison: Comparison, results: list[Result], updates: int) -> str:
    """Return a page with the method and the rows beside the paper's figures."""
    heading = ["row", "seeds", "parameters", "perplexity", "BLEU", "BLEU over base"]
    heading += ["paper: perplexity", "BLEU", "BLEU over base"]
    variant_results = results_by_variant(comparison, results, updates)
    rows = []
    for name, results_of_name in variant_results.items():
        if not results_of_name:
            continue
        perplexities = [math.exp(result.valid_loss) for result in results_of_name]
        paper_perplexity, paper_bleu = PAPER_SCORES[name]
        _, paper_base_bleu = PAPER_SCORES["base"]
        difference = ""
        paper_difference = ""
        if name != "base":
            difference = compare_bleu(results_of_name, variant_results["base"])
            paper_difference = f"{paper_bleu - paper_base_bleu:+.1f}"
        row = [name, str(len(results_of_name)), f"{results_of_name[0].parameters:,}"]
        row.append(format_mean(perplexities, 2))
        row.append(format_mean([result.bleu for result in results_of_name], 2))
        row += [difference, f"{paper_perplexity:.2f}", f"{paper_bleu:.1f}", paper_difference]
        rows.append(row)
    return format_page(describe_method(comparison, variant_results, updates), heading, rows)


def describe_method(
    comparison: Comparison, variant_results: dict[str, list[Result]], updates: int
) -> list[str]:
    """Return the lines of a page above its table: how the results were measured."""
    machines = set()
    for results in variant_results.values():
        machines.update(result.about for result in results)
    settings = variant_settings(comparison, next(iter(comparison.variants)))
    return [
        f"# {comparison.title}",
        "",
        f"    {comparison.command}",
        "",
        comparison.introduction,
        "",
        (__doc__ or "").split("\n\n")[comparison.method_paragraph],
        "",
        f"{updates} updates of {settings['tokens_per_update']} target tokens. Measured with:",
        "",
        *(f"- {machine}" for machine in sorted(machines)),
        "",
    ]


def format_page(lines: list[str], heading: list[str], rows: list[list[str]]) -> str:
    """Return a page that ends with a table."""
    table = [f"| {' | '.join(heading)} |", "|" + " --- |" * len(heading)]
    table += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([*lines, *table, ""])


def compare_bleu(results: list[Result], baseline_results: list[Result]) -> str:
    """Format the difference to the mean BLEU of the baseline, "" if it has no results."""
    if not baseline_results:
        return ""
    baseline_bleu = [result.bleu for result in baseline_results]
    return format_difference([result.bleu for result in results], baseline_bleu)


def t_quantile(degrees_of_freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t, or a slightly larger one beyond the table."""
    return T_QUANTILES[min(degrees_of_freedom, len(T_QUANTILES)) - 1]


def format_mean(values: list[float], digits: int) -> str:
    """Format the mean, with half of its 95 % confidence interval if there are several values."""
    if not values:
        return ""
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


COMPARISONS = {
    "variants": Comparison(
        base_settings=BASELINE,
        variants=VARIANTS,
        default_names=[name for name in VARIANTS if length_factor(name) == 1],
        updates=1000,
        introduction="[layers.md](layers.md) and [training.md](training.md) describe the variants, "
        "[results.md](results.md) larger runs.",
        title="Layers and methods on Multi30k en-de",
        command="python scripts/compare.py variants --text multi30k --output build/ablation",
        method_paragraph=3,
        make_page=make_variants_page,
    ),
    "regularization": Comparison(
        base_settings=REGULARIZED,
        variants=REGULARIZERS,
        default_names=list(REGULARIZERS),
        updates=7500,
        introduction="[definitions.md](definitions.md) defines the methods.",
        title="Ways to regularize on Multi30k en-de",
        command="python scripts/compare.py regularization --text multi30k --output build/regular",
        method_paragraph=5,
        make_page=make_variants_page,
    ),
    "paper": Comparison(
        base_settings=PAPER_BASE,
        variants=PAPER_ROWS,
        default_names=list(PAPER_ROWS),
        updates=4000,
        introduction="The [guide](how-to/reproduce-table-3.md) repeats the table at full size.",
        title="Table 3 of the paper, small",
        command="python scripts/compare.py paper --text multi30k --output build/table-3",
        method_paragraph=4,
        make_page=make_paper_page,
    ),
}


if __name__ == "__main__":
    os.environ.update(ONE_THREAD)
    main()
