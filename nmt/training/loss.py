"""Label-smoothed cross-entropy over the vocabulary, summed over target tokens (paper, section 5.4).

Definition (Szegedy et al., 2016, section 7; the one torch uses): with smoothing eps the wanted
distribution q gives the right token 1 - eps + eps / V and every other of the V entries eps / V, and
loss = -sum_v q(v) log p(v) = (1 - eps) * nll + eps * mean_v(-log p(v)).
"""

# M target tokens, N real ones of them, D d_model, V vocab

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nmt.model.fast import FastTransformer
from nmt.model.fast.layers import is_onednn_faster, linear, transposed_matmul
from nmt.model.fast.packing import Packing
from nmt.training.compiled import Compiler
from nmt.training.costs import GPU_NUMBERS
from nmt.training.microbatches import Batch

_ROWS_A_CHUNK = 256  # so many rows of logits, (chunk, V) in float32, exist at a time

# maps logits (N, V), targets (N,) and smoothing to the sums of loss and nll, and to d loss / d
# logits, in the logits' format and maybe in their memory
Softmax = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]]


class _LinearCrossEntropy(torch.autograd.Function):
    """Output layer, softmax and loss with their gradient, chunk by chunk, so no logits are kept.

    d loss / d logits = p - q: softmax minus the wanted distribution. Under autocast the factors of
    matrix multiplications are rounded to its format, once; all sums over tokens and V are float32.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor,
        smoothing: float, softmax: Softmax,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        kind = weight.device.type
        is_autocast = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if is_autocast else weight.dtype
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight) if needs_weight else weight.new_zeros(())
        grad_bias = None if bias is None else torch.zeros_like(bias)
        loss_sum = torch.zeros((), device=hidden.device)
        nll_sum = torch.zeros_like(loss_sum)
        size = GPU_NUMBERS // len(weight) // 2 * 2 if kind == "cuda" else 0
        size = max(_ROWS_A_CHUNK, size)
        with torch.autocast(kind, enabled=False):  # or it rounds again every chunk
            hidden, weight = hidden.to(dtype), weight.to(dtype)
            chunks = (torch.split(x, size) for x in (hidden, targets, grad_hidden))
            for rows, wanted, grad_rows in zip(*chunks, strict=True):
                logits = linear(rows, weight, None if bias is None else bias.to(dtype))
                loss, nll, error = softmax(logits, wanted, smoothing)
                loss_sum = loss_sum + loss  # torch 2.11 compiles sums in place without gradient
                nll_sum = nll_sum + nll
                if needs_hidden:
                    grad_rows.copy_(linear(error, weight.T))
                if grad_bias is not None and needs_bias:
                    grad_bias += error.sum(0, dtype=grad_bias.dtype)
                if needs_weight:
                    is_plain = torch.compiler.is_compiling() or not is_onednn_faster()
                    if error.dtype is grad_weight.dtype and is_plain:
                        torch.addmm(grad_weight, error.T, rows, out=grad_weight)  # in place
                    else:
                        grad_weight += transposed_matmul(error, rows)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.mark_non_differentiable(nll_sum)
        return loss_sum, nll_sum

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found = (None if grad is None else grads[0] * grad for grad in ctx.saved_tensors)
        return (*found, None, None, None)


def softmax_in_place(
    logits: Tensor, wanted: Tensor, smoothing: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a `Softmax` in place, in float32."""
    logits, dtype = logits.float(), logits.dtype
    probs = torch.softmax(logits, dim=-1)  # (N, V)
    # the logarithm of the sum of exp(logits), (N, 1), without computing these again
    total = logits.amax(-1, keepdim=True) - probs.amax(-1, keepdim=True).log()
    nll = (total - logits.gather(1, wanted[:, None])).sum()
    loss = (1 - smoothing) * nll + smoothing * (total.sum() - logits.mean(-1).sum())
    error = probs.sub_(smoothing / probs.size(1))
    right = error.new_full((len(wanted), 1), smoothing - 1)
    return loss, nll, error.scatter_add_(1, wanted[:, None], right).to(dtype)


