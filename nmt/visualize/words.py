"""Figures of a model at work on text: attention, the tree of a search, embeddings."""

# L layers, H heads, S source tokens, T target tokens, D d_model, V vocab

from __future__ import annotations

import logging
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nmt.config import AttentionKind, VisualizeConfig
from nmt.data.batch import pad_source
from nmt.data.languages import encode_sources, encode_starts
from nmt.data.text import read_input
from nmt.data.tokenizer import Tokenizer
from nmt.errors import ConfigError, DataError
from nmt.model.fast import FastTransformer
from nmt.model.transformer import causal_mask
from nmt.runtime.distributed import set_num_threads
from nmt.search.hypotheses import ControlIds, Hypothesis, Live
from nmt.search.search import search
from nmt.search.stepper import ModelStepper
from nmt.translate.attention import PairAttention, attention_model
from nmt.translate.translator import Translator

if TYPE_CHECKING:  # matplotlib, which pages do without
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from nmt.visualize.style import Style

log = logging.getLogger(__name__)
_FEW_PANELS = 6  # so many show their pieces
_MOST_STEPS = 100  # of a drawn search
_STEPS_A_ROW = 18  # at most
_TOP_WORDS = 6  # of a step


def load(config: VisualizeConfig) -> Translator:
    """Load the model of the settings."""
    set_num_threads(config.num_threads)
    return Translator.load(config.model_dir, device=config.device)


def read_texts(given: str | None, name: str) -> list[str]:
    """Return the lines of a file, of stdin for None or -, or `given` itself where no file has that
    name.
    """
    if given in (None, "-"):
        if sys.stdin is not None and sys.stdin.isatty():
            log.info("reading %s from the terminal; Ctrl-D ends it", name)
        lines = list(read_input("-"))
    else:
        assert given is not None
        try:
            lines = list(read_input(given)) if Path(given).is_file() else [given]
        except OSError:  # a name that is too long
            lines = [given]
    if not any(line.strip() for line in lines):
        raise DataError(f"{name}: there is no text; give {name}='a sentence', or lines on stdin")
    return lines


def attention_of(config: VisualizeConfig) -> list[PairAttention]:
    """Return the attention of the pairs that the settings name, or of what the model translates."""
    translator, sources = load(config), read_texts(config.src, "src")
    targets = None if config.tgt is None else read_texts(config.tgt, "tgt")
    return translator.attention(sources, targets, beam_size=config.beam_size)


def draw_attention(config: VisualizeConfig, style: Style) -> Figure:
    """Draw chosen layers and heads of one kind of attention, of the first pair."""
    found = attention_of(config)
    if len(found) > 1:
        log.info("drawing the first of %d pairs; output=FILE.html shows them all", len(found))
    kind, layers, heads = config.kind, config.layers, config.heads
    return attention_figure(found[0], style, kind=kind, layers=layers, heads=heads)


def attention_figure(
    pair: PairAttention, style: Style, *, kind: AttentionKind, layers: list[int], heads: list[int]
) -> Figure:
    """Draw the heads (0: their mean) of the layers, both counted from 1; no number means all."""
    weights: Tensor = getattr(pair, kind.value)  # (L, H, T or S, S or T)
    layers = layers or list(range(1, len(weights) + 1))
    heads = heads or list(range(1, weights.size(1) + 1))
    for name, numbers, most in (
        ("layers", layers, len(weights)),
        ("heads", heads, weights.size(1)),
    ):
        if max(numbers) > most:
            raise ConfigError(f"{name}={max(numbers)}: the model has {most}")
    rows = {"cross": pair.predicted, "encoder": pair.src, "decoder": pair.tgt}[kind.value]
    columns = pair.tgt if kind is AttentionKind.decoder else pair.src
    codes = style.find_fonts([*rows, *columns])
    rows, columns = ([piece.translate(codes) for piece in side] for side in (rows, columns))
    is_big = len(layers) * len(heads) <= _FEW_PANELS
    width, height = (0.24 * len(columns) + 1.6, 0.24 * len(rows) + 1.6) if is_big else (1.5, 1.5)
    shape = (width * len(heads) + 0.6, height * len(layers) + 0.6)
    figure = style.figure(*shape)
    panels = figure.subplots(len(layers), len(heads), squeeze=False)
    hidden = ~causal_mask(len(rows)) if kind is AttentionKind.decoder else None
    names = {"rows": rows, "columns": columns} if is_big else {}
    for layer, line in zip(layers, panels, strict=True):
        for head, axes in zip(heads, line, strict=True):
            chosen = weights[layer - 1]
            shown = chosen[head - 1] if head else chosen.mean(dim=0)
            style.heat(axes, shown, hidden=hidden, **names)
            name = f"head {head}" if head else "mean of heads"
            axes.set_title(f"layer {layer}, {name}", fontsize=11 if is_big else 8)
            if not is_big:
                axes.set(xticks=[], yticks=[])
    titles = {"cross": "the source", "encoder": "source to source", "decoder": "target to target"}
    title = "Attention of the target to " if kind is AttentionKind.cross else "Attention, "
    figure.suptitle(f"{title}{titles[kind.value]}; a row attends to columns", fontsize=11)
    return figure


