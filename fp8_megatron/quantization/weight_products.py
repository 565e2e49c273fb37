"""Products that code outside of a layer computes with the layer's own weight: ``F.linear(x, layer.weight, bias)``.

torch asks a `Decoded` tensor before it computes anything with it (``__torch_function__``). A product of the very
parameter that a layer has is that layer's, as if it were called with this bias: the same casts, scales, GEMMs and
gradients. So it is without autograd: a forward that runs twice, once without (``torch.utils.checkpoint``), has the same
bits. Everything else is torch's, and goes on to ``__torch_dispatch__``.

A weight knows its layers by its `Home`. Views and copies of it, and what ``fully_shard`` keeps or has gathered for
another forward, are no layer's parameter: their products are torch's.

`torch.compile` traces ``F.linear`` into its graph, without a break. It breaks the graph at the other products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import UserError
from .untraced import enters_no_graph
from .weight_views import WeightLayer, is_scaled

if TYPE_CHECKING:
    from .scaled_tensor import ScaledTensor
    from .value_view import ValueView

_in_torch: Any = torch._C._disabled_torch_function_impl

#: Context in which no `Decoded` tensor is asked. An attribute, such as ``param.grad``, costs the host 0.15 µs in it and
#: 1 µs outside; the context costs 0.1 µs.
without_products: Any = torch._C.DisableTorchFunctionSubclass


@enters_no_graph
def call(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `func`, a function of torch's Python interface, returns for arguments of which some are `Decoded`."""
    product = _PRODUCTS.get(func)
    if product is not None:
        made = product(*args, **kwargs)
        if made is not NotImplemented:
            return made
    return _in_torch(func, types, args, kwargs)


@enters_no_graph
def _linear(input: Any, weight: Any, bias: Any = None) -> Any:
    layer = _layer_of(weight)
    if layer is None or not _is_plain(input) or not (bias is None or _is_plain(bias)):
        return NotImplemented
    return layer.multiply(input, bias)


@enters_no_graph
def _matmul(*args: Any, **kwargs: Any) -> Any:
    """``x @ weight.t()`` and ``weight @ x``."""
    if kwargs or len(args) != 2:
        return NotImplemented
    left, right = args
    weight = getattr(right, "transpose_of", None)
    if weight is None:
        layer = _layer_of(left)
        if layer is None or not _is_plain(right) or right.dim() == 1:
            return NotImplemented
        return layer.multiply(right.transpose(-1, -2), None).transpose(-1, -2)
    _check_not_compiled()
    layer, is_stale = _layer_of(weight), torch.is_grad_enabled() and right.requires_grad != weight.requires_grad
    if layer is None or is_stale or not _is_plain(left):
        return NotImplemented
    return layer.multiply(left, None)


@enters_no_graph
def _transposed(weight: Any, *dims: Any, **kwargs: Any) -> Any:
    if kwargs or not is_scaled(weight) or (dims and {_dim(dim) for dim in dims} != {0, 1}):
        return NotImplemented
    _check_not_compiled()
    return _transpose(weight)


@enters_no_graph
def _transpose(weight: Any) -> Any:
    """The transpose of a layer's weight: a view, decoded by who reads it, that `_matmul` knows.

    It requires a gradient where the weight does. So torch's own functions refuse it where autograd is on.
    """
    if _layer_of(weight) is None:
        return NotImplemented
    view: ValueView = _Transpose.apply(weight)
    view.transpose_of = weight
    return view


class _Transpose(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: ScaledTensor) -> ValueView:
        view: ValueView = weight.view_values(torch.ops.aten.t.default, (), {})
        return view

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        """Of a function with a backward of its own, which was given the view."""
        return grad_output.t()


def _dim(dim: Any) -> Any:
    return dim % 2 if isinstance(dim, int) else dim


@enters_no_graph
def _check_not_compiled() -> None:
    if torch.compiler.is_compiling():
        raise UserError(
            "a graph of torch.compile has no transpose of an FP8 weight: compute x @ weight.t() as "
            "torch.nn.functional.linear(x, weight), or leave fullgraph=True out"
        )


@enters_no_graph
def _layer_of(value: Any) -> WeightLayer | None:
    """The layer whose own weight `value` is."""
    home = value.home if is_scaled(value) else None
    return None if home is None else home.layer_of(value)


@enters_no_graph
def _is_plain(value: Any) -> bool:
    """Whether `value` is a tensor that is not decoded."""
    return isinstance(value, Tensor) and not hasattr(value, "view_values")


_PRODUCTS: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.linear: _linear,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    torch.mm: _matmul,
    Tensor.mm: _matmul,
    torch.t: _transposed,
    Tensor.t: _transposed,
    Tensor.T.__get__: _transpose,  # type: ignore[attr-defined]
    Tensor.mT.__get__: _transpose,  # type: ignore[attr-defined]
    torch.transpose: _transposed,
    Tensor.transpose: _transposed,
}
