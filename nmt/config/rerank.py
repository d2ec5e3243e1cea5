"""Settings of reranking: choose among the candidates of a search by a different score."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import TypedDict

from nmt.config.options import Settings, option, resolve_path
from nmt.config.search import SearchConfig


class RerankScore(str, Enum):
    """The score by which the best candidate is chosen (docs/search.md)."""

    none = "none"  # the score of search
    mbr = "mbr"  # minimum Bayes risk: the mean chrF against all candidates
    noisy_channel = "noisy_channel"  # also uses the probability of the source in a reverse model
    command = "command"  # the number that another program prints


@dataclass(kw_only=True)
class RerankConfig(Settings):
    """Settings of the commands that choose among candidates. By default, they do not rerank.

    To add a setting, add it to `RerankOptions`, too.
    """

    rerank: RerankScore = option(
        RerankScore.none, "score that chooses among candidates: none, mbr, noisy_channel or command"
    )
    candidates: int | None = option(
        None,
        "hypotheses or samples per sentence to choose from; null: beam_size",
        low=2,
        high=10_000,
    )
    # the folders may be moved, since a resumed job compares the files in them
    reverse_model: list[str] | None = option(
        None,
        "run, checkpoint or model folder that translates back, for rerank=noisy_channel; several "
        "folders are an ensemble",
        on_resume="accept",
    )
    reverse_weight: float = option(
        1.0,
        "noisy_channel: factor of the log-probability of the reverse model",
        low=-1000,
        high=1000,
    )
    length_weight: float = option(
        0.0, "noisy_channel: nats added for each token of a candidate", low=-1000, high=1000
    )
    rerank_command: str | None = option(
        None,
        "rerank=command: program that reads JSON lines of src and mt, and prints a number for each",
    )
    rerank_timeout: float = option(
        3600.0,
        "maximum seconds of rerank_command for the lines that it gets at once (window_lines)",
        above=0,
        on_resume="accept",
    )

    def __post_init__(self) -> None:
        # `Translator` also accepts one path instead of a list
        if isinstance(self.reverse_model, (str, Path)):
            self.reverse_model = [str(self.reverse_model)]
        super().__post_init__()

    def check(self) -> None:
        super().check()
        is_noisy_channel = self.rerank is RerankScore.noisy_channel
        is_command = self.rerank is RerankScore.command
        if self.rerank is RerankScore.none:
            problem = "only works with rerank=mbr, noisy_channel or command"
            self.require(self.candidates is None, "candidates", problem)
        if is_noisy_channel:
            problem = "needs reverse_model=FOLDER, a model of the other direction"
            self.require(bool(self.reverse_model), "rerank", problem)
        else:
            problem = "only works with rerank=noisy_channel"
            self.require(self.reverse_model is None, "reverse_model", problem)
            self.require(self.reverse_weight == 1, "reverse_weight", problem)
            self.require(self.length_weight == 0, "length_weight", problem)
        if is_command:
            self.require(self.rerank_command is not None, "rerank", "needs rerank_command=PROGRAM")
        else:
            problem = "only works with rerank=command"
            self.require(self.rerank_command is None, "rerank_command", problem)
        if self.rerank_command is not None:
            is_program = find_program(self.rerank_command) is not None
            self.require(is_program, "rerank_command", "starts a program that is not installed")

    @property
    def enabled_reranking(self) -> RerankConfig | None:
        """Only the settings of reranking, with absolute paths; None without reranking."""
        if self.rerank is RerankScore.none:
            return None
        # `self` is an instance of a subclass, which has other settings, too
        settings = {setting.name: getattr(self, setting.name) for setting in fields(RerankConfig)}
        config = RerankConfig(**settings)
        if config.reverse_model is not None:  # workers may have another current folder
            config.reverse_model = [str(resolve_path(name)) for name in config.reverse_model]
        return config

    def count_candidates(self, search: SearchConfig) -> int:
        """Return the number of candidates; raise a `ConfigError` if the search has fewer."""
        self.require(search.alternatives == 0, "rerank", "does not work with alternatives")
        num_candidates = self.candidates or search.beam_size
        # beam search finds at most `beam_size` hypotheses; any number of samples can be drawn
        has_enough = search.sampling or num_candidates <= search.beam_size
        problem = (
            f"is more than beam_size={search.beam_size}; set beam_size={num_candidates} or "
            "sampling=true"
        )
        self.require(has_enough, "candidates", problem)
        return num_candidates


class RerankOptions(TypedDict, total=False):
    """The settings of `RerankConfig` as keyword arguments; None selects the default."""

    rerank: str | None
    candidates: int | None
    reverse_model: Iterable[str] | None
    reverse_weight: float | None
    length_weight: float | None
    rerank_command: str | None
    rerank_timeout: float | None


def find_program(command: str) -> str | None:
    """Return the path of the program that a shell command starts, or None if it is not found."""
    try:
        words = shlex.split(command)
    except ValueError:  # a quotation mark is not closed
        return None
    return shutil.which(words[0]) if words else None
