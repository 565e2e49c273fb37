"""The activations of ``te.LayerNormMLP`` by Transformer Engine's names.

A gated activation's input holds two halves side by side: the activation of the first is multiplied by the second.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

#: The slope of the sigmoid form of GELU (arXiv 1606.08415).
_QUICK = 1.702


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(_QUICK * x)


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _gated(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def gated(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return activation(gate) * up

    return gated


def _clamped_swiglu(x: Tensor, limit: float = 7.0, alpha: float = _QUICK) -> Tensor:
    """gate · σ(alpha · gate) · (up + 1), with the gate at most `limit` and up within ± `limit`."""
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1.0)


#: By Transformer Engine's name, in torch: [..., F], or [..., 2F] of a gated one, → [..., F].
ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "gelu": _gelu,
    "qgelu": _quick_gelu,
    "relu": F.relu,
    "srelu": _squared_relu,
    "silu": F.silu,
    "geglu": _gated(_gelu),
    "qgeglu": _gated(_quick_gelu),
    "reglu": _gated(F.relu),
    "sreglu": _gated(_squared_relu),
    "swiglu": _gated(F.silu),
    "clamped_swiglu": _clamped_swiglu,
}

#: Transformer Engine's name → the name in `kernels.activation`, of those that run inside FP8 kernels.
FUSED = {"gelu": "gelu", "srelu": "squared_relu", "swiglu": "swiglu", "qgeglu": "quick_geglu"}
