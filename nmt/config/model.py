"""Settings of the architecture and of search, which travel with every model."""

from __future__ import annotations

from dataclasses import dataclass

from nmt.config.options import Norm, Normalization, Positions, choose, option, require


@dataclass(kw_only=True)
class ModelConfig:
    """The Transformer's architecture (paper, section 3; table 3 for base and big)."""

    num_encoder_layers: int = option(6, "encoder layers")
    num_decoder_layers: int = option(6, "decoder layers")
    d_model: int = option(512, "width of embeddings and of every layer's output")
    d_ff: int = option(2048, "inner width of the feed-forward layers")
    num_heads: int = option(8, "attention heads; must divide d_model")
    dropout: float = option(0.1, "share dropped of embedding sums and sub-layer outputs (0 to <1)")
    attention_dropout: float = option(0.0, "share dropped of attention weights")
    activation_dropout: float = option(0.0, "share dropped inside the feed-forward, after the ReLU")
    embedding_dropout: float | None = option(None, "share dropped of embedding sums; null: dropout")
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
        for place in ("dropout", "attention_dropout", "activation_dropout", "embedding_dropout"):
            share = getattr(self, place)
            valid = share is None or 0 <= share < 1
            require(valid, f"model.{place}", share, "must be from 0 to below 1")


@dataclass(kw_only=True)
class SearchConfig:
    """How translations are searched (docs/search.md); saved with the model as its defaults, which
    are those of section 6.1 of the paper.
    """

    beam_size: int = option(
        4, "hypotheses kept a sentence; 1 is greedy search; with sampling the number of draws"
    )
    length_penalty: float = option(
        0.6, "alpha in score = log P / ((5 + length) / 6)^alpha; 0 is none; only normalization=wu"
    )
    normalization: Normalization = option(
        Normalization.wu, "what log P is divided by: wu, average (the length) or none"
    )
    word_reward: float = option(0.0, "nats added to log P for each token, EOS too; 0 is none")
    coverage_penalty: float = option(
        0.0, "beta of the coverage penalty of Wu et al. (2016), added to the score; 0 is none"
    )
    max_length_a: float = option(1.0, "at most a * source tokens + b output tokens: a")
    max_length_b: int = option(50, "at most a * source tokens + b output tokens: b")
    min_length: int = option(0, "least output tokens, EOS not counted; 0 is no bound")
    sampling: bool = option(False, "draw from the model's distribution instead of searching")
    temperature: float = option(1.0, "sampling: log-probabilities are divided by this (above 0)")
    top_k: int = option(0, "sampling: draw among so many likeliest tokens; 0 is all")
    top_p: float = option(
        1.0, "sampling: draw among the likeliest tokens that have this share; 1 is all"
    )
    seed: int = option(1, "sampling: the same seed and text give the same draws")
    alignment: bool = option(False, "say which source token each target token attends to most")

    def __post_init__(self) -> None:
        # text in config.json
        self.normalization = choose(Normalization, "normalization", self.normalization)
        for key, (valid, rule) in self._rules().items():
            require(valid, key, getattr(self, key), rule)
        for key, off in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0)):
            idle = not self.sampling and getattr(self, key) != off
            require(not idle, key, getattr(self, key), "only works with sampling=true")

    @property
    def length_exponent(self) -> float:
        """The p with which log P / length^p, the rule of other engines, ranks most like ours."""
        # length^(0.7 alpha) grows as ((5 + length) / 6)^alpha does at 12 tokens
        fixed = {Normalization.average: 1.0, Normalization.none: 0.0}
        return fixed.get(self.normalization, round(0.7 * self.length_penalty, 3))

    def _rules(self) -> dict[str, tuple[bool, str]]:
        at_least_0, at_least_1 = "must not be negative", "must be at least 1"
        return {
            "beam_size": (self.beam_size >= 1, at_least_1),
            "length_penalty": (abs(self.length_penalty) <= 10, "must be from -10 to 10"),
            "word_reward": (abs(self.word_reward) <= 100, "must be from -100 to 100"),
            "coverage_penalty": (0 <= self.coverage_penalty <= 100, "must be from 0 to 100"),
            "max_length_a": (0 <= self.max_length_a <= 1000, "must be from 0 to 1000"),
            "max_length_b": (self.max_length_b >= 1, at_least_1),
            "min_length": (self.min_length >= 0, at_least_0),
            "temperature": (0.001 <= self.temperature <= 1000, "must be from 0.001 to 1000"),
            "top_k": (self.top_k >= 0, at_least_0),
            "top_p": (0 < self.top_p <= 1, "must be above 0 and at most 1"),
            "seed": (self.seed >= 0, at_least_0),
        }
