"""Optimizers, gradient clipping, and the exponential moving average (EMA) of the weights."""

# a matrix has R rows and C columns

from __future__ import annotations

import copy
import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from nmt.config import Optimizer, OptimizerConfig
from nmt.model.attention import MultiHeadAttention
from nmt.model.fast import FastTransformer
from nmt.model.fast.layers import FastLinear

_LAYER_PREFIXES = ("encoder_layers.", "decoder_layers.")  # names of parameters begin with these

_MUON_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # factors of x, x^3, x^5 (Jordan et al., 2024)
_MUON_ITERATIONS = 5
_MUON_STEP_SIZE = 0.2  # makes steps as large as AdamW's (Liu et al., 2025, section 2.2)


def make_optimizers(model: nn.Module, config: OptimizerConfig) -> list[torch.optim.Optimizer]:
    """Return the optimizer of the config.

    For Muon, returns two: Muon for the matrices of the layers, and AdamW for all other parameters.
    The learning rate is 0; the caller sets it before each step.

    - Adam: Kingma and Ba (2015), algorithm 1.
    - AdamW: Loshchilov and Hutter (2019), algorithm 2. Each step also subtracts lr * `weight_decay`
      times the weight, for matrices and embeddings; biases and norms do not decay.
    - Adafactor: `torch.optim.Adafactor`, whose step is relative to the root mean square of the
      weight.
    - Schedule-free: see `ScheduleFree`; biases and norms do not decay.
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    adam_settings: dict[str, Any] = {
        "lr": 0.0,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "fused": True,  # one kernel for all parameters
    }
    if config.name is Optimizer.adam:
        return [torch.optim.Adam(parameters.values(), **adam_settings)]
    optimizers: list[torch.optim.Optimizer] = []
    if config.name is Optimizer.muon:
        matrices = {name: p for name, p in parameters.items() if _is_layer_matrix(name, p)}
        parameters = {name: p for name, p in parameters.items() if name not in matrices}
        optimizers.append(_make_muon(model, list(matrices.values()), config))
    groups = _decay_groups(list(parameters.values()), config.weight_decay)
    if config.name is Optimizer.adafactor:
        return [torch.optim.Adafactor(groups, lr=0.0)]
    if config.name is Optimizer.schedule_free:
        return [ScheduleFree(groups, config)]
    optimizers.append(torch.optim.AdamW(groups, **adam_settings))
    return optimizers


def _decay_groups(parameters: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Return two parameter groups: matrices with weight decay, biases and norms without."""
    matrices = [p for p in parameters if p.dim() >= 2]
    vectors = [p for p in parameters if p.dim() < 2]
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def _is_layer_matrix(name: str, parameter: Tensor) -> bool:
    """Return whether Muon trains a parameter: a weight matrix of a layer, not an embedding."""
    is_in_layer = name.startswith(_LAYER_PREFIXES)
    return parameter.dim() == 2 and is_in_layer and name.endswith(".weight")


