"""The collectives between tensor-parallel ranks around a linear layer's GEMMs: one class for each way to share it.

| class | input | output | gradient of the input | gradient of the output |
| --- | --- | --- | --- | --- |
| `Local` | whole | this rank's | this rank's | this rank's |
| `Column` | whole on every rank | this rank's columns | summed over ranks | this rank's columns |
| `SequenceColumn` | part of the sequence, gathered in FP8 | this rank's columns | summed and scattered | its columns |
| `SequenceRow` | this rank's columns | summed and scattered along the sequence | its columns | gathered in FP8 |

Functions take any of these classes and treat them alike. Under tensor parallelism without sequence parallelism, a
row-parallel layer is `Local` and its caller sums the outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..collectives.row_exchange import RowSum, sum_rows
from ..device.group import Group, max_over_group_
from ..formats.format import Format, Quantized
from ..quantization.early_cast import EarlyCast
from ..quantization.recipe import AmaxSync, Quantizer
from .operands import cast_grad
from .rows import LocalRows, OperandRows, gather_operand


class Summand(Protocol):
    """A matrix [T, N] of this rank; it may be a summand of the sum over ranks."""

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device

    def compute(self, addend: Tensor | None = None) -> Tensor:
        """The whole matrix plus `addend` [..., N], rounded once."""

    def write(self, rows: slice, out: Tensor, adds_bias: bool) -> None:
        """Write `rows` into `out` [rows, N]. With `adds_bias`, this rank is the one that adds the bias."""


class PendingSum(NamedTuple):
    """A gradient [T, K] while it is summed over the group, perhaps in place. Call `wait` or `summands` once."""

    value: Tensor
    work: torch.distributed.Work | None = None

    def wait(self) -> Tensor:
        """The sum [T, K]; on CUDA the stream waits for it, not the host."""
        if self.work is not None:
            self.work.wait()
        return self.value

    def summands(self) -> Tensor:
        """As `RowSum.summands`; here the only summand is the sum itself."""
        return self.wait().unsqueeze(0)


class Local:
    """Nothing crosses ranks."""

    #: The tensor-parallel ranks if there are several, else None.
    group: Group | None = None
    #: How ranks share one scale if their inputs are parts of one tensor.
    sync: AmaxSync | None = None

    def casts_columns(self, format: Format) -> bool:
        """Whether wgrad's columns of the input are made by its cast, rather than from its gathered rows."""
        return True

    def gather(self, part: Quantized) -> OperandRows:
        """Start to gather the input [T, K] from this rank's part."""
        return LocalRows(part)

    def gather_columns(self, cast: Callable[[], Quantized]) -> Callable[[], Quantized]:
        """Start to gather the input for wgrad. Call the result to get its columns [K, T].

        Args:
            cast: returns this rank's part: its columns if `casts_columns`, else its rows.
        """
        return lambda: cast().t

    def output_leading(self, leading: torch.Size) -> torch.Size:
        """The output's leading dimensions, given the input's."""
        return leading

    def sum(self, output: Summand, addend: Tensor | None = None) -> Tensor:
        """This rank's part of the output, plus `addend`."""
        return output.compute(addend)

    def start_sum(self, output: Summand) -> RowSum | PendingSum:
        """Start `sum`, of an output without an addend."""
        return PendingSum(output.compute())

    def start_grad_sum(self, grad_input: Summand) -> RowSum | PendingSum:
        """Start the gradient of this rank's part of the input."""
        return PendingSum(grad_input.compute())

    def cast_grad(
        self,
        grad_output: Tensor,
        quantizer: Quantizer,
        early_cast: EarlyCast | None,
        *,
        has_bias: bool,
        transposed: bool = True,
    ) -> tuple[OperandRows, Tensor | None]:
        """The output's gradient [T, N] in FP8 from this rank's part [..., N], and that part's bias gradient, FP32
        [N].

        Args:
            transposed: wgrad takes its columns.
        """
        cast = cast_grad(grad_output, quantizer, early_cast, has_bias=has_bias, transposed=transposed)
        return LocalRows(cast.operand), cast.column_sums

    def casts_grad_columns(self, format: Format) -> bool:
        """Whether `cast_grad` casts both layouts."""
        return True


class Column(Local):
    """The weight's rows are split and the input is whole on every rank. The input's gradient is all-reduced."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def start_grad_sum(self, grad_input: Summand) -> PendingSum:
        value = grad_input.compute()
        return PendingSum(value, torch.distributed.all_reduce(value, group=self.group, async_op=True))


class SequenceColumn(Local):
    """The weight's rows are split and the input is a part of the sequence. The input is gathered in FP8 before fprop
    and again before wgrad; its gradient is reduce-scattered."""

    group: Group

    def __init__(self, group: Group) -> None:
        self.group = group
        self.sync = partial(max_over_group_, group=group)

    def casts_columns(self, format: Format) -> bool:
        return not format.transpose_keeps_scale

    def gather(self, part: Quantized) -> OperandRows:
        return gather_operand(part.rowwise, self.group)

    def gather_columns(self, cast: Callable[[], Quantized]) -> Callable[[], Quantized]:
        return gather_operand(cast(), self.group).columns

    def output_leading(self, leading: torch.Size) -> torch.Size:
        return torch.Size((leading[0] * self.group.size(), *leading[1:]))

    def start_grad_sum(self, grad_input: Summand) -> RowSum:
        return sum_rows(grad_input.write, grad_input.shape, grad_input.dtype, grad_input.device, self.group)


class SequenceRow(Local):
    """The weight's columns are split. The output is reduce-scattered along the sequence, and its gradient is gathered
    in FP8, half of BF16's bytes. Casting before the gather gives the same bits as casting after it."""

    group: Group

    def __init__(self, group: Group) -> None:
        self.group = group
        self._grad_sync = partial(max_over_group_, group=group)

    def output_leading(self, leading: torch.Size) -> torch.Size:
        return torch.Size((leading[0] // self.group.size(), *leading[1:]))

    def sum(self, output: Summand, addend: Tensor | None = None) -> Tensor:
        if addend is not None:
            addend = addend.contiguous().view(-1, output.shape[1])
        return sum_rows(output.write, output.shape, output.dtype, output.device, self.group).wait(addend)

    def cast_grad(
        self,
        grad_output: Tensor,
        quantizer: Quantizer,
        early_cast: EarlyCast | None,
        *,
        has_bias: bool,
        transposed: bool = True,
    ) -> tuple[OperandRows, Tensor | None]:
        transposed = transposed and self.casts_grad_columns(quantizer.format)
        cast = cast_grad(
            grad_output, quantizer, early_cast, has_bias=has_bias, transposed=transposed, sync=self._grad_sync
        )
        return gather_operand(cast.operand, self.group), cast.column_sums

    def casts_grad_columns(self, format: Format) -> bool:
        return not format.transpose_keeps_scale


#: For layers that ranks do not share; stateless.
LOCAL = Local()
