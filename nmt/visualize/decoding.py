"""The animation of a translation: the encoder's output, the attention of each output token, the
growing tree of the beam search, and the likeliest tokens of each step.

The animation is one SVG drawing. Each of its elements appears at a step of the search. The page has
buttons to move through the steps. An `.svg` file plays the steps with CSS only, so that it also
moves in a README.
"""

# S source tokens with EOS, T target tokens with EOS, D d_model, H heads

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nmt.config import VisualizeConfig
from nmt.data.languages import encode_sources
from nmt.data.tokenizer import Tokenizer
from nmt.errors import ConfigError
from nmt.model.alignment import alignment_layer
from nmt.model.attention import padding_mask
from nmt.model.fast import FastTransformer
from nmt.runtime.pages import load_page_templates
from nmt.search.hypotheses import Hypothesis
from nmt.translate.attention import add_source_eos, attention_model, pair_attention
from nmt.translate.translator import Translator
from nmt.visualize.attention_figure import load_translator, read_sentences
from nmt.visualize.search_tree import Layout, SearchRecord, layout_tree, record_search

PAGE_TEMPLATE = "decoding.html.j2"
SVG_TEMPLATE = "decoding.svg.j2"
_MAX_STEPS = 100  # longer searches are refused
_NUM_DIMENSIONS = 12  # number of dimensions of the encoder's output to draw for each token
_MAX_PIECE_LENGTH = 8  # number of characters that fit into a column beside a percentage

# sizes are in units of the drawing, about pixels
_MARGIN = 14
_SECTION_HEIGHT = 46  # distance between two sections, with the title of the second one between them
_TITLE_DISTANCE = 12  # distance of the baseline of a title from its section
_CHARACTER_WIDTH = 8
_BOX_HEIGHT = 24
_BOX_BASELINE = 16  # distance of the baseline of a text from the top of its box
_BOX_PADDING = 7  # distance of a text from the left and right sides of its box
_BOX_GAP = 6  # distance between boxes in a row
_CELL_HEIGHT = 5  # height of the rectangle of one dimension of a vector
_CELLS_GAP = 4  # distance of these rectangles from the box of their token
# the tree and the likeliest tokens
_COLUMN_WIDTH = 96  # width of a step
_ROW_HEIGHT = 38  # distance between leaves of the tree
_NUMBER_HEIGHT = 10  # height of the number above a box
_NUMBER_GAP = 2  # distance of this number from the box
_SCORE_GAP = 4  # distance of a score from the box to its left
_BRANCH_START = 20  # x of a branch in the column of the parent
_BRANCH_END = 14  # distance of the vertical line of a branch from the child
_BAR_DISTANCE = 20  # distance between the bars of two tokens of a step
_BAR_HEIGHT = 17
_BAR_BASELINE = 13  # distance of the baseline of a text from the top of its bar
_BAR_PADDING = 3  # distance of a text from the left side of its bar
_BAR_GAP = 8  # distance of a bar of probability 1 from the next column
_BAR_OPACITY = 0.35


@dataclass(frozen=True)
class Element:
    """One element of the drawing.

    An element with a `path` is a line, and an element with a `text` is a text. An element with
    neither is a rectangle. An element appears at `first_step` and stays, unless `is_brief`: then it
    is visible at this step only.
    """

    x: float = 0.0
    y: float = 0.0
    width: float = 0.0
    height: float = 0.0
    text: str = ""
    path: str = ""
    css_class: str = ""
    opacity: float = 1.0
    first_step: int = 0
    is_brief: bool = False


@dataclass
class Drawing:
    """The size and the elements of a drawing, from back to front."""

    num_steps: int
    width: float
    height: float = 0.0
    elements: list[Element] = field(default_factory=list)

    def add_title(self, text: str) -> None:
        """Begin a section below all others."""
        self.height += _SECTION_HEIGHT
        self.add_text(_MARGIN, self.height - _TITLE_DISTANCE, text, css_class="title")

    def add_text(self, x: float, y: float, text: str, **properties: Any) -> None:
        """Add a text that begins at x, with its baseline at y."""
        self.elements.append(Element(x=x, y=y, text=text, **properties))

    def add_box(self, x: float, y: float, text: str, css_class: str, first_step: int = 0) -> None:
        """Add a text in a box with its upper left corner at (x, y)."""
        box = Element(
            x=x,
            y=y,
            width=box_width(text),
            height=_BOX_HEIGHT,
            css_class=css_class,
            first_step=first_step,
        )
        self.elements.append(box)
        self.add_text(x + _BOX_PADDING, y + _BOX_BASELINE, text, first_step=first_step)


def box_width(text: str) -> float:
    """Return the width of the box of a text."""
    return _CHARACTER_WIDTH * len(text) + 2 * _BOX_PADDING


