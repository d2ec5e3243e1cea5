"""Settings of `nmt-visualize`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from nmt.config.model import ModelConfig
from nmt.config.options import DEFAULT_DATA_DIR, DEFAULT_RUN_DIR, option
from nmt.config.runtime import RuntimeConfig
from nmt.config.search import override
from nmt.config.training import TrackerName


class Picture(str, Enum):
    """A picture to draw, pieces to print, or the upload of a run to trackers."""

    attention = "attention"
    mask = "mask"
    positions = "positions"
    schedule = "schedule"
    smoothing = "smoothing"
    steps = "steps"
    multi_head = "multi_head"
    decoding = "decoding"
    probabilities = "probabilities"
    vocabulary = "vocabulary"
    architecture = "architecture"
    embeddings = "embeddings"
    search = "search"
    run = "run"
    data = "data"
    report = "report"
    pieces = "pieces"
    upload = "upload"


class Theme(str, Enum):
    """The background of a picture; pages follow the browser."""

    light = "light"
    dark = "dark"


class AttentionKind(str, Enum):
    """The attention layers to draw."""

    cross = "cross"  # attention of the decoder to the source
    encoder = "encoder"  # self-attention of the source
    decoder = "decoder"  # self-attention of the target


# D_MODEL:WARMUP[:NAME[:PEAK]] with an even d_model; noam takes no PEAK
_SCHEDULE = re.compile(
    r"(?!0)\d*[02468]:[1-9]\d*"
    r"(:noam|:(inverse_sqrt|cosine|linear|constant|wsd)(:\d*\.?\d+(e-?\d+)?)?)?"
)


@dataclass(kw_only=True)
class VisualizeConfig(RuntimeConfig):
    """Settings of `nmt-visualize`."""

    what: Picture | None = option(None, "picture to draw; null: list all pictures")
    output: str | None = option(
        None, "file to write: .png, .svg, .pdf or .html; null: WHAT.png or WHAT.html"
    )
    theme: Theme = option(Theme.light, "background of .png, .svg and .pdf: light or dark")
    model_dir: list[str] = option(
        [DEFAULT_RUN_DIR], "run, checkpoint or model folder; what=pieces: also a data folder"
    )
    run_dir: list[str] = option([DEFAULT_RUN_DIR], "run folders; what=run compares several")
    data_dir: str = option(DEFAULT_DATA_DIR, "what=data: data folder")
    src: str | None = option(None, "source sentence, or a file of them; null: lines of stdin")
    tgt: str | None = option(
        None, "its translation, or a file of them; null: the best translation of the model"
    )
    beam_size: int | None = override("beam_size")
    kind: AttentionKind = option(AttentionKind.cross, "attention as .png: cross, encoder, decoder")
    layers: list[int] = option(
        [], "attention as .png: layers, from 1; empty: all; what=steps: one layer, by default 1"
    )
    heads: list[int] = option(
        [], "attention as .png: heads, from 1; empty: all; 0: their mean; what=steps: one head"
    )
    words: list[str] = option(
        [],
        "embeddings: words whose nearest neighbors are listed; steps: the word of src to follow; "
        "vocabulary: words of the table",
    )
    num_pieces: int = option(300, "what=embeddings: number of pieces that are projected", low=3)
    model: ModelConfig = option(
        ModelConfig, "what=architecture, multi_head, positions: the architecture"
    )
    vocab_size: int = option(37_000, "what=architecture: size of the vocabulary", low=5)
    length: int = option(
        100, "what=positions: number of positions; what=mask: number of tokens, at most 20", low=2
    )
    dimensions: list[int] = option(
        [], "what=positions: dimensions drawn as curves; empty: four of them"
    )
    schedules: list[str] = option(
        ["512:4000", "512:8000", "256:4000"],
        "what=schedule: D_MODEL:WARMUP[:NAME[:PEAK]] with the name of an optimizer.schedule",
    )
    steps: int = option(20_000, "what=schedule: number of updates that are drawn", low=2)
    label_smoothing: float = option(
        0.1,
        "what=smoothing, probabilities: probability spread evenly over the vocabulary",
        low=0,
        below=1,
    )
    split: str = option("test", "what=report: split to translate; valid if there is no test")
    tracker: list[TrackerName] = option([], "what=upload: tensorboard, wandb, mlflow, trackio")

    def check(self) -> None:
        for key, low in (("layers", 1), ("heads", 0), ("dimensions", 0)):
            is_in_range = all(number >= low for number in getattr(self, key))
            self.require(is_in_range, key, f"must be from {low} on")
        are_valid = all(_SCHEDULE.fullmatch(schedule) for schedule in self.schedules)
        rule = "write D_MODEL:WARMUP, D_MODEL:WARMUP:cosine or D_MODEL:WARMUP:cosine:PEAK"
        self.require(are_valid, "schedules", rule)
