r"""Decode the bytes of a chunk into pairs of text.

Every character that is replaced and every pair that is dropped is counted. The rules are:

- Lines end at the byte \n only.
- Bytes that are not UTF-8 are located by line and byte. Each invalid sequence becomes U+FFFD, as
  section 3.9 of the Unicode standard recommends (substitution of maximal subparts).
- One U+FEFF (BOM) at the start of a line and one \r at its end are removed.
- Other characters at which tools break lines become spaces.
- TSV: columns are separated by tabs, without quoting. A line with too few columns is malformed.
- JSONL: each line is an object. Its fields are at the top level, or inside the field "translation",
  as in datasets of the hub. A line that is not an object, or lacks the text of a field, is
  malformed.
- A score is a column of TSV, a field of JSON, or a line of a separate file. A line without a finite
  number as its score is malformed.

Malformed lines and lines that are not UTF-8 are errors, unless `data.invalid` allows them:
with "replace", bytes that are not UTF-8 are replaced; with "drop", both kinds of lines are dropped
in training text and repaired in held-out text. Lines that are too large are always dropped in
training text and repaired in held-out text.
"""

# In shapes, N is the number of pairs of a chunk.

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from nmt.config import InvalidLinePolicy, PreprocessConfig
from nmt.errors import DataError
from nmt.preprocess.chunks import Chunk, Format
from nmt.preprocess.clean_chunk import (
    NUM_EXAMPLES,
    CleanChunk,
    LineError,
    PairCounts,
    Scores,
    sort_by_line,
)

NOT_UTF8 = "not UTF-8"
MALFORMED = "malformed line"
OVERLONG = "line too large"


@dataclass(frozen=True)
class ReplacementRule:
    """A rule that replaces characters inside of lines."""

    name: str  # key in the report
    character: str  # occurs in every match
    pattern: re.Pattern[str]
    replacement: str = " "


_REPLACEMENTS = [
    ReplacementRule("BOM", "\ufeff", re.compile(r"\A\ufeff"), replacement=""),
    ReplacementRule("CRLF", "\r", re.compile(r"\r\Z"), replacement=""),
    ReplacementRule("CR", "\r", re.compile("\r")),
    ReplacementRule("VT", "\v", re.compile("\v")),
    ReplacementRule("FF", "\f", re.compile("\f")),
    ReplacementRule("FS", "\x1c", re.compile("\x1c")),
    ReplacementRule("GS", "\x1d", re.compile("\x1d")),
    ReplacementRule("RS", "\x1e", re.compile("\x1e")),
    ReplacementRule("NEL", "\x85", re.compile("\x85")),
    ReplacementRule("U+2028", "\u2028", re.compile("\u2028")),
    ReplacementRule("U+2029", "\u2029", re.compile("\u2029")),
]
# applied to strings of JSON, where line feeds are written as \n
_LINE_FEED = ReplacementRule("LF", "\n", re.compile("\n"))
# applied only to held-out pairs, since a filter drops training pairs with NUL
_NUL = ReplacementRule("NUL", "\0", re.compile("\0"))
# links of source and target words, such as 0-0 1-2, or an empty line
_ALIGNMENT = re.compile(r"(\d{1,5}-\d{1,5}( +\d{1,5}-\d{1,5})*)?")
_SURROGATE = re.compile("[\ud800-\udfff]")
_JSON_DECODER = json.JSONDecoder(strict=False)  # accepts control characters inside of strings


