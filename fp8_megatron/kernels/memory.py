"""Memory for the outputs of kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

#: What torch's compiled code allocates with: of sizes, strides and dtype, on the current GPU, past the dispatcher.
_on_current_gpu: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor] | None = getattr(
    torch._C._dynamo.guards, "_empty_strided_cuda", None
)


def empty(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``torch.empty(rows, columns, …)``, which takes the host three times as long. An FP8 layer makes ten a step."""
    if _on_current_gpu is None or device.type != "cuda" or device.index != torch._C._cuda_getDevice():
        return torch.empty(rows, columns, dtype=dtype, device=device)
    return _on_current_gpu((rows, columns), (columns, 1), dtype)


def empty_vector(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``torch.empty(size, …)``, as `empty`."""
    if _on_current_gpu is None or device.type != "cuda" or device.index != torch._C._cuda_getDevice():
        return torch.empty(size, dtype=dtype, device=device)
    return _on_current_gpu((size,), (1,), dtype)
