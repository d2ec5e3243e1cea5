"""The page of self-attention step by step: one HTML file with the numbers of `AttentionSteps`."""

# S source tokens with EOS, d dimensions of a head

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nmt.config import VisualizeConfig
from nmt.runtime.pages import load_page_templates
from nmt.visualize.attention_steps import NUM_WRITTEN, FollowedToken, follow_token

# The background of a cell mixes paper and a color. With at most 60 % color, the text is readable.
_MAX_COLOR_PERCENT = 60


@dataclass(frozen=True)
class Cell:
    """A number in a table, and the color of its background."""

    text: str
    color_percent: int  # 0 for the number 0, `_MAX_COLOR_PERCENT` for the largest number
    is_negative: bool


@dataclass(frozen=True)
class NumberTable:
    """A table of numbers with a title, column names and labeled rows."""

    title: str
    columns: list[str]
    rows: list[tuple[str, list[Cell]]]
    marked_row: int = -1  # index of a row that is framed


def steps_page(config: VisualizeConfig) -> str:
    """Return the page for the token, layer and head of the settings."""
    token = follow_token(config)
    template = load_page_templates(Path(__file__).parent).get_template("steps.html.j2")
    return template.render(
        token=token,
        word=token.pieces[token.query],
        d_model=token.steps.x.size(1),
        head_size=token.steps.q.size(2),
        num_heads=len(token.steps.heads),
        num_written=NUM_WRITTEN,
        sections=make_sections(token),
    )


def make_sections(token: FollowedToken) -> dict[str, list[NumberTable]]:
    """Return the tables of each section of the page, by the section's name in the template."""
    steps = token.steps
    pieces = token.pieces
    token_index = token.query
    head_index = token.head - 1
    weights = steps.weights[head_index, token_index]  # (S,)
    inputs = [vector_table("x", steps.x, pieces, marked_row=token_index)]
    if token.is_pre_norm:
        inputs.append(vector_table("Layer norm of x", steps.layer_input, pieces))
    scores = torch.stack(
        [
            steps.scores[head_index, token_index],
            steps.scaled_scores[head_index, token_index],
            weights,
        ],
        dim=1,
    )  # (S, 3)
    score_names = ["q · k", f"/ √{steps.q.size(2)}", "softmax"]
    weighted_values = weights[:, None] * steps.v[head_index]  # (S, d)
    head_output = steps.heads[head_index, token_index]  # (d,), the sum of the weighted values
    values_and_sum = torch.cat([weighted_values, head_output[None]])  # (S + 1, d)
    head_names = [f"head {number + 1}" for number in range(len(steps.heads))]
    projected = torch.stack([steps.concatenated[token_index], steps.attention[token_index]])
    vectors = token.residual_vectors()
    return {
        "input": inputs,
        "projections": [
            vector_table("Queries q", steps.q[head_index], pieces, marked_row=token_index),
            vector_table("Keys k", steps.k[head_index], pieces),
            vector_table("Values v", steps.v[head_index], pieces),
        ],
        "scores": [number_table("Scores", scores, pieces, score_names)],
        "sum": [
            vector_table("weight · v", values_and_sum, [*pieces, "sum z"], marked_row=len(pieces))
        ],
        "heads": [
            vector_table(
                "z of each head", steps.heads[:, token_index], head_names, marked_row=head_index
            )
        ],
        "projected": [vector_table("Concat", projected, ["Concat", "times W^O"])],
        "norm": [vector_table("Add and norm", torch.stack(list(vectors.values())), list(vectors))],
    }


def vector_table(
    title: str, vectors: Tensor, row_names: list[str], *, marked_row: int = -1
) -> NumberTable:
    """Return a table of the first `NUM_WRITTEN` dimensions of vectors.

    The strongest color is for the largest number of the table.
    """
    numbers = vectors[:, :NUM_WRITTEN]
    num_columns = numbers.size(1)
    largest_number = numbers.abs().max()
    largest_by_column = largest_number.expand(num_columns)
    columns = [str(dimension) for dimension in range(num_columns)]
    return _make_table(title, numbers, row_names, columns, largest_by_column, marked_row)


def number_table(
    title: str, numbers: Tensor, row_names: list[str], columns: list[str]
) -> NumberTable:
    """Return a table of `numbers`. The strongest color is for the largest number of a column."""
    largest_by_column = numbers.abs().amax(dim=0)
    return _make_table(title, numbers, row_names, columns, largest_by_column, -1)


def _make_table(
    title: str,
    numbers: Tensor,
    row_names: list[str],
    columns: list[str],
    largest_by_column: Tensor,
    marked_row: int,
) -> NumberTable:
    """Return a table of `numbers`.

    `largest_by_column` has the absolute value that gets the strongest color, for each column.
    """
    colors = numbers / largest_by_column.clamp(min=1e-12) * _MAX_COLOR_PERCENT
    percents = colors.round().int().tolist()
    rows = []
    for name, row, row_percents in zip(row_names, numbers.tolist(), percents, strict=True):
        cells = []
        for number, percent in zip(row, row_percents, strict=True):
            text = f"{number:.2f}".replace("-", "−")
            cells.append(Cell(text, abs(percent), percent < 0))
        rows.append((name, cells))
    return NumberTable(title, columns, rows, marked_row)
