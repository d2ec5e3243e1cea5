"""Settings of the commands that use a trained model."""

from __future__ import annotations

from dataclasses import dataclass

from nmt.errors import ConfigError
from nmt.options import DEFAULT_RUN_DIR, DType, Method, Metric, OutputFormat, option, require


@dataclass(kw_only=True)
class TranslateConfig:
    """Settings of `nmt-translate`; what is null comes from the model folder."""

    model_dir: str = option(DEFAULT_RUN_DIR, "run, checkpoint or model folder")
    input: str = option("-", "text to translate, one sentence a line; - is stdin")
    output: str = option("-", "where translations go; - is stdout")
    beam_size: int | None = option(None, "hypotheses kept a sentence; 1 is greedy search")
    length_penalty: float | None = option(None, "alpha of ((5 + length) / 6)^alpha; 0 is none")
    max_length_a: float | None = option(None, "at most a * source tokens + b output tokens: a")
    max_length_b: int | None = option(None, "at most a * source tokens + b output tokens: b")
    n_best: int = option(1, "hypotheses written a sentence (format=json when above 1)")
    format: OutputFormat = option(OutputFormat.text, "text, or json: one object a line with scores")
    max_tokens: int = option(4096, "bound on one batch: rows * beam * longest source")
    window_lines: int = option(8192, "lines read, sorted by length and translated at a time")
    device: str = option("auto", "auto, cpu, cuda, cuda:1, mps")
    dtype: DType = option(
        DType.float32, "number format of products: float32, bfloat16, float16, auto"
    )
    num_threads: int = option(0, "processor threads; 0 leaves torch's choice")

    def __post_init__(self) -> None:
        for key in ("n_best", "max_tokens", "window_lines"):
            require(getattr(self, key) >= 1, key, getattr(self, key), "must be at least 1")
        plain = self.format is OutputFormat.text
        require(not (plain and self.n_best > 1), "n_best", self.n_best, "above 1 needs format=json")


@dataclass(kw_only=True)
class EvaluateConfig:
    """Settings of `nmt-evaluate`."""

    hypotheses: str | None = option(None, "detokenised translations, one a line; - is stdin")
    references: list[str] = option([], "reference files, aligned line by line: r.de or [r1,r2]")
    baseline: str | None = option(None, "translations of another system to test against")
    model_dir: str | None = option(None, "instead of hypotheses: translate src with this model")
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
        missing = self.model_dir is not None and self.src is None
        require(not missing, "model_dir", self.model_dir, "needs src=FILE to translate")
        require(self.num_samples >= 1, "num_samples", self.num_samples, "must be at least 1")
