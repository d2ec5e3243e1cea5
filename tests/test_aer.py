"""The alignment error rate, on links that are counted by hand."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).parents[1] / "scripts/aer.py"))
parse_links = SCRIPT["parse_links"]
compare_links = SCRIPT["compare_links"]


def test_possible_links_count_for_precision_and_sure_links_for_recall() -> None:
    predicted = [parse_links("0-0 1-1 2-2").sure, parse_links("").sure]
    expected = [parse_links("0-0 1p1 3-3"), parse_links("0-0")]
    # 2 of 3 links are possible, 1 of 3 sure links is found
    figures = compare_links(predicted, expected)
    assert figures["precision"] == pytest.approx(2 / 3)
    assert figures["recall"] == pytest.approx(1 / 3)
    assert figures["AER"] == pytest.approx(1 - (1 + 2) / (3 + 3))


def test_the_true_alignment_has_no_errors() -> None:
    expected = [parse_links("0-0 1-2 2-1")]
    assert compare_links([expected[0].sure], expected) == {"precision": 1, "recall": 1, "AER": 0}
    with pytest.raises(ValueError, match="0:1 is not a link"):
        parse_links("0:1")
