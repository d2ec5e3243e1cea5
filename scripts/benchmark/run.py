"""Measures nmt beside other toolkits, on the same work, within one run.

python scripts/benchmark/run.py                    everything, about 25 minutes on two cores
python scripts/benchmark/run.py --quick            the same with less of it
python scripts/benchmark/run.py --only train --engines nmt,fairseq --models base
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import models
import startup
import training
import translation
from corpus import PreparedCorpus, Source
from environments import ROOT
from machine import facts
from report import Section, markdown, write
from settings import Settings, parse_model

from nmt.checkpoint import find_model
from nmt.config import ModelConfig
from nmt.errors import NmtError

_PARTS = ("train", "translate", "startup")


def main() -> int:
    """Run the parts asked for and write the report; return the exit status."""
    args = parse_args()
    start_seconds = time.perf_counter()
    settings = Settings(
        cache_dir=args.cache.resolve(),
        engines=args.engines,
        repeats=args.repeats,
        steps=args.steps,
        batch_tokens=args.batch_tokens,
        update_tokens=args.update_tokens or args.batch_tokens,
        threads=args.threads,
        device=args.device,
        dtype=args.dtype or ("float32" if args.device == "cpu" else "bfloat16"),
        installs=not args.here,
        num_lines=args.lines,
    )
    try:
        source = Source(args.corpus, args.src, args.tgt, args.vocab_size)
        sections = measure(args, PreparedCorpus(source, settings.cache_dir), settings)
    except NmtError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    known = facts(sys.argv, time.perf_counter() - start_seconds)
    paths = write(args.output, args.name, known, sections)
    print(markdown("Speed beside other toolkits", known, sections))
    print(f"written: {', '.join(map(str, paths))}", file=sys.stderr)
    return 0


def measure(args: argparse.Namespace, corpus: PreparedCorpus, settings: Settings) -> list[Section]:
    """Run one comparison after the other."""
    sections = []
    if "train" in args.only:
        for name, model in args.models:
            settings.say(f"training, {name}:")
            sections.append(training.compare(name, model, corpus, settings))
    if {"translate", "startup"} & set(args.only):
        name, model = args.translate_model
        run_dir = models.train(name, model, corpus, settings, args.model_updates)
        if "translate" in args.only:
            sections += translate(args, model, run_dir, corpus, settings)
        if "startup" in args.only:
            sections.append(startup.compare(find_model(run_dir), settings))
    return sections


def translate(
    args: argparse.Namespace,
    model: ModelConfig,
    run_dir: Path,
    corpus: PreparedCorpus,
    settings: Settings,
) -> list[Section]:
    """Compare translation with every beam size, at real and at fixed lengths."""
    folders = models.convert(run_dir, corpus.folder / f"exports-{run_dir.name}")
    sections = []
    for beam_size in args.beams:
        for length in args.lengths:
            settings.say(f"translation, beam {beam_size}, {length or 'real'} length:")
            sections.append(
                translation.compare(
                    model, folders, corpus, settings, beam_size=beam_size, fixed_length=length
                )
            )
    return sections


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", type=_words, default=list(_PARTS), help="parts: train, translate, startup")
    add("--engines", type=_words, default=[], help="names with commas between; default all")
    add("--models", type=_models, default=_models("base,small"), help="base, big, small or sizes")
    add("--translate-model", type=parse_model, default=parse_model("small"), help="its sizes")
    add("--model-updates", type=int, default=600, help="updates of training that model")
    add("--beams", type=_numbers, default=[4, 1])
    add("--lengths", type=_numbers, default=[0, 16], help="of translations; 0 is the model's own")
    add("--corpus", type=Path, help="folder with train.en(.gz) and so on; default: the demo's")
    add("--src", default="en", help="source language, the end of file names")
    add("--tgt", default="de", help="target language")
    add("--vocab-size", type=int, default=8000)
    add("--batch-tokens", type=int, default=4096, help="bound on a batch: rows * longest side")
    add("--update-tokens", type=int, help="target tokens an update; default: a batch")
    add("--repeats", type=int, default=3, help="turns of each engine")
    add("--steps", type=int, default=1, help="training steps a turn")
    add("--lines", type=int, default=400, help="lines translated a turn")
    add("--threads", type=int, default=1, help="of each engine")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 on a GPU")
    add("--here", action="store_true", help="install nothing: look for peers in this environment")
    add("--cache", type=Path, default=Path.home() / ".cache" / "nmt-benchmark")
    add("--output", type=Path, default=ROOT / "docs" / "benchmarks")
    add("--name", default="latest", help="of the two files written there")
    return parser.parse_args()


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _numbers(text: str) -> list[int]:
    return [int(word) for word in _words(text)]


def _models(text: str) -> list:
    return [parse_model(word) for word in _words(text)]


if __name__ == "__main__":
    sys.exit(main())
