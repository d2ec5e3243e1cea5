"""Every setting of every command: its type, default, unit, range and contradictions.

The dataclasses are the truth; the YAML under `configs/` only holds what differs from them. The
defaults are the recipe of the base model in "Attention Is All You Need" (Vaswani et al., 2017).
This module knows neither Hydra nor torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from nmt.errors import ConfigError
from nmt.options import (
    BestMetric,
    Corpus,
    DType,
    Method,
    Metric,
    Norm,
    OutputFormat,
    Positions,
    Schedule,
    option,
    require,
)

DEFAULT_DATA_DIR = "data/prepared"
DEFAULT_RUN_DIR = "runs/default"


@dataclass(kw_only=True)
class ModelConfig:
    """The Transformer's architecture (paper, section 3; table 3 for base and big)."""

    num_encoder_layers: int = option(6, "encoder layers")
    num_decoder_layers: int = option(6, "decoder layers")
    d_model: int = option(512, "width of embeddings and of every layer's output")
    d_ff: int = option(2048, "inner width of the feed-forward layers")
    num_heads: int = option(8, "attention heads; must divide d_model")
    dropout: float = option(0.1, "share dropped of embedding sums and sub-layer outputs (0 to <1)")
    norm: Norm = option(Norm.post, "layer norm after the residual sum (post) or before (pre)")
    positions: Positions = option(Positions.sinusoidal, "layout of the positional encoding")

    def __post_init__(self) -> None:
        for key in ("num_encoder_layers", "num_decoder_layers", "d_model", "d_ff", "num_heads"):
            require(
                getattr(self, key) >= 1, f"model.{key}", getattr(self, key), "must be at least 1"
            )
        rule = f"must divide model.d_model={self.d_model}"
        require(self.d_model % self.num_heads == 0, "model.num_heads", self.num_heads, rule)
        require(
            self.d_model % 2 == 0, "model.d_model", self.d_model, "must be even (sine and cosine)"
        )
        require(0 <= self.dropout < 1, "model.dropout", self.dropout, "must be from 0 to below 1")


@dataclass(kw_only=True)
class SearchConfig:
    """Beam search as in section 6.1 of the paper; saved with the model as its defaults."""

    beam_size: int = option(4, "hypotheses kept a sentence; 1 is greedy search")
    length_penalty: float = option(
        0.6, "alpha in score = log P / ((5 + length) / 6)^alpha; 0 is none"
    )
    max_length_a: float = option(1.0, "at most a * source tokens + b output tokens: a")
    max_length_b: int = option(50, "at most a * source tokens + b output tokens: b")

    def __post_init__(self) -> None:
        require(self.beam_size >= 1, "beam_size", self.beam_size, "must be at least 1")
        bounded = abs(self.length_penalty) <= 10
        require(bounded, "length_penalty", self.length_penalty, "must be from -10 to 10")
        require(self.max_length_a >= 0, "max_length_a", self.max_length_a, "must not be negative")
        require(self.max_length_b >= 1, "max_length_b", self.max_length_b, "must be at least 1")


@dataclass(kw_only=True)
class OptimizerConfig:
    """Adam (Kingma and Ba, 2015) with the values of section 5.3 of the paper."""

    beta1: float = option(0.9, "decay of the mean of gradients")
    beta2: float = option(0.98, "decay of the mean of squared gradients")
    eps: float = option(1e-9, "added to the root of the second moment")
    warmup_steps: int = option(4000, "updates during which the learning rate rises")
    learning_rate_scale: float = option(1.0, "factor on the paper's learning rate")
    schedule: Schedule = option(Schedule.noam, "after warm-up: noam, or cosine to 0 at max_updates")
    max_grad_norm: float = option(0.0, "gradients are clipped to this norm; 0 disables")

    def __post_init__(self) -> None:
        require(0 <= self.beta1 < 1, "optimizer.beta1", self.beta1, "must be from 0 to below 1")
        require(0 <= self.beta2 < 1, "optimizer.beta2", self.beta2, "must be from 0 to below 1")
        require(self.eps > 0, "optimizer.eps", self.eps, "must be above 0")
        key = "optimizer.warmup_steps"
        require(self.warmup_steps >= 1, key, self.warmup_steps, "must be at least 1")
        key = "optimizer.learning_rate_scale"
        require(self.learning_rate_scale > 0, key, self.learning_rate_scale, "must be above 0")
        key = "optimizer.max_grad_norm"
        require(self.max_grad_norm >= 0, key, self.max_grad_norm, "must not be negative")


