"""The model together with its loss: the one module that DDP wraps."""

# B batch, S source, T target

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from nmt.model.transformer import Transformer
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
        pad_id: int,
        forward_model: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.forward_model = model.forward if forward_model is None else forward_model
        self.smoothing = smoothing
        self.pad_id = pad_id

    def forward(
        self, src: Tensor, src_lengths: Tensor, tgt_in: Tensor, tgt_out: Tensor, num_tokens: int
    ) -> tuple[Tensor, Tensor]:
        """Return (loss_sum, nll_sum) over the real tokens of `tgt_out` (B, T), in nats.

        `src` (B, S) and `tgt_in` (B, T) are padded on the right; `src_lengths` (B,);
        `num_tokens` are real.
        """
        hidden = self.forward_model(src, src_lengths, tgt_in)  # (B, T, D)
        loss_sum, nll_sum, _ = smoothed_cross_entropy(
            hidden,
            self.model.embedding.weight,
            tgt_out,
            smoothing=self.smoothing,
            pad_id=self.pad_id,
            num_tokens=num_tokens,
        )
        return loss_sum, nll_sum
