"""Numbers of blocks, memory for the outputs of kernels, and outputs without values for the fake versions of operators.

Triton's own `cdiv` and `next_power_of_2` serve kernels too, and cost the host 3 µs a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def cdiv(n: int, block: int) -> int:
    """⌈n / block⌉."""
    return -(-n // block)


def next_power_of_2(n: int) -> int:
    """The least power of two that is not below `n` ≥ 1."""
    return 1 << (n - 1).bit_length()


def round_up(n: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `n`."""
    return cdiv(n, multiple) * multiple


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


def fp32(like: Tensor, *shape: int) -> Tensor:
    """FP32 of this shape on `like`'s device."""
    return like.new_empty(shape, dtype=torch.float32)


def payload_like(like: Tensor, shape: Sequence[int], dtype: torch.dtype, *, wanted: bool = True) -> Tensor:
    """A contiguous payload; empty if it is not `wanted`."""
    return like.new_empty(shape if wanted else (0,), dtype=dtype)


def layouts(x: Tensor, dtype: torch.dtype, *, rowwise: bool = True, transposed: bool = True) -> tuple[Tensor, Tensor]:
    """The payloads [M, K] and [K, M] of `x` [M, K]. Layouts that were not requested are empty."""
    rows, columns = x.shape
    return (
        payload_like(x, (rows, columns), dtype, wanted=rowwise),
        payload_like(x, (columns, rows), dtype, wanted=transposed),
    )


def taken_scale(like: Tensor, given: Tensor | None) -> Tensor:
    """The scale that a cast took, FP32 [1]; empty if it was `given`."""
    return fp32(like, 1 if given is None else 0)
