"""`CommandMetric`, a metric that an external program computes, such as COMET."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from sacrebleu.metrics.base import Metric, Score, Signature

from nmt.runtime.score_command import run_score_command

COMMAND_SCORE = "command"  # name of the score in tables


class CommandMetric(Metric):
    """The mean of the numbers that a command prints, one for each translation.

    The command reads lines of JSON: `{"src": ..., "mt": ..., "refs": [...]}`, without `src` if
    there are no sources. The class inherits from sacreBLEU's metrics, so that sacreBLEU's tests of
    significance work with it.

    Args:
        command: the program and its arguments, separated as in a shell.
        sources: the source of each line, or none.
    """

    def __init__(self, command: str, sources: Sequence[str] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._command = command
        self._sources = sources
        self._num_references = 0  # number of references per line; set when lines are scored

    def get_signature(self) -> Signature:
        """Return the command and the version of sacreBLEU, which computes the significance."""
        signature = Signature({"num_refs": self._num_references})
        signature.info["command"] = self._command
        return signature

    def _extract_corpus_statistics(
        self, hypotheses: Sequence[str], references: Sequence[Sequence[str]] | None
    ) -> Any:
        """Return the score and a count of 1 for each line, (lines, 2). Their sums give the mean.

        Raises `ConfigError` if the command fails, and `DataError` for other output than numbers.
        """
        self._num_references = len(references or [])
        lines = []
        for i, hypothesis in enumerate(hypotheses):
            content: dict[str, Any] = {"src": self._sources[i]} if self._sources else {}
            content["mt"] = hypothesis
            content["refs"] = [reference_lines[i] for reference_lines in references or []]
            lines.append(json.dumps(content, ensure_ascii=False))
        scores = _run_command(self._command, tuple(lines))
        return np.array([[score, 1.0] for score in scores])

    def _aggregate_and_compute(self, stats: Any) -> Score:
        return self._compute_score_from_stats(np.asarray(stats).sum(axis=0))

    def _compute_score_from_stats(self, stats: Any) -> Score:
        return Score(COMMAND_SCORE, float(stats[0]) / float(stats[1]))

    # `Metric` requires these methods, but only `Metric._extract_corpus_statistics` calls them. This
    # class overrides that method.

    def _preprocess_segment(self, sent: str) -> str:
        raise AssertionError

    def _extract_reference_info(self, refs: Sequence[str]) -> dict[str, Any]:
        raise AssertionError

    def _compute_segment_statistics(self, hypothesis: str, ref_kwargs: dict[str, Any]) -> list[Any]:
        raise AssertionError


@lru_cache(maxsize=8)  # scores and tests of significance ask for the same lines
def _run_command(command: str, lines: tuple[str, ...]) -> list[float]:
    """Return the numbers that the command prints for lines of JSON."""
    return run_score_command("metric_command", command, lines)