@dataclass(kw_only=True)
class SplitConfig:
    """One part (train, valid or test) of a corpus of files or of a Hugging Face dataset."""

    src: str | None = option(None, "source text, one sentence a line; plain or .gz")
    tgt: str | None = option(None, "target text, aligned with src line by line")
    tsv: str | None = option(None, "both sides in one file: source, tab, target; plain or .gz")
    dataset: str | None = option(None, "Hugging Face dataset: hub name or local folder")
    dataset_config: str | None = option(None, "its configuration, for example de-en")
    dataset_split: str | None = option(None, "its split, for example train")

    def __post_init__(self) -> None:
        given = [k for k in ("src", "tsv", "dataset") if getattr(self, k) is not None]
        if len(given) > 1:
            raise ConfigError(f"{given[0]} and {given[1]} are both given for one split; keep one")
        if (self.src is None) != (self.tgt is None):
            have, lack = ("src", "tgt") if self.tgt is None else ("tgt", "src")
            value = self.src or self.tgt
            raise ConfigError(
                f"{have}={value} is given without {lack}; give both sides of the pair"
            )

    @property
    def given(self) -> bool:
        """Whether any source is named."""
        return any(value is not None for value in (self.src, self.tsv, self.dataset))


@dataclass(kw_only=True)
class DataConfig:
    """Where the sentence pairs come from."""

    corpus: Corpus = option(Corpus.files, "files (or datasets), or a corpus that nmt brings along")
    src_lang: str = option("src", "source language code; names fields of datasets, picks texts")
    tgt_lang: str = option("tgt", "target language code; also picks BLEU's tokenizer")
    train: SplitConfig = option(SplitConfig, "training pairs")
    valid: SplitConfig = option(SplitConfig, "validation pairs")
    test: SplitConfig = option(SplitConfig, "test pairs, copied as text into the data folder")
    cache_dir: str = option("data/cache", "where downloaded corpora are kept")


@dataclass(kw_only=True)
class TokenizerConfig:
    """The joint SentencePiece BPE model (section 5.1 of the paper: about 37,000 tokens)."""

    vocab_size: int = option(37000, "pieces shared by both languages, control symbols included")
    normalization: str = option("nmt_nfkc", "SentencePiece rule: nmt_nfkc, nfkc, identity, ..._cf")
    character_coverage: float = option(1.0, "share of characters with a piece; the rest are bytes")
    max_sentences: int = option(1_000_000, "sentences that the tokenizer is trained on, sampled")

    def __post_init__(self) -> None:
        key, low = "tokenizer.vocab_size", 261
        rule = f"must be at least {low} (256 bytes and the control symbols)"
        require(self.vocab_size >= low, key, self.vocab_size, rule)
        key = "tokenizer.character_coverage"
        rule = "must be from 0.98 to 1"
        require(0.98 <= self.character_coverage <= 1, key, self.character_coverage, rule)
        key = "tokenizer.max_sentences"
        require(self.max_sentences >= 1, key, self.max_sentences, "must be at least 1")
        names = ("nmt_nfkc", "nfkc", "nmt_nfkc_cf", "nfkc_cf", "identity")
        key = "tokenizer.normalization"
        rule = "must be one of " + ", ".join(names)
        require(self.normalization in names, key, self.normalization, rule)


@dataclass(kw_only=True)
class PreprocessConfig:
    """Settings of `nmt-preprocess`."""

    data: DataConfig = option(DataConfig, "the corpus")
    tokenizer: TokenizerConfig = option(TokenizerConfig, "the subword model")
    data_dir: str = option(DEFAULT_DATA_DIR, "folder to write")
    max_length: int = option(256, "longer training sentences are dropped; tokens, EOS included")
    seed: int = option(0, "for generated corpora and sampling")
    num_threads: int = option(0, "processor threads; 0 takes all")

    def __post_init__(self) -> None:
        require(self.max_length >= 2, "max_length", self.max_length, "must be at least 2")
        valid = 0 <= self.num_threads <= 1024
        require(valid, "num_threads", self.num_threads, "must be from 0 to 1024")
        require(self.seed >= 0, "seed", self.seed, "must not be negative")


