"""The products of a step of Newton-Schulz in BF16: two symmetric ones, of which half is computed, and one with these.

With A = X·Xᵀ and B = b·A + c·A·A, a step is X ← a·X + B·X (`optimizer.newton_schulz`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..registration import operator


def _check_stacks(*stacks: Tensor | None) -> None:
    for stack in stacks:
        if stack is not None:
            assert stack.ndim == 3 and stack.dtype == torch.bfloat16, (stack.shape, stack.dtype)
            assert 1 in stack.stride()[1:], stack.stride()
            assert stack.shape[1] % 8 == 0 and stack.shape[2] % 8 == 0, stack.shape


def _check_symmetric(out: Tensor, x: Tensor, addend: Tensor | None) -> None:
    _check_stacks(out, x, addend)
    assert out.is_contiguous() and (addend is None or addend.is_contiguous())
    assert out.shape == (len(x), x.shape[1], x.shape[1]), (out.shape, x.shape)


@operator(gpu=".products_triton", mutates=["out"], check=_check_symmetric)
def symmetric_mm_(
    out: Tensor, x: Tensor, *, addend: Tensor | None = None, alpha: float = 1.0, beta: float = 0.0
) -> None:
    """out = alpha · x·xᵀ + beta · addend, accumulated in FP32. On a GPU it is symmetric, bit for bit.

    Args:
        out: BF16 [b, m, m], contiguous.
        x: BF16 [b, m, k], contiguous, or the transposition of what is; m and k are multiples of 8.
        addend: as `out`, symmetric; another tensor.
    """
    if addend is None:
        out.copy_(alpha * torch.bmm(x, x.mT))
    else:
        out.copy_(torch.baddbmm(addend, x, x.mT, beta=beta, alpha=alpha))


def _check_times(out: Tensor, factor: Tensor, x: Tensor) -> None:
    _check_stacks(out, factor, x)
    assert factor.is_contiguous() and out.shape == x.shape and out.stride() == x.stride(), (out.stride(), x.stride())
    assert factor.shape == (len(x), x.shape[1], x.shape[1]), (factor.shape, x.shape)


@operator(gpu=".products_triton", mutates=["out"], check=_check_times)
def symmetric_times_(out: Tensor, factor: Tensor, x: Tensor, *, beta: float) -> None:
    """out = factor·x + beta · x, accumulated in FP32.

    Args:
        out: as `x`; another tensor.
        factor: BF16 [b, m, m], symmetric, contiguous.
        x: BF16 [b, m, n], as that of `symmetric_mm_`.
    """
    out.copy_(torch.baddbmm(x, factor, x, beta=beta))
