"""Sharded training (`sharding=full`), for models larger than the memory of one device.

torch's `fully_shard` divides weights, gradients and moments among the ranks (Zhao et al., 2023,
PyTorch FSDP): each rank has some rows of every parameter. The whole weights of a layer exist only
while the layer computes. Under autocast, rounded copies of weights exist until the backward pass.
The parameters outside of layers, such as the shared embedding, are gathered all at once.
Checkpoints hold whole tensors.
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
from nmt.training.checkpoints import copy_to_host, map_tensors
from nmt.training.loss import Objective
from nmt.training.optimizer import WeightAverage


class Sharded:
    """An objective, its optimizer and its average, whose tensors are divided among the ranks."""

    def __init__(
        self,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        average: WeightAverage | None,
        device: torch.device,
        world_size: int,
    ) -> None:
        """Shard `objective`, `optimizer` and `average` in place.

        Their tensors must be whole, and equal on all ranks.
        """
        model = objective.model
        self.mesh: DeviceMesh = init_device_mesh(device.type, (world_size,))
        self._empty_model = copy.deepcopy(model).to("meta")
        whole_parameters = dict(model.named_parameters())
        for layer in [*model.encoder_layers, *model.decoder_layers]:
            fully_shard(layer, mesh=self.mesh)
        fully_shard(objective, mesh=self.mesh)
        sharded_parameters: dict[Tensor, nn.Parameter] = {}  # keyed by the whole parameter
        for name, parameter in model.named_parameters():
            sharded_parameters[whole_parameters[name]] = parameter
        self._shard_optimizer(optimizer, sharded_parameters)
        if average is not None:
            self._shard_average(average.model)

    def _shard_optimizer(
        self, optimizer: torch.optim.Optimizer, sharded_parameters: dict[Tensor, nn.Parameter]
    ) -> None:
        """Replace the parameters of an optimizer by sharded ones, and shard their moments."""
        for group in optimizer.param_groups:
            group["params"] = [sharded_parameters[parameter] for parameter in group["params"]]
        whole_states = dict(optimizer.state)
        optimizer.state.clear()
        for parameter, whole_state in whole_states.items():
            sharded_state = optimizer.state[sharded_parameters[parameter]]
            for name, tensor in whole_state.items():
                is_moment = tensor.dim() > 0  # otherwise the number of steps, a scalar
                sharded_state[name] = self._shard(tensor) if is_moment else tensor

    def _shard_average(self, model: nn.Module) -> None:
        """Replace the parameters of the averaged model by sharded ones."""
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                shard = nn.Parameter(self._shard(parameter), requires_grad=False)
                setattr(module, name, shard)

    def _shard(self, tensor: Tensor) -> Tensor:
        """Divide the rows of a tensor among the ranks."""
        return distribute_tensor(tensor.detach(), self.mesh, [Shard(0)])

    def gather_model(self, model: FastTransformer) -> FastTransformer:
        """Return a copy of `model` with whole weights, for validation. All ranks must call it."""
        whole_model = copy.deepcopy(self._empty_model).requires_grad_(False)
        weights = {name: _gather(tensor) for name, tensor in model.state_dict().items()}
        whole_model.load_state_dict(weights, assign=True)
        for module, whole_module in zip(model.modules(), whole_model.modules(), strict=True):
            for name, buffer in module.named_buffers(recurse=False):  # not in the state dict
                setattr(whole_module, name, buffer)
        return whole_model

    def local_shard(self, tensor: Tensor) -> Tensor:
        """Return this rank's shard of a tensor; return other tensors unchanged."""
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def gather_to_host(self, tree: Any, *, should_keep: bool) -> Any:
        """Return nested dicts and lists with whole tensors in host memory.

        All ranks must call it. Ranks without `should_keep` get None for each tensor. Tensors are
        gathered one after the other, so that a device holds only one whole tensor.
        """

        def gather_tensor(tensor: Tensor) -> Tensor | None:
            whole_tensor = _gather(tensor)
            return copy_to_host(whole_tensor) if should_keep else None

        return map_tensors(gather_tensor, tree)


def _gather(tensor: Tensor) -> Tensor:
    """Return the whole tensor of a shard. All ranks must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
