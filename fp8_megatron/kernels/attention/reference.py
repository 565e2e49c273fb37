"""The specification of causal attention on FP8 operands with one scale a tensor, in plain PyTorch.

Both matrix products of the forward and all five of the backward take FP8 (cuDNN's ``sdpa_fp8``). With P =
softmax(Q·Kᵀ·c) and D = rowsum(dO ∘ O), for softmax scale c (FlashAttention-2, arXiv 2307.08691, section 2.3.2):

- O = P·V; P is cast to E4M3 with the scale 2⁻⁸.
- dV = Pᵀ·dO; dP = dO·Vᵀ; dS = P ∘ (dP − D)·c; dQ = dS·K; dK = dSᵀ·Q. dS is cast to the format of dO.

Tensors lie as the layers around attention hold them: [s, b, heads, d] with any strides over the first three dimensions.
A group of query heads shares a head of key and value.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ...dtypes import E4M3, FP8_DTYPES
from ..reference import decode, encode
from ..registration import operator
from ..shapes import fp32, payload_like

#: The dequantising scale of P, which is at most 1. A power of two: E4M3 then holds 2⁻¹⁷ to 1.
PROBABILITY_SCALE = 2.0**-8


class AttentionInputs(NamedTuple):
    """Query [s, b, heads, d], key and value [s, b, groups, d] in E4M3, and their dequantising scales FP32 [1]."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale_query: Tensor
    scale_key: Tensor
    scale_value: Tensor


class WrittenCast(NamedTuple):
    """A cast inside a kernel: the dequantising scale, its reciprocal, and where the amax is written; FP32 [1] each."""

    scale: Tensor
    inverse: Tensor
    amax: Tensor


class AttentionGradCasts(NamedTuple):
    """The casts of the backward: of dS, dQ, dK and dV."""

    scores: WrittenCast
    query: WrittenCast
    key: WrittenCast
    value: WrittenCast


def check_attention(inputs: AttentionInputs) -> None:
    """Refuse shapes that no variant takes.

    Raises:
        ValueError: shapes do not fit each other, heads are no multiple of groups, or the head width is no multiple of
            16.
    """
    query, key, value = inputs[:3]
    s, b, heads, d = query.shape
    groups = key.shape[2]
    if key.shape != (s, b, groups, d) or value.shape != key.shape or heads % groups:
        raise ValueError(
            f"attention takes query [s, b, heads, d] and key and value [s, b, groups, d] with groups that divide "
            f"heads, not {list(query.shape)}, {list(key.shape)} and {list(value.shape)}"
        )
    if d % 16:
        raise ValueError(f"FP8 attention takes a head width that is a multiple of 16, not {d}")


