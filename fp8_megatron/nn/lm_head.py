"""The end of the model as one FP8 function: final norm → LM head → cross-entropy, cast to FP8 at every arrow.

The weight stays in 16 bits (a tied head's weight is the embedding) and is cast where a GEMM takes it. The vocabulary is
cut into n parts, the way tensor-parallel ranks share it. A part's logits [T, V / n] stay in BF16 until backward.
Backward casts their gradient into both layouts, 2 bytes an element in all, and frees the logits. dgrad takes the first
layout at once and sums over parts. The second waits until all logits are freed; then wgrad writes each part's rows of
the weight gradient.

For T tokens of width h, memory peaks when the first part is cast: 2TV bytes of logits and 2TV/n of gradient. (In BF16
the peak is 2TV + 2hV + 2Th: wgrad's output and the logits.) At most one part of the weight, hV/n bytes in one layout,
exists in FP8. Forward moves 5 bytes a parameter for its casts, backward 3. Backward reads the logits once, and for
wgrad norm's input twice.

The scales of the logits' gradient
==================================

Let g be a token's upstream gradient and p its probabilities. The gradient of its logits is g · (p − onehot). Most of
its power is in the label's element, −g · (1 − p). With one scale for all tokens, E5M2 would round that element to −g
wherever 1 − p is above 13/14, because its next smaller number is 6/7 of the largest. This error has one sign. The
gradient would not sum to 0 over the vocabulary, and what all logits have in common would drift.

So each token has its own scale, g · (1 − p) (`ops.token_scales`). The label's element is then −1, which is exact, and
no other element is larger. dgrad multiplies the rows of its output by the scales. wgrad sums over tokens, so its other
operand is cast from norm(x) times the scales (`_ScaledNorm`).

Rounding to nearest makes the other elements 0.28% too small in the mean, because the rounding boundaries around a
power of two are not symmetric. They are cast times 1 / 0.99722. The label's element is −1 all the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..formats.format import Format, Quantized
from ..kernels import ops
from ..quantization.cast_health import CastProbe, row_step
from ..quantization.recipe import HeadQuantizers, Quantizer
from ..quantization.sample import Sample
from ..quantization.sources import NormStatistics, TensorSource
from .cross_entropy import agree_on_statistics, first_column, local_columns
from .first_order import once_differentiable
from .gemms import Computed
from .normed import NormParams, norm_backward, quantized_norm
from .parallelism import Local

#: About how many vocabulary columns a part has. Smaller parts take less memory, but dgrad sums over more of them.
_PART_COLUMNS = 16384
_PART_MULTIPLE = 128


def fp8_norm_head_loss(
    x: Tensor,
    norm: NormParams,
    weight: Tensor,
    labels: Tensor,
    quantizers: HeadQuantizers,
    parallelism: Local,
    vocab_size: int | None = None,
) -> Tensor:
    """−log softmax(norm(x)·Wᵀ)[label] of every token, with FP8 GEMMs.

    The gradient of the logits has a scale for each token, which its loss gives. It needs no amax and no history.

    Args:
        x: BF16 [s, b, h], before the norm; with `SequenceColumn` [s/tp, b, h].
        weight: 16-bit [V/tp, h], this rank's rows; its gradient goes through autograd, as an embedding's does.
        labels: int64 [s, b], over the whole vocabulary.
        quantizers: the casts of the head; each format has one scale for the tensor.
        vocab_size: tokens of the whole vocabulary. Later rows of the weight are padding: they take no part in the
            softmax and get the gradient 0. None: no padding.

    Returns:
        FP32 [s, b], equal on all ranks of the group. Backward can run once, because it frees the logits.
    """
    return _FP8NormHeadLoss.apply(
        x,
        norm.weight,
        norm.bias,
        weight,
        labels,
        norm,
        quantizers,
        parallelism,
        vocab_size,
        torch.is_grad_enabled(),
    )


def fp8_norm_head_logits(
    x: Tensor, norm: NormParams, weight: Tensor, quantizers: HeadQuantizers, parallelism: Local
) -> Tensor:
    """norm(x)·Wᵀ, BF16 [s, b, V/tp]: the loss's logits, without gradient, for evaluation."""
    with torch.no_grad():
        rows, _ = quantized_norm(x, norm, quantizers.input, parallelism)
        operand = rows.whole()
        parts = [_logits(operand, part, quantizers, x.dtype)[0] for part in _parts(weight)]
        return torch.cat(parts, dim=1).view(*parallelism.output_leading(x.shape[:-1]), weight.shape[0])


