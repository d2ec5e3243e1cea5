"""Learn a shortlist, which lists for each source piece the target pieces that may translate it.

With a shortlist, CTranslate2 and Bergamot compute logits only for the candidates of a batch. The
output layer then takes a fraction of its time if the vocabulary is large. The candidates are the
most probable translations in IBM model 1, which is estimated from training pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nmt.data.binary import ParallelData, read_meta
from nmt.data.tokenizer import Tokenizers
from nmt.data.word_alignment import Links, draw_pairs, estimate_translations, make_links
from nmt.errors import ConfigError

SHORTLIST = "vmap.txt"  # CTranslate2's name for the file
CANDIDATES_PER_PIECE = 50
NUM_COMMON = 200  # target pieces that are candidates for every sentence


@dataclass(frozen=True)
class Candidates:
    """Target ids that may be in a translation."""

    by_source: list[list[int]]  # candidates for each source id, the best first
    common: list[int]  # candidates for every sentence


def learn_shortlist(data_dir: Path, tokenizers: Tokenizers, tokenizer_sha256: str) -> Candidates:
    """Learn the candidates from the training pairs of a data folder.

    Raises `ConfigError` if the data folder was made with a different tokenizer.
    """
    pairs = open_training_pairs("shortlist_data", data_dir, tokenizer_sha256)
    src_pieces = tokenizers.src.all_pieces()
    tgt_pieces = tokenizers.tgt.all_pieces()
    tgt_id_of_piece = {piece: tgt_id for tgt_id, piece in enumerate(tgt_pieces)}
    links = make_links(draw_pairs(pairs), null_id=len(src_pieces))
    candidates = find_candidates(links, len(src_pieces) + 1, len(tgt_pieces))
    by_source = []
    for src_id, piece in enumerate(src_pieces):
        translations = candidates[src_id]
        if piece in tgt_id_of_piece:  # a name or number may be copied
            translations.append(tgt_id_of_piece[piece])
        by_source.append(translations)
    return Candidates(by_source, _find_frequent_targets(links, len(tgt_pieces)))


def open_training_pairs(setting: str, data_dir: Path, tokenizer_sha256: str) -> ParallelData:
    """Open the training pairs of a data folder, which the setting `setting` names.

    Raises `ConfigError` if the data folder was made with a different tokenizer.
    """
    if read_meta(data_dir).tokenizer_sha256 != tokenizer_sha256:
        raise ConfigError(
            f"{setting}={data_dir}: made with a different tokenizer from the model; give the data "
            "folder that the model was trained on"
        )
    return ParallelData(data_dir, "train")


def write_ctranslate2_shortlist(
    folder: Path, candidates: Candidates, tokenizers: Tokenizers
) -> None:
    """Write a shortlist into a CTranslate2 folder."""
    tgt_pieces = tokenizers.tgt.all_pieces()
    lines = [_format_line("", candidates.common, tgt_pieces)]
    for piece, translations in zip(tokenizers.src.all_pieces(), candidates.by_source, strict=True):
        if _is_writable(piece) and translations:
            lines.append(_format_line(piece, translations, tgt_pieces))
    (folder / SHORTLIST).write_text("".join(lines), encoding="utf-8", newline="\n")


def find_candidates(links: Links, num_src: int, num_tgt: int) -> list[list[int]]:
    """Return the `CANDIDATES_PER_PIECE` most probable target ids of each source id, best first.

    `num_src` and `num_tgt` are the numbers of ids. The null id is one of the source ids.
    """
    src_ids, tgt_ids, probs = estimate_translations(links, num_src, num_tgt)
    order = np.lexsort((-probs, src_ids))  # sorts by source id, then the most probable first
    boundaries = np.searchsorted(src_ids[order], np.arange(num_src + 1))
    candidates = []
    for src_id in range(num_src):
        start = boundaries[src_id]
        end = min(boundaries[src_id + 1], start + CANDIDATES_PER_PIECE)
        candidates.append(tgt_ids[order[start:end]].tolist())
    return candidates


def _find_frequent_targets(links: Links, num_tgt: int) -> list[int]:
    """Return the `NUM_COMMON` target ids with the most links, in descending order."""
    counts = np.bincount(links.tgt, minlength=num_tgt)
    return np.argsort(-counts, kind="stable")[:NUM_COMMON].tolist()  # type: ignore[no-any-return]


def _format_line(src_piece: str, candidates: list[int], tgt_pieces: list[str]) -> str:
    """Return a line of the file. The candidates of an empty `src_piece` apply to every sentence."""
    distinct_ids = dict.fromkeys(candidates)  # keeps the order
    pieces = [tgt_pieces[tgt_id] for tgt_id in distinct_ids]
    writable_pieces = [piece for piece in pieces if _is_writable(piece)]
    return f"{src_piece}\t{' '.join(writable_pieces)}\n"


def _is_writable(piece: str) -> bool:
    """Return whether a piece contains no separator of the file format (tab, line feed, space)."""
    return not any(separator in piece for separator in "\t\n ")
