"""The experts of a mixture-of-experts layer: each token goes through the MLPs of its experts.

In FP8 they are one autograd function with two casts forward and two backward. Tokens are cast once, in their own order,
and the FP8 rows are copied to their experts: one byte an element. A row's probability multiplies its activation where
that is made, before its cast. So an expert's output is summed as it is, and the gradient of each of a token's rows is
the gradient of the token, cast once. Each GEMM is one launch for all experts, and no host waits for the counts of
tokens (`kernels.grouped`).

In formats with blocks the columns that a weight gradient takes have scales of their own, along the rows of an expert.
They are cast again from the FP8 rows, behind their copy (`ops.gather_blocks`).

Forward keeps the tokens in FP8, fc1's output z in 16 bits, and where rows lie. With `recomputes` it does not keep z,
and backward begins with z's GEMM.

Ranks that share the experts, each with other tokens, send each other the tokens in FP8, and add up what their experts
give (fc1 and fc2 are `Exchanged`). Of the probabilities and the choice of experts each rank gets the columns of its
experts. Which tokens a rank gets is the exchange's affair (`token_exchange`), and what is computed while
they travel that of a `Flight`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm
from torch.utils.checkpoint import checkpoint

from ...activation_functions import Activation
from ...collectives.row_exchange import RowSum
from ...dtypes import FP8_GEMM_MULTIPLE
from ...formats.format import Format, Quantized
from ...kernels import ops
from ...kernels.ops import Groups
from ...nn.first_order import once_differentiable
from ...nn.gemms import Computed, LinearParams, delivered_wgrad, transposed_weight, weight_operand
from ...nn.parallelism import PendingSum
from ...nn.rows import OperandRows
from ...quantization.scaled_tensor import ScaledTensor
from ...quantization.sources import TensorSource
from ...quantization.weight_grad import WeightGrad
from .sources import ExpertActivationGradSource, ExpertActivationSource
from .token_flight import Flight


def grouped_by_expert(
    routing_map: Tensor, top_k: int, capacity: int | None = None, num_routed: int | None = None
) -> Groups:
    """Where the rows of experts lie.

    Args:
        routing_map: bool [T, E], which experts a token goes to; at most `top_k`.
        capacity: the most tokens of an expert; None: all.
        num_routed: pairs of a token and an expert in the map; None: the host does not know.
    """
    num_tokens, num_experts = routing_map.shape
    top_k = min(top_k, num_experts)
    most = (num_tokens, top_k) if num_routed is None else (max(num_routed, 1), 1)
    num_rows = ops.most_rows(*most, num_experts, capacity)
    return Groups(*ops.routed_rows(routing_map, num_rows, top_k))


def fp8_experts(
    x: Tensor,
    probs: Tensor,
    groups: Groups,
    fc1: LinearParams,
    fc2: LinearParams,
    activation: Activation,
    *,
    recomputes: bool = False,
    flight: Flight | None = None,
) -> Tensor:
    """Σ_e p_e · fc2_e(activation(fc1_e(x))) over each token's experts, in FP8; the weight gradients go to their
    ``main_grad``.

    Args:
        x: BF16 [T, H], this rank's tokens.
        probs: FP32 [T, E], read where `groups` has a row; with `Exchanged` [R, E], of the tokens that this rank gets
            and its experts, as `groups` (`exchange_choices`).
        fc1, fc2: weights [E, Z, H] and [E, H, F]; fc1's bias [E, Z], or None. fc2's is for `with_biases`.
        activation: between both GEMMs.
        recomputes: compute fc1's output again in backward, bit for bit, instead of keeping it.
        flight: of ranks that share the experts (`Exchanged`); None: none do.

    Returns:
        BF16 [T, H]; with `flight` what stands for it until `Flight.arrived`.
    """
    call = (groups, fc1, fc2, activation, recomputes, flight, torch.is_grad_enabled())
    output: Tensor = _FP8Experts.apply(x, probs, fc1.weight, fc2.weight, fc1.bias, *call)
    return output


@torch.no_grad()
def send_tokens(x: Tensor, fc1: LinearParams, flight: Flight) -> None:
    """Cast tokens [T, H] for `fp8_experts` with this `flight`, and start to send them to all ranks."""
    tokens = _cast_tokens(x, fc1)
    flight.tokens = tokens, fc1.parallelism.gather(tokens)


def _cast_tokens(x: Tensor, fc1: LinearParams) -> Quantized:
    return fc1.quantizers.input.quantize(TensorSource(x), sync=fc1.parallelism.sync)


def with_biases(output: Tensor, probs: Tensor, bias: Tensor) -> Tensor:
    """The output of a token's experts [T, H] with Σ_e p_e · bias_e of fc2's biases [E, H].

    Args:
        probs: FP32 [T, E], 0 for experts that do not compute the token.
    """
    return output + probs.to(output.dtype) @ bias.to(output.dtype)


class KeptByExperts(NamedTuple):
    """What forward keeps for backward beside `Groups`.

    Attributes:
        payload, scale: of the tokens, FP8 [T, H] and FP32 of `Format.scale_shape`.
        z: fc1's output, BF16 [R, Z]; None: it is computed again.
        row_probs: FP32 [R].
        hidden_scale: of fc2's input, FP32 [1]; None: the values give it.
    """

    payload: Tensor
    scale: Tensor
    z: Tensor | None
    row_probs: Tensor
    hidden_scale: Tensor | None


def experts_forward(
    x: Tensor,
    probs: Tensor,
    groups: Groups,
    fc1: LinearParams,
    fc2: LinearParams,
    activation: Activation,
    *,
    recomputes: bool,
    flight: Flight | None = None,
) -> tuple[RowSum | PendingSum, KeptByExperts]:
    """`fp8_experts` without autograd, on its way, and what backward takes."""
    sent: tuple[Quantized, OperandRows] | None = None if flight is None else flight.take("tokens")
    tokens, rows = sent or (_cast_tokens(x, fc1), None)
    z = _fc1_output(tokens, fc1, groups, rows)
    row_probs = probs_of_rows(probs, groups)
    hidden = fc2.quantizers.input.quantize(ExpertActivationSource(z, row_probs, groups.offsets, activation))
    y = hidden.multiply_groups(weight_operand(fc2), groups.offsets)
    kept = KeptByExperts(tokens.payload, tokens.scale, None if recomputes else z, row_probs, hidden.shared_scale)
    del z
    return fc2.parallelism.start_sum(Computed(ops.sum_rows(y, groups.rows))), kept


class ExpertGrads(NamedTuple):
    """Gradients of `experts_forward`. A weight's is None if its `main_grad` has it, or nobody needs it."""

    x: Tensor
    probs: Tensor
    weight1: Tensor | None
    weight2: Tensor | None
    bias1: Tensor | None


