"""An operand [T, K] whose rows tensor-parallel ranks share: local, or gathered in FP8."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from ..collectives.row_exchange import Rows, gather_rows
from ..device.group import Group
from ..formats.format import Format, Quantized


class OperandRows(Protocol):
    """All ranks' rows of an operand. GEMMs take them part by part, as they arrive."""

    num_rows: int

    def parts(self) -> Iterable[tuple[slice, Quantized]]:
        """Each part's rows and values, once it has arrived. On CUDA the stream waits, not the host."""

    def whole(self) -> Quantized:
        """The whole operand [T, K], once all parts have arrived."""

    def columns(self) -> Quantized:
        """The whole transpose [K, T], once all parts have arrived."""


class LocalRows:
    """Rows that this rank already holds."""

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
    """Start to gather every rank's `part`, in rank order along the rows. FP8 travels, with scales if each part has its
    own.

    Every rank of `group` calls this, with parts of one shape and one format. The gathered values may lie in reused
    memory: read all of them before the group's next gather starts.

    Args:
        part: [n, K]. In a format with one scale, the ranks share the scale and the part has its row layout. In other
            formats the part has the layouts to gather.

    Raises:
        ValueError: columns in blocks are requested, and n is not a multiple of the format's `size_multiple`.
    """
    if part.format.shares_amax:
        return SharedScaleRows(gather_rows(part.payload, group), part)
    return _PartsWithScales(part, group)


class SharedScaleRows:
    """Rows with one scale; the transpose is made once all rows have arrived."""

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
    """Parts with their own scales: each rank's layouts and scales travel as one run of bytes."""

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
        multiple = part.format.size_multiple
        if columnwise and self._part_rows % multiple:
            raise ValueError(
                f"{self._part_rows} rows on each of {group.size()} ranks are not a multiple of {multiple}, and a "
                f"block of columns does not cross ranks; choose a number of tokens that gives one"
            )
        packed = torch.cat([tensor.view(-1).view(torch.uint8) for tensor in tensors])
        self._bytes = gather_rows(packed.unsqueeze(0), group)

    def parts(self) -> Iterator[tuple[slice, Quantized]]:
        for ranks, values in self._bytes.parts():
            for rank, packed in zip(range(ranks.start, ranks.stop), values, strict=True):
                yield slice(rank * self._part_rows, (rank + 1) * self._part_rows), self._unpacked(packed)

    def whole(self) -> Quantized:
        return self._format.joined([self._unpacked(packed) for packed in self._bytes.wait()], 0)

    def columns(self) -> Quantized:
        return self._format.joined([self._unpacked(packed).t for packed in self._bytes.wait()], 1)

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
