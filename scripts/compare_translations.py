"""Translations after the same CPU time, here and in fairseq: same text and SentencePiece model.

    python scripts/compare_translations.py --src train.en.gz --tgt train.de.gz --seconds 7200 \\
        --output build/tatoeba --fairseq environments/fairseq/bin/python

Held-out sets of 2,000 pairs each are taken out of the text, with every pair that has a sentence of
them. Each run trains until its process has used so many seconds, averages its last 8 checkpoints
and translates the test set with beam 5; both are scored alike. Here a cosine schedule ends with the
seconds, by the time of an update in two short runs before. fairseq, whose schedule has no end, is
stopped then, or after what our run took if that was more; its recipes are `iwslt`, that of its
documentation for corpora of this size (about 35 million weights), and `small`, with our sizes and
the settings of scripts/compare_learning.py.
What is done is not done again; what was interrupted goes on, here without a figure of its CPU time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ablation import cpu_seconds
from compare_learning import FAIRSEQ, SIZES, one_thread, run, write_pieces

from nmt.config import Metric
from nmt.data.text import read_lines
from nmt.data.tokenizer import Tokenizer
from nmt.evaluate import evaluate

NUM_AVERAGED = 8
OURS = """experiment=multi30k_quick model.dropout=0.1 tracker=[] valid_bleu=false device=cpu
    num_threads=1 keep_best=1"""
DATA = "--dataset-impl raw --source-lang src --target-lang tgt --task translation --cpu"
IWSLT = f"""{DATA} --num-workers 0 --no-progress-bar --log-format json --log-interval 50
    --arch transformer_iwslt_de_en --share-all-embeddings --dropout 0.3 --weight-decay 0.0001
    --criterion label_smoothed_cross_entropy --label-smoothing 0.1
    --optimizer adam --adam-betas (0.9,0.98) --clip-norm 0.0
    --lr 5e-4 --lr-scheduler inverse_sqrt --warmup-updates 4000 --max-tokens 4096"""
SMALL = FAIRSEQ.replace("--dropout 0.2", "--dropout 0.1").split("--validate-interval")[0]
SMALL += " --max-tokens 2250 " + " ".join(
    f"--{side}-{key}={value}" for side in ("encoder", "decoder") for key, value in SIZES.items()
)
RECIPES = {"iwslt": IWSLT, "small": SMALL}
AVERAGE = """
import sys, torch
states = [torch.load(path, map_location="cpu", weights_only=False) for path in sys.argv[2:]]
for name, value in states[0]["model"].items():
    if value.is_floating_point():
        value.copy_(sum(state["model"][name].double() for state in states) / len(states))
torch.save(states[0], sys.argv[1])
"""


def main() -> None:
    """Run what is asked for, and print the figures of all that is done."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--src", nargs="+", required=True, metavar="FILE")
    parser.add_argument("--tgt", nargs="+", required=True, metavar="FILE")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="CPU seconds of a training")
    parser.add_argument("--fairseq", help="Python of an environment with fairseq-fixed")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--change", action="append", default=[], help="setting of ours")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    data_dir, end = options.output / "data", f"{options.seconds:g}s-{options.seed}"
    prepare(options.src, options.tgt, data_dir)
    ours = options.output / "-".join(["nmt", *options.change, end])
    if not (ours / "result.json").exists():
        train_ours(data_dir, ours, options.seconds, [f"seed={options.seed}", *options.change])
    for name in options.recipes if options.fairseq else []:
        folder = options.output / f"fairseq-{name}-{end}"
        if not (folder / "result.json").exists():
            pieces = options.output / "pieces"
            if not pieces.exists():
                write_pieces(data_dir, pieces)
            command = [options.fairseq, "-m", "fairseq_cli.train", str(pieces)]
            command += [*RECIPES[name].split(), f"--seed={options.seed}"]
            used = json.loads((ours / "result.json").read_text(encoding="utf-8"))["CPU seconds"]
            train_fairseq(command, data_dir, folder, max(options.seconds, used or 0))
    for path in sorted(options.output.glob("*/result.json")):
        figures = json.loads(path.read_text(encoding="utf-8"))
        print(path.parent.name, *(f"{key} {value}" for key, value in figures.items()), sep="\t")


def prepare(src: list[str], tgt: list[str], data_dir: Path) -> None:
    """Preprocess the text, once, and take held-out sets out of it."""
    if not data_dir.exists():
        files = [f"data.train.src=[{','.join(src)}]", f"data.train.tgt=[{','.join(tgt)}]"]
        files += [f"data.{split}.num_pairs=2000" for split in ("valid", "test")]
        files += ["data.src_lang=en", "data.tgt_lang=de", "tokenizer.vocab_size=8000"]
        run([sys.executable, "-m", "nmt", "preprocess", *files, f"data_dir={data_dir}"])


