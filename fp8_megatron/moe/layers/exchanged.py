"""The collectives around the GEMMs of experts that ranks share, as `nn.parallelism` has those of a linear layer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from ...collectives.row_exchange import Rows, RowSum
from ...device.group import Group, max_over_group_
from ...formats.format import Quantized
from ...nn.operands import cast_grad
from ...nn.parallelism import Local, Summand
from ...nn.rows import OperandRows, SharedScaleRows
from ...quantization.early_cast import EarlyCast
from ...quantization.recipe import Quantizer
from .token_exchange import TokenExchange

#: Kernels load so many bytes of a row at once.
_ROW_BYTES = 16


class Exchanged(Local):
    """Both projections of experts that ranks share, each with other tokens, in one call.

    Tokens are sent to the ranks of their experts in FP8, and so is the gradient of the output. The output and the
    gradient of the tokens are summed over these ranks.
    """

    group: Group

    def __init__(self, exchange: TokenExchange) -> None:
        self._exchange, self.group = exchange, exchange.group
        self.sync = partial(max_over_group_, group=exchange.group)

    def gather(self, part: Quantized) -> OperandRows:
        if part.format.shares_amax:
            return SharedScaleRows(self._exchange.send(part.payload), part)
        return RowsWithScales(self._exchange.send(RowsWithScales.packed(part)), part)

    def start_sum(self, output: Summand) -> RowSum:
        return self._exchange.sum(output.compute())

    def start_grad_sum(self, grad_input: Summand) -> RowSum:
        return self.start_sum(grad_input)

    def cast_grad(
        self,
        grad_output: Tensor,
        quantizer: Quantizer,
        early_cast: EarlyCast | None,
        *,
        has_bias: bool,
        transposed: bool = True,
    ) -> tuple[OperandRows, Tensor | None]:
        assert not transposed, "experts take columns of their rows"
        cast = cast_grad(grad_output, quantizer, early_cast, has_bias=has_bias, transposed=transposed, sync=self.sync)
        return self.gather(cast.operand), cast.column_sums


class RowsWithScales:
    """Rows that travel with the scales of their blocks, as `packed` makes them; they can be gathered by expert."""

    def __init__(self, rows: Rows, part: Quantized) -> None:
        self._rows, self._part, self.num_rows = rows, part, rows.whole.shape[0]

    @staticmethod
    def packed(part: Quantized) -> Tensor:
        """Bytes: each row of [n, K], its scales FP32 [K / 128], and zeros up to a multiple of `_ROW_BYTES`."""
        scales = part.scale.t().contiguous().view(torch.uint8)
        tail = torch.nn.functional.pad(scales, (0, -scales.shape[1] % _ROW_BYTES))
        return torch.cat([part.payload.view(torch.uint8), tail], dim=1)

    def parts(self) -> Iterator[tuple[slice, Quantized]]:
        for rows, packed in self._rows.parts():
            yield rows, self._unpacked(packed)

    def whole(self) -> Quantized:
        return self._unpacked(self._rows.wait())

    def columns(self) -> Quantized:
        raise AssertionError("the columns of experts' rows are gathered by expert")

    def _unpacked(self, packed: Tensor) -> Quantized:
        """Views of what has arrived."""
        (_, columns), format = self._part.payload.shape, self._part.format
        size = 4 * self._part.scale.shape[0]
        scales = packed[:, columns : columns + size].view(torch.float32).t()
        return Quantized(packed[:, :columns].view(format.dtype), None, scales, format)
