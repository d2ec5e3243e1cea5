"""Settings of `nmt-train` and `nmt-average`.

A run may be resumed with a new value of a setting, depending on `on_resume`:

- "accept": the run uses the new value.
- "log": the run uses the new value, and logs the change.
- without `on_resume`: the setting has the rule of the group that contains it, such as `search`. If
  there is no such rule, the change is an error.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import Enum

from nmt.config.augment import AugmentConfig, NoiseConfig
from nmt.config.model import ModelConfig
from nmt.config.optimizer import Optimizer, OptimizerConfig
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


class BestMetric(str, Enum):
    """The validation metric that decides which checkpoint is the best one."""

    loss = "loss"
    bleu = "bleu"


class TrackerName(str, Enum):
    """Experiment trackers that receive the metrics of a run, as `metrics.jsonl` does."""

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
class StageConfig(Settings):
    """A stage of training, which changes corpus weights or augmentation.

    A stage ends when the next one starts.
    """

    # precedes the names of these settings in error messages; a class variable, not a setting
    key_prefix = "stages."
    # the default is invalid on purpose, so that every stage must set its start
    start: int = option(0, "number of updates after which the stage starts", low=1)
    mix: dict[str, float] = option(
        dict, "weight of a corpus in this stage; corpora that are not named keep theirs"
    )
    augment: dict[str, float] = option(
        dict, "settings of augment in this stage; settings that are not named keep theirs"
    )


# (setting, needed setting, problem): if the first is set, the second must be set too
_REQUIREMENTS = (
    ("freeze", "init_from", "needs init_from=FOLDER, a trained model"),
    ("init_rows", "init_from", "needs init_from=FOLDER, a trained model"),
    ("adapter", "init_from", "needs init_from=FOLDER, a trained model"),
    ("adapter_rank", "adapter", "needs adapter=lora"),
)
# (setting, conflicting setting, problem): at most one of the two may be set
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
    data_dir: str = option(DEFAULT_DATA_DIR, "data folder of nmt-preprocess", on_resume="accept")
    run_dir: str = option(DEFAULT_RUN_DIR, "run folder to write or to resume", on_resume="accept")
    experiment: str | None = option(
        None, "name or YAML file of settings for all commands", on_resume="accept"
    )
    mix: dict[str, float] = option(
        dict,
        "weights of corpora, such as mix.news=2, in place of the weights in the data folder; 0 "
        "leaves a corpus out",
    )
    mix_temperature: float | None = option(
        None,
        "above 1: evens out the shares of the corpora; null: the temperature of the data folder",
        low=1,
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
        "copy the embedding of a piece of init_from to a new piece: init_rows.NEW=OLD, such as "
        "init_rows.oci_Latn=cat_Latn",
    )
    freeze: list[Part] = option([], "parts that are not trained: encoder, decoder, embeddings")
    adapter: Adapter = option(Adapter.none, "lora: train low-rank additions to linear layers")
    adapter_rank: int = option(8, "rank of the additions of adapter=lora", low=1)
    model: ModelConfig = option(ModelConfig, "the architecture")
    optimizer: OptimizerConfig = option(OptimizerConfig, "the optimizer and its schedule")
    search: SearchConfig = option(
        SearchConfig, "search defaults that are saved with the model", on_resume="accept"
    )
    label_smoothing: float = option(
        0.1, "probability spread evenly over the vocabulary", low=0, below=1
    )
    r_drop: float = option(
        0.0,
        "weight of the R-Drop loss: KL divergence between two passes with different dropout; 0 "
        "disables",
        low=0,
    )
    simcut: float = option(
        0.0,
        "weight of the SimCut loss: KL divergence between the predictions with all input "
        "embeddings and with some of them set to zero; 0 disables",
        low=0,
    )
    guided_alignment: float = option(
        0.0,
        "weight of a loss that trains attention to align words as IBM model 1 does; 0 disables",
        low=0,
    )
    subword_sampling: float = option(
        0.0,
        "segment words at random in every update: probability of skipping a merge with a bpe "
        "tokenizer (BPE-dropout), alpha with a unigram tokenizer; 0 disables",
        low=0,
        below=1,
    )
    augment: AugmentConfig = option(AugmentConfig, "changes of the text of training pairs")
    lemmas: str | None = option(
        None,
        "file with lines FORM<TAB>LEMMA; most hints of augment.terminology then have lemmas of "
        "target words",
    )
    noise: NoiseConfig = option(NoiseConfig, "noise on the tokens of training pairs")
    tokens_per_update: int = option(25000, "target tokens per update, over all ranks", low=1)
    # on the command line and in YAML files, None is written as auto
    max_tokens: int | None = option(
        4096,
        "size of a batch on one device: rows * longest side, padding included; auto measures at "
        "the start which size fits in memory",
        low=1,
    )
    max_updates: int = option(100_000, "updates after which training ends", low=1, on_resume="log")
    log_every_updates: int = option(
        50, "updates between two lines of metrics", low=1, on_resume="accept"
    )
    validate_every_updates: int = option(
        1000, "updates between validations", low=1, on_resume="accept"
    )
    checkpoint_every_updates: int = option(
        1000, "updates between checkpoints", low=1, on_resume="accept"
    )
    keep_last: int = option(5, "number of newest checkpoints to keep", low=1, on_resume="accept")
    keep_best: int = option(
        1, "number of best checkpoints to keep in addition", low=1, on_resume="accept"
    )
    average_last: int = option(
        5, "number of checkpoints that nmt-average takes by default", low=1, on_resume="accept"
    )
    best_metric: BestMetric = option(
        BestMetric.loss, "loss or bleu on the validation set", on_resume="accept"
    )
    patience: int = option(
        0,
        "stop after this number of validations without improvement; validations before the last "
        "stage do not count; 0 disables",
        low=0,
        on_resume="accept",
    )
    valid_bleu: bool = option(
        True, "translate the validation set to measure BLEU", on_resume="accept"
    )
    valid_beam_size: int = option(
        1, "beam size for valid_bleu; 1: greedy", low=1, high=1000, on_resume="accept"
    )
    tracker: list[TrackerName] = option(
        [TrackerName.tensorboard],
        "experiment trackers: tensorboard, wandb, mlflow, trackio",
        on_resume="accept",
    )
    seed: int = option(
        1, "seed of the weights, of dropout and of the order of data", low=0, high=LARGEST_SEED
    )
    max_bad_updates: int = option(
        10, "consecutive non-finite updates that stop the run", low=1, on_resume="accept"
    )
    ema_decay: float = option(
        0.0, "decay of an exponential moving average of the weights; 0 disables", low=0, below=1
    )
    devices: int = option(
        0,
        "processes on this machine; 0: one per GPU, or one on a CPU",
        low=0,
        high=1024,
        on_resume="accept",  # a change of the world size is logged
    )
    sharding: Sharding = option(
        Sharding.none,
        "full: divide weights and optimizer state among devices; less memory, slower",
        on_resume="log",
    )
    timeout_seconds: int = option(
        120, "how long ranks wait for each other", low=1, high=10**7, on_resume="accept"
    )
    dtype: DType = option(DType.auto, DTYPE_HELP, on_resume="log")
    tf32: bool = option(
        False, "use TF32 for float32 matrix multiplications on a GPU", on_resume="log"
    )
    compile: bool | None = option(
        None,
        "true: compile the whole model with torch.compile; null: compile each layer, if training "
        "runs on a GPU on which torch.compile works",
        on_resume="log",
    )
    activation_checkpointing: bool = option(
        False, "recompute activations in the backward pass: less memory, slower", on_resume="accept"
    )
    profile: str | None = option(
        None, "updates to trace with torch.profiler, such as 10:20", on_resume="accept"
    )
    dry_run: bool = option(
        False,
        "try the largest batch and some updates, report the result, and write nothing",
        on_resume="accept",
    )

    def check(self) -> None:
        self._check_stages()
        self._check_weights()
        self._check_profile()
        for key, needed_key, problem in _REQUIREMENTS:
            if self._is_set(key):
                self.require(self._is_set(needed_key), key, problem)
        if self.lemmas:
            self.require(self.has_hints, "lemmas", "needs augment.terminology")
        for key, conflicting_key, problem in _CONFLICTS:
            are_both_set = self._is_set(key) and self._is_set(conflicting_key)
            self.require(not are_both_set, key, problem)
        trained_parts = set(Part) - set(self.freeze)
        if self.adapter is Adapter.lora:  # LoRA adds nothing to embeddings
            trained_parts.discard(Part.embeddings)
        problem = "leaves nothing to train (adapter=lora trains no embeddings)"
        self.require(bool(trained_parts), "freeze", problem)
        if self.sharding is Sharding.full:
            self._check_sharding()
        if self.optimizer.name is Optimizer.schedule_free:
            problem = "schedule_free averages the weights itself"
            self.require(self.ema_decay == 0, "ema_decay", problem)
        if self.best_metric is BestMetric.bleu:
            self.require(self.valid_bleu, "best_metric", "needs valid_bleu=true")
        if self.r_drop > 0:
            dropouts = (
                self.model.dropout,
                self.model.attention_dropout,
                self.model.activation_dropout,
                self.model.embedding_dropout,
            )
            self.require(any(dropouts), "r_drop", "needs dropout, such as model.dropout=0.1")
        problem = f"must be at least average_last={self.average_last}, which nmt-average takes"
        self.require(self.keep_last >= self.average_last, "keep_last", problem)

    @property
    def max_batch_tokens(self) -> int:
        """The maximum size of a batch: `max_tokens`, or an estimate before it is measured.

        With max_tokens=auto, `max_tokens` is None until training has measured which size fits in
        memory. The estimate is `tokens_per_update`.
        """
        if self.max_tokens is None:
            return self.tokens_per_update
        return self.max_tokens

    @property
    def profiled_updates(self) -> range:
        """The updates that `profile` names, including the last one; empty by default."""
        if self.profile is None:
            return range(0)
        first, _, last_update = self.profile.partition(":")
        return range(int(first), int(last_update) + 1)

    def _check_sharding(self) -> None:
        """Raise a `ConfigError` for settings that do not work with `sharding=full`."""
        if self.max_tokens is None:
            raise ConfigError("max_tokens=auto does not work with sharding=full; set max_tokens=N")
        problem = "does not work with sharding=full"
        self.require(self.dtype is not DType.float16, "dtype", problem)
        is_adam = self.optimizer.name in (Optimizer.adam, Optimizer.adamw)
        self.require(is_adam, "optimizer.name", problem)

    def _check_profile(self) -> None:
        """Raise a `ConfigError` unless `profile` names the first and the last update to trace."""
        if self.profile is not None:
            first, _, last_update = self.profile.partition(":")
            are_numbers = first.isdecimal() and last_update.isdecimal()
            is_valid = are_numbers and 1 <= int(first) <= int(last_update)
            self.require(is_valid, "profile", "must be FIRST:LAST, such as 10:20")

    def _check_stages(self) -> None:
        """Raise a `ConfigError` for equal starts, unknown keys and invalid values of stages."""
        starts: set[int] = set()
        augment_keys = [setting.name for setting in fields(AugmentConfig)]
        for name, stage in self.stages.items():
            # not `self.require`, which works only for settings of `TrainConfig` itself
            require_valid(
                stage.start not in starts,
                f"stages.{name}.start",
                stage.start,
                "two stages start there; give each another start",
            )
            starts.add(stage.start)
            for key, probability in stage.augment.items():
                problem = f"no such setting; {suggest_names(key, augment_keys)}"
                require_valid(
                    key in augment_keys, f"stages.{name}.augment.{key}", probability, problem
                )
            self.augment_at(stage)  # called for its error if a probability is invalid

    def _check_weights(self) -> None:
        """Raise a `ConfigError` for an invalid weight of a corpus in `mix` or in a stage."""
        weights_by_setting = {"mix": self.mix}
        for name, stage in self.stages.items():
            weights_by_setting[f"stages.{name}.mix"] = stage.mix
        for setting_name, weights in weights_by_setting.items():
            for corpus, weight in weights.items():
                is_valid = 0 <= weight <= MAX_NUMBER
                problem = "must be a number from 0"
                require_valid(is_valid, f"{setting_name}.{corpus}", weight, problem)

    def augment_at(self, stage: StageConfig) -> AugmentConfig:
        """Return the augmentation in a stage. Raises `ConfigError` for invalid probabilities."""
        return replace(self.augment, **stage.augment)

    @property
    def changes_lengths(self) -> bool:
        """Whether training changes the numbers of tokens of pairs in the data folder."""
        changes_tokens = self.subword_sampling > 0 or self.noise.drop > 0
        return changes_tokens or any(augment.is_enabled for augment in self._augment_configs())

    @property
    def has_hints(self) -> bool:
        """Whether training adds hints of terms to sources (`augment.terminology`), in any stage."""
        return any(augment.terminology > 0 for augment in self._augment_configs())

    def _augment_configs(self) -> list[AugmentConfig]:
        """Return the augmentation before the first stage and in each stage."""
        return [self.augment, *map(self.augment_at, self.stages.values())]

    def _is_set(self, key: str) -> bool:
        """Return whether a setting differs from its default and is neither False nor empty."""
        value = getattr(self, key)
        if not value:
            return False
        # lists and dicts have a default factory, so their `default` is MISSING, equal to no value
        default = self.__dataclass_fields__[key].default
        return bool(value != default)


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
