"""The end of the model as one FP8 function: final norm → LM head → cross-entropy, cast to FP8 at every arrow.

The weight stays in 16 bits (a tied head's is the embedding) and is cast where a GEMM takes it. The vocabulary is taken
in n parts, as tensor-parallel ranks share it. A part's logits [T, V / n] stay in BF16 until backward casts their
gradient into both layouts, 2 bytes an element again, and lets go of them: dgrad takes one layout at once and adds the
parts up, the other waits until all logits are gone, and wgrad writes each part's rows of the weight gradient.

For T tokens of width h the most is held as the first part is cast: 2TV bytes of logits and 2TV/n of gradient. (In BF16:
2TV + 2hV + 2Th, wgrad's output beside the logits.) Of the weight no more than a part, hV/n, is there in FP8, in one
layout. Forward moves 5 bytes a parameter for its casts, backward 3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..kernels import ops
from ..quantization.recipe import GRAD_OUTPUT_DTYPE, WEIGHT_DTYPE, Quantizer
from .cross_entropy import agree_on_statistics, local_labels
from .linear import (
    NormParams,
    NormSettings,
    NormStatistics,
    TensorParallelism,
    gathered_shape,
    norm_backward,
    quantized_norm,
    start_grad_sum,
    start_norm_again,
    transposed_norm,
)

#: Columns of the vocabulary in one part, about: memory falls with smaller parts, and dgrad adds up more of them.
_PART_COLUMNS = 16384
_PART_MULTIPLE = 128


def fp8_norm_head_loss(
    x: Tensor,
    norm: NormParams,
    weight: Tensor,
    labels: Tensor,
    quantizer: Quantizer,
    parallelism: TensorParallelism,
    *,
    power_of_two: bool = False,
) -> Tensor:
    """−log softmax(norm(x)·Wᵀ)[label] of every token, its GEMMs in FP8.

    The gradient of the logits needs no amax: each token's upstream gradient bounds it (see
    `cross_entropy.cross_entropy_backward_quantize`), under delayed scaling too, where a history could only be wrong.

    Args:
        x: BF16 [s, b, h], before the norm; with `gathers_input` [s/tp, b, h].
        weight: 16-bit [V/tp, h], this rank's rows; its gradient goes through autograd, as an embedding's does.
        labels: int64 [s, b], over the whole vocabulary.
        quantizer: of the norm's output. `power_of_two`: rounds the scale of the gradient up.

    Returns:
        FP32 [s, b], alike on all ranks of the group. Backward works once: it gives the logits up.
    """
    return _FP8NormHeadLoss.apply(
        x,
        norm.weight,
        norm.bias,
        weight,
        labels,
        norm.settings,
        power_of_two,
        quantizer,
        parallelism,
        torch.is_grad_enabled(),
    )


def fp8_norm_head_logits(
    x: Tensor, norm: NormParams, weight: Tensor, quantizer: Quantizer, parallelism: TensorParallelism
) -> Tensor:
    """norm(x)·Wᵀ, BF16 [s, b, V/tp], the same as in the loss; for evaluation, without gradient."""
    with torch.no_grad():
        rows, kept = quantized_norm(x, norm, quantizer, parallelism)
        payload = rows.wait()
        parts = [_logits(payload, kept.scale, part, x.dtype)[0] for part in _parts(weight)]
        return torch.cat(parts, dim=1).view(*gathered_shape(x, parallelism), weight.shape[0])


class _FP8NormHeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor | None,
        weight: Tensor,
        labels: Tensor,
        norm_settings: NormSettings,
        power_of_two: bool,
        quantizer: Quantizer,
        parallelism: TensorParallelism,
        needs_backward: bool,
    ) -> Tensor:
        rows, kept = quantized_norm(x, NormParams(norm_weight, norm_bias, *norm_settings), quantizer, parallelism)
        payload = rows.wait()
        local = local_labels(labels, weight.shape[0], parallelism.group)
        statistics, all_logits, weight_scales, first = [], [], [], 0
        for part in _parts(weight):
            logits, weight_scale = _logits(payload, kept.scale, part, x.dtype)
            statistics.append(ops.cross_entropy_statistics(logits, local - first))
            if needs_backward:
                all_logits.append(logits)
                weight_scales.append(weight_scale)
            del logits
            first += part.shape[0]
        log_sum_exp, target = agree_on_statistics(*_merged(statistics), parallelism.group)
        if needs_backward:
            ctx.save_for_backward(x, norm_weight, norm_bias, weight, local, log_sum_exp, *kept)
            # Not saved as the others: each is let go of when its gradient is made.
            ctx.logits, ctx.weight_scales = all_logits, weight_scales
            ctx.norm_settings, ctx.power_of_two, ctx.parallelism = norm_settings, power_of_two, parallelism
        return (log_sum_exp - target).view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, norm_weight, norm_bias, weight, local, log_sum_exp, *kept = ctx.saved_tensors
        norm, statistics = NormParams(norm_weight, norm_bias, *ctx.norm_settings), NormStatistics(*kept)
        assert ctx.logits, "a second backward: the first gave the logits up"
        gathering = start_norm_again(x, norm, statistics, ctx.parallelism)
        upstream = grad.reshape(-1).contiguous()
        scale, grad_input, payloads_t, first = None, None, [], 0
        for part, weight_scale in zip(_parts(weight), ctx.weight_scales, strict=True):
            payload, payload_t, taken = ops.cross_entropy_backward_quantize(
                ctx.logits.pop(0),
                local - first,
                log_sum_exp,
                upstream,
                GRAD_OUTPUT_DTYPE,
                scale=scale,
                power_of_two=ctx.power_of_two,
            )
            scale = taken if scale is None else scale
            payloads_t.append(payload_t)
            _, part_t = ops.quantize_with_scale(part, weight_scale, WEIGHT_DTYPE, rowwise=False, transposed=True)
            partial = ops.scaled_mm(payload, part_t, scale, weight_scale, out_dtype=x.dtype)
            del payload, part_t
            grad_input = partial if grad_input is None else grad_input.add_(partial)
            del partial
            first += part.shape[0]
        assert scale is not None and grad_input is not None
        reducing = start_grad_sum(grad_input, ctx.parallelism)
        del grad_input
        x_t = transposed_norm(gathering, x, norm, statistics)
        grad_weight = _weight_gradient(payloads_t, scale, x_t, statistics.scale, weight)
        del x_t, gathering
        grad_x, grad_norm_weight, grad_norm_bias = norm_backward(reducing.summands(), None, x, norm, statistics)
        return grad_x, grad_norm_weight, grad_norm_bias, grad_weight, *[None] * 6


def _parts(weight: Tensor) -> tuple[Tensor, ...]:
    """Even parts of the vocabulary: views [part, h] of `weight` [V, h]."""
    count = max(1, round(weight.shape[0] / _PART_COLUMNS))
    rows = -(-weight.shape[0] // (count * _PART_MULTIPLE)) * _PART_MULTIPLE
    return weight.detach().split(rows)


def _logits(payload: Tensor, scale: Tensor, part: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits [T, part] of `payload` [T, h], and the scale of the weight's part [part, h]."""
    part_payload, _, part_scale = ops.quantize_current(part, WEIGHT_DTYPE)
    logits = ops.scaled_mm(payload, part_payload, scale, part_scale, out_dtype=dtype, use_fast_accum=True)
    return logits, part_scale


def _merged(statistics: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """`ops.cross_entropy_statistics` of all parts from those of each."""
    if len(statistics) == 1:
        return statistics[0]
    largest, total, target = (torch.stack(tensors) for tensors in zip(*statistics, strict=True))
    highest = largest.amax(dim=0)
    return highest, (total * torch.exp(largest - highest)).sum(dim=0), target.sum(dim=0)


def _weight_gradient(payloads_t: list[Tensor], scale: Tensor, x_t: Tensor, x_scale: Tensor, weight: Tensor) -> Tensor:
    """grad_weight [V, h] from the gradients [part, T] of the logits, which it lets go of, and `x_t` [h, T]."""
    grad_weight = torch.empty_like(weight)
    for rows in grad_weight.split([payload_t.shape[0] for payload_t in payloads_t]):
        ops.scaled_mm_into_(rows, payloads_t.pop(0), x_t, scale, x_scale)
    return grad_weight
