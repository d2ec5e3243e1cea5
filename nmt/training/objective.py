"""The model together with its loss: the one module that DDP wraps."""

# M target tokens of all sentences, D d_model

from __future__ import annotations

from torch import Tensor, nn

from nmt.model.transformer import Transformer
from nmt.training.batch import Batch
from nmt.training.compiled import Compiler
from nmt.training.loss import compiled_softmax, smoothed_cross_entropy, softmax_in_place


class Objective(nn.Module):
    """Sums the loss of a batch, so that sums over batches and ranks are divided once.

    With a `compiler` model and loss run compiled, with the weights of `model`.
    """

    def __init__(
        self, model: Transformer, *, smoothing: float, compiler: Compiler | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self.forward_model = model.forward if compiler is None else compiler.compile(model)
        self.softmax = softmax_in_place if compiler is None else compiled_softmax()
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
