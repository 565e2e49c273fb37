"""The product of two FP8 matrices of any size."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8_megatron.dtypes import FP8_GEMM_MULTIPLE
from fp8_megatron.kernels import ops

from ...common.dtype import Dtypes, QType
from ...common.dtype.dtypes import FP8_BITS
from ...common.tensor import ScalingTensor


class Gemm:
    """MS-AMP's FP8 GEMM."""

    @staticmethod
    def _round2times(value: int, base: int) -> int:
        """`value` rounded up to a multiple of `base`."""
        return -(-value // base) * base

    @classmethod
    @torch.no_grad()
    def fp8_gemm(
        cls,
        mat_a: ScalingTensor,
        mat_b: ScalingTensor,
        out_qtype: QType,
        bias: Tensor | None = None,
        accumulate: bool = False,
        out: Tensor | None = None,
        use_split_accumulator: bool = False,
    ) -> Tensor:
        """B·Aᵀ [N, M] of A [M, K] and B [N, K] in FP8.

        Args:
            out_qtype: the result's format, of 16 or 32 bits.
            bias: [M], added to every row.
            accumulate: add to `out`.
            out: takes the result, [N, M].
            use_split_accumulator: sum in FP32 throughout, at less speed.
        """
        rows_b, rows_a = mat_b.shape[0], mat_a.shape[0]
        product = ops.scaled_mm(
            cls._padded(mat_b),
            cls._padded(mat_a),
            mat_b.meta.scale_inv.view(1),
            mat_a.meta.scale_inv.view(1),
            out_dtype=Dtypes.qtype_to_dtype[out_qtype],
            use_fast_accum=not use_split_accumulator,
        )[:rows_b, :rows_a]
        if bias is not None:
            product = product + bias.to(product.dtype)
        if out is None:
            return product.contiguous()
        return out.add_(product) if accumulate else out.copy_(product)

    @classmethod
    def _padded(cls, matrix: ScalingTensor) -> Tensor:
        """The payload with zeros up to sizes that the GEMM takes."""
        rows, columns = (cls._round2times(size, FP8_GEMM_MULTIPLE) for size in matrix.shape)
        padded = matrix.pad((0, columns - matrix.shape[1], 0, rows - matrix.shape[0]))
        return padded.value.contiguous().view(FP8_BITS[matrix.qtype])
