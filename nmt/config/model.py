"""Settings of the architecture and of search, which travel with every model."""

from __future__ import annotations

from dataclasses import dataclass

from nmt.options import Norm, Positions, option, require


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
