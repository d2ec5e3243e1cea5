"""A simulated GPU that computes on the CPU, refuses tensors of two devices, and counts waits.

Its tensors are `DeviceTensor`s: Python sees the device `cuda:0`, autograd sees `meta`, which needs
no driver, and kernels get the CPU tensor inside. So values are real, and code takes the branches
for a GPU. Calls that would wait for a GPU are counted, as are copies between the devices.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import nmt
from nmt.model.fast import packing

GPU = torch.device("cuda", 0)
META = torch.device("meta")
_ROOT = str(Path(nmt.__file__).parent)
# their CUDA kernels read back how large the result is, or whether arguments are valid
_READING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "bincount", "_unique2"}
_READING |= {"unique_consecutive", "unique_dim", "repeat_interleave"}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}  # by booleans, as `nonzero`


def replaced(tree: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to all objects of type `kind` in nested lists, tuples and dicts."""
    if isinstance(tree, kind):
        return change(tree)
    if type(tree) is dict:
        return {key: replaced(value, kind, change) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)([replaced(x, kind, change) for x in tree])
    return tree


class DeviceTensor(Tensor):
    """A tensor on the device; `inner` has its values."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, kind: torch.device) -> DeviceTensor:
        options: Any = {"dtype": inner.dtype, "device": kind, "strides": inner.stride()}
        tensor: Any = torch.Tensor._make_wrapper_subclass(cls, inner.shape, **options)
        tensor.inner = inner
        return tensor

    device = property(lambda self: GPU)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]

    def __repr__(self, **_: Any) -> str:
        return f"DeviceTensor({self.inner})"

    __torch_dispatch__ = None  # type: ignore[assignment]  # a mode does it


class Device(TorchDispatchMode):
    """Runs calls on the device; counts waits and copies by their function in nmt/."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or the compiler would be imported

    def __init__(self, kind: torch.device) -> None:
        super().__init__()
        self.kind = kind  # that C++ knows the tensors by
        self.waits: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self.see: Callable[[str, Any], None] = lambda name, result: None  # every call

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = dict(kwargs or {})
        if _can_decompose(func):  # which inference mode does not decompose
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        name = func._schema.name.removeprefix("aten::")
        tensors: list[Tensor] = []
        replaced((args, kwargs), Tensor, tensors.append)
        device_tensors = [x for x in tensors if isinstance(x, DeviceTensor)]
        to = kwargs.get("device")
        goes_there = bool(device_tensors) if to is None else torch.device(to).type != "cpu"
        if name == "_has_compatible_shallow_copy_type":
            return False
        if name == "_to_copy":
            self._count_copy(args[0], goes_there, kwargs.get("non_blocking"))
        elif name == "copy_":
            goes_there = isinstance(args[0], DeviceTensor)
            self._count_copy(args[1], goes_there, len(args) > 2 and args[2])
        elif device_tensors and any(x.dim() and not isinstance(x, DeviceTensor) for x in tensors):
            raise RuntimeError(f"{func} with tensors of two devices, at {place()}")
        elif device_tensors and (
            name in _READING or (name in _INDEXING and _has_booleans(args[1]))
        ):
            self.waits[f"{place()}: {name}"] += 1
        if to is not None:
            kwargs["device"] = torch.device("cpu")
        plain, named = replaced((args, kwargs), DeviceTensor, lambda x: x.inner)
        result = func(*plain, **named)
        self.see(name, result)
        if not goes_there:
            return result
        changed = {id(x.inner): x for x in device_tensors}  # in-place results keep their wrapper

        def wrap(x: Tensor) -> Tensor:
            # the wrapper does not carry the bit of a lazy conjugate
            return changed[id(x)] if id(x) in changed else DeviceTensor(x.resolve_conj(), self.kind)

        with torch.inference_mode(False):  # views of normal tensors
            return replaced(result, Tensor, wrap)

    def _count_copy(self, origin: Tensor, goes_there: bool, is_asynchronous: Any) -> None:
        if goes_there == isinstance(origin, DeviceTensor):
            return
        copy_place = f"{place()}: {'to' if goes_there else 'from'} the device"
        self.copies[copy_place] += 1
        # a GPU copies asynchronously from page-locked memory only
        if not (goes_there and is_asynchronous and hasattr(origin, "is_pinned_here")):
            self.waits[copy_place] += 1


@functools.cache
def _can_decompose(func: Any) -> bool:
    return bool(func._can_decompose())


def _has_booleans(indices: Any) -> bool:
    return any(getattr(index, "dtype", None) is torch.bool for index in indices)


def place() -> str:
    """Return the innermost running function of nmt/, except in transfer.py."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        name = frame.f_code.co_name
        if path.startswith(_ROOT) and not path.endswith("transfer.py") and "<" not in name:
            return f"{Path(path).stem}.{name}"
        frame = frame.f_back
    return "outside nmt"


def _attend_as_there(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `attend` with the memory layout of GPU kernels, (B, T, H, d)."""

    def call(*args: Any, **named: Any) -> Tensor:
        heads = attend(*args, **named).transpose(1, 2)
        return heads.clone(memory_format=torch.contiguous_format).transpose(1, 2)

    return call


class _Names(TorchFunctionMode):
    """Renames the device for torch, and implements calls without kernels."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.Tensor.is_pinned:
            return hasattr(args[0], "is_pinned_here")
        if func is torch.Tensor.pin_memory and isinstance(args[0], DeviceTensor):
            raise RuntimeError(f"cannot pin a tensor of the device, at {place()}")
        if func is torch.Tensor.pin_memory:
            pinned = args[0].clone()
            pinned.is_pinned_here = True
            return pinned
        if func is torch.Tensor.tolist and isinstance(args[0], DeviceTensor):
            return args[0].cpu().tolist()
        if func is torch.Tensor.__getitem__ and isinstance(args[0], DeviceTensor):
            return _part(*args)

        def rename(device: torch.device) -> torch.device:
            return META if device.type == "cuda" else device

        args, kwargs = replaced((args, kwargs or {}), torch.device, rename)
        if func is torch.tensor and kwargs.get("device") == META:
            del kwargs["device"]
            return func(*args, **kwargs).to(META)
        return func(*args, **kwargs)


def _part(x: Tensor, key: Any) -> Tensor:
    """Index with slices and None, for which torch would ask the driver."""
    keys = key if isinstance(key, tuple) else (key,)
    if not all(k is None or (isinstance(k, slice) and k.step is None) for k in keys):
        return x.__getitem__(key)
    for dim, k in enumerate(keys):
        x = x.unsqueeze(dim) if k is None else torch.ops.aten.slice(x, dim, k.start, k.stop)
    return x


@contextmanager
def a_device(*, has_autograd: bool = True) -> Iterator[Device]:
    """Simulate the device in the block; without autograd, autocast follows the rules of CUDA."""
    answers = {"is_bf16_supported": True, "max_memory_allocated": 1}
    answers |= {"mem_get_info": (1 << 40, 1 << 40)}
    answers |= {"reset_peak_memory_stats": None, "get_device_capability": (7, 5)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
        for name, answer in answers.items():
            patch.setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
        name = "scaled_dot_product_attention"
        patch.setattr(F, name, _attend_as_there(getattr(F, name)))
        # which would import the compiler
        patch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: None)
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        try:
            with Device(META if has_autograd else GPU) as device, _Names():
                yield device
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(False)
            packing.find_flash_attention.cache_clear()