@dataclass(frozen=True)
class _ScaledNorm:
    """The source of wgrad's other operand: norm(x) times the tokens' scales, computed in FP32 where it is cast.

    Attributes:
        x: 16-bit [T, K], in front of the norm. row_scales: FP32 [T].
        transposed: cast the columns [K, T], not the rows [T, K].
    """

    x: Tensor
    norm: NormParams
    statistics: NormStatistics
    row_scales: Tensor
    transposed: bool

    def _operands(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor]:
        norm, statistics = self.norm, self.statistics
        return self.x, norm.weight, norm.bias, statistics.mean, statistics.rstd, self.row_scales

    def amax(self) -> Tensor:
        return ops.norm_amax_scaled(*self._operands())

    def quantize(self, format: Format, scale: Tensor | None, *, amax_out: Tensor | None = None) -> Quantized:
        assert amax_out is None and format.takes_scale, "its scales are those of its own values, one for the tensor"
        payload, taken = ops.norm_quantize_scaled(
            *self._operands(),
            format.dtype,
            scale=scale,
            power_of_two=format.power_of_two,
            transposed=self.transposed,
        )
        used = taken if scale is None else scale
        if self.transposed:
            return Quantized(None, payload, used, format)
        return Quantized(payload, None, used, format)

    def sample(self, operand: Quantized, step: int) -> Sample:
        raise AssertionError("the cast of the head's input is measured in forward, without the tokens' scales")


def _scaled_columns(
    x: Tensor, norm: NormParams, statistics: NormStatistics, scales: Tensor, format: Format, parallelism: Local
) -> Quantized:
    """norm(x) times `scales` FP32 [T] of all tokens, cast, and gathered where ranks share the sequence: [K, T]."""
    own = x.reshape(-1, x.shape[-1])
    if parallelism.group is not None and len(own) < len(scales):
        scales = scales.chunk(parallelism.group.size())[parallelism.group.rank()]
    source = _ScaledNorm(own, norm, statistics, scales, parallelism.casts_columns(format))
    return parallelism.gather_columns(partial(Quantizer(format).quantize, source, sync=parallelism.sync))()


class _FP8NormHeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor | None,
        weight: Tensor,
        labels: Tensor,
        norm: NormParams,
        quantizers: HeadQuantizers,
        parallelism: Local,
        vocab_size: int | None,
        needs_backward: bool,
    ) -> Tensor:
        rows, kept = quantized_norm(x, norm, quantizers.input, parallelism)
        operand = rows.whole()
        flat_labels, begin = labels.reshape(-1), first_column(weight.shape[0], parallelism.group)
        num_columns = local_columns(vocab_size, weight.shape[0], parallelism.group)
        statistics, all_logits, weight_scales, first = [], [], [], 0
        for part in _parts(weight):
            logits, weight_scale = _logits(operand, part, quantizers, x.dtype)
            own = _columns_of(part, first, num_columns)
            statistics.append(ops.cross_entropy_statistics(logits, flat_labels, first=begin + first, num_columns=own))
            if needs_backward:
                all_logits.append(logits)
                weight_scales.append(weight_scale)
            del logits
            first += part.shape[0]
        log_sum_exp, target = agree_on_statistics(*_merged(statistics), parallelism.group)
        if needs_backward:
            ctx.save_for_backward(x, weight, flat_labels, log_sum_exp, target, *kept)
            # Kept outside save_for_backward: each part is freed when its gradient is made.
            ctx.logits, ctx.weight_scales = all_logits, weight_scales
            ctx.norm, ctx.quantizers, ctx.parallelism = norm, quantizers, parallelism
            ctx.begin, ctx.num_columns = begin, num_columns
        return (log_sum_exp - target).view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, labels, log_sum_exp, target, *kept = ctx.saved_tensors
        norm, quantizers, statistics = ctx.norm, ctx.quantizers, NormStatistics(*kept)
        grad_format: Format = quantizers.grad_output
        assert ctx.logits, "a second backward: the first gave the logits up"
        factors, scales, scale = ops.token_scales(log_sum_exp, target, grad.reshape(-1))
        grad_input, grads_t, first = None, [], 0
        for part, weight_scale in zip(_parts(weight), ctx.weight_scales, strict=True):
            logits = ctx.logits.pop(0)
            own = _columns_of(part, first, ctx.num_columns)
            place: dict[str, int] = dict(first=ctx.begin + first, num_columns=own)
            payload, payload_t = ops.cross_entropy_backward_quantize(
                logits, labels, log_sum_exp, factors, scale, grad_format.dtype, **place
            )
            cast = Quantized(payload, None, scale, grad_format)
            probe = quantizers.grad_output_probe
            if probe is not None and probe.is_due:  # of the first part, as the weight
                _measure_gradient(probe, cast, logits, labels, log_sum_exp, factors, **place)
            del logits
            grads_t.append(Quantized(payload_t, None, scale, grad_format))
            part_t = TensorSource(part, rowwise=False, transposed=True).quantize(quantizers.weight, weight_scale).t
            # The GEMM adds what the parts before gave, and rounds once.
            total = x.new_empty(len(labels), weight.shape[1])
            cast.multiply_into_(total, part_t, addend=grad_input)
            grad_input = total
            del payload, payload_t, part_t, cast, total
            first += part.shape[0]
        assert grad_input is not None
        reducing = ctx.parallelism.start_grad_sum(Computed(grad_input.mul_(scales.unsqueeze(1))))
        del grad_input
        x_t = _scaled_columns(x, norm, statistics, scales, quantizers.input.format, ctx.parallelism)
        grad_weight = _weight_gradient(grads_t, x_t, weight)
        del x_t
        grad_x, grad_norm_weight, grad_norm_bias = norm_backward(reducing.summands(), None, x, norm, statistics)
        return grad_x, grad_norm_weight, grad_norm_bias, grad_weight, *[None] * 6


