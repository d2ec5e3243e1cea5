"""The SSRU of `nmt.model.ssru` over packed sentences.

The loop over time is a custom operator, so that `torch.compile` does not unroll it for each length.
On a CPU, the loop takes a tenth of the time of a parallel scan.
"""

# N tokens of packed sentences; B sentences, T tokens of the longest; D d_model

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from nmt.model.fast.packing import PackedContext
from nmt.model.ssru import Ssru


class FastSsru(Ssru):
    """`Ssru` that also takes packed sentences."""

    def forward(self, x: Tensor, context: object) -> Tensor:
        """Map (N, D) to (N, D).

        With a context that is not a `PackedContext`, see `Ssru.forward`.
        """
        if not isinstance(context, PackedContext):
            return super().forward(x, context)
        gates, candidates = self.project(x)  # (N, D) each
        packing = context.queries
        # padding follows the tokens of its sentence, so it does not affect their states
        states: Tensor = scan(packing.pad(gates), packing.pad(candidates))  # (B, T, D)
        return packing.unpad(torch.relu(states)).to(x.dtype)


def scan(gates: Tensor, candidates: Tensor) -> Tensor:
    """Compute c_t = f_t * c_{t-1} + (1 - f_t) * z_t for the gates f and candidates z, (B, T, D).

    Needs `register_operators`.
    """
    states: Tensor = torch.ops.nmt.ssru_scan(gates, candidates)
    return states


def _scan(gates: Tensor, candidates: Tensor) -> Tensor:
    """Compute `scan`; c_t = z_t + f_t * (c_{t-1} - z_t) is a linear interpolation."""
    states = torch.empty_like(candidates)
    state = torch.zeros_like(candidates[:, 0])
    steps = zip(gates.unbind(1), candidates.unbind(1), states.unbind(1), strict=True)
    for gate, candidate, out in steps:
        state = torch.lerp(candidate, state, gate, out=out)
    return states


def _scan_backward(
    grad: Tensor, gates: Tensor, candidates: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of gates and candidates for `grad`, the gradient of `states`."""
    # the gradient of c_t is the sum of `grad` at t and f_{t+1} times the gradient of c_{t+1}
    grad = grad.clone()
    grad_steps = grad.unbind(1)
    gate_steps = gates.unbind(1)
    for t in range(len(grad_steps) - 2, -1, -1):
        grad_steps[t].addcmul_(gate_steps[t + 1], grad_steps[t + 1])
    grad_gates = -candidates * grad
    grad_gates[:, 1:].addcmul_(states[:, :-1], grad[:, 1:])
    return grad_gates, torch.addcmul(grad, grad, gates, value=-1)


def _save_for_backward(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs, output)


def _compute_gradients(ctx: Any, grad: Tensor) -> Any:
    return torch.ops.nmt.ssru_scan_backward(grad, *ctx.saved_tensors)


def register_operators() -> None:
    """Register the operators of `scan`, unless they are. For models with SSRUs, from any thread."""
    with _REGISTRATION_LOCK:
        if not _LIBRARIES:
            _LIBRARIES.append(_make_library())


_REGISTRATION_LOCK = threading.Lock()
_LIBRARIES: list[Any] = []  # the operators exist as long as their library


def _make_library() -> Any:
    """Return a library with the operators of `scan`.

    `torch.library.custom_op` would import torch's compiler at the first call, which takes seconds.
    """
    library: Any = torch.library.Library("nmt", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("ssru_scan(Tensor gates, Tensor candidates) -> Tensor")
    library.define(
        "ssru_scan_backward(Tensor grad, Tensor gates, Tensor candidates, Tensor states)"
        " -> (Tensor, Tensor)"
    )
    library.impl("ssru_scan", _scan, "CompositeExplicitAutograd")
    library.impl("ssru_scan_backward", _scan_backward, "CompositeExplicitAutograd")
    torch.library.register_fake(
        "nmt::ssru_scan", lambda _, candidates: torch.empty_like(candidates), lib=library
    )
    torch.library.register_fake(
        "nmt::ssru_scan_backward",
        lambda _, gates, candidates, __: (torch.empty_like(gates), torch.empty_like(candidates)),
        lib=library,
    )
    torch.library.register_autograd(
        "nmt::ssru_scan", _compute_gradients, setup_context=_save_for_backward, lib=library
    )
    return library
