"""Self-attention step by step, and its figure: from the embedding of a token to its output vector.

The figure follows the pictures of the Illustrated Transformer (Alammar, 2018), with the numbers of
a trained model.
"""

# S source tokens with EOS, D d_model, H heads, d dimensions of a head

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from nmt.config import Norm, VisualizeConfig
from nmt.data.languages import encode_sources
from nmt.errors import ConfigError
from nmt.model.attention import PaddedContext, attend, padding_mask, repeat_heads
from nmt.model.fast import FastTransformer
from nmt.model.positions import TokenPositions
from nmt.model.transformer import EncoderLayer, Transformer
from nmt.translate.attention import add_source_eos
from nmt.translate.translator import Translator
from nmt.visualize.attention_figure import load_single_model, read_sentences

if TYPE_CHECKING:  # the page uses this module without matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.gridspec import GridSpec

    from nmt.visualize.style import Style

_MAX_TOKENS = 40  # rows of more tokens are too small to read
_ROW_INCHES = 0.24  # height of the row of one token or head
_TITLE_INCHES = 4.0  # height of all titles and the space between drawings
NUM_WRITTEN = 12
"""Number of dimensions of each vector that are written as numbers."""


@dataclass(frozen=True)
class AttentionSteps:
    """Every intermediate result of the self-attention of one encoder layer, in float32."""

    x: Tensor  # (S, D), the input of the layer; in the first layer embeddings and positions
    layer_input: Tensor  # (S, D), `x` as attention reads it: normalized in pre-norm
    q: Tensor  # (H, S, d)
    k: Tensor  # (H, S, d)
    v: Tensor  # (H, S, d)
    scores: Tensor  # (H, S, S), q k^T
    scaled_scores: Tensor  # (H, S, S), scores / sqrt(d), plus the bias of positions if there is one
    weights: Tensor  # (H, S, S), softmax of the scaled scores
    heads: Tensor  # (H, S, d), the sum z of the weighted values of each head
    concatenated: Tensor  # (S, H * d)
    attention: Tensor  # (S, D), the concatenated heads times W^O
    residual: Tensor  # (S, D), x + attention
    output: Tensor  # (S, D), the residual sum, normalized in post-norm


@torch.inference_mode()
def compute_steps(model: Transformer, src_ids: list[int], layer: int) -> AttentionSteps:
    """Compute the self-attention of encoder layer `layer`, from 0, for one sentence, step by step.

    `src_ids` are the ids that the encoder reads, with EOS.
    """
    src = torch.tensor([src_ids], device=model.embedding.weight.device)  # (1, S)
    lengths = torch.tensor([len(src_ids)], device=src.device)
    mask = padding_mask(lengths, len(src_ids))
    positions = TokenPositions.up_to(len(src_ids), src.device)
    context = PaddedContext(mask, positions)
    embedding = model.src_embedding or model.embedding
    x = model.embed(src, embedding, model.encoder_positions, positions)  # (1, S, D)
    for earlier_layer in model.encoder_layers[:layer]:
        x = earlier_layer(x, context)
    encoder_layer = cast(EncoderLayer, model.encoder_layers[layer])
    self_attention = encoder_layer.self_attention
    norm = encoder_layer.self_attention_norm
    layer_input = encoder_layer.sublayer_input(norm, x)  # (1, S, D)
    q, k, v = self_attention.project(layer_input, layer_input)
    q, k = self_attention.normalize_and_rotate(q, k, positions)
    k = repeat_heads(k, self_attention.num_heads)  # (1, H, S, d)
    v = repeat_heads(v, self_attention.num_heads)
    scores = q @ k.transpose(-2, -1)  # (1, H, S, S)
    scaled_scores = scores / math.sqrt(self_attention.head_size)
    encoding = self_attention.position_encoding
    if encoding.has_bias:
        scaled_scores = scaled_scores + encoding.bias(q, context.distances)
    distances = context.distances if encoding.has_bias else None  # only a bias depends on them
    heads, weights = attend(q, k, v, mask, encoding=encoding, distances=distances)
    concatenated = heads.transpose(1, 2).flatten(2)  # (1, S, H * d)
    attention = self_attention.out_projection(concatenated)  # (1, S, D)

    def single(batch: Tensor) -> Tensor:
        """Return the only sentence of a batch on the CPU, in float32."""
        return batch[0].float().cpu()

    return AttentionSteps(
        x=single(x),
        layer_input=single(layer_input),
        q=single(q),
        k=single(k),
        v=single(v),
        scores=single(scores),
        scaled_scores=single(scaled_scores),
        weights=single(weights),
        heads=single(heads),
        concatenated=single(concatenated),
        attention=single(attention),
        residual=single(x + attention),
        output=single(encoder_layer.add_and_norm(norm, x, attention)),
    )