def _parts(weight: Tensor) -> tuple[Tensor, ...]:
    """Even parts of the vocabulary: views [part, h] of `weight` [V, h]."""
    count = max(1, round(weight.shape[0] / _PART_COLUMNS))
    rows = -(-weight.shape[0] // (count * _PART_MULTIPLE)) * _PART_MULTIPLE
    return weight.detach().split(rows)


def _columns_of(part: Tensor, first: int, num_columns: int) -> int:
    """How many rows of `part` hold tokens, where it starts at row `first` and `num_columns` rows of all do."""
    return min(max(num_columns - first, 0), part.shape[0])


def _logits(operand: Quantized, part: Tensor, quantizers: HeadQuantizers, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits [T, part] of `operand` [T, h], and the scale of the weight's part [part, h]."""
    weight = quantizers.weight.cast(part)
    probe = quantizers.weight_probe
    if probe is not None and probe.is_due:  # of the first part, which has the most frequent tokens
        probe.measure_weight(part, weight)
    return operand.multiply(weight, dtype, use_fast_accum=True), weight.scale


def _measure_gradient(
    probe: CastProbe,
    cast: Quantized,
    logits: Tensor,
    labels: Tensor,
    log_sum_exp: Tensor,
    factors: Tensor,
    *,
    first: int,
    num_columns: int,
) -> None:
    """Measure the cast of a gradient from a part's `logits` [T, V], but for its padding, for some rows.

    Args:
        factors: FP32 [T], what p − onehot was multiplied by.
    """
    if num_columns == 0:  # this rank holds padding alone
        return
    step = row_step(len(logits), num_columns)
    rows = logits[::step, :num_columns].float().contiguous()
    operands = (values[::step].contiguous() for values in (labels, log_sum_exp, factors))
    ops.cross_entropy_backward_(rows, *operands, first=first)
    own = Quantized(cast.payload[:, :num_columns], None, cast.scale, cast.format)
    probe.measure(rows, own.payload[::step], own.format.row_scales(own, step))


def _merged(statistics: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """`ops.cross_entropy_statistics` of the whole, from the statistics of each part."""
    if len(statistics) == 1:
        return statistics[0]
    largest, total, target = (torch.stack(tensors) for tensors in zip(*statistics, strict=True))
    highest = largest.amax(dim=0)
    return highest, (total * torch.exp(largest - highest)).sum(dim=0), target.sum(dim=0)


def _weight_gradient(grads_t: list[Quantized], x_t: Quantized, weight: Tensor) -> Tensor:
    """grad_weight [V, h] from the gradients [part, T] of the logits, which it frees, and `x_t` [h, T]."""
    grad_weight = torch.empty_like(weight)
    for rows in grad_weight.split([grad_t.payload.shape[0] for grad_t in grads_t]):
        grads_t.pop(0).multiply_into_(rows, x_t)
    return grad_weight
