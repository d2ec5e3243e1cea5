"""Print the pieces of sentences and their ids. This needs only a tokenizer."""

from __future__ import annotations

from tabulate import tabulate

from nmt.config import VisualizeConfig, resolve_path
from nmt.data.tokenizer import Tokenizer, find_tokenizers, load_tokenizers
from nmt.visualize.attention_figure import read_sentences


def print_pieces(config: VisualizeConfig) -> None:
    """Print the pieces of `src` and, if it is set, of `tgt`, with the id below each piece.

    `model_dir` may also be a data folder. Raises a `ModelError` if it has no tokenizer.
    """
    tokenizers = load_tokenizers(find_tokenizers(resolve_path(config.model_dir[0])))
    for line in read_sentences(config.src, "src"):
        print(_table_of_pieces(tokenizers.src, line))
    if config.tgt is not None:
        for line in read_sentences(config.tgt, "tgt"):
            print(_table_of_pieces(tokenizers.tgt, line))


def _table_of_pieces(tokenizer: Tokenizer, line: str) -> str:
    """Return two rows: the pieces of a line, and their ids."""
    ids = tokenizer.encode(line)
    rows = [tokenizer.pieces(ids), [str(id) for id in ids]]
    table: str = tabulate(rows, tablefmt="plain", disable_numparse=True)
    return table
