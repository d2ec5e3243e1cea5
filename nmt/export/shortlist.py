"""A shortlist: for each source piece, the target pieces that may translate it.

CTranslate2 computes logits for the candidates of a batch only, which with a large vocabulary takes
a fraction of the time. The candidates are the most probable translations in IBM model 1 (Brown et
al., 1993), which is estimated from training pairs.
"""

# A link is a source token and a target token of the same pair. In shapes, N is the number of links
# and U the number of distinct ones.

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nmt.data.binary import Ids, ParallelData, read_meta
from nmt.data.tokenizer import Tokenizers
from nmt.errors import ConfigError

SHORTLIST = "vmap.txt"  # CTranslate2's name for the file
MAX_LINKS = 20_000_000  # of the pairs to learn from, drawn at random; 1 GB of memory
CANDIDATES_PER_PIECE = 50
NUM_COMMON = 200  # target pieces that are candidates for every sentence
_NUM_ITERATIONS = 4  # of expectation maximization
_SEED = 1

Array = np.ndarray[Any, np.dtype[Any]]


def write_shortlist(
    folder: Path, data_dir: Path, tokenizers: Tokenizers, tokenizer_sha256: str
) -> None:
    """Write the shortlist of a model into its CTranslate2 folder.

    Raises `ConfigError` if the data folder was made with another tokenizer.
    """
    if read_meta(data_dir).tokenizer_sha256 != tokenizer_sha256:
        raise ConfigError(
            f"shortlist_data={data_dir}: made with another tokenizer than the model; give the data "
            "folder that the model was trained on"
        )
    src_pieces = tokenizers.src.all_pieces()
    tgt_pieces = tokenizers.tgt.all_pieces()
    tgt_ids = {piece: token for token, piece in enumerate(tgt_pieces)}
    links = collect_links(ParallelData(data_dir, "train"), null_id=len(src_pieces))
    candidates = find_candidates(links, len(src_pieces) + 1, len(tgt_pieces))
    lines = [_format_line("", _most_frequent(links, len(tgt_pieces)), tgt_pieces)]
    for token, piece in enumerate(src_pieces):
        translations = candidates[token]
        if piece in tgt_ids:  # names and numbers are copied
            translations.append(tgt_ids[piece])
        if _can_write(piece) and translations:
            lines.append(_format_line(piece, translations, tgt_pieces))
    (folder / SHORTLIST).write_text("".join(lines), encoding="utf-8", newline="\n")


class Links(NamedTuple):
    """The links of pairs; links of one target token follow each other."""

    src: Array  # (N,), source ids; each target token is also linked to the null id
    tgt: Array  # (N,), target ids
    src_lengths: Array  # (M,), the number of links of each target token


def collect_links(pairs: Sequence[tuple[Ids, Ids]] | ParallelData, null_id: int) -> Links:
    """Return the links of pairs drawn at random, until there are `MAX_LINKS`."""
    src = []
    tgt = []
    src_lengths = []
    num_links = 0
    for index in np.random.default_rng(_SEED).permutation(len(pairs)):
        src_ids, tgt_ids = pairs[index]
        linked = np.append(src_ids, null_id).astype(np.int64)
        src.append(np.tile(linked, len(tgt_ids)))
        tgt.append(np.repeat(np.asarray(tgt_ids, dtype=np.int64), len(linked)))
        src_lengths.append(np.full(len(tgt_ids), len(linked)))
        num_links += len(linked) * len(tgt_ids)
        if num_links >= MAX_LINKS:
            break
    return Links(np.concatenate(src), np.concatenate(tgt), np.concatenate(src_lengths))


def find_candidates(links: Links, num_src: int, num_tgt: int) -> list[list[int]]:
    """Return the most probable target ids of each source id, best first."""
    distinct, link_index = np.unique(links.src * num_tgt + links.tgt, return_inverse=True)
    src, tgt = np.divmod(distinct, num_tgt)  # (U,)
    probs = np.ones(len(distinct))  # p(target | source), up to a factor at first
    starts = np.cumsum(links.src_lengths) - links.src_lengths  # (M,)
    for _ in range(_NUM_ITERATIONS):
        weights = probs[link_index]  # (N,)
        totals = np.add.reduceat(weights, starts)  # (M,)
        weights /= np.repeat(totals, links.src_lengths)  # p(source position | target token)
        counts = np.bincount(link_index, weights, minlength=len(distinct))  # (U,), expected
        probs = counts / np.bincount(src, counts, minlength=num_src)[src]
    order = np.lexsort((-probs, src))  # by source id, most probable first
    boundaries = np.searchsorted(src[order], np.arange(num_src + 1))
    candidates = []
    for token in range(num_src):
        start = boundaries[token]
        end = min(boundaries[token + 1], start + CANDIDATES_PER_PIECE)
        candidates.append(tgt[order[start:end]].tolist())
    return candidates


def _most_frequent(links: Links, num_tgt: int) -> list[int]:
    """Return the target ids that most links have."""
    counts = np.bincount(links.tgt, minlength=num_tgt)
    return np.argsort(-counts, kind="stable")[:NUM_COMMON].tolist()  # type: ignore[no-any-return]


def _format_line(piece: str, candidates: list[int], tgt_pieces: list[str]) -> str:
    """Return a line of the file; an empty `piece` means every sentence."""
    names = [tgt_pieces[token] for token in dict.fromkeys(candidates)]
    return f"{piece}\t{' '.join(filter(_can_write, names))}\n"


def _can_write(piece: str) -> bool:
    """Return whether a piece has no character that the file's format uses."""
    return not any(character in piece for character in "\t\n ")
