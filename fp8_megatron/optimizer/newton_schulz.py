"""The nearest semi-orthogonal matrix by Newton-Schulz iterations in 16 bits, whole or over ranks that share a matrix.

For X = U·S·Vᵀ a step is X ← a·X + (b·A + c·A²)·X with A = X·Xᵀ: S ← a·S + b·S³ + c·S⁵, and U, V stay. From X / ‖X‖ the
singular values come close to 1. The coefficients give up on 1 itself for speed: see `COEFFICIENTS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from ..device.group import Group
from ..kernels import ops

Coefficients = tuple[float, float, float]

#: The (a, b, c) of the steps by name: those of emerging_optimizers 0.3, which Megatron-LM 0.20 takes. Fewer steps are
#: the first ones; more start over, or repeat the last one (`_REPEAT_LAST`).
COEFFICIENTS: Mapping[str, tuple[Coefficients, ...]] = MappingProxyType(
    {
        # https://kellerjordan.github.io/posts/muon
        "simple": ((3.4445, -4.7750, 2.0315),),
        # https://leloykun.github.io/ponder/muon-opt-coeffs
        "quintic": (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        # arXiv 2505.16932, each divided by 1.01^degree
        "polar_express": (
            (8.2051, -22.9019, 16.4607),
            (4.0664, -2.8612, 0.5184),
            (3.9096, -2.8234, 0.5250),
            (3.2856, -2.4153, 0.4853),
            (2.2779, -1.6198, 0.3985),
            (1.8726, -1.2307, 0.3585),
            (1.8564, -1.2132, 0.3568),
            (1.8750, -1.2500, 0.3750),
        ),
        # arXiv 2506.10935
        "cans": (
            (8.4703, -25.1081, 18.6293),
            (4.1828, -3.1087, 0.5806),
            (3.9619, -2.9541, 0.5630),
            (3.2866, -2.4647, 0.5074),
            (2.2737, -1.6447, 0.4162),
        ),
        # DeepSeek-V4's report
        "deepseekv4": ((3.4445, -4.7750, 2.0315),) * 8 + ((2.0, -1.5, 0.5),) * 2,
        # arXiv 2512.04632
        "aol": (
            (4.0098, -7.0585, 2.4635),
            (3.4585, -5.5479, 2.5959),
            (2.7573, -3.2939, 1.4254),
            (2.7215, -3.0494, 1.3169),
        ),
    }
)

#: Rows from which on products by halves take less time on Hopper: 7 to 15% of a step's, on an H200. Smaller ones do too
#: in large batches, but the host cannot launch single ones as fast as cuBLAS's.
_HALVED_FROM = 2048

_REPEAT_LAST = ("polar_express", "cans", "deepseekv4")


def steps_of(kind: str, num_steps: int) -> list[Coefficients]:
    """The coefficients of each step."""
    known = COEFFICIENTS[kind]
    if kind in _REPEAT_LAST:
        return [known[min(index, len(known) - 1)] for index in range(num_steps)]
    return [known[index % len(known)] for index in range(num_steps)]


def polar_factor(
    matrices: Tensor,
    steps: list[Coefficients],
    *,
    eps: float = 1e-7,
    group: Group | None = None,
    axis: int | None = None,
    errors: list[Tensor] | None = None,
) -> Tensor:
    """About U·Vᵀ of each matrix U·S·Vᵀ, BF16 [b, rows, columns]. A matrix of zeros stays one.

    Args:
        matrices: [b, rows, columns], any float dtype.
        eps: the least norm that a matrix is divided by.
        group, axis: ranks that have parts of each matrix along this axis (1 or 2), and of the result. They add their
            A = XᵀX, or X·Xᵀ, which have the size of the other axis. None: this rank has whole matrices.
        errors: the `_error` of the results is added.
    """
    is_tall = matrices.shape[1] > matrices.shape[2] if group is None else axis == 1
    x = _normalized(matrices.mT if is_tall else matrices, eps, group)
    products = _halved if _is_halved(x) else _whole
    for coefficients in steps:
        x = products(x, coefficients, group)
    if errors is not None:
        errors.append(_error(x, group))
    return x.mT if is_tall else x


def _normalized(x: Tensor, eps: float, group: Group | None) -> Tensor:
    """BF16, the matrices divided by their norms. Nothing of their size is stored but the result."""
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.float32)
    if group is not None:
        norm = norm.square()
        torch.distributed.all_reduce(norm, group=group)
        norm = norm.sqrt()
    return torch.div(x, norm.clamp_min(eps), out=torch.empty_like(x, dtype=torch.bfloat16))


def _is_halved(x: Tensor) -> bool:
    """Whether half of the symmetric products takes less time than all of them, by shape and kind of GPU alone: all
    ranks, and all batches, have the same bits."""
    rows, columns = x.shape[1:]
    if not x.is_cuda or rows < _HALVED_FROM or rows % 8 or columns % 8:
        return False
    return torch.cuda.get_device_capability(x.device) == (9, 0)


def _halved(x: Tensor, coefficients: Coefficients, group: Group | None) -> Tensor:
    """A step with products that compute one half of what is symmetric."""
    a, b, c = coefficients
    gram = x.new_empty(len(x), x.shape[1], x.shape[1])
    ops.symmetric_mm_(gram, x)
    if group is not None:
        torch.distributed.all_reduce(gram, group=group)
    factor, made = torch.empty_like(gram), torch.empty_like(x)
    ops.symmetric_mm_(factor, gram, addend=gram, alpha=c, beta=b)
    ops.symmetric_times_(made, factor, x, beta=a)
    return made


def _whole(x: Tensor, coefficients: Coefficients, group: Group | None) -> Tensor:
    """A step with torch's products."""
    a, b, c = coefficients
    gram = torch.bmm(x, x.mT)
    if group is not None:
        torch.distributed.all_reduce(gram, group=group)
    factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
    return torch.baddbmm(x, factor, x, beta=a)


def _error(x: Tensor, group: Group | None) -> Tensor:
    """How far singular values are from 1, FP32 [b]: ‖X·Xᵀ·v − v‖ / ‖v‖ of v = X·w, with one w for all; 0 of zeros.

    It is the root mean square of s² − 1, weighted by v's parts: three products with a vector, none of matrices.
    """
    # No random number: it would move those of the run.
    first = 0 if group is None else group.rank() * x.shape[2]
    w = torch.arange(first, first + x.shape[2], device=x.device).float().square().cos()

    def image(of: Tensor) -> Tensor:
        product = torch.bmm(x, of.to(x.dtype)[..., None])[..., 0].float()
        if group is not None:
            torch.distributed.all_reduce(product, group=group)
        return product

    v = image(w.expand(len(x), -1))
    off = image(torch.bmm(x.mT, v.to(x.dtype)[..., None])[..., 0]) - v
    return off.norm(dim=1) / v.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
