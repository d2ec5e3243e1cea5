"""Settings of `nmt-visualize`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from nmt.config.model import ModelConfig
from nmt.config.options import DEFAULT_DATA_DIR, DEFAULT_RUN_DIR, check_ranges, option, require
from nmt.config.runtime import RuntimeConfig
from nmt.config.training import TrackerName


class Picture(str, Enum):
    """What can be drawn, and the upload of a run to trackers."""

    attention = "attention"
    mask = "mask"
    positions = "positions"
    schedule = "schedule"
    smoothing = "smoothing"
    architecture = "architecture"
    embeddings = "embeddings"
    search = "search"
    run = "run"
    data = "data"
    report = "report"
    checkpoints = "checkpoints"
    upload = "upload"


class Theme(str, Enum):
    """The background of a picture; pages follow the browser."""

    light = "light"
    dark = "dark"


class AttentionKind(str, Enum):
    """Which of the three kinds of attention."""

    cross = "cross"  # of the decoder to the source
    encoder = "encoder"  # of the source to itself
    decoder = "decoder"  # of the target to itself


@dataclass(kw_only=True)
class VisualizeConfig(RuntimeConfig):
    """Settings of `nmt-visualize`."""

    what: Picture | None = option(None, "what to draw; null lists what there is")
    output: str | None = option(None, "file: .png, .svg, .pdf or .html; null: WHAT.png or .html")
    theme: Theme = option(Theme.light, "background of .png, .svg and .pdf: light or dark")
    model_dir: list[str] = option([DEFAULT_RUN_DIR], "run, checkpoint or model folder")
    run_dir: list[str] = option([DEFAULT_RUN_DIR], "run folders; what=run compares several")
    data_dir: str = option(DEFAULT_DATA_DIR, "what=data: data folder")
    src: str | None = option(None, "source sentence, or a file of them; null: lines of stdin")
    tgt: str | None = option(None, "its translation, or a file of them; null: what search finds")
    beam_size: int | None = option(None, "beam of the search; null: the model's", low=1)
    kind: AttentionKind = option(AttentionKind.cross, "attention as .png: cross, encoder, decoder")
    layers: list[int] = option([], "attention as .png: layers, from 1; empty: all")
    heads: list[int] = option([], "attention as .png: heads, from 1; empty: all; 0: their mean")
    words: list[str] = option([], "what=embeddings: words whose neighbors are listed")
    num_pieces: int = option(300, "what=embeddings: pieces that are projected", low=3)
    model: ModelConfig = option(ModelConfig, "what=architecture, positions: the architecture")
    vocab_size: int = option(37_000, "what=architecture: entries of the vocabulary", low=5)
    length: int = option(100, "what=positions: positions; what=mask: tokens, at most 40", low=2)
    dimensions: list[int] = option([], "what=positions: dimensions drawn as curves; empty: four")
    schedules: list[str] = option(
        ["512:4000", "512:8000", "256:4000"],
        "what=schedule: D_MODEL:WARMUP[:noam, inverse_sqrt, cosine, linear or wsd[:PEAK]]",
    )
    steps: int = option(20_000, "what=schedule: updates that are drawn", low=2)
    label_smoothing: float = option(0.1, "what=smoothing: share spread evenly", low=0, below=1)
    split: str = option("test", "what=report: split that is translated; valid where it is missing")
    tracker: list[TrackerName] = option([], "what=upload: tensorboard, wandb, mlflow, trackio")
    num_sentences: int = option(
        0, "what=checkpoints, upload: validation pairs whose attention is drawn", low=0
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        for name in ("layers", "heads", "dimensions"):
            least = int(name == "layers")
            for value in getattr(self, name):
                require(value >= least, name, value, f"must be at least {least}")
        peak = r"(:noam|:(inverse_sqrt|cosine|linear|wsd)(:\d*\.?\d+(e-?\d+)?)?)?"
        pattern = rf"(?!0)\d*[02468]:[1-9]\d*{peak}"
        for text in self.schedules:
            rule = "write D_MODEL:WARMUP, or with a name, 512:4000:cosine, or a peak too"
            require(bool(re.fullmatch(pattern, text)), "schedules", text, rule)
