"""Casts between torch's floats and payloads with a scale."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from fp8_megatron.kernels import ops

from ..dtype import Dtypes, QType
from ..dtype.dtypes import FP8_BITS
from .meta import ScalingMeta


def _measure(value: Tensor, meta: ScalingMeta, sync: bool) -> None:
    """Give `meta` the scale for `value`: from its amax, over the ranks of the group with `sync`."""
    in_time = meta.is_in_time_scaling()
    if in_time or sync:
        meta.amax[0] = value.abs().max()
    if sync and dist.is_initialized() and dist.get_world_size(meta.group) > 1:
        # A maximum over ranks may drop a NaN; inf is kept.
        newest = meta.amax[:1].nan_to_num_(nan=torch.inf, posinf=torch.inf)
        dist.all_reduce(newest, op=dist.ReduceOp.MAX, group=meta.group)
    if in_time or sync:
        meta.reset_scaling_factor()
    meta.scale_inv.copy_(meta.scale.reciprocal())


class TypeCast:
    """MS-AMP's casts. FP8 payloads are torch.uint8."""

    @staticmethod
    def cast_to_fp8(
        input: Tensor, meta: ScalingMeta, sync: bool = False, fuse_transpose: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Cast to `meta`'s FP8 format, clamped to its largest finite number.

        Args:
            input: any float dtype and shape. meta: gives the scale, or takes it from `input` (`is_in_time_scaling`).
            sync: take the amax over the ranks of ``meta.group``.
            fuse_transpose: return the transpose too; `input` is then a matrix.
        """
        _measure(input, meta, sync)
        rows = input.contiguous().view(-1, input.shape[-1]) if input.ndim > 1 else input.contiguous().view(1, -1)
        payload, payload_t = ops.quantize_with_scale(
            rows, meta.scale_inv.view(1), FP8_BITS[meta.qtype], transposed=fuse_transpose
        )
        bits = payload.view(torch.uint8).view(input.shape)
        return (bits, payload_t.view(torch.uint8)) if fuse_transpose else bits

    @staticmethod
    def cast_to_fp16(input: Tensor, meta: ScalingMeta, sync: bool = False) -> Tensor:
        """Cast to `meta`'s 16- or 32-bit format."""
        _measure(input, meta, sync)
        # A scale of one dimension keeps the product in FP32 where the scale exceeds FP16.
        return (input * meta.scale.view(1)).to(Dtypes.qtype_to_dtype[meta.qtype])

    @staticmethod
    def cast_from_fp8(input: Tensor, meta: ScalingMeta, otype: QType) -> Tensor:
        """Values of an FP8 payload in `otype`.

        Raises:
            ValueError: `input` is no payload of bytes.
        """
        if input.dtype != torch.uint8:
            raise ValueError(f"an FP8 payload is torch.uint8, not {input.dtype}: cast it with cast_to_fp8")
        values = input.view(FP8_BITS[meta.qtype]).to(torch.float32) * meta.scale_inv
        return values.to(Dtypes.qtype_to_dtype[otype])

    @staticmethod
    def cast_from_fp16(input: Tensor, meta: ScalingMeta, otype: QType) -> Tensor:
        """Values of a 16- or 32-bit payload in `otype`."""
        return (input * meta.scale_inv.view(1)).to(Dtypes.qtype_to_dtype[otype])

    cast_from_fp32 = cast_from_fp16
