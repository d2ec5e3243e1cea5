"""Compare word alignments with true ones: precision, recall and the alignment error rate.

    python scripts/aer.py alignments true_alignments

Each line of both files has the links of a pair, such as "0-0 1-2". In the second file, a link such
as 3p4 is possible, and the others are sure. With the links A of the first file, the sure links S
and all links P of the second one (Och and Ney, 2003, section 6),

    AER = 1 - (|A and S| + |A and P|) / (|A| + |S|)
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

Links = set[tuple[int, int]]


class TrueLinks(NamedTuple):
    """The links of a pair that people or a generator made."""

    sure: Links
    possible: Links  # includes the sure links


def parse_links(line: str) -> TrueLinks:
    """Read the links of a pair; raise `ValueError` for anything else."""
    sure: Links = set()
    possible: Links = set()
    for word in line.split():
        match = re.fullmatch(r"(\d+)([-p])(\d+)", word)
        if match is None:
            raise ValueError(f"{word} is not a link such as 0-1 or 0p1")
        link = (int(match[1]), int(match[3]))
        possible.add(link)
        if match[2] == "-":
            sure.add(link)
    return TrueLinks(sure, possible)


def compare_links(predicted: Sequence[Links], expected: Sequence[TrueLinks]) -> dict[str, float]:
    """Return precision, recall and alignment error rate over all pairs, each from 0 to 1."""
    num_predicted = sum(len(links) for links in predicted)
    num_sure = sum(len(links.sure) for links in expected)
    num_sure_matches = 0  # |A and S|
    num_matches = 0  # |A and P|
    for links, true_links in zip(predicted, expected, strict=True):
        num_sure_matches += len(links & true_links.sure)
        num_matches += len(links & true_links.possible)
    return {
        "precision": num_matches / max(num_predicted, 1),
        "recall": num_sure_matches / max(num_sure, 1),
        "AER": 1 - (num_sure_matches + num_matches) / max(num_predicted + num_sure, 1),
    }


def main() -> None:
    """Print the figures of two files."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("alignments", type=Path)
    parser.add_argument("true_alignments", type=Path)
    options = parser.parse_args()
    predicted = []
    for line in options.alignments.read_text(encoding="utf-8").splitlines():
        predicted.append(parse_links(line).sure)
    expected = []
    for line in options.true_alignments.read_text(encoding="utf-8").splitlines():
        expected.append(parse_links(line))
    for name, value in compare_links(predicted, expected).items():
        print(f"{name} {value:.4f}")


if __name__ == "__main__":
    main()
