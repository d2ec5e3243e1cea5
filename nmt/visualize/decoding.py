"""The animation of a translation: the encoder's output, the attention of each output token, the
growing tree of the beam search, and the likeliest tokens of each step.

It is one drawing in SVG whose elements appear at a step. The page moves through the steps; the
file `.svg` plays them with CSS alone, so that it also moves in a README.
"""

# S source tokens with EOS, T target tokens with EOS, D d_model, L layers, H heads

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
from nmt.model.fast import FastTransformer
from nmt.model.transformer import alignment_layer, padding_mask
from nmt.runtime.pages import load_page_templates
from nmt.search.hypotheses import Hypothesis
from nmt.translate.attention import attention_model, pair_attention
from nmt.translate.translator import Translator
from nmt.visualize.attention_figure import load_translator, read_sentences
from nmt.visualize.search_tree import Layout, SearchRecord, layout_tree, record_search

_MAX_STEPS = 100  # longer searches are refused
_NUM_VECTOR_CELLS = 12  # dimensions of the encoder's output that are drawn of each token

# sizes are in units of the drawing, about pixels
_MARGIN = 14
_COLUMN_WIDTH = 96  # of a step
_ROW_HEIGHT = 38  # between the leaves of the tree
_BOX_HEIGHT = 24
_BOX_PADDING = 7  # between a text and the left or right side of its box
_BOX_GAP = 6  # between boxes in a row
_BAR_DISTANCE = 20  # between the rows of the likeliest tokens
_CELL_HEIGHT = 5  # of a dimension
_CHARACTER_WIDTH = 8
_MAX_PIECE_LENGTH = 8  # characters that fit into a column beside a percentage
_SECTION_GAP = 46  # with the title of the next section


@dataclass(frozen=True)
class Element:
    """One element of the drawing: a line if it has a `path`, else a text if it has one, else a
    rectangle.

    It is visible from step `first` on, and if `is_brief`, at that step only.
    """

    x: float = 0.0
    y: float = 0.0
    width: float = 0.0
    height: float = 0.0
    text: str = ""
    path: str = ""
    css_class: str = ""
    opacity: float = 1.0
    first: int = 0
    is_brief: bool = False

    def format(self, number: float) -> str:
        """Format a number for an attribute of SVG."""
        return f"{number:.4g}"


@dataclass
class Drawing:
    """The size and the elements of a drawing, from back to front."""

    num_steps: int
    width: float
    height: float = 0.0
    elements: list[Element] = field(default_factory=list)

    def add_title(self, text: str) -> None:
        """Begin a section below all others."""
        self.height += _SECTION_GAP
        self.add_text(_MARGIN, self.height - 12, text, css_class="title")

    def add_text(self, x: float, y: float, text: str, **properties: Any) -> None:
        """Add a text that begins at x, with its baseline at y."""
        self.elements.append(Element(x=x, y=y, text=text, **properties))

    def add_box(self, x: float, y: float, text: str, css_class: str, first: int = 0) -> None:
        """Add a text in a box, the upper left corner of which is at (x, y)."""
        box = Element(
            x=x, y=y, width=box_width(text), height=_BOX_HEIGHT, css_class=css_class, first=first
        )
        self.elements.append(box)
        self.add_text(x + _BOX_PADDING, y + 16, text, first=first)


def box_width(text: str) -> float:
    """Return the width of a box with a text in it."""
    return _CHARACTER_WIDTH * len(text) + 2 * _BOX_PADDING


def decoding_page(config: VisualizeConfig) -> str:
    """Return the page that plays the search of `src`."""
    translator = load_translator(config)
    line = read_sentences(config.src, "src")[0]
    return render_page(search_drawing(translator, line, config.beam_size), line)


def decoding_svg(config: VisualizeConfig) -> str:
    """Return the search of `src` as an SVG that plays by itself."""
    translator = load_translator(config)
    line = read_sentences(config.src, "src")[0]
    return render_svg(search_drawing(translator, line, config.beam_size), line)


