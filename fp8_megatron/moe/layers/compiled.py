"""FP8 experts as two operators for `torch.compile`, as `compiled` has the linear layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...activation_functions import Activation
from ...dtypes import E4M3
from ...kernels.ops import Groups
from ...nn.compiled import add_to_grad, check_no_hooks, define, is_wanted, layer_of
from ...nn.gemms import LinearParams, note_forward
from .experts import KeptByExperts, experts_backward, experts_forward


class CompilableExperts(Protocol):
    """What the operators read of experts."""

    token: Tensor

    @property
    def activation(self) -> Activation:
        """Between both projections."""

    def linear_params(self, *, evaluates: bool) -> tuple[LinearParams, LinearParams]:
        """Both projections, without biases.

        Args:
            evaluates: their casts leave no amax behind (`CompilableLayer.evaluates`).
        """


def compiled_experts(
    x: Tensor,
    probs: Tensor,
    groups: Groups,
    token: Tensor,
    bias: Tensor | None,
    columns: int,
    scale_shape: Sequence[int],
    evaluates: bool,
) -> Tensor:
    """`fp8_experts` of x BF16 [T, H], with its bits.

    Args:
        token: of the experts (`compiled.new_token`).
        bias: fc1's [E, Z], or None.
        columns: Z.
        scale_shape: of the scales of x's cast (`Format.scale_shape`).
        evaluates: see `CompilableExperts.linear_params`.
    """
    call = (columns, scale_shape, torch.is_grad_enabled(), evaluates)
    y: Tensor = _Experts.apply(x, probs, *groups, token, bias, *call)
    return y


def _experts(
    x: Tensor,
    probs: Tensor,
    offsets: Tensor,
    source: Tensor,
    rows: Tensor,
    token: Tensor,
    bias: Tensor | None,
    columns: int,
    scale_shape: Sequence[int],
    keeps: bool,
    evaluates: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The output [T, H], and what `KeptByExperts` has; empty if not `keeps`, or where it has None."""
    layer: CompilableExperts = layer_of(token)
    fc1, fc2 = layer.linear_params(evaluates=evaluates)
    if keeps:
        note_forward(fc1)
        note_forward(fc2)
    fc1 = fc1._replace(bias=bias)
    groups = Groups(offsets, source, rows)
    pending, kept = experts_forward(x, probs, groups, fc1, fc2, layer.activation, recomputes=not keeps)
    y = pending.wait()
    if not keeps:
        wide = x.new_empty(0, dtype=torch.float32)
        return y, x.new_empty(0, dtype=E4M3), wide, x.new_empty(0), wide.clone(), wide.clone()
    assert kept.z is not None
    # The compiler may write to memory that it was given; a delayed scale is not its own.
    hidden_scale = x.new_empty(0, dtype=torch.float32) if kept.hidden_scale is None else kept.hidden_scale.clone()
    return y, kept.payload, kept.scale.clone(), kept.z, kept.row_probs, hidden_scale


def _fake_experts(
    x: Tensor,
    probs: Tensor,
    offsets: Tensor,
    source: Tensor,
    rows: Tensor,
    token: Tensor,
    bias: Tensor | None,
    *call: Any,
) -> tuple[Tensor, ...]:
    columns, scale_shape, keeps, _ = call
    wide, num_rows = torch.float32, source.shape[0]
    y, one = torch.empty_like(x), (1,) if keeps and len(scale_shape) == 1 else (0,)
    return (
        y,
        x.new_empty(x.shape if keeps else (0,), dtype=E4M3),
        x.new_empty(scale_shape if keeps else (0,), dtype=wide),
        x.new_empty((num_rows, columns) if keeps else (0,)),
        x.new_empty((num_rows,) if keeps else (0,), dtype=wide),
        x.new_empty(one, dtype=wide),
    )


def _experts_backward(
    grad_output: Tensor,
    payload: Tensor,
    scale: Tensor,
    z: Tensor,
    row_probs: Tensor,
    hidden_scale: Tensor,
    offsets: Tensor,
    source: Tensor,
    rows: Tensor,
    token: Tensor,
    bias: Tensor | None,
    call: Tensor,
    columns: int,
    evaluates: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the tokens [T, H], the probabilities FP32 [T, E], the bias FP32 [E, Z] (empty if there is none) and
    the token. The weights' go to their `main_grad`.

    Args:
        grad_output: [T, H].
        call: empty, and no other call's.
        columns: Z.

    Raises:
        UserError: a weight has hooks.
    """
    layer: CompilableExperts = layer_of(token)
    fc1, fc2 = layer.linear_params(evaluates=evaluates)
    asks = is_wanted(token)
    for linear in (fc1, fc2):
        check_no_hooks(linear.weight)
    needs = [asks and fc1.weight.requires_grad, asks and fc2.weight.requires_grad, bias is not None]
    kept = KeptByExperts(payload, scale, z, row_probs, hidden_scale if hidden_scale.numel() else None)
    shape = torch.Size((payload.shape[0], offsets.shape[0] - 1))
    groups = Groups(offsets, source, rows)
    grads = experts_backward(grad_output, kept, groups, fc1, fc2, layer.activation, probs_shape=shape, needs=needs)
    for linear, grad in ((fc1, grads.weight1), (fc2, grads.weight2)):
        if grad is not None:
            add_to_grad(linear.weight, grad)
    no_bias = grad_output.new_empty(0, dtype=torch.float32)
    grad_bias = no_bias if grads.bias1 is None else grads.bias1.contiguous()
    return grads.x, grads.probs, grad_bias, torch.zeros_like(token)


def _fake_experts_backward(grad_output: Tensor, payload: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, _, _, _, offsets, _, _, token, bias, _, columns, _ = others
    num_experts, wide = offsets.shape[0] - 1, torch.float32
    return (
        torch.empty_like(grad_output),
        grad_output.new_empty((payload.shape[0], num_experts), dtype=wide),
        grad_output.new_empty((0,) if bias is None else (num_experts, columns), dtype=wide),
        torch.zeros_like(token),
    )


define("experts", _experts, _fake_experts)
define("experts_backward", _experts_backward, _fake_experts_backward)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        probs: Tensor,
        offsets: Tensor,
        source: Tensor,
        rows: Tensor,
        token: Tensor,
        bias: Tensor | None,
        *call: Any,
    ) -> Tensor:
        y, *kept = torch.ops.fp8_megatron.experts(x, probs, offsets, source, rows, token, bias, *call)
        ctx.save_for_backward(*kept, offsets, source, rows, token, bias)
        ctx.columns, _, _, ctx.evaluates = call
        output: Tensor = y
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        *others, bias = ctx.saved_tensors
        # A compiler runs equal calls once. Each gives the weights a gradient, and no two of these tensors are equal.
        call = torch.empty(0, device="cpu")
        grad_x, grad_probs, grad_bias, grad_token = torch.ops.fp8_megatron.experts_backward(
            grad_output.contiguous(), *others, bias, call, ctx.columns, ctx.evaluates
        )
        grad_of_bias = None if bias is None else grad_bias.to(bias.dtype)
        return grad_x, grad_probs, None, None, None, grad_token, grad_of_bias, *(None,) * 4
