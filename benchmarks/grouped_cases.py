"""Cases of `kernels.py` for experts: rows grouped by expert, and their activation. A floor reads each token once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from fused_cases import Scaling, rotating
from kernel_timing import Case, Rotating
from torch import Tensor

from fp8_megatron.activation_functions import Activation
from fp8_megatron.dtypes import E4M3, E5M2, GROUP_ROWS
from fp8_megatron.kernels import ops

_SWIGLU = Activation("swiglu")


def rows(device: torch.device, tokens: int, hidden: int, num_experts: int, top_k: int) -> Iterator[Case]:
    """Where rows lie, tokens' rows to their experts, and the sum of a token's rows."""
    num_rows = tokens * top_k
    at = f"{tokens}×{hidden}, {top_k} of {num_experts}"
    chosen = _balanced(device, tokens, num_experts, top_k)
    offsets, source, places = ops.routed_rows(chosen, num_rows, top_k)
    yield Case(
        f"routed_rows {at}",
        lambda _: ops.routed_rows(chosen, num_rows, top_k),
        tokens * num_experts + 4 * (num_experts + 2 * num_rows),
    )
    x = Rotating(lambda: torch.randn(tokens, hidden, device=device).to(E4M3))
    for layout, rowwise, transposed in (("", True, False), (" + transposed", True, True), (" transposed", False, True)):
        layouts = dict(rowwise=rowwise, transposed=transposed)
        yield Case(
            f"gather_rows E4M3{layout} {at}",
            lambda i, layouts=layouts: ops.gather_rows(x(i), source, num_experts, offsets, **layouts),
            (tokens + (rowwise + transposed) * num_rows) * hidden + 4 * num_rows,
        )
    y = rotating(device, num_rows, hidden)
    yield Case(f"sum_rows {at}", lambda i: ops.sum_rows(y(i), places), 2 * (num_rows + tokens) * hidden + 4 * num_rows)


def activations(device: torch.device, tokens: int, width: int, num_experts: int, top_k: int) -> Iterator[Case]:
    """Experts' SwiGLU with an output of [tokens · top_k, width]: to FP8; backward in both layouts."""
    num_rows = tokens * top_k
    n, at = num_rows * width, f"{num_rows}×{width}, {num_experts} experts"
    offsets = ops.routed_rows(_balanced(device, tokens, num_experts, top_k), num_rows, top_k)[0]
    probs = torch.rand(num_rows, device=device)
    z, grad = rotating(device, num_rows, 2 * width), rotating(device, num_rows, width)
    scaling = Scaling(device)
    for name, passes, scale in scaling:
        yield _activation(
            f"experts' SwiGLU → E4M3, {name} {at}", (z, probs, offsets), scale, (4 * n + 4 * num_rows) * passes + n
        )
    for name, passes, scale in scaling:
        yield _backward(
            f"experts' SwiGLU backward → E5M2, {name} {at}",
            (grad, z, probs, offsets, scaling.scale),
            scale,
            (6 * n + 4 * num_rows) * passes + 5 * n + 4 * num_rows,
        )


def _activation(name: str, operands: tuple[Rotating, Tensor, Tensor], scale: dict[str, Any], num_bytes: float) -> Case:
    z, probs, offsets = operands
    return Case(name, lambda i: ops.expert_activation_quantize(z(i), probs, offsets, _SWIGLU, E4M3, **scale), num_bytes)


def _backward(
    name: str, operands: tuple[Rotating, Rotating, Tensor, Tensor, Tensor], scale: dict[str, Any], num_bytes: float
) -> Case:
    grad, z, probs, offsets, activation_scale = operands
    again = dict(activation_dtype=E4M3, activation_scale=activation_scale)
    return Case(
        name,
        lambda i: ops.expert_activation_backward_quantize(
            grad(i), z(i), probs, offsets, _SWIGLU, E5M2, **again, **scale
        ),
        num_bytes,
    )


def _balanced(device: torch.device, tokens: int, num_experts: int, top_k: int) -> Tensor:
    """bool [tokens, num_experts]: neighbouring experts of each token, in a random order of tokens. Each expert has as
    many tokens, a multiple of `GROUP_ROWS`, so that no row is padding.
    """
    assert num_experts % top_k == 0 and tokens * top_k % (num_experts * GROUP_ROWS) == 0, (tokens, num_experts)
    first = torch.randperm(tokens, device=device) * top_k % num_experts
    chosen = torch.zeros(tokens, num_experts, dtype=torch.bool, device=device)
    return chosen.scatter_(1, first[:, None] + torch.arange(top_k, device=device), True)
