"""Adding to an FP8 tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from ...common.dtype import Dtypes
from ...common.tensor import ScalingMeta, TypeCast


class Arithmetic:
    """MS-AMP's sums with FP8 payloads."""

    @staticmethod
    @torch.no_grad()
    def add_to_fp8(fp8_tensor: Tensor, meta: ScalingMeta, other: Tensor) -> None:
        """Add `other` to an FP8 payload in place, with the scale of the sum.

        Each call rounds to FP8. fp8_megatron's own optimizer never adds gradients in FP8.

        Args:
            fp8_tensor: torch.uint8, any shape. meta: its scale, which is updated. other: any float dtype, that shape.

        Raises:
            ValueError: the payload or its format is not FP8.
        """
        if not Dtypes.is_fp8_qtype(meta.qtype):
            raise ValueError(f"add_to_fp8 adds to FP8, not to {meta.qtype.name}")
        total = TypeCast.cast_from_fp8(fp8_tensor, meta, Dtypes.dtype_to_qtype[other.dtype]) + other
        fp8_tensor.copy_(TypeCast.cast_to_fp8(total, meta))