@dataclass(frozen=True)
class FollowedToken:
    """A token of a sentence, and the steps of its self-attention in one layer and head."""

    steps: AttentionSteps
    pieces: list[str]  # (S), EOS included
    query: int  # index of the token
    layer: int  # number of the encoder layer, from 1
    head: int  # number of the head, from 1
    output_matrix: Tensor  # (H * d, D), W^O
    is_pre_norm: bool

    def residual_vectors(self) -> dict[str, Tensor]:
        """Return the vectors (D,) of the residual connection around self-attention, by name."""
        vectors = {
            "x": self.steps.x[self.query],
            "attention": self.steps.attention[self.query],
            "x + attention": self.steps.residual[self.query],
        }
        if not self.is_pre_norm:
            vectors["layer norm"] = self.steps.output[self.query]
        return vectors


def follow_token(config: VisualizeConfig) -> FollowedToken:
    """Compute the self-attention of one token of `src` in one encoder layer.

    The setting `words` names the token, `layers` the layer, and `heads` the head. Each is the first
    by default.
    """
    translator, model = load_single_model(config, "steps")
    line = read_sentences(config.src, "src")[0]
    layer = choose_number(config.layers, "layers", model.config.num_encoder_layers)
    head = choose_number(config.heads, "heads", model.config.num_heads)
    src_ids = encode_line(translator, model, line)
    pieces = translator.tokenizer.src.pieces(src_ids)
    query = find_token(pieces, config.words)
    return FollowedToken(
        steps=compute_steps(model, src_ids, layer - 1),
        pieces=pieces,
        query=query,
        layer=layer,
        head=head,
        output_matrix=_output_projection(model, layer),
        is_pre_norm=model.config.norm is Norm.pre,
    )


def draw_steps(config: VisualizeConfig, style: Style) -> Figure:
    """Draw the steps of `follow_token`."""
    token = follow_token(config)
    replacements = style.add_fonts_for(token.pieces)
    labels = [piece.translate(replacements) for piece in token.pieces]
    return steps_figure(token, labels, style)


def encode_line(translator: Translator, model: FastTransformer, line: str) -> list[int]:
    """Return the ids that the encoder reads for a line.

    Raises `ConfigError` for more than `_MAX_TOKENS` ids.
    """
    src_ids = encode_sources(translator.tokenizer.src, [line], translator.common_tags)[0]
    src_ids = add_source_eos(src_ids, model, translator.tokenizer)
    if len(src_ids) > _MAX_TOKENS:
        raise ConfigError(
            f"src has {len(src_ids)} tokens, {_MAX_TOKENS} can be drawn; give a shorter sentence"
        )
    return src_ids


def choose_number(numbers: list[int], name: str, count: int) -> int:
    """Return the one number of the setting `name`, by default 1.

    Raises a `ConfigError` for several numbers, or if it is not from 1 to `count`.
    """
    if not numbers:
        return 1
    number = numbers[0]
    if len(numbers) > 1 or not 1 <= number <= count:
        raise ConfigError(f"{name}={numbers}: give one number from 1 to {count}")
    return number


def find_token(pieces: list[str], words: list[str]) -> int:
    """Return the index of the first piece of the only word in `words`, by default 0."""
    if not words:
        return 0
    if len(words) > 1:
        raise ConfigError(f"words={words}: what=steps follows one word")
    word = words[0]
    # the mark "▁" begins a word, so that `word` does not match inside another word
    mark_index = "".join(pieces).find("▁" + word)
    if mark_index < 0:
        raise ConfigError(f"words={word}: src has the tokens {' '.join(pieces)}")
    letter_index = mark_index + 1  # the first letter, since "▁" may be a piece of its own
    index = 0
    end = len(pieces[0])  # number of characters up to the end of piece `index`
    while end <= letter_index:
        index += 1
        end += len(pieces[index])
    return index


def _output_projection(model: Transformer, layer: int) -> Tensor:
    """Return W^O (H * d, D) of the self-attention of an encoder layer, counted from 1."""
    encoder_layer = cast(EncoderLayer, model.encoder_layers[layer - 1])
    weight = encoder_layer.self_attention.out_projection.weight  # (D, H * d)
    return weight.detach().t().float().cpu()