# --- search


@dataclass
class SearchSteps:
    """What a search of one sentence went through: a step's live hypotheses and likeliest words."""

    sums: dict[tuple[int, ...], float] = field(default_factory=dict)  # of tokens that were alive
    words: dict[tuple[int, ...], list[tuple[int, float]]] = field(default_factory=dict)
    """The likeliest next tokens after those, with their probabilities."""

    def __call__(self, log_probs: Tensor, live: Live) -> Tensor:
        """Record a step, as a `Constraint` that changes nothing."""
        top = log_probs.topk(min(_TOP_WORDS, log_probs.size(1)))
        columns = (x.tolist() for x in (live.tokens, live.sums, top.indices, top.values))
        for tokens, total, ids, values in zip(*columns, strict=True):
            self.sums[tuple(tokens)] = total
            likely = zip(ids, map(math.exp, values), strict=True)
            self.words[tuple(tokens)] = list(likely)
        return log_probs

    def __len__(self) -> int:
        return 1 + max(map(len, self.sums))


def record_search(
    translator: Translator, line: str, beam_size: int | None
) -> tuple[SearchSteps, list[Hypothesis]]:
    """Search one line and return what happened, with the hypotheses found, best first."""
    if attention_model(translator.backend) is None:
        raise ConfigError("what=search draws one native model, no ensemble")
    stepper: ModelStepper = translator.backend.stepper  # type: ignore[attr-defined]
    tokenizer, steps = translator.tokenizer, SearchSteps()
    config = translator.search_config(beam_size=beam_size)
    tags, ids = translator.own_tags, ControlIds.of(tokenizer)
    given = pad_source(encode_sources(tokenizer.src, [line], tags), tokenizer)
    begin = encode_starts(tokenizer.tgt, [""], tags.tgt)
    return steps, search(stepper, *given, config, ids, prefixes=begin, constraints=[steps])[0]


def draw_search(config: VisualizeConfig, style: Style) -> Figure:
    """Draw the tree of the search for one sentence, above the likeliest words of each step."""
    translator, [line, *_] = load(config), read_texts(config.src, "src")
    steps, found = record_search(translator, line, config.beam_size)
    if len(steps) > _MOST_STEPS:
        raise ConfigError(f"the search took {len(steps)} steps, {_MOST_STEPS} can be drawn")
    tokenizer = translator.tokenizer.tgt
    places = tree_places(steps, found)
    codes = style.find_fonts(tokenizer.pieces([t for node in places for t in node[-1:]]))
    names = {node: tokenizer.pieces(node[-1:])[0].translate(codes) for node in places if node}
    width = math.ceil(len(steps) / math.ceil(len(steps) / _STEPS_A_ROW))
    starts, best = range(0, len(steps), width), list(found[0].tokens)
    rows = [row_of_tree(places, start, width) for start in starts]
    ratios: list[float] = []
    for start, row in zip(starts, rows, strict=True):
        height = max(2.0, 0.36 * max(y for _, y in row.values()) + 1)
        ratios += [height, 2.2 if start < len(best) else 0.1]
    figure = style.figure(1.05 * width + 2.4, sum(ratios) + 0.4 * len(rows))
    panels = figure.subplots(2 * len(rows), 1, height_ratios=ratios, squeeze=False)[:, 0]
    for start, row, tree, words in zip(starts, rows, panels[::2], panels[1::2], strict=True):
        _draw_tree(tree, style, steps, found, row, names)
        _draw_words(words, style, steps, best[: start + width], tokenizer, start)
        for axes in (tree, words):
            axes.set_xlim(start - 0.4, start + width + 1.6)
            axes.set_xticks(range(start, start + width + 1))
    panels[0].set_title(f"Search for {line.translate(style.find_fonts([line]))!r}")
    return figure


