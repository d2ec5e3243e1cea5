"""Minimum Bayes risk: choose the translation that is most similar to all candidates.

The similarity is chrF, with the average n-gram counts of the candidates as reference (Vamvas and
Sennrich, 2024): its time grows with the number of candidates, not with their square.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace

from nmt.config import SearchConfig
from nmt.errors import ConfigError
from nmt.translate.results import LineResult


def check_mbr(num_candidates: int, search: SearchConfig) -> None:
    """Raise a `ConfigError` if a search has fewer candidates, or the package for chrF is missing.

    `num_candidates` is the setting `mbr`; 0 turns it off.
    """
    if num_candidates > search.beam_size and not search.sampling:
        raise ConfigError(
            f"mbr={num_candidates} is more than beam_size={search.beam_size}; "
            "raise beam_size, or set sampling=true"
        )
    if num_candidates and importlib.util.find_spec("fastchrf") is None:
        raise ConfigError(
            f"mbr={num_candidates} needs fastchrf; install it with: pip install nmt[mbr]"
        )


def rank_by_mbr(result: LineResult, *, n_best: int) -> LineResult:
    """Return the `n_best` candidates of a line with the highest mean chrF, best first.

    Candidates that occur several times count several times. Equal ones keep their order.
    """
    import fastchrf  # an extra

    texts = [translation.text for translation in result.translations]
    if len(texts) < 2:
        return result
    [utilities] = fastchrf.aggregate_chrf([texts], [texts])
    order = sorted(range(len(texts)), key=lambda i: -utilities[i])
    return replace(result, translations=[result.translations[i] for i in order[:n_best]])
