"""MXFP8: 32 elements along the sum share a power-of-two scale of one byte (OCP Microscaling 1.0). For Blackwell.

All roles are E4M3. The scale is rounded up, so that nothing saturates: `kernels/quantize/mx.py` has the rule. A
transpose has other blocks, so a matrix is cast in both layouts, in one launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..dtypes import E4M3, MX_BLOCK
from ..kernels import ops
from .format import Format, Quantized, Roles
from .tensorwise import Tensorwise


@dataclass(frozen=True)
class MXFP8(Format):
    """32 elements along K share a scale: E8M0 [M, K / 32]."""

    shares: ClassVar[str] = "1×32"
    size_multiple: ClassVar[int] = MX_BLOCK
    scale_dtype: ClassVar[torch.dtype] = torch.float8_e8m0fnu

    def cast(
        self,
        x: Tensor,
        scale: Tensor | None = None,
        *,
        amax_out: Tensor | None = None,
        rowwise: bool = True,
        transposed: bool = False,
    ) -> Quantized:
        assert scale is None, f"{self} takes no scale that was known before"
        payload, own, payload_t, scale_t = ops.quantize_mx(x, self.dtype, rowwise=rowwise, transposed=transposed)
        return Quantized(payload if rowwise else None, payload_t if transposed else None, own, self, scale_t)

    def multiply_into_(
        self,
        out: Tensor,
        a: Quantized,
        b: Quantized,
        *,
        bias: Tensor | None = None,
        use_fast_accum: bool = False,
        addend: Tensor | None = None,
    ) -> None:
        ops.mx_mm_into_(out, a.payload, b.payload, a.scale, b.scale, bias=bias, addend=addend)

    def rows(self, operand: Quantized, part: slice) -> Quantized:
        return Quantized(operand.payload[part], None, operand.scale[part].contiguous(), self)

    def scale_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return rows, columns // MX_BLOCK

    def row_scales(self, operand: Quantized, step: int) -> Tensor:
        return operand.scale[::step].float()

    def check_device(self, device: torch.device) -> None:
        ops.check_mx(device)


def roles(power_of_two: bool) -> Roles:
    """All scales of blocks are powers of two, whatever `power_of_two` says."""
    blocks = MXFP8(E4M3, power_of_two=True)
    return Roles(input=blocks, weight=blocks, grad_output=blocks, weight_grad=Tensorwise(E4M3))
