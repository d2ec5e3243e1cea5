"""Models larger than one device: weights, gradients and moments divided among the ranks (Zhao et
al., 2023, PyTorch FSDP; torch's `fully_shard`).

Every rank has a part of the rows of each parameter. A layer's whole weights exist only while it
computes (autocast keeps rounded ones until the backward pass); the embedding, which both sides and
the output may share, and what stands beside layers are one more group. Files hold whole tensors.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from nmt.model.fast import FastTransformer
from nmt.training.checkpoints import to_host
from nmt.training.loss import Objective
from nmt.training.optimizer import WeightAverage


class Sharded:
    """What the ranks share of an objective, its optimizer and the average of its weights."""

    def __init__(
        self, objective: Objective, optimizer: torch.optim.Optimizer,
        average: WeightAverage | None, device: torch.device, world_size: int,
    ) -> None:  # fmt: skip
        """Divide them in place; all ranks have the same numbers. Only a call of `objective` has
        whole weights then.
        """
        model = objective.model
        self.mesh: DeviceMesh = init_device_mesh(device.type, (world_size,))
        self._empty = copy.deepcopy(model).to("meta")
        before = dict(model.named_parameters())
        for layer in [*model.encoder_layers, *model.decoder_layers]:
            fully_shard(layer, mesh=self.mesh)
        fully_shard(objective, mesh=self.mesh)
        after: dict[Tensor, nn.Parameter] = {
            before[name]: parameter for name, parameter in model.named_parameters()
        }
        for group in optimizer.param_groups:
            group["params"] = [after[parameter] for parameter in group["params"]]
        states = dict(optimizer.state)
        optimizer.state.clear()
        for parameter, state in states.items():
            moments = {k: self._divide(v) if v.dim() else v for k, v in state.items()}
            optimizer.state[after[parameter]] = moments
        if average is not None:
            for module in average.model.modules():
                for name, parameter in module.named_parameters(recurse=False):
                    part = nn.Parameter(self._divide(parameter), requires_grad=False)
                    setattr(module, name, part)

    def _divide(self, tensor: Tensor) -> Tensor:
        return distribute_tensor(tensor.detach(), self.mesh, [Shard(0)])

    def whole_model(self, model: FastTransformer) -> FastTransformer:
        """Return a model for validation that has the whole weights of `model`, on every rank."""
        found = copy.deepcopy(self._empty).requires_grad_(False)
        weights = {name: _whole(value) for name, value in model.state_dict().items()}
        found.load_state_dict(weights, assign=True)
        found.positions = model.positions
        return found

    def local(self, value: Tensor) -> Tensor:
        """Return the part of a tensor that this rank has."""
        return value.to_local() if isinstance(value, DTensor) else value

    def gather(self, tree: Any, *, keeps: bool) -> Any:
        """Copy nested dicts and lists of tensors to host memory, one whole tensor after the other,
        on a rank that `keeps` them; all ranks ask for it, and the others get None for a tensor.
        """
        if isinstance(tree, Tensor):
            found = _whole(tree)
            return to_host(found) if keeps else None
        if isinstance(tree, dict):
            return {key: self.gather(value, keeps=keeps) for key, value in tree.items()}
        return [self.gather(x, keeps=keeps) for x in tree] if isinstance(tree, list) else tree


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value.detach()
