"""Settings of the architecture, which are saved with every model.

"The paper" is "Attention Is All You Need" (Vaswani et al., 2017).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from nmt.config.options import Settings, option


class Norm(str, Enum):
    """Where layer normalization is applied."""

    post = "post"  # after the residual sum, as in the paper
    pre = "pre"  # before each sub-layer, and once more at the end of each stack


class NormLayer(str, Enum):
    """The normalization layer."""

    layer = "layer"  # layer normalization, as in the paper
    rms = "rms"  # RMS normalization without a bias, Zhang and Sennrich (2019)


class Positions(str, Enum):
    """The positional encoding: vectors added to embeddings, or a part of self-attention."""

    # Vectors added to embeddings:
    sinusoidal = "sinusoidal"  # sines and cosines interleaved, as the paper writes it
    # all sines, then all cosines, with the wavelengths of Tensor2Tensor and Marian
    sinusoidal_concat = "sinusoidal_concat"
    # all sines, then all cosines, with the wavelengths of the paper, as in MarianMT of transformers
    sinusoidal_halves = "sinusoidal_halves"
    # a vector for each position, separate for encoder and decoder (table 3, row E)
    learned = "learned"
    # Parts of self-attention:
    relative = "relative"  # vectors of distances for keys and values, Shaw et al. (2018)
    rotary = "rotary"  # queries and keys rotated by their position, Su et al. (2021)
    alibi = "alibi"  # a penalty on distance, in both directions in the encoder, Press et al. (2022)

    @property
    def is_sinusoidal(self) -> bool:
        """Whether sines and cosines are added to embeddings."""
        return self.value.startswith("sinusoidal")

    @property
    def is_added_to_embeddings(self) -> bool:
        """Whether vectors are added to embeddings."""
        return self.is_sinusoidal or self is Positions.learned


class Activation(str, Enum):
    """The activation function of a feed-forward layer."""

    relu = "relu"  # max(0, x), as in the paper
    gelu = "gelu"  # x times the normal distribution function of x, Hendrycks and Gimpel (2016)
    silu = "silu"  # x times the logistic function of x, also called swish
    swiglu = "swiglu"  # silu of one linear layer times another linear layer, Shazeer (2020)


class Decoder(str, Enum):
    """How a decoder layer reads the target tokens so far."""

    attention = "attention"  # masked self-attention, as in the paper
    ssru = "ssru"  # simpler simple recurrent unit, Kim et al. (2019), with a state of fixed size


@dataclass(kw_only=True)
class ModelConfig(Settings):
    """The Transformer's architecture (paper, section 3; table 3 for base and big)."""

    key_prefix = "model."
    num_encoder_layers: int = option(6, "encoder layers", low=1, high=1000)
    num_decoder_layers: int = option(6, "decoder layers", low=1, high=1000)
    decoder: Decoder = option(
        Decoder.attention,
        "sub-layer that reads the target tokens: attention, or ssru (recurrent; decodes faster)",
    )
    d_model: int = option(512, "dimension of embeddings and layers", low=1, high=65536)
    d_ff: int = option(2048, "inner dimension of the feed-forward layers", low=1, high=1 << 20)
    decoder_d_ff: int | None = option(
        None, "d_ff of the decoder; null: as in the encoder", low=1, high=1 << 20
    )
    num_heads: int = option(
        8, "attention heads; must divide d_model, unless head_size is set", low=1, high=65536
    )
    head_size: int | None = option(
        None, "dimensions of a head (d_k = d_v); null: d_model / num_heads", low=1, high=65536
    )
    num_kv_heads: int | None = option(
        None, "heads of keys and values, each shared by several query heads; null: num_heads", low=1
    )
    qk_norm: bool = option(
        False, "normalize queries and keys of each head in self-attention (RMS norm)"
    )
    dropout: float = option(0.1, "dropout of embedding sums and sub-layer outputs", low=0, below=1)
    attention_dropout: float = option(0.0, "dropout of attention weights", low=0, below=1)
    activation_dropout: float = option(0.0, "dropout after the activation", low=0, below=1)
    embedding_dropout: float | None = option(
        None, "dropout of embedding sums; null: as model.dropout", low=0, below=1
    )
    norm: Norm = option(
        Norm.post, "layer norm after the residual sum (post) or before each sub-layer (pre)"
    )
    norm_layer: NormLayer = option(NormLayer.layer, "layer (layer norm) or rms (RMS norm)")
    positions: Positions = option(
        Positions.sinusoidal,
        "sinusoidal, sinusoidal_concat, sinusoidal_halves, learned, relative, rotary or alibi",
    )
    position_offset: int = option(
        0, "number of the first sinusoidal position, such as 2 in M2M100", low=0
    )
    num_positions: int = option(
        1024,
        "positions=learned: number of vectors; later positions use the last one",
        low=1,
        high=65536,
    )
    max_distance: int = option(
        16,
        "positions=relative: larger distances use the vector of this distance",
        low=1,
        high=10_000,
    )
    activation: Activation = option(
        Activation.relu, "feed-forward activation: relu, gelu, silu or swiglu (gated)"
    )
    scale_embedding: bool = option(True, "multiply embeddings by sqrt(d_model)")
    tied_output: bool = option(True, "use the target embedding as the output matrix")
    output_bias: bool = option(False, "add a bias to the output layer, as Marian does")
    alignment_heads: int | None = option(
        None, "number of heads whose attention aligns words, the first ones; null: all", low=1
    )
    alignment_shift: bool = option(
        False,
        "align a target token by the attention of the next step, which has the token as its input, "
        "instead of the step that predicts the token",
    )
    source_eos: bool = option(True, "end the encoder input with EOS; false: as OpenNMT-py does")

    @property
    def d_k(self) -> int:
        """Dimensions of the queries, keys and values of a head."""
        if self.head_size is not None:
            return self.head_size
        return self.d_model // self.num_heads

    def check(self) -> None:
        """See `Settings.check`. Also replaces a `decoder_d_ff` that equals `d_ff` by None."""
        if self.decoder_d_ff == self.d_ff:
            self.decoder_d_ff = None  # so that the settings of equal architectures are equal
        if self.head_size is None:
            is_divisor = self.d_model % self.num_heads == 0
            problem = f"must divide model.d_model={self.d_model}; or set model.head_size"
            self.require(is_divisor, "num_heads", problem)
        # required with every `positions`, although only sinusoidal positions need it
        self.require(self.d_model % 2 == 0, "d_model", "must be even (sine and cosine)")
        if self.num_kv_heads is not None:
            is_divisor = self.num_heads % self.num_kv_heads == 0
            problem = f"must divide model.num_heads={self.num_heads}"
            self.require(is_divisor, "num_kv_heads", problem)
        if self.alignment_heads is not None:
            are_enough_heads = self.num_heads >= self.alignment_heads
            problem = f"must be at most model.num_heads={self.num_heads}"
            self.require(are_enough_heads, "alignment_heads", problem)
        if self.positions is Positions.rotary:
            problem = (
                f"needs an even number of dimensions per head (model.head_size), not {self.d_k}"
            )
            self.require(self.d_k % 2 == 0, "positions", problem)
        if not self.positions.is_sinusoidal:
            self.require(self.position_offset == 0, "position_offset", "needs sinusoidal positions")
