"""NVFP4 as published for training (arXiv 2509.25149): `kernels/quantize/nvfp4.py` has the rules.

Weights have one scale for 16 × 16 elements, so forward and backward see the same numbers. Output gradients are rounded
stochastically. Both operands of wgrad are rotated by a random Hadamard matrix along their tokens, which spreads
outliers over 16 of them. The paper keeps some layers in higher precision: --first-last-layers-bf16.

There is no GEMM for GPUs yet. A CPU emulates it: products are those of the decoded operands, with FP32 sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..device.device import UnsupportedDeviceError
from ..dtypes import E4M3, NV_BLOCK
from ..kernels import ops
from .format import Format, Quantized, Roles
from .tensorwise import Tensorwise


class _NVFP4(Format):
    """What blocks and tiles have in common. Scales are FP32, a block's times its matrix's."""

    size_multiple: ClassVar[int] = NV_BLOCK

    def __str__(self) -> str:
        return f"E2M1 per {self.shares}"

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
        product = ops.dequantize_nvfp4(a.payload, a.scale) @ ops.dequantize_nvfp4(b.payload, b.scale).t()
        for summand in (bias, addend):
            product = product if summand is None else product.add_(summand)
        out.copy_(product)

    def check_device(self, device: torch.device) -> None:
        if device.type != "cpu":
            raise UnsupportedDeviceError(
                "--fp8-recipe nvfp4 has no GEMM for GPUs yet, and a CPU emulates it: choose --fp8-recipe mxfp8 on "
                "Blackwell, blockwise on Hopper"
            )


@dataclass(frozen=True)
class Blocks(_NVFP4):
    """16 elements along K share a scale: FP32 [M, K / 16]. The columns, wgrad's operand, are rotated.

    Args:
        stochastic: rounding, of gradients.
    """

    stochastic: bool = False

    shares: ClassVar[str] = "1×16"

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
        payload = own = payload_t = scale_t = None
        if rowwise:
            payload, scales, total = ops.quantize_nvfp4(x, stochastic=self.stochastic)
            own = scales.float() * total
        if transposed:
            payload_t, scales, total = ops.quantize_nvfp4(x.t(), stochastic=self.stochastic, rotates=True)
            scale_t = scales.float() * total
        return Quantized(payload, payload_t, x.new_empty(0, dtype=torch.float32) if own is None else own, self, scale_t)

    def rows(self, operand: Quantized, part: slice) -> Quantized:
        return Quantized(operand.payload[part], None, operand.scale[part].contiguous(), self)

    def scale_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return rows, columns // NV_BLOCK

    def row_scales(self, operand: Quantized, step: int) -> Tensor:
        return operand.scale[::step]


@dataclass(frozen=True)
class Tiles(_NVFP4):
    """16 × 16 elements share a scale: FP32 [N / 16, K / 16]."""

    shares: ClassVar[str] = "16×16"
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
        payload, scales, total = ops.quantize_nvfp4(x, tiles=True)
        own = Quantized(payload, None, scales.float() * total, self)
        if not transposed:
            return own
        t = self.transpose(own)
        return Quantized(payload if rowwise else None, t.payload, own.scale, self, t.scale)

    def transpose(self, operand: Quantized) -> Quantized:
        return Quantized(operand.payload.t().contiguous(), None, operand.scale.t().contiguous(), self)

    def rows(self, operand: Quantized, part: slice) -> Quantized:
        raise AssertionError("rows of a tile share its scale")

    def scale_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return rows // NV_BLOCK, columns // NV_BLOCK

    def row_scales(self, operand: Quantized, step: int) -> Tensor:
        return operand.scale.repeat_interleave(NV_BLOCK, dim=0)[::step]


def roles(power_of_two: bool) -> Roles:
    """Scales are as published, whatever `power_of_two` says."""
    return Roles(
        input=Blocks(E4M3), weight=Tiles(E4M3), grad_output=Blocks(E4M3, stochastic=True), weight_grad=Tensorwise(E4M3)
    )
