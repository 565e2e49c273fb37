"""Cross-entropy in Triton: the operators of `cross_entropy`.

Logits in 16 bits are read once for the loss, and read and written once for the gradient: 6 bytes an element, where a
loss computed in FP32 by separate kernels moves some 30.
"""

# The parameters of a Triton kernel have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_NUM_WARPS = 8
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _cross_entropy_statistics(logits, labels, largest, total, target, V, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * V
    columns = tl.arange(0, BLOCK)
    running = -float("inf")
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        value = tl.load(base + start + columns, mask=start + columns < V, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(running, tl.max(value, axis=0))
        # A row of −inf so far would give inf − inf.
        shift = tl.where(higher == -float("inf"), 0.0, higher)
        sums = sums * tl.exp2((running - shift) * _LOG2_E) + tl.exp2((value - shift) * _LOG2_E)
        running = higher
    label = tl.load(labels + row)
    is_here = (label >= 0) & (label < V)
    tl.store(largest + row, running)
    tl.store(total + row, tl.sum(sums, axis=0))
    tl.store(target + row, tl.load(base + tl.where(is_here, label, 0), mask=is_here, other=0.0).to(tl.float32))


@triton.jit
def _cross_entropy_backward(logits, labels, log_sum_exp, grad, V, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pointers = logits + row.to(tl.int64) * V + columns
    mask = columns < V
    value = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    probability = tl.exp2((value - tl.load(log_sum_exp + row)) * _LOG2_E)
    probability = tl.where(columns == tl.load(labels + row), probability - 1.0, probability)
    tl.store(pointers, (probability * tl.load(grad + row)).to(logits.dtype.element_ty), mask=mask)


def cross_entropy_statistics(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`cross_entropy.cross_entropy_statistics`: one launch, a row a program."""
    T, V = logits.shape
    largest, total, target = (torch.empty(T, dtype=torch.float32, device=logits.device) for _ in range(3))
    _cross_entropy_statistics[(T,)](logits, labels, largest, total, target, V, _BLOCK, num_warps=_NUM_WARPS)
    return largest, total, target


def cross_entropy_backward_(logits: Tensor, labels: Tensor, log_sum_exp: Tensor, grad: Tensor) -> None:
    """`cross_entropy.cross_entropy_backward_`: one launch."""
    T, V = logits.shape
    _cross_entropy_backward[(T, triton.cdiv(V, _BLOCK))](
        logits, labels, log_sum_exp, grad, V, _BLOCK, num_warps=_NUM_WARPS
    )
