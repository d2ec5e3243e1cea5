"""Draw an architecture as in figure 1 of the paper.

The encoder and the decoder are columns of boxes, with shapes and numbers of parameters.
"""

# B sentences, S source tokens, T target tokens

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from nmt.config import ModelConfig, Norm, NormLayer, Positions, VisualizeConfig
from nmt.model.transformer import DecoderLayer, EncoderLayer, Transformer, count_parameters
from nmt.visualize.style import Style

_COLOR_INDICES = {  # indices in `Style.colors`
    "feed-forward": 0,
    "attention": 1,
    "other": 2,
    "norm": 6,
}
BOX_HEIGHT = 0.62  # the width of a box is 1, and boxes follow at a distance of 1
_DECODER_X = 1.3  # left side of the decoder's boxes; the left side of the encoder's boxes is 0
_SECTION_GAP = 0.35  # additional space below and above the layer
_ROUNDED = "round,pad=0,rounding_size=0.06"


@dataclass(frozen=True)
class Box:
    """One box of the picture."""

    title: str
    details: str
    num_parameters: int = 0
    category: str = "other"  # a key of `_COLOR_INDICES`
    num_skipped: int = 0  # number of boxes below that a residual connection into this box skips
    reads_memory: bool = False  # whether a line leads from the encoder to this box


@dataclass(frozen=True)
class Column:
    """The boxes of the encoder or the decoder, each list from bottom to top."""

    below: list[Box]
    layer: list[Box]
    above: list[Box]


def draw_architecture(config: VisualizeConfig, style: Style) -> Figure:
    """Draw encoder and decoder as boxes with their shapes and numbers of parameters."""
    model = config.model
    with torch.device("meta"):
        num_parameters = count_parameters(Transformer(model, config.vocab_size))
    figure = style.figure(10, 9)
    axes = figure.subplots()
    encoder = make_column(model, config.vocab_size, is_decoder=False)
    decoder = make_column(model, config.vocab_size, is_decoder=True)
    encoder_ys = _draw_column(axes, style, 0.0, encoder, model.num_encoder_layers)
    decoder_ys = _draw_column(axes, style, _DECODER_X, decoder, model.num_decoder_layers)
    reads_memory = [box.reads_memory for box in [*decoder.below, *decoder.layer]]
    cross_attention_index = reads_memory.index(True)
    cross_y = decoder_ys[cross_attention_index] + BOX_HEIGHT / 2
    # a line from the top of the encoder to the left side of the decoder's cross-attention
    top = encoder_ys[-1] + BOX_HEIGHT
    memory_xs = [0.5, 0.5, _DECODER_X - 0.09, _DECODER_X - 0.09, _DECODER_X]
    memory_ys = [top, top + 0.25, top + 0.25, cross_y, cross_y]
    axes.plot(memory_xs, memory_ys, color=style.colors[1], linewidth=1.4)
    axes.text(0.54, top + 0.32, f"memory (B, S, {model.d_model})", fontsize=8)
    axes.set(xlim=(-0.15, 2.5), ylim=(-0.2, max(encoder_ys + decoder_ys) + 0.8))
    axes.axis("off")
    axes.set_title(
        f"{model.num_encoder_layers}+{model.num_decoder_layers} layers, d_model {model.d_model}, "
        f"{model.norm.value}-norm: {num_parameters:,} parameters",
        fontsize=13,
    )
    return figure


def make_column(config: ModelConfig, vocab_size: int, *, is_decoder: bool) -> Column:
    """Return the boxes of the encoder or the decoder."""
    d_model = config.d_model
    ids_title = "Source ids"
    length = "S"
    num_embedding_parameters = vocab_size * d_model
    if is_decoder:
        ids_title = "Target ids"
        length = "T"
        num_embedding_parameters = 0  # shared with the encoder, where they are counted
    embedding_title = "Embedding"
    if config.scale_embedding:
        embedding_title += f" × √{d_model}"
    embedding_details = f"{vocab_size:,} × {d_model}, shared"
    embedding = Box(embedding_title, embedding_details, num_embedding_parameters)
    positions = Box("Positions", f"{config.positions.value}, in self-attention")
    if config.positions.is_added_to_embeddings:
        num_position_parameters = 0
        if config.positions is Positions.learned:
            num_position_parameters = config.num_positions * d_model
        positions_details = f"{config.positions.value}, (B, {length}, {d_model})"
        positions = Box("+ positions", positions_details, num_position_parameters)
    layer = make_layer(config, is_decoder=is_decoder)
    above = []
    if config.norm is Norm.pre:
        norm = layer[0]  # the final norm has the same box as the first norm of a layer
        above.append(Box(norm.title, "", norm.num_parameters, norm.category))
    if is_decoder:
        above.append(_make_output(config, vocab_size))
    below = [Box(ids_title, f"(B, {length})"), embedding, positions]
    return Column(below=below, layer=layer, above=above)


def _make_output(config: ModelConfig, vocab_size: int) -> Box:
    """Return the box of the output layer."""
    matrix = "the embedding, transposed"
    num_parameters = 0
    if not config.tied_output:
        matrix = "a matrix of its own"
        num_parameters = vocab_size * config.d_model
    if config.output_bias:
        num_parameters += vocab_size
    return Box("Linear, softmax", f"(B, T, {vocab_size:,}); {matrix}", num_parameters)


