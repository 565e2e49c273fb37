"""`grouped_mm` with scales of blocks in CUDA C++ (csrc/block_scaled_gemm.cu) on Hopper; `gemm_triton` asks here first.

Sums are added in Triton's order. An expert's last tile of 192 rows that has 64 or 128 takes less time, so experts' rows
need no other tiling.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..gemm.block_scaled_cuda import ALIGNMENT, TILINGS, WAVE_ROWS, compiled_kernel, map_of_a, map_of_b
from ..shapes import empty


def grouped_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offsets: Tensor) -> Tensor | None:
    """`gemm_reference.grouped_mm`; None if there is no kernel for it here."""
    addresses = a.data_ptr() | b.data_ptr() | scale_a.data_ptr()
    if scale_a.ndim != 2 or not len(a) or addresses % ALIGNMENT:
        return None
    kernel = compiled_kernel(a.get_device(), TILINGS[0], a.dtype, b.dtype, torch.bfloat16, True, True)
    if kernel is None:
        return None
    (rows, depth), (experts, columns, _) = a.shape, b.shape
    out = empty(rows, columns, torch.bfloat16, a.device)
    kernel.launch(
        _num_multiprocessors(a.get_device()),
        a.device,
        map_of_a(a.data_ptr(), rows, depth, WAVE_ROWS),
        map_of_b(b.data_ptr(), experts * columns, depth),
        scale_a.data_ptr(),
        scale_b.data_ptr(),
        0,
        0,
        out.data_ptr(),
        rows,
        columns,
        depth,
        offsets.data_ptr(),
        experts,
        *scale_b.stride(),
    )
    return out


@functools.cache
def _num_multiprocessors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
