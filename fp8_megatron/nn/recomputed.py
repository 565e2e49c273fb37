"""Activations that backward computes again for the layer behind them, which then keeps nothing.

GELU and SiLU keep their input for their own backward, and a product keeps both factors (SwiGLU, tanh's form of GELU).
So their output can be made again from what is kept anyway. The layer that takes the output, an MLP's second one, needs
it in FP8 for the weight's gradient: one byte an element less to keep, for one elementwise pass more in backward. The
cast has the same bits, because its scale is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Recomputation(NamedTuple):
    """How an activation was made: ``function(*inputs)``."""

    function: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]


class Recomputations:
    """Finds the activations that layers of a model compute again.

    Attributes:
        were_found: a layer has found one.
    """

    __slots__ = ("were_found",)

    def __init__(self) -> None:
        self.were_found = False

    def of(self, x: Tensor) -> Recomputation | None:
        """How autograd has made `x`, if what that keeps makes it again. None under hooks of saved tensors
        (`torch.utils.checkpoint`, ``save_on_cpu``): they would unpack what they have just packed.
        """
        node = x.grad_fn
        make = _MAKERS.get(type(node).__name__)
        if make is None or x._version or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return None
        function, inputs = make(node)
        if any(not isinstance(kept, Tensor) or kept.shape != x.shape or kept.dtype is not x.dtype for kept in inputs):
            return None
        self.were_found = True
        return Recomputation(function, tuple(kept.detach() for kept in inputs))


def _gelu(node: Any) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    approximate = node._saved_approximate
    return lambda x: F.gelu(x, approximate=approximate), (node._saved_self,)


def _silu(node: Any) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    return F.silu, (node._saved_self,)


def _product(node: Any) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    # A factor is kept only if the other one requires a gradient.
    return torch.mul, (node._saved_self, node._saved_other)


#: By the name of autograd's node.
_MAKERS = {"GeluBackward0": _gelu, "SiluBackward0": _silu, "MulBackward0": _product}