def _make_muon(model: nn.Module, matrices: list[nn.Parameter], config: OptimizerConfig) -> Muon:
    """Make the optimizer of `matrices`.

    It has two groups of parameters: the stacked projections to queries, keys and values, and all
    other matrices.
    """
    qkv_sizes: dict[Tensor, list[int]] = {}  # numbers of rows for q, k and v, keyed by projection
    for module in model.modules():
        if isinstance(module, MultiHeadAttention):
            qkv_sizes[module.in_projection.weight] = module.qkv_sizes
    groups: list[dict[str, Any]] = [
        {
            "params": [p for p in matrices if p in qkv_sizes],
            "block_rows": next(iter(qkv_sizes.values())),  # the same in all layers
        },
        {"params": [p for p in matrices if p not in qkv_sizes]},
    ]
    return Muon(groups, lr=0.0, momentum=config.momentum, weight_decay=config.weight_decay)


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al., 2024) with decoupled weight decay, for matrices.

    The step of a matrix is its Nesterov momentum, orthogonalized, times 0.2 * sqrt(max(R, C)). The
    factor makes the step as large as AdamW's, so that learning rates and weight decays for AdamW
    can be used (Liu et al., 2025, section 2.2).

    A group may have `block_rows`, the numbers of rows of the blocks of its matrices: here the
    projections to queries, to keys and to values. Each block is orthogonalized separately.
    `torch.optim.Muon` does not have blocks, and rounds to bfloat16 even on a CPU.
    """

    def __init__(
        self, params: list[dict[str, Any]], *, lr: float, momentum: float, weight_decay: float
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"block_rows": None})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all weights that have a gradient. `closure` is not used."""
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if not weights:
                continue
            directions = self._update_momentums(weights, group["momentum"])
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            weight_blocks: dict[torch.Size, list[Tensor]] = defaultdict(list)  # keyed by shape
            direction_blocks: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for weight, direction in zip(weights, directions, strict=True):
                block_rows = group["block_rows"] or [len(weight)]  # by default one block
                for block in torch.split(weight, block_rows):
                    weight_blocks[block.shape].append(block)
                for block in torch.split(direction, block_rows):
                    direction_blocks[block.shape].append(block)
            for shape, blocks in weight_blocks.items():
                step_size = group["lr"] * _MUON_STEP_SIZE * math.sqrt(max(shape))
                _add_orthogonalized(blocks, direction_blocks[shape], -step_size)

    def _update_momentums(self, weights: list[Tensor], coefficient: float) -> list[Tensor]:
        """Add the gradients to the momentums; return the Nesterov momentums.

        momentum = coefficient * momentum + (1 - coefficient) * gradient, and the Nesterov momentum
        is coefficient * momentum + (1 - coefficient) * gradient once more.
        """
        gradients = []
        momentums = []
        for weight in weights:
            assert weight.grad is not None
            state = self.state[weight]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(weight)
            gradients.append(weight.grad)
            momentums.append(state["momentum_buffer"])
        torch._foreach_lerp_(momentums, gradients, 1 - coefficient)
        return list(torch._foreach_lerp(gradients, momentums, coefficient))


