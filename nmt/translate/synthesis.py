"""Select the pairs of a synthetic corpus, which consist of a line and its translation.

Distillation (Kim and Rush, 2016) translates source text. Back-translation (Sennrich et al., 2016)
translates target text. During translation, a partial file contains the pairs: each source line is
followed by its target line. At the end, `write_corpus` writes source and target to two files.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from nmt.config import SynthesisConfig
from nmt.data.tokenizer import Tokenizer
from nmt.errors import DamagedError
from nmt.runtime.files import replace_file, write_json
from nmt.runtime.metadata import read_json, to_dataclass
from nmt.translate.job import JobState
from nmt.translate.loops import is_looping
from nmt.translate.results import LineCounts, LineResult
from nmt.translate.windows import Window, WindowReader

log = logging.getLogger(__name__)

TEXT_FILES = ("src.txt", "tgt.txt")
SUMMARY_FILE = "summary.json"
_FORMAT_VERSION = 1


@dataclass
class SynthesisCounts(LineCounts):
    """Numbers of lines by outcome.

    A line is dropped for one of these reasons: it is `blank`, `failed`, `truncated`, `empty`,
    `met_limit`, `looping`, or beyond the `ratio`. If several apply, only the first is counted.
    `failed` and `met_limit` are fields of `LineCounts`. The field `too_long` of `LineCounts` counts
    lines that were split or truncated, whether they were dropped or not.
    """

    lines: int = 0  # lines that were read
    pairs: int = 0  # pairs that were written
    blank: int = 0  # lines without text
    truncated: int = 0  # lines that were translated without their end (too_long=truncate)
    empty: int = 0  # lines whose translation has no text
    looping: int = 0  # lines whose translation repeats itself, see `SynthesisConfig.max_repeats`
    ratio: int = 0  # lines much longer or shorter than their translation, see `max_ratio`

    def table(self, config: SynthesisConfig) -> str:
        """Return a text table of the counts, one per line, with the settings that drop lines."""
        dropped = {
            "no text": self.blank,
            "could not be translated, see the warnings above": self.failed,
            f"more than max_source_length={config.max_source_length}": self.truncated,
            "the translation is empty": self.empty,
            "the translation met max_length_a and max_length_b": self.met_limit,
            f"more than max_repeats={config.max_repeats} in a row": self.looping,
            f"beyond max_ratio={config.max_ratio:g}": self.ratio,
        }
        rows = [f"{self.lines:>12,} lines read"]
        for reason, count in dropped.items():
            if count:
                rows.append(f"{count:>12,} dropped: {reason}")
        rows.append(f"{self.pairs:>12,} pairs written")
        return "\n".join(rows)


def select_pairs(
    window: Window,
    results: Sequence[LineResult],
    *,
    config: SynthesisConfig,
    tokenizer: Tokenizer,
    is_reversed: bool,
) -> tuple[bytes, SynthesisCounts]:
    """Return the encoded text of the kept pairs, target after source, and the counts of lines.

    With `is_reversed`, the lines of the window are the targets of the pairs. `tokenizer` encodes
    these lines.
    """
    counts = SynthesisCounts(lines=len(results))
    pair_lines: list[str] = []
    rows = zip(window.lines, tokenizer.encode_batch(window.lines), results, strict=True)
    for number, (line, ids, result) in enumerate(rows, start=window.first_line + 1):
        if result.error is not None:
            log.warning("line %d could not be translated; dropped it: %s", number, result.error)
        if result.was_too_long:
            counts.too_long += 1
        reason = _drop_reason(line, ids, result, config)
        if reason is not None:
            num_dropped = getattr(counts, reason)
            setattr(counts, reason, num_dropped + 1)
            continue
        counts.pairs += 1
        if is_reversed:
            pair_lines += [result.text, line]
        else:
            pair_lines += [line, result.text]
    return "".join(f"{line}\n" for line in pair_lines).encode(), counts


def _drop_reason(
    line: str, ids: Sequence[int], result: LineResult, config: SynthesisConfig
) -> str | None:
    """Return the reason to drop a line, a field of `SynthesisCounts`, or None to keep it."""
    if not line.strip():
        return "blank"
    if result.error is not None:
        return "failed"
    if result.num_truncated:
        return "truncated"
    best = result.translations[0]
    if not best.text.strip():
        return "empty"
    if not best.finished:
        return "met_limit"
    if config.max_repeats and is_looping(ids, best.tokens, config.max_repeats):
        return "looping"
    lengths = (len(ids) + 1, len(best.tokens) + 1)  # with EOS
    shorter, longer = sorted(lengths)
    if config.max_ratio and longer > config.max_ratio * shorter:
        return "ratio"
    return None


def write_corpus(
    folder: Path, pair_file: Path, state: JobState, description: dict[str, Any]
) -> None:
    """Write the two text files of a corpus from the file of its pairs, and then a summary.

    If the summary exists, the text files next to it are complete. The summary contains the counts
    and `description`, whose value `job` identifies the settings for `read_counts`.
    """
    (folder / SUMMARY_FILE).unlink(missing_ok=True)
    sizes = {}
    for side, name in enumerate(TEXT_FILES):
        with replace_file(folder / name) as path, pair_file.open("rb") as lines:
            with path.open("wb") as file:
                # source and target lines alternate: one side is every second line, from `side` on
                file.writelines(islice(lines, side, None, 2))
            sizes[name] = path.stat().st_size
    summary = {
        "format_version": _FORMAT_VERSION,
        **description,
        "counts": asdict(state.counts),
        "bytes": sizes,
        "sha256": state.sha256,  # hash of the input
    }
    with replace_file(folder / SUMMARY_FILE) as path:
        write_json(path, summary)


def read_counts(
    folder: Path, job: dict[str, Any], open_input: Callable[[], WindowReader]
) -> SynthesisCounts | None:
    """Return the counts of the corpus in `folder`.

    Returns None unless the corpus is complete and was made with the same settings, `job`, from the
    same input.
    """
    try:
        summary = read_json(folder / SUMMARY_FILE)
        sizes = {name: (folder / name).stat().st_size for name in TEXT_FILES}
    except (FileNotFoundError, DamagedError):
        return None
    if summary.get("job") != job or summary.get("bytes") != sizes:
        return None
    reader = open_input()
    reader.skip(None)  # reads all lines, which updates `sha256`
    if summary.get("sha256") != reader.sha256:
        return None
    return to_dataclass(SynthesisCounts, summary.get("counts"), folder / SUMMARY_FILE)
