"""Settings of the architecture, which are saved with every model."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from nmt.config.options import check_ranges, option, require


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
