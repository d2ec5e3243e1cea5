"""Label-smoothed cross-entropy over the vocabulary, summed over target tokens (paper, section 5.4).

With smoothing eps, the target distribution q has 1 - eps + eps / V for the correct token, and
eps / V for every other token (Szegedy et al., 2016, section 7):

    loss = -sum_v q(v) log p(v) = (1 - eps) * nll + eps * mean_v(-log p(v))

Here nll is the negative log-likelihood of the correct token. `torch.nn.CrossEntropyLoss` with
`label_smoothing` computes the same loss.
"""

# N target tokens (M with padding), D d_model, V vocab; for attention: B sentences, H heads, S
# source and T target positions, L links of an alignment

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nmt.model.alignment import alignment_attention, mean_alignment
from nmt.model.attention import AttentionWeights
from nmt.model.fast import FastTransformer
from nmt.model.fast.layers import is_onednn_faster, linear, transposed_matmul
from nmt.training.batches import Batch
from nmt.training.compiled import Compiler
from nmt.training.costs import GPU_CHUNK_LOGITS

CPU_CHUNK_ROWS = 256  # number of target tokens whose logits exist at the same time on a CPU
CUT_PROB = 0.05  # probability that SimCut sets a token's embedding to 0 (Gao et al., 2022)
_ALIGNMENT_EPS = 1e-6  # added to attention weights, so that their logarithm is finite

SoftmaxLoss = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]]
"""A loss as a function of logits (N, V), targets (N,) and smoothing.

Returns the summed loss, the summed nll, and the gradient with respect to the logits, (N, V). The
gradient has the dtype of the logits, and may be stored in their memory.
"""


class _LinearCrossEntropy(torch.autograd.Function):
    """The output layer and the loss, computed for one chunk of target tokens after another.

    The forward pass computes the loss and the gradient of a chunk together, and then frees its
    logits. Under autocast, the inputs of matrix multiplications are rounded once for all chunks.
    Sums stay in float32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        smoothing: float,
        softmax_loss: SoftmaxLoss,
    ) -> tuple[Tensor, Tensor]:
        """Return the summed loss and nll. See `smoothed_cross_entropy` for the arguments."""
        # only `hidden`, `weight` and `bias` can need a gradient
        needs_hidden_grad, needs_weight_grad, needs_bias_grad = ctx.needs_input_grad[:3]
        device_type = weight.device.type
        dtype = weight.dtype
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = weight.new_zeros(())  # not used if the weight needs no gradient
        if needs_weight_grad:
            grad_weight = torch.zeros_like(weight)
        grad_bias = None if bias is None else torch.zeros_like(bias)
        loss_sum = torch.zeros((), device=hidden.device)
        nll_sum = torch.zeros_like(loss_sum)
        # oneDNN cannot add a product to an existing tensor. Where it is the faster library, the
        # product is computed first and added afterwards.
        can_add_in_place = torch.compiler.is_compiling() or not is_onednn_faster()
        # autocast would round the weight again for every chunk
        with torch.autocast(device_type, enabled=False):
            hidden = hidden.to(dtype)
            weight = weight.to(dtype)
            output_bias = None if bias is None else bias.to(dtype)
            chunk_rows = _chunk_rows(device_type, vocab_size=len(weight))
            for start in range(0, len(hidden), chunk_rows):
                chunk = slice(start, start + chunk_rows)
                logits = linear(hidden[chunk], weight, output_bias)
                loss, nll, grad_logits = softmax_loss(logits, targets[chunk], smoothing)
                # not in place, since torch 2.11 cannot compile the gradient of `+=`
                loss_sum = loss_sum + loss
                nll_sum = nll_sum + nll
                if needs_hidden_grad:
                    grad_hidden[chunk].copy_(linear(grad_logits, weight.T))
                if grad_bias is not None and needs_bias_grad:
                    grad_bias += grad_logits.sum(0, dtype=grad_bias.dtype)
                is_same_dtype = grad_logits.dtype is grad_weight.dtype
                if needs_weight_grad and can_add_in_place and is_same_dtype:
                    torch.addmm(grad_weight, grad_logits.T, hidden[chunk], out=grad_weight)
                elif needs_weight_grad:
                    grad_weight += transposed_matmul(grad_logits, hidden[chunk])
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.mark_non_differentiable(nll_sum)
        return loss_sum, nll_sum

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the arguments of `forward`, which it has computed already."""
        grad_hidden, grad_weight, grad_bias = ctx.saved_tensors
        grad_loss = grad_outputs[0]  # nll_sum has no gradient
        if grad_bias is not None:
            grad_bias = grad_loss * grad_bias
        # targets, smoothing and softmax_loss have no gradient
        return grad_loss * grad_hidden, grad_loss * grad_weight, grad_bias, None, None, None


