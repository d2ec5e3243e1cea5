"""What of a model is trained: parts of it may stay as they are, and linear layers may get low-rank
adapters instead (LoRA, Hu et al., 2022), which are merged into their weights when these are saved.
"""

# N rows, I inner and O outer dimension, R rank

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from nmt.config import Adapter, Part, TrainConfig
from nmt.model.fast import FastTransformer
from nmt.model.fast.layers import FastLinear, linear

SCALE = 2.0  # alpha / R in section 4.1 of the paper
_PREFIXES = {
    Part.encoder: ("encoder_",),
    Part.decoder: ("decoder_",),
    Part.embeddings: ("embedding.", "src_embedding."),
}


class AdaptedLinear(FastLinear):
    """x (W + SCALE * up down)^T + b, where only `up` (O, R) and `down` (R, I) are trained."""

    down: nn.Parameter
    up: nn.Parameter

    def block(self, x: Tensor, start: int, end: int, *, activation: str = "none") -> Tensor:
        """Compute the outputs from `start` to `end` alone, (..., end - start)."""
        added = linear(linear(x, self.down), self.up[start:end])
        y = super().block(x, start, end) + SCALE * added
        return torch.relu(y) if activation == "relu" else y


def choose_parameters(model: FastTransformer, config: TrainConfig) -> None:
    """Let the parameters of frozen parts have no gradient; with an adapter, neither the matrices of
    the other linear layers, which get low-rank additions. Embeddings, norms and biases are trained.
    """
    frozen = tuple(prefix for part in config.freeze for prefix in _PREFIXES[part])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    for name, module in model.named_modules():
        is_free = type(module) is FastLinear and not name.startswith(frozen)
        if is_free and config.adapter is Adapter.lora:
            _adapt(module, config.adapter_rank)


def _adapt(module: FastLinear, rank: int) -> None:
    """Add an adapter that computes 0 at first."""
    module.__class__ = AdaptedLinear
    weight = module.weight.requires_grad_(False)
    down = torch.empty(rank, module.in_features, device=weight.device)
    nn.init.kaiming_uniform_(down, a=math.sqrt(5))
    module.down = nn.Parameter(down)
    module.up = nn.Parameter(torch.zeros(module.out_features, rank, device=weight.device))


@torch.no_grad()
def merged_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict that the model has with its adapters added to its weights."""
    state: dict[str, Tensor] = model.state_dict()
    for name, module in model.named_modules():
        if isinstance(module, AdaptedLinear):
            up, down = state.pop(f"{name}.up"), state.pop(f"{name}.down")
            state[f"{name}.weight"] = module.weight + SCALE * up @ down
    return state