def experts_backward(
    grad_output: Tensor,
    kept: KeptByExperts,
    groups: Groups,
    fc1: LinearParams,
    fc2: LinearParams,
    activation: Activation,
    *,
    probs_shape: torch.Size,
    needs: Sequence[bool],
    sent: OperandRows | None = None,
) -> ExpertGrads:
    """The gradients, as autograd or `main_grad` takes them.

    Args:
        grad_output: [T, H].
        sent: `send_grad` of it; None: it has not been sent.
        needs: whether the first and the second weight and the first bias need one.
    """
    dtype, offsets, format = grad_output.dtype, groups.offsets, fc1.quantizers.input.format
    needs_grad1, needs_grad2, needs_grad_bias = needs
    own_tokens, z = Quantized(kept.payload, None, kept.scale, format), kept.z
    if z is None:  # before the gradient is gathered: a gather may reuse the memory of the one before
        z = _fc1_output(own_tokens, fc1, groups, recomputes=True)
    grad = (sent or send_grad(grad_output, fc2)).whole()
    rows = grad.gather(groups, transposed=True)
    del grad
    source = ExpertActivationGradSource(
        rows.multiply_groups(transposed_weight(fc2), offsets),
        ExpertActivationSource(z, kept.row_probs, offsets, activation),
        fc2.quantizers.input.format,
        kept.hidden_scale,
    )
    cast = fc1.quantizers.grad_output.quantize(source)
    del source, z
    grad_weight2 = _deliver(rows.t, cast.activation.t, fc2, dtype, offsets) if needs_grad2 else None
    grad_z, grad_of_rows = cast.operand, cast.grad_probs
    del rows, cast
    tokens = fc1.parallelism.gather(own_tokens)
    grad_rows = grad_z.multiply_groups(transposed_weight(fc1), offsets)
    grad_x = fc1.parallelism.start_grad_sum(Computed(ops.sum_rows(grad_rows, groups.rows)))
    del grad_rows
    grad_weight1 = None
    if needs_grad1:
        columns = tokens.whole().gather(groups, rowwise=False, transposed=True).t
        grad_weight1 = _deliver(grad_z.t, columns, fc1, dtype, offsets)
    grad_probs = _probs_of_tokens(grad_of_rows, groups, probs_shape)
    grad_bias = _sums_of_groups(grad_z.t, offsets, format) if needs_grad_bias else None
    return ExpertGrads(grad_x.wait(), grad_probs, grad_weight1, grad_weight2, grad_bias)


