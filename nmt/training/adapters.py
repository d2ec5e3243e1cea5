"""Training only some parameters of a model: frozen parts, and low-rank adapters in place of linear
layers (LoRA, Hu et al., 2022), which are merged into the weights when these are saved.
"""

# I inner and O outer dimension, R rank

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from nmt.config import Adapter, Part, TrainConfig
from nmt.model.fast import FastTransformer
from nmt.model.fast.layers import FastLinear, linear

SCALE = 2.0  # alpha / R in section 4.1 of the paper
_PREFIXES = {
    Part.encoder: ["encoder_"],
    Part.decoder: ["decoder_"],
    Part.embeddings: ["embedding.", "src_embedding."],
}


class AdaptedLinear(FastLinear):
    """x (W + SCALE * up down)^T + b, where only `up` (O, R) and `down` (R, I) are trained."""

    down: nn.Parameter
    up: nn.Parameter

    def block(self, x: Tensor, start: int, end: int, *, activation: str = "none") -> Tensor:
        """Compute only the outputs from `start` to `end`, (..., end - start)."""
        low_rank = linear(linear(x, self.down), self.up[start:end])
        y = super().block(x, start, end) + SCALE * low_rank
        return torch.relu(y) if activation == "relu" else y


def set_trainable_parameters(model: FastTransformer, config: TrainConfig) -> None:
    """Set `requires_grad` of all parameters as `freeze` and `adapter` say.

    With an adapter, the matrices of linear layers that are not frozen get low-rank additions, and
    only these, embeddings, norms and biases are trained.
    """
    frozen = tuple(prefix for frozen_part in config.freeze for prefix in _PREFIXES[frozen_part])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    if config.adapter is Adapter.none:
        return
    for name, module in model.named_modules():
        if type(module) is FastLinear and not name.startswith(frozen):
            _add_adapter(module, config.adapter_rank)


def _add_adapter(module: FastLinear, rank: int) -> None:
    """Add an adapter whose output is 0 at first."""
    module.__class__ = AdaptedLinear
    weight = module.weight.requires_grad_(False)
    down = torch.empty(rank, module.in_features, device=weight.device)
    nn.init.kaiming_uniform_(down, a=math.sqrt(5))
    module.down = nn.Parameter(down)
    module.up = nn.Parameter(torch.zeros(module.out_features, rank, device=weight.device))


@torch.no_grad()
def merged_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's state dict with adapters added to the weights."""
    state: dict[str, Tensor] = model.state_dict()
    for name, module in model.named_modules():
        if isinstance(module, AdaptedLinear):
            up = state.pop(f"{name}.up")
            down = state.pop(f"{name}.down")
            state[f"{name}.weight"] = module.weight + SCALE * up @ down
    return state
