"""Draw a beam search: the tree of its hypotheses, and the likeliest words of each step.

A node of the tree is a hypothesis of some step, identified by its tokens. The children of a node
extend it by one token. The root is the empty hypothesis. If the tree is too wide, the figure has
several rows, each with some steps of the tree.
"""

# K beam, V vocab

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from nmt.config import VisualizeConfig
from nmt.data.languages import encode_sources, encode_tag
from nmt.data.tokenizer import Tokenizer
from nmt.errors import ConfigError
from nmt.search.hypotheses import Beam, Hypothesis
from nmt.search.request import SearchRequest
from nmt.search.search import search
from nmt.search.stepper import ModelStepper
from nmt.translate.attention import attention_model
from nmt.translate.translator import Translator
from nmt.visualize.attention_figure import load_translator, read_sentences
from nmt.visualize.style import Style

_MAX_STEPS = 100  # longer searches are refused
_MAX_STEPS_PER_ROW = 18
_NUM_LIKELIEST = 6  # number of words to show for each step
_LEAF_INCHES = 0.36  # distance between two leaves of the tree
_STEP_INCHES = 1.05  # width of a step
_WORDS_INCHES = 2.2  # height of a table of words
_NO_WORDS_INCHES = 0.1  # height of an empty table
_MIN_TREE_INCHES = 2.0

Node = tuple[int, ...]  # the tokens of a hypothesis
Layout = dict[Node, tuple[int, float]]
"""The step (x coordinate) and the height (y coordinate) of each node."""


@dataclass
class SearchRecord:
    """Records the search of one sentence, as a `Constraint` that changes nothing.

    Attributes:
        log_probs: the log-probability of each node that was in the beam.
        likeliest: the likeliest next tokens after each of these nodes, with their probabilities.
    """

    can_join: ClassVar[bool] = False  # `__call__` expects the hypotheses of one sentence only
    log_probs: dict[Node, float] = field(default_factory=dict)
    likeliest: dict[Node, list[tuple[int, float]]] = field(default_factory=dict)

    def __call__(self, log_probs: Tensor, beam: Beam) -> Tensor:
        """Record one step. Returns the `log_probs` (K, V) of the next tokens unchanged."""
        top = log_probs.topk(min(_NUM_LIKELIEST, log_probs.size(1)))
        probabilities = top.values.double().exp()
        for i, tokens in enumerate(beam.tokens.tolist()):
            node = tuple(tokens)
            self.log_probs[node] = float(beam.total_log_probs[i])
            likeliest = zip(top.indices[i].tolist(), probabilities[i].tolist(), strict=True)
            self.likeliest[node] = list(likeliest)
        return log_probs

    @property
    def num_steps(self) -> int:
        """Number of steps of the search. The last one extends the longest node in the beam."""
        return 1 + max(len(node) for node in self.log_probs)


def record_search(
    translator: Translator, line: str, beam_size: int | None
) -> tuple[SearchRecord, list[Hypothesis]]:
    """Search one line. Returns the record of the search and its hypotheses, best first."""
    if attention_model(translator.backend) is None:
        raise ConfigError("the search can be drawn of one native model, not of an ensemble")
    # `attention_model` returns a model for a `NativeBackend` only, which has this attribute
    stepper: ModelStepper = translator.backend.stepper  # type: ignore[attr-defined]
    tokenizers = translator.tokenizer
    tags = translator.common_tags
    record = SearchRecord()
    request = SearchRequest(
        sources=encode_sources(tokenizers.src, [line], tags),
        config=translator.search_config(beam_size=beam_size),
        prefixes=[encode_tag(tokenizers.tgt, tags.tgt)],
        constraints=[record],
    )
    hypotheses = search(stepper, request, tokenizers)[0]
    return record, hypotheses