def _draw_words(
    axes: Axes, style: Style, steps: SearchSteps, best: list[int], tokenizer: Tokenizer, start: int
) -> None:
    """Draw the likeliest words of a row's steps, the chosen ones in bold."""
    chosen = range(start, len(best))
    if not chosen:
        axes.axis("off")
        return
    shares = np.zeros((_TOP_WORDS, len(chosen)))
    for step in chosen:
        for rank, (token, share) in enumerate(steps.words[tuple(best[:step])]):
            shares[rank, step - start] = share
            ink = style.paper if share > 0.6 else style.ink
            piece = tokenizer.pieces([token])[0]
            text = f"{piece.translate(style.find_fonts([piece]))}\n{share:.1%}"
            weight = "bold" if token == best[step] else "normal"
            how: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8, "color": ink}
            axes.text(step + 1, rank, text, fontweight=weight, **how)
    extent = (start + 0.5, chosen[-1] + 1.5, _TOP_WORDS - 0.5, -0.5)
    axes.imshow(shares, cmap=style.weights, vmin=0, vmax=1, aspect="auto", extent=extent)
    axes.set(title="Likeliest words of each step of the best hypothesis", xlabel="step", yticks=[])


Places = dict[tuple[int, ...], tuple[int, float]]
"""For each node of a tree, as its tokens, the step and the height of its place."""


def row_of_tree(places: Places, start: int, width: int) -> Places:
    """Return the places of the steps that one row of the picture shows, without empty heights; the
    last step of the row before is repeated where it goes on.
    """
    inner = {node[:-1] for node in places if node}
    shown = {
        node: (step, y)
        for node, (step, y) in places.items()
        if start < step <= start + width or (step == start and node in inner)
    }
    heights = sorted({y for _, y in shown.values()})
    return {node: (step, float(heights.index(y))) for node, (step, y) in shown.items()}


def tree_places(steps: SearchSteps, found: list[Hypothesis]) -> Places:
    """Return the places of all nodes."""
    sums = dict(steps.sums) | {tuple(h.tokens): h.log_prob for h in found}
    children: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for node in sums:
        if node:
            children.setdefault(node[:-1], []).append(node)
    places: Places = {}
    num_leaves = 0

    def place(node: tuple[int, ...]) -> float:
        nonlocal num_leaves
        heights = [place(child) for child in sorted(children.get(node, []), key=lambda n: -sums[n])]
        num_leaves += not heights
        y = heights[0] if heights else float(num_leaves - 1)  # a straight line of the likeliest
        places[node] = (len(node), y)
        return y

    place(())
    return places


def _draw_tree(
    axes: Axes, style: Style, steps: SearchSteps, found: list[Hypothesis], places: Places,
    names: dict[tuple[int, ...], str],
) -> None:  # fmt: skip
    """Draw the part of the tree whose places are given."""
    best, ends = tuple(found[0].tokens), {tuple(h.tokens): h for h in found}
    kept = {end[:i] for end in ends for i in range(len(end) + 1)}
    inner = {node[:-1] for node in (*steps.sums, *ends) if node}
    for node, (x, y) in places.items():
        on_best, is_kept = node == best[: len(node)], node in kept
        color = style.colors[0] if on_best else style.colors[2] if is_kept else style.quiet
        if node[:-1] in places and node:
            x0, y0 = places[node[:-1]]
            path = ([x0, x0 + 0.5, x0 + 0.6, x], [y0, y0, y, y])
            axes.plot(*path, color=color, linewidth=2.2 if on_best else 1, zorder=1 + on_best)
        total = steps.sums.get(node)
        box = {"boxstyle": "round,pad=0.25", "facecolor": style.paper, "edgecolor": color}
        text = names.get(node, "start") + (f"\n{total:.2f}" if total and node not in ends else "")
        axes.text(x, y, text, ha="center", va="center", fontsize=8, bbox=box, zorder=3)
        if node in ends:
            hypothesis = ends[node]
            rank = 1 + found.index(hypothesis)
            note = f"{rank}.  score {hypothesis.score:.3f}"
            note += "" if hypothesis.finished else ", cut at the limit"
            axes.text(x + 0.32, y, note, va="center", fontsize=9, color=color)
        elif node not in inner:
            axes.text(x + 0.4, y, "× pruned", va="center", fontsize=7.5, color=style.quiet)
    axes.invert_yaxis()
    axes.set(yticks=[], ylabel="")
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(bottom=False, labelbottom=False)
    axes.margins(y=0.08)


