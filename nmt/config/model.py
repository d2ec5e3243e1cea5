"""Settings of the architecture and of search, which are saved with every model."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from nmt.config.options import Normalization, check_ranges, choose, option, require


class Norm(str, Enum):
    """Where layer normalization is applied."""

    post = "post"  # after the residual sum, as in the paper
    pre = "pre"  # before each sub-layer, with one more at the end of each stack


class Positions(str, Enum):
    """How sines and cosines share the dimensions of the positional encoding."""

    sinusoidal = "sinusoidal"  # interleaved, as the paper writes it
    sinusoidal_concat = "sinusoidal_concat"  # one half sine, the other cosine, as in Tensor2Tensor


@dataclass(kw_only=True)
class ModelConfig:
    """The Transformer's architecture (paper, section 3; table 3 for base and big)."""

    num_encoder_layers: int = option(6, "encoder layers", low=1)
    num_decoder_layers: int = option(6, "decoder layers", low=1)
    d_model: int = option(512, "dimension of embeddings and of every layer's output", low=1)
    d_ff: int = option(2048, "inner dimension of the feed-forward layers", low=1)
    num_heads: int = option(8, "attention heads; must divide d_model", low=1)
    dropout: float = option(0.1, "dropout of embedding sums and sub-layer outputs", low=0, below=1)
    attention_dropout: float = option(0.0, "dropout of attention weights", low=0, below=1)
    activation_dropout: float = option(0.0, "dropout after the ReLU", low=0, below=1)
    embedding_dropout: float | None = option(
        None, "of embedding sums; null: dropout", low=0, below=1
    )
    norm: Norm = option(Norm.post, "layer norm after the residual sum (post) or before (pre)")
    positions: Positions = option(Positions.sinusoidal, "layout of the positional encoding")

    def __post_init__(self) -> None:
        check_ranges(self, "model.")
        rule = f"must divide model.d_model={self.d_model}"
        require(self.d_model % self.num_heads == 0, "model.num_heads", self.num_heads, rule)
        rule = "must be even (sine and cosine)"
        require(self.d_model % 2 == 0, "model.d_model", self.d_model, rule)


@dataclass(kw_only=True)
class SearchConfig:
    """How translations are searched (docs/search.md); saved with the model as its defaults, which
    are those of section 6.1 of the paper.
    """

    beam_size: int = option(
        4, "hypotheses per sentence; 1: greedy search; sampling: samples", low=1
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
    max_length_b: int = option(50, "output limit: a * source tokens + b", low=1)
    min_length: int = option(0, "least number of output tokens, EOS excluded; 0: no bound", low=0)
    sampling: bool = option(False, "sample from the model's distribution instead of searching")
    temperature: float = option(1.0, "sampling: divisor of log-probabilities", low=0.001, high=1000)
    top_k: int = option(0, "sampling: number of candidates, the likeliest tokens; 0: all", low=0)
    top_p: float = option(
        1.0, "sampling: total probability of the candidates; 1: all", above=0, high=1
    )
    seed: int = option(1, "sampling: the same seed and text give the same samples", low=0)
    alignment: bool = option(False, "report the source token that a target token attends to most")

    def __post_init__(self) -> None:
        # text in config.json
        self.normalization = choose(Normalization, "normalization", self.normalization)
        check_ranges(self)
        for key, off in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0)):
            idle = not self.sampling and getattr(self, key) != off
            require(not idle, key, getattr(self, key), "only works with sampling=true")

    @property
    def length_exponent(self) -> float:
        """The p with which log P / length^p, the rule of other engines, ranks most like ours."""
        # length^(0.7 alpha) grows as ((5 + length) / 6)^alpha does at 12 tokens
        fixed = {Normalization.average: 1.0, Normalization.none: 0.0}
        return fixed.get(self.normalization, round(0.7 * self.length_penalty, 3))
