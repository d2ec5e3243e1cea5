"""Settings of `nmt-train` and `nmt-average`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nmt.config.model import ModelConfig, SearchConfig
from nmt.config.options import (
    DEFAULT_DATA_DIR,
    DEFAULT_RUN_DIR,
    BestMetric,
    DType,
    Optimizer,
    Schedule,
    option,
    require,
)
from nmt.errors import ConfigError


@dataclass(kw_only=True)
class OptimizerConfig:
    """The optimizer and its schedule; the defaults are Adam as in section 5.3 of the paper."""

    name: Optimizer = option(Optimizer.adam, "adam, or adamw (Adam with decoupled weight decay)")
    beta1: float = option(0.9, "decay of the mean of gradients")
    beta2: float = option(0.98, "decay of the mean of squared gradients")
    eps: float = option(1e-9, "added to the root of the second moment")
    weight_decay: float = option(0.0, "share of matrices lost an update, times the rate; adamw")
    warmup_steps: int = option(4000, "updates during which the learning rate rises")
    learning_rate_scale: float = option(1.0, "factor on the paper's learning rate")
    peak_learning_rate: float | None = option(
        None, "rate at the end of warm-up; null: scale * (d_model * warmup_steps)^-0.5"
    )
    schedule: Schedule = option(
        Schedule.noam, "after warm-up: noam, inverse_sqrt, or cosine to 0 at max_updates"
    )
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
        key = "optimizer.weight_decay"
        require(self.weight_decay >= 0, key, self.weight_decay, "must not be negative")
        has_decay = self.weight_decay == 0 or self.name is Optimizer.adamw
        require(has_decay, key, self.weight_decay, "needs optimizer.name=adamw")
        self._check_peak()

    def _check_peak(self) -> None:
        """Refuse a peak that is given twice, or not at all."""
        key, peak = "optimizer.peak_learning_rate", self.peak_learning_rate
        if peak is None:
            rule = f"needs {key}; noam is the same curve from the paper's peak"
            is_whole = self.schedule is not Schedule.inverse_sqrt
            require(is_whole, "optimizer.schedule", self.schedule, rule)
            return
        require(peak > 0, key, peak, "must be above 0")
        rule = "noam has the paper's peak; use optimizer.schedule=inverse_sqrt or cosine"
        require(self.schedule is not Schedule.noam, key, peak, rule)
        rule = "replaces the paper's peak; set optimizer.learning_rate_scale=1 with it"
        require(self.learning_rate_scale == 1, key, peak, rule)


@dataclass(kw_only=True)
class TrainConfig:
    """Settings of `nmt-train`; the defaults are the paper's base run (sections 5.2 to 5.4)."""

    data_dir: str = option(DEFAULT_DATA_DIR, "data folder made by nmt-preprocess")
    run_dir: str = option(DEFAULT_RUN_DIR, "run folder to write, or to go on with")
    mix: dict[str, float] = option(
        dict, "weight of named corpora instead of preprocessing's, e.g. mix.news=2; 0 leaves out"
    )
    mix_temperature: float | None = option(
        None, "evens out the shares of corpora; null: as preprocessed"
    )
    init_from: str | None = option(
        None, "run, checkpoint or model folder whose weights a new run starts with"
    )
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
    max_bad_updates: int = option(
        10, "updates in a row whose loss or gradient is not finite, at which the run stops"
    )
    ema_decay: float = option(
        0.0, "decay of the moving average of weights that is validated and saved; 0 disables"
    )
    device: str = option("auto", "auto, cpu, cuda, cuda:1, mps")
    devices: int = option(0, "processes of this machine, one a device; 0: all GPUs, or one CPU")
    timeout_seconds: int = option(120, "how long a rank waits for another before the run fails")
    dtype: DType = option(DType.auto, "number format of products: auto, float32, bfloat16, float16")
    tf32: bool = option(False, "let float32 products of the GPU round their factors to TF32")
    compile: bool | None = option(
        None, "compile model and loss with torch.compile; null: on a GPU where that works"
    )
    activation_checkpointing: bool = option(
        False, "keep only each layer's input and compute the rest again: less memory, more time"
    )
    dry_run: bool = option(False, "try the largest batch and some updates, report, write nothing")
    num_threads: int = option(0, "processor threads; 0 leaves torch's choice")

    def __post_init__(self) -> None:
        positive = (
            "tokens_per_update max_tokens max_updates log_every_updates keep_last average_last"
        )
        positive += " validate_every_updates checkpoint_every_updates valid_beam_size"
        positive += " max_bad_updates timeout_seconds"
        for key in positive.split():
            require(getattr(self, key) >= 1, key, getattr(self, key), "must be at least 1")
        for key in ("patience", "keep_best", "num_threads", "seed", "devices"):
            require(getattr(self, key) >= 0, key, getattr(self, key), "must not be negative")
        for name, weight in self.mix.items():
            valid = 0 <= weight < math.inf
            require(valid, f"mix.{name}", weight, "must be a number from 0")
        temperature = self.mix_temperature
        valid = temperature is None or 1 <= temperature < math.inf
        require(valid, "mix_temperature", temperature, "must be at least 1")
        valid = 0 <= self.label_smoothing < 1
        require(valid, "label_smoothing", self.label_smoothing, "must be from 0 to below 1")
        require(0 <= self.ema_decay < 1, "ema_decay", self.ema_decay, "must be from 0 to below 1")
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
