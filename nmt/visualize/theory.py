"""The figures of the ideas of the paper, from the code that trains: masks, positions, the learning
rate, label smoothing, and the boxes of an architecture.
"""

# B sentences, S source tokens, T target tokens, D d_model, H heads, F d_ff, V vocab

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from nmt.config import (
    ModelConfig,
    Norm,
    NormLayer,
    OptimizerConfig,
    Positions,
    Schedule,
    TrainConfig,
    VisualizeConfig,
)
from nmt.errors import ConfigError
from nmt.model.transformer import (
    DecoderLayer,
    EncoderLayer,
    Transformer,
    causal_mask,
    num_parameters,
    padding_mask,
    sinusoidal_positions,
)
from nmt.training.loss import smoothed_cross_entropy
from nmt.training.optimizer import learning_rate, peak_learning_rate
from nmt.visualize.style import Style

_MOST_MASKED = 40  # tokens: cells are no longer seen beyond
_NUM_WORDS = 5  # of the vocabulary of label smoothing


def draw_mask(config: VisualizeConfig, style: Style) -> Figure:
    """Draw which tokens may be attended to: causal, and padding in a batch of four sentences."""
    length = min(config.length, 20 if config.length == 100 else _MOST_MASKED)
    figure = style.figure(9.5, 5)
    left, right = figure.subplots(1, 2, width_ratios=[1, 0.9])
    causal = causal_mask(length)
    style.heat(left, causal, hidden=~causal)
    left.set(title="Causal mask of the decoder", xlabel="attended token", ylabel="token")
    lengths = torch.tensor([length, max(1, length * 3 // 4), max(1, length // 2), 2])
    padding = padding_mask(lengths, length)[:, 0, 0]  # (B, S)
    style.heat(right, padding, hidden=~padding)
    right.set(title="Padding mask of a batch", xlabel="attended token", ylabel="sentence")
    right.set_yticks(range(4), [f"{n} tokens" for n in lengths.tolist()])
    left.set_aspect("equal")
    left.locator_params(integer=True)
    right.locator_params(axis="x", integer=True)
    figure.supxlabel("blue: may be attended to; gray: may not, its weight is exactly 0", fontsize=9)
    return figure


def draw_positions(config: VisualizeConfig, style: Style) -> Figure:
    """Draw the positional encodings of each layout, and the curves of chosen dimensions."""
    d_model, length = config.model.d_model, config.length
    chosen = config.dimensions or sorted({round(d_model * share) for share in (0.1, 0.2, 0.3, 0.4)})
    if max(chosen) >= d_model:
        raise ConfigError(
            f"dimensions={max(chosen)}: model.d_model={d_model} has 0 to {d_model - 1}"
        )
    figure = style.figure(14, 7)
    axes = figure.subplots(2, 3, sharex="row", sharey="row")
    names = {
        Positions.sinusoidal: "sinusoidal (the paper): sine, cosine in turn",
        Positions.sinusoidal_concat: "sinusoidal_concat (Tensor2Tensor)",
        Positions.sinusoidal_halves: "sinusoidal_halves (Marian)",
    }
    for column, (layout, name) in zip(axes.T, names.items(), strict=True):
        table = sinusoidal_positions(length, d_model, layout).numpy()  # (length, D)
        image = style.heat(column[0], table)
        column[0].set(title=name, xlabel="dimension", ylabel="position")
        for dimension in chosen:
            column[1].plot(table[:, dimension], label=f"dimension {dimension}")
        column[1].set(xlabel="position", ylabel="value", ylim=(-1.1, 1.1))
        column[1].grid()
    figure.colorbar(image, ax=axes[0].tolist(), shrink=0.9)
    figure.legend(*axes[1, 0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    return figure


def schedule_of(text: str, steps: int) -> TrainConfig:
    """Return the settings that D_MODEL:WARMUP[:NAME[:PEAK]] means, for a run of `steps` updates."""
    d_model, warmup_steps, *rest = text.split(":")
    name = Schedule(rest[0] if rest else "noam")
    paper = (int(d_model) * int(warmup_steps)) ** -0.5
    peak = None if name is Schedule.noam else float(rest[1]) if len(rest) > 1 else paper
    optimizer = OptimizerConfig(
        warmup_steps=int(warmup_steps), schedule=name, peak_learning_rate=peak
    )
    model = ModelConfig(d_model=int(d_model), num_heads=1)
    return TrainConfig(model=model, optimizer=optimizer, max_updates=steps)


def draw_schedule(config: VisualizeConfig, style: Style) -> Figure:
    """Draw the learning rate of every update, for several schedules."""
    figure = style.figure(9, 4.8)
    axes = figure.subplots()
    steps = range(1, config.steps + 1)
    for i, text in enumerate(config.schedules):
        trained = schedule_of(text, config.steps)
        rates = [learning_rate(step, trained) for step in steps]
        kind = trained.optimizer.schedule.value
        label = f"{kind}, d_model {trained.model.d_model}, warm-up {trained.optimizer.warmup_steps}"
        peak = peak_learning_rate(trained)  # which may come after the last step
        axes.plot(steps, rates, ["-", "--", "-.", ":"][i % 4], label=f"{label}: {peak:.2e}")
    axes.set(xlabel="update", ylabel="learning rate", xlim=(0, config.steps), ylim=0)
    axes.set_title("Learning rate, with its peak")
    axes.grid()
    axes.legend()
    return figure


def smoothing_target(smoothing: float, wanted: int, num_words: int) -> torch.Tensor:
    """Return the distribution (V,) that training compares with: the model's less its gradient."""
    logits = torch.zeros(1, num_words, requires_grad=True)
    loss, _ = smoothed_cross_entropy(
        logits, torch.eye(num_words), torch.tensor([wanted]), smoothing=smoothing
    )
    [gradient] = torch.autograd.grad(loss, logits)
    return (logits.detach().softmax(dim=1) - gradient)[0]


def smoothed_loss(smoothing: float, confidence: float, num_words: int) -> float:
    """Return the loss in nats where the wanted word has `confidence` and all others share the rest
    equally.
    """
    shares = torch.full((1, num_words), (1 - confidence) / (num_words - 1))
    shares[0, 0] = confidence
    given = (shares.log(), torch.eye(num_words), torch.tensor([0]))
    return float(smoothed_cross_entropy(*given, smoothing=smoothing)[0])


def draw_smoothing(config: VisualizeConfig, style: Style) -> Figure:
    """Draw the target distribution, and the loss against the model's confidence."""
    figure = style.figure(10, 4.2)
    left, right = figure.subplots(1, 2)
    eps, words = config.label_smoothing, range(_NUM_WORDS)
    targets = torch.stack([smoothing_target(eps, word, _NUM_WORDS) for word in words])  # (V, V)
    names = [f"word {word}" for word in words]
    style.heat(left, targets, rows=names, columns=[name[-1] for name in names])
    for i, j in np.ndindex(*targets.shape):
        ink = style.paper if targets[i, j] > 0.5 else style.ink
        left.text(j, i, f"{targets[i, j]:.2f}", ha="center", va="center", color=ink)
    left.set(title=f"Target distribution, label_smoothing={eps:g}", xlabel="word", ylabel="wanted")
    confidences = np.linspace(0.01, 0.999, 200)
    for i, share in enumerate(sorted({0.0, eps, 0.4})):
        losses = np.array([smoothed_loss(share, float(c), _NUM_WORDS) for c in confidences])
        [line] = right.plot(confidences, losses, ["-", "--", "-."][i], label=f"smoothing {share:g}")
        if share:
            lowest = losses.argmin()
            right.plot(confidences[lowest], losses[lowest], "o", color=line.get_color())
    right.set(title="Loss of one token", xlabel="probability of the wanted word", ylabel="nats")
    right.grid()
    right.legend()
    return figure


# --- architecture (figure 1 of the paper)


class Box(NamedTuple):
    """One box of the picture."""

    name: str
    text: str
    num_parameters: int = 0


def stack_boxes(config: ModelConfig, *, is_decoder: bool) -> list[Box]:
    """Return the boxes of one layer, from the bottom."""
    d_model, d_ff, heads = config.d_model, config.d_ff, config.num_heads
    shape, kv_heads = f"{heads} heads of {d_model // heads}", config.num_kv_heads or heads
    if kv_heads < heads:
        shape += f", {kv_heads} of keys"
    with torch.device("meta"):
        layer: Any = (DecoderLayer if is_decoder else EncoderLayer)(config)
    name = "Masked self-attention" if is_decoder else "Self-attention"
    subs = [Box(name, shape, num_parameters(layer.self_attention))]
    if is_decoder:
        number = num_parameters(layer.cross_attention)
        subs.append(Box("Attention to the source", f"{shape}; T queries, S keys", number))
    hidden = f"{d_model} → {d_ff} → {d_model}, {config.activation.value}"
    subs.append(Box("Feed-forward", hidden, num_parameters(layer.feed_forward)))
    name = "RMS norm" if config.norm_layer is NormLayer.rms else "Layer norm"
    boxes, width = [], f"(B, {'T' if is_decoder else 'S'}, {d_model})"
    norm = num_parameters(layer.feed_forward_norm)
    for sub in subs:
        if config.norm is Norm.pre:
            boxes += [Box(name, width, norm), sub, Box("Add", width)]
        else:
            boxes += [sub, Box(f"Add, {name.replace('L', 'l')}", width, norm)]
    return boxes


def shorten(count: int) -> str:
    """Format a number of parameters: 1,049,088 is 1.05 M."""
    power = min(int(math.log10(max(count, 1)) // 3), 3)
    digits = "" if not power else f"{count / 1000**power:.3g}"
    return f"{digits or count} {['', 'k', 'M', 'G'][power]}".strip()


def column_boxes(config: ModelConfig, vocab_size: int, *, is_decoder: bool) -> list[list[Box]]:
    """Return the boxes of one side, from the bottom: below the layers, of a layer, above them."""
    d_model = config.d_model
    side, width = ("Target", "T") if is_decoder else ("Source", "S")
    scale = f" × √{d_model}" if config.scale_embedding else ""
    embedding = Box(f"Embedding{scale}", f"{vocab_size:,} × {d_model}, shared")
    if not is_decoder:
        embedding = embedding._replace(num_parameters=vocab_size * d_model)
    positions = Box("+ positions", f"{config.positions.value}, (B, {width}, {d_model})")
    if config.positions is Positions.learned:
        positions = positions._replace(num_parameters=config.num_positions * d_model)
    elif not config.positions.is_added:
        positions = Box("Positions", f"{config.positions.value}, in self-attention")
    stack = stack_boxes(config, is_decoder=is_decoder)
    above = [stack[0]._replace(text="")] if config.norm is Norm.pre else []
    if is_decoder:
        text = "the embedding, transposed" if config.tied_output else "a matrix of its own"
        number = vocab_size * (d_model * (not config.tied_output) + config.output_bias)
        above.append(Box("Linear, softmax", f"(B, T, {vocab_size:,}); {text}", number))
    below = [Box(f"{side} ids", f"(B, {width})"), embedding, positions]
    return [below, stack, above]


def draw_architecture(config: VisualizeConfig, style: Style) -> Figure:
    """Draw encoder and decoder as boxes with their shapes and numbers of parameters."""
    model, vocab_size = config.model, config.vocab_size
    with torch.device("meta"):
        total = num_parameters(Transformer(model, vocab_size))
    figure = style.figure(10, 9)
    axes = figure.subplots()
    tops = []
    for x, is_decoder in ((0.0, False), (1.3, True)):
        count = model.num_decoder_layers if is_decoder else model.num_encoder_layers
        boxes = column_boxes(model, vocab_size, is_decoder=is_decoder)
        tops.append(_draw_column(axes, style, x, boxes, count))
    cross = 7 if model.norm is Norm.pre else 5  # of the decoder's boxes
    x, top, y = 0.5, tops[0][-1] + 0.62, tops[1][cross] + 0.31
    path = ([x, x, 1.21, 1.21, 1.3], [top, top + 0.25, top + 0.25, y, y])
    axes.plot(*path, color=style.colors[1], linewidth=1.4)
    axes.text(x + 0.04, top + 0.32, f"memory (B, S, {model.d_model})", fontsize=8)
    axes.set(xlim=(-0.15, 2.5), ylim=(-0.2, max(map(max, tops)) + 0.8))
    axes.axis("off")
    axes.set_title(
        f"{model.num_encoder_layers}+{model.num_decoder_layers} layers, d_model {model.d_model}, "
        f"{model.norm.value}-norm: {total:,} parameters",
        fontsize=13,
    )
    return figure


def _draw_column(
    axes: Axes, style: Style, x: float, parts: list[list[Box]], count: int
) -> list[float]:
    """Draw boxes from the bottom, a frame around the layer, the residual paths; return heights."""
    below, stack, _ = map(len, parts)
    ys: list[float] = []
    boxes = [box for part in parts for box in part]
    rounded = "round,pad=0,rounding_size=0.06"
    for i, (name, text, number) in enumerate(boxes):
        ys.append(i + 0.35 * ((i >= below) + (i >= below + stack)))
        is_add, is_attention = "norm" in name or name == "Add", "ttention" in name
        which = 6 if is_add else 1 if is_attention else 0 if "orward" in name else 2
        patch = FancyBboxPatch((x, ys[-1]), 1, 0.62, boxstyle=rounded)
        patch.set(facecolor=to_rgba(style.colors[which], 0.18), edgecolor=style.colors[which])
        axes.add_patch(patch)
        notes = [text] * bool(text) + [f"{shorten(number)} parameters"] * bool(number)
        axes.text(x + 0.5, ys[-1] + 0.4, name, ha="center", va="center", fontsize=10)
        axes.text(x + 0.5, ys[-1] + 0.16, "; ".join(notes), ha="center", va="center", fontsize=7.5)
        arrow = {"arrowstyle": "->", "color": style.quiet}
        if i:
            axes.annotate("", (x + 0.5, ys[-1]), (x + 0.5, ys[-2] + 0.62), arrowprops=arrow)
        if name.startswith("Add"):
            first = ys[-2 if "norm" in name else -3] - 0.12
            axes.plot(
                [x + 0.5, x - 0.04, x - 0.04], [first, first, ys[-1] + 0.31], color=style.quiet
            )
            axes.annotate("", (x, ys[-1] + 0.31), (x - 0.045, ys[-1] + 0.31), arrowprops=arrow)
    low, high = ys[below] - 0.22, ys[below + stack - 1] + 0.76
    frame = FancyBboxPatch((x - 0.07, low), 1.13, high - low, boxstyle=rounded)
    frame.set(fill=False, edgecolor=style.quiet, linestyle=":")
    axes.add_patch(frame)
    axes.text(x + 1.075, (low + high) / 2 + 0.3, f"× {count}", fontsize=12, va="center")
    return ys