def draw_search(config: VisualizeConfig, style: Style) -> Figure:
    """Draw the tree of the search for one sentence, above the likeliest words of each step."""
    translator = load_translator(config)
    line = read_sentences(config.src, "src")[0]
    record, hypotheses = record_search(translator, line, config.beam_size)
    if record.num_steps > _MAX_STEPS:
        raise ConfigError(f"the search took {record.num_steps} steps, {_MAX_STEPS} can be drawn")
    tokenizer = translator.tokenizer.tgt
    layout = layout_tree(record, hypotheses)
    names = _name_nodes(tokenizer, style, layout)
    num_rows = math.ceil(record.num_steps / _MAX_STEPS_PER_ROW)
    steps_per_row = math.ceil(record.num_steps / num_rows)
    row_layouts = {}  # the layout of each row, keyed by its first step
    for start in range(0, record.num_steps, steps_per_row):
        row_layouts[start] = layout_row(layout, start, steps_per_row)
    best_tokens = list(hypotheses[0].tokens)
    panel_heights: list[float] = []  # inches; for each row a tree, then a table of words
    for start, row_layout in row_layouts.items():
        highest = max(height for _, height in row_layout.values())
        panel_heights.append(max(_MIN_TREE_INCHES, _LEAF_INCHES * highest + 1))
        has_words = start < len(best_tokens)  # false after the end of the best hypothesis
        panel_heights.append(_WORDS_INCHES if has_words else _NO_WORDS_INCHES)
    width = _STEP_INCHES * steps_per_row + 2.4
    figure = style.figure(width, sum(panel_heights) + 0.4 * len(row_layouts))
    panels = figure.subplots(len(panel_heights), 1, height_ratios=panel_heights)
    for i, (start, row_layout) in enumerate(row_layouts.items()):
        # each row has a panel with its tree, and below it a panel with its table of words
        tree_axes = panels[2 * i]
        word_axes = panels[2 * i + 1]
        end = start + steps_per_row
        _draw_tree(tree_axes, style, record, hypotheses, row_layout, names)
        _draw_words(word_axes, style, record, best_tokens[:end], tokenizer, start)
        for axes in (tree_axes, word_axes):
            axes.set_xlim(start - 0.4, end + 1.6)
            axes.set_xticks(range(start, end + 1))
    title_line = line.translate(style.add_fonts_for([line]))
    panels[0].set_title(f"Search for {title_line!r}")
    return figure


def _name_nodes(tokenizer: Tokenizer, style: Style, layout: Layout) -> dict[Node, str]:
    """Return the text to show for each node: its last piece, or "start" for the root.

    Adds fonts for these texts to the style.
    """
    nodes = [node for node in layout if node]
    pieces = tokenizer.pieces([node[-1] for node in nodes])
    replacements = style.add_fonts_for(pieces)
    names: dict[Node, str] = {(): "start"}
    for node, piece in zip(nodes, pieces, strict=True):
        names[node] = piece.translate(replacements)
    return names


def layout_tree(record: SearchRecord, hypotheses: list[Hypothesis]) -> Layout:
    """Return the layout of all nodes that were in the beam, and of `hypotheses`, the results.

    Leaves get the heights 0, 1, 2, ..., and a parent the height of its likeliest child.
    """
    log_probs = dict(record.log_probs)
    for hypothesis in hypotheses:
        log_probs[tuple(hypothesis.tokens)] = hypothesis.log_prob
    children: dict[Node, list[Node]] = {}
    for node in log_probs:
        if node:
            children.setdefault(node[:-1], []).append(node)
    layout: Layout = {}
    num_leaves = 0

    def place_subtree(node: Node) -> float:
        """Place a node and its descendants. Returns the height of the node."""
        nonlocal num_leaves
        if node in children:
            likeliest_first = sorted(children[node], key=log_probs.__getitem__, reverse=True)
            child_heights = [place_subtree(child) for child in likeliest_first]
            height = child_heights[0]
        else:
            height = float(num_leaves)
            num_leaves += 1
        layout[node] = (len(node), height)
        return height

    place_subtree(())
    return layout


def layout_row(layout: Layout, start: int, num_steps: int) -> Layout:
    """Return the layout of one row of the figure: the nodes of `num_steps` steps after `start`.

    The row also has the nodes of step `start` that have children. The heights of its nodes are 0,
    1, 2 and so forth, without a gap.
    """
    parents = {node[:-1] for node in layout if node}
    row: Layout = {}
    for node, (step, height) in layout.items():
        is_parent_at_start = step == start and node in parents
        if is_parent_at_start or start < step <= start + num_steps:
            row[node] = (step, height)
    heights = sorted({height for _, height in row.values()})
    for node, (step, height) in row.items():
        row[node] = (step, float(heights.index(height)))
    return row


