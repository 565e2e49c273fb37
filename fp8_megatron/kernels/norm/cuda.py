"""`reference.norm` on a GPU, torch's own kernel, and `norm_backward_quantize`: one launch of
csrc/norm_backward_quantize.cu, or two of Triton kernels.

The CUDA kernel needs Hopper's bulk copies and its shared memory. On other GPUs, and for row lengths that the kernel
does not take, the norm's backward and the cast of its result are two launches.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache

import torch
from torch import Tensor

from ...dtypes import E5M2
from ..extension import ExtensionError, Kernel, compile_source
from ..quantize import grad_output_triton
from ..quantize.triton import no_values, sum_of_programs
from . import triton as norm_triton
from .cuda_plan import NUM_SUMS, plan

logger = logging.getLogger(__name__)

_SOURCE, _FUNCTION = "norm_backward_quantize.cu", "norm_backward_quantize"
_PARAMETERS = [*[ctypes.c_uint64] * 13, ctypes.c_long]
_FIRST_CAPABILITY = (9, 0)
#: Alignment of every operand in bytes, for vectors and bulk copies.
_ALIGNMENT = 16


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, rms: bool) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.norm` in torch's kernel: one launch, which reads x once and keeps FP32 statistics."""
    columns, weight = (x.shape[1],), weight.to(x.dtype)
    if rms:
        y, rstd = torch.ops.aten._fused_rms_norm(x, columns, weight, eps)
        return y, no_values(torch.float32, x.device), rstd.view(-1)
    y, mean, rstd = torch.native_layer_norm(x, columns, weight, None if bias is None else bias.to(x.dtype), eps)
    return y, mean.view(-1), rstd.view(-1)


def norm_backward_quantize(
    grad: Tensor,
    residual_grad: Tensor | None,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    dtype: torch.dtype,
    has_bias: bool,
    scale: Tensor,
    amax_out: Tensor | None,
    transposed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`reference.norm_backward_quantize`: one launch, and a second that adds up the blocks' column sums.

    Raises:
        ValueError: the number of rows is not a multiple of 4, or of columns not a multiple of 16.
    """
    T, columns = x.shape
    kernel = None
    if x.dtype == weight.dtype == torch.bfloat16 and dtype == E5M2:
        kernel = _kernel(
            x.device.index, columns, len(grad), transposed, mean.numel() == 0, has_bias, residual_grad is not None
        )
    x, grad, weight = x.contiguous(), grad.contiguous(), weight.contiguous()
    residual_grad = None if residual_grad is None else residual_grad.contiguous()
    residual = 0 if residual_grad is None else residual_grad.data_ptr()
    addresses = grad.data_ptr() | residual | x.data_ptr() | weight.data_ptr()
    if kernel is None or not T or T % kernel.tile_rows or addresses % _ALIGNMENT:
        operands = (grad, residual_grad, x, weight, mean, rstd, has_bias)
        return _apart(operands, dtype, scale, amax_out, transposed)
    grad_x = torch.empty_like(x)
    payload = torch.empty((T, columns), dtype=dtype, device=x.device)
    payload_t = torch.empty((columns, T), dtype=dtype, device=x.device) if transposed else no_values(dtype, x.device)
    blocks = min(T // kernel.tile_rows, norm_triton.num_multiprocessors(x.device.index))
    sums = torch.empty((NUM_SUMS, blocks, columns), dtype=torch.float32, device=x.device)
    kernel.launch(
        blocks,
        x.device,
        grad.data_ptr(),
        residual,
        x.data_ptr(),
        weight.data_ptr(),
        mean.data_ptr(),
        rstd.data_ptr(),
        scale.data_ptr(),
        grad_x.data_ptr(),
        payload.data_ptr(),
        payload_t.data_ptr(),
        sums.data_ptr(),
        0 if amax_out is None else amax_out.data_ptr(),
        0 if amax_out is None or amax_out.numel() == 1 else amax_out.data_ptr() + amax_out.element_size(),
        T,
    )
    grad_weight, grad_bias, column_sums = sum_of_programs(sums).unbind()
    return grad_x, grad_weight, grad_bias if has_bias else sums.new_empty(0), payload, payload_t, column_sums


def _apart(
    operands: tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor, bool],
    dtype: torch.dtype,
    scale: Tensor,
    amax_out: Tensor | None,
    transposed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    grads = norm_triton.norm_backward(*operands)
    payload, payload_t, sums, _ = grad_output_triton.quantize_grad_output(
        grads[0], dtype, scale, False, amax_out, transposed
    )
    return *grads, payload, payload_t, sums


class _NormKernel(Kernel):
    tile_rows = 0


@cache
def _kernel(
    index: int, columns: int, parts: int, transposed: bool, rms: bool, has_bias: bool, has_residual: bool
) -> _NormKernel | None:
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    most = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    chosen = plan(columns, parts, transposed=transposed, shared_bytes=most)
    if capability < _FIRST_CAPABILITY or chosen is None:
        return None
    macros = chosen.macros(rms=rms, has_bias=has_bias, has_residual=has_residual)
    try:
        with torch.cuda.device(index):
            kernel = _NormKernel(
                compile_source(_SOURCE, macros, capability),
                _FUNCTION,
                threads=chosen.threads,
                shared_bytes=chosen.shared_bytes,
                parameters=_PARAMETERS,
            )
    except ExtensionError as error:
        logger.warning("a norm's backward and the cast of its gradient are two launches instead of one: %s", error)
        return None
    kernel.tile_rows = chosen.tile_rows
    return kernel
