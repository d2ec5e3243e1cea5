"""Figures of training targets.

One figure has the one-hot vectors of words. The other one compares, at each position of a
translation, the probabilities that a model gives to tokens with the targets of training.

The figures follow the last pictures of the Illustrated Transformer (Alammar, 2018).
"""

# T target tokens with EOS, V vocab, C columns: distinct tokens that are drawn

from __future__ import annotations

import torch
from matplotlib.figure import Figure
from torch import Tensor

from nmt.config import VisualizeConfig
from nmt.data.languages import encode_sources, tag_lines
from nmt.data.tokenizer import Tokenizer
from nmt.errors import ConfigError
from nmt.model.attention import causal_mask, padding_mask
from nmt.model.transformer import Transformer
from nmt.translate.attention import add_source_eos
from nmt.visualize.attention_figure import load_single_model, load_translator, read_sentences
from nmt.visualize.embeddings import choose_words, list_text_ids
from nmt.visualize.style import Style

_MAX_TOKENS = 24  # tables of more tokens are too small to read
_UNTRAINED_SEED = 1  # seed of the weights of the untrained model


def draw_vocabulary(config: VisualizeConfig, style: Style) -> Figure:
    """Draw the pieces of some words with their indices and their one-hot vectors."""
    translator = load_translator(config)
    tokenizer = translator.tokenizer.tgt
    words = config.words or choose_words(tokenizer, list_text_ids(tokenizer))
    ids = encode_words(tokenizer, words)
    if len(ids) > _MAX_TOKENS:
        raise ConfigError(f"words: {len(ids)} pieces, {_MAX_TOKENS} can be drawn; give fewer words")
    pieces = tokenizer.pieces(ids)
    replacements = style.add_fonts_for(pieces)
    labels = [piece.translate(replacements) for piece in pieces]
    indices = [str(id) for id in ids]
    figure = style.figure(0.6 * len(ids) + 4, 0.36 * len(ids) + 2)
    axes = figure.subplots()
    one_hot = torch.eye(len(ids))  # the columns of these pieces
    rows = [f"{label}   {index}" for label, index in zip(labels, indices, strict=True)]
    style.heat_map(axes, one_hot, row_labels=rows, column_labels=indices)
    style.write_numbers(axes, one_hot, number_format="{:.0f}")
    axes.set_aspect("auto")
    axes.set_title("Pieces, their indices, and their one-hot vectors")
    axes.set_xlabel(f"index; {tokenizer.vocab_size:,} dimensions, the others are 0 in these rows")
    return figure


def encode_words(tokenizer: Tokenizer, words: list[str]) -> list[int]:
    """Return the ids of the pieces of words, each once, in the order of their first occurrence."""
    ids: dict[int, None] = {}
    prefix_length = len(tokenizer.prefix_ids)  # such as a language tag
    for word in words:
        word_ids = tokenizer.encode(word)[prefix_length:]
        ids.update(dict.fromkeys(word_ids))
    return list(ids)


