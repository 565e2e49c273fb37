"""One scale a tensor: x and W in E4M3, output gradients in E5M2 (arXiv 2209.05433; FP8-LM, arXiv 2310.18313, section
2). The scale comes from the values, or is delayed: from amaxes of past steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..dtypes import E4M3, E5M2, FP8_GEMM_MULTIPLE, GEMM_BLOCK
from ..kernels import ops
from .format import Format, Quantized, Roles


@dataclass(frozen=True)
class Tensorwise(Format):
    """All elements share one scale, FP32 [1]."""

    shares: ClassVar[str] = "tensor"
    size_multiple: ClassVar[int] = FP8_GEMM_MULTIPLE
    takes_scale: ClassVar[bool] = True
    fuses: ClassVar[bool] = True
    shares_amax: ClassVar[bool] = True
    takes_row_scales: ClassVar[bool] = True
    transpose_keeps_scale: ClassVar[bool] = True
    takes_groups: ClassVar[bool] = True

    def cast(
        self,
        x: Tensor,
        scale: Tensor | None = None,
        *,
        amax_out: Tensor | None = None,
        rowwise: bool = True,
        transposed: bool = False,
    ) -> Quantized:
        if scale is None:
            payload, payload_t, scale = ops.quantize_current(
                x, self.dtype, power_of_two=self.power_of_two, rowwise=rowwise, transposed=transposed
            )
        else:
            payload, payload_t = ops.quantize_with_scale(
                x, scale, self.dtype, rowwise=rowwise, transposed=transposed, amax_out=amax_out
            )
        return Quantized(payload if rowwise else None, payload_t if transposed else None, scale, self)

    def cast_and_sum(
        self, x: Tensor, scale: Tensor | None = None, *, amax_out: Tensor | None = None, transposed: bool = False
    ) -> tuple[Quantized, Tensor]:
        payload, payload_t, sums, taken = ops.quantize_grad_output(
            x, self.dtype, scale=scale, power_of_two=self.power_of_two, amax_out=amax_out, transposed=transposed
        )
        columns = payload_t if transposed else None
        return Quantized(payload, columns, taken if scale is None else scale, self), sums

    def stored_weight(self, payload: Tensor, scale: Tensor, *, transposed: bool = False) -> Quantized:
        return Quantized(ops.transpose(payload) if transposed else payload, None, scale, self)

    def transpose(self, operand: Quantized) -> Quantized:
        return Quantized(ops.transpose(operand.payload), None, operand.scale, self)

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
        ops.scaled_mm_into_(
            out, a.payload, b.payload, a.scale, b.scale, bias=bias, use_fast_accum=use_fast_accum, addend=addend
        )

    def multiply(
        self, a: Quantized, b: Quantized, dtype: torch.dtype, *, bias: Tensor | None, use_fast_accum: bool
    ) -> Tensor:
        return ops.scaled_mm(
            a.payload, b.payload, a.scale, b.scale, bias=bias, out_dtype=dtype, use_fast_accum=use_fast_accum
        )

    def rows(self, operand: Quantized, part: slice) -> Quantized:
        return Quantized(operand.payload[part], None, operand.scale, self)

    def gather(self, operand: Quantized, groups: ops.Groups, *, rowwise: bool, transposed: bool) -> Quantized:
        payload, payload_t = ops.gather_rows(
            operand.payload,
            groups.source,
            groups.num_groups,
            groups.offsets,
            rowwise=rowwise,
            transposed=transposed,
        )
        return Quantized(payload if rowwise else None, payload_t if transposed else None, operand.scale, self)

    def scale_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return (1,)

    def row_scales(self, operand: Quantized, step: int) -> Tensor:
        rows, columns = operand.payload.shape
        return operand.scale.view(1, 1).expand(-(-rows // step), -(-columns // GEMM_BLOCK))


def roles(power_of_two: bool) -> Roles:
    """`power_of_two`: scales of inputs and output gradients are rounded up to powers of two."""
    return Roles(
        input=Tensorwise(E4M3, power_of_two),
        weight=Tensorwise(E4M3),
        grad_output=Tensorwise(E5M2, power_of_two),
        weight_grad=Tensorwise(E4M3),
    )