@dataclass(kw_only=True)
class TrainConfig:
    """Settings of `nmt-train`; the defaults are the paper's base run (sections 5.2 to 5.4)."""

    data_dir: str = option(DEFAULT_DATA_DIR, "data folder made by nmt-preprocess")
    run_dir: str = option(DEFAULT_RUN_DIR, "run folder to write, or to go on with")
    model: ModelConfig = option(ModelConfig, "the architecture")
    optimizer: OptimizerConfig = option(OptimizerConfig, "Adam and its schedule")
    search: SearchConfig = option(SearchConfig, "search defaults that the model carries")
    label_smoothing: float = option(0.1, "share of the target spread over the vocabulary")
    tokens_per_update: int = option(25000, "target tokens an update, over all ranks")
    max_tokens: int = option(4096, "bound on one batch: rows * longest side, padding included")
    max_updates: int = option(100_000, "updates at which training ends")
    log_every_updates: int = option(50, "updates between two lines of metrics")
    validate_every_updates: int = option(1000, "updates between validations")
    checkpoint_every_updates: int = option(1000, "updates between checkpoints")
    keep_last: int = option(5, "newest checkpoints kept")
    keep_best: int = option(1, "best checkpoints kept besides")
    average_last: int = option(5, "checkpoints that nmt-average takes by default")
    best_metric: BestMetric = option(BestMetric.loss, "loss or bleu on the validation set")
    patience: int = option(0, "validations without a better score before the end; 0 disables")
    valid_bleu: bool = option(True, "decode the validation set for BLEU")
    valid_beam_size: int = option(1, "beam for that decoding; 1 is greedy")
    seed: int = option(1, "for initial weights, dropout and the order of data")
    device: str = option("auto", "auto, cpu, cuda, cuda:1, mps")
    dtype: DType = option(DType.auto, "number format of matrix products: auto, float32, bfloat16")
    num_threads: int = option(0, "processor threads; 0 leaves torch's choice")

    def __post_init__(self) -> None:
        positive = (
            "tokens_per_update max_tokens max_updates log_every_updates keep_last average_last"
        )
        positive += " validate_every_updates checkpoint_every_updates valid_beam_size"
        for key in positive.split():
            require(getattr(self, key) >= 1, key, getattr(self, key), "must be at least 1")
        for key in ("patience", "keep_best", "num_threads", "seed"):
            require(getattr(self, key) >= 0, key, getattr(self, key), "must not be negative")
        valid = 0 <= self.label_smoothing < 1
        require(valid, "label_smoothing", self.label_smoothing, "must be from 0 to below 1")
        needs_bleu = self.best_metric is BestMetric.bleu and not self.valid_bleu
        require(not needs_bleu, "best_metric", self.best_metric, "needs valid_bleu=true")
        rule = f"must be at least average_last={self.average_last}, or they are gone"
        require(self.keep_last >= self.average_last, "keep_last", self.keep_last, rule)


@dataclass(kw_only=True)
class AverageConfig:
    """Settings of `nmt-average`."""

    run_dir: str = option(DEFAULT_RUN_DIR, "run folder whose checkpoints are averaged")
    last: int | None = option(None, "average the newest N; default: average_last of the run")
    best: int | None = option(None, "average the N best by the run's best_metric instead")
    checkpoints: list[str] = option([], "average these folders instead: [a,b,c]")
    output: str | None = option(None, "model folder to write; default: RUN_DIR/average")

    def __post_init__(self) -> None:
        given = [k for k in ("last", "best", "checkpoints") if getattr(self, k)]
        if len(given) > 1:
            raise ConfigError(f"{given[0]} and {given[1]} are both given; keep one")
        for key in ("last", "best"):
            value = getattr(self, key)
            require(value is None or value >= 1, key, value, "must be at least 1")


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
        DType.float32, "number format of matrix products: float32, bfloat16, auto"
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
