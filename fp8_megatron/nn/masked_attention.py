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
    seq, batch, heads, width = query.shape
    q, k, v = (x.transpose(0, 1) for x in (query, key, value))
    if cu_seqlens is not None:
        q, k, v = (x.reshape(batch * seq, -1, width) for x in (q, k, v))
    context = torch.ops.aten._flash_attention_forward(
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
        window_size_left=-1 if window is None else window,
        window_size_right=0,
    )[0]
    return context.view(batch, seq, heads * width).transpose(0, 1)


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
