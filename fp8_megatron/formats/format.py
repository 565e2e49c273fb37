"""A matrix in FP8 as a GEMM takes it (`Quantized`), and its `Format`, which casts, transposes and multiplies it.

FP8 GEMMs multiply matrices whose rows lie along the sum: a [M, K] · b [N, K]ᵀ. If two GEMMs sum over different
dimensions of a matrix, it needs two layouts: [M, K] and its transpose [K, M]. In some formats one layout is made from
the other. Blocks along the sum are cast separately for each layout (DeepSeek-V3, arXiv 2412.19437, section 3.3.2).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..dtypes import DTYPE_NAMES
from ..kernels import ops


@dataclass(frozen=True)
class Format(ABC):
    """How a matrix [M, K] is held in FP8. Layers ask it what it allows, and call it for what it does.

    Args:
        dtype: of the payload.
        power_of_two: scales are rounded up to powers of two.

    Attributes:
        shares: what shares a scale, in the layer's text.
        size_multiple: sizes along a GEMM's sum are multiples of this on every rank, so that no block crosses two
            ranks' parts.
        takes_scale: a matrix can be cast with a scale that was known before: a delayed one, or one from the amax that
            the optimizer took of a weight.
        fuses: kernels that compute and cast in one pass write it: a norm, an activation and its gradient. For the
            others the result is computed in 16 bits (`quantization.unfused`) and then cast.
        shares_amax: ranks that hold parts of a matrix agree on its amax.
        takes_row_scales: each row of an output gradient may have a scale beside the format's own, as of an LM head.
        transpose_keeps_scale: the transpose has the same payload elements, so that it can be made from the first
            layout.
        takes_groups: rows can be gathered into groups, each of which is multiplied with a matrix of its own (`gather`,
            `multiply_groups`).
        scale_dims: the dimensions of the scales along the rows and along the columns.
    """

    dtype: torch.dtype
    power_of_two: bool = False

    shares: ClassVar[str]
    size_multiple: ClassVar[int]
    takes_scale: ClassVar[bool] = False
    fuses: ClassVar[bool] = False
    shares_amax: ClassVar[bool] = False
    takes_row_scales: ClassVar[bool] = False
    transpose_keeps_scale: ClassVar[bool] = False
    takes_groups: ClassVar[bool] = False
    scale_dims: ClassVar[tuple[int, int]] = (0, 1)
    scale_dtype: ClassVar[torch.dtype] = torch.float32

    def __str__(self) -> str:
        rounding = ", powers of two" if self.power_of_two else ""
        return f"{DTYPE_NAMES[self.dtype]} per {self.shares}{rounding}"

    @abstractmethod
    def cast(
        self,
        x: Tensor,
        scale: Tensor | None = None,
        *,
        amax_out: Tensor | None = None,
        rowwise: bool = True,
        transposed: bool = False,
    ) -> Quantized:
        """Cast `x` [M, K], any float dtype, in the requested layouts.

        Args:
            scale: FP32 [1], if `takes_scale`; None: the values give the scales.
            amax_out: FP32 [1], raised to the amax of the values; only with a given scale.
        """

    def cast_and_sum(
        self, x: Tensor, scale: Tensor | None = None, *, amax_out: Tensor | None = None, transposed: bool = False
    ) -> tuple[Quantized, Tensor]:
        """`cast` in the row layout, or in both, and the sums of the columns of `x`, FP32 [K]."""
        cast = self.cast(x, scale, amax_out=amax_out, transposed=transposed)
        return cast, x.sum(dim=0, dtype=torch.float32)

    def cast_matrices(self, x: Tensor, scales: Tensor | None, *, transposed: bool) -> Quantized:
        """Cast the matrices of a weight [G, N, K], or with `transposed` their transposes [G, K, N].

        Args:
            scales: FP32 [G], if `takes_scale`; None: the values give the scales.
        """
        own = [None] * len(x) if scales is None else scales.split(1)
        casts = [
            self.cast(matrix, scale, rowwise=not transposed, transposed=transposed)
            for matrix, scale in zip(x, own, strict=True)
        ]
        casts = [cast.t for cast in casts] if transposed else casts
        payload = torch.stack([cast.payload.view(torch.uint8) for cast in casts])  # a CPU does not stack FP8
        return Quantized(payload.view(self.dtype), None, torch.cat([cast.scale for cast in casts]), self)

    def stored_weight(self, payload: Tensor, scale: Tensor, *, transposed: bool = False) -> Quantized:
        """A weight at rest, FP8 [N, K] or [G, N, K] with a scale a matrix, FP32 [1] or [G], in this format; with
        `transposed` its transpose, [K, N] or [G, K, N]."""
        cast = self.cast(ops.decode(payload, scale), rowwise=not transposed, transposed=transposed)
        return cast.t if transposed else cast

    def transpose(self, operand: Quantized) -> Quantized:
        """The transpose [K, M] with its payload, made from that of `operand` [M, K].

        Raises:
            ValueError: the transpose has scales of its own.
        """
        raise ValueError(f"{self} has scales of its own for the transpose: cast the values in both layouts")

    @abstractmethod
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
        """See `Quantized.multiply_into_`; `a` has this format."""

    def multiply(
        self, a: Quantized, b: Quantized, dtype: torch.dtype, *, bias: Tensor | None, use_fast_accum: bool
    ) -> Tensor:
        """See `Quantized.multiply`; `a` has this format."""
        out = torch.empty((a.payload.shape[0], b.payload.shape[0]), dtype=dtype, device=a.payload.device)
        self.multiply_into_(out, a, b, bias=bias, use_fast_accum=use_fast_accum)
        return out

    @abstractmethod
    def rows(self, operand: Quantized, part: slice) -> Quantized:
        """Some rows [m, K] of the row layout, as a matrix of their own."""

    def gather(self, operand: Quantized, groups: ops.Groups, *, rowwise: bool, transposed: bool) -> Quantized:
        """See `Quantized.gather`; in formats that take groups.

        Raises:
            ValueError: this one does not.
        """
        raise ValueError(f"{self} has no products of rows in groups")

    def multiply_groups(self, a: Quantized, weight: Quantized, offsets: Tensor) -> Tensor:
        """See `Quantized.multiply_groups`; `a` has this format."""
        return ops.grouped_mm(a.payload, weight.payload, a.scale, weight.scale, offsets)

    def write_wgrad_of_groups_(
        self, out: Tensor, g_t: Quantized, x_t: Quantized, offsets: Tensor, *, scales: Tensor | None, adds: bool
    ) -> None:
        """See `Quantized.write_wgrad_of_groups_`; `g_t` has this format."""
        operands = (g_t.payload, x_t.payload, g_t.scale, x_t.scale, offsets)
        if scales is None:
            ops.grouped_wgrad_(out, *operands, adds=adds)
        else:
            ops.grouped_wgrad_to_fp8_(out, scales, *operands)

    def joined(self, parts: Sequence[Quantized], dim: int) -> Quantized:
        """The row layouts of matrices with scales of their own, below each other (`dim` 0) or beside each other (1)."""
        # As bytes, because not every device can concatenate FP8.
        payload = torch.cat([part.payload.view(torch.uint8) for part in parts], dim).view(self.dtype)
        return Quantized(payload, None, torch.cat([part.scale for part in parts], self.scale_dims[dim]), self)

    @abstractmethod
    def scale_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """The shape of the scales of a matrix [rows, columns]."""

    @abstractmethod
    def row_scales(self, operand: Quantized, step: int) -> Tensor:
        """The scales of every `step`-th row as `ops.measure_cast_` takes them, FP32 [⌈M / step⌉, ·]."""

    def check_device(self, device: torch.device) -> None:  # noqa: B027 (most run on every GPU with FP8)
        """Refuse a GPU that has no GEMM of this format; a CPU runs the specification.

        Raises:
            UnsupportedDeviceError: with what it needs.
        """

    def shared_scale(self, operand: Quantized) -> Tensor | None:
        """See `Quantized.shared_scale`."""
        return operand.scale if self.takes_scale else None


class Roles(NamedTuple):
    """The format of each operand of a linear layer, by GEMM role."""

    input: Format
    weight: Format
    grad_output: Format
    weight_grad: Format


class Quantized:
    """x ≈ payload · scale.

    Attributes:
        payload: FP8 [M, K], or None; [G, N, K] of several matrices. payload_t: FP8 [K, M], contiguous, or None.
        scale: of `payload`; its shape is `Format.scale_shape`. Of several matrices FP32 [G], or of tiles [G, ·, ·].
        scale_t: of `payload_t`; only in formats with more than one scale.
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
        return self.format.shared_scale(self)

    @property
    def has_transpose(self) -> bool:
        """Whether `payload_t` exists."""
        return self.payload_t is not None

    @property
    def rowwise(self) -> Quantized:
        """The same matrix without its transpose."""
        return Quantized(self.payload, None, self.scale, self.format)

    def transposed(self) -> Quantized:
        """The transpose [K, M] with its payload, which is made from this one's if there is none yet.

        Raises:
            ValueError: the transpose has scales of its own.
        """
        return self.t if self.has_transpose else self.format.transpose(self)

    def rows(self, part: slice) -> Quantized:
        """Some rows [m, K] of `payload`, as a matrix of their own."""
        return self.format.rows(self, part)

    def gather(self, groups: ops.Groups, *, rowwise: bool = True, transposed: bool = False) -> Quantized:
        """The rows [R, K] of `groups` from those of tokens [T, K], in the requested layouts; zeros where there is no
        token."""
        return self.format.gather(self, groups, rowwise=rowwise, transposed=transposed)

    def multiply_groups(self, weight: Quantized, offsets: Tensor) -> Tensor:
        """BF16 [R, N]: each row of this [R, K] times its group's matrix of `weight` [G, N, K] (`ops.grouped_mm`)."""
        return self.format.multiply_groups(self, weight, offsets)

    def write_wgrad_of_groups_(
        self, out: Tensor, x_t: Quantized, offsets: Tensor, *, scales: Tensor | None = None, adds: bool = False
    ) -> None:
        """Write the weight gradients [G, N, K] of groups from this [N, R], an output gradient's columns, and those of
        the input [K, R] (`ops.grouped_wgrad_`).

        Args:
            out: BF16 or FP32, or E4M3 with `scales`, one for each `GRAD_BLOCK` elements.
            adds: add to `out`, which is not in FP8.
        """
        self.format.write_wgrad_of_groups_(out, self, x_t, offsets, scales=scales, adds=adds)

    def multiply_into_(
        self,
        out: Tensor,
        b: Quantized,
        *,
        bias: Tensor | None = None,
        use_fast_accum: bool = False,
        addend: Tensor | None = None,
    ) -> None:
        """out [M, N] = this [M, K] · b [N, K]ᵀ + bias [N] + addend [M, N].

        Raises:
            ValueError: sizes that the GEMM does not take.
        """
        self.format.multiply_into_(out, self, b, bias=bias, use_fast_accum=use_fast_accum, addend=addend)

    def multiply(
        self, b: Quantized, dtype: torch.dtype, *, bias: Tensor | None = None, use_fast_accum: bool = False
    ) -> Tensor:
        """This [M, K] · b [N, K]ᵀ + bias [N] in `dtype`, as `multiply_into_`."""
        return self.format.multiply(self, b, dtype, bias=bias, use_fast_accum=use_fast_accum)