def render_page(drawing: Drawing, line: str) -> str:
    """Return the page of the drawing of a search of `line`."""
    templates = load_page_templates(Path(__file__).parent)
    return templates.get_template("decoding.html.j2").render(drawing=drawing, line=line)


def render_svg(drawing: Drawing, line: str) -> str:
    """Return the animated SVG of the drawing of a search of `line`."""
    templates = load_page_templates(Path(__file__).parent)
    return templates.get_template("decoding.svg.j2").render(drawing=drawing, line=line)


def search_drawing(translator: Translator, line: str, beam_size: int | None) -> Drawing:
    """Search for the translation of a line and draw the search."""
    record, hypotheses = record_search(translator, line, beam_size)
    if record.num_steps > _MAX_STEPS:
        raise ConfigError(f"the search took {record.num_steps} steps, {_MAX_STEPS} can be drawn")
    model = attention_model(translator.backend)
    assert model is not None  # record_search refuses ensembles
    tokenizer = translator.tokenizer
    [src_ids] = encode_sources(tokenizer.src, [line], translator.common_tags)
    best_tokens = [id for id in hypotheses[0].tokens if id != tokenizer.tgt.eos_id]
    pair = pair_attention(translator.backend, tokenizer, src_ids, best_tokens)
    if len(pair.src) > len(src_ids):  # with EOS
        src_ids = [*src_ids, tokenizer.src.eos_id]
    layer = alignment_layer(len(pair.cross))
    return draw_decoding(
        record,
        hypotheses,
        tokenizer.tgt,
        src_pieces=pair.src,
        memory=encoder_output(model, src_ids),
        attention=pair.cross[layer].mean(dim=0),  # (T, S)
    )