def make_layer(config: ModelConfig, *, is_decoder: bool) -> list[Box]:
    """Return the boxes of one layer, from bottom to top."""
    layer_class: Any = DecoderLayer if is_decoder else EncoderLayer
    with torch.device("meta"):
        layer = layer_class(config)
    heads = f"{config.num_heads} heads of {config.d_k}"
    if config.num_kv_heads not in (None, config.num_heads):
        heads += f", {config.num_kv_heads} of keys"
    title = "Self-attention"
    shape = f"(B, S, {config.d_model})"
    if is_decoder:
        title = "Masked self-attention"
        shape = f"(B, T, {config.d_model})"
    if layer.ssru is None:
        first = Box(title, heads, count_parameters(layer.self_attention), "attention")
    else:
        first = Box("SSRU", "a state per position", count_parameters(layer.ssru), "attention")
    sublayers = [first]
    if is_decoder:
        cross_attention = Box(
            "Attention to the source",
            f"{heads}; T queries, S keys",
            count_parameters(layer.cross_attention),
            "attention",
            reads_memory=True,
        )
        sublayers.append(cross_attention)
    d_ff = layer.feed_forward.inner.out_features
    details = f"{config.d_model} → {d_ff} → {config.d_model}, {config.activation.value}"
    num_parameters = count_parameters(layer.feed_forward)
    sublayers.append(Box("Feed-forward", details, num_parameters, "feed-forward"))
    return _add_norms(config, sublayers, shape, count_parameters(layer.feed_forward_norm))


def _add_norms(config: ModelConfig, sublayers: list[Box], shape: str, norm_size: int) -> list[Box]:
    """Return the boxes of sub-layers with residual connections and norms of `norm_size` numbers."""
    norm_title = "Layer norm"
    add_norm_title = "Add, layer norm"
    if config.norm_layer is NormLayer.rms:
        norm_title = "RMS norm"
        add_norm_title = "Add, RMS norm"
    boxes = []
    for sublayer in sublayers:
        if config.norm is Norm.pre:
            boxes.append(Box(norm_title, shape, norm_size, "norm"))
            boxes.append(sublayer)
            boxes.append(Box("Add", shape, category="norm", num_skipped=2))
        else:
            boxes.append(sublayer)
            boxes.append(Box(add_norm_title, shape, norm_size, "norm", num_skipped=1))
    return boxes


def format_count(count: int) -> str:
    """Format a number of parameters with three digits and a unit: 1,049,088 becomes 1.05 M."""
    if count < 1000:
        return str(count)
    units = ("", "k", "M", "G")  # 1, 1000, 1000^2 and 1000^3
    power = min(int(math.log10(count) // 3), 3)
    return f"{count / 1000**power:.3g} {units[power]}"


def _draw_column(
    axes: Axes, style: Style, x: float, column: Column, num_layers: int
) -> list[float]:
    """Draw the boxes of a column, and a frame around its layer with the number of layers.

    Returns the y coordinate of the bottom of each box.
    """
    ys: list[float] = []
    for section, boxes in enumerate([column.below, column.layer, column.above]):
        for box in boxes:
            y = len(ys) + _SECTION_GAP * section
            draw_box(axes, style, x, y, box)
            if ys:  # an arrow from the box below
                draw_arrow(axes, style, (x + 0.5, ys[-1] + BOX_HEIGHT), (x + 0.5, y))
            if box.num_skipped:  # the residual connection begins below the boxes that it skips
                _draw_residual(axes, style, x, ys[-box.num_skipped] - 0.12, y)
            ys.append(y)
    first_layer_box = len(column.below)
    last_layer_box = first_layer_box + len(column.layer) - 1
    bottom = ys[first_layer_box] - 0.22
    top = ys[last_layer_box] + 0.76  # slightly above the last box of the layer
    frame = FancyBboxPatch((x - 0.07, bottom), 1.13, top - bottom, boxstyle=_ROUNDED)
    frame.set(fill=False, edgecolor=style.muted_color, linestyle=":")
    axes.add_patch(frame)
    middle = (bottom + top) / 2 + 0.3
    axes.text(x + 1.075, middle, f"× {num_layers}", fontsize=12, va="center")
    return ys


def draw_box(axes: Axes, style: Style, x: float, y: float, box: Box) -> None:
    """Draw a box with its lower left corner at (x, y)."""
    color = style.colors[_COLOR_INDICES[box.category]]
    patch = FancyBboxPatch((x, y), 1, BOX_HEIGHT, boxstyle=_ROUNDED)
    patch.set(facecolor=to_rgba(color, 0.18), edgecolor=color)
    axes.add_patch(patch)
    details = []
    if box.details:
        details.append(box.details)
    if box.num_parameters:
        details.append(f"{format_count(box.num_parameters)} parameters")
    axes.text(x + 0.5, y + 0.4, box.title, ha="center", va="center", fontsize=10)
    axes.text(x + 0.5, y + 0.16, "; ".join(details), ha="center", va="center", fontsize=7.5)


def draw_arrow(
    axes: Axes, style: Style, start: tuple[float, float], end: tuple[float, float]
) -> None:
    """Draw an arrow between two points (x, y)."""
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": style.muted_color})


def _draw_residual(axes: Axes, style: Style, x: float, start: float, y: float) -> None:
    """Draw a residual connection from the height `start` into the left side of the box at `y`."""
    end = y + BOX_HEIGHT / 2
    axes.plot([x + 0.5, x - 0.04, x - 0.04], [start, start, end], color=style.muted_color)
    draw_arrow(axes, style, (x - 0.045, end), (x, end))
