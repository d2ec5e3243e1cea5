"""Figures of masks, positional encodings, learning-rate schedules and label smoothing.

These are ideas of "Attention Is All You Need" (Vaswani et al., 2017), here called the paper. Values
are computed by the same functions as in training.
"""

# B sentences, S source tokens, D d_model, V vocab, P positions

from __future__ import annotations

import numpy as np
import torch
from matplotlib.figure import Figure

from nmt.config import (
    ModelConfig,
    OptimizerConfig,
    Positions,
    Schedule,
    TrainConfig,
    VisualizeConfig,
)
from nmt.errors import ConfigError
from nmt.model.attention import causal_mask, padding_mask
from nmt.model.positions import sinusoidal_positions
from nmt.training.loss import smoothed_cross_entropy
from nmt.training.schedule import learning_rate, peak_learning_rate
from nmt.visualize.style import Style

_MAX_MASK_LENGTH = 20  # tokens: cells of larger masks are too small to see
_MAX_WRITTEN_CELLS = 80  # larger tables show colors only, since numbers would be too small to read
_NUM_WORDS = 5  # size of the vocabulary in the figure of label smoothing
_LINE_STYLES = ("-", "--", "-.", ":")
_LAYOUT_TITLES = {  # for each sinusoidal layout
    Positions.sinusoidal: "sinusoidal (the paper): sine, cosine in turn",
    Positions.sinusoidal_concat: "sinusoidal_concat (Tensor2Tensor)",
    Positions.sinusoidal_halves: "sinusoidal_halves (Marian)",
}


