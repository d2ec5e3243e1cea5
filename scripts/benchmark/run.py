"""Benchmark nmt and other toolkits on the same work, in turn within one run.

python scripts/benchmark/run.py                    everything
python scripts/benchmark/run.py --quick            a short run of everything, a few minutes
python scripts/benchmark/run.py --only train --engines nmt,fairseq --models base
python scripts/benchmark/run.py --device cuda --here --corpus FOLDER --src en --tgt fr
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import models
from comparisons import compare_startup, compare_training, compare_translation
from corpus import PreparedCorpus
from latency import compare_latency
from report import Section, describe_machine, markdown, write
from settings import Settings, parse_args

from nmt.checkpoint import find_model
from nmt.errors import NmtError


def main() -> int:
    """Run the requested parts and write the report; return the exit status."""
    settings = parse_args(__doc__)
    start_seconds = time.perf_counter()
    sections = []
    try:
        corpus = PreparedCorpus(settings)
        for section in run_parts(corpus, settings):
            sections.append(section)
            facts = describe_machine(sys.argv, time.perf_counter() - start_seconds)
            # written after each part, so that an interrupted run keeps its figures
            paths = write(settings.output, settings.name, facts, sections)
    except NmtError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(markdown(facts, sections))
    print(f"written: {', '.join(map(str, paths))}", file=sys.stderr)
    return 0


def run_parts(corpus: PreparedCorpus, settings: Settings) -> Iterator[Section]:
    """Yield the results of one comparison after the other."""
    if "train" in settings.only:
        for name, model in settings.models:
            settings.say(f"training, {name}:")
            yield compare_training(name, model, corpus, settings)
    if settings.only == ["train"]:
        return
    if "latency" in settings.only:
        yield from run_latency(corpus, settings)
    if not {"translate", "startup"} & set(settings.only):
        return
    name, model = settings.translate_model
    run_dir = models.train(name, model, corpus, settings)
    if "translate" in settings.only:
        exports = models.export_all(run_dir, corpus.folder / f"exports-{run_dir.name}")
        for beam_size in settings.beams:
            for fixed_length in settings.lengths:
                settings.say(f"translation, beam {beam_size}, {fixed_length or 'free'} length:")
                yield compare_translation(
                    model, exports, corpus, settings, beam_size=beam_size, fixed_length=fixed_length
                )
    if "startup" in settings.only:
        yield compare_startup(find_model(run_dir), settings)


def run_latency(corpus: PreparedCorpus, settings: Settings) -> Iterator[Section]:
    """Translate line by line with a trained model of each size."""
    for name, model in settings.latency_models:
        run_dir = models.train(name, model, corpus, settings)
        exports = models.export_all(run_dir, corpus.folder / f"exports-{run_dir.name}")
        for beam_size in settings.beams:
            settings.say(f"one line, {name}, beam {beam_size}:")
            yield compare_latency(name, model, exports, corpus, settings, beam_size=beam_size)


if __name__ == "__main__":
    sys.exit(main())