def _chunk_rows(device_type: str, vocab_size: int) -> int:
    """Return the number of rows of a chunk.

    The number is even, since R-Drop and SimCut have two rows for each token.
    """
    if device_type != "cuda":
        return CPU_CHUNK_ROWS
    num_rows = GPU_CHUNK_LOGITS // vocab_size
    return max(CPU_CHUNK_ROWS, num_rows - num_rows % 2)


def eager_softmax_loss(
    logits: Tensor, targets: Tensor, smoothing: float, used_size: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a `SoftmaxLoss` in float32. Without a compiler, this takes little memory.

    Smoothing covers the first `used_size` ids, by default all. Larger ids are padding of the
    vocabulary.
    """
    dtype = logits.dtype
    if used_size is None:
        used_size = logits.size(1)
    logits = logits.float()
    probs = torch.softmax(logits, dim=-1)  # (N, V)
    # The log of the sum of exp(logits), (N, 1). Every token of the vocabulary has
    # logit = log p + log_normalizer. Here the most probable token is used.
    log_normalizer = logits.amax(-1, keepdim=True) - probs.amax(-1, keepdim=True).log()
    nll = (log_normalizer - logits.gather(1, targets[:, None])).sum()
    uniform_loss = log_normalizer.sum() - logits[:, :used_size].mean(-1).sum()
    loss = (1 - smoothing) * nll + smoothing * uniform_loss
    # the gradient is p - q, probabilities minus target distribution; to save memory, it is computed
    # in the tensor of the probabilities
    grad_logits = probs
    grad_logits[:, :used_size].sub_(smoothing / used_size)
    # for the correct token, q is larger by 1 - smoothing than for the other tokens
    correct_change = grad_logits.new_full((len(targets), 1), smoothing - 1)
    grad_logits.scatter_add_(1, targets[:, None], correct_change)
    return loss, nll, grad_logits.to(dtype)


def softmax_loss_for_compiler(
    logits: Tensor, targets: Tensor, smoothing: float, used_size: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a `SoftmaxLoss` in float32, with operations that torch.compile fuses well.

    Smoothing covers the first `used_size` ids, by default all.
    """
    log_probs = torch.log_softmax(logits.float(), dim=-1)  # (N, V)
    ids = torch.arange(logits.size(1), device=logits.device)  # (V,)
    is_correct = ids == targets[:, None]  # (N, V)
    nll = -torch.where(is_correct, log_probs, 0.0).sum()
    if used_size is None:
        used_size = logits.size(1)
    log_prob_sum = log_probs[:, :used_size].sum()
    loss = (1 - smoothing) * nll - smoothing / used_size * log_prob_sum
    target_probs = torch.where(ids < used_size, smoothing / used_size, 0.0)  # (V,)
    target_probs = target_probs + torch.where(is_correct, 1 - smoothing, 0.0)  # (N, V)
    grad_logits = log_probs.exp() - target_probs  # (N, V)
    return loss, nll, grad_logits.to(logits.dtype)


def r_drop_loss(alpha: float, used_size: int | None = None) -> SoftmaxLoss:
    """Return the `SoftmaxLoss` of R-Drop (Liang et al., 2021, equation 4) with weight `alpha`.

    Rows 2i and 2i + 1 of the logits come from two passes over token i. The loss of a token is

        (CE_1 + CE_2) / 2 + alpha / 4 * (KL(p_1 || p_2) + KL(p_2 || p_1))

    The cross-entropies CE are smoothed over the first `used_size` ids. The divergences KL are not
    smoothed. The paper's loss is twice as large; with this one, alpha = 0 gives the usual loss.
    """

    def compute(logits: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor, Tensor]:
        ce_sum, nll_sum, grad_logits = eager_softmax_loss(
            logits.float(), targets, smoothing, used_size
        )
        log_probs = torch.log_softmax(logits.float(), dim=-1)  # (N, V)
        log_probs = log_probs.view(-1, 2, logits.size(1))  # (N / 2, 2, V)
        log_ratio = log_probs - log_probs.flip(1)
        # In place, to save memory: these are the largest tensors of an update. So `log_probs` and
        # `log_ratio` are not used after these two lines.
        probs = log_probs.exp_()
        kl_terms = log_ratio.mul_(probs)
        kl = kl_terms.sum(-1, keepdim=True)  # divergence of each pass from the other, (N / 2, 2, 1)
        # The sum of both divergences has this gradient with respect to the logits of pass 1:
        # p_1 log(p_1 / p_2) + p_1 (1 - kl_1) - p_2. For pass 2, exchange the indices.
        kl_grad = kl_terms.addcmul_(probs, 1 - kl).sub_(probs.flip(1))
        kl_grad = kl_grad.view_as(grad_logits)  # (N, V)
        grad_logits = grad_logits.mul_(0.5).add_(kl_grad, alpha=alpha / 4)
        loss = ce_sum / 2 + alpha / 4 * kl.sum()
        nll = nll_sum / 2
        return loss, nll, grad_logits.to(logits.dtype)

    return compute


def simcut_loss(alpha: float, used_size: int | None = None) -> SoftmaxLoss:
    """Return the `SoftmaxLoss` of SimCut (Gao et al., 2022, equation 4) with weight `alpha`.

    Row 2i of the logits comes from the pass over token i with all embeddings. Row 2i + 1 comes from
    the pass with some embeddings set to 0. The loss of a token is CE + alpha * KL(p || p_cut), with
    a gradient for both distributions. CE is the cross-entropy of the first pass, smoothed over the
    first `used_size` ids. KL is not smoothed.
    """

    def compute(logits: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor, Tensor]:
        pass_logits = logits.float().view(-1, 2, logits.size(1))  # (N / 2, 2, V)
        ce, nll, grad_whole = eager_softmax_loss(
            pass_logits[:, 0], targets[::2], smoothing, used_size
        )
        log_probs, log_probs_cut = torch.log_softmax(pass_logits, dim=-1).unbind(1)
        probs = log_probs.exp()  # (N / 2, V)
        log_ratio = log_probs - log_probs_cut
        kl = (probs * log_ratio).sum(-1, keepdim=True)  # (N / 2, 1)
        # the gradient of KL(p || p_cut) with respect to the logits of each pass
        grad_whole = grad_whole + alpha * probs * (log_ratio - kl)
        grad_cut = alpha * (log_probs_cut.exp() - probs)
        grad_logits = torch.stack([grad_whole, grad_cut], dim=1).view_as(logits)  # (N, V)
        loss = ce + alpha * kl.sum()
        return loss, nll, grad_logits.to(logits.dtype)

    return compute


@contextmanager
def cut_embeddings(uncut_ids: Mapping[nn.Module, Tensor]) -> Iterator[None]:
    """Set the outputs of embeddings to 0 for random tokens during the block.

    `uncut_ids` has the ids that are never cut, keyed by the embedding.
    """

    def cut(embedding: nn.Module, inputs: tuple[Tensor], embedded: Tensor) -> Tensor:
        ids = inputs[0]
        is_drawn = torch.rand(ids.shape, device=ids.device) < CUT_PROB  # drawn for each token
        is_uncut = torch.isin(ids, uncut_ids[embedding])
        is_cut = is_drawn & ~is_uncut
        return embedded.masked_fill(is_cut.unsqueeze(-1), 0.0)

    hooks = [embedding.register_forward_hook(cut) for embedding in uncut_ids]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def smoothed_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    smoothing: float,
    bias: Tensor | None = None,
    softmax_loss: SoftmaxLoss = eager_softmax_loss,
) -> tuple[Tensor, Tensor]:
    """Return the summed loss and the summed nll, in nats and float32.

    `hidden` is the decoder's output (N, D), `weight` (V, D) and `bias` (V,) are the output layer,
    and `targets` (N,) are ids without padding. The nll is not smoothed, so that the perplexity is
    exp(nll / N).
    """
    return _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call, no-any-return]
        hidden, weight, bias, targets, smoothing, softmax_loss
    )