def draw_mask(config: VisualizeConfig, style: Style) -> Figure:
    """Draw the causal mask, and the padding mask of a batch of four sentences."""
    length = min(config.length, _MAX_MASK_LENGTH)
    figure = style.figure(9.5, 5)
    causal_axes, padding_axes = figure.subplots(1, 2, width_ratios=[1, 0.9])
    causal = causal_mask(length)
    style.heat_map(causal_axes, causal, gray_mask=~causal)
    causal_axes.set(title="Causal mask of the decoder", xlabel="attended token", ylabel="token")
    lengths = [length, max(1, length * 3 // 4), max(1, length // 2), 2]
    padding = padding_mask(torch.tensor(lengths), length)  # (B, 1, 1, S)
    padding = padding.reshape(len(lengths), length)  # (B, S)
    style.heat_map(padding_axes, padding, gray_mask=~padding)
    padding_axes.set(title="Padding mask of a batch", xlabel="attended token", ylabel="sentence")
    padding_axes.set_yticks(range(4), [f"{n} tokens" for n in lengths])
    causal_axes.set_aspect("equal")
    causal_axes.locator_params(integer=True)
    padding_axes.locator_params(axis="x", integer=True)
    figure.supxlabel("blue: may be attended to; gray: may not, its weight is exactly 0", fontsize=9)
    return figure


def draw_positions(config: VisualizeConfig, style: Style) -> Figure:
    """Draw the table of each sinusoidal layout, and some of its dimensions as curves."""
    d_model = config.model.d_model
    dimensions = config.dimensions
    if not dimensions:
        dimensions = sorted({round(d_model * share) for share in (0.1, 0.2, 0.3, 0.4)})
    if max(dimensions) >= d_model:
        raise ConfigError(
            f"dimensions={max(dimensions)}: model.d_model={d_model} has 0 to {d_model - 1}"
        )
    figure = style.figure(14, 7)
    axes = figure.subplots(2, 3, sharex="row", sharey="row")
    images = []
    for i, (layout, title) in enumerate(_LAYOUT_TITLES.items()):
        table = sinusoidal_positions(config.length, d_model, layout).numpy()  # (P, D)
        images.append(style.heat_map(axes[0, i], table, is_signed=True))  # values from -1 to 1
        axes[0, i].set(title=title, xlabel="dimension", ylabel="position")
        axes[0, i].locator_params(integer=True)
        if table.size <= _MAX_WRITTEN_CELLS:
            style.write_numbers(axes[0, i], table)
        for dimension in dimensions:
            axes[1, i].plot(table[:, dimension], label=f"dimension {dimension}")
        axes[1, i].set(xlabel="position", ylabel="value", ylim=(-1.1, 1.1))
        axes[1, i].grid()
    # all tables have the same colors, so one color bar suffices
    figure.colorbar(images[0], ax=axes[0].tolist(), shrink=0.9)
    handles, labels = axes[1, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6)
    return figure


def draw_schedule(config: VisualizeConfig, style: Style) -> Figure:
    """Draw the learning rate of every update, for several schedules."""
    figure = style.figure(9, 4.8)
    axes = figure.subplots()
    updates = range(1, config.steps + 1)
    for i, schedule_text in enumerate(config.schedules):
        settings = parse_schedule(schedule_text, num_updates=config.steps)
        rates = [learning_rate(update, settings) for update in updates]
        optimizer = settings.optimizer
        label = (
            f"{optimizer.schedule.value}, d_model {settings.model.d_model}, "
            f"warm-up {optimizer.warmup_steps}: {peak_learning_rate(settings):.2e}"
        )
        axes.plot(updates, rates, _LINE_STYLES[i % len(_LINE_STYLES)], label=label)
    axes.set(xlabel="update", ylabel="learning rate", xlim=(0, config.steps), ylim=(0, None))
    axes.set_title("Learning rate, with its peak")
    axes.grid()
    axes.legend()
    return figure


def parse_schedule(text: str, num_updates: int) -> TrainConfig:
    """Return the settings of a run with a learning-rate schedule, for `num_updates` updates.

    The schedule is written as D_MODEL:WARMUP[:NAME[:PEAK]]; `VisualizeConfig` has checked the text.
    NAME is noam by default. PEAK is by default the peak of the paper, (d_model *
    warmup_steps)^-0.5. The schedule noam always has this peak.
    """
    fields = text.split(":")
    d_model = int(fields[0])
    warmup_steps = int(fields[1])
    schedule = Schedule.noam
    if len(fields) > 2:
        schedule = Schedule(fields[2])
    if len(fields) > 3:
        peak = float(fields[3])
    elif schedule is Schedule.noam:
        peak = None  # noam computes its peak itself, and `OptimizerConfig` refuses another one
    else:
        peak = (d_model * warmup_steps) ** -0.5
    return TrainConfig(
        model=ModelConfig(d_model=d_model, num_heads=1),  # one head, since it divides any d_model
        optimizer=OptimizerConfig(
            warmup_steps=warmup_steps, schedule=schedule, peak_learning_rate=peak
        ),
        max_updates=num_updates,
    )


def draw_smoothing(config: VisualizeConfig, style: Style) -> Figure:
    """Draw the target distribution, and the loss against the model's confidence."""
    figure = style.figure(10, 4.2)
    target_axes, loss_axes = figure.subplots(1, 2)
    smoothing = config.label_smoothing
    words = range(_NUM_WORDS)
    targets = torch.stack([smoothed_target(smoothing, word, _NUM_WORDS) for word in words])
    names = [f"word {word}" for word in words]
    style.heat_map(target_axes, targets, row_labels=names, column_labels=list(map(str, words)))
    style.write_numbers(target_axes, targets)
    title = f"Target distribution, label_smoothing={smoothing:g}"
    target_axes.set(title=title, xlabel="word", ylabel="correct word")
    confidences = np.linspace(0.01, 0.999, 200)
    smoothings = sorted({0.0, smoothing, 0.4})  # two values if `smoothing` is 0.0 or 0.4
    for i, value in enumerate(smoothings):
        losses = np.array(
            [smoothed_loss(value, float(confidence), _NUM_WORDS) for confidence in confidences]
        )
        [line] = loss_axes.plot(confidences, losses, _LINE_STYLES[i], label=f"smoothing {value:g}")
        if value > 0:  # without smoothing, the loss has no minimum: it falls up to confidence 1
            lowest = losses.argmin()
            loss_axes.plot(confidences[lowest], losses[lowest], "o", color=line.get_color())
    loss_axes.set(
        title="Loss of one token", xlabel="probability of the correct word", ylabel="nats"
    )
    loss_axes.grid()
    loss_axes.legend()
    return figure


def smoothed_target(smoothing: float, word: int, num_words: int) -> torch.Tensor:
    """Return the target distribution of a word, (V,).

    Training never computes this distribution. It follows from the gradient of the loss with respect
    to the logits, which is softmax(logits) minus the target distribution.
    """
    logits = torch.zeros(1, num_words, requires_grad=True)
    loss = _loss_of_logits(logits, word, smoothing)
    [gradient] = torch.autograd.grad(loss, logits)
    probabilities = logits.detach().softmax(dim=1)  # (1, V)
    target = probabilities - gradient  # (1, V), since the gradient is probabilities - target
    return target[0]


def smoothed_loss(smoothing: float, confidence: float, num_words: int) -> float:
    """Return the loss in nats if the correct word has the probability `confidence`.

    All other words have equal probabilities.
    """
    probabilities = torch.full((1, num_words), (1 - confidence) / (num_words - 1))
    probabilities[0, 0] = confidence
    logits = probabilities.log()  # softmax(log(p)) is p
    return float(_loss_of_logits(logits, 0, smoothing))


def _loss_of_logits(logits: torch.Tensor, word: int, smoothing: float) -> torch.Tensor:
    """Return the loss of one token with logits (1, V) and the correct word `word`."""
    # The loss computes logits from hidden states and an output layer. With the identity matrix as
    # output layer, the hidden states are the logits.
    output_weight = torch.eye(logits.shape[1])  # (V, V)
    loss, _ = smoothed_cross_entropy(
        logits, output_weight, torch.tensor([word]), smoothing=smoothing
    )
    return loss
