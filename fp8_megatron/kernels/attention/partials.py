"""The specification of sums of what blocks of attention give, in plain PyTorch: outputs, and gradients.

Rows are the first dimension, tokens of one rank. A summand has all rows, or only the first or the last of them.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from ..registration import operator


def _merged(a: SimpleNamespace) -> tuple[Tensor, Tensor]:
    return torch.empty_like(a.outs[0], dtype=a.dtype), torch.empty_like(a.log_sum_exps[0])


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


@operator(gpu=".partials_triton", fake=lambda a: torch.empty_like(a.parts[0], dtype=a.dtype))
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
