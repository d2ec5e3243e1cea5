"""The choices that settings offer, and the helpers that declare and check a setting."""

from __future__ import annotations

import os
from dataclasses import field
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from nmt.errors import ConfigError, nearest

DEFAULT_DATA_DIR = "data/prepared"
DEFAULT_RUN_DIR = "runs/default"
E = TypeVar("E", bound=Enum)


class Norm(str, Enum):
    """Where layer normalisation stands."""

    post = "post"  # after the residual sum, as in the paper
    pre = "pre"  # before each sub-layer, with one more at the end of each stack


class Optimizer(str, Enum):
    """Who turns gradients into changes of the weights."""

    adam = "adam"  # Kingma and Ba (2015), as in the paper
    adamw = "adamw"  # Adam with decoupled weight decay, Loshchilov and Hutter (2019)


class Schedule(str, Enum):
    """How the learning rate goes on after the warm-up, which is the same for all."""

    noam = "noam"  # with the inverse square root of the update, from the paper's peak
    inverse_sqrt = "inverse_sqrt"  # the same curve from the peak in peak_learning_rate
    cosine = "cosine"  # along half a cosine to 0 at max_updates; better for short runs


class Positions(str, Enum):
    """How sines and cosines share the dimensions of the positional encoding."""

    sinusoidal = "sinusoidal"  # interleaved, as the paper writes it
    sinusoidal_concat = "sinusoidal_concat"  # one half sine, the other cosine, as in Tensor2Tensor


class Normalization(str, Enum):
    """What the log-probability of a hypothesis is divided by (docs/search.md)."""

    wu = "wu"  # ((5 + length) / 6)^length_penalty, Wu et al. (2016), equation 14
    average = "average"  # its length
    none = "none"


class Combine(str, Enum):
    """How the models of an ensemble agree on the next token."""

    probabilities = "probabilities"  # the log of the mean of their probabilities
    log_probabilities = "log_probabilities"  # the mean of their log-probabilities


class ScoreMeasure(str, Enum):
    """What `nmt-score` says of a pair, in nats."""

    log_prob = "log_prob"  # the sum over all tokens, EOS too
    per_token = "per_token"  # that sum over the number of tokens, EOS counted
    score = "score"  # what search ranks by: normalised, with rewards and penalties


class DType(str, Enum):
    """The number format of matrix products; weights, softmax, loss and scores stay float32."""

    auto = "auto"  # bfloat16 where the GPU has it, float32 elsewhere
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"  # training scales the loss, since small gradients would become zero


class Corpus(str, Enum):
    """Where parallel text comes from."""

    files = "files"
    numbers = "numbers"
    copy = "copy"


class Invalid(str, Enum):
    """What becomes of a line that is not UTF-8."""

    error = "error"  # file, line and byte are named, and nothing is written
    # the broken bytes become U+FFFD, and are counted
    replace = "replace"  # type: ignore[assignment]  # a choice has no use for str.replace
    drop = "drop"  # the training pair is dropped and counted; held-out lines are replaced


class Duplicates(str, Enum):
    """Which training pairs count as seen before; the first of them is kept."""

    keep = "keep"  # none
    pair = "pair"  # those with both sides the same
    src = "src"  # those with the same source
    tgt = "tgt"  # those with the same target


class TokenizerType(str, Enum):
    """How SentencePiece cuts text."""

    bpe = "bpe"  # Sennrich et al. (2016), as in the paper
    unigram = "unigram"  # Kudo (2018)


class Step(str, Enum):
    """Which part of preprocessing to do, for work that is shared by several machines."""

    all = "all"
    plan = "plan"  # look at the whole corpus once: the tokenizer, duplicates, what each shard is
    shard = "shard"  # encode the part that `shard` names
    merge = "merge"  # write the index over all shards


class BestMetric(str, Enum):
    """What decides which checkpoint is the best one."""

    loss = "loss"
    bleu = "bleu"


class OutputFormat(str, Enum):
    """How results are written to stdout."""

    text = "text"
    json = "json"


class TooLong(str, Enum):
    """What becomes of a line of more tokens than `max_source_length`."""

    # at sentence ends, else clauses, else spaces; translated and joined again
    split = "split"  # type: ignore[assignment]  # a choice has no use for str.split
    truncate = "truncate"  # the rest of the line is left out, and counted
    error = "error"  # the line is named and nothing more is translated


class Engine(str, Enum):
    """What computes translations."""

    native = "native"  # torch
    ctranslate2 = "ctranslate2"  # a folder that nmt-export wrote


class Metric(str, Enum):
    """What to score with, at sacreBLEU's defaults: 0 to 100, higher is better, but for TER.

    BLEU (Papineni et al., 2002); chrF2 (Popovic, 2015); chrF2++ (Popovic, 2017), which adds word
    uni- and bigrams; TER (Snover et al., 2006), edits per 100 reference words split at spaces.
    """

    bleu = "bleu"
    chrf = "chrf"
    chrfpp = "chrfpp"
    ter = "ter"


class Method(str, Enum):
    """How significance is tested: as Koehn (2004) or, with fewer false alarms, Riezler and Maxwell
    (2005).
    """

    bootstrap = "bootstrap"
    approximate_randomization = "approximate_randomization"


class ExportFormat(str, Enum):
    """Which library the exported model is for."""

    ctranslate2 = "ctranslate2"
    huggingface = "huggingface"


class Quantization(str, Enum):
    """How exported weights are stored; int8 and int16 with one scale a row, or one a matrix.

    After `int8_`: the type of what is not a matrix product.
    """

    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"
    int8 = "int8"
    int8_float32 = "int8_float32"
    int8_float16 = "int8_float16"
    int8_bfloat16 = "int8_bfloat16"
    int16 = "int16"


def option(default: Any, help: str) -> Any:
    """Declare a setting with its default and the line that `--help` shows for it."""
    metadata = {"help": help}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def require(valid: bool, key: str, value: object, rule: str) -> None:
    """Raise a `ConfigError` that names key, value and rule unless `valid`."""
    if not valid:
        shown = value.value if isinstance(value, Enum) else value
        raise ConfigError(f"{key}={shown}: {rule}")


def choose(kind: type[E], key: str, value: str | E) -> E:
    """Return the choice that `value` names; raise a `ConfigError` that names key and choices."""
    try:
        return kind(value)
    except ValueError:
        names = [choice.value for choice in kind]
        raise ConfigError(f"{key}={value}: no such choice; {nearest(str(value), names)}") from None


def resolve(path: str | Path) -> Path:
    """Expand `~` and make `path` absolute against the current folder."""
    return Path(os.path.abspath(os.path.expanduser(str(path))))
