"""Some rows of a cast beside the values that it was made of, as `cast_health` measures them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..formats.format import Quantized


class Sample(NamedTuple):
    """Some rows of a cast.

    Attributes:
        value: [m, K], what was cast.
        payload: FP8 [m, K].
        scales: FP32 [m, ·], see `Format.row_scales`.
        counts: bool [m, 1], which rows count. Nobody may have written the others. None: all.
    """

    value: Tensor
    payload: Tensor
    scales: Tensor
    counts: Tensor | None = None


def sample_of_rows(operand: Quantized, step: int, value: Tensor, counts: Tensor | None = None) -> Sample:
    """The sample of every `step`-th row.

    Args:
        value, counts: of these rows, see `Sample`.
    """
    return Sample(value, operand.payload[::step], operand.format.row_scales(operand, step), counts)


def rows_to_compute(x: Tensor, operand: Quantized, step: int) -> Tensor:
    """Every `step`-th row of `x` [M, K], from which the values of a cast are computed again: in FP32 if a kernel
    computed and cast them in one pass, without rounding to 16 bits in between."""
    return x[::step].float() if operand.format.fuses else x[::step]
