"""Settings of `nmt-train` and `nmt-average`."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import Enum

from nmt.config.model import ModelConfig
from nmt.config.options import (
    DEFAULT_DATA_DIR,
    DEFAULT_RUN_DIR,
    LARGEST_SEED,
    MAX_NUMBER,
    Settings,
    option,
    require_valid,
)
from nmt.config.runtime import DTYPE_HELP, ChecksumConfig, DType, RuntimeConfig
from nmt.config.search import SearchConfig
from nmt.errors import ConfigError, suggest_names


class Optimizer(str, Enum):
    """The update rule that turns gradients into changes of the weights."""

    adam = "adam"  # Kingma and Ba (2015), as in the paper
    adamw = "adamw"  # Adam with decoupled weight decay, Loshchilov and Hutter (2019)
    muon = "muon"  # orthogonalized updates of matrices, Jordan et al. (2024); AdamW for the rest
    adafactor = "adafactor"  # Shazeer and Stern (2018): row and column means of second moments
    schedule_free = "schedule_free"  # AdamW that averages its weights, Defazio et al. (2024)


class Schedule(str, Enum):
    """The learning rate after the linear warm-up, which is the same for all schedules."""

    noam = "noam"  # inverse square root of the update number, from the paper's peak
    inverse_sqrt = "inverse_sqrt"  # the same curve from peak_learning_rate
    cosine = "cosine"  # half a cosine to 0 at max_updates; better for short runs
    linear = "linear"  # a line to 0 at max_updates
    constant = "constant"  # the peak, for fine-tuning or to end a run by hand
    wsd = "wsd"  # warm-up, stable, decay: constant, then to 0, Hägele et al. (2024)


class BestMetric(str, Enum):
    """The validation metric that decides which checkpoint is the best one."""

    loss = "loss"
    bleu = "bleu"


class TrackerName(str, Enum):
    """Experiment trackers that receive the metrics of a run besides `metrics.jsonl`."""

    tensorboard = "tensorboard"  # used when it is installed
    wandb = "wandb"
    mlflow = "mlflow"
    trackio = "trackio"


class Part(str, Enum):
    """Parts of the model that can be frozen."""

    encoder = "encoder"
    decoder = "decoder"
    embeddings = "embeddings"  # and the output layer, if it is tied to the embeddings


class Sharding(str, Enum):
    """How a model is distributed over several devices in training."""

    none = "none"  # every device has a copy, and gradients are summed (DDP)
    full = "full"  # each device has a shard of weights, gradients and optimizer state (FSDP)


class Adapter(str, Enum):
    """Additional weights that are trained while the weights of the model stay unchanged."""

    none = "none"
    lora = "lora"  # a low-rank matrix added to each linear layer, Hu et al. (2022)


@dataclass(kw_only=True)
class OptimizerConfig(Settings):
    """The optimizer and its schedule; the defaults are Adam as in section 5.3 of the paper."""

    prefix = "optimizer."
    name: Optimizer = option(
        Optimizer.adam,
        "adam, adamw (Adam with decoupled weight decay), muon, adafactor, or schedule_free (AdamW "
        "that validates and saves an average of its weights)",
    )
    beta1: float = option(
        0.9,
        "decay of the mean of gradients; schedule_free: share of the average in trained weights",
        low=0,
        below=1,
    )
    beta2: float = option(0.98, "decay of the mean of squared gradients", low=0, below=1)
    eps: float = option(1e-9, "added to the root of the second moment", above=0, high=1)
    weight_decay: float = option(
        0.0, "decay of matrices, times the learning rate; not for adam", low=0
    )
    momentum: float = option(0.95, "muon: decay of the mean of gradients", low=0, below=1)
    warmup_steps: int = option(4000, "updates during which the learning rate rises", low=1)
    peak_learning_rate: float | None = option(
        None,
        "learning rate at the end of warm-up; null: (d_model * warmup_steps)^-0.5",
        above=0,
    )
    schedule: Schedule = option(
        Schedule.noam, "after warm-up: noam, inverse_sqrt, cosine, linear, constant or wsd"
    )
    decay_share: float = option(
        0.2, "wsd: share of max_updates in which the rate falls to 0", above=0, high=1
    )
    max_grad_norm: float = option(
        0.0, "gradients with a larger norm are scaled down to it; 0 disables", low=0
    )

    def check(self) -> None:
        if self.name is Optimizer.adam:
            rule = "needs optimizer.name=adamw, muon, adafactor or schedule_free"
            self.require(self.weight_decay == 0, "weight_decay", rule)
        if self.name is Optimizer.schedule_free:
            is_constant = self.schedule is Schedule.constant
            self.require(is_constant, "name", "needs optimizer.schedule=constant")
            self.require(self.beta1 > 0, "beta1", "schedule_free needs a number above 0")
        peak = self.peak_learning_rate
        if self.schedule is Schedule.inverse_sqrt:
            rule = (
                "needs optimizer.peak_learning_rate=N; optimizer.schedule=noam is this curve with "
                "the peak of the paper"
            )
            self.require(peak is not None, "schedule", rule)
        if self.schedule is Schedule.noam:
            rule = "noam has its own; set optimizer.schedule=inverse_sqrt (or cosine, linear, ...)"
            self.require(peak is None, "peak_learning_rate", rule)


@dataclass(kw_only=True)
class NoiseConfig(Settings):
    """Noise on the tokens of training pairs, drawn again in every update (docs/synthesis.md)."""

    prefix = "noise."
    drop: float = option(0.0, "share of source tokens to leave out", low=0, below=1)
    mask: float = option(0.0, "share of source tokens to replace with <unk>", low=0, below=1)
    swap: int = option(0, "maximum distance that a source token moves; 0 disables", low=0)
    word_dropout: float = option(
        0.0, "share of decoder input tokens to replace with <unk>", low=0, below=1
    )

    @property
    def is_enabled(self) -> bool:
        """Whether any setting differs from its default, which adds no noise."""
        return self != NoiseConfig()


@dataclass(kw_only=True)
class AugmentConfig(Settings):
    """Changes of the text of training pairs, drawn again in every update (docs/augment.md).

    Each setting is the probability that a pair is changed.
    """

    prefix = "augment."
    upper: float = option(0.0, "both sides in capitals", low=0, high=1)
    title: float = option(
        0.0, "both sides with the first letter of each word capital", low=0, high=1
    )
    lower: float = option(0.0, "both sides without capitals", low=0, high=1)
    punct: float = option(
        0.0, "without the mark at the end, if it is the same on both sides", low=0, high=1
    )
    typos: float = option(0.0, "1 to 4 typos in the source", low=0, high=1)
    spaces: float = option(0.0, "a wrong space at a punctuation mark of the source", low=0, high=1)
    inline_noise: float = option(
        0.0, "a random word, emoji, symbol or address inserted into both sides", low=0, high=1
    )
    noise: float = option(0.0, "both sides replaced by such words", low=0, high=1)
    terminology: float = option(
        0.0,
        "1 to 3 source words with hints, the target words that translate them",
        low=0,
        high=1,
    )

    @property
    def is_enabled(self) -> bool:
        """Whether any change is possible."""
        return self != AugmentConfig()

    def check(self) -> None:
        # a pair gets at most one change of case
        total_probability = self.upper + self.title + self.lower
        rule = "upper, title and lower must add up to at most 1"
        self.require(total_probability <= 1, "upper", rule)


@dataclass(kw_only=True)
class StageConfig(Settings):
    """A stage of training, which changes corpus weights or augmentation.

    A stage ends when the next one starts.
    """

    prefix = "stages."
    # the default is below `low`, so that a stage without a start is refused
    start: int = option(0, "number of updates after which the stage starts", low=1)
    mix: dict[str, float] = option(
        dict, "weight of a corpus in this stage; corpora that are not named keep theirs"
    )
    augment: dict[str, float] = option(
        dict, "settings of augment in this stage; settings that are not named keep theirs"
    )


# (setting, needed setting, rule): the first is refused unless the second is set, see `_is_set`
_REQUIREMENTS = (
    ("freeze", "init_from", "needs init_from=FOLDER, a trained model"),
    ("init_rows", "init_from", "needs init_from=FOLDER, a trained model"),
    ("adapter", "init_from", "needs init_from=FOLDER, a trained model"),
    ("adapter_rank", "adapter", "needs adapter=lora"),
)
# (setting, other setting, rule): the two settings cannot both be set
_CONFLICTS = (
    ("ema_decay", "adapter", "needs adapter=none"),
    ("adapter", "sharding", "does not work with sharding=full"),
    ("compile", "sharding", "does not work with sharding=full"),
    ("r_drop", "sharding", "does not work with sharding=full"),
    ("simcut", "sharding", "does not work with sharding=full"),
    ("simcut", "compile", "does not work with compile=true"),
    ("simcut", "r_drop", "does not work with r_drop"),
    ("guided_alignment", "sharding", "does not work with sharding=full"),
    ("guided_alignment", "compile", "does not work with compile=true"),
)


@dataclass(kw_only=True)
class TrainConfig(RuntimeConfig):
    """Settings of `nmt-train`; the defaults are the paper's base run (sections 5.2 to 5.4)."""

    # the path may change, because a resumed run compares the checksum of the data
    data_dir: str = option(DEFAULT_DATA_DIR, "data folder of nmt-preprocess", on_resume="free")
    run_dir: str = option(DEFAULT_RUN_DIR, "run folder to write or to resume", on_resume="free")
    experiment: str | None = option(
        None, "name or YAML file of settings for all commands", on_resume="free"
    )
    mix: dict[str, float] = option(
        dict, "weight of a corpus, such as mix.news=2; default: as preprocessed; 0 leaves it out"
    )
    mix_temperature: float | None = option(
        None, "above 1: evens out the shares of the corpora; null: as preprocessed", low=1
    )
    stages: dict[str, StageConfig] = option(
        dict, "stages that change corpus weights or augmentation, by name"
    )
    bidirectional: bool = option(
        False, "train on each pair in both directions; needs one vocabulary for both languages"
    )
    init_from: str | None = option(
        None, "run, checkpoint or model folder whose weights training starts from"
    )
    init_rows: dict[str, str] = option(
        dict,
        "piece of init_from whose embedding a new piece copies: init_rows.oci_Latn=cat_Latn",
    )
    freeze: list[Part] = option([], "parts that are not trained: encoder, decoder, embeddings")
    adapter: Adapter = option(Adapter.none, "lora: train low-rank additions to linear layers")
    adapter_rank: int = option(8, "lora: rank of the additions", low=1)
    model: ModelConfig = option(ModelConfig, "the architecture")
    optimizer: OptimizerConfig = option(OptimizerConfig, "the optimizer and its schedule")
    search: SearchConfig = option(
        SearchConfig, "search defaults that are saved with the model", on_resume="free"
    )
    label_smoothing: float = option(
        0.1, "probability spread evenly over the vocabulary", low=0, below=1
    )
    r_drop: float = option(
        0.0, "R-Drop: weight of the KL divergence of two dropout passes; 0 disables", low=0
    )
    simcut: float = option(
        0.0,
        "SimCut: weight of the KL divergence from a second pass without some of the embeddings; "
        "0 disables",
        low=0,
    )
    guided_alignment: float = option(
        0.0,
        "weight of a loss that trains attention to align words as IBM model 1 does; 0 disables",
        low=0,
    )
    subword_sampling: float = option(
        0.0,
        "segment words differently in every update; bpe: share of merges left out (BPE-dropout), "
        "unigram: alpha; 0 disables",
        low=0,
        below=1,
    )
    augment: AugmentConfig = option(AugmentConfig, "changes of the text of training pairs")
    noise: NoiseConfig = option(NoiseConfig, "noise on the tokens of training pairs")
    tokens_per_update: int = option(25000, "target tokens per update, over all ranks", low=1)
    max_tokens: int | None = option(
        4096,
        "size of a batch on one device: rows * longest side, padding included; auto: the largest "
        "that fits in memory, measured when the run starts",
        low=1,
    )
    max_updates: int = option(100_000, "updates after which training ends", low=1, on_resume="log")
    log_every_updates: int = option(
        50, "updates between two lines of metrics", low=1, on_resume="free"
    )
    validate_every_updates: int = option(
        1000, "updates between validations", low=1, on_resume="free"
    )
    checkpoint_every_updates: int = option(
        1000, "updates between checkpoints", low=1, on_resume="free"
    )
    keep_last: int = option(5, "number of newest checkpoints to keep", low=1, on_resume="free")
    keep_best: int = option(
        1, "number of best checkpoints to keep in addition", low=1, on_resume="free"
    )
    average_last: int = option(
        5, "number of checkpoints that nmt-average takes by default", low=1, on_resume="free"
    )
    best_metric: BestMetric = option(
        BestMetric.loss, "loss or bleu on the validation set", on_resume="free"
    )
    patience: int = option(
        0,
        "validations without improvement that end training, counted in the last stage; 0 disables",
        low=0,
        on_resume="free",
    )
    valid_bleu: bool = option(
        True, "translate the validation set to measure BLEU", on_resume="free"
    )
    valid_beam_size: int = option(
        1, "beam size for valid_bleu; 1: greedy", low=1, high=1000, on_resume="free"
    )
    tracker: list[TrackerName] = option(
        [TrackerName.tensorboard],
        "experiment trackers: tensorboard, wandb, mlflow, trackio",
        on_resume="free",
    )
    seed: int = option(1, "for weights, dropout and the order of data", low=0, high=LARGEST_SEED)
    max_bad_updates: int = option(
        10, "consecutive non-finite updates that stop the run", low=1, on_resume="free"
    )
    ema_decay: float = option(
        0.0, "decay of an exponential moving average of the weights; 0 disables", low=0, below=1
    )
    devices: int = option(
        0,
        "processes on this machine; 0: one per GPU, or one on a CPU",
        low=0,
        high=1024,
        on_resume="free",  # a change of the world size is logged
    )
    sharding: Sharding = option(
        Sharding.none,
        "full: divide weights and optimizer state among devices; less memory, slower",
        on_resume="log",
    )
    timeout_seconds: int = option(
        120, "how long ranks wait for each other", low=1, high=10**7, on_resume="free"
    )
    dtype: DType = option(DType.auto, DTYPE_HELP, on_resume="log")
    tf32: bool = option(
        False, "use TF32 for float32 matrix multiplications on a GPU", on_resume="log"
    )
    compile: bool | None = option(
        None,
        "use torch.compile for the whole model; null: for each layer, on a GPU where it works",
        on_resume="log",
    )
    activation_checkpointing: bool = option(
        False, "recompute activations in the backward pass: less memory, slower", on_resume="free"
    )
    profile: str | None = option(
        None, "updates to trace with torch.profiler, such as 10:20", on_resume="free"
    )
    dry_run: bool = option(
        False, "try the largest batch and some updates, report, write nothing", on_resume="free"
    )

    def check(self) -> None:
        self._check_stages()
        self._check_profile()
        for key, needed, rule in _REQUIREMENTS:
            self.require(not self._is_set(key) or self._is_set(needed), key, rule)
        for key, conflicting, rule in _CONFLICTS:
            self.require(not (self._is_set(key) and self._is_set(conflicting)), key, rule)
        trained_parts = set(Part) - set(self.freeze)
        if self.adapter is Adapter.lora:  # LoRA has no additions to embeddings
            trained_parts.discard(Part.embeddings)
        rule = "leaves nothing to train (adapter=lora trains no embeddings)"
        self.require(bool(trained_parts), "freeze", rule)
        if self.sharding is Sharding.full:
            if self.max_tokens is None:
                raise ConfigError(
                    "max_tokens=auto does not work with sharding=full; set max_tokens=N"
                )
            rule = "does not work with sharding=full"
            self.require(self.dtype is not DType.float16, "dtype", rule)
            is_adam = self.optimizer.name in (Optimizer.adam, Optimizer.adamw)
            self.require(is_adam, "optimizer.name", rule)
        if self.optimizer.name is Optimizer.schedule_free:
            rule = "schedule_free averages the weights itself"
            self.require(self.ema_decay == 0, "ema_decay", rule)
        if self.best_metric is BestMetric.bleu:
            self.require(self.valid_bleu, "best_metric", "needs valid_bleu=true")
        dropouts = (
            self.model.dropout,
            self.model.attention_dropout,
            self.model.activation_dropout,
            self.model.embedding_dropout,
        )
        if self.r_drop > 0:
            self.require(any(dropouts), "r_drop", "needs dropout, such as model.dropout=0.1")
        rule = f"must be at least average_last={self.average_last}, which nmt-average takes"
        self.require(self.keep_last >= self.average_last, "keep_last", rule)

    @property
    def batch_tokens(self) -> int:
        """The value of `max_tokens`, or the size of a whole update until `auto` has chosen it.

        More would not be used, since a batch is at most an update.
        """
        return self.max_tokens or self.tokens_per_update

    @property
    def profiled_updates(self) -> range:
        """The updates that `profile` names, including the last one; empty by default."""
        if self.profile is None:
            return range(0)
        first, _, last_update = self.profile.partition(":")
        return range(int(first), int(last_update) + 1)

    def _check_profile(self) -> None:
        """Raise a `ConfigError` unless `profile` names the first and the last update to trace."""
        if self.profile is not None:
            first, _, last_update = self.profile.partition(":")
            are_numbers = first.isdecimal() and last_update.isdecimal()
            is_valid = are_numbers and 1 <= int(first) <= int(last_update)
            self.require(is_valid, "profile", "must be FIRST:LAST, such as 10:20")

    def _check_stages(self) -> None:
        """Raise a `ConfigError` for equal starts and for invalid weights and augmentation."""
        weights = {f"mix.{corpus}": weight for corpus, weight in self.mix.items()}
        starts: set[int] = set()
        augment_keys = [setting.name for setting in fields(AugmentConfig)]
        for name, stage in self.stages.items():
            require_valid(
                stage.start not in starts,
                f"stages.{name}.start",
                stage.start,
                "two stages start there; give each its own",
            )
            starts.add(stage.start)
            for key, probability in stage.augment.items():
                rule = f"no such setting; {suggest_names(key, augment_keys)}"
                require_valid(
                    key in augment_keys, f"stages.{name}.augment.{key}", probability, rule
                )
            self.augment_at(stage)  # checks the probabilities
            for corpus, weight in stage.mix.items():
                weights[f"stages.{name}.mix.{corpus}"] = weight
        for key, weight in weights.items():
            require_valid(0 <= weight <= MAX_NUMBER, key, weight, "must be a number from 0")

    def augment_at(self, stage: StageConfig) -> AugmentConfig:
        """Return the augmentation in a stage. Raises `ConfigError` for invalid probabilities."""
        return replace(self.augment, **stage.augment)

    @property
    def changes_lengths(self) -> bool:
        """Whether training changes the number of tokens that a pair has in the data folder."""
        changes_tokens = self.subword_sampling > 0 or self.noise.drop > 0
        return changes_tokens or any(augment.is_enabled for augment in self._all_augment())

    @property
    def has_hints(self) -> bool:
        """Whether training adds hints to sources, in any stage."""
        return any(augment.terminology > 0 for augment in self._all_augment())

    def _all_augment(self) -> list[AugmentConfig]:
        """Return the augmentation before the first stage and in each stage."""
        return [self.augment, *map(self.augment_at, self.stages.values())]

    def _is_set(self, key: str) -> bool:
        """Return whether a setting differs from its default and is neither False nor empty."""
        value = getattr(self, key)
        # a dataclass has no attribute for a default that is a list or dict; they are empty here
        return bool(value) and value != getattr(type(self), key, None)


@dataclass(kw_only=True)
class AverageConfig(ChecksumConfig):
    """Settings of `nmt-average`."""

    run_dir: str = option(DEFAULT_RUN_DIR, "run folder whose checkpoints are averaged")
    last: int | None = option(
        None, "average the N newest checkpoints; null: average_last of the run", low=1
    )
    best: int | None = option(
        None, "average the N best checkpoints by the run's best_metric instead", low=1
    )
    checkpoints: list[str] = option([], "average these checkpoint folders instead: [a,b,c]")
    output: str | None = option(None, "model folder to write; null: average in the run folder")

    def check(self) -> None:
        keys = [key for key in ("last", "best", "checkpoints") if getattr(self, key)]
        if len(keys) > 1:
            raise ConfigError(f"{keys[0]} and {keys[1]} are both set; keep one")
