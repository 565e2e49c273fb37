"""A linear layer of several inputs: attention's query comes from one sequence, key and value from another.

Each input is multiplied by its own rows of the weight alone, and its output's gradient too. The weight's gradient is
put together of the parts, and delivered once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..formats.format import Quantized
from .first_order import once_differentiable
from .gemms import LinearParams, delivered_wgrad, note_forward
from .linear import linear_backward, linear_forward
from .operands import delivered, with_leading
from .parallelism import LOCAL


def fp8_split_linear(
    inputs: Sequence[Tensor], sizes: Sequence[int], linear: LinearParams, *, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """y_i = x_i · W_iᵀ + b_i in FP8, where the W_i are the rows of the weight in order; as `fp8_linear` does.

    Args:
        inputs: [..., K], any float dtype and number of rows.
        sizes: rows N_i of each W_i, which sum to N. In a weight with block scales N_i · K is a number of whole blocks.
        linear: weight [N, K], bias [N] or None; a layer that ranks do not share, without links.
        dtype: of the outputs and of the GEMMs in backward, BF16 or FP16.

    Returns:
        [..., N_i] in `dtype`.
    """
    assert linear.parallelism is LOCAL and linear.links is None and sum(sizes) == linear.weight.shape[0], (
        linear,
        sizes,
    )
    call = _SplitCall(linear, tuple(sizes), dtype, torch.is_grad_enabled())
    if call.has_backward:
        note_forward(linear)
    outputs: tuple[Tensor, ...] = _SplitLinear.apply(linear.weight, linear.bias, call, *inputs)
    return outputs


class _SplitCall(NamedTuple):
    """What is no tensor of a call."""

    linear: LinearParams
    sizes: tuple[int, ...]
    dtype: torch.dtype
    has_backward: bool

    def parts(self) -> Iterator[LinearParams]:
        """The layer of each input. Its weight has no `main_grad`. Made anew in backward: the whole weight may have
        other memory by then, as under ``fully_shard``."""
        linear, start = self.linear, 0
        for size in self.sizes:
            rows = slice(start, start + size)
            bias = None if linear.bias is None else linear.bias.detach()[rows]
            yield linear._replace(weight=linear.weight.rows(rows), bias=bias)
            start += size


class _SplitLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor | None, call: _SplitCall, *inputs: Tensor) -> tuple[Tensor, ...]:
        keeps_columns = call.has_backward and ctx.needs_input_grad[0]
        outputs, kept = [], []
        for x, part in zip(inputs, call.parts(), strict=True):
            y, operand = linear_forward(x, part, call.dtype, keeps_columns=keeps_columns)
            outputs.append(y)
            if keeps_columns:
                kept += [operand.t.payload, operand.t.scale]
        if call.has_backward:
            ctx.save_for_backward(*kept)
            ctx.call = call
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        call, kept = ctx.call, ctx.saved_tensors
        linear = call.linear
        needs_grad_weight, _, _, *needs_grad_inputs = ctx.needs_input_grad
        grad_inputs, grad_weights, grad_biases = [], [], []
        for index, part in enumerate(call.parts()):
            made = None
            if needs_grad_weight:
                columns, scale = kept[2 * index : 2 * index + 2]
                made = partial(Quantized, None, columns, scale, linear.quantizers.input.format)
            g, needs_grad = grad_outputs[index].contiguous(), needs_grad_inputs[index]
            grad_input, grad_weight, grad_bias = linear_backward(g, made, part, needs_grad_input=needs_grad)
            grad_inputs.append(None if grad_input is None else with_leading(grad_input, g.shape[:-1]))
            grad_weights += [] if grad_weight is None else [grad_weight]
            grad_biases += [] if grad_bias is None else [grad_bias]
        whole_weight = delivered_wgrad(torch.cat(grad_weights), linear) if grad_weights else None
        whole_bias = delivered(torch.cat(grad_biases), linear.bias) if grad_biases else None
        return whole_weight, whole_bias, None, *grad_inputs