def clean(chunk: Chunk, config: PreprocessConfig, *, held_out: bool) -> CleanChunk:
    """Decode the pairs of a chunk. Drops pairs with errors, or repairs them if they are held out.

    With `data.invalid=error`, raises a `DataError` with file and line for a line that is not UTF-8.
    With `data.invalid=error` or `replace`, raises one for a malformed line.
    """
    reader = _ChunkReader(chunk)
    texts = reader.read()  # sources, targets and perhaps alignments
    alignments = None
    if len(texts) > 2:
        alignments = texts[2]
    scores = None if held_out else reader.read_scores()
    reader.remove_overlong_errors()
    result = CleanChunk(
        raw_chunk=chunk,
        src=texts[0],
        tgt=texts[1],
        kept_rows=np.arange(chunk.num_pairs),
        counts=reader.counts,
        scores=scores,
        alignments=alignments,
    )
    overlong = []
    for line_number, side in chunk.overlong:
        overlong.append(LineError(line_number - chunk.first_line, side, OVERLONG))
    not_utf8 = list(reader.not_utf8.values())
    malformed = list(reader.malformed.values())
    if not_utf8 and config.data.invalid is InvalidLinePolicy.error:
        _raise_for_not_utf8(result, sort_by_line(not_utf8)[0])
    # the policy `replace` replaces bytes, but not a missing text, so a malformed line is an error
    if malformed and config.data.invalid is not InvalidLinePolicy.drop:
        _raise_for_malformed(result, sort_by_line(malformed)[0])
    if held_out:
        result.count_repairs(OVERLONG, overlong, len(overlong))
        result.count_repairs(NOT_UTF8, not_utf8, reader.num_replaced)
        result.count_repairs(MALFORMED, malformed, len(malformed))
        reader.replace(result.src, _NUL, side=0)
        reader.replace(result.tgt, _NUL, side=1)
        return result
    result.drop_errors(OVERLONG, overlong)
    if config.data.invalid is InvalidLinePolicy.replace:
        result.count_repairs(NOT_UTF8, not_utf8, reader.num_replaced)
    else:
        result.drop_errors(NOT_UTF8, not_utf8)
    result.drop_errors(MALFORMED, malformed)
    return result


def _raise_for_not_utf8(chunk: CleanChunk, error: LineError) -> None:
    """Raise a `DataError` about a line that is not UTF-8."""
    advice = "fix the line"
    if error.byte:
        advice = "convert the file, for example with iconv -f latin1 -t utf-8"
    # `error.message` names the byte, so the location is only file and line
    location = chunk.raw_chunk.locate(error.row, error.side)
    raise DataError(f"{location}: {error.message}; {advice}, or set data.invalid=replace or drop")


def _raise_for_malformed(chunk: CleanChunk, error: LineError) -> None:
    """Raise a `DataError` about a line without a source or target text."""
    advice = "fix the line, or leave such lines out with data.invalid=drop"
    if len(error.other_fields) > 1:
        src, tgt = error.other_fields[:2]
        advice = (
            f"it has {', '.join(error.other_fields)}; name the fields of source and target, such "
            f"as {chunk.raw_chunk.source.settings_key}.fields=[{src},{tgt}]"
        )
    raise DataError(f"{chunk.locate_error(error)}: {error.message}; {advice}")


def _substitute(
    lines: list[str], pattern: re.Pattern[str], replacement: str
) -> tuple[int, list[int]]:
    """Replace `pattern` in lines, in place. Returns the number of matches, and their rows."""
    rows = [row for row, line in enumerate(lines) if pattern.search(line)]
    num_matches = 0
    for row in rows:
        lines[row], num_in_line = pattern.subn(replacement, lines[row])
        num_matches += num_in_line
    return num_matches, rows


