"""Training only some parameters of a model: frozen parts, and low-rank adapters (LoRA).

An adapter adds a trained low-rank matrix to the frozen matrix of a linear layer (Hu et al., 2022).
Saved weights have the adapters merged into the matrices.
"""

# I input and O output size of a linear layer, R rank

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from nmt.config import Adapter, Part, TrainConfig
from nmt.model.fast import FastTransformer
from nmt.model.fast.layers import FastLinear, linear

SCALE = 2.0  # alpha / R in section 4.1 of the paper
_NAME_PREFIXES = {  # of the parameters of each part
    Part.encoder: ["encoder_"],
    Part.decoder: ["decoder_"],
    Part.embeddings: ["embedding.", "src_embedding."],
}


class AdaptedLinear(FastLinear):
    """A linear layer with an adapter: y = x (W + SCALE * up down)^T + b.

    `up` (O, R) and `down` (R, I) are trained, W is frozen.
    """

    down: nn.Parameter
    up: nn.Parameter

    def block(self, x: Tensor, start: int, end: int, *, activation: str = "none") -> Tensor:
        """Return the outputs from index `start` to `end`, (..., end - start)."""
        low_rank = linear(linear(x, self.down), self.up[start:end])
        y = super().block(x, start, end) + SCALE * low_rank
        return torch.relu(y) if activation == "relu" else y


def set_trainable_parameters(model: FastTransformer, config: TrainConfig) -> None:
    """Set `requires_grad` of all parameters for `freeze` and `adapter`, and add the adapters.

    With an adapter, the linear layers outside of frozen parts get one, which replaces the training
    of their matrices. Embeddings, norms and biases are still trained.
    """
    frozen_prefixes: list[str] = []
    for frozen_part in config.freeze:
        frozen_prefixes += _NAME_PREFIXES[frozen_part]
    frozen = tuple(frozen_prefixes)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    if config.adapter is Adapter.none:
        return
    for name, module in model.named_modules():
        if type(module) is FastLinear and not name.startswith(frozen):
            _add_adapter(module, config.adapter_rank)


def _add_adapter(module: FastLinear, rank: int) -> None:
    """Turn a linear layer into an `AdaptedLinear` with the same output."""
    module.__class__ = AdaptedLinear
    weight = module.weight.requires_grad_(False)
    down = torch.empty(rank, module.in_features, device=weight.device)
    nn.init.kaiming_uniform_(down, a=math.sqrt(5))
    module.down = nn.Parameter(down)
    # `up` is 0 at first, so the adapter adds nothing yet
    module.up = nn.Parameter(torch.zeros(module.out_features, rank, device=weight.device))


@torch.no_grad()
def merged_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a model with adapters merged, as of a model without adapters."""
    state: dict[str, Tensor] = model.state_dict()
    for name, module in model.named_modules():
        if isinstance(module, AdaptedLinear):
            up = state.pop(f"{name}.up")
            down = state.pop(f"{name}.down")
            state[f"{name}.weight"] = module.weight + SCALE * up @ down
    return state
