"""The picture of an architecture, after figure 1 of the paper: columns of boxes for the encoder and
the decoder, with shapes and numbers of parameters.
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

_COLORS = {"feed-forward": 0, "attention": 1, "other": 2, "norm": 6}  # indices of `Style.colors`
_BOX_HEIGHT = 0.62  # each box is 1 wide and begins 1 above the box below it
_GAP = 0.35  # additional space below and above the layer
_ROUNDED = "round,pad=0,rounding_size=0.06"
_CROSS_ATTENTION = "Attention to the source"


@dataclass(frozen=True)
class Box:
    """One box of the picture."""

    name: str
    text: str
    num_parameters: int = 0
    color: str = "other"
    num_skipped: int = 0  # number of boxes below that the residual connection into this one skips


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
        total = count_parameters(Transformer(model, config.vocab_size))
    figure = style.figure(10, 9)
    axes = figure.subplots()
    encoder = make_column(model, config.vocab_size, is_decoder=False)
    decoder = make_column(model, config.vocab_size, is_decoder=True)
    encoder_ys = _draw_column(axes, style, 0.0, encoder, model.num_encoder_layers)
    decoder_ys = _draw_column(axes, style, 1.3, decoder, model.num_decoder_layers)
    names = [box.name for box in [*decoder.below, *decoder.layer]]
    top = encoder_ys[-1] + _BOX_HEIGHT
    cross_y = decoder_ys[names.index(_CROSS_ATTENTION)] + _BOX_HEIGHT / 2
    # a line from the top of the encoder to the left side of the decoder's cross-attention
    memory_xs = [0.5, 0.5, 1.21, 1.21, 1.3]
    memory_ys = [top, top + 0.25, top + 0.25, cross_y, cross_y]
    axes.plot(memory_xs, memory_ys, color=style.colors[1], linewidth=1.4)
    axes.text(0.54, top + 0.32, f"memory (B, S, {model.d_model})", fontsize=8)
    axes.set(xlim=(-0.15, 2.5), ylim=(-0.2, max(encoder_ys + decoder_ys) + 0.8))
    axes.axis("off")
    axes.set_title(
        f"{model.num_encoder_layers}+{model.num_decoder_layers} layers, d_model {model.d_model}, "
        f"{model.norm.value}-norm: {total:,} parameters",
        fontsize=13,
    )
    return figure


def make_column(config: ModelConfig, vocab_size: int, *, is_decoder: bool) -> Column:
    """Return the boxes of the encoder or the decoder."""
    d_model = config.d_model
    ids_name = "Source ids"
    length = "S"
    num_embedding_parameters = vocab_size * d_model
    if is_decoder:
        ids_name = "Target ids"
        length = "T"
        num_embedding_parameters = 0  # shared with the encoder, where they are counted
    embedding_name = "Embedding"
    if config.scale_embedding:
        embedding_name += f" × √{d_model}"
    embedding_text = f"{vocab_size:,} × {d_model}, shared"
    embedding = Box(embedding_name, embedding_text, num_embedding_parameters)
    positions = Box("Positions", f"{config.positions.value}, in self-attention")
    if config.positions.is_added:
        num_position_parameters = 0
        if config.positions is Positions.learned:
            num_position_parameters = config.num_positions * d_model
        positions_text = f"{config.positions.value}, (B, {length}, {d_model})"
        positions = Box("+ positions", positions_text, num_position_parameters)
    layer = make_layer(config, is_decoder=is_decoder)
    above = []
    if config.norm is Norm.pre:
        norm = layer[0]
        above.append(Box(norm.name, "", norm.num_parameters, norm.color))
    if is_decoder:
        above.append(_make_output(config, vocab_size))
    below = [Box(ids_name, f"(B, {length})"), embedding, positions]
    return Column(below=below, layer=layer, above=above)


def _make_output(config: ModelConfig, vocab_size: int) -> Box:
    """Return the box of the output layer."""
    matrix = "the embedding, transposed"
    count = 0
    if not config.tied_output:
        matrix = "a matrix of its own"
        count = vocab_size * config.d_model
    if config.output_bias:
        count += vocab_size
    return Box("Linear, softmax", f"(B, T, {vocab_size:,}); {matrix}", count)


def make_layer(config: ModelConfig, *, is_decoder: bool) -> list[Box]:
    """Return the boxes of one layer, from bottom to top."""
    layer_class: Any = DecoderLayer if is_decoder else EncoderLayer
    with torch.device("meta"):
        layer = layer_class(config)
    heads = f"{config.num_heads} heads of {config.d_k}"
    if config.num_kv_heads not in (None, config.num_heads):
        heads += f", {config.num_kv_heads} of keys"
    name = "Self-attention"
    shape = f"(B, S, {config.d_model})"
    if is_decoder:
        name = "Masked self-attention"
        shape = f"(B, T, {config.d_model})"
    sublayers = [Box(name, heads, count_parameters(layer.self_attention), "attention")]
    if is_decoder:
        text = f"{heads}; T queries, S keys"
        count = count_parameters(layer.cross_attention)
        sublayers.append(Box(_CROSS_ATTENTION, text, count, "attention"))
    d_ff = layer.feed_forward.inner.out_features
    text = f"{config.d_model} → {d_ff} → {config.d_model}, {config.activation.value}"
    count = count_parameters(layer.feed_forward)
    sublayers.append(Box("Feed-forward", text, count, "feed-forward"))
    norm_name = "Layer norm"
    add_norm_name = "Add, layer norm"
    if config.norm_layer is NormLayer.rms:
        norm_name = "RMS norm"
        add_norm_name = "Add, RMS norm"
    count = count_parameters(layer.feed_forward_norm)
    boxes = []
    for sublayer in sublayers:
        if config.norm is Norm.pre:
            boxes += [Box(norm_name, shape, count, "norm"), sublayer]
            boxes.append(Box("Add", shape, color="norm", num_skipped=2))
        else:
            boxes += [sublayer, Box(add_norm_name, shape, count, "norm", num_skipped=1)]
    return boxes


def shorten(count: int) -> str:
    """Format a number of parameters: 1,049,088 is 1.05 M."""
    if count < 1000:
        return str(count)
    units = ("", "k", "M", "G")  # of 1000 to the power of the index
    power = min(int(math.log10(count) // 3), 3)
    return f"{count / 1000**power:.3g} {units[power]}"


def _draw_column(
    axes: Axes, style: Style, x: float, column: Column, num_layers: int
) -> list[float]:
    """Draw the boxes of a column and a frame around its layer; return the y of each box."""
    ys: list[float] = []
    for level, boxes in enumerate([column.below, column.layer, column.above]):
        for box in boxes:
            y = len(ys) + _GAP * level
            _draw_box(axes, style, x, y, box)
            if ys:  # an arrow from the box below
                _draw_arrow(axes, style, (x + 0.5, ys[-1] + _BOX_HEIGHT), (x + 0.5, y))
            if box.num_skipped:  # the residual connection begins below the boxes that it skips
                _draw_residual(axes, style, x, ys[-box.num_skipped] - 0.12, y)
            ys.append(y)
    first = len(column.below)
    bottom = ys[first] - 0.22
    top = ys[first + len(column.layer) - 1] + 0.76
    frame = FancyBboxPatch((x - 0.07, bottom), 1.13, top - bottom, boxstyle=_ROUNDED)
    frame.set(fill=False, edgecolor=style.muted_color, linestyle=":")
    axes.add_patch(frame)
    middle = (bottom + top) / 2 + 0.3
    axes.text(x + 1.075, middle, f"× {num_layers}", fontsize=12, va="center")
    return ys


def _draw_box(axes: Axes, style: Style, x: float, y: float, box: Box) -> None:
    color = style.colors[_COLORS[box.color]]
    patch = FancyBboxPatch((x, y), 1, _BOX_HEIGHT, boxstyle=_ROUNDED)
    patch.set(facecolor=to_rgba(color, 0.18), edgecolor=color)
    axes.add_patch(patch)
    texts = [box.text] if box.text else []
    if box.num_parameters:
        texts.append(f"{shorten(box.num_parameters)} parameters")
    axes.text(x + 0.5, y + 0.4, box.name, ha="center", va="center", fontsize=10)
    axes.text(x + 0.5, y + 0.16, "; ".join(texts), ha="center", va="center", fontsize=7.5)


def _draw_arrow(
    axes: Axes, style: Style, start: tuple[float, float], end: tuple[float, float]
) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": style.muted_color})


def _draw_residual(axes: Axes, style: Style, x: float, start: float, y: float) -> None:
    """Draw a residual connection from the height `start` into the left side of the box at `y`."""
    end = y + _BOX_HEIGHT / 2
    axes.plot([x + 0.5, x - 0.04, x - 0.04], [start, start, end], color=style.muted_color)
    _draw_arrow(axes, style, (x - 0.045, end), (x, end))
