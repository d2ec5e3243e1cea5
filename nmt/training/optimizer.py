"""Optimizers, gradient clipping, and the exponential moving average (EMA) of the weights."""

# R rows and C columns of a matrix

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from nmt.config import Optimizer, OptimizerConfig
from nmt.model.fast import FastTransformer
from nmt.model.transformer import MultiHeadAttention

_LAYERS = ("encoder_layers.", "decoder_layers.")

_MUON_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic polynomial, as published
_MUON_ITERATIONS = 5


def make_optimizers(model: nn.Module, config: OptimizerConfig) -> list[torch.optim.Optimizer]:
    """Make the optimizer of the config, or Muon with AdamW for the parameters that Muon leaves.

    The learning rate is set before each step. Adam is Kingma and Ba (2015), algorithm 1. AdamW is
    Loshchilov and Hutter (2019), algorithm 2, with the schedule on both terms: in addition to
    Adam's step, an update takes lr * `weight_decay` of a matrix away, also of the embedding.
    Biases and norms do not decay. Adafactor is torch's, whose step is the learning rate times the
    root mean square of the weight.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    adam_settings: dict[str, Any] = {
        "lr": 0.0,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "fused": True,  # one kernel, on the CPU, CUDA and Apple's GPU
    }
    if config.name is Optimizer.adam:
        return [torch.optim.Adam(trained.values(), **adam_settings)]
    if config.name is Optimizer.adafactor:
        groups = _decay_groups(list(trained.values()), config.weight_decay)
        return [torch.optim.Adafactor(groups, lr=0.0)]
    optimizers: list[torch.optim.Optimizer] = []
    if config.name is Optimizer.muon:
        matrices = {name: p for name, p in trained.items() if _is_layer_matrix(name, p)}
        trained = {name: p for name, p in trained.items() if name not in matrices}
        optimizers.append(_make_muon(model, list(matrices.values()), config))
    groups = _decay_groups(list(trained.values()), config.weight_decay)
    return [*optimizers, torch.optim.AdamW(groups, **adam_settings)]


def _decay_groups(parameters: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Divide parameters into matrices, which decay, and biases and norms, which do not."""
    matrices = [p for p in parameters if p.dim() >= 2]
    vectors = [p for p in parameters if p.dim() < 2]
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def _is_layer_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon changes a parameter: weight matrices of layers, but no embeddings."""
    return parameter.dim() == 2 and name.startswith(_LAYERS) and name.endswith(".weight")


def _make_muon(model: nn.Module, matrices: list[nn.Parameter], config: OptimizerConfig) -> Muon:
    block_rows: dict[Tensor, list[int]] = {}
    for module in model.modules():
        if isinstance(module, MultiHeadAttention):
            block_rows[module.in_projection.weight] = module.qkv_sizes
    groups: list[dict[str, Any]] = [
        {
            "params": [p for p in matrices if p in block_rows],
            "block_rows": next(iter(block_rows.values())),
        },
        {"params": [p for p in matrices if p not in block_rows]},
    ]
    return Muon(groups, lr=0.0, momentum=config.momentum, weight_decay=config.weight_decay)


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al., 2024) with decoupled weight decay, for matrices.

    The step of a matrix is its momentum (Nesterov's), made orthogonal, times 0.2 * sqrt(max(R, C)).
    With this factor it is as large as AdamW's, so that learning rates and weight decays for AdamW
    fit (Liu et al., 2025, section 2.2). `block_rows` of a group divide the rows of its weights into
    matrices that need a step each, for queries, keys and values. `torch.optim.Muon` would
    take one step for all of them, and rounds to bfloat16 on a CPU, too.
    """

    def __init__(
        self, params: list[dict[str, Any]], *, lr: float, momentum: float, weight_decay: float
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"block_rows": None})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Change the weights by their gradients."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._step(weight, group)

    def _step(self, weight: Tensor, group: dict[str, Any]) -> None:
        assert weight.grad is not None
        state = self.state[weight]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        momentum = state["momentum_buffer"].lerp_(weight.grad, 1 - group["momentum"])
        direction = weight.grad.lerp(momentum, group["momentum"])
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        start = 0
        for num_rows in group["block_rows"] or [len(weight)]:
            block = weight[start : start + num_rows]
            orthogonal = orthogonalize(direction[start : start + num_rows]).to(block.dtype)
            block.add_(orthogonal, alpha=-group["lr"] * 0.2 * math.sqrt(max(block.shape)))
            start += num_rows


def orthogonalize(matrix: Tensor) -> Tensor:
    """Return the matrix (R, C) with the same singular vectors and singular values near 1.

    A Newton-Schulz iteration brings them to between about 0.7 and 1.2; in bfloat16 on a GPU.
    """
    a, b, c = _MUON_COEFFICIENTS
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.bfloat16() if matrix.is_cuda else matrix
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=1e-7)  # no singular value is above 1
    for _ in range(_MUON_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def clip_gradient(model: nn.Module, max_norm: float) -> Tensor:
    """Scale the gradient down to `max_norm` (0 disables); return its norm before scaling."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    if hasattr(norm, "full_tensor"):  # of a sharded model
        norm = norm.full_tensor()
    if max_norm > 0:
        nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm


class WeightAverage:
    """A copy of a model whose weights are an average: after update t, d * average + (1 - d) *
    weights, with d = min(decay, t / (t + 9)).

    The smaller d of the first updates makes it forget the random initial weights, as in Marian
    (Junczys-Dowmunt et al., 2018). Averages of weights: Polyak and Juditsky (1992).
    `torch.optim.swa_utils.AveragedModel` would replace the average by the weights of update 1.
    """

    def __init__(self, model: FastTransformer, decay: float) -> None:
        self.decay = decay
        self.num_updates = 0
        self.model = copy.deepcopy(model).requires_grad_(False)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Include the weights of `model` after one more update."""
        self.num_updates += 1
        decay = min(self.decay, self.num_updates / (self.num_updates + 9))
        average_in_place = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        average_in_place([*self.model.parameters()], [*model.parameters()], self.num_updates)

    def load(self, weights: dict[str, Tensor], num_updates: int) -> None:
        """Continue from an average that had `weights` after `num_updates`."""
        self.num_updates = num_updates
        self.model.load_state_dict(weights)