def decoding_page(config: VisualizeConfig) -> str:
    """Return the page that plays the search of `src`."""
    return _draw_and_render(config, PAGE_TEMPLATE)


def decoding_svg(config: VisualizeConfig) -> str:
    """Return the search of `src` as an SVG that plays by itself."""
    return _draw_and_render(config, SVG_TEMPLATE)


def _draw_and_render(config: VisualizeConfig, template: str) -> str:
    """Search for the translation of the first line of `src`, and render the search."""
    translator = load_translator(config)
    line = read_sentences(config.src, "src")[0]
    drawing = search_and_draw(translator, line, config.beam_size)
    return render(template, drawing, line)


def render(template: str, drawing: Drawing, line: str) -> str:
    """Return the drawing of the search for `line` as a page or an animated SVG."""
    templates = load_page_templates(Path(__file__).parent)
    return templates.get_template(template).render(drawing=drawing, line=line)


def search_and_draw(translator: Translator, line: str, beam_size: int | None) -> Drawing:
    """Search for the translation of a line, and return the drawing of the search."""
    record, hypotheses = record_search(translator, line, beam_size)
    if record.num_steps > _MAX_STEPS:
        raise ConfigError(f"the search took {record.num_steps} steps, {_MAX_STEPS} can be drawn")
    model = attention_model(translator.backend)
    assert model is not None  # record_search refuses ensembles
    tokenizers = translator.tokenizer
    src_ids = encode_sources(tokenizers.src, [line], translator.common_tags)[0]
    tgt_ids = [token for token in hypotheses[0].tokens if token != tokenizers.tgt.eos_id]
    pair = pair_attention(translator.backend, tokenizers, src_ids, tgt_ids)
    cross_attention = pair.cross[alignment_layer(len(pair.cross))]  # (H, T, S)
    return draw_decoding(
        record,
        hypotheses,
        tokenizers.tgt,
        src_pieces=pair.src,
        memory=encoder_output(model, add_source_eos(src_ids, model, tokenizers)),
        attention=cross_attention.mean(dim=0),  # (T, S)
    )


@torch.inference_mode()
def encoder_output(model: FastTransformer, src_ids: list[int]) -> Tensor:
    """Return the encoder's output (S, D) in float32 for the ids of one sentence."""
    src = torch.tensor([src_ids], device=model.embedding.weight.device)
    lengths = torch.tensor([len(src_ids)], device=src.device)
    memory = model.encode(src, padding_mask(lengths, len(src_ids)))  # (1, S, D)
    return memory[0].float().cpu()


def draw_decoding(
    record: SearchRecord,
    hypotheses: list[Hypothesis],
    tokenizer: Tokenizer,
    *,
    src_pieces: list[str],
    memory: Tensor,
    attention: Tensor,
) -> Drawing:
    """Draw a search.

    Args:
        record: the nodes of the search and the likeliest tokens after each of them.
        hypotheses: the results of the search, best first.
        tokenizer: the target tokenizer.
        src_pieces: the S pieces that the encoder reads.
        memory: the encoder's output (S, D).
        attention: the attention weights (T, S) of the best hypothesis and EOS.
    """
    best_tokens = list(hypotheses[0].tokens)  # with EOS, unless the length limit ended the search
    src_width = sum(box_width(piece) + _BOX_GAP for piece in src_pieces)
    tree_width = (record.num_steps + 1) * _COLUMN_WIDTH
    drawing = Drawing(record.num_steps, width=2 * _MARGIN + max(src_width, tree_width))
    _draw_source(drawing, src_pieces, memory, attention[: len(best_tokens)])
    drawing.add_title("Best translation")
    x = float(_MARGIN)
    for step, piece in enumerate(tokenizer.pieces(best_tokens), start=1):
        drawing.add_box(x, drawing.height, piece, "best", first_step=step)
        x += box_width(piece) + _BOX_GAP
    drawing.height += _BOX_HEIGHT
    drawing.add_title("Beam search: the hypotheses of each step, with their log-probabilities")
    _draw_tree(drawing, record, hypotheses, tokenizer)
    drawing.add_title("Likeliest next tokens of the best hypothesis")
    _draw_likeliest(drawing, record, best_tokens, tokenizer)
    drawing.height += _MARGIN
    return drawing


