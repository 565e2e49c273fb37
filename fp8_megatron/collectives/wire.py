"""A flat tensor in the form in which it crosses the wire.

In E4M3 one power-of-two scale serves 128 elements (1.03 bytes an element), so no rank has to know another's amax first.
Payload and scales are two tensors: a kernel can write its gradient straight into a send buffer, and any run of blocks
is a view of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..dtypes import GRAD_BLOCK, StorageDtype
from ..kernels import ops

_DTYPES = (StorageDtype.FP8, StorageDtype.BF16, StorageDtype.FP32)


@dataclass(frozen=True, eq=False)
class WireTensor:
    """A flat tensor of n elements, ready to send.

    Attributes:
        payload: [n], E4M3, BF16 or FP32, contiguous.
        scales: FP32 [n / 128], the power of two that dequantises each block; for E4M3 only, else None.
    """

    payload: Tensor
    scales: Tensor | None

    @classmethod
    def empty(cls, numel: int, dtype: StorageDtype, device: torch.device) -> WireTensor:
        """Uninitialised storage for `numel` elements; for `fp8` a multiple of 128.

        Raises:
            ValueError: fp16, which would need scales, or a part of a block.
        """
        if dtype not in _DTYPES:
            raise ValueError(f"{dtype.value} does not cross the wire: use {', '.join(d.value for d in _DTYPES)}")
        payload = torch.empty(numel, dtype=dtype.torch_dtype, device=device)
        if dtype is not StorageDtype.FP8:
            return cls(payload, None)
        if numel % GRAD_BLOCK:
            raise ValueError(f"{numel} elements are no whole number of blocks of {GRAD_BLOCK}")
        return cls(payload, torch.empty(numel // GRAD_BLOCK, dtype=torch.float32, device=device))

    @property
    def numel(self) -> int:
        """Elements, n."""
        return self.payload.numel()

    @property
    def dtype(self) -> StorageDtype:
        """The payload's dtype, as a user names it."""
        return next(dtype for dtype in _DTYPES if dtype.torch_dtype == self.payload.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of payload and scales."""
        return sum(part.nbytes for part in self.byte_views())

    def byte_views(self) -> list[Tensor]:
        """Payload and scales (if any) as flat uint8: what a collective moves, on NCCL and on gloo, which refuses
        float8."""
        parts = [self.payload] if self.scales is None else [self.payload, self.scales]
        return [part.view(torch.uint8) for part in parts]

    def store_(self, value: Tensor) -> None:
        """Round `value` (flat [n], any float dtype) into this tensor, to nearest even.

        In E4M3 a block never saturates, and one that holds a NaN or an inf becomes NaN. BF16 and FP32 keep both.
        """
        if self.scales is None:
            self.payload.copy_(value)
        else:
            ops.quantize_blockwise_(value, self.payload, self.scales)

    def load(self) -> Tensor:
        """The values, FP32 [n]; a new tensor, except where the payload is FP32."""
        return self.payload.float() if self.scales is None else ops.dequantize_blockwise(self.payload, self.scales)

    def slice(self, start: int, stop: int) -> WireTensor:
        """Elements [start, stop) as views; in E4M3 both are multiples of 128."""
        if self.scales is None:
            return WireTensor(self.payload[start:stop], None)
        assert start % GRAD_BLOCK == 0 and stop % GRAD_BLOCK == 0, (start, stop)
        return WireTensor(self.payload[start:stop], self.scales[start // GRAD_BLOCK : stop // GRAD_BLOCK])

    def carve(self, numel: int, dtype: StorageDtype) -> WireTensor:
        """Storage for `numel` elements (a multiple of 128) of `dtype` in this tensor's memory; it overwrites the
        contents.
        """
        assert numel % GRAD_BLOCK == 0, numel
        if dtype is StorageDtype.FP8 and self.scales is not None:
            return self.slice(0, numel)
        memory = self.payload.view(torch.uint8)
        end = numel * dtype.itemsize
        assert end <= memory.numel(), f"{numel} elements in {dtype.value} have no room in {memory.numel()} bytes"
        payload = memory[:end].view(dtype.torch_dtype)
        if dtype is not StorageDtype.FP8:
            return WireTensor(payload, None)
        return WireTensor(payload, memory[end : end + 4 * (numel // GRAD_BLOCK)].view(torch.float32))


class OwnRow(NamedTuple):
    """One of several rows that is stored elsewhere: its number, and its values [n]."""

    row: int
    values: WireTensor


def accumulate_rows_(
    rows: WireTensor, num_rows: int, accumulator: Tensor, *, factor: float, add: bool, own: OwnRow | None = None
) -> None:
    """``accumulator (+)= factor · Σ rows``, summed in FP32 in the order of the rows, in place.

    A NaN (in BF16 and FP32 also an inf) in any row stays in the sum.

    Args:
        rows: [num_rows · n], one rank's version a row.
        accumulator: FP32 [n], or BF16: rounded to once, at the end.
        factor: 1/d for a mean; rounded to FP32 once, and exact where d is a power of two. In E4M3 it multiplies the
            scales, else the values.
        add: False overwrites what the accumulator holds.
        own: replaces the row of its index; that row of `rows` is not read.
    """
    n = accumulator.numel()
    assert rows.numel == num_rows * n, (accumulator.shape, rows.numel, num_rows)
    if own is None:
        ops.accumulate_rows_(rows.payload, rows.scales, accumulator, factor=factor, add=add)
        return
    elsewhere = own.values
    ops.accumulate_rows_(
        *(rows.payload, rows.scales, accumulator),
        factor=factor,
        add=add,
        own_row=own.row,
        own_payload=elsewhere.payload,
        own_scales=elsewhere.scales,
    )
