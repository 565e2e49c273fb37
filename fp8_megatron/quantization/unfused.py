"""Norms and activations in 16 bits, for formats without a kernel that computes and casts in one pass.

All arithmetic is FP32 and rounded once, to the input's dtype. Backward repeats the same operations on the same numbers,
so its second cast gives the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: torch's names of GELU's forms.
_GELUS = {"gelu": "tanh", "gelu_erf": "none"}
#: The slope inside the sigmoid form of GELU.
_QUICK = 1.702


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, rms: bool) -> tuple[Tensor, Tensor, Tensor]:
    """LayerNorm or RMSNorm of `x` [T, K] in its dtype, mean FP32 [T] (empty under RMSNorm) and rstd FP32 [T]."""
    wide = x.float()
    mean = wide.new_empty(0) if rms else wide.mean(dim=1)
    centred = wide if rms else wide - mean[:, None]
    rstd = torch.rsqrt(centred.square().mean(dim=1) + eps)
    return _normed(centred, weight, bias, rstd).to(x.dtype), mean, rstd


def norm_of_statistics(x: Tensor, weight: Tensor, bias: Tensor | None, mean: Tensor, rstd: Tensor) -> Tensor:
    """Recompute `norm` of `x` from its statistics."""
    wide = x.float()
    centred = wide if mean.numel() == 0 else wide - mean[:, None]
    return _normed(centred, weight, bias, rstd).to(x.dtype)


def _normed(centred: Tensor, weight: Tensor, bias: Tensor | None, rstd: Tensor) -> Tensor:
    value = centred * rstd[:, None] * weight.float()
    return value if bias is None else value + bias.float()


def activation(z: Tensor, kind: str) -> Tensor:
    """The activation of `z` [T, F], or of [T, 2F] (gate, then up), in its dtype [T, F]: see `kernels.activation`."""
    wide = z.float()
    if kind in _GELUS:
        return torch.nn.functional.gelu(wide, approximate=_GELUS[kind]).to(z.dtype)
    if kind == "squared_relu":
        return torch.relu(wide).square().to(z.dtype)
    gate, up = wide.chunk(2, dim=1)
    if kind == "quick_geglu":
        return (gate * torch.sigmoid(_QUICK * gate) * up).to(z.dtype)
    assert kind == "swiglu", f"no form in 16 bits of {kind}"
    return (torch.nn.functional.silu(gate) * up).to(z.dtype)


def activation_backward(grad: Tensor, z: Tensor, kind: str) -> Tensor:
    """The gradient of `z` in its dtype, from the gradient [T, F] of `activation`."""
    wide, upstream = z.float(), grad.float()
    if kind in _GELUS:
        return torch.ops.aten.gelu_backward(upstream, wide, approximate=_GELUS[kind]).to(z.dtype)
    if kind == "squared_relu":
        return (upstream * (2.0 * torch.relu(wide))).to(z.dtype)
    gate, up = wide.chunk(2, dim=1)
    if kind == "quick_geglu":
        sigmoid = torch.sigmoid(_QUICK * gate)
        grad_gate = upstream * up * (sigmoid * (1.0 + _QUICK * gate * (1.0 - sigmoid)))
        return torch.cat([grad_gate, upstream * (gate * sigmoid)], dim=1).to(z.dtype)
    assert kind == "swiglu", f"no form in 16 bits of {kind}"
    grad_gate = torch.ops.aten.silu_backward(upstream * up, gate)
    return torch.cat([grad_gate, upstream * torch.nn.functional.silu(gate)], dim=1).to(z.dtype)
