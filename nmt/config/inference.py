"""Settings of the commands that use a trained model."""

from __future__ import annotations

from dataclasses import dataclass

from nmt.config.options import (
    DEFAULT_RUN_DIR,
    Combine,
    DType,
    Engine,
    Method,
    Metric,
    Normalization,
    OutputFormat,
    TooLong,
    option,
    require,
)
from nmt.errors import ConfigError


@dataclass(kw_only=True)
class TranslateConfig:
    """Settings of `nmt-translate`; what is null comes from the model folder."""

    model_dir: list[str] = option(
        [DEFAULT_RUN_DIR], "run, checkpoint or model folder; several are an ensemble: [a,b]"
    )
    input: str = option("-", "text to translate, one sentence a line; - is stdin")
    output: str = option("-", "where translations go; - is stdout; a file is gone on with")
    prefixes: str | None = option(
        None, "text that translations start with, a line for each of input; empty is none"
    )
    beam_size: int | None = option(None, "hypotheses kept a sentence; 1 is greedy search")
    length_penalty: float | None = option(None, "alpha of ((5 + length) / 6)^alpha; 0 is none")
    max_length_a: float | None = option(None, "at most a * source tokens + b output tokens: a")
    max_length_b: int | None = option(None, "at most a * source tokens + b output tokens: b")
    min_length: int | None = option(None, "least output tokens, EOS not counted")
    normalization: Normalization | None = option(None, "of scores: wu, average or none")
    word_reward: float | None = option(None, "nats added for each output token")
    coverage_penalty: float | None = option(None, "beta of Wu et al.; above 0 favours coverage")
    sampling: bool | None = option(None, "draw translations at random instead of searching")
    temperature: float | None = option(None, "sampling: log-probabilities are divided by this")
    top_k: int | None = option(None, "sampling: draw among so many likeliest tokens; 0 is all")
    top_p: float | None = option(None, "sampling: draw among the likeliest with this share")
    seed: int | None = option(None, "sampling: the same seed gives the same draws")
    alignment: bool | None = option(None, "format=json: source token of each target token")
    combine: Combine = option(
        Combine.probabilities, "ensemble: mean of probabilities or log_probabilities"
    )
    n_best: int = option(1, "hypotheses written a sentence (format=json when above 1)")
    format: OutputFormat = option(OutputFormat.text, "text, or json: one object a line with scores")
    too_long: TooLong = option(
        TooLong.split, "lines above max_source_length: split and join again, truncate, or error"
    )
    max_source_length: int = option(256, "most source tokens at a time, EOS included")
    max_tokens: int | None = option(
        None, "bound on one batch: rows * beam * longest source; null is the fastest"
    )
    window_lines: int = option(2048, "lines read, sorted by length and translated at a time")
    backend: Engine = option(
        Engine.native, "native, or ctranslate2 for a folder that nmt-export wrote"
    )
    device: str = option("auto", "auto, cpu, cuda, cuda:1, mps")
    dtype: DType = option(
        DType.float32, "number format of products: float32, bfloat16, float16, auto"
    )
    num_threads: int = option(0, "processor threads; 0 leaves torch's choice")

    def __post_init__(self) -> None:
        for key, least in (
            ("n_best", 1),
            ("max_tokens", 1),
            ("window_lines", 1),
            ("num_threads", 0),
            ("max_source_length", 8),  # a character is at most 4 bytes, each a token at worst
        ):
            value = getattr(self, key)
            require(value is None or value >= least, key, value, f"must be at least {least}")
        plain = self.format is OutputFormat.text
        require(not (plain and self.n_best > 1), "n_best", self.n_best, "above 1 needs format=json")


@dataclass(kw_only=True)
class EvaluateConfig:
    """Settings of `nmt-evaluate`."""

    hypotheses: str | None = option(None, "detokenised translations, one a line; - is stdin")
    references: list[str] = option([], "reference files, aligned line by line: r.de or [r1,r2]")
    baseline: str | None = option(None, "translations of another system to test against")
    model_dir: list[str] | None = option(
        None, "instead of hypotheses: translate src with this model, or ensemble [a,b]"
    )
    src: str | None = option(None, "source text for model_dir")
    metrics: list[Metric] = option(
        [Metric.bleu, Metric.chrf, Metric.ter], "any of bleu, chrf, chrfpp, ter"
    )
    tgt_lang: str = option("", "target language; picks BLEU's tokenizer for zh, ja, ko")
    tokenize: str | None = option(None, "BLEU's tokenizer by name; default by tgt_lang, else 13a")
    method: Method = option(
        Method.approximate_randomization, "or bootstrap, whose p-value is to be compared with 0.025"
    )
    num_samples: int = option(1000, "resamples of the significance test")
    seed: int = option(12345, "of the significance test")
    force: bool = option(False, "score text that looks tokenised")
    format: OutputFormat = option(OutputFormat.text, "text or json")
    device: str = option("auto", "auto, cpu, cuda, cuda:1, mps")
    num_threads: int = option(0, "processor threads; 0 leaves torch's choice")

    def __post_init__(self) -> None:
        if (self.hypotheses is None) == (self.model_dir is None):
            raise ConfigError("give either hypotheses=FILE or model_dir=FOLDER with src=FILE")
        for key in ("references", "metrics"):
            require(bool(getattr(self, key)), key, "[]", "name at least one")
        if self.model_dir is not None and self.src is None:
            require(False, "model_dir", ",".join(self.model_dir), "needs src=FILE to translate")
        require(self.num_samples >= 1, "num_samples", self.num_samples, "must be at least 1")
