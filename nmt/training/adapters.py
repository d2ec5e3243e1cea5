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
_PARAMETER_PREFIXES = {  # the names of the parameters of each part begin with these
    Part.encoder: ("encoder_",),
    Part.decoder: ("decoder_",),
    Part.embeddings: ("embedding.", "src_embedding."),
}


class AdaptedLinear(FastLinear):
    """A linear layer with an adapter: y = x (W + SCALE * up down)^T + b.

    `up` (O, R) and `down` (R, I) are trained, W is frozen.
    """

    down: nn.Parameter
    up: nn.Parameter

    def block(self, x: Tensor, start: int, end: int, *, activation: str = "none") -> Tensor:
        """Return the output features from `start` to `end`, (..., end - start)."""
        low_rank_output = linear(linear(x, self.down), self.up[start:end])
        y = super().block(x, start, end) + SCALE * low_rank_output
        return torch.relu(y) if activation == "relu" else y


def set_trainable_parameters(model: FastTransformer, config: TrainConfig) -> None:
    """Freeze the parts of the setting `freeze`, and add adapters if the setting `adapter` says so.

    Each linear layer outside of the frozen parts gets an adapter, which is trained instead of the
    matrix of the layer. Embeddings, norms and biases are still trained.
    """
    frozen_prefixes: tuple[str, ...] = ()
    for frozen_part in config.freeze:
        frozen_prefixes += _PARAMETER_PREFIXES[frozen_part]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen_prefixes))
    if config.adapter is Adapter.none:
        return
    for name, module in model.named_modules():
        if type(module) is FastLinear and not name.startswith(frozen_prefixes):
            _add_adapter(module, config.adapter_rank)


def _add_adapter(module: FastLinear, rank: int) -> None:
    """Turn a linear layer into an `AdaptedLinear` with the same output."""
    module.__class__ = AdaptedLinear  # keeps the module, to which the model and its caches refer
    module.weight.requires_grad_(False)
    device = module.weight.device
    down = torch.empty(rank, module.in_features, device=device)
    nn.init.kaiming_uniform_(down, a=math.sqrt(5))  # torch's initialization of linear layers
    module.down = nn.Parameter(down)
    # zeros, so that an untrained adapter adds nothing
    module.up = nn.Parameter(torch.zeros(module.out_features, rank, device=device))


@torch.no_grad()
def merged_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of `model` with each adapter added to the matrix of its layer."""
    state: dict[str, Tensor] = model.state_dict()
    for name, module in model.named_modules():
        if isinstance(module, AdaptedLinear):
            up = state.pop(f"{name}.up")
            down = state.pop(f"{name}.down")
            state[f"{name}.weight"] = module.weight + SCALE * up @ down
    return state
