"""A matrix in FP8 as a GEMM takes it, and what its format allows.

FP8 GEMMs multiply matrices whose rows lie along the sum: a [M, K] · b [N, K]ᵀ. If two GEMMs sum over different
dimensions of a matrix, it needs two layouts: [M, K] and its transpose [K, M]. In some formats one layout is made from
the other. Blocks along the sum are cast separately for each layout (DeepSeek-V3, arXiv 2412.19437, section 3.3.2).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from ..dtypes import DTYPE_NAMES, FP8_GEMM_MULTIPLE, GEMM_BLOCK
from ..kernels import ops


class Granularity(Enum):
    """Which elements of a matrix [M, K] share a scale; scales are FP32 and dequantise."""

    TENSOR = "tensor"
    """All elements: [1]."""
    BLOCK = "1×128"
    """128 along K: [K / 128, M]."""
    TILE = "128×128"
    """128 along M by 128 along K: [⌈M / 128⌉, ⌈K / 128⌉ rounded up to a multiple of 4]."""


@dataclass(frozen=True, slots=True)
class Format:
    """How a matrix is held in FP8. `power_of_two`: scales are rounded up to powers of two.

    Attributes:
        has_one_scale: whether the whole matrix has one scale. Ranks that hold parts of the matrix then agree on its
            amax.
        transpose_keeps_scale: whether the transpose has the same payload elements, so that it can be made from the
            first layout.
        size_multiple: sizes along a GEMM's sum are multiples of this on every rank, so that no block crosses two
            ranks' parts.
    """

    dtype: torch.dtype
    granularity: Granularity = Granularity.TENSOR
    power_of_two: bool = False
    # Derived once: layers read them in every forward and backward.
    has_one_scale: bool = field(init=False, repr=False, compare=False)
    transpose_keeps_scale: bool = field(init=False, repr=False, compare=False)
    size_multiple: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        has_one_scale = self.granularity is Granularity.TENSOR
        object.__setattr__(self, "has_one_scale", has_one_scale)
        object.__setattr__(self, "transpose_keeps_scale", self.granularity is not Granularity.BLOCK)
        object.__setattr__(self, "size_multiple", FP8_GEMM_MULTIPLE if has_one_scale else GEMM_BLOCK)

    def __str__(self) -> str:
        rounding = ", powers of two" if self.power_of_two else ""
        return f"{DTYPE_NAMES[self.dtype]} per {self.granularity.value}{rounding}"


class Quantized:
    """x ≈ payload · scale.

    Attributes:
        payload: FP8 [M, K], or None. payload_t: FP8 [K, M], contiguous, or None.
        scale: FP32, of `payload`; its shape is `Granularity`'s.
        scale_t: FP32, of `payload_t`; only in formats with more than one scale.
    """

    __slots__ = ("format", "payload", "payload_t", "scale", "scale_t")

    # Both are Optional at run time. They are typed as Tensor, because callers only read the layout that they requested.
    payload: Tensor
    payload_t: Tensor

    def __init__(
        self,
        payload: Tensor | None,
        payload_t: Tensor | None,
        scale: Tensor,
        format: Format,
        scale_t: Tensor | None = None,
    ) -> None:
        self.payload, self.payload_t = payload, payload_t  # type: ignore[assignment]
        self.scale, self.scale_t, self.format = scale, scale_t, format

    @property
    def t(self) -> Quantized:
        """The transpose [K, M] without computing anything: its `payload` is this one's `payload_t`, perhaps None."""
        scale_t = self.scale_t
        if scale_t is None:
            return Quantized(self.payload_t, self.payload, self.scale, self.format)
        return Quantized(self.payload_t, self.payload, scale_t, self.format, self.scale)

    @property
    def shared_scale(self) -> Tensor | None:
        """The scale FP32 [1] that casts the same values to the same bits again; None if the values give the scales."""
        return self.scale if self.format.has_one_scale else None

    @property
    def has_transpose(self) -> bool:
        """Whether `payload_t` exists."""
        return self.payload_t is not None

    @property
    def rowwise(self) -> Quantized:
        """The same matrix without its transpose."""
        return Quantized(self.payload, None, self.scale, self.format)

    def transposed(self) -> Quantized:
        """The transpose [K, M] with its payload, which is made from this one's.

        Raises:
            ValueError: the transpose has scales of its own.
        """
        if self.has_transpose:
            return self.t
        if self.format.has_one_scale:
            return Quantized(ops.transpose(self.payload), None, self.scale, self.format)
        if not self.format.transpose_keeps_scale:
            raise ValueError(f"{self.format} has scales of its own for the transpose: cast the values in both layouts")
        return Quantized(*_transposed_tiles(self), self.format)

    def rows(self, part: slice) -> Quantized:
        """Some rows [m, K] of `payload`, as a matrix of their own."""
        scale = self.scale
        if self.format.granularity is Granularity.BLOCK:
            scale = scale[:, part].contiguous()
        assert self.format.granularity is not Granularity.TILE, "rows of a tile share its scale"
        return Quantized(self.payload[part], None, scale, self.format)