def train_ours(data_dir: Path, folder: Path, seconds: float, settings: list[str]) -> None:
    """Train with nmt for so many CPU seconds, translate and score."""
    nmt = [sys.executable, "-m", "nmt"]
    train = [*nmt, "train", *OURS.split(), f"data_dir={data_dir}", *settings]
    plan = folder / "plan.json"
    is_new = not plan.exists()
    if is_new:
        used = []
        for updates in (10, 40):
            before = cpu_seconds()
            short = [f"max_updates={updates}", f"run_dir={folder}-first-{updates}"]
            run([*train, *short, f"validate_every_updates={updates}"])
            used.append(cpu_seconds() - before)
        an_update = (used[1] - used[0]) / 30
        updates = max(1, round((seconds - used[0]) / an_update) + 10)
        folder.mkdir(parents=True, exist_ok=True)
        plan.write_text(json.dumps([updates, max(1, updates // 60)]), encoding="utf-8")
    updates, every = json.loads(plan.read_text(encoding="utf-8"))
    before = cpu_seconds()
    paces = [f"max_updates={updates}", f"validate_every_updates={updates}"]
    paces += [f"checkpoint_every_updates={every}"]
    paces += [f"{key}={NUM_AVERAGED}" for key in ("keep_last", "average_last")]
    run([*train, *paces, f"run_dir={folder / 'run'}"])
    used_now = cpu_seconds() - before
    run([*nmt, "average", f"run_dir={folder / 'run'}"])
    run([*nmt, "translate", f"model_dir={folder / 'run'}", "beam_size=5", "num_threads=1",
         f"input={data_dir / 'test.src'}", f"output={folder / 'test.out'}"])  # fmt: skip
    lines = list(read_lines(folder / "test.out"))
    write_result(folder, data_dir, lines, updates, used_now if is_new else None)


def train_fairseq(command: list[str], data_dir: Path, folder: Path, seconds: float) -> None:
    """Train with fairseq for so many CPU seconds, translate and score."""
    every = max(10, round(seconds / 100))  # updates; one takes about a second
    command += [f"--save-interval-updates={every}", f"--keep-interval-updates={NUM_AVERAGED}"]
    command += ["--no-epoch-checkpoints", "--disable-validation", f"--save-dir={folder}"]
    folder.mkdir(parents=True, exist_ok=True)
    spent = folder / "seconds.txt"  # also by what was interrupted
    used = before = float(spent.read_text(encoding="utf-8")) if spent.exists() else 0.0
    # torch would not read what fairseq saved
    environment = one_thread() | {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
    with (folder / "log.txt").open("a", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        while process.poll() is None and used < seconds:
            time.sleep(0.2)
            used = max(used, before + process_seconds(process.pid))
            spent.write_text(f"{used}", encoding="utf-8")
        if used < seconds:
            raise SystemExit(f"fairseq ended after {used:.0f} CPU seconds; see {folder}/log.txt")
        process.kill()
        process.wait()
    saved = {int(p.stem.split("_")[-1]): p for p in folder.glob("checkpoint_*_*.pt")}
    if not saved:
        raise SystemExit(f"fairseq saved nothing in {seconds:g} seconds; give it more")
    python, average = command[0], folder / "average.pt"
    paths = [str(saved[update]) for update in sorted(saved)]
    run([python, "-c", AVERAGE, str(average), *paths])
    generate = [python, "-m", "fairseq_cli.generate", command[3], *DATA.split()]
    generate += ["--gen-subset=test", f"--path={average}", "--beam=5", "--max-tokens=4000"]
    generate += ["--max-len-a=1", "--max-len-b=50"]  # as here
    done = subprocess.run(generate, check=True, capture_output=True, text=True, env=environment)
    found = [line.split("\t") for line in done.stdout.split("\n") if line.startswith("H-")]
    tokenizer = Tokenizer.load(data_dir / "tokenizer.model")
    ids = {piece: i for i, piece in enumerate(tokenizer.all_pieces())}
    rows = {int(row[0][2:]): [ids[piece] for piece in row[2].split()] for row in found}
    lines = [tokenizer.decode(rows[i]) for i in range(len(rows))]
    write_result(folder, data_dir, lines, max(saved), used)


def process_seconds(pid: int) -> float:
    """Return the CPU time of a process that goes on; 0 where it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def write_result(
    folder: Path, data_dir: Path, lines: list[str], updates: int, used: float | None
) -> None:
    """Score translations of the test set, and write figures and text."""
    references = [list(read_lines(data_dir / "test.tgt"))]
    bleu, chrf = evaluate(lines, references, metrics=[Metric.bleu, Metric.chrf])
    (lower,) = evaluate(lines, references, metrics=[Metric.bleu], lowercase=True)
    figures: dict[str, Any] = {"BLEU": bleu.value, "lower-cased": lower.value, "chrF2": chrf.value}
    figures = {name: round(value, 2) for name, value in figures.items()}
    figures |= {"updates": updates, "CPU seconds": used and round(used)}
    (folder / "test.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    (folder / "result.json").write_text(json.dumps(figures) + "\n", encoding="utf-8")


if __name__ == "__main__":
    os.environ.update(one_thread())
    main()
