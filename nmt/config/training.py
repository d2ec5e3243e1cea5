"""Settings of the architecture and of search, which are saved with every model, of `nmt-train` and
of `nmt-average`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from nmt.config.options import (
    CORES,
    DEFAULT_DATA_DIR,
    DEFAULT_RUN_DIR,
    LARGEST_SEED,
    MOST,
    NUMBER_FORMAT,
    VERIFY,
    DType,
    Normalization,
    check_ranges,
    choose,
    option,
    require,
)
from nmt.errors import ConfigError


class Norm(str, Enum):
    """Where layer normalization is applied."""

    post = "post"  # after the residual sum, as in the paper
    pre = "pre"  # before each sub-layer, with one more at the end of each stack


class NormLayer(str, Enum):
    """What normalizes."""

    layer = "layer"  # mean 0 and variance 1, as in the paper
    rms = "rms"  # mean square 1, no bias, Zhang and Sennrich (2019)


class Positions(str, Enum):
    """How the model knows where tokens stand: by vectors added to embeddings (the first four), or
    in self-attention alone.
    """

    sinusoidal = "sinusoidal"  # sines and cosines interleaved, as the paper writes it
    sinusoidal_concat = "sinusoidal_concat"  # one half sine, the other cosine, as in Tensor2Tensor
    sinusoidal_halves = "sinusoidal_halves"  # in that order, the paper's wavelengths, as in Marian
    learned = "learned"  # a vector for each of num_positions, for each side (table 3, row E)
    relative = "relative"  # vectors of distances, for keys and values, Shaw et al. (2018)
    rotary = "rotary"  # queries and keys turned by their position, Su et al. (2021)
    alibi = "alibi"  # less attention with distance, in the encoder both ways, Press et al. (2022)

    @property
    def is_sinusoidal(self) -> bool:
        """Whether sines and cosines are added to embeddings."""
        return self.value.startswith("sinusoidal")

    @property
    def is_added(self) -> bool:
        """Whether vectors are added to embeddings."""
        return self.is_sinusoidal or self is Positions.learned


class Activation(str, Enum):
    """What is between the linear layers of a feed-forward layer."""

    relu = "relu"  # max(0, x), as in the paper
    gelu = "gelu"  # x times the normal distribution function of x, Hendrycks and Gimpel (2016)
    silu = "silu"  # x times the logistic function of x, also called swish
    swiglu = "swiglu"  # silu of one linear layer times another, a third matrix; Shazeer (2020)


@dataclass(kw_only=True)
class ModelConfig:
    """The Transformer's architecture (paper, section 3; table 3 for base and big)."""

    num_encoder_layers: int = option(6, "encoder layers", low=1, high=1000)
    num_decoder_layers: int = option(6, "decoder layers", low=1, high=1000)
    d_model: int = option(512, "dimension of embeddings and of layers", low=1, high=65536)
    d_ff: int = option(2048, "inner dimension of the feed-forward layers", low=1, high=1 << 20)
    num_heads: int = option(8, "attention heads; must divide d_model", low=1)
    num_kv_heads: int | None = option(
        None, "heads of keys and values, shared by groups of heads; null: num_heads", low=1
    )
    qk_norm: bool = option(False, "RMS norm of queries and keys of each head, in self-attention")
    dropout: float = option(0.1, "dropout of embedding sums and sub-layer outputs", low=0, below=1)
    attention_dropout: float = option(0.0, "dropout of attention weights", low=0, below=1)
    activation_dropout: float = option(0.0, "dropout after the activation", low=0, below=1)
    embedding_dropout: float | None = option(
        None, "of embedding sums; null: dropout", low=0, below=1
    )
    norm: Norm = option(Norm.post, "layer norm after the residual sum (post) or before (pre)")
    norm_layer: NormLayer = option(NormLayer.layer, "layer (mean and variance) or rms")
    positions: Positions = option(
        Positions.sinusoidal,
        "sinusoidal, sinusoidal_concat, sinusoidal_halves, learned, relative, rotary or alibi",
    )
    position_offset: int = option(0, "sinusoidal: number of the first; M2M100 has 2", low=0)
    num_positions: int = option(
        1024, "learned: positions with vectors; those beyond share the last", low=1, high=65536
    )
    max_distance: int = option(
        16, "relative: distances with vectors; those beyond share the last", low=1, high=10_000
    )
    activation: Activation = option(
        Activation.relu, "of feed-forward layers: relu, gelu, silu or swiglu (gated)"
    )
    scale_embedding: bool = option(True, "multiply embeddings by sqrt(d_model)")
    tied_output: bool = option(True, "use the target embedding as the output matrix")
    output_bias: bool = option(False, "add a bias to the output layer, as Marian does")
    source_eos: bool = option(True, "let the encoder read EOS; false: as in OpenNMT-py")

    def __post_init__(self) -> None:
        check_ranges(self, "model.")
        rule = f"must divide model.d_model={self.d_model}"
        require(self.d_model % self.num_heads == 0, "model.num_heads", self.num_heads, rule)
        rule = "must be even (sine and cosine)"
        require(self.d_model % 2 == 0, "model.d_model", self.d_model, rule)
        kv_heads, rule = self.num_kv_heads, f"must divide model.num_heads={self.num_heads}"
        valid = kv_heads is None or self.num_heads % kv_heads == 0
        require(valid, "model.num_kv_heads", kv_heads, rule)
        is_odd = self.d_model // self.num_heads % 2
        rule = "needs an even number of dimensions of a head, model.d_model / model.num_heads"
        valid = not (is_odd and self.positions is Positions.rotary)
        require(valid, "model.positions", self.positions, rule)
        valid = self.position_offset == 0 or self.positions.is_sinusoidal
        rule = "needs sinusoidal positions"
        require(valid, "model.position_offset", self.position_offset, rule)