class _ChunkReader:
    """Decodes and repairs the lines of one chunk, and collects its errors and counts.

    Call the methods in this order: `read`, `read_scores`, `remove_overlong_errors`. In all methods,
    `side` is the index of a file: 0 for the source or for the only file, 1 for the target. Files of
    alignments and scores, if any, follow.
    """

    def __init__(self, chunk: Chunk) -> None:
        self._chunk = chunk
        self.counts = PairCounts(read=chunk.num_pairs, kept=chunk.num_pairs)
        self.not_utf8: dict[tuple[int, int], LineError] = {}  # keyed by row and side
        self.num_replaced = 0  # invalid bytes, and halves of surrogate pairs in JSON
        self.malformed: dict[int, LineError] = {}  # the first error of each malformed row
        # The score of each row, not yet parsed. `read` sets it if texts and scores share a file.
        self._score_texts: list[str] | None = None

    def read(self) -> list[list[str]]:
        """Return the source lines, the target lines and, if there are any, the alignments.

        Invalid bytes become U+FFFD, and a missing text becomes an empty line.
        """
        lines = self._split(self._decode(0), 0)
        format = self._chunk.source.format
        if format is Format.pair:
            texts = [lines, self._split(self._decode(1), 1)]
            if self._chunk.source.has_alignment_file:
                texts.append(self._split(self._decode(2), 2))
        elif format is Format.tsv:
            texts = self._read_tsv(lines)
        else:
            texts = self._read_json(lines)
        if len(texts) > 2:
            self._check_alignments(texts[2])
        return texts

    def _check_alignments(self, alignments: list[str]) -> None:
        """Record an error for each line that is not an alignment such as `0-0 1-2`."""
        side = self._chunk.source.alignment_file_index
        for row, line in enumerate(alignments):
            if not _ALIGNMENT.fullmatch(line.strip()):
                error = LineError(row, side, "no alignment of words, such as 0-0 1-2")
                self.malformed.setdefault(row, error)

    def read_scores(self) -> Scores | None:
        """Return the score of each pair (N,), or None if the corpus has no scores.

        A line without a finite number is malformed, and its score becomes 0.
        """
        source = self._chunk.source
        num_files = len(source.paths)  # 1 for TSV and JSONL, which contain their scores
        num_text_files = 2  # the files of source and target
        if source.has_alignment_file:
            num_text_files += 1
        file_index = num_files - 1  # the score file if there is one, or the only file
        has_score_file = num_files > num_text_files
        if has_score_file:
            lines = self._split(self._decode(file_index), file_index)
            if source.score is None:
                self._score_texts = lines
            else:
                self._score_texts = []
                for line in lines:
                    record, _ = _parse_json(line)
                    self._score_texts.append(_find_score(record, source.score))
        if self._score_texts is None:
            return None
        scores = np.zeros(len(self._score_texts))
        for row, text in enumerate(self._score_texts):
            score = _parse_score(text)
            if score is None:
                error = LineError(row, file_index, self._describe_missing_score(text))
                self.malformed.setdefault(row, error)
            else:
                scores[row] = score
        return scores

    def _describe_missing_score(self, text: str) -> str:
        """Return the message about a line that has `text` instead of a score."""
        source = self._chunk.source
        if text == "" and source.format is Format.tsv:
            return f"no score in column {source.score}"
        if text == "" and source.score is not None:
            return f'no score in the field "{source.score}"'
        return f"no score, but {repr(text)[:30]}"

    def remove_overlong_errors(self) -> None:
        """Remove overlong lines from `malformed`.

        A chunk has an empty line instead of each overlong line. The empty line may be malformed,
        for example in JSONL, but `clean` counts the line only as overlong.
        """
        for line_number, _ in self._chunk.overlong:
            self.malformed.pop(line_number - self._chunk.first_line, None)

    def replace(self, lines: list[str], rule: ReplacementRule, side: int) -> None:
        """Apply a rule to all lines of one side, in place, and count the replacements."""
        num_matches, rows = _substitute(lines, rule.pattern, rule.replacement)
        examples = [self._chunk.locate(row, side) for row in rows[:NUM_EXAMPLES]]
        self.counts.add_replaced(rule.name, num_matches, examples)

    def _decode(self, side: int) -> str:
        r"""Decode the lines of one file as one text, without the last \n."""
        raw = self._chunk.lines_by_file[side].removesuffix(b"\n")
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            lines = []
            for row, line in enumerate(raw.split(b"\n")):
                lines.append(self._decode_line(line, row, side))
            return "\n".join(lines)

    def _decode_line(self, line: bytes, row: int, side: int) -> str:
        """Decode a line. If it is not UTF-8, records an error and replaces the invalid bytes."""
        try:
            return line.decode("utf-8")
        except UnicodeDecodeError as error:
            byte = error.start + 1
            message = f"byte {byte} (0x{line[error.start]:02x}) is not UTF-8"
            self.not_utf8[row, side] = LineError(row, side, message, byte)
            # U+FFFD may replace several bytes, so count the surrogates, one for each invalid byte
            escaped = line.decode("utf-8", "surrogateescape")
            self.num_replaced += len(_SURROGATE.findall(escaped))
            return line.decode("utf-8", "replace")

    def _split(self, text: str, side: int) -> list[str]:
        r"""Split text at \n and replace the other characters that break lines."""
        lines = text.split("\n")
        for rule in _REPLACEMENTS:
            if rule.character in text:
                self.replace(lines, rule, side)
        return lines

    def _read_tsv(self, lines: list[str]) -> list[list[str]]:
        """Return the columns of source, target and perhaps alignment."""
        columns = list(self._chunk.source.columns)  # numbers from 1
        score = self._chunk.source.score
        if score is not None:
            columns.append(int(score))
        num_columns = max(columns)
        texts: list[list[str]] = [[] for _ in columns]
        for row, line in enumerate(lines):
            cells = line.split("\t", num_columns)  # further columns stay in one cell
            if len(cells) < num_columns:
                message = f"{len(cells)} of {num_columns} columns"
                self.malformed[row] = LineError(row, 0, message)
                cells += [""] * (num_columns - len(cells))
            for i, column in enumerate(columns):
                texts[i].append(cells[column - 1])
        if score is not None:
            self._score_texts = texts.pop()
        return texts

    def _read_json(self, lines: list[str]) -> list[list[str]]:
        """Return the fields of source, target and perhaps alignment."""
        fields = self._chunk.source.fields
        score = self._chunk.source.score
        texts: list[list[str]] = [[] for _ in fields]
        score_texts = []
        for row, line in enumerate(lines):
            outer_record, problem = _parse_json(line)
            record = _select_texts(outer_record)
            if score is not None:
                score_texts.append(_find_score(outer_record, score))
            for i, name in enumerate(fields):
                value = record.get(name)
                if not isinstance(value, str):
                    if problem is None:
                        problem = f'no text in the field "{name}"'
                    value = ""
                texts[i].append(value)
            if problem is not None:
                other_fields: tuple[str, ...] = ()
                if fields[0] not in record and fields[1] not in record:
                    other_fields = tuple(
                        name for name, value in record.items() if isinstance(value, str)
                    )
                self.malformed[row] = LineError(row, 0, problem, other_fields=other_fields)
        if score is not None:
            self._score_texts = score_texts
        return [self._clean_field(texts[i], name) for i, name in enumerate(fields)]

    def _clean_field(self, texts: list[str], name: str) -> list[str]:
        r"""Replace characters that JSON can escape, such as \n and half surrogate pairs."""
        self.replace(texts, _LINE_FEED, 0)
        num_matches, rows = _substitute(texts, _SURROGATE, "\ufffd")
        self.num_replaced += num_matches
        for row in rows:
            message = f'half a surrogate pair in the field "{name}"'
            self.not_utf8.setdefault((row, 0), LineError(row, 0, message))
        # the texts no longer have a line feed, so this only replaces the other characters
        return self._split("\n".join(texts), 0)


def _parse_score(text: str) -> float | None:
    """Return a finite number, or None for other text."""
    try:
        score = float(text)
    except ValueError:
        return None
    return score if math.isfinite(score) else None


def _parse_json(line: str) -> tuple[dict[str, Any], str | None]:
    """Return the object on a line of JSON, and a description of its error, or None."""
    try:
        record = _JSON_DECODER.decode(line)
    except (ValueError, RecursionError):
        return {}, "no JSON"
    if not isinstance(record, dict):
        return {}, "no JSON object"
    return record, None


def _select_texts(record: dict[str, Any]) -> dict[str, Any]:
    """Return the object whose fields are texts: `translation`, or else the record itself."""
    translation = record.get("translation")
    return translation if isinstance(translation, dict) else record


def _find_score(record: dict[str, Any], path: str) -> str:
    """Return the value at a path such as `a` or `a.0` as text, or "" if there is no value.

    The names in a path are separated by full stops. In a list, a name is an index from 0.
    """
    value: Any = record
    for name in path.split("."):
        if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        elif isinstance(value, dict):
            value = value.get(name)
        else:
            return ""
    return "" if value is None else str(value)
