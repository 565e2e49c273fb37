"""The FP8 linear layer as three operators, for `torch.compile`: no graph break, and nothing of a layer in the graph.

The cast of the input is an operator of its own. A compiler runs equal calls once, so layers with the same input share
its cast, and what backward keeps of it. Under delayed scaling each layer has scales of its own, and casts itself.

An operator finds its layer by a number. The number is the value of a tensor on the CPU, the layer's token, so that
equal layers have equal graphs. The token requires a gradient: that keeps backward in the graph, where it gives the
weight's gradient to `main_grad`, as `linear` does. A compiler thus never sees a weight or its gradient.

The operators have no autograd of their own: `_Linear` has it, and a compiler traces it. An operator with a Python
function for autograd costs the host 15 µs more a call, although a compiled graph never asks it for a gradient.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..dtypes import E4M3
from ..errors import UserError
from ..formats.format import Quantized
from ..formats.recipes import input_format
from ..quantization.recipe import LinearQuantizers, Quantizer
from ..quantization.scaled_tensor import ScaledTensor
from ..quantization.sources import TensorSource
from . import row_scaled
from .gemms import LinearParams, fprop, note_forward
from .linear import linear_backward


class CompilableLayer(Protocol):
    """What the operators read of a layer."""

    weight: ScaledTensor
    quantizers: LinearQuantizers
    out_features: int
    token: Tensor
    scales_grad_rows: bool
    input_format: str  # the text of the format of inputs

    @property
    def evaluates(self) -> bool:
        """Whether a forward now does not train the layer."""


#: Attribute of a compiled graph's node: the backward that asked, and the numbers of tokens that it does not reach.
_LEFT_OUT = "_fp8_megatron_left_out"

_layers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def new_token(layer: object) -> Tensor:
    """The token of `layer`, FP64 [1] on the CPU."""
    number = next(_numbers)
    _layers[number] = layer
    return torch.tensor([float(number)], dtype=torch.float64, device="cpu", requires_grad=True)


def layer_of(token: Tensor) -> Any:
    """The layer of a token."""
    return _layers[int(token.item())]  # on the CPU: no wait for the device


def compiled_linear(x: Tensor, layer: CompilableLayer, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """y [T, N] in `dtype` = x [T, K] · Wᵀ + bias [N], with the bits of `fp8_linear`."""
    keeps_input = torch.is_grad_enabled() and layer.weight.requires_grad
    input = layer.quantizers.input
    rows, columns = x.shape
    cast = _Cast(
        layer.input_format,
        keeps_input and not layer.scales_grad_rows,
        input.format.scale_shape(rows, columns),
        (0,) if input.format.transpose_keeps_scale else input.format.scale_shape(columns, rows),
        input.format.scale_dtype,
    )
    call = (layer.out_features, dtype, keeps_input, layer.evaluates, layer.scales_grad_rows)
    y: Tensor = _Linear.apply(x, layer.token, bias, input.history is not None, cast, *call)
    return y


class _Cast(NamedTuple):
    """How the operator `cast_input` casts.

    Attributes:
        format: the text of the format (`input_format`).
        keeps_columns: backward takes the columns.
        scale_shape, scale_shape_t, scale_dtype: of the scales of the rows, and of the columns if they have their own.
    """

    format: str
    keeps_columns: bool
    scale_shape: Sequence[int]
    scale_shape_t: Sequence[int]
    scale_dtype: torch.dtype


_NAMESPACE = "fp8_megatron"
_LIBRARY = torch.library.Library(_NAMESPACE, "FRAGMENT")


def define(name: str, function: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Declare the operator `name`, which `function` computes on every device.

    A compiler that records CUDA graphs leaves it out: a recording repeats kernels alone, and here Python says that the
    weight has a gradient.
    """
    schema = torch.library.infer_schema(function, op_name=name, mutates_args=())
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe))
    for device in ("CPU", "CUDA"):
        _LIBRARY.impl(name, function, device)
    torch.library.register_fake(f"{_NAMESPACE}::{name}", fake, lib=_LIBRARY)