def send_grad(grad_output: Tensor, fc2: LinearParams) -> OperandRows:
    """Cast the gradient [T, H] of the output, and start to send it to the experts."""
    return fc2.cast_grad(grad_output.contiguous(), transposed=False)[0]


class _FP8Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        probs: Tensor,
        weight1: ScaledTensor,
        weight2: ScaledTensor,
        bias1: Tensor | None,
        groups: Groups,
        fc1: LinearParams,
        fc2: LinearParams,
        activation: Activation,
        recomputes: bool,
        flight: Flight | None,
        needs_backward: bool,
    ) -> Tensor:
        output, kept = experts_forward(x, probs, groups, fc1, fc2, activation, recomputes=recomputes, flight=flight)
        if needs_backward:
            ctx.save_for_backward(*kept, *groups)
            ctx.call, ctx.probs_shape, ctx.flight = (fc1, fc2, activation), probs.shape, flight
        if flight is None:
            return output.wait()
        flight.output = output
        if kept.z is not None:
            flight.start_grad = lambda grad: send_grad(grad, fc2)
        return flight.stand_in(x.shape, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        saved, num_kept = ctx.saved_tensors, len(KeptByExperts._fields)
        kept, groups = KeptByExperts(*saved[:num_kept]), Groups(*saved[num_kept:])
        needs, sent = ctx.needs_input_grad[2:5], None if ctx.flight is None else ctx.flight.take("grad")
        shape = ctx.probs_shape
        grads = experts_backward(grad_output, kept, groups, *ctx.call, probs_shape=shape, needs=needs, sent=sent)
        return *grads, *[None] * 7


def _fc1_output(
    tokens: Quantized, fc1: LinearParams, groups: Groups, sent: OperandRows | None = None, *, recomputes: bool = False
) -> Tensor:
    """BF16 [R, Z] of this rank's tokens [T, H], and those of the ranks that share its experts, unless they are `sent`
    already."""
    rows = (sent or fc1.parallelism.gather(tokens)).whole().gather(groups)
    z = rows.multiply_groups(weight_operand(fc1, recomputes=recomputes), groups.offsets)
    if fc1.bias is not None:
        z += fc1.bias.detach().to(z.dtype)[_expert_of_rows(groups)]
    return z


def _expert_of_rows(groups: Groups) -> Tensor:
    """int64 [R]: each row's expert. For a row without a token it is some expert: its probability is 0."""
    return groups.source.clamp(min=0).long() % groups.num_groups


def _sums_of_groups(g_t: Quantized, offsets: Tensor, format: Format) -> Tensor:
    """FP32 [E, Z], the sums of each expert's rows of a gradient, from its columns [Z, R]: a product with ones."""
    device, num_rows = g_t.payload.device, g_t.payload.shape[1]
    ones = torch.ones(FP8_GEMM_MULTIPLE, num_rows, device=device).to(format.dtype)
    sums = torch.empty(len(offsets) - 1, len(g_t.payload), FP8_GEMM_MULTIPLE, device=device)
    scales = torch.ones(format.scale_shape(*ones.shape), device=device)
    g_t.write_wgrad_of_groups_(sums, Quantized(ones, None, scales, format), offsets)
    return sums[:, :, 0]


def _deliver(
    g_t: Quantized, x_t: Quantized, linear: LinearParams, dtype: torch.dtype, offsets: Tensor
) -> Tensor | None:
    return delivered_wgrad(WeightGrad(g_t, x_t, dtype, offsets=offsets), linear)


def experts(
    x: Tensor,
    probs: Tensor,
    groups: Groups,
    weight1: Tensor,
    weight2: Tensor,
    activation: Activation,
    *,
    bias1: Tensor | None = None,
    recomputes_activation: bool = False,
) -> Tensor:
    """`fp8_experts` in x's dtype, 16 bits, with plain weights [E, Z, H] and [E, H, F]; autograd gives all gradients.

    Args:
        bias1: fc1's biases [E, Z]; None: it has none.
        recomputes_activation: backward computes fc2's input again from fc1's output.
    """
    ends = groups.offsets[1:]
    z = grouped_mm(_GatherRows.apply(x, groups), weight1.mT, offs=ends)
    if bias1 is not None:
        z = _AddBiases.apply(z, bias1, groups)

    def fc2(z: Tensor, row_probs: Tensor) -> Tensor:
        hidden = _Activate.apply(z, row_probs, groups.offsets, activation)
        return grouped_mm(hidden, weight2.mT, offs=ends)

    row_probs = probs_of_rows(probs, groups)
    y = recomputed(fc2, z, row_probs) if recomputes_activation else fc2(z, row_probs)
    output: Tensor = _SumRows.apply(y, groups)
    return output


def recomputed(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    """`function` of `args`, which draws no random numbers. Backward computes again what it reads, and no more."""
    output: Tensor = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return output


class _AddBiases(torch.autograd.Function):
    """z [R, Z] with the bias of each row's expert, of [E, Z]."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, bias: Tensor, groups: Groups) -> Tensor:
        ctx.save_for_backward(groups.offsets)
        ctx.dtype = bias.dtype
        return z + bias.to(z.dtype)[_expert_of_rows(groups)]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (offsets,) = ctx.saved_tensors
        # The sums of each expert's rows are a product with ones, of which the kernel wants some rows.
        ones = grad.new_ones(len(grad), FP8_GEMM_MULTIPLE)
        sums = grouped_mm(ones.mT, grad.contiguous(), offs=offsets[1:])
        return grad, sums[:, 0].to(ctx.dtype), None


class _Activate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, row_probs: Tensor, offsets: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(z, row_probs, offsets)
        ctx.activation = activation
        return ops.expert_activation(z, activation, ops.ExpertRows(row_probs, offsets))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        z, row_probs, offsets = ctx.saved_tensors
        return *ops.expert_activation_backward(grad, z, ctx.activation, ops.ExpertRows(row_probs, offsets)), None, None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: Groups) -> Tensor:
        ctx.save_for_backward(groups.rows)
        return ops.gather_rows(x, groups.source, groups.num_groups, groups.offsets)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ops.sum_rows(grad, *ctx.saved_tensors), None


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, groups: Groups) -> Tensor:
        ctx.save_for_backward(*groups)
        return ops.sum_rows(y, groups.rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        groups = Groups(*ctx.saved_tensors)
        return ops.gather_rows(grad.contiguous(), groups.source, groups.num_groups, groups.offsets)[0], None


def probs_of_rows(probs: Tensor, groups: Groups) -> Tensor:
    """FP32 [R] of `probs` [T, E]; 0 for a row without a token, whose source is -1."""
    return probs.reshape(-1)[groups.source].masked_fill_(groups.source < 0, 0.0)


def _probs_of_tokens(grad: Tensor, groups: Groups, shape: torch.Size) -> Tensor:
    """The gradient [T, E] of probabilities from that of rows [R]."""
    found = grad.new_zeros(shape.numel() + 1)
    found[groups.source] = grad  # -1 is the place behind the others
    return found[:-1].view(shape)