def softmax_at_once(
    logits: Tensor, wanted: Tensor, smoothing: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a `Softmax` in a form that compiles to few kernels, in float32 between; targets below
    0 are padding.
    """
    log_probs = torch.log_softmax(logits.float(), dim=-1)  # (N, V)
    is_right = torch.arange(logits.size(1), device=logits.device) == wanted[:, None]  # (N, V)
    is_real = wanted[:, None] >= 0  # (N, 1)
    nll = -torch.where(is_right, log_probs, 0.0).sum()
    spread = torch.where(is_real, log_probs, 0.0).sum()
    loss = (1 - smoothing) * nll - smoothing / logits.size(1) * spread
    error = log_probs.exp() - smoothing / logits.size(1) - torch.where(is_right, 1 - smoothing, 0.0)
    return loss, nll, torch.where(is_real, error, 0.0).to(logits.dtype)


def softmax_of_two(r_drop: float) -> Softmax:
    """Return the `Softmax` of R-Drop (Wu et al., 2021, equation 4), whose alpha is `r_drop`.

    Rows 2i and 2i + 1 are two passes over token i. The loss is half of the paper's, so that it is
    the mean of both passes with alpha = 0: (CE_1 + CE_2) / 2 + alpha / 4 * (KL(p_1 || p_2) +
    KL(p_2 || p_1)) in nats, where p has no smoothing.
    """

    def compute(logits: Tensor, wanted: Tensor, smoothing: float) -> tuple[Tensor, Tensor, Tensor]:
        loss, nll, error = softmax_in_place(logits.float(), wanted, smoothing)
        log_probs = torch.log_softmax(logits.float(), dim=-1).view(-1, 2, logits.size(1))
        gap = log_probs - log_probs.flip(1)  # (N / 2, 2, V)
        probs = log_probs.exp_()
        kl = gap.mul_(probs).sum(-1, keepdim=True)  # of each pass from the other, (N / 2, 2, 1)
        pull = gap.addcmul_(probs, 1 - kl).sub_(probs.flip(1)).view_as(error)
        error = error.mul_(0.5).add_(pull, alpha=r_drop / 4)
        return loss / 2 + r_drop / 4 * kl.sum(), nll / 2, error.to(logits.dtype)

    return compute


def smoothed_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *,
    smoothing: float, bias: Tensor | None = None, softmax: Softmax = softmax_in_place,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (loss_sum, nll_sum) over target tokens, in nats and float32.

    `hidden` is the decoder's output (N, D), `weight` the output layer's (V, D) and `bias` (V,), if
    it has one; the wanted ids `targets` (N,) have no padding. `nll_sum` is not smoothed: perplexity
    = exp(nll_sum / N). No chunk ends inside of a pair of rows.
    """
    return _LinearCrossEntropy.apply(hidden, weight, bias, targets, smoothing, softmax)  # type: ignore[no-untyped-call, no-any-return]


class Objective(nn.Module):
    """The model together with its summed loss, compiled by a `compiler`: what DDP wraps."""

    def __init__(
        self, model: FastTransformer, *,
        smoothing: float, r_drop: float = 0.0, compiler: Compiler | None = None,
        is_static: bool = False,
    ) -> None:  # fmt: skip
        """With `is_static` batches have one of few shapes, and model and loss are one graph."""
        super().__init__()
        self.model, self.smoothing = model, smoothing
        self.num_passes = 2 if r_drop else 1
        self.forward_model: Callable[..., Tensor] = model.forward
        self.softmax: Softmax = softmax_of_two(r_drop) if r_drop else softmax_in_place
        self.is_static, self.compute = is_static, self.compute_all
        if is_static:
            self.softmax = softmax_at_once
            if compiler is not None:
                self.compute = compiler.compile(self.compute_all, replays=True)
        elif compiler is not None:  # the model stays as it is for validation and decoding
            self.forward_model = compiler.compile(model.forward)
            # a graph for whole chunks, and one for any number of rows; V is known in both
            best = self.softmax if r_drop else softmax_at_once
            self.softmax = compiler.compile(best, dynamic=None)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return (loss_sum, nll_sum) over the real target tokens, in nats."""
        if self.is_static:
            ids = batch.src, batch.tgt_in, batch.tgt_out
            return self.compute(*ids, batch.sources, batch.targets)
        real = slice(batch.num_tokens)  # padding comes last
        passes = [
            self.forward_model(batch.src, batch.sources, batch.tgt_in, batch.targets)[real]
            for _ in range(self.num_passes)  # with dropout of their own
        ]
        hidden = torch.stack(passes, dim=1).flatten(0, 1) if len(passes) > 1 else passes[0]
        return self._loss(hidden, batch.tgt_out[real].repeat_interleave(self.num_passes))

    def compute_all(
        self, src: Tensor, tgt_in: Tensor, tgt_out: Tensor, sources: Packing, targets: Packing
    ) -> tuple[Tensor, Tensor]:
        """Return what `forward` does, of a batch with padding, which is known by its target ids."""
        return self._loss(self.model(src, sources, tgt_in, targets), tgt_out)

    def _loss(self, hidden: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Return what `forward` does, of outputs of the decoder (N, D) and wanted ids (N,)."""
        return smoothed_cross_entropy(
            hidden,
            self.model.output_matrix,
            wanted,
            smoothing=self.smoothing,
            bias=self.model.output_bias,
            softmax=self.softmax,
        )
