"""Foresees how much memory training takes, from the sizes of the model and of the largest batch.

What autograd keeps is counted from nmt/model: every tensor that a backward pass reads. How near
this came to measured peaks is in docs/report.md.
"""

# B rows, S source, T target, D d_model, F d_ff, V vocab; sizes are in bytes

from __future__ import annotations

from dataclasses import dataclass

from nmt.config import ModelConfig, TrainConfig
from nmt.data.bucketing import CPU_PIECE_TOKENS

_PROCESS = 500_000_000  # Python, torch and its kernels, measured on a processor
_LOOSE = 1.4  # a processor's allocator takes so much more for tensors that come and go, measured
_LOSS_ROWS = 512  # logits of so many tokens exist at a time, see nmt/training/loss.py
FLOAT, HALF, MASK = 4, 2, 1


@dataclass(frozen=True)
class MemoryForecast:
    """What the tensors of one device take at the peak."""

    num_parameters: int
    weights: int
    gradients: int
    optimizer: int  # Adam's two moments, and the moving average of weights where there is one
    activations: int  # of the largest batch, with the loss

    @property
    def total(self) -> int:
        """The sum."""
        return self.weights + self.gradients + self.optimizer + self.activations

    @property
    def cpu_process(self) -> int:
        """What the process takes in all when it trains on a processor."""
        return _PROCESS + self.total + int((_LOOSE - 1) * self.activations)


def num_parameters(model: ModelConfig, src_vocab_size: int | None, tgt_vocab_size: int) -> int:
    """Count parameters; `src_vocab_size` is None where one matrix serves both languages."""
    d, inner = model.d_model, model.d_ff
    attention, norm = 4 * d * d + 4 * d, 2 * d
    feed_forward = 2 * d * inner + d + inner
    encoder = attention + feed_forward + 2 * norm
    decoder = 2 * attention + feed_forward + 3 * norm
    final_norms = 2 * norm if model.norm.value == "pre" else 0
    layers = model.num_encoder_layers * encoder + model.num_decoder_layers * decoder
    return layers + final_norms + d * (tgt_vocab_size + (src_vocab_size or 0))


def forecast_memory(
    training: TrainConfig,
    src_vocab_size: int | None,
    tgt_vocab_size: int,
    *,
    batch: tuple[int, int, int],
    product_bytes: int,
) -> MemoryForecast:
    """Foresee the peak of training with the largest `batch` (B, S, T).

    `product_bytes` is the size of the numbers in products: `FLOAT`, or `HALF` for bfloat16 and
    float16, for which the weights are copied once more.
    """
    number = num_parameters(training.model, src_vocab_size, tgt_vocab_size)
    copies = 2 if training.ema_decay == 0 else 3
    half_weights = HALF * number if product_bytes == HALF else 0
    activations = _layers(training, batch, product_bytes)
    return MemoryForecast(
        num_parameters=number,
        weights=FLOAT * number + half_weights,
        gradients=FLOAT * number,
        optimizer=copies * FLOAT * number,
        activations=activations + _loss(training.model, tgt_vocab_size, batch),
    )


def a_piece(batch: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return what a processor computes at a time of a batch (B, S, T)."""
    rows, src, tgt = batch
    return max(1, min(rows, CPU_PIECE_TOKENS // max(src, tgt))), src, tgt


def _layers(training: TrainConfig, batch: tuple[int, int, int], product_bytes: int) -> int:
    model = training.model
    src, tgt = batch[0] * batch[1], batch[0] * batch[2]  # positions
    encoder = _sublayers(model, src, product_bytes, num_attentions=1)
    decoder = _sublayers(model, tgt, product_bytes, num_attentions=2)
    if model.attention_dropout > 0:  # the fast kernels of a processor have no dropout
        rows, s, t = batch
        heads = 3 * FLOAT * rows * model.num_heads  # weights, mask and their product
        encoder += heads * s * s
        decoder += heads * (t * t + t * s)
    memory = 2 * product_bytes * src * model.d_model  # keys and values of the source
    ends = (FLOAT + MASK) * (src + tgt) * model.d_model  # last outputs, masks of the embeddings
    layers = model.num_encoder_layers, model.num_decoder_layers
    if training.activation_checkpointing:
        inputs = FLOAT * model.d_model * (layers[0] * src + layers[1] * tgt)
        return ends + inputs + max(encoder, decoder + memory)
    return ends + layers[0] * encoder + layers[1] * (decoder + memory)


def _sublayers(
    model: ModelConfig, positions: int, product_bytes: int, *, num_attentions: int
) -> int:
    """Count what a layer keeps for its backward pass.

    Self-attention: input, queries, keys, values, output; attention to the source: input, queries,
    output; feed-forward: input and the inner layer. Each with the sum before or after its norm and
    the mask of its dropout.
    """
    widths = 5 + 3 * (num_attentions - 1) + 1
    norms = num_attentions + 1
    masks = norms * model.d_model if model.dropout > 0 else 0
    inner = model.d_ff
    if model.activation_dropout > 0:
        masks, inner = masks + model.d_ff, 2 * inner
    products = product_bytes * (widths * model.d_model + inner)
    return positions * (products + FLOAT * norms * model.d_model + MASK * masks)


def _loss(model: ModelConfig, vocab_size: int, batch: tuple[int, int, int]) -> int:
    """Count the logits of a chunk with their gradient, those of the matrix and of its input."""
    tokens = batch[0] * batch[2]
    logits = 3 * min(_LOSS_ROWS, tokens) * vocab_size
    return FLOAT * (logits + vocab_size * model.d_model + 3 * tokens * model.d_model)