def quantize(x: Tensor, format: Format, *, rowwise: bool = True, transposed: bool = False) -> Quantized:
    """Cast `x` [M, K], any float dtype, with scales from its own values, in the requested layouts."""
    kind, dtype, power_of_two = format.granularity, format.dtype, format.power_of_two
    scale_t: Tensor | None = None
    if kind is Granularity.TENSOR:
        payload, payload_t, scale = ops.quantize_current(
            x, dtype, power_of_two=power_of_two, rowwise=rowwise, transposed=transposed
        )
    elif kind is Granularity.BLOCK:
        payload, scale, payload_t, scale_t, _ = ops.quantize_blocks(
            x.contiguous(), dtype, rowwise=rowwise, transposed=transposed, power_of_two=power_of_two
        )
    else:
        payload, scale, payload_t, scale_t = ops.quantize_tiles(
            x.contiguous(), dtype, rowwise=rowwise, transposed=transposed, power_of_two=power_of_two
        )
    return Quantized(payload if rowwise else None, payload_t if transposed else None, scale, format, scale_t)


def with_one_scale(payload: Tensor, scale: Tensor, format: Format) -> Quantized:
    """FP8 `payload` [N, K] with one scale FP32 [1] as a matrix of `format`. Exact: every tile has that scale."""
    if format.has_one_scale:
        return Quantized(payload, None, scale, format)
    assert format.granularity is Granularity.TILE, f"one scale is not blocks' ({format})"
    return Quantized(payload, None, scale.expand(_tile_scales_shape(*payload.shape)).contiguous(), format)


def multiply_into_(
    out: Tensor,
    a: Quantized,
    b: Quantized,
    *,
    bias: Tensor | None = None,
    use_fast_accum: bool = False,
    addend: Tensor | None = None,
) -> None:
    """out [M, N] = a [M, K] · b [N, K]ᵀ + bias [N] + addend [M, N], by the GEMM that takes their formats.

    Raises:
        ValueError: sizes that the GEMM does not take.
    """
    if a.format.granularity is Granularity.TENSOR:
        ops.scaled_mm_into_(
            out, a.payload, b.payload, a.scale, b.scale, bias=bias, use_fast_accum=use_fast_accum, addend=addend
        )
        return
    # cuBLASLt has no fast accumulation with block scales: it promotes each block's sum to FP32.
    ops.block_scaled_mm_into_(out, a.payload, b.payload, a.scale, b.scale, bias=bias, addend=addend)


def multiply(
    a: Quantized, b: Quantized, dtype: torch.dtype, *, bias: Tensor | None = None, use_fast_accum: bool = False
) -> Tensor:
    """a [M, K] · b [N, K]ᵀ + bias [N] in `dtype`, as `multiply_into_`."""
    if a.format.granularity is Granularity.TENSOR:
        return ops.scaled_mm(
            a.payload, b.payload, a.scale, b.scale, bias=bias, out_dtype=dtype, use_fast_accum=use_fast_accum
        )
    return ops.block_scaled_mm(a.payload, b.payload, a.scale, b.scale, bias=bias, out_dtype=dtype)


def _tile_scales_shape(rows: int, columns: int) -> tuple[int, int]:
    tiles = -(-columns // GEMM_BLOCK)
    return -(-rows // GEMM_BLOCK), -(-tiles // 4) * 4


def _transposed_tiles(operand: Quantized) -> tuple[Tensor, None, Tensor]:
    payload_t, scale_t = ops.transpose_tiles(operand.payload, operand.scale)
    return payload_t, None, scale_t