@dataclass(kw_only=True)
class SearchConfig:
    """How translations are searched (docs/search.md); saved with the model as its defaults, which
    are those of section 6.1 of the paper.
    """

    beam_size: int = option(
        4, "hypotheses per sentence; 1: greedy search; sampling: samples", low=1, high=10_000
    )
    length_penalty: float = option(
        0.6,
        "alpha in score = log P / ((5 + length) / 6)^alpha; 0 disables; only normalization=wu",
        low=-10,
        high=10,
    )
    normalization: Normalization = option(Normalization.wu, "divisor of log P: wu, average or none")
    word_reward: float = option(0.0, "nats added to log P for each token", low=-100, high=100)
    coverage_penalty: float = option(
        0.0, "beta of the coverage penalty of Wu et al. (2016); 0 disables", low=0, high=100
    )
    max_length_a: float = option(1.0, "output limit: a * source tokens + b", low=0, high=1000)
    max_length_b: int = option(50, "output limit: a * source tokens + b", low=1, high=100_000)
    min_length: int = option(0, "least number of output tokens, EOS excluded", low=0, high=10_000)
    sampling: bool = option(False, "sample from the model's distribution instead of searching")
    temperature: float = option(1.0, "sampling: divisor of log-probabilities", low=0.001, high=1000)
    top_k: int = option(0, "sampling: number of candidates, the likeliest tokens; 0: all", low=0)
    top_p: float = option(
        1.0, "sampling: total probability of the candidates; 1: all", above=0, high=1
    )
    seed: int = option(1, "sampling: equal seeds give equal samples", low=0, high=LARGEST_SEED)
    alignment: bool = option(False, "report the source token that a target token attends to most")

    def __post_init__(self) -> None:
        # text in config.json
        self.normalization = choose(Normalization, "normalization", self.normalization)
        check_ranges(self)
        for key, off in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0)):
            value = getattr(self, key)
            require(self.sampling or value == off, key, value, "only works with sampling=true")

    @property
    def length_exponent(self) -> float:
        """The p with which log P / length^p, the rule of other engines, ranks most like ours."""
        # length^(0.7 alpha) grows as ((5 + length) / 6)^alpha does at 12 tokens
        fixed = {Normalization.average: 1.0, Normalization.none: 0.0}
        return fixed.get(self.normalization, round(0.7 * self.length_penalty, 3))


class Optimizer(str, Enum):
    """The update rule that turns gradients into changes of the weights."""

    adam = "adam"  # Kingma and Ba (2015), as in the paper
    adamw = "adamw"  # Adam with decoupled weight decay, Loshchilov and Hutter (2019)
    muon = "muon"  # orthogonal steps of the matrices of layers, Jordan et al. (2024); else AdamW
    adafactor = "adafactor"  # Shazeer and Stern (2018): row and column means for second moments