def _forward_outputs(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    query = inputs.query
    s, b, heads, _ = query.shape
    return payload_like(query, query.shape, E4M3), fp32(query, b, heads, s)


def _check_payloads(inputs: AttentionInputs) -> None:
    assert all(x.dtype == E4M3 for x in inputs[:3]), [x.dtype for x in inputs[:3]]


@operator(gpu=".cudnn", fake=_forward_outputs, check=_check_payloads)
def fp8_attention(inputs: AttentionInputs, inverse_out: Tensor, *, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """Causal attention.

    O's rows are means of V's, so its amax is at most V's, and V's scale fits it.

    Args:
        inverse_out: FP32 [1], the reciprocal of O's dequantising scale.
        softmax_scale: c, usually 1 / √d.

    Returns:
        O in E4M3 [s, b, heads, d], contiguous; log Σ exp of the scaled scores, FP32 [b, heads, s].
    """
    check_attention(inputs)
    query, key, value = _decoded(inputs)
    scores, log_sum_exp = _scores(query, key, softmax_scale)
    probabilities = torch.exp(scores - log_sum_exp[..., None])
    out = _through_fp8(probabilities, PROBABILITY_SCALE, E4M3) @ value
    return encode(_to_tokens(out), inverse_out.reciprocal(), E4M3).contiguous(), log_sum_exp


def _gradients(inputs: AttentionInputs, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (payload_like(x, x.shape, grad.dtype) for x in inputs[:3])
    return query, key, value


def _check_grad(grad: Tensor, out: Tensor) -> None:
    assert grad.dtype in FP8_DTYPES and grad.shape == out.shape, (grad.dtype, grad.shape)


@operator(gpu=".cudnn", fake=_gradients, mutates=["amax"], check=_check_grad)
def fp8_attention_backward(
    inputs: AttentionInputs,
    grad: Tensor,
    scale_grad: Tensor,
    out: Tensor,
    scale_out: Tensor,
    log_sum_exp: Tensor,
    casts: AttentionGradCasts,
    *,
    softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `fp8_attention`, in the format of `grad`.

    Args:
        grad: dO in FP8 [s, b, heads, d]; scale_grad: its dequantising scale FP32 [1].
        out, log_sum_exp: the forward's results; scale_out: O's dequantising scale FP32 [1].
        casts: their `amax` is overwritten with the largest magnitude before the cast.

    Returns:
        dQ [s, b, heads, d], dK and dV [s, b, groups, d]; contiguous.
    """
    check_attention(inputs)
    query, key, value = _decoded(inputs)
    grad_out, forward = _to_heads(decode(grad, scale_grad)), _to_heads(decode(out, scale_out))
    scores, _ = _scores(query, key, softmax_scale)
    probabilities = torch.exp(scores - log_sum_exp[..., None])
    inner = (grad_out * forward).sum(dim=-1, keepdim=True)
    grad_scores = probabilities * (grad_out @ value.transpose(-1, -2) - inner) * softmax_scale
    casts.scores.amax.copy_(grad_scores.abs().amax())
    grad_scores = decode(encode(grad_scores, casts.scores.scale, grad.dtype), casts.scores.scale)
    groups = inputs.key.shape[2]
    grads = (
        grad_scores @ key,
        _sum_of_groups(grad_scores.transpose(-1, -2) @ query, groups),
        _sum_of_groups(_through_fp8(probabilities, PROBABILITY_SCALE, E4M3).transpose(-1, -2) @ grad_out, groups),
    )
    payloads = []
    for wide, cast in zip(grads, casts[1:], strict=True):
        cast.amax.copy_(wide.abs().amax())
        payloads.append(encode(_to_tokens(wide), cast.scale, grad.dtype).contiguous())
    return payloads[0], payloads[1], payloads[2]


def _decoded(inputs: AttentionInputs) -> tuple[Tensor, Tensor, Tensor]:
    """FP32 [b, heads, s, d] each; a group's key and value are repeated for its heads."""
    repeats = inputs.query.shape[2] // inputs.key.shape[2]
    query = _to_heads(decode(inputs.query, inputs.scale_query))
    key = _to_heads(decode(inputs.key, inputs.scale_key)).repeat_interleave(repeats, dim=1)
    value = _to_heads(decode(inputs.value, inputs.scale_value)).repeat_interleave(repeats, dim=1)
    return query, key, value


def _scores(query: Tensor, key: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """Scaled and masked scores [b, heads, s, s], and log Σ exp of their rows."""
    length = query.shape[-2]
    is_later = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    scores = (query @ key.transpose(-1, -2) * softmax_scale).masked_fill(is_later, -math.inf)
    return scores, scores.logsumexp(dim=-1)


def _through_fp8(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    factor = torch.full((1,), scale, device=x.device)
    return decode(encode(x, factor, dtype), factor)


def _sum_of_groups(grad: Tensor, groups: int) -> Tensor:
    """[b, heads, s, d] → [b, groups, s, d]."""
    b, heads, s, d = grad.shape
    return grad.view(b, groups, heads // groups, s, d).sum(dim=2)


def _to_heads(x: Tensor) -> Tensor:
    """[s, b, heads, d] → [b, heads, s, d]."""
    return x.permute(1, 2, 0, 3)


def _to_tokens(x: Tensor) -> Tensor:
    """[b, heads, s, d] → [s, b, heads, d]."""
    return x.permute(2, 0, 1, 3)


def _merged(outs: list[Tensor], log_sum_exps: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.empty_like(outs[0], dtype=dtype), torch.empty_like(log_sum_exps[0])


@operator(gpu=".partials_triton", fake=_merged)
def merge_attention(outs: list[Tensor], log_sum_exps: list[Tensor], *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Attention over the keys of all blocks, from that over each block (FlashAttention-2, arXiv 2307.08691, section
    3.1).

    With L = log Σᵢ exp(Lᵢ), the output is Σᵢ exp(Lᵢ - L) · Oᵢ, in FP32 in the order of the blocks.

    Args:
        outs: Oᵢ [sᵢ, b, heads, d], contiguous. The first has all rows, the others have the last sᵢ of them.
        log_sum_exps: Lᵢ FP32 [b, heads, sᵢ], contiguous.
        dtype: of the output.

    Returns:
        The output [s, b, heads, d], and L FP32 [b, heads, s].
    """
    whole = log_sum_exps[0]
    padded = [
        torch.nn.functional.pad(one, (whole.shape[2] - one.shape[2], 0), value=-torch.inf) for one in log_sum_exps
    ]
    total = torch.stack(padded).logsumexp(dim=0)
    wide = torch.promote_types(whole.dtype, outs[0].dtype)
    out = torch.zeros_like(outs[0], dtype=wide)
    for one, log_sum_exp in zip(outs, padded, strict=True):
        weight = torch.exp(log_sum_exp - total).permute(2, 0, 1)[..., None]
        out[-one.shape[0] :] += weight[-one.shape[0] :] * one
    return out.to(dtype), total


@operator(gpu=".partials_triton", fake=lambda parts, dtype: torch.empty_like(parts[0], dtype=dtype))
def sum_partials(parts: list[Tensor], *, at_end: bool, dtype: torch.dtype) -> Tensor:
    """Σᵢ partsᵢ in FP32, in order, rounded once.

    Args:
        parts: [sᵢ, …], contiguous. The first has all rows, the others have sᵢ of them.
        at_end: they are the last rows; otherwise the first.
        dtype: of the sum.
    """
    total = parts[0].to(torch.promote_types(parts[0].dtype, torch.float32))
    total = total.clone() if total is parts[0] else total
    for part in parts[1:]:
        rows = total[-part.shape[0] :] if at_end else total[: part.shape[0]]
        rows += part
    return total.to(dtype)
