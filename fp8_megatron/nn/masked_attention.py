"""Causal attention within documents, or within a sliding window: FlashAttention, or a dense mask as specification.

Both limits only remove keys from the causal mask. Query i of a sequence attends to key j if j ≤ i, i - j ≤ window, and
i and j belong to one document.

PyTorch's `varlen_attn` has no dropout, so FlashAttention is called through the operator beneath it. That operator has
a backward, takes grouped queries as they are, and needs no window or length on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_seqlens: Tensor | None,
    window: int | None,
    scale: float,
    dropout: float,
) -> Tensor:
    """softmax(scale · QKᵀ)·V under the mask, by PyTorch's FlashAttention kernels on a GPU.

    Documents need the tokens of a sequence one after another. With several sequences in a micro-batch, query, key and
    value are copied into that order; one sequence is read where it lies. A kernel block of a document that is not there
    (see `cu_seqlens`) ends at once.

    Args:
        query: 16 bits, [s, b, heads, d]; d is a multiple of 8, at most 256.
        key, value: [s, b, groups, d]; groups divides heads.
        cu_seqlens: int32 [n + 1] on the device: where documents start among the b · s tokens, sequence by sequence, and
            b · s at the end. A document lies in one sequence. Repeated ends are documents without tokens. None: each
            sequence is one document.
        window: how many earlier tokens a token attends to; None: all.
        dropout: probability, on attention probabilities.

    Returns:
        [s, b, heads · d].
    """
    out = flash_forward(query, key, value, cu_seqlens=cu_seqlens, window=window, scale=scale, dropout=dropout)[0]
    return out.flatten(2)


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_seqlens: Tensor | None,
    window: int | None,
    scale: float,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`flash_attention`'s output [s, b, heads, d], and log Σ exp of the scaled scores FP32 [b, heads, s]."""
    seq, batch, heads, _ = query.shape
    q, k, v = (_as_kernels_take(x, cu_seqlens) for x in (query, key, value))
    context, log_sum_exp = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        seq,
        seq,
        dropout,
        True,  # causal
        False,  # no mask to debug
        scale=scale,
        **_sides(window),
    )[:2]
    if cu_seqlens is not None:  # [heads, b · s]
        log_sum_exp = log_sum_exp.view(heads, batch, seq).transpose(0, 1)
    return context.view(batch, seq, heads, -1).transpose(0, 1), log_sum_exp


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sum_exp: Tensor,
    *,
    cu_seqlens: Tensor | None,
    window: int | None,
    scale: float,
) -> list[Tensor]:
    """The gradients of query, key and value without dropout, of rows with this output [s, b, heads, d] and log Σ exp
    FP32 [b, heads, s]."""
    seq, batch, _, width = query.shape
    operands = [_as_kernels_take(x, cu_seqlens) for x in (grad_out, query, key, value, out)]
    if cu_seqlens is not None:
        log_sum_exp = log_sum_exp.transpose(0, 1).flatten(1)
    no_seed = torch.empty(2, dtype=torch.int64, device=query.device)  # without dropout nobody reads it
    grads = torch.ops.aten._flash_attention_backward(
        *operands,
        log_sum_exp.contiguous(),
        cu_seqlens,
        cu_seqlens,
        seq,
        seq,
        0.0,
        True,
        no_seed,
        no_seed[0],
        scale=scale,
        **_sides(window),
    )
    return [grad.view(batch, seq, -1, width).transpose(0, 1) for grad in grads]


def _as_kernels_take(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """[s, b, heads, d] as [b, s, heads, d], or with documents as [b · s, heads, d]."""
    return x.transpose(0, 1) if cu_seqlens is None else x.transpose(0, 1).flatten(0, 1)


def _sides(window: int | None) -> dict[str, int]:
    return {"window_size_left": -1 if window is None else window, "window_size_right": 0}


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_seqlens: Tensor | None,
    window: int | None,
    scale: float,
    dropout: float,
) -> Tensor:
    """`flash_attention` with a mask of [b, 1, s, s] Booleans, on any device and for any width. FP32 on a CPU."""
    dtype = query.dtype
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    if q.device.type == "cpu":  # PyTorch's backward on a CPU is seven times as slow in BF16 as in FP32
        q, k, v = q.float(), k.float(), v.float()
    mask = allowed_keys(query.shape[0], query.shape[1], cu_seqlens=cu_seqlens, window=window, device=query.device)
    with sdpa_kernel(SDPBackend.MATH):
        context = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    return context.to(dtype).permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)


def allowed_keys(
    seq: int, batch: int, *, cu_seqlens: Tensor | None, window: int | None, device: torch.device
) -> Tensor:
    """Bool [b or 1, 1, s, s]: whether a query (row) attends to a key (column)."""
    place = torch.arange(seq, device=device)
    distance = place[:, None] - place[None, :]
    allowed = (distance >= 0) & (distance <= (seq if window is None else window))
    if cu_seqlens is None:
        return allowed[None, None]
    token = torch.arange(batch * seq, dtype=cu_seqlens.dtype, device=device)
    document = torch.searchsorted(cu_seqlens, token, right=True).view(batch, seq)
    return (allowed & (document[:, :, None] == document[:, None, :]))[:, None]