class Schedule(str, Enum):
    """The learning rate after the warm-up, which is the same for all."""

    noam = "noam"  # inverse square root of the update, from the paper's peak
    inverse_sqrt = "inverse_sqrt"  # the same curve from the peak in peak_learning_rate
    cosine = "cosine"  # half a cosine to 0 at max_updates; better for short runs
    linear = "linear"  # a line to 0 at max_updates
    wsd = "wsd"  # warm-up, stable, decay: the peak, then a fall to 0, Haegele et al. (2024)


class BestMetric(str, Enum):
    """What decides which checkpoint is the best one."""

    loss = "loss"
    bleu = "bleu"


class TrackerName(str, Enum):
    """What shows the figures of a run beside `metrics.jsonl`."""

    tensorboard = "tensorboard"  # where it is installed
    wandb = "wandb"
    mlflow = "mlflow"
    trackio = "trackio"


class Part(str, Enum):
    """A part of the model that may stay as it is."""

    encoder = "encoder"
    decoder = "decoder"
    embeddings = "embeddings"  # and the output layer, where it is the embedding


class Sharding(str, Enum):
    """What each device of several has of the model in training."""

    none = "none"  # all of it; gradients are summed up (DDP)
    full = "full"  # a part of weights, gradients and moments (FSDP), with more exchanges


class Adapter(str, Enum):
    """What is trained instead of the weights."""

    none = "none"
    lora = "lora"  # a low-rank matrix beside that of each linear layer, Hu et al. (2022)


@dataclass(kw_only=True)
class OptimizerConfig:
    """The optimizer and its schedule; the defaults are Adam as in section 5.3 of the paper."""

    name: Optimizer = option(
        Optimizer.adam, "adam, adamw (Adam with decoupled weight decay), muon or adafactor"
    )
    beta1: float = option(0.9, "decay of the mean of gradients", low=0, below=1)
    beta2: float = option(0.98, "decay of the mean of squared gradients", low=0, below=1)
    eps: float = option(1e-9, "added to the root of the second moment", above=0, high=1)
    weight_decay: float = option(
        0.0, "decay of matrices, times the learning rate; not with adam", low=0
    )
    momentum: float = option(0.95, "muon: decay of the mean of gradients", low=0, below=1)
    warmup_steps: int = option(4000, "updates during which the learning rate rises", low=1)
    learning_rate_scale: float = option(1.0, "factor on the paper's learning rate", above=0)
    peak_learning_rate: float | None = option(
        None,
        "learning rate at the end of warm-up; null: scale * (d_model * warmup_steps)^-0.5",
        above=0,
    )
    schedule: Schedule = option(
        Schedule.noam, "after warm-up: noam, inverse_sqrt, cosine, linear or wsd"
    )
    decay_share: float = option(
        0.2, "wsd: share of max_updates in which the rate falls to 0", above=0, high=1
    )
    max_grad_norm: float = option(0.0, "gradients are clipped to this norm; 0 disables", low=0)

    def __post_init__(self) -> None:
        check_ranges(self, "optimizer.")
        has_decay = self.weight_decay == 0 or self.name is not Optimizer.adam
        rule = "needs optimizer.name=adamw, muon or adafactor"
        require(has_decay, "optimizer.weight_decay", self.weight_decay, rule)
        key, peak, schedule = "optimizer.peak_learning_rate", self.peak_learning_rate, self.schedule
        valid = peak is not None or schedule is not Schedule.inverse_sqrt
        rule = f"needs {key}; noam is the same curve from the paper's peak"
        require(valid, "optimizer.schedule", schedule, rule)
        rule = "noam has the paper's peak; use inverse_sqrt, cosine, linear or wsd"
        require(peak is None or schedule is not Schedule.noam, key, peak, rule)
        rule = "replaces the paper's peak; set optimizer.learning_rate_scale=1 with it"
        require(peak is None or self.learning_rate_scale == 1, key, peak, rule)


@dataclass(kw_only=True)
class NoiseConfig:
    """Noise on the tokens of training pairs, new in every update (docs/synthesis.md)."""

    drop: float = option(0.0, "share of source tokens that are left out", low=0, below=1)
    mask: float = option(0.0, "share of source tokens that become <unk>", low=0, below=1)
    swap: int = option(0, "most places that a source token moves; 0: none moves", low=0)
    word_dropout: float = option(
        0.0, "share of target tokens that the decoder reads as <unk>", low=0, below=1
    )

    def __post_init__(self) -> None:
        check_ranges(self, "noise.")


