"""An exponential moving average of the weights, kept beside the model that is trained.

It knows neither the optimizer nor files: the trainer says when an update is done, and stores what
`state_dict` returns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


class WeightAverage:
    """After update t it is d * average + (1 - d) * weights with d = min(decay, t / (t + 9)).

    The lower d of the first updates makes it forget the random weights that training starts from,
    as in Marian (Junczys-Dowmunt et al., 2018). Averages of weights: Polyak and Juditsky (1992).
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.num_updates = 0
        self._weights = _copy(dict(model.named_parameters()))  # a shared matrix comes once

    def update(self, model: nn.Module) -> None:
        """Take in the weights of `model`, of which one more update is done."""
        self.num_updates += 1
        decay = min(self.decay, self.num_updates / (self.num_updates + 9))
        average, weights = list(self._weights.values()), list(model.parameters())
        average_in_place = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        average_in_place(average, weights, self.num_updates)

    def weights(self) -> dict[str, Tensor]:
        """Return the average under the names of the model's `state_dict`; later updates change
        these tensors.
        """
        return self._weights

    @contextmanager
    def in_place_of(self, model: nn.Module) -> Iterator[None]:
        """Give `model` the average for a while, and its own weights back to the bit."""
        trained = _copy(dict(model.named_parameters()))
        _fill(dict(model.named_parameters()), self._weights)
        try:
            yield
        finally:
            _fill(dict(model.named_parameters()), trained)

    def state_dict(self) -> dict[str, Any]:
        """Return all that `load_state_dict` needs, as tensors and primitives."""
        return {"num_updates": self.num_updates, "weights": self._weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where the average with this `state_dict` was."""
        self.num_updates = state["num_updates"]
        _fill(self._weights, state["weights"])


def _copy(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


@torch.no_grad()
def _fill(targets: dict[str, Tensor], sources: dict[str, Tensor]) -> None:
    for name, target in targets.items():
        target.copy_(sources[name])
