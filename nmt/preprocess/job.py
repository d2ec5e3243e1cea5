"""One run of preprocessing: its settings, its sources and its work folder, and what makes two runs
the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from nmt.config import PreprocessConfig, resolve
from nmt.preprocess.pieces import Source, Unit
from nmt.preprocess.workspace import Workspace

_FORMAT = 1  # of the work folder
_MOST_UNITS = 1_000_000  # of a corpus
# settings that change no byte of a shard; weights and temperature stand in the index alone
_WITHOUT_EFFECT = ("data_dir", "num_threads", "step", "shard", "report_only")


@dataclass(frozen=True)
class Job:
    """What a run is about."""

    config: PreprocessConfig
    work: Workspace
    sources: Mapping[str, list[Source]]  # of the training corpora, by name in order
    held_out: Mapping[str, list[Source]]  # of valid and test

    def unit(self, corpus: str, number: int) -> Unit:
        """Return a unit of a corpus."""
        order = list(self.sources).index(corpus) * _MOST_UNITS + number
        return Unit(corpus, number, number * self.config.shard_pairs, order)

    def units(self, corpus: str, num_pairs: int) -> Iterator[Unit]:
        """Yield the units of a corpus that has so many pairs."""
        for number in range(-(-num_pairs // self.config.shard_pairs)):
            yield self.unit(corpus, number)


def fingerprint(job: Job) -> dict[str, Any]:
    """Return what decides the bytes of the data folder: settings, inputs and given models."""
    settings = asdict(job.config)
    for name in _WITHOUT_EFFECT:
        del settings[name]
    del settings["data"]["made_by"], settings["data"]["temperature"]
    for corpus in settings["data"]["corpora"].values():
        del corpus["weight"]
    given = [job.config.tokenizer.model, job.config.tokenizer.tgt_model]
    models = [path for name in given if name and (path := resolve(name)).is_file()]
    every = chain(*job.sources.values(), *job.held_out.values())
    return {
        "format": _FORMAT,
        **settings,
        "inputs": {str(path): _look(path) for source in every for path in source.paths},
        "models": [hashlib.sha256(path.read_bytes()).hexdigest() for path in models],
    }


def _look(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]