def _draw_tree(
    axes: Axes,
    style: Style,
    record: SearchRecord,
    hypotheses: list[Hypothesis],
    layout: Layout,
    names: dict[Node, str],
) -> None:
    """Draw the nodes of `layout`: blue for the best hypothesis, green for the other results."""
    best_result = tuple(hypotheses[0].tokens)
    results = [tuple(hypothesis.tokens) for hypothesis in hypotheses]
    result_paths: set[Node] = set()  # the results and their ancestors
    for result in results:
        for length in range(len(result) + 1):
            result_paths.add(result[:length])
    all_nodes = [*record.log_probs, *results]
    parents = {node[:-1] for node in all_nodes if node}
    for node, (x, y) in layout.items():
        is_on_best_path = node == best_result[: len(node)]  # the best result begins with the node
        if is_on_best_path:
            color = style.colors[0]
        elif node in result_paths:
            color = style.colors[2]
        else:
            color = style.muted_color
        parent = node[:-1]
        if node and parent in layout:
            _draw_branch(axes, layout[parent], (x, y), color, is_best=is_on_best_path)
        text = names[node]
        if node and node in record.log_probs and node not in results:
            text += f"\n{record.log_probs[node]:.2f}"
        box = {"boxstyle": "round,pad=0.25", "facecolor": style.background, "edgecolor": color}
        axes.text(x, y, text, ha="center", va="center", fontsize=8, bbox=box, zorder=3)
        if node in results:
            rank = results.index(node)
            note = f"{rank + 1}.  score {hypotheses[rank].score:.3f}"
            if not hypotheses[rank].finished:
                note += ", cut at the limit"
            axes.text(x + 0.32, y, note, va="center", fontsize=9, color=color)
        elif node not in parents:
            axes.text(x + 0.4, y, "× pruned", va="center", fontsize=7.5, color=style.muted_color)
    axes.invert_yaxis()
    axes.set(yticks=[], ylabel="")
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(bottom=False, labelbottom=False)
    axes.margins(y=0.08)


def _draw_branch(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str, *, is_best: bool
) -> None:
    """Draw the line from a parent at the point `start` to its child at the point `end`."""
    start_x, start_y = start
    end_x, end_y = end
    # horizontal, then a steep line between the two heights, then horizontal to the child
    xs = [start_x, start_x + 0.5, start_x + 0.6, end_x]
    ys = [start_y, start_y, end_y, end_y]
    if is_best:
        axes.plot(xs, ys, color=color, linewidth=2.2, zorder=2)
    else:
        axes.plot(xs, ys, color=color, linewidth=1, zorder=1)


def _draw_words(
    axes: Axes,
    style: Style,
    record: SearchRecord,
    best_tokens: list[int],
    tokenizer: Tokenizer,
    start: int,
) -> None:
    """Draw a table of the likeliest words of each step of the best hypothesis.

    The table begins at step `start` and ends with `best_tokens`, which are in bold.
    """
    if start >= len(best_tokens):
        axes.axis("off")
        return
    probabilities = np.zeros((_NUM_LIKELIEST, len(best_tokens) - start))
    for step in range(start, len(best_tokens)):
        previous_tokens = tuple(best_tokens[:step])
        likeliest = record.likeliest[previous_tokens]
        for rank, (token, probability) in enumerate(likeliest):
            probabilities[rank, step - start] = probability
            piece = tokenizer.pieces([token])[0]
            word = piece.translate(style.add_fonts_for([piece]))
            text = axes.text(step + 1, rank, f"{word}\n{probability:.1%}", fontsize=8)
            text.set(ha="center", va="center")
            if token == best_tokens[step]:
                text.set_fontweight("bold")
            if probability > 0.6:  # on a dark cell
                text.set_color(style.background)
    # the edges left, right, bottom and top; the cell of step i and rank k is centered at (i + 1, k)
    extent = (start + 0.5, len(best_tokens) + 0.5, _NUM_LIKELIEST - 0.5, -0.5)
    axes.imshow(
        probabilities, cmap=style.unsigned_colormap, vmin=0, vmax=1, aspect="auto", extent=extent
    )
    axes.set(title="Likeliest words of each step of the best hypothesis", xlabel="step", yticks=[])
