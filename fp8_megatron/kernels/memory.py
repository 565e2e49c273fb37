"""Memory for the outputs of kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from . import launch_list

#: What torch's compiled code allocates with: of sizes, strides and dtype, on the current GPU, past the dispatcher.
_on_current_gpu: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor] | None = getattr(
    torch._C._dynamo.guards, "_empty_strided_cuda", None
)


def empty(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``torch.empty(rows, columns, …)``, which takes the host three times as long. An FP8 layer makes ten a step."""
    if _on_current_gpu is None or device.type != "cuda" or device.index != torch._C._cuda_getDevice():
        if launch_list.running is None:
            return torch.empty(rows, columns, dtype=dtype, device=device)
        return launch_list.allocates(partial(_allocation, device), dtype, (rows, columns))
    if launch_list.running is None:
        return _on_current_gpu((rows, columns), (columns, 1), dtype)
    return launch_list.allocates(_allocation_on_current_gpu, dtype, (rows, columns))


def empty_vector(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``torch.empty(size, …)``, as `empty`."""
    if _on_current_gpu is None or device.type != "cuda" or device.index != torch._C._cuda_getDevice():
        if launch_list.running is None:
            return torch.empty(size, dtype=dtype, device=device)
        return launch_list.allocates(partial(_allocation, device), dtype, (size,))
    if launch_list.running is None:
        return _on_current_gpu((size,), (1,), dtype)
    return launch_list.allocates(_allocation_on_current_gpu, dtype, (size,))


def _allocation(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> Callable[[], Tensor]:
    """What makes a tensor of `shape`."""
    return partial(_empty, shape, dtype, device)


def _allocation_on_current_gpu(dtype: torch.dtype, shape: tuple[int, ...]) -> Callable[[], Tensor]:
    assert _on_current_gpu is not None
    strides = tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))
    return partial(_on_current_gpu, shape, strides, dtype)


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)
