"""Draw attention as in figure 2 of the paper: scaled dot-product attention and multi-head
attention as boxes, with the shapes and numbers of parameters of an architecture.
"""

# B sentences, T queries, S keys

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nmt.config import ModelConfig, VisualizeConfig
from nmt.visualize.architecture import BOX_HEIGHT, Box, draw_arrow, draw_box
from nmt.visualize.style import Style

_INPUT_XS = {"Q": 0.0, "K": 1.2, "V": 2.4}  # left sides of the boxes of queries, keys and values
_MIDDLE_X = 1.2


def draw_multi_head(config: VisualizeConfig, style: Style) -> Figure:
    """Draw the two halves of figure 2 for the architecture `config.model`."""
    model = config.model
    figure = style.figure(13, 7.5)
    product_axes, head_axes = figure.subplots(1, 2)
    _draw_dot_product(product_axes, style, model)
    _draw_heads(head_axes, style, model)
    for axes in (product_axes, head_axes):
        axes.set(xlim=(-0.1, 3.5), ylim=(-0.2, 5.9))
        axes.axis("off")
    return figure


def _draw_dot_product(axes: Axes, style: Style, model: ModelConfig) -> None:
    """Draw scaled dot-product attention: MatMul, Scale, Mask, SoftMax, MatMul."""
    heads = model.num_heads
    size = model.d_k
    scores = f"(B, {heads}, T, S)"
    draw_box(axes, style, _INPUT_XS["Q"], 0, Box("Q", f"(B, {heads}, T, {size})"))
    draw_box(axes, style, _INPUT_XS["K"], 0, Box("K", f"(B, {heads}, S, {size})"))
    draw_box(axes, style, _INPUT_XS["V"], 0, Box("V", f"(B, {heads}, S, {size})"))
    steps = [
        Box("MatMul", f"Q K^T, {scores}", category="attention"),
        Box(f"Scale, 1/√{size}", scores, category="norm"),
        Box("Mask", "-inf where not visible", category="norm"),
        Box("SoftMax", f"weights {scores}", category="feed-forward"),
        Box("MatMul", f"weights V, (B, {heads}, T, {size})", category="attention"),
    ]
    step_x = 0.6  # halfway between queries and keys
    for i, box in enumerate(steps):
        y = i + 1.0
        draw_box(axes, style, step_x, y, box)
        if i > 0:
            draw_arrow(axes, style, (step_x + 0.5, y - 1 + BOX_HEIGHT), (step_x + 0.5, y))
    draw_arrow(axes, style, (_INPUT_XS["Q"] + 0.5, BOX_HEIGHT), (step_x + 0.25, 1))
    draw_arrow(axes, style, (_INPUT_XS["K"] + 0.5, BOX_HEIGHT), (step_x + 0.75, 1))
    value_x = _INPUT_XS["V"] + 0.5
    last_y = len(steps) + BOX_HEIGHT / 2
    axes.plot([value_x, value_x], [BOX_HEIGHT, last_y], color=style.muted_color)
    draw_arrow(axes, style, (value_x, last_y), (step_x + 1, last_y))
    axes.set_title("Scaled dot-product attention (equation 1)", fontsize=13)


def linear_boxes(model: ModelConfig) -> list[Box]:
    """Return the boxes of the linear layers: W^Q, W^K, W^V and W^O."""
    q_size = model.num_heads * model.d_k
    kv_size = (model.num_kv_heads or model.num_heads) * model.d_k
    return [
        _linear_box("W^Q", model.d_model, q_size),
        _linear_box("W^K", model.d_model, kv_size),
        _linear_box("W^V", model.d_model, kv_size),
        _linear_box("W^O", q_size, model.d_model),
    ]


def _linear_box(name: str, in_size: int, out_size: int) -> Box:
    """Return the box of a linear layer with a bias."""
    return Box(f"Linear {name}", f"{in_size} → {out_size}", (in_size + 1) * out_size)


def _draw_heads(axes: Axes, style: Style, model: ModelConfig) -> None:
    """Draw multi-head attention: Linear, attention of all heads, Concat, Linear."""
    *input_boxes, output_box = linear_boxes(model)
    attention_box = Box(
        "Attention", f"{model.num_heads} heads of {model.d_k}", category="attention"
    )
    concat_box = Box("Concat", f"(B, T, {model.num_heads * model.d_k})", category="norm")
    ys = [0, 1.2, 2.4, 3.6, 4.8]  # inputs, linear layers, attention, Concat, linear layer
    for name, linear_box in zip(_INPUT_XS, input_boxes, strict=True):
        x = _INPUT_XS[name]
        length = "T" if name == "Q" else "S"
        draw_box(axes, style, x, ys[0], Box(name, f"(B, {length}, {model.d_model})"))
        draw_box(axes, style, x, ys[1], linear_box)
        draw_arrow(axes, style, (x + 0.5, ys[0] + BOX_HEIGHT), (x + 0.5, ys[1]))
        draw_arrow(axes, style, (x + 0.5, ys[1] + BOX_HEIGHT), (_MIDDLE_X + 0.5, ys[2]))
    middle = _MIDDLE_X + 0.5
    draw_box(axes, style, _MIDDLE_X, ys[2], attention_box)
    draw_box(axes, style, _MIDDLE_X, ys[3], concat_box)
    draw_box(axes, style, _MIDDLE_X, ys[4], output_box)
    draw_arrow(axes, style, (middle, ys[2] + BOX_HEIGHT), (middle, ys[3]))
    draw_arrow(axes, style, (middle, ys[3] + BOX_HEIGHT), (middle, ys[4]))
    axes.set_title(f"Multi-head attention, {model.num_heads} heads", fontsize=13)
