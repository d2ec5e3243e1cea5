"""Settings of `nmt-train` and `nmt-average`."""

from __future__ import annotations

from dataclasses import dataclass

from nmt.config.model import ModelConfig, SearchConfig
from nmt.errors import ConfigError
from nmt.options import (
    DEFAULT_DATA_DIR,
    DEFAULT_RUN_DIR,
    BestMetric,
    DType,
    Schedule,
    option,
    require,
)


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
    exportable: bool = option(True, "refuse a model that nmt-export could not give to CTranslate2")
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
