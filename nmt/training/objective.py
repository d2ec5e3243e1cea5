"""The model together with its loss: the one module that DDP wraps."""

# M target tokens of all sentences, D d_model

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from nmt.model.transformer import Transformer
from nmt.training.batch import Batch
from nmt.training.compiled import Compiler
from nmt.training.loss import Softmax, smoothed_cross_entropy, softmax_at_once, softmax_in_place


class Objective(nn.Module):
    """Sums the loss of a batch, so that sums over batches and ranks are divided once.

    With a `compiler` model and loss run compiled, with the weights of `model`.
    """

    def __init__(
        self, model: Transformer, *, smoothing: float, compiler: Compiler | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self.forward_model: Callable[..., Tensor] = model.forward
        self.softmax: Softmax = softmax_in_place
        if compiler is not None:  # the model stays as it is for validation and decoding
            self.forward_model = compiler.compile(model.forward)
            # a graph for whole chunks, and one for any number of rows; V is known in both
            self.softmax = compiler.compile(softmax_at_once, dynamic=None)
        self.smoothing = smoothing

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return (loss_sum, nll_sum) over the real target tokens, in nats."""
        hidden = self.forward_model(batch.src, batch.sources, batch.tgt_in, batch.targets)  # (M, D)
        real = slice(batch.num_tokens)  # padding comes last
        weight = self.model.embedding.weight
        return smoothed_cross_entropy(
            hidden[real],
            weight,
            batch.tgt_out[real],
            smoothing=self.smoothing,
            softmax=self.softmax,
        )
