"""The figure of embeddings: pieces on two axes, and the nearest neighbors of words."""

# In shapes: D is d_model, V the size of the vocabulary, N the number of drawn pieces and C the
# number of candidates for neighbors.

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from nmt.config import VisualizeConfig
from nmt.data.tokenizer import Tokenizer
from nmt.errors import ConfigError
from nmt.visualize.attention_figure import load_single_model
from nmt.visualize.style import Style

_NUM_DEFAULT_WORDS = 12
_NUM_NEIGHBORS = 3
_MIN_NEIGHBOR_LINES = 8  # with fewer words, the last lines of the list stay empty


def draw_embeddings(config: VisualizeConfig, style: Style) -> Figure:
    """Draw pieces on the first two principal components of the target embedding.

    Beside them, lists the nearest neighbors of some words.
    """
    translator, model = load_single_model(config, "embeddings")
    tokenizer = translator.tokenizer.tgt
    vectors = model.embedding.weight.detach().float().cpu()  # (V, D)
    ids = list_text_ids(tokenizer)
    words = config.words or choose_words(tokenizer, ids)
    # for `str.translate`: characters that no font has are replaced by their codes
    replacements = style.add_fonts_for([*words, *tokenizer.pieces(ids)])
    figure = style.figure(13, 6.5)
    point_axes, neighbor_axes = figure.subplots(1, 2, width_ratios=[1.5, 1])
    drawn_ids = ids[: config.num_pieces]
    points = principal_components(vectors[drawn_ids]).numpy()  # (N, 2)
    point_axes.scatter(points[:, 0], points[:, 1], s=6, color=style.colors[5])
    labels = [piece.translate(replacements) for piece in tokenizer.pieces(drawn_ids)]
    _label_points(point_axes, points, labels)
    point_axes.set(
        title=f"{len(points)} pieces, first two principal components", xticks=[], yticks=[]
    )
    neighbor_axes.set_title("Nearest neighbors by cosine")
    neighbor_axes.axis("off")
    num_lines = max(len(words), _MIN_NEIGHBOR_LINES)
    for row, word in enumerate(words):
        neighbors = _describe_neighbors(tokenizer, vectors, ids, word)
        baseline = row + 0.7  # in lines from the top
        y = 1 - baseline / num_lines  # in the coordinates of the axes, 1 at the top
        neighbor_axes.text(
            0,
            y,
            word.translate(replacements),
            fontweight="bold",
            transform=neighbor_axes.transAxes,
        )
        neighbor_axes.text(
            0.33,
            y,
            neighbors.translate(replacements),
            fontsize=8.5,
            transform=neighbor_axes.transAxes,
        )
    return figure


def list_text_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the ids of pieces that are text: no control symbol, language or single byte."""
    special_ids = {*tokenizer.control_ids, *tokenizer.language_ids.values(), *tokenizer.byte_ids}
    return [i for i in range(tokenizer.vocab_size) if i not in special_ids]


def choose_words(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """Return pieces, evenly spread over `ids`, that begin a word and have three letters or more."""
    pieces = tokenizer.all_pieces()
    word_ids = []
    for i in ids:
        has_three_letters = len(pieces[i]) > 3  # besides the mark "▁"
        if pieces[i].startswith("▁") and has_three_letters:
            word_ids.append(i)
    if not word_ids:  # a vocabulary of characters
        word_ids = ids
    step = max(1, len(word_ids) // _NUM_DEFAULT_WORDS)
    chosen_ids = word_ids[::step][:_NUM_DEFAULT_WORDS]
    return [tokenizer.decode([i]) for i in chosen_ids]


def _label_points(axes: Axes, points: np.ndarray[Any, Any], labels: list[str]) -> None:
    """Write labels at points (N, 2), in order, except where they would cover an earlier label."""
    plot_size = np.ptp(points, axis=0)  # (2,)
    label_width = plot_size[0] / 9  # estimates for labels of usual length
    label_height = plot_size[1] / 32
    labeled: list[tuple[float, float]] = []
    for i, label in enumerate(labels):
        x, y = points[i].tolist()
        covers_label = False
        for other_x, other_y in labeled:
            if abs(x - other_x) <= label_width and abs(y - other_y) <= label_height:
                covers_label = True
        if not covers_label:
            labeled.append((x, y))
            axes.text(x, y, label, fontsize=8)


def _describe_neighbors(tokenizer: Tokenizer, vectors: Tensor, ids: list[int], word: str) -> str:
    """List the pieces that are nearest to the mean embedding of a word's pieces."""
    prefix_length = len(tokenizer.prefix_ids)  # such as a language tag
    word_ids = tokenizer.encode(word)[prefix_length:]
    if not word_ids:
        raise ConfigError(f"words={word!r} has no text; give a word")
    candidates = [i for i in ids if i not in word_ids]
    query = vectors[word_ids].mean(dim=0)  # (D,)
    descriptions = []
    for piece_id, cosine in find_neighbors(vectors, query, candidates, _NUM_NEIGHBORS):
        [piece] = tokenizer.pieces([piece_id])
        descriptions.append(f"{piece} {cosine:.2f}")
    return ",  ".join(descriptions)


def find_neighbors(
    vectors: Tensor, query: Tensor, ids: list[int], num_neighbors: int
) -> list[tuple[int, float]]:
    """Return the nearest `ids` with their cosines. `vectors` are (V, D), `query` is (D,)."""
    cosines = torch.nn.functional.cosine_similarity(vectors[ids], query[None], dim=1)  # (C,)
    nearest = cosines.topk(min(num_neighbors, len(ids))).indices.tolist()
    return [(ids[i], float(cosines[i])) for i in nearest]


def principal_components(vectors: Tensor) -> Tensor:
    """Project `vectors` (N, D) to their first two principal components (N, 2)."""
    centered = vectors - vectors.mean(dim=0)
    u, singular_values, _ = torch.linalg.svd(centered.double(), full_matrices=False)
    components: Tensor = (u * singular_values)[:, :2].float()
    return components
