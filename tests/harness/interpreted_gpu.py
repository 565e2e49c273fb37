"""A GPU that Triton's interpreter stands for: tests of Triton kernels for a GPU run on a CPU.

A tensor "on the GPU" is a `GPUTensor`, whose memory is the CPU's. The project's operators run their Triton variants on
it, interpreted; all other functions run on the CPU. What a GPU alone has (CUDA kernels, streams, graphs) is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from fp8_megatron.kernels import registration

from . import interpreted_triton

_GPU = torch.device("cuda", 0)


class GPUTensor(Tensor):
    """A tensor on the GPU, as a test sees it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _called(func, args, kwargs or {}, is_on_gpu=True)


class _Calls(TorchFunctionMode):
    """Sees the functions that make a tensor on a GPU, or move one there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_on_gpu = any(issubclass(kind, GPUTensor) for kind in types)
        return _called(func, args, kwargs or {}, is_on_gpu=is_on_gpu)


def _called(func: Any, args: Any, kwargs: dict[str, Any], *, is_on_gpu: bool) -> Any:
    if func is Tensor.device.__get__:
        return _GPU if is_on_gpu else torch.device("cpu")
    if func is Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
        return is_on_gpu
    moved = _moved_to(func, args, kwargs)
    if moved is not None:
        is_on_gpu = moved.type == "cuda"
        args, kwargs = _without_device(args, kwargs)
        if func is Tensor.cuda or func is Tensor.cpu:
            func, args, kwargs = Tensor.clone, args[:1], {}
    args, kwargs = tree_map_only(GPUTensor, lambda x: x.as_subclass(Tensor), (args, kwargs))
    with torch._C.DisableTorchFunction():
        outputs = _variant(func)(*args, **kwargs) if is_on_gpu else func(*args, **kwargs)
    return tree_map_only(Tensor, lambda x: x.as_subclass(GPUTensor), outputs) if is_on_gpu else outputs


def _moved_to(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.device | None:
    """The device that a call names."""
    if func is Tensor.cuda:
        return _GPU
    if func is Tensor.cpu:
        return torch.device("cpu")
    named = [kwargs["device"]] if kwargs.get("device") is not None else []
    if func is Tensor.to:
        named += [a for a in args[1:] if isinstance(a, (str, torch.device))]
    return torch.device(named[0]) if named else None


def _without_device(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    kept = tuple(a for place, a in enumerate(args) if place == 0 or not isinstance(a, (str, torch.device)))
    return kept, {name: value for name, value in kwargs.items() if name != "device"}


def _variant(func: Any) -> Callable[..., Any]:
    """The Triton variant of an operator of this project; other functions stay."""
    if getattr(func, "namespace", None) != registration.NAMESPACE:
        return func
    declared = registration.operators()[func._schema.name.partition("::")[2]]
    if declared.gpu_module is None or not declared.gpu_module.endswith("triton"):
        pytest.skip(f"{declared.name} has no Triton variant")
    return declared.bundled(declared.gpu_variant())


def install() -> None:
    """For the whole process: `torch.cuda` is there, and tensors can be made on it."""
    np.seterr(all="ignore")
    interpreted_triton.install()
    torch.cuda.is_available = lambda: True
    torch.cuda.synchronize = lambda *_: None
    _Calls().__enter__()
