"""Settings of `nmt-score`."""

from __future__ import annotations

from dataclasses import dataclass

from nmt.config.options import (
    DEFAULT_RUN_DIR,
    Combine,
    DType,
    Normalization,
    OutputFormat,
    ScoreMeasure,
    option,
    require,
)
from nmt.errors import ConfigError


@dataclass(kw_only=True)
class ScoreConfig:
    """Settings of `nmt-score`; what is null comes from the model folder."""

    model_dir: list[str] = option(
        [DEFAULT_RUN_DIR], "run, checkpoint or model folder; several are an ensemble: [A,B]"
    )
    src: str | None = option(None, "source text, one sentence a line; - is stdin")
    tgt: str | None = option(None, "its translations, line by line; - is stdin")
    output: str = option("-", "where scores go; - is stdout")
    measure: ScoreMeasure = option(
        ScoreMeasure.log_prob, "log_prob (the sum), per_token or score (as search reports it); nats"
    )
    format: OutputFormat = option(OutputFormat.text, "text, or json: one object a line with all")
    length_penalty: float | None = option(None, "of score: alpha of ((5 + length) / 6)^alpha")
    normalization: Normalization | None = option(None, "of score: wu, average or none")
    word_reward: float | None = option(None, "of score: nats added for each token, EOS too")
    coverage_penalty: float | None = option(None, "of score: beta of Wu et al. (2016)")
    alignment: bool = option(False, "format=json: the source token each target token attends to")
    combine: Combine = option(
        Combine.probabilities, "what an ensemble takes the mean of, or log_probabilities"
    )
    max_tokens: int = option(4096, "bound on one batch: rows * longest side")
    window_lines: int = option(8192, "lines read, sorted by length and scored at a time")
    device: str = option("auto", "auto, cpu, cuda, cuda:1, mps")
    dtype: DType = option(
        DType.float32, "number format of products: float32, bfloat16, float16, auto"
    )
    num_threads: int = option(0, "processor threads; 0 leaves torch's choice")

    def __post_init__(self) -> None:
        if self.src is None or self.tgt is None:
            raise ConfigError("give src=FILE and tgt=FILE, aligned line by line")
        require(self.src != "-" or self.tgt != "-", "tgt", "-", "src is stdin already")
        for key in ("max_tokens", "window_lines"):
            require(getattr(self, key) >= 1, key, getattr(self, key), "must be at least 1")
        require(self.num_threads >= 0, "num_threads", self.num_threads, "must not be negative")
        plain = self.format is OutputFormat.text
        require(not (plain and self.alignment), "alignment", "true", "needs format=json")