def alignment_loss(weights: Tensor, alignment: Tensor) -> Tensor:
    """Return the summed cross-entropy of word alignment (Chen et al., 2016), in nats and float32.

    The n links of a target token have a probability of 1 / n each in the target distribution.

    Args:
        weights: predicted distributions over source positions (B, T, S).
        alignment: links (L, 3): sentence, target position and source position.
    """
    sentences, tgt_positions, src_positions = alignment.unbind(1)  # (L,) each
    probs = weights[sentences, tgt_positions, src_positions].float()  # (L,)
    num_links = weights.new_zeros(weights.shape[:2])  # (B, T), links of each target token
    ones = num_links.new_ones(len(alignment))
    num_links.index_put_((sentences, tgt_positions), ones, accumulate=True)
    log_probs = (probs + _ALIGNMENT_EPS).log()  # (L,)
    return -(log_probs / num_links[sentences, tgt_positions]).sum()


class Objective(nn.Module):
    """The model and its loss in one module, which DDP or FSDP can wrap."""

    def __init__(
        self,
        model: FastTransformer,
        *,
        smoothing: float,
        r_drop: float = 0.0,
        simcut: float = 0.0,
        guided_alignment: float = 0.0,
        compiler: Compiler | None = None,
        used_size: int | None = None,
        uncut_ids: Mapping[nn.Module, Tensor] | None = None,
    ) -> None:
        """Choose the loss, and compile it and the forward pass with `compiler`, if there is one.

        Args:
            model: the model to train.
            smoothing: label smoothing, over the first `used_size` ids.
            r_drop: weight of the divergence of R-Drop; 0 disables it.
            simcut: weight of the divergence of SimCut; 0 disables it.
            guided_alignment: weight of `alignment_loss`; above 0, batches need an alignment.
            compiler: compiles the forward pass and the loss of training.
            used_size: number of ids before the padding of the vocabulary; by default all.
            uncut_ids: ids of tokens that SimCut never cuts, keyed by the embedding. Needed for it.
        """
        super().__init__()
        self.model = model
        self.smoothing = smoothing
        self.num_passes = 2 if r_drop or simcut else 1
        self.has_cut_pass = simcut > 0  # whether the second pass has embeddings set to 0
        self.uncut_ids = uncut_ids
        self.alignment_weight = guided_alignment
        self.forward_model: Callable[..., Tensor] = model.forward
        self.softmax_loss: SoftmaxLoss = partial(eager_softmax_loss, used_size=used_size)
        if r_drop:
            self.softmax_loss = r_drop_loss(r_drop, used_size)
        elif simcut:
            self.softmax_loss = simcut_loss(simcut, used_size)
        elif compiler is not None:
            self.softmax_loss = partial(softmax_loss_for_compiler, used_size=used_size)
        if compiler is not None:
            self.forward_model = compiler.compile_model(model)
            # dynamic=None makes one graph for full chunks, and one for any other number of rows
            self.softmax_loss = compiler.compile(self.softmax_loss, dynamic=None)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the summed loss and the summed nll of the target tokens, in nats."""
        num_tokens = batch.num_tokens  # padding comes after them
        attention_out: AttentionWeights | None = None  # filled by the first pass
        if self.alignment_weight:
            alignment_module = alignment_attention(self.model)
            attention_out = {alignment_module: None}
        outputs = []  # the decoder's output in each pass
        for pass_index in range(self.num_passes):  # each draws new dropout
            cutting: AbstractContextManager[None] = nullcontext()
            if self.has_cut_pass and pass_index == 1:
                assert self.uncut_ids is not None
                cutting = cut_embeddings(self.uncut_ids)
            pass_attention_out = attention_out if pass_index == 0 else None
            with cutting:
                output = self.forward_model(
                    batch.src,
                    batch.src_packing,
                    batch.tgt_in,
                    batch.tgt_packing,
                    pass_attention_out,
                )  # (M, D), with padding
            outputs.append(output[:num_tokens])  # (N, D)
        hidden = outputs[0]
        if len(outputs) > 1:
            # (2 N, D): rows 2i and 2i + 1 are the two passes over token i
            hidden = torch.stack(outputs, dim=1).flatten(0, 1)
        targets = batch.tgt_out[:num_tokens].repeat_interleave(self.num_passes)
        loss, nll = smoothed_cross_entropy(
            hidden,
            self.model.output_matrix,
            targets,
            smoothing=self.smoothing,
            bias=self.model.output_bias,
            softmax_loss=self.softmax_loss,
        )
        if attention_out is not None:
            weights = attention_out[alignment_module]  # (B, H, T, S)
            assert weights is not None
            assert batch.alignment is not None
            probs = mean_alignment(weights, self.model.config)  # (B, T, S)
            if self.model.config.alignment_shift:
                # The alignment of token t is the attention of position t + 1, which reads token t.
                probs = probs[:, 1:]
            loss = loss + self.alignment_weight * alignment_loss(probs, batch.alignment)
        return loss, nll