# --- embeddings


def shown_pieces(tokenizer: Tokenizer) -> list[int]:
    """Return the ids of pieces that are text: no control symbol, language or single byte."""
    rest = {*tokenizer.control_ids, *tokenizer.languages.values(), *tokenizer.byte_ids}
    return [i for i in range(tokenizer.vocab_size) if i not in rest]


def neighbors(
    vectors: Tensor, query: Tensor, ids: list[int], *, num: int = 6
) -> list[tuple[int, float]]:
    """Return those of `ids` whose `vectors` (V, D) are nearest to `query` (D,), with the cosine."""
    cosines = torch.nn.functional.cosine_similarity(vectors[ids], query[None], dim=1)
    best = cosines.topk(min(num, len(ids)))
    return [(ids[i], c) for i, c in zip(best.indices.tolist(), best.values.tolist(), strict=True)]


def project(vectors: Tensor) -> Tensor:
    """Return the first two principal components (N, 2) of `vectors` (N, D)."""
    centered = vectors - vectors.mean(dim=0)
    u, s, _ = torch.linalg.svd(centered.double(), full_matrices=False)
    places: Tensor = (u * s)[:, :2].float()
    return places


def draw_embeddings(config: VisualizeConfig, style: Style) -> Figure:
    """Draw the pieces on the two axes of their embeddings' greatest variance, with a list of the
    nearest neighbors of some words.
    """
    translator = load(config)
    model: FastTransformer | None = attention_model(translator.backend)
    if model is None:
        raise ConfigError("what=embeddings draws one native model, no ensemble")
    tokenizer, vectors = translator.tokenizer.tgt, model.embedding.weight.detach().float().cpu()
    ids = shown_pieces(tokenizer)
    whole = [i for i in ids if tokenizer.pieces([i])[0].startswith("▁")]
    whole = [i for i in whole if len(tokenizer.pieces([i])[0]) > 3] or ids
    words = config.words or [tokenizer.decode([i]) for i in whole[:: max(1, len(whole) // 12)][:12]]
    codes = style.find_fonts([*words, *tokenizer.pieces(ids)])
    figure = style.figure(13, 6.5)
    left, right = figure.subplots(1, 2, width_ratios=[1.5, 1])
    places = project(vectors[ids[: config.num_pieces]]).numpy()
    left.scatter(*places.T, s=6, color=style.colors[5])
    taken: list[tuple[float, float]] = []
    width, height = np.ptp(places, axis=0) / (9, 32)
    for i, (x, y) in zip(ids, places, strict=False):
        if all(abs(x - a) > width or abs(y - b) > height for a, b in taken):
            taken.append((float(x), float(y)))
            left.text(x, y, tokenizer.pieces([i])[0].translate(codes), fontsize=8)
    left.set(title=f"{len(places)} pieces, first two principal components", xticks=[], yticks=[])
    right.set_title("Nearest neighbors by cosine")
    right.axis("off")
    for row, word in enumerate(words):
        own = tokenizer.encode(word)[len(tokenizer.prefix) :]
        if not own:
            raise ConfigError(f"words={word!r}: is no text")
        near = neighbors(vectors, vectors[own].mean(dim=0), [i for i in ids if i not in own], num=3)
        text = ",  ".join(f"{tokenizer.pieces([i])[0]} {c:.2f}" for i, c in near)
        y = 1 - (row + 0.7) / max(len(words), 8)
        right.text(0, y, word.translate(codes), fontweight="bold", transform=right.transAxes)
        right.text(0.33, y, text.translate(codes), fontsize=8.5, transform=right.transAxes)
    return figure
