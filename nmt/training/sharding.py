"""`sharding=full`: weights, gradients and moments divided among the ranks (Zhao et al., 2023,
PyTorch FSDP; torch's `fully_shard`), for models larger than one device.

Every rank has some rows of each parameter. The whole weights of a layer exist only while it
computes; autocast keeps rounded copies until the backward pass. Parameters outside of layers, such
as the embedding that both sides and the output may share, form one more group. Files hold whole
tensors.
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
    """Divides an objective, its optimizer and its weight average among the ranks."""

    def __init__(
        self,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        average: WeightAverage | None,
        device: torch.device,
        world_size: int,
    ) -> None:
        """Divide all three in place; their values must be equal on all ranks.

        Afterwards, whole weights exist only during a call of `objective`.
        """
        model = objective.model
        self.mesh: DeviceMesh = init_device_mesh(device.type, (world_size,))
        self._empty_model = copy.deepcopy(model).to("meta")
        whole_parameters = dict(model.named_parameters())
        for layer in [*model.encoder_layers, *model.decoder_layers]:
            fully_shard(layer, mesh=self.mesh)
        fully_shard(objective, mesh=self.mesh)
        shard_of: dict[Tensor, nn.Parameter] = {}
        for name, parameter in model.named_parameters():
            shard_of[whole_parameters[name]] = parameter
        self._shard_optimizer(optimizer, shard_of)
        if average is not None:
            self._shard_average(average.model)

    def _shard_optimizer(
        self, optimizer: torch.optim.Optimizer, shard_of: dict[Tensor, nn.Parameter]
    ) -> None:
        for group in optimizer.param_groups:
            group["params"] = [shard_of[parameter] for parameter in group["params"]]
        states = dict(optimizer.state)
        optimizer.state.clear()
        for parameter, state in states.items():
            for name, value in state.items():
                is_moment = value.dim() > 0  # "step" is a scalar
                shard = self._divide(value) if is_moment else value
                optimizer.state[shard_of[parameter]][name] = shard

    def _shard_average(self, model: nn.Module) -> None:
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                shard = nn.Parameter(self._divide(parameter), requires_grad=False)
                setattr(module, name, shard)

    def _divide(self, tensor: Tensor) -> Tensor:
        return distribute_tensor(tensor.detach(), self.mesh, [Shard(0)])

    def whole_model(self, model: FastTransformer) -> FastTransformer:
        """Return a model for validation with the whole weights of `model`, on every rank."""
        copied = copy.deepcopy(self._empty_model).requires_grad_(False)
        weights = {name: _gather(value) for name, value in model.state_dict().items()}
        copied.load_state_dict(weights, assign=True)
        for module, whole_module in zip(model.modules(), copied.modules(), strict=True):
            for name, buffer in module.named_buffers(recurse=False):  # not in the state dict
                setattr(whole_module, name, buffer)
        return copied

    def local(self, value: Tensor) -> Tensor:
        """Return this rank's shard of a tensor."""
        return value.to_local() if isinstance(value, DTensor) else value

    def gather(self, tree: Any, *, should_keep: bool) -> Any:
        """Copy the whole tensors of nested dicts and lists to host memory, one after the other.

        All ranks must call it. Those without `should_keep` get None for each tensor.
        """

        def gather_tensor(tensor: Tensor) -> Tensor | None:
            whole_tensor = _gather(tensor)
            return copy_to_host(whole_tensor) if should_keep else None

        return map_tensors(gather_tensor, tree)


def _gather(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value.detach()
