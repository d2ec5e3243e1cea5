"""The figure of attention: chosen layers and heads of one pair, as heat maps."""

# L layers, H heads

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING

from nmt.config import AttentionKind, Engine, VisualizeConfig
from nmt.data.text import read_input
from nmt.errors import ConfigError, DataError
from nmt.model.attention import causal_mask
from nmt.model.fast import FastTransformer
from nmt.runtime.distributed import set_num_threads
from nmt.translate.attention import PairAttention, attention_model
from nmt.translate.translator import Translator

if TYPE_CHECKING:  # HTML pages need functions of this module, but not matplotlib
    from matplotlib.figure import Figure

    from nmt.visualize.style import Style

log = logging.getLogger(__name__)
_MAX_LABELED_PANELS = 6  # if there are more panels, only the left and bottom ones have labels
_MAX_CELL_INCHES = 0.24  # largest width and height of the cell of a weight
_MAX_FIGURE_INCHES = 60.0  # largest width and height of all panels together, without margins
_LABEL_MARGIN_INCHES = 1.6  # space for the labels and the title of a panel
_PLAIN_MARGIN_INCHES = 0.3  # space around a panel without labels
_MIN_PANEL_WIDTH_INCHES = 1.2  # so that the title fits
_LABEL_POINTS_PER_INCH = 60  # font size of labels: a cell of 0.1 inches has labels of 6 points
_MAX_LABEL_POINTS = 10
_TITLES = {
    AttentionKind.cross: "Attention of the target to the source",
    AttentionKind.encoder: "Attention, source to source",
    AttentionKind.decoder: "Attention, target to target",
}


def load_translator(config: VisualizeConfig) -> Translator:
    """Load the model `config.model_dir`, and set the number of threads of this process."""
    set_num_threads(config.num_threads)
    return Translator.load(config.model_dir, device=config.device, backend=Engine.native)


def load_single_model(config: VisualizeConfig, picture: str) -> tuple[Translator, FastTransformer]:
    """Load `config.model_dir`, which must be a single model of nmt.

    Returns the translator and its model. `picture` is the value of `what`, for the error message.
    """
    translator = load_translator(config)
    model = attention_model(translator.backend)
    if model is None:
        raise ConfigError(f"what={picture} needs one model of nmt, not an ensemble or an export")
    return translator, model


def read_sentences(text_or_path: str | None, name: str) -> list[str]:
    """Return the lines of a file, or the text itself if no file has that name.

    None and `-` read stdin. Raises `DataError` if all lines are empty.
    """
    if text_or_path is None or text_or_path == "-":
        if sys.stdin is not None and sys.stdin.isatty():
            log.info("reading %s from the terminal; Ctrl-D ends it", name)
        lines = list(read_input("-"))
    elif os.path.exists(text_or_path):  # this is False for a text too long for a file name
        lines = list(read_input(text_or_path))
    else:
        lines = [text_or_path]
    if not any(line.strip() for line in lines):
        raise DataError(f"{name}: there is no text; give {name}='a sentence', or lines on stdin")
    return lines


def compute_attention(config: VisualizeConfig) -> list[PairAttention]:
    """Return the attention weights of the pairs of `config.src` and `config.tgt`.

    If `tgt` is not set, the targets are the translations that the model finds.
    """
    translator = load_translator(config)
    sources = read_sentences(config.src, "src")
    targets = None if config.tgt is None else read_sentences(config.tgt, "tgt")
    return translator.attention(sources, targets, beam_size=config.beam_size)


def draw_attention(config: VisualizeConfig, style: Style) -> Figure:
    """Compute the attention of the pairs of the settings, and draw it for the first pair."""
    pairs = compute_attention(config)
    if len(pairs) > 1:
        log.info("drawing the first of %d pairs; output=FILE.html shows them all", len(pairs))
    return attention_figure(
        pairs[0], style, kind=config.kind, layers=config.layers, heads=config.heads
    )


def attention_figure(
    pair: PairAttention, style: Style, *, kind: AttentionKind, layers: list[int], heads: list[int]
) -> Figure:
    """Draw one kind of attention of a pair: a panel for each of the chosen layers and heads.

    Layers and heads count from 1, and head 0 is the mean of all heads. An empty list chooses all.
    """
    attention_map = pair.attention_map(kind.value)
    weights = attention_map.weights  # (L, H, rows, columns)
    if len(weights) == 0:
        raise ConfigError(f"kind={kind.value}: the decoder of this model has no self-attention")
    layers = _choose_numbers(layers, "layers", len(weights))
    heads = _choose_numbers(heads, "heads", weights.size(1))
    # replaces characters that no font has
    replacements = style.add_fonts_for([*attention_map.rows, *attention_map.columns])
    rows = [piece.translate(replacements) for piece in attention_map.rows]
    columns = [piece.translate(replacements) for piece in attention_map.columns]
    are_all_labeled = len(layers) * len(heads) <= _MAX_LABELED_PANELS
    # the larger number of cells decides, since width and height have the same limit
    num_cells = max(len(columns) * len(heads), len(rows) * len(layers))
    cell_inches = min(_MAX_CELL_INCHES, _MAX_FIGURE_INCHES / num_cells)
    label_points = min(_MAX_LABEL_POINTS, _LABEL_POINTS_PER_INCH * cell_inches)
    margin = _LABEL_MARGIN_INCHES if are_all_labeled else _PLAIN_MARGIN_INCHES
    title_points = 11 if are_all_labeled else 8
    panel_width = max(cell_inches * len(columns) + margin, _MIN_PANEL_WIDTH_INCHES)
    panel_height = cell_inches * len(rows) + margin
    figure = style.figure(
        panel_width * len(heads) + _LABEL_MARGIN_INCHES,
        panel_height * len(layers) + _LABEL_MARGIN_INCHES,
    )
    panels = figure.subplots(len(layers), len(heads), squeeze=False)
    # cells of tokens that the decoder may not attend to are gray
    gray_mask = ~causal_mask(len(rows)) if kind is AttentionKind.decoder else None
    for i, layer in enumerate(layers):
        for j, head in enumerate(heads):
            if head == 0:
                head_weights = weights[layer - 1].mean(dim=0)  # (rows, columns)
                head_name = "mean of heads"
            else:
                head_weights = weights[layer - 1, head - 1]
                head_name = f"head {head}"
            axes = panels[i, j]
            axes.set_title(f"layer {layer}, {head_name}", fontsize=title_points)
            is_bottom = i == len(layers) - 1
            has_row_labels = are_all_labeled or j == 0
            has_column_labels = are_all_labeled or is_bottom
            style.heat_map(
                axes,
                head_weights,
                row_labels=rows if has_row_labels else [],
                column_labels=columns if has_column_labels else [],
                gray_mask=gray_mask,
            )
            axes.tick_params(labelsize=label_points)
    figure.suptitle(f"{_TITLES[kind]}; a row attends to columns", fontsize=11)
    return figure


def _choose_numbers(numbers: list[int], name: str, count: int) -> list[int]:
    """Return the numbers of the setting `name`, or all from 1 to `count` if it is empty."""
    if not numbers:
        return list(range(1, count + 1))
    if max(numbers) > count:
        raise ConfigError(f"{name}={max(numbers)}: the model has {count} {name}")
    return numbers