def _cast_input(
    x: Tensor,
    token: Tensor | None,
    evaluates: bool,
    format: str,
    keeps_columns: bool,
    scale_shape: Sequence[int],
    scale_shape_t: Sequence[int],
    scale_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The input x [T, K] in FP8 and its scales; its transpose [K, T] and the scales of that.

    The latter two are empty if not `keeps_columns`, the last one also if the rows have the same scale.

    Args:
        token: of the layer, whose casts have scales of their own; None: the values give the scales.
        evaluates: the layer's casts leave no amax behind (`CompilableLayer.evaluates`).
        format, keeps_columns, scale_shape, scale_shape_t, scale_dtype: see `_Cast`.
    """
    quantizer = Quantizer(input_format(format)) if token is None else _quantizers(token, evaluates).input
    cast = quantizer.quantize(TensorSource(x, True, keeps_columns))
    # The compiler may write to memory that it was given; a delayed scale is not its own.
    scale = cast.scale if quantizer.history is None else cast.scale.clone()
    if not keeps_columns:
        return cast.payload, scale, x.new_empty(0, dtype=cast.payload.dtype), scale.new_empty(0)
    return cast.payload, scale, cast.payload_t, scale.new_empty(0) if cast.scale_t is None else cast.scale_t


def _fake_cast_input(
    x: Tensor, token: Tensor | None, evaluates: bool, *call: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    cast, (rows, columns) = _Cast(*call), x.shape
    return (
        x.new_empty((rows, columns), dtype=E4M3),
        x.new_empty(cast.scale_shape, dtype=cast.scale_dtype),
        x.new_empty((columns, rows) if cast.keeps_columns else (0,), dtype=E4M3),
        x.new_empty(cast.scale_shape_t if cast.keeps_columns else (0,), dtype=cast.scale_dtype),
    )


def _linear(
    x: Tensor,
    scale: Tensor,
    token: Tensor,
    bias: Tensor | None,
    out_features: int,
    dtype: torch.dtype,
    keeps_input: bool,
    evaluates: bool,
) -> Tensor:
    """y [T, N] in `dtype`.

    Args:
        x: FP8 [T, K], with `scale`.
        token: of the layer (`new_token`).
        bias: [N].
        keeps_input: backward gives the weight a gradient.
        evaluates: see `_cast_input`.
    """
    linear = _params(token, bias, evaluates)
    if keeps_input:
        note_forward(linear)
    operand = Quantized(x, None, scale, linear.quantizers.input.format)
    return fprop(linear.parallelism.gather(operand), linear, dtype)


def _fake_linear(
    x: Tensor,
    scale: Tensor,
    token: Tensor,
    bias: Tensor | None,
    out_features: int,
    dtype: torch.dtype,
    *_: bool,
) -> Tensor:
    return x.new_empty((x.shape[0], out_features), dtype=dtype)


def _linear_backward(
    grad_output: Tensor,
    kept: Tensor,
    scale: Tensor,
    token: Tensor,
    call: Tensor,
    in_features: int,
    has_bias: bool,
    needs_grad_input: bool,
    evaluates: bool,
    scales_rows: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the input [T, K], of the bias FP32 [N], and of the token. The weight's goes to its `main_grad`.

    A gradient that nobody needs is empty.

    Args:
        grad_output: [T, N].
        kept: the input's columns, with `scale`; with `scales_rows` the input [T, K]; empty: no gradient of the weight.
        call: empty, and no other call's.

    Raises:
        UserError: the weight has hooks. Autograd runs them, and sees no gradient of a compiled layer's weight.
    """
    linear = _params(token, grad_output.new_empty(0) if has_bias else None, evaluates)
    check_no_hooks(linear.weight)
    needs_grad_weight = kept.numel() > 0 and is_wanted(token)
    if scales_rows:
        rows = kept if needs_grad_weight else None
        grads = row_scaled.backward(grad_output, rows, linear, needs_grad_input=needs_grad_input)
    else:
        x = Quantized(None, kept, scale, linear.quantizers.input.format)
        part = (lambda: x) if needs_grad_weight else None
        grads = linear_backward(grad_output, part, linear, needs_grad_input=needs_grad_input)
    grad_input, grad_weight, grad_bias = grads
    if grad_weight is not None:
        add_to_grad(linear.weight, grad_weight)
    return (
        grad_output.new_empty(0) if grad_input is None else grad_input,
        grad_output.new_empty(0, dtype=torch.float32) if grad_bias is None else grad_bias,
        torch.zeros_like(token),
    )


def _fake_linear_backward(
    grad_output: Tensor,
    kept: Tensor,
    scale: Tensor,
    token: Tensor,
    call: Tensor,
    in_features: int,
    has_bias: bool,
    needs_grad_input: bool,
    *_: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, out_features = grad_output.shape
    return (
        grad_output.new_empty((rows, in_features) if needs_grad_input else (0,)),
        grad_output.new_empty((out_features if has_bias else 0,), dtype=torch.float32),
        torch.zeros_like(token),
    )


define("cast_input", _cast_input, _fake_cast_input)
define("linear", _linear, _fake_linear)
define("linear_backward", _linear_backward, _fake_linear_backward)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        token: Tensor,
        bias: Tensor | None,
        has_own_scales: bool,
        cast: _Cast,
        out_features: int,
        dtype: torch.dtype,
        keeps_input: bool,
        evaluates: bool,
        scales_rows: bool,
    ) -> Tensor:
        own = (token, evaluates) if has_own_scales else (None, False)
        payload, scale, columns, scale_t = torch.ops.fp8_megatron.cast_input(x, *own, *cast)
        output: Tensor = torch.ops.fp8_megatron.linear(
            payload, scale, token, bias, out_features, dtype, keeps_input, evaluates
        )
        kept = x if scales_rows and keeps_input else columns
        ctx.save_for_backward(kept, scale if cast.scale_shape_t == (0,) else scale_t, token)
        ctx.in_features, ctx.bias_dtype = x.shape[1], None if bias is None else bias.dtype
        ctx.evaluates, ctx.scales_rows = evaluates, scales_rows
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        kept, scale, token = ctx.saved_tensors
        has_bias, needs_grad_input = ctx.bias_dtype is not None, ctx.needs_input_grad[0]
        # A compiler runs equal calls once. Each gives the weight a gradient, and no two of these tensors are equal.
        call = torch.empty(0, device="cpu")
        grad_input, grad_bias, grad_token = torch.ops.fp8_megatron.linear_backward(
            grad_output.contiguous(),
            kept,
            scale,
            token,
            call,
            ctx.in_features,
            has_bias,
            needs_grad_input,
            ctx.evaluates,
            ctx.scales_rows,
        )
        return (
            grad_input if needs_grad_input else None,
            grad_token,
            grad_bias.to(ctx.bias_dtype) if has_bias else None,
            *(None,) * 7,
        )


def decides_by_tokens(node: Any) -> bool:
    """Whether `node`, autograd's of the backward that runs, is of a compiled graph that has asked `is_wanted` of its
    layers: their weights are none of its inputs, of which there are hundreds.
    """
    return hasattr(node, _LEFT_OUT)


def is_wanted(token: Tensor) -> bool:
    """Whether the backward that runs reaches `token`. ``torch.autograd.grad`` and ``backward(inputs=…)`` ask for some
    gradients alone, and a compiled graph computes all of them.

    The graph's node keeps the answer for all its tokens, because it has hundreds of inputs.
    """
    node: Any = torch._C._current_autograd_node()
    if node is None:
        return True
    task = torch._C._current_graph_task_id()
    known, left_out = getattr(node, _LEFT_OUT, (None, frozenset()))
    if known != task:
        tokens = {layer.token: number for number, layer in _layers.items()}
        following = ((one, getattr(one, "variable", None)) for one, _ in node.next_functions)
        left_out = frozenset(
            tokens[variable]
            for one, variable in following
            if variable in tokens and not torch._C._will_engine_execute_node(one)
        )
        setattr(node, _LEFT_OUT, (task, left_out))
    return int(token.item()) not in left_out


def _params(token: Tensor, bias: Tensor | None, evaluates: bool) -> LinearParams:
    return LinearParams(layer_of(token).weight, bias, _quantizers(token, evaluates))


def _quantizers(token: Tensor, evaluates: bool) -> LinearQuantizers:
    layer: CompilableLayer = layer_of(token)
    return layer.quantizers.evaluating() if evaluates else layer.quantizers


def check_no_hooks(weight: Tensor) -> None:
    """Check that a weight has no hooks, which autograd would run if it saw the weight's gradient.

    Raises:
        UserError: it has some.
    """
    if weight._backward_hooks:
        raise UserError(
            f"a weight of shape {tuple(weight.shape)} has hooks (register_hook), and torch.compile leaves them out: "
            f"remove them, or do not compile this layer"
        )


def add_to_grad(weight: Tensor, grad: Tensor) -> None:
    """What autograd does where a weight has no `main_grad`."""
    grad = grad.to(weight.dtype)
    weight.grad = grad if weight.grad is None else weight.grad + grad
