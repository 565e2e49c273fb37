"""128 elements along the sum share a scale, in a weight 128×128 elements (DeepSeek-V3, arXiv 2412.19437, section 3.3).

All roles are E4M3. Scales are FP32, in cuBLASLt's layouts (`kernels/quantize/blocks.py`). Hopper's GEMM takes blocks ×
blocks and blocks × tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..dtypes import E4M3, GEMM_BLOCK
from ..kernels import ops
from .format import Format, Quantized, Roles
from .tensorwise import Tensorwise


class _BlockScaled(Format):
    """What blocks and tiles have in common."""

    size_multiple: ClassVar[int] = GEMM_BLOCK

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
        # cuBLASLt has no fast accumulation with block scales: it promotes each block's sum to FP32.
        ops.block_scaled_mm_into_(out, a.payload, b.payload, a.scale, b.scale, bias=bias, addend=addend)

    def multiply(
        self, a: Quantized, b: Quantized, dtype: torch.dtype, *, bias: Tensor | None, use_fast_accum: bool
    ) -> Tensor:
        return ops.block_scaled_mm(a.payload, b.payload, a.scale, b.scale, bias=bias, out_dtype=dtype)

    def check_device(self, device: torch.device) -> None:
        ops.check_block_scaling(device)


@dataclass(frozen=True)
class Blocks(_BlockScaled):
    """128 elements along K share a scale: FP32 [K / 128, M]."""

    shares: ClassVar[str] = "1×128"
    fuses: ClassVar[bool] = True
    takes_groups: ClassVar[bool] = True
    scale_dims: ClassVar[tuple[int, int]] = (1, 0)

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
        return self._cast(x, rowwise=rowwise, transposed=transposed)[0]

    def cast_and_sum(
        self, x: Tensor, scale: Tensor | None = None, *, amax_out: Tensor | None = None, transposed: bool = False
    ) -> tuple[Quantized, Tensor]:
        assert scale is None, f"{self} takes no scale that was known before"
        return self._cast(x, transposed=transposed, column_sums=True)

    def _cast(
        self, x: Tensor, *, rowwise: bool = True, transposed: bool, column_sums: bool = False
    ) -> tuple[Quantized, Tensor]:
        payload, scale, payload_t, scale_t, sums = ops.quantize_blocks(
            x.contiguous(),
            self.dtype,
            rowwise=rowwise,
            transposed=transposed,
            column_sums=column_sums,
            power_of_two=self.power_of_two,
        )
        return Quantized(payload if rowwise else None, payload_t if transposed else None, scale, self, scale_t), sums

    def rows(self, operand: Quantized, part: slice) -> Quantized:
        return Quantized(operand.payload[part], None, operand.scale[:, part].contiguous(), self)

    def gather(self, operand: Quantized, groups: ops.Groups, *, rowwise: bool, transposed: bool) -> Quantized:
        payload, scale, payload_t, scale_t = ops.gather_blocks(
            operand.payload,
            operand.scale,
            groups.source,
            groups.num_groups,
            groups.offsets,
            rowwise=rowwise,
            transposed=transposed,
            power_of_two=self.power_of_two,
        )
        return Quantized(payload if rowwise else None, payload_t if transposed else None, scale, self, scale_t)

    def scale_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return -(-columns // GEMM_BLOCK), rows

    def row_scales(self, operand: Quantized, step: int) -> Tensor:
        return operand.scale.t()[::step]


@dataclass(frozen=True)
class Tiles(_BlockScaled):
    """128 along N by 128 along K share a scale: FP32 [⌈N / 128⌉, ⌈K / 128⌉ rounded up to a multiple of 4].

    Several matrices [G, N, K] have sizes in multiples of 128, and G in front of their scales' dimensions. An FP8 weight
    at rest is not rounded again: every tile takes the one scale of its matrix.
    """

    shares: ClassVar[str] = "128×128"
    transpose_keeps_scale: ClassVar[bool] = True

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
        payload, own, payload_t, scale_t = ops.quantize_tiles(
            x.contiguous(), self.dtype, rowwise=rowwise, transposed=transposed, power_of_two=self.power_of_two
        )
        return Quantized(payload if rowwise else None, payload_t if transposed else None, own, self, scale_t)

    def cast_matrices(self, x: Tensor, scales: Tensor | None, *, transposed: bool) -> Quantized:
        (num_matrices, rows, columns), whole = x.shape, self.cast(x.flatten(0, 1))
        payload, scale = whole.payload.view(x.shape), whole.scale.view(num_matrices, rows // GEMM_BLOCK, -1)
        if transposed:
            payload, scale = ops.transpose(payload), scale[:, :, : columns // GEMM_BLOCK].mT
        return Quantized(payload, None, scale, self)

    def stored_weight(self, payload: Tensor, scale: Tensor, *, transposed: bool = False) -> Quantized:
        if payload.ndim == 3:
            payload = ops.transpose(payload) if transposed else payload
            scales = scale[:, None, None].expand(len(payload), *self.scale_shape(*payload.shape[1:]))
            return Quantized(payload, None, scales, self)
        tiles = Quantized(payload, None, scale.expand(self.scale_shape(*payload.shape)).contiguous(), self)
        return self.transpose(tiles) if transposed else tiles

    def transpose(self, operand: Quantized) -> Quantized:
        payload_t, scale_t = ops.transpose_tiles(operand.payload, operand.scale)
        return Quantized(payload_t, None, scale_t, self)

    def rows(self, operand: Quantized, part: slice) -> Quantized:
        raise AssertionError("rows of a tile share its scale")

    def scale_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return -(-rows // GEMM_BLOCK), -(-columns // (4 * GEMM_BLOCK)) * 4

    def row_scales(self, operand: Quantized, step: int) -> Tensor:
        rows, columns = operand.payload.shape
        return operand.scale[:, : -(-columns // GEMM_BLOCK)].repeat_interleave(GEMM_BLOCK, dim=0)[:rows:step]


def roles(power_of_two: bool) -> Roles:
    """`power_of_two`: scales of all blocks and tiles are rounded up to powers of two."""
    blocks, tiles = Blocks(E4M3, power_of_two), Tiles(E4M3, power_of_two)
    return Roles(input=blocks, weight=tiles, grad_output=blocks, weight_grad=Tensorwise(E4M3))
