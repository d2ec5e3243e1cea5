"""The page of self-attention step by step: one HTML file with the numbers of `AttentionSteps`."""

# S source tokens with EOS, D d_model, H heads, d dimensions of a head

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nmt.config import VisualizeConfig
from nmt.runtime.pages import load_page_templates
from nmt.visualize.attention_steps import NUM_WRITTEN, FollowedToken, follow_token

_MAX_SHARE = 60  # percent of color in the cell with the largest number; text stays readable


@dataclass(frozen=True)
class Cell:
    """A number in a table, and its color."""

    text: str
    share: int  # percentage of the color in the cell's background
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
    query = token.query
    head = token.head - 1
    weights = steps.weights[head, query]  # (S,)
    inputs = [vector_table("x", steps.x, pieces, marked_row=query)]
    if token.is_pre_norm:
        inputs.append(vector_table("Layer norm of x", steps.layer_input, pieces))
    scores = torch.stack(
        [steps.scores[head, query], steps.scaled_scores[head, query], weights], dim=1
    )  # (S, 3)
    score_names = ["q · k", f"/ √{steps.q.size(2)}", "softmax"]
    weighted_values = weights[:, None] * steps.v[head]  # (S, d)
    values_and_sum = torch.cat([weighted_values, steps.heads[head, query][None]])
    head_names = [f"head {number + 1}" for number in range(len(steps.heads))]
    projected = torch.stack([steps.concatenated[query], steps.attention[query]])
    vectors = token.residual_vectors()
    return {
        "input": inputs,
        "projections": [
            vector_table("Queries q", steps.q[head], pieces, marked_row=query),
            vector_table("Keys k", steps.k[head], pieces),
            vector_table("Values v", steps.v[head], pieces),
        ],
        "scores": [number_table("Scores", scores, pieces, score_names)],
        "sum": [
            vector_table("weight · v", values_and_sum, [*pieces, "sum z"], marked_row=len(pieces))
        ],
        "heads": [
            vector_table("z of each head", steps.heads[:, query], head_names, marked_row=head)
        ],
        "projected": [vector_table("Concat", projected, ["Concat", "times W^O"])],
        "norm": [vector_table("Add and norm", torch.stack(list(vectors.values())), list(vectors))],
    }


def vector_table(
    title: str, vectors: Tensor, row_names: list[str], *, marked_row: int = -1
) -> NumberTable:
    """Return a table of the first dimensions of vectors, whose colors compare all numbers."""
    numbers = vectors[:, :NUM_WRITTEN]
    largest = numbers.abs().max().expand(numbers.size(1))
    columns = [str(dimension) for dimension in range(numbers.size(1))]
    return _make_table(title, numbers, row_names, columns, largest, marked_row)


def number_table(
    title: str, numbers: Tensor, row_names: list[str], columns: list[str]
) -> NumberTable:
    """Return a table whose colors compare the numbers of a column."""
    return _make_table(title, numbers, row_names, columns, numbers.abs().amax(dim=0), -1)


def _make_table(
    title: str,
    numbers: Tensor,
    row_names: list[str],
    columns: list[str],
    largest: Tensor,
    marked_row: int,
) -> NumberTable:
    """Return a table of `numbers`. The `largest` of each column stands for the full color."""
    shares = (numbers / largest.clamp(min=1e-12) * _MAX_SHARE).round().int().tolist()
    rows = []
    for name, row, row_shares in zip(row_names, numbers.tolist(), shares, strict=True):
        cells = []
        for number, share in zip(row, row_shares, strict=True):
            cells.append(Cell(f"{number:.2f}".replace("-", "−"), abs(share), share < 0))
        rows.append((name, cells))
    return NumberTable(title, columns, rows, marked_row)