def _draw_source(
    drawing: Drawing, src_pieces: list[str], memory: Tensor, attention: Tensor
) -> None:
    """Draw the source tokens, their vectors, and the attention of each step to them."""
    drawing.add_title("Source: output of the encoder, and attention of each output token")
    vectors = memory[:, :_NUM_DIMENSIONS]  # (S, up to _NUM_DIMENSIONS)
    largest = float(vectors.abs().max())
    x = float(_MARGIN)
    y = drawing.height
    for i, piece in enumerate(src_pieces):
        width = box_width(piece)
        drawing.add_box(x, y, piece, "box")
        for step in range(len(attention)):
            attention_box = Element(
                x=x,
                y=y,
                width=width,
                height=_BOX_HEIGHT,
                css_class="heat",
                opacity=float(attention[step, i]),
                first_step=step + 1,
                is_brief=True,
            )
            drawing.elements.append(attention_box)
        cells_top = y + _BOX_HEIGHT + _CELLS_GAP
        values = (vectors[i] / largest).tolist()  # from -1 to 1
        for j, value in enumerate(values):
            cell = Element(
                x=x,
                y=cells_top + _CELL_HEIGHT * j,
                width=width,
                height=_CELL_HEIGHT,
                css_class="positive" if value > 0 else "negative",
                opacity=abs(value),
            )
            drawing.elements.append(cell)
        x += width + _BOX_GAP
    drawing.height += _BOX_HEIGHT + _CELLS_GAP + _CELL_HEIGHT * vectors.size(1)


def _draw_tree(
    drawing: Drawing, record: SearchRecord, hypotheses: list[Hypothesis], tokenizer: Tokenizer
) -> None:
    """Draw the tree of the search. A node appears at its step, and a result has its score."""
    layout = layout_tree(record, hypotheses)
    results = [tuple(hypothesis.tokens) for hypothesis in hypotheses]
    best_result = results[0]
    drawing.height += _NUMBER_HEIGHT
    top = drawing.height
    for node, (step, row) in layout.items():
        x = _MARGIN + step * _COLUMN_WIDTH
        y = top + row * _ROW_HEIGHT
        css_class = "box"
        if node == best_result[: len(node)]:  # the best result begins with this node
            css_class = "best"
        elif node in results:  # another hypothesis that the search returned
            css_class = "result"
        text = "start"
        if node:
            text = tokenizer.pieces([node[-1]])[0]
            _draw_branch(drawing, layout, node, css_class)
        drawing.add_box(x, y, text, css_class, first_step=step)
        if node in results:
            hypothesis = hypotheses[results.index(node)]
            drawing.add_text(
                x + box_width(text) + _SCORE_GAP,
                y + _BOX_BASELINE,
                f"score {hypothesis.score:.2f}",
                first_step=step,
                css_class="small",
            )
        elif node:
            log_prob = f"{record.log_probs[node]:.2f}"
            drawing.add_text(x, y - _NUMBER_GAP, log_prob, first_step=step, css_class="small")
    num_rows = 1 + max(row for _, row in layout.values())
    drawing.height += num_rows * _ROW_HEIGHT


def _draw_branch(drawing: Drawing, layout: Layout, node: tuple[int, ...], css_class: str) -> None:
    """Draw the line from the parent of a node to the node, behind all boxes."""
    step, row = layout[node]
    _, parent_row = layout[node[:-1]]
    top = drawing.height + _BOX_HEIGHT / 2
    x = _MARGIN + step * _COLUMN_WIDTH
    y = top + row * _ROW_HEIGHT
    start_x = x - _COLUMN_WIDTH + _BRANCH_START
    start_y = top + parent_row * _ROW_HEIGHT
    # in SVG, M moves to a point, H draws a horizontal line up to an x, and V a vertical line
    path = f"M{start_x} {start_y} H{x - _BRANCH_END} V{y} H{x}"
    line = Element(path=path, css_class=f"branch {css_class}-branch", first_step=step)
    drawing.elements.insert(0, line)


def _draw_likeliest(
    drawing: Drawing, record: SearchRecord, best_tokens: list[int], tokenizer: Tokenizer
) -> None:
    """Draw the likeliest tokens of each step in a column. The token of the result is in bold."""
    num_rows = 0
    for step, token in enumerate(best_tokens, start=1):
        previous_tokens = tuple(best_tokens[: step - 1])  # steps count from 1
        likeliest = record.likeliest[previous_tokens]
        num_rows = max(num_rows, len(likeliest))
        x = _MARGIN + step * _COLUMN_WIDTH
        for rank, (candidate, probability) in enumerate(likeliest):
            y = drawing.height + _BAR_DISTANCE * rank
            bar = Element(
                x=x,
                y=y,
                width=(_COLUMN_WIDTH - _BAR_GAP) * probability,
                height=_BAR_HEIGHT,
                css_class="heat",
                opacity=_BAR_OPACITY,
                first_step=step,
            )
            drawing.elements.append(bar)
            piece = tokenizer.pieces([candidate])[0]
            if len(piece) > _MAX_PIECE_LENGTH:
                first_characters = piece[: _MAX_PIECE_LENGTH - 1]  # one less for the ellipsis
                piece = f"{first_characters}…"
            css_class = "bold" if candidate == token else ""
            text = f"{piece} {probability:.0%}"
            drawing.add_text(
                x + _BAR_PADDING, y + _BAR_BASELINE, text, first_step=step, css_class=css_class
            )
    drawing.height += _BAR_DISTANCE * num_rows
