"""The attention half of a transformer layer as one FP8 function: norm → QKV → RoPE → attention → output projection.

One kernel reads the QKV projection's output, rotates it and writes query, key and value in E4M3. Attention's kernel
writes its output in E4M3, and the output projection's GEMM takes that as it is. Backward keeps query, key, value and
output in FP8: half the bytes of 16-bit attention. It reads the gradients of query, key and value in E5M2 where
attention wrote them, rotates them back and casts them as one gradient of the QKV projection.

Norms of query and key (`--qk-layernorm`) run in 16 bits, with casts of their own before and after attention.

Ranks that share sequences exchange them for heads (`head_exchange`), all in FP8: query, key, value and output, and
their gradients in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..collectives.context_exchange import gather_sequence, scatter_sequence
from ..device.group import Group
from ..formats.format import Quantized
from ..kernels import ops
from ..kernels.ops import QKNorm, Rotation
from ..quantization.attention import AttentionGrads, AttentionQuantizers
from ..quantization.scaled_tensor import ScaledTensor
from ..quantization.sources import GradSource, NormStatistics, QKVGradSource
from .first_order import once_differentiable
from .gemms import LinearParams, dgrad_to_fp8, fprop, start_dgrad, wgrad
from .normed import NormParams, norm_fprop, norm_linear_backward
from .operands import delivered
from .rope import normed_parts, qk_norm_backward
from .rows import LocalRows, OperandRows


class AttentionParams(NamedTuple):
    """Causal attention in FP8.

    Attributes:
        softmax_scale: the factor of the scores.
        widths: columns of query, key and value in one group of the QKV projection's output.
        rotation: of query and key; it may have no angles.
        qk_norm: of query and key, before the rotation; None if they have none.
        heads: ranks that share sequences and exchange them for heads; None if this rank has whole sequences. The
            quantisers' scales are theirs together (`AttentionQuantizers.sync`).
    """

    quantizers: AttentionQuantizers
    softmax_scale: float
    widths: tuple[int, int, int]
    rotation: Rotation
    qk_norm: QKNorm | None = None
    heads: Group | None = None


def fp8_norm_attention(
    x: Tensor,
    norm: NormParams,
    qkv: LinearParams,
    proj: LinearParams,
    attention: AttentionParams,
    *,
    adds_input: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """proj(attention(qkv(norm(x)))) in FP8; the weight gradients go to their ``main_grad`` (see `wgrad`).

    Args:
        x: BF16 [s, b, h]; [s/tp, b, h] if qkv is `SequenceColumn` (and proj `SequenceRow`). Of ranks that exchange
            heads, s counts this rank's tokens: chunks r and 2n - 1 - r of the 2n of each sequence.
        qkv: weight [groups · sum of widths, h], interleaved by group. proj: weight [N, heads · d].
        adds_input: add x, the residual branch, inside. Not possible if the output is this rank's summand.

    Returns:
        BF16 of x's shape. Unless `adds_input`, also x for the residual branch; the branch's gradient is added inside
        the norm's backward.
    """
    params = (None,) * 4 if attention.qk_norm is None else attention.qk_norm[:4]
    weights = norm.weight, norm.bias, qkv.weight, qkv.bias, proj.weight, proj.bias
    needs_backward = torch.is_grad_enabled()
    return _FP8NormAttention.apply(x, *weights, *params, norm, qkv, proj, attention, adds_input, needs_backward)


class _FP8NormAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor | None,
        qkv_weight: ScaledTensor,
        qkv_bias: Tensor | None,
        proj_weight: ScaledTensor,
        proj_bias: Tensor | None,
        query_weight: Tensor | None,
        key_weight: Tensor | None,
        query_bias: Tensor | None,
        key_bias: Tensor | None,
        norm: NormParams,
        qkv: LinearParams,
        proj: LinearParams,
        attention: AttentionParams,
        adds_input: bool,
        needs_backward: bool,
    ) -> tuple[Tensor, Tensor | None]:
        y, statistics = norm_fprop(x, norm, qkv)
        y = y.view(*qkv.parallelism.output_leading(x.shape[:-1]), -1)
        inputs = _whole_sequences(_cast_heads(y, attention), attention.heads)
        kept = None if attention.qk_norm is None else y
        del y
        inverse_out = attention.quantizers.inverse_of_value(inputs)
        out, log_sum_exp = ops.fp8_attention(inputs, inverse_out, softmax_scale=attention.softmax_scale)
        own = None if attention.heads is None else scatter_sequence([out], attention.heads)[0]
        rows = proj.parallelism.gather(_operand(out if own is None else own, inputs, proj))
        projected = fprop(rows, proj, x.dtype, x if adds_input else None)
        if needs_backward:
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(x, kept, out, own, log_sum_exp, *inputs, *statistics)
            ctx.norm, ctx.qkv, ctx.proj, ctx.attention, ctx.adds_input = norm, qkv, proj, attention, adds_input
        return projected.view(*x.shape[:-1], projected.shape[-1]), None if adds_input else x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor, residual_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        x, y, out, own, log_sum_exp, *saved = ctx.saved_tensors
        own = out if own is None else own
        inputs = ops.AttentionInputs(*saved[: len(ops.AttentionInputs._fields)])
        statistics = NormStatistics(*saved[len(inputs) :])
        qkv, proj, attention = ctx.qkv, ctx.proj, ctx.attention
        g, grad_proj_bias = proj.cast_grad(grad_output)
        grad_out = _start_grad_out(g, proj, attention.quantizers, grad_output.dtype)
        grad_proj_weight = wgrad(g, _operand(own, inputs, proj).transposed(), proj, grad_output.dtype)
        del g
        grads = _attention_backward(grad_out(), inputs, out, own.shape, log_sum_exp, attention)
        del grad_out
        source, of_qk_norm = _grad_source(grads, y, attention, qkv)
        operand, grad_qkv_bias = qkv.quantizers.grad_output.quantize(source)
        del grads, source
        residual = grad_output if ctx.adds_input else residual_grad
        grad_x, grad_norm_weight, grad_norm_bias, grad_qkv_weight = norm_linear_backward(
            LocalRows(operand), residual, x, ctx.norm, statistics, qkv
        )
        of_qkv = grad_qkv_weight, delivered(grad_qkv_bias, qkv.bias)
        of_proj = grad_proj_weight, delivered(grad_proj_bias, proj.bias)
        return grad_x, grad_norm_weight, grad_norm_bias, *of_qkv, *of_proj, *of_qk_norm, *[None] * 6


def _cast_heads(y: Tensor, attention: AttentionParams) -> ops.AttentionInputs:
    """Query, key and value of the QKV projection's output y [s, b, N] in E4M3."""
    quantizers, widths, rotation = attention.quantizers, attention.widths, attention.rotation
    if attention.qk_norm is None:
        return quantizers.cast_projection(y, rotation, heads_per_group=widths[0] // rotation.head_dim)
    query, key, value = normed_parts(y, rotation, attention.qk_norm, widths)
    return quantizers.cast_inputs(query.reshape(*query.shape[:2], -1, rotation.head_dim), key, value)


def _whole_sequences(inputs: ops.AttentionInputs, group: Group | None) -> ops.AttentionInputs:
    """Query, key and value of this rank's heads, if ranks exchange them."""
    if group is None:
        return inputs
    query, key, value = gather_sequence(inputs[:3], group)
    return inputs._replace(query=query, key=key, value=value)


def _attention_backward(
    grad: Quantized,
    inputs: ops.AttentionInputs,
    out: Tensor,
    shape: torch.Size,
    log_sum_exp: Tensor,
    attention: AttentionParams,
) -> AttentionGrads:
    """The gradients of this rank's query, key and value, given its part of the output's in `shape` [s, b, heads, d]."""
    payload = grad.payload.view(shape)
    if attention.heads is not None:
        (payload,) = gather_sequence([payload], attention.heads)
    grads = attention.quantizers.backward(payload, grad.scale, inputs, out, log_sum_exp, attention.softmax_scale)
    if attention.heads is None:
        return grads
    query, key, value = scatter_sequence(grads[:3], attention.heads)
    return AttentionGrads(query, key, value, grads.scales)


def _start_grad_out(
    g: OperandRows, proj: LinearParams, quantizers: AttentionQuantizers, dtype: torch.dtype
) -> Callable[[], Quantized]:
    """Start the gradient of attention's output [s · b, heads · d]. Call the result to get it in E5M2.

    The GEMM casts it if its rows do not arrive in parts: each part would write an amax of its own.
    """
    cast = quantizers.grad_output_cast() if isinstance(g, LocalRows) else None
    if cast is None:
        pending = start_dgrad(g, proj, dtype)
        return lambda: quantizers.cast_grad_output(pending.wait())
    format = quantizers.grad_output.format
    payload = dgrad_to_fp8(g.whole(), proj, format.dtype, cast)
    return lambda: Quantized(payload, None, cast.scale, format)


def _grad_source(
    grads: AttentionGrads, y: Tensor | None, attention: AttentionParams, qkv: LinearParams
) -> tuple[QKVGradSource | GradSource, tuple[Tensor | None, ...]]:
    """The gradient of the QKV projection's output, to be cast, and those of the norms of query and key."""
    groups, sums = grads.key.shape[2], qkv.bias is not None
    if attention.qk_norm is None:
        parts = [grad.view(*grad.shape[:2], groups, -1) for grad in grads[:3]]
        return QKVGradSource(parts, sums, attention.rotation, grads.scales), (None,) * 4
    assert y is not None
    wide = [grad.view(*grad.shape[:2], groups, -1) for grad in grads.wide(y.dtype)]
    grad_y, of_qk_norm = qk_norm_backward(wide, y, attention.rotation, attention.qk_norm)
    return GradSource(grad_y, sums), of_qk_norm


def _operand(out: Tensor, inputs: ops.AttentionInputs, proj: LinearParams) -> Quantized:
    """Attention's output as the projection's input [s · b, heads · d]."""
    matrix = out.view(out.shape[0] * out.shape[1], -1)
    return Quantized(matrix, None, inputs.scale_value, proj.quantizers.input.format)