def draw_probabilities(config: VisualizeConfig, style: Style) -> Figure:
    """Draw three tables of the probabilities of tokens at each position of a translation.

    The tables have the targets of training, the output of an untrained model, and the output of the
    trained model. If `tgt` is not set, the trained model translates `src`.
    """
    translator, model = load_single_model(config, "probabilities")
    line = read_sentences(config.src, "src")[0]
    if config.tgt is None:
        [translation] = translator.translate([line], beam_size=config.beam_size)
    else:
        translation = read_sentences(config.tgt, "tgt")[0]
    tokenizers = translator.tokenizer  # has the tokenizers of source and target
    tags = translator.common_tags  # no tags if the directions of the model differ in them
    [src_ids] = encode_sources(tokenizers.src, [line], tags)
    src_ids = add_source_eos(src_ids, model, tokenizers)
    [tgt_ids] = tokenizers.tgt.encode_batch(tag_lines([translation], tags.tgt))
    num_tokens = len(tgt_ids) + 1  # with EOS
    if num_tokens > _MAX_TOKENS:
        raise ConfigError(
            f"the translation has {len(tgt_ids)} tokens, {_MAX_TOKENS - 1} can be drawn; "
            "give a shorter sentence"
        )
    untrained = _make_untrained_model(model, tokenizers.tgt.vocab_size)
    tgt_in = [tokenizers.tgt.bos_id, *tgt_ids]
    tgt_out = [*tgt_ids, tokenizers.tgt.eos_id]
    columns = list(dict.fromkeys(tgt_out))  # each token once
    smoothing = config.label_smoothing
    distributions = {  # (T, V) each
        f"Wanted, label_smoothing={smoothing:g}": smoothed_targets(
            tgt_out, tokenizers.tgt.vocab_size, smoothing
        ),
        "Untrained model": next_token_probabilities(untrained, src_ids, tgt_in),
        "Trained model": next_token_probabilities(model, src_ids, tgt_in),
    }
    tables = {}
    for title, distribution in distributions.items():
        tables[title] = select_columns(distribution, columns)
    pieces = tokenizers.tgt.pieces(tgt_out)
    column_pieces = tokenizers.tgt.pieces(columns)
    replacements = style.add_fonts_for(pieces)  # `columns` has the same pieces
    row_labels = [piece.translate(replacements) for piece in pieces]
    column_labels = [piece.translate(replacements) for piece in column_pieces]
    return probabilities_figure(tables, row_labels, [*column_labels, "others"], style)


def _make_untrained_model(model: Transformer, vocab_size: int) -> Transformer:
    """Return a model of the same architecture with initial weights."""
    torch.manual_seed(_UNTRAINED_SEED)
    src_vocab_size = None if model.src_embedding is None else len(model.src_embedding.weight)
    return Transformer(model.config, vocab_size, src_vocab_size=src_vocab_size).eval()


@torch.inference_mode()
def next_token_probabilities(model: Transformer, src_ids: list[int], tgt_in: list[int]) -> Tensor:
    """Return the probability of each token after each token of `tgt_in`, (T, V) in float32."""
    device = model.embedding.weight.device
    hidden = model(
        torch.tensor([src_ids], device=device),
        padding_mask(torch.tensor([len(src_ids)], device=device), len(src_ids)),
        torch.tensor([tgt_in], device=device),
        causal_mask(len(tgt_in), device),
    )  # (1, T, D)
    logits = model.logits(hidden)[0].float()  # (T, V)
    return logits.softmax(dim=-1).cpu()


def smoothed_targets(tgt_out: list[int], vocab_size: int, smoothing: float) -> Tensor:
    """Return the target distributions (T, V) of training.

    The reference token gets 1 - smoothing, and in addition, every token gets smoothing / V (Szegedy
    et al., 2016, section 7).
    """
    num_tokens = len(tgt_out)
    targets = torch.full((num_tokens, vocab_size), smoothing / vocab_size)
    positions = torch.arange(num_tokens)  # (T,)
    targets[positions, torch.tensor(tgt_out)] += 1 - smoothing
    return targets


def select_columns(probabilities: Tensor, columns: list[int]) -> Tensor:
    """Return the `columns` of (T, V), and the sum of all others as the last column, (T, C + 1)."""
    selected = probabilities[:, columns]  # (T, C)
    remainder = 1 - selected.sum(dim=1, keepdim=True)  # (T, 1)
    return torch.cat([selected, remainder.clamp(min=0)], dim=1)


def probabilities_figure(
    tables: dict[str, Tensor], row_labels: list[str], column_labels: list[str], style: Style
) -> Figure:
    """Draw tables (T, C + 1) of probabilities next to each other."""
    width = 0.5 * len(column_labels) + 1
    figure = style.figure(width * len(tables) + 1, 0.4 * len(row_labels) + 2.2)
    for axes, (title, probabilities) in zip(
        figure.subplots(1, len(tables)), tables.items(), strict=True
    ):
        style.heat_map(axes, probabilities, row_labels=row_labels, column_labels=column_labels)
        style.write_numbers(axes, probabilities)
        axes.set_aspect("auto")
        axes.set_title(title)
    figure.supylabel("position, with its wanted word", fontsize=10)
    return figure
