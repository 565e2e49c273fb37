"""An operand [T, K] whose rows tensor-parallel ranks share: here already, or on their way in FP8."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from ..collectives.row_exchange import Rows, gather_rows
from ..device.group import Group
from ..formats import GEMM_BLOCK
from ..quantization.operand import Format, Quantized


class OperandRows(Protocol):
    """All ranks' rows of an operand, for GEMMs that take them part by part as they arrive."""

    num_rows: int

    def parts(self) -> Iterable[tuple[slice, Quantized]]:
        """Rows and their values, each once it is there (on CUDA the stream waits, not the host)."""

    def whole(self) -> Quantized:
        """[T, K], all there."""

    def columns(self) -> Quantized:
        """The transpose [K, T], all there."""


class LocalRows:
    """All there already."""

    __slots__ = ("_whole", "num_rows")

    def __init__(self, whole: Quantized) -> None:
        self._whole, self.num_rows = whole, whole.payload.shape[0]

    def parts(self) -> Iterable[tuple[slice, Quantized]]:
        return ((slice(0, self.num_rows), self._whole),)

    def whole(self) -> Quantized:
        return self._whole

    def columns(self) -> Quantized:
        return self._whole.transposed()


def gather_operand(part: Quantized, group: Group) -> OperandRows:
    """Start to gather every rank's `part`, in rank order along the rows. What travels is FP8, and scales where parts
    have their own.

    Called by every rank of `group` with parts of one shape and one format. The values may lie in memory that is used
    again: all of them are read before the next gather of the group starts.

    Args:
        part: [n, K], of a format with one scale, which the ranks share, in its rows; of another in the layouts that are
            to be gathered.

    Raises:
        ValueError: columns are wanted in blocks, and n is not a multiple of 128.
    """
    if part.format.has_one_scale:
        return _SharedScaleRows(gather_rows(part.payload, group), part)
    return _PartsWithScales(part, group)


class _SharedScaleRows:
    """Rows with one scale; their transpose is made when all are there."""

    __slots__ = ("_part", "_rows", "num_rows")

    def __init__(self, rows: Rows, part: Quantized) -> None:
        self._rows, self._part, self.num_rows = rows, part, rows.whole.shape[0]

    def parts(self) -> Iterator[tuple[slice, Quantized]]:
        scale, format = self._part.scale, self._part.format
        for rows, payload in self._rows.parts():
            yield rows, Quantized(payload, None, scale, format)

    def whole(self) -> Quantized:
        return Quantized(self._rows.wait(), None, self._part.scale, self._part.format)

    def columns(self) -> Quantized:
        return self.whole().transposed()


class _PartsWithScales:
    """Parts whose scales are their own: each rank's layouts and scales travel as one run of bytes."""

    def __init__(self, part: Quantized, group: Group) -> None:
        self._format: Format = part.format
        columns = part.t
        rowwise = [] if part.payload is None else [part.payload, part.scale]
        columnwise = [] if columns.payload is None else [columns.payload, columns.scale]
        self._has_rows, self._has_columns = bool(rowwise), bool(columnwise)
        tensors = [tensor.contiguous() for tensor in (*rowwise, *columnwise)]
        self._shapes = [(tensor.shape, tensor.dtype, tensor.nbytes) for tensor in tensors]
        self._part_rows = rowwise[0].shape[0] if rowwise else columnwise[0].shape[1]
        self.num_rows = self._part_rows * group.size()
        if columnwise and self._part_rows % GEMM_BLOCK:
            raise ValueError(
                f"{self._part_rows} rows on each of {group.size()} ranks are not a multiple of {GEMM_BLOCK}, and a "
                f"block of columns does not cross ranks; choose a number of tokens that gives one"
            )
        packed = torch.cat([tensor.view(-1).view(torch.uint8) for tensor in tensors])
        self._bytes = gather_rows(packed.unsqueeze(0), group)

    def parts(self) -> Iterator[tuple[slice, Quantized]]:
        for ranks, values in self._bytes.parts():
            for rank, packed in zip(range(ranks.start, ranks.stop), values, strict=True):
                yield slice(rank * self._part_rows, (rank + 1) * self._part_rows), self._unpacked(packed)

    def whole(self) -> Quantized:
        parts = [self._unpacked(packed) for packed in self._bytes.wait()]
        payload = _joined([part.payload for part in parts], dim=0)
        return Quantized(payload, None, torch.cat([part.scale for part in parts], dim=1), self._format)

    def columns(self) -> Quantized:
        parts = [self._unpacked(packed).t for packed in self._bytes.wait()]
        payload = _joined([part.payload for part in parts], dim=1)
        return Quantized(payload, None, torch.cat([part.scale for part in parts], dim=0), self._format)

    def _unpacked(self, packed: Tensor) -> Quantized:
        tensors, start = [], 0
        for shape, dtype, nbytes in self._shapes:
            tensors.append(packed[start : start + nbytes].view(dtype).view(shape))
            start += nbytes
        payload, scale = tensors[:2] if self._has_rows else (None, None)
        payload_t, scale_t = tensors[-2:] if self._has_columns else (None, None)
        if scale is None:
            assert scale_t is not None
            return Quantized(None, payload_t, scale_t, self._format, scale_t)
        return Quantized(payload, payload_t, scale, self._format, scale_t)


def _joined(payloads: list[Tensor], dim: int) -> Tensor:
    """FP8 parts side by side; as bytes, because not every device joins FP8."""
    return torch.cat([payload.view(torch.uint8) for payload in payloads], dim=dim).view(payloads[0].dtype)
