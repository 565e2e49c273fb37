"""The specification of the QKV projection's gradient, in plain PyTorch.

The projection's output holds, group by group, the query heads of the group, its key and its value
(megatron-core's layout); attention gives back the gradients of the three apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from .. import reference
from ..registration import operator
from ..shapes import fp32, layouts, taken_scale


def interleaved(grads: Sequence[Tensor]) -> Tensor:
    """Gradients [s, b, groups, width] of query, key and value → [s · b, groups · (sum of widths)]."""
    seq, batch = grads[0].shape[:2]
    return torch.cat(list(grads), dim=3).reshape(seq * batch, -1)


def _outputs(a: SimpleNamespace) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query = a.grads[0]
    seq, batch, groups, _ = query.shape
    tokens, columns = seq * batch, groups * sum(grad.shape[3] for grad in a.grads)
    sums = fp32(query, columns if a.column_sums else 0)
    return *layouts(query.new_empty((tokens, columns)), a.dtype), sums, taken_scale(query, a.scale)


@operator(gpu=".grad_output_triton", fake=_outputs, mutates=["amax_out"])
def quantize_qkv_grad(
    grads: list[Tensor],
    dtype: torch.dtype,
    scale: Tensor | None,
    power_of_two: bool,
    amax_out: Tensor | None,
    column_sums: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`reference.quantize_grad_output` of the interleaved gradients [T, N], in one read of each.

    Args:
        grads: of query [s, b, groups, heads a group · d], key and value [s, b, groups, d], of any strides.

    Returns:
        payload [T, N], its transpose, column sums FP32 [N] (empty unless asked for), the scale taken (empty if given).
    """
    payload, payload_t, sums, taken = reference.quantize_grad_output(
        interleaved(grads), dtype, scale, power_of_two, amax_out, transposed=True
    )
    return payload, payload_t, sums if column_sums else sums.new_empty(0), taken
