"""The model together with its loss: the one module that DDP wraps."""

# M target tokens of all sentences, D d_model

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from nmt.model.transformer import Transformer
from nmt.training.batch import Batch
from nmt.training.loss import smoothed_cross_entropy


class Objective(nn.Module):
    """Sums the loss of a batch, so that sums over batches and ranks are divided once.

    `forward_model` is what runs instead of `model`, with its weights, when it is compiled.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        smoothing: float,
        forward_model: Callable[..., Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.forward_model = model.forward if forward_model is None else forward_model
        self.smoothing = smoothing

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return (loss_sum, nll_sum) over the real target tokens, in nats."""
        hidden = self.forward_model(batch.src, batch.sources, batch.tgt_in, batch.targets)  # (M, D)
        real = slice(batch.num_tokens)  # padding comes last
        weight = self.model.embedding.weight
        return smoothed_cross_entropy(
            hidden[real], weight, batch.tgt_out[real], smoothing=self.smoothing
        )