def _add_orthogonalized(blocks: list[Tensor], directions: list[Tensor], factor: float) -> None:
    """Add `factor` times the orthogonalized directions to blocks of weights of the same shape."""
    # On a GPU, starting a kernel takes as long as multiplying small matrices, so one kernel
    # multiplies all of them. On a CPU, single matrices are faster, since they stay in the cache.
    chunk_size = len(blocks) if blocks[0].is_cuda else 1
    for start in range(0, len(blocks), chunk_size):
        chunk = slice(start, start + chunk_size)
        orthogonal = orthogonalize(torch.stack(directions[chunk])).to(blocks[0].dtype)
        torch._foreach_add_(blocks[chunk], orthogonal.unbind(), alpha=factor)


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return matrices (N, R, C) with the same singular vectors and all singular values near 1.

    A Newton-Schulz iteration brings the singular values between about 0.7 and 1.2. On a GPU it runs
    in bfloat16.
    """
    a, b, c = _MUON_COEFFICIENTS
    is_tall = matrices.size(1) > matrices.size(2)
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    if is_tall:
        x = x.mT  # the iteration computes x x^T, which is smaller for a wide matrix
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)  # now no singular value is above 1
    for _ in range(_MUON_ITERATIONS):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # b gram + c gram^2
        x = torch.baddbmm(x, polynomial, x, beta=a)  # a x + polynomial x
    return x.mT if is_tall else x


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free AdamW (Defazio et al., 2024, algorithm 1).

    Each parameter has three values:

    - z takes the steps of Adam without momentum. The state of the optimizer holds z.
    - x is the average of all z. Each z has the weight lr^2 * t^averaging_power, where t is the
      number of its update. So the small learning rates of warm-up count little, and a larger power
      makes x forget old z sooner. x is not stored, but computed from y and z.
    - y = (1 - beta1) * z + beta1 * x is the weight in the model. Gradients are computed at y.
    """

    def __init__(self, params: list[dict[str, Any]], config: OptimizerConfig) -> None:
        defaults = {
            "lr": 0.0,
            "betas": (config.beta1, config.beta2),
            "eps": config.eps,
            "num_steps": 0,
            "weight_sum": 0.0,  # sum of the weights of all z in x
        }
        super().__init__(params, defaults)
        self._averaging_power = config.averaging_power

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all weights that have a gradient. `closure` is not used."""
        for group in self.param_groups:
            group["num_steps"] += 1
            z_weight = group["lr"] ** 2 * group["num_steps"] ** self._averaging_power
            group["weight_sum"] += z_weight
            z_share = 0.0
            if z_weight > 0:
                z_share = z_weight / group["weight_sum"]
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update_weight(weight, group, z_share)

    def _update_weight(self, weight: Tensor, group: dict[str, Any], z_share: float) -> None:
        """Make one step with a weight, which holds y, and with its state.

        `z_share` is the share of the new z in the average x.
        """
        assert weight.grad is not None
        state = self.state[weight]
        if not state:
            state["z"] = weight.clone()
            state["exp_avg_sq"] = torch.zeros_like(weight)
        lr = group["lr"]
        beta1, beta2 = group["betas"]
        mean_square = state["exp_avg_sq"]  # moving average of the squared gradient
        mean_square.mul_(beta2).addcmul_(weight.grad, weight.grad, value=1 - beta2)
        bias_correction = 1 - beta2 ** group["num_steps"]
        denominator = (mean_square / bias_correction).sqrt_().add_(group["eps"])
        direction = weight.grad / denominator
        direction.add_(weight, alpha=group["weight_decay"])
        # With d = direction and c = z_share, the new values are
        # z' = z - lr * d
        # x' = (1 - c) * x + c * z'
        # y' = (1 - beta1) * z' + beta1 * x'
        #    = (1 - c) * y + c * z - lr * (1 - beta1 * (1 - c)) * d, which needs no x.
        weight.lerp_(state["z"], z_share)
        weight.add_(direction, alpha=lr * (beta1 * (1 - z_share) - 1))
        state["z"].sub_(direction, alpha=lr)

    @torch.no_grad()
    def averaged_copy(self, model: FastTransformer) -> FastTransformer:
        """Return a copy of the trained `model` that has the averaged weights x.

        `model` itself keeps y: after a change to x and back, its weights would be rounded.
        """
        averaged_model = copy.deepcopy(model).requires_grad_(False)
        for module in averaged_model.modules():
            if isinstance(module, FastLinear):
                module.rounded_weights = None  # copied from `model`, so rounded from y
        beta1, _ = self.param_groups[0]["betas"]
        # y = (1 - beta1) * z + beta1 * x, so x = y + (1 - 1 / beta1) * (z - y); `average` begins as
        # y and becomes x
        averages = averaged_model.parameters()
        for weight, average in zip(model.parameters(), averages, strict=True):
            if weight in self.state:
                average.lerp_(self.state[weight]["z"], 1 - 1 / beta1)
        return averaged_model


def clip_gradient(parameters: list[nn.Parameter], max_norm: float) -> Tensor:
    """Scale the gradient down to a norm of at most `max_norm`, 0 for no limit.

    Returns the norm of the gradient before scaling.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    if hasattr(norm, "full_tensor"):  # a DTensor if the model is sharded
        norm = norm.full_tensor()
    if max_norm > 0:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


class WeightAverage:
    """An exponential moving average (EMA) of the weights of a model.

    After update t, average = d * average + (1 - d) * weights, with d = min(decay, t / (t + 9)). The
    smaller d of the first updates makes the average forget the random initial weights, as in Marian
    (Junczys-Dowmunt et al., 2018). Averages of weights: Polyak and Juditsky (1992).
    `torch.optim.swa_utils.AveragedModel` has a constant d, and starts with the weights of update 1.
    """

    def __init__(self, model: FastTransformer, decay: float) -> None:
        self.decay = decay
        self.num_updates = 0
        self.model = copy.deepcopy(model).requires_grad_(False)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Add the weights of `model` after another update to the average."""
        self.num_updates += 1
        decay = min(self.decay, self.num_updates / (self.num_updates + 9))
        average_in_place = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        averages = list(self.model.parameters())
        average_in_place(averages, list(model.parameters()), self.num_updates)

    def load(self, weights: dict[str, Tensor], num_updates: int) -> None:
        """Restore the average, which is `weights` after `num_updates` updates."""
        self.num_updates = num_updates
        self.model.load_state_dict(weights)
