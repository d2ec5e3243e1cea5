"""Measures nmt beside other toolkits, on the same work, within one run.

python scripts/benchmark/run.py                    everything, 22 minutes and more
python scripts/benchmark/run.py --quick            a look at everything, some minutes
python scripts/benchmark/run.py --only train --engines nmt,fairseq --models base
python scripts/benchmark/run.py --device cuda --here --corpus FOLDER --src en --tgt fr
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import models
import startup
import training
import translation
from corpus import PreparedCorpus, Source
from machine import facts
from options import parse_args
from report import Section, markdown, write
from settings import Settings

from nmt.checkpoint import find_model
from nmt.config import ModelConfig
from nmt.errors import NmtError


def main() -> int:
    """Run the parts asked for and write the report; return the exit status."""
    args = parse_args(__doc__)
    start_seconds = time.perf_counter()
    settings = Settings(
        cache_dir=args.cache.resolve(),
        engines=args.engines,
        repeats=args.repeats,
        steps=args.steps,
        turn_seconds=args.turn_seconds,
        batch_tokens=args.batch_tokens,
        update_tokens=args.update_tokens,
        threads=args.threads,
        device=args.device,
        dtype=args.dtype,
        installs=not args.here,
        num_lines=args.lines,
    )
    name = args.name or ("cpu" if args.device == "cpu" else "gpu") + "-quick" * args.quick
    sections = []
    try:
        source = Source(args.corpus, args.src, args.tgt, args.vocab_size)
        corpus = PreparedCorpus(source, settings.cache_dir)
        for section in measure(args, corpus, settings):
            sections.append(section)
            known = facts(sys.argv, time.perf_counter() - start_seconds)
            paths = write(args.output, name, known, sections)  # what is measured stays
    except NmtError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(markdown("Speed beside other toolkits", known, sections))
    print(f"written: {', '.join(map(str, paths))}", file=sys.stderr)
    return 0


def measure(
    args: argparse.Namespace, corpus: PreparedCorpus, settings: Settings
) -> Iterator[Section]:
    """Run one comparison after the other."""
    if "train" in args.only:
        for name, model in args.models:
            settings.say(f"training, {name}:")
            yield training.compare(name, model, corpus, settings)
    if {"translate", "startup"} & set(args.only):
        name, model = args.translate_model
        run_dir = models.train(name, model, corpus, settings, args.model_updates)
        if "translate" in args.only:
            yield from translate(args, model, run_dir, corpus, settings)
        if "startup" in args.only:
            yield startup.compare(find_model(run_dir), settings)


def translate(
    args: argparse.Namespace,
    model: ModelConfig,
    run_dir: Path,
    corpus: PreparedCorpus,
    settings: Settings,
) -> Iterator[Section]:
    """Compare translation with every beam size, at real and at fixed lengths."""
    exports = models.convert(run_dir, corpus.folder / f"exports-{run_dir.name}")
    for beam_size in args.beams:
        for length in args.lengths:
            settings.say(f"translation, beam {beam_size}, {length or 'real'} length:")
            kind = {"beam_size": beam_size, "fixed_length": length}
            yield translation.compare(model, exports, corpus, settings, **kind)


if __name__ == "__main__":
    sys.exit(main())