@dataclass(kw_only=True)
class StageConfig:
    """Other weights of corpora, from an update on to the next stage."""

    start: int = option(0, "number of updates after which the stage begins", low=1)
    mix: dict[str, float] = option(dict, "weight of named corpora in it; others as before stages")

    def __post_init__(self) -> None:
        check_ranges(self, "stages.")


@dataclass(kw_only=True)
class TrainConfig:
    """Settings of `nmt-train`; the defaults are the paper's base run (sections 5.2 to 5.4)."""

    data_dir: str = option(DEFAULT_DATA_DIR, "data folder made by nmt-preprocess")
    run_dir: str = option(DEFAULT_RUN_DIR, "run folder to write or to resume")
    experiment: str | None = option(None, "name or YAML file of the settings")
    mix: dict[str, float] = option(
        dict, "weight of named corpora instead of preprocessing's, e.g. mix.news=2; 0 leaves out"
    )
    mix_temperature: float | None = option(
        None, "evens out the shares of corpora; null: as preprocessed", low=1
    )
    stages: dict[str, StageConfig] = option(dict, "stages of data with other weights, by name")
    stage_patience: bool = option(False, "let patience count in the last of stages, and end it")
    init_from: str | None = option(None, "run, checkpoint or model folder to begin with")
    freeze: list[Part] = option([], "parts that are not trained: encoder, decoder, embeddings")
    adapter: Adapter = option(Adapter.none, "lora: of linear layers train low-rank additions")
    adapter_rank: int = option(8, "rank of these additions", low=1)
    model: ModelConfig = option(ModelConfig, "the architecture")
    optimizer: OptimizerConfig = option(OptimizerConfig, "Adam and its schedule")
    search: SearchConfig = option(SearchConfig, "search defaults that are saved with the model")
    label_smoothing: float = option(0.1, "share of the target spread evenly", low=0, below=1)
    r_drop: float = option(
        0.0, "R-Drop: weight alpha of the KL between two passes with dropout; 0 disables", low=0
    )
    subword_sampling: float = option(
        0.0,
        "cut words anew in every update; bpe: share of merges left out (BPE-dropout), unigram: "
        "alpha; 0 disables",
        low=0,
        below=1,
    )
    noise: NoiseConfig = option(NoiseConfig, "noise on the tokens of training pairs")
    tokens_per_update: int = option(25000, "target tokens per update, over all ranks", low=1)
    max_tokens: int = option(4096, "bound on a batch: rows * longest side, padding included", low=1)
    max_updates: int = option(100_000, "updates at which training ends", low=1)
    log_every_updates: int = option(50, "updates between two lines of metrics", low=1)
    validate_every_updates: int = option(1000, "updates between validations", low=1)
    checkpoint_every_updates: int = option(1000, "updates between checkpoints", low=1)
    keep_last: int = option(5, "newest checkpoints kept", low=1)
    keep_best: int = option(1, "best checkpoints kept in addition", low=1)
    average_last: int = option(5, "checkpoints that nmt-average takes by default", low=1)
    best_metric: BestMetric = option(BestMetric.loss, "loss or bleu on the validation set")
    patience: int = option(0, "validations without improvement before the end; 0 disables", low=0)
    valid_bleu: bool = option(True, "decode the validation set for BLEU")
    valid_beam_size: int = option(1, "beam size for that decoding; 1 is greedy", low=1, high=1000)
    tracker: list[TrackerName] = option(
        [TrackerName.tensorboard], "tensorboard, wandb, mlflow, trackio, where figures go too"
    )
    tracker_sentences: int = option(
        0, "validation pairs whose attention goes there, of each validated checkpoint", low=0
    )
    exportable: bool = option(True, "refuse a model that CTranslate2 could not run")
    seed: int = option(1, "for weights, dropout and the order of data", low=0, high=LARGEST_SEED)
    max_bad_updates: int = option(10, "consecutive non-finite updates that stop the run", low=1)
    ema_decay: float = option(
        0.0, "decay of a moving average of the weights; 0 disables", low=0, below=1
    )
    device: str = option("auto", "auto, cpu, cuda, cuda:1, mps")
    devices: int = option(0, "processes here; 0: one per GPU, or one on CPU", low=0, high=1024)
    sharding: Sharding = option(
        Sharding.none, "full: divide weights and optimizer among devices; less memory, slower"
    )
    timeout_seconds: int = option(120, "how long ranks wait for each other", low=1, high=10**7)
    dtype: DType = option(DType.auto, NUMBER_FORMAT)
    tf32: bool = option(False, "use TF32 for float32 matrix multiplications on the GPU")
    compile: bool | None = option(None, "use torch.compile; null: on a GPU where it works")
    static_shapes: bool = option(
        False, "pad batches to few shapes, for one graph of model and loss, which a GPU replays"
    )
    activation_checkpointing: bool = option(False, "keep only layer inputs: less memory, more time")
    dry_run: bool = option(False, "try the largest batch and some updates, report, write nothing")
    num_threads: int = option(0, CORES, low=0, high=1024)
    verify: bool = option(True, VERIFY)

    def __post_init__(self) -> None:
        check_ranges(self)
        weights = {f"mix.{name}": weight for name, weight in self.mix.items()}
        for name, stage in self.stages.items():
            weights |= {f"stages.{name}.mix.{corpus}": w for corpus, w in stage.mix.items()}
            others = [other for other in self.stages.values() if other.start == stage.start]
            rule = "two stages begin there; give each its own"
            require(len(others) == 1, f"stages.{name}.start", stage.start, rule)
        for key, weight in weights.items():
            require(0 <= weight <= MOST, key, weight, "must be a number from 0")
        is_both = bool(self.stages and self.patience)
        rule = "may end the run before its last stage; set stage_patience=true to count in that"
        require(self.stage_patience or not is_both, "patience", self.patience, rule)
        require(is_both >= self.stage_patience, "stage_patience", True, "needs stages and patience")
        parts = ",".join(part.value for part in self.freeze)
        for key, value, off in (("freeze", parts, ""), ("adapter", self.adapter, Adapter.none)):
            valid = value == off or self.init_from is not None
            require(valid, key, value, "needs init_from=FOLDER, a model that is trained already")
        is_lora = self.adapter is Adapter.lora
        is_used = is_lora or self.adapter_rank == type(self).adapter_rank
        require(is_used, "adapter_rank", self.adapter_rank, "needs adapter=lora")
        left = {*Part} - {*self.freeze} - {*[Part.embeddings] * is_lora}
        require(bool(left), "freeze", parts, "leaves nothing to train (adapter=lora: no layer)")
        require(not (is_lora and self.ema_decay), "ema_decay", self.ema_decay, "needs adapter=none")
        model = self.model
        shares = model.dropout, model.attention_dropout, model.activation_dropout
        valid = self.r_drop == 0 or any(shares) or bool(model.embedding_dropout)
        require(valid, "r_drop", self.r_drop, "needs dropout, such as model.dropout=0.1")
        if self.sharding is Sharding.full:
            rule = "does not go with sharding=full"
            require(self.adapter is Adapter.none, "adapter", self.adapter, rule)
            require(self.dtype is not DType.float16, "dtype", self.dtype, rule)
            name, is_adam = self.optimizer.name, {Optimizer.adam, Optimizer.adamw}
            require(name in is_adam, "optimizer.name", name, rule)
            require(not self.compile, "compile", self.compile, rule)
            require(self.r_drop == 0, "r_drop", self.r_drop, rule)
            require(not self.static_shapes, "static_shapes", self.static_shapes, rule)
        valid = self.r_drop == 0 or not self.static_shapes
        require(valid, "r_drop", self.r_drop, "does not go with static_shapes=true")
        needs_bleu = self.best_metric is BestMetric.bleu and not self.valid_bleu
        require(not needs_bleu, "best_metric", self.best_metric, "needs valid_bleu=true")
        rule = f"must be at least average_last={self.average_last}, or they are gone"
        require(self.keep_last >= self.average_last, "keep_last", self.keep_last, rule)


@dataclass(kw_only=True)
class AverageConfig:
    """Settings of `nmt-average`."""

    run_dir: str = option(DEFAULT_RUN_DIR, "run folder whose checkpoints are averaged")
    last: int | None = option(None, "average the newest N; default: average_last of the run", low=1)
    best: int | None = option(None, "average the N best by the run's best_metric instead", low=1)
    checkpoints: list[str] = option([], "average these folders instead: [a,b,c]")
    output: str | None = option(None, "model folder to write; default: average in the run")
    verify: bool = option(True, VERIFY)

    def __post_init__(self) -> None:
        given = [k for k in ("last", "best", "checkpoints") if getattr(self, k)]
        if len(given) > 1:
            raise ConfigError(f"{given[0]} and {given[1]} are both given; keep one")
        check_ranges(self)