def steps_figure(token: FollowedToken, labels: list[str], style: Style) -> Figure:
    """Draw the steps of a token. `labels` (S) name the tokens of its sentence."""
    steps = token.steps
    query = token.query
    tokens_height = max(_ROW_INCHES * len(labels), 1.6)
    heads_height = max(_ROW_INCHES * len(steps.heads), 2.0)
    numbers_height = 1.6
    heights = [tokens_height, tokens_height, tokens_height, heads_height, numbers_height]
    figure = style.figure(15, sum(heights) + _TITLE_INCHES)
    grid = figure.add_gridspec(len(heights), 6, height_ratios=heights)
    _draw_input(figure, grid, style, token, labels)
    _draw_head(figure, grid, style, token, labels)

    axes = figure.add_subplot(grid[3, 0:2])
    head_names = [f"head {i + 1}" for i in range(len(steps.heads))]
    _draw_vectors(
        axes, style, f"6. z of {labels[query]} in every head", steps.heads[:, query], head_names
    )
    _mark_row(axes, style, token.head - 1)
    axes = figure.add_subplot(grid[3, 2:4])
    title = f"7. Concat of the heads, times W^O {tuple(token.output_matrix.shape)}"
    _draw_vectors(axes, style, title, token.output_matrix)

    vectors = token.residual_vectors()
    stacked = torch.stack(list(vectors.values()))
    axes = figure.add_subplot(grid[3, 4:6])
    _draw_vectors(axes, style, "8. Add (and norm)", stacked, list(vectors))
    axes = figure.add_subplot(grid[4, :])
    _draw_numbers(axes, style, stacked[:, :NUM_WRITTEN], list(vectors))
    axes.set_title(f"The vectors of step 8, dimensions 0 to {NUM_WRITTEN - 1}")
    title = f"Self-attention of {labels[query]}: encoder layer {token.layer}, head {token.head}"
    figure.suptitle(title, fontsize=13)
    return figure


def _draw_input(
    figure: Figure, grid: GridSpec, style: Style, token: FollowedToken, labels: list[str]
) -> None:
    """Draw the input of the layer, and of its self-attention, in the first row of the figure."""
    title = "1. Embedding and position"
    if token.layer > 1:
        title = f"1. Output of layer {token.layer - 1}"
    _draw_vectors(figure.add_subplot(grid[0, 0:3]), style, f"{title}: x", token.steps.x, labels)
    title = "x, unchanged in post-norm"
    if token.is_pre_norm:
        title = "Layer norm of x (pre-norm)"
    _draw_vectors(figure.add_subplot(grid[0, 3:6]), style, title, token.steps.layer_input)


def _draw_head(
    figure: Figure, grid: GridSpec, style: Style, token: FollowedToken, labels: list[str]
) -> None:
    """Draw steps 2 to 5, the attention of one head, in two rows of the figure."""
    steps = token.steps
    query = token.query
    head = token.head - 1
    axes = figure.add_subplot(grid[1, 0:2])
    _draw_vectors(axes, style, "2. Queries q = x W^Q", steps.q[head], labels)
    _mark_row(axes, style, query)
    axes = figure.add_subplot(grid[1, 2:4])
    _draw_vectors(axes, style, "Keys k = x W^K", steps.k[head])
    axes = figure.add_subplot(grid[1, 4:6])
    _draw_vectors(axes, style, "Values v = x W^V", steps.v[head])

    columns = torch.stack(
        [
            steps.scores[head, query],
            steps.scaled_scores[head, query],
            steps.weights[head, query],
        ],
        dim=1,
    )  # (S, 3)
    axes = figure.add_subplot(grid[2, 0:2])
    _draw_numbers(axes, style, columns, labels, ["q · k", f"/ √{steps.q.size(-1)}", "softmax"])
    axes.set_title("3. Scores of the keys, scaled, and their softmax")
    weighted_values = steps.weights[head, query][:, None] * steps.v[head]  # (S, d)
    axes = figure.add_subplot(grid[2, 2:4])
    _draw_vectors(axes, style, "4. Values times weights", weighted_values)
    axes = figure.add_subplot(grid[2, 4:6])
    _draw_vectors(axes, style, "5. Their sum z", steps.heads[head, query][None], [labels[query]])


def _draw_vectors(
    axes: Axes, style: Style, title: str, vectors: Tensor, labels: list[str] | None = None
) -> None:
    """Draw vectors as rows of colors. The largest absolute value has the full color."""
    largest = float(vectors.abs().max())
    colors = vectors / max(largest, 1e-12)  # from -1 to 1
    style.heat_map(axes, colors, is_signed=True, row_labels=labels or [])
    axes.set_aspect("auto")
    axes.set_title(title)
    axes.set_xlabel(f"{vectors.size(1)} dimensions, values up to ±{largest:.2g}", fontsize=8)
    axes.set_xticks([])


def _mark_row(axes: Axes, style: Style, row: int) -> None:
    """Draw a frame around one row of a heat map."""
    axes.axhspan(row - 0.5, row + 0.5, fill=False, edgecolor=style.text_color, linewidth=1.5)


def _draw_numbers(
    axes: Axes,
    style: Style,
    numbers: Tensor,
    row_labels: list[str],
    column_labels: list[str] | None = None,
) -> None:
    """Write a table of numbers.

    Colors compare the numbers of each column if columns have labels, and all numbers otherwise.
    """
    scale = numbers.abs().max()
    if column_labels is not None:
        scale = numbers.abs().amax(dim=0)
    colors = numbers / scale.clamp(min=1e-12)
    style.heat_map(
        axes, colors, is_signed=True, row_labels=row_labels, column_labels=column_labels or []
    )
    axes.set_aspect("auto")
    axes.tick_params(axis="x", labelrotation=0, labeltop=True, labelbottom=False)
    style.write_numbers(axes, numbers, colors)
