"""Settings of `nmt-visualize`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from nmt.config.model import ModelConfig
from nmt.config.options import DEFAULT_DATA_DIR, DEFAULT_RUN_DIR, option
from nmt.config.runtime import RuntimeConfig
from nmt.config.search import override_search_setting
from nmt.config.training import TrackerName


class Picture(str, Enum):
    """The tasks of `nmt-visualize`: pictures, and two that draw nothing."""

    attention = "attention"  # attention weights of every layer and head
    mask = "mask"  # causal mask and padding mask
    positions = "positions"  # sinusoidal positional encodings
    schedule = "schedule"  # learning rate of every update
    smoothing = "smoothing"  # effect of label smoothing on targets and loss
    steps = "steps"  # computation of the attention of one word
    multi_head = "multi_head"  # diagram of multi-head attention
    decoding = "decoding"  # beam search, animated
    probabilities = "probabilities"  # next-token probabilities of a translation
    vocabulary = "vocabulary"  # pieces with their indices and one-hot vectors
    architecture = "architecture"  # diagram of a model, with shapes and numbers of parameters
    embeddings = "embeddings"  # embeddings projected to two dimensions
    search = "search"  # tree of a beam search
    run = "run"  # training curves of runs
    data = "data"  # statistics of a data folder
    report = "report"  # page with settings, curves and scores of a run
    pieces = "pieces"  # no picture: print the pieces of sentences
    upload = "upload"  # no picture: send the metrics of a run to trackers


class Theme(str, Enum):
    """The background of a figure. An HTML page has the theme that the browser prefers."""

    light = "light"
    dark = "dark"


class AttentionKind(str, Enum):
    """The attention layers to draw."""

    cross = "cross"  # attention of the decoder to the source
    encoder = "encoder"  # self-attention of the source
    decoder = "decoder"  # self-attention of the target


class RunAxis(str, Enum):
    """The x-axis of the curves of runs."""

    update = "update"  # number of updates
    cpu_hours = "cpu_hours"  # CPU time of all threads and ranks, validation included
    wall_hours = "wall_hours"  # time of the clock, validation included


# D_MODEL:WARMUP[:NAME[:PEAK]], such as 512:4000 or 512:4000:cosine:7e-4
_SCHEDULE = re.compile(
    r"""
    (?!0)\d*[02468]                               # D_MODEL, an even number
    :[1-9]\d*                                     # WARMUP
    (
        :noam                                     # takes no PEAK
        |
        :(inverse_sqrt|cosine|linear|constant|wsd)
        (:\d*\.?\d+(e-?\d+)?)?                    # PEAK, such as 0.002 or 2e-3
    )?
    """,
    re.VERBOSE,
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
    x_axis: RunAxis = option(
        RunAxis.update, "what=run: x-axis of the curves: update, cpu_hours or wall_hours"
    )
    data_dir: str = option(DEFAULT_DATA_DIR, "what=data: data folder")
    src: str | None = option(None, "source sentence, or a file of them; null: lines of stdin")
    tgt: str | None = option(
        None, "its translation, or a file of them; null: the best translation of the model"
    )
    beam_size: int | None = override_search_setting("beam_size")
    kind: AttentionKind = option(
        AttentionKind.cross, "what=attention as .png: draw cross, encoder or decoder attention"
    )
    layers: list[int] = option(
        [],
        "numbers of layers, from 1; what=attention as .png draws these layers (default: all), and "
        "what=steps draws one layer (default: 1)",
    )
    heads: list[int] = option(
        [],
        "numbers of heads, from 1; what=attention as .png draws these heads (default: all; 0: the "
        "mean of all heads), and what=steps draws one head (default: 1)",
    )
    words: list[str] = option(
        [],
        "words whose neighbors are listed (what=embeddings), the word of src to follow "
        "(what=steps), or the words of the table (what=vocabulary)",
    )
    num_pieces: int = option(300, "what=embeddings: number of pieces that are projected", low=3)
    model: ModelConfig = option(
        ModelConfig, "what=architecture, multi_head or positions: the architecture"
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
        "what=smoothing or probabilities: share of probability spread evenly over the vocabulary",
        low=0,
        below=1,
    )
    split: str = option(
        "test", "what=report: split of the data folder to translate; valid if it has no such split"
    )
    tracker: list[TrackerName] = option([], "what=upload: tensorboard, wandb, mlflow, trackio")

    def check(self) -> None:
        has_valid_layers = all(layer >= 1 for layer in self.layers)
        self.require(has_valid_layers, "layers", "every number must be at least 1")
        has_valid_heads = all(head >= 0 for head in self.heads)
        self.require(has_valid_heads, "heads", "every number must be at least 0")
        has_valid_dimensions = all(dimension >= 0 for dimension in self.dimensions)
        self.require(has_valid_dimensions, "dimensions", "every number must be at least 0")
        are_valid = all(_SCHEDULE.fullmatch(schedule) for schedule in self.schedules)
        problem = "write D_MODEL:WARMUP, D_MODEL:WARMUP:cosine or D_MODEL:WARMUP:cosine:PEAK"
        self.require(are_valid, "schedules", problem)
