"""Which translations of a text become pairs of a synthetic corpus, and the files of that corpus.

Distillation (Kim and Rush, 2016) translates sources, back-translation (Sennrich et al., 2016)
targets. While a text is translated, its pairs are kept in one file, a line for each side in turn.
"""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from nmt.config import SynthesisConfig
from nmt.data.tokenizer import Tokenizer
from nmt.errors import DamagedError
from nmt.runtime.files import replace_file, write_json
from nmt.runtime.metadata import read_json, to_dataclass
from nmt.translate.lines import HashedInput, LineCounts, LineResult, Window
from nmt.translate.resume import PartState

log = logging.getLogger(__name__)

_SIDES, _SUMMARY = ("src.txt", "tgt.txt"), "summary.json"
FILES = (*_SIDES, _SUMMARY)
_FORMAT_VERSION = 1


@dataclass
class SynthesisCounts(LineCounts):
    """What became of lines; each that is no pair is counted once, where it is dropped first."""

    lines: int = 0
    pairs: int = 0
    blank: int = 0  # lines without text
    truncated: int = 0  # of which too_long=truncate translated a part alone
    empty: int = 0  # translations without text
    looping: int = 0
    ratio: int = 0

    def table(self, config: SynthesisConfig) -> str:
        """Show the counts, a line each, with the settings that decide."""
        rows = [
            (self.lines, "lines read"),
            (self.blank, "dropped: no text"),
            (self.failed, "dropped: cannot be translated, named above"),
            (self.truncated, f"dropped: more than max_source_length={config.max_source_length}"),
            (self.empty, "dropped: the translation is empty"),
            (self.met_limit, "dropped: the translation met max_length_a and max_length_b"),
            (self.looping, f"dropped: more than max_repeats={config.max_repeats} in a row"),
            (self.ratio, f"dropped: beyond max_ratio={config.max_ratio:g}"),
            (self.pairs, "pairs written"),
        ]
        shown = [row for row in rows if row[0] or not row[1].startswith("dropped")]
        return "\n".join(f"{count:>12,} {what}" for count, what in shown)


def keep_pairs(
    window: Window,
    results: Sequence[LineResult],
    config: SynthesisConfig,
    src: Tokenizer,
    *,
    is_reversed: bool,
) -> tuple[bytes, SynthesisCounts]:
    """Return the lines of the pairs to keep, the source of each before the target, and counts.

    `src` cuts what was translated; with `is_reversed` that is the target of a pair.
    """
    counts, lines = SynthesisCounts(lines=len(results)), list[str]()
    rows = zip(window.lines, src.encode_batch(window.lines), results, strict=True)
    for number, (line, ids, result) in enumerate(rows, start=window.first_line + 1):
        if result.error is not None:
            log.warning("line %d cannot be translated and is left out: %s", number, result.error)
        counts.too_long += result.num_parts > 1 or result.num_left_out > 0
        if reason := _why_dropped(line, ids, result, config):
            setattr(counts, reason, getattr(counts, reason) + 1)
        else:
            counts.pairs += 1
            lines += [result.text, line] if is_reversed else [line, result.text]
    return "".join(f"{line}\n" for line in lines).encode(), counts


def _why_dropped(
    line: str, ids: Sequence[int], result: LineResult, config: SynthesisConfig
) -> str | None:
    """Return which of the counts a line belongs to, None for a pair to keep."""
    if not line.strip():
        return "blank"
    if result.error is not None:
        return "failed"
    if result.num_left_out:
        return "truncated"
    best = result.translations[0]
    if not best.text.strip():
        return "empty"
    if not best.finished:
        return "met_limit"
    if config.max_repeats and is_looping(ids, best.tokens, config.max_repeats):
        return "looping"
    sizes = sorted((len(ids) + 1, len(best.tokens) + 1))  # with EOS
    return "ratio" if config.max_ratio and sizes[1] > config.max_ratio * sizes[0] else None


def is_looping(source: Sequence[Any], target: Sequence[Any], most: int) -> bool:
    """Return whether tokens of the target stand more than `most` times in a row, and more often
    than any of the source do.
    """
    if max(Counter(target).values(), default=0) <= most:  # of nearly all
        return False
    return count_repeats(target) > max(most, count_repeats(source))


def count_repeats(tokens: Sequence[Any]) -> int:
    """Return how often in a row the same tokens stand at most: 3 times in `x a b a b a b`."""
    numbers = {token: number for number, token in enumerate(tokens)}
    ids = np.array([numbers[token] for token in tokens])
    most = min(len(ids), 1)
    for period in range(1, len(ids) // 2 + 1):
        differs = np.flatnonzero(ids[period:] != ids[:-period])
        longest = int(np.diff(differs, prepend=-1, append=len(ids) - period).max()) - 1
        most = max(most, longest // period + 1)
    return most


def publish(folder: Path, pairs: Path, state: PartState, about: dict[str, Any]) -> None:
    """Write the files of a corpus from the file of its pairs, and at last its summary, `about` and
    counts.
    """
    (folder / _SUMMARY).unlink(missing_ok=True)  # it says that the files beside it are whole
    sizes = {}
    for number, name in enumerate(_SIDES):
        with replace_file(folder / name) as path, pairs.open("rb") as lines:
            with path.open("wb") as file:
                file.writelines(islice(lines, number, None, 2))
            sizes[name] = path.stat().st_size
    content = {"counts": asdict(state.counts), "bytes": sizes, "sha256": state.sha256}
    with replace_file(folder / _SUMMARY) as path:
        write_json(path, {"format_version": _FORMAT_VERSION, **about, **content})


def read_counts(
    folder: Path, job: dict[str, Any], read: Callable[[], HashedInput]
) -> SynthesisCounts | None:
    """Return the counts of the corpus in `folder` if it is whole, and of this job and input."""
    try:
        found = read_json(folder / _SUMMARY)
        sizes = {name: (folder / name).stat().st_size for name in _SIDES}
    except (FileNotFoundError, DamagedError):
        return None
    if (found.get("job"), found.get("bytes")) != (json.loads(json.dumps(job)), sizes):
        return None
    source = read()
    source.skip(sys.maxsize)
    same = found.get("sha256") == source.sha256
    return to_dataclass(SynthesisCounts, found.get("counts"), folder / _SUMMARY) if same else None