@torch.inference_mode()
def encoder_output(model: FastTransformer, src_ids: list[int]) -> Tensor:
    """Return the encoder's output for one sentence, (S, D) in float32."""
    src = torch.tensor([src_ids], device=model.embedding.weight.device)
    lengths = torch.tensor([len(src_ids)], device=src.device)
    return model.encode(src, padding_mask(lengths, len(src_ids)))[0].float().cpu()


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
        record: the record of the search.
        hypotheses: its results, best first.
        tokenizer: the target tokenizer.
        src_pieces: S pieces.
        memory: the encoder's output (S, D).
        attention: the weights (T, S) of the best hypothesis.
    """
    best_tokens = list(hypotheses[0].tokens)
    src_width = sum(box_width(piece) + _BOX_GAP for piece in src_pieces)
    tree_width = (record.num_steps + 1) * _COLUMN_WIDTH
    drawing = Drawing(record.num_steps, width=2 * _MARGIN + max(src_width, tree_width))
    # `attention` ends with the weights of EOS, which a hypothesis cut at the length limit lacks
    _draw_source(drawing, src_pieces, memory, attention[: len(best_tokens)])
    drawing.add_title("Best translation")
    x = float(_MARGIN)
    for step, piece in enumerate(tokenizer.pieces(best_tokens), start=1):
        drawing.add_box(x, drawing.height, piece, "best", first=step)
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
    cells = memory[:, :_NUM_VECTOR_CELLS]  # (S, C)
    largest = float(cells.abs().max())
    x = float(_MARGIN)
    y = drawing.height
    for i, piece in enumerate(src_pieces):
        width = box_width(piece)
        drawing.add_box(x, y, piece, "box")
        for step in range(len(attention)):
            heat = Element(
                x=x,
                y=y,
                width=width,
                height=_BOX_HEIGHT,
                css_class="heat",
                opacity=float(attention[step, i]),
                first=step + 1,
                is_brief=True,
            )
            drawing.elements.append(heat)
        for j, value in enumerate((cells[i] / largest).tolist()):
            cell = Element(
                x=x,
                y=y + _BOX_HEIGHT + 4 + _CELL_HEIGHT * j,
                width=width,
                height=_CELL_HEIGHT,
                css_class="positive" if value > 0 else "negative",
                opacity=abs(value),
            )
            drawing.elements.append(cell)
        x += width + _BOX_GAP
    drawing.height += _BOX_HEIGHT + 4 + _CELL_HEIGHT * cells.size(1)


def _draw_tree(
    drawing: Drawing, record: SearchRecord, hypotheses: list[Hypothesis], tokenizer: Tokenizer
) -> None:
    """Draw the tree of the search; a node appears at its step."""
    layout = layout_tree(record, hypotheses)
    results = [tuple(hypothesis.tokens) for hypothesis in hypotheses]
    drawing.height += 10  # for the numbers above the boxes of the first row
    top = drawing.height
    for node, (step, height) in layout.items():
        x = _MARGIN + step * _COLUMN_WIDTH
        y = top + height * _ROW_HEIGHT
        css_class = "box"
        if node == results[0][: len(node)]:
            css_class = "best"
        elif node in results:  # another hypothesis that the search returned
            css_class = "result"
        text = "start"
        if node:
            [text] = tokenizer.pieces([node[-1]])
            _draw_branch(drawing, layout, node, css_class)
        drawing.add_box(x, y, text, css_class, first=step)
        if node in results:
            score = hypotheses[results.index(node)].score
            drawing.add_text(
                x + box_width(text) + 4, y + 16, f"score {score:.2f}", first=step, css_class="small"
            )
        elif node:
            drawing.add_text(
                x, y - 2, f"{record.log_probs[node]:.2f}", first=step, css_class="small"
            )
    num_leaves = 1 + max(height for _, height in layout.values())
    drawing.height += num_leaves * _ROW_HEIGHT


def _draw_branch(drawing: Drawing, layout: Layout, node: tuple[int, ...], css_class: str) -> None:
    """Draw the line from the parent of a node to the node."""
    step, height = layout[node]
    _, parent_height = layout[node[:-1]]
    top = drawing.height + _BOX_HEIGHT / 2
    x = _MARGIN + step * _COLUMN_WIDTH
    y = top + height * _ROW_HEIGHT
    start_x = x - _COLUMN_WIDTH + 20
    start_y = top + parent_height * _ROW_HEIGHT
    path = f"M{start_x} {start_y} H{x - 14} V{y} H{x}"
    line = Element(path=path, css_class=f"branch {css_class}-branch", first=step)
    drawing.elements.insert(0, line)  # behind all boxes


def _draw_likeliest(
    drawing: Drawing, record: SearchRecord, best_tokens: list[int], tokenizer: Tokenizer
) -> None:
    """Draw the likeliest tokens of each step in a column, the chosen one in bold."""
    num_rows = 0
    for step, token in enumerate(best_tokens, start=1):
        likeliest = record.likeliest[tuple(best_tokens[: step - 1])]
        num_rows = max(num_rows, len(likeliest))
        x = _MARGIN + step * _COLUMN_WIDTH
        for rank, (candidate, probability) in enumerate(likeliest):
            y = drawing.height + _BAR_DISTANCE * rank
            bar = Element(
                x=x,
                y=y,
                width=(_COLUMN_WIDTH - 8) * probability,
                height=17,
                css_class="heat",
                opacity=0.35,
                first=step,
            )
            drawing.elements.append(bar)
            [piece] = tokenizer.pieces([candidate])
            if len(piece) > _MAX_PIECE_LENGTH:
                piece = f"{piece[: _MAX_PIECE_LENGTH - 1]}…"
            css_class = "bold" if candidate == token else ""
            text = f"{piece} {probability:.0%}"
            drawing.add_text(x + 3, y + 13, text, first=step, css_class=css_class)
    drawing.height += _BAR_DISTANCE * num_rows
