"""What torch's functions do with a `ScaledTensor`.

Functions that move, view or fill a weight are in `_FUNCTIONS`, and see its payload. Any other function is called with
values, in `_read`: it may read a weight, arithmetic in place may write one, and a view is a `value_view.ValueView`.
Autograd records what reads a weight, as of any parameter. Matrix products are refused where it is on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from .weight_views import is_scaled

if TYPE_CHECKING:
    from .scaled_tensor import ScaledTensor
    from .value_view import Decoded

_aten = torch.ops.aten

#: Functions that may write into an owned weight, as a loop moves, shrinks or bounds it, or into a view of one. Most of
#: `torch.nn.init` are not among them: they compute in several steps, and a stored weight would round each.
_ARITHMETIC = frozenset(
    "add sub mul div lerp addcmul addcdiv clamp clamp_min clamp_max masked_fill index_put index_fill index_copy "
    "copy fill zero normal uniform".split()
)

#: Functions that would decode a weight at each forward of a module that reads it.
_PRODUCTS = frozenset(
    "mm addmm _addmm_activation bmm baddbmm addbmm mv addmv addr dot vdot ger matmul linear linear_backward einsum "
    "convolution _convolution convolution_overrideable mkldnn_linear _scaled_mm embedding embedding_bag "
    "_embedding_bag _embedding_bag_forward_only _native_multi_head_attention "
    "_transformer_encoder_layer_fwd".split()
)


_ADVICE = (
    "a product in FP8 is F.linear(x, p, bias), x @ p.t() or p @ x, of a layer's own weight p. To multiply its values, "
    "use torch.no_grad(). If a loss or a module does so otherwise, keep the layer a torch.nn.Linear (filter=…), or use "
    "a copy without FP8, fp8_megatron.any_model.plain_model(model). spectral_norm comes before initialize"
)


def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `func`, a function of ``torch.ops.aten``, returns for arguments of which some are `ScaledTensor`s.

    Raises:
        NotImplementedError: it is not defined for them (`_read`).
    """
    function = _FUNCTIONS.get(func)
    if function is not None and (is_scaled(args[0]) or _writes_plain(func, args)):
        return function(func, *args, **kwargs)
    made = func.decompose(*args, **kwargs)  # functions that torch leaves whole in inference mode
    return _read(func, args, kwargs) if made is NotImplemented else made


def _read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`func` of the tensors' values, in the dtypes that they advertise, decoded for this call alone. What arithmetic
    writes into a weight goes to its owner, on every replica.

    Raises:
        NotImplementedError: autograd is on and `func` is a matrix product, which would decode the weight in every
            forward; `func` writes into a weight without an owner, or writes something else than arithmetic.
    """
    decoded = [leaf for leaf in tree_leaves((args, kwargs)) if _is_decoded(leaf)]
    written = _written(func, args, kwargs)
    name = next((tensor.layer_name for tensor in decoded if tensor.layer_name), "")
    told = f"{func} is not defined on an FP8 weight of shape {tuple(decoded[0].shape)}"
    if name:
        told += f" (layer {name})"
    if func is _aten.view.dtype:
        raise NotImplementedError(f"{told}, whose bits are not its values: view those of p.detach().clone()")
    if torch.is_grad_enabled() and _name(func) in _PRODUCTS:
        raise NotImplementedError(f"{told} under autograd: {_ADVICE}")
    if _is_view(func):
        return args[0].view_values(func, args[1:], kwargs)
    if written and _name(func) not in _ARITHMETIC:
        raise NotImplementedError(
            f"{told}, and would write into it: fill a plain tensor, and copy it with p.copy_(…). If a library puts "
            f"something of its own in the weight's place, as a parametrisation does, let it do so before initialize, "
            f"or keep the layer a torch.nn.Linear (filter=…)"
        )
    if not all(tensor.takes_arithmetic for tensor in written):
        raise NotImplementedError(
            f"{told} without a master, as a frozen one is: what the function writes would be rounded to the weight's "
            f"format each time. Keep its layer a torch.nn.Linear (filter=…), or write into a copy, plain_model(model)"
        )
    values = {
        id(tensor): (tensor.master_value() if any(tensor is one for one in written) else tensor.value_here()).to(
            tensor.dtype
        )
        for tensor in decoded
    }
    args, kwargs = tree_map_only(_is_decoded, lambda tensor: values[id(tensor)], (args, kwargs))
    made = func(*args, **kwargs)
    for tensor in written:
        tensor.assign(values[id(tensor)])
    weights = {id(values[id(tensor)]): tensor for tensor in written}
    return tree_map_only(Tensor, lambda tensor: weights.get(id(tensor), tensor), made)


def _is_decoded(value: Any) -> TypeGuard[Decoded]:
    """Whether `value` is a `Decoded`, whose module imports this one."""
    return hasattr(value, "view_values")


def _writes_plain(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether `func` copies a weight to a plain tensor."""
    return func is _aten.copy_.default and not _is_decoded(args[0]) and is_scaled(args[1])


def _name(func: Any) -> str:
    """Its name without what says that it writes in place, or takes lists."""
    name: str = func._schema.name
    return name.removeprefix("aten::").removeprefix("_foreach_").removesuffix("_")


def _is_view(func: Any) -> bool:
    return any(made.alias_info is not None and not made.alias_info.is_write for made in func._schema.returns)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Decoded]:
    """The weights that `func` writes into."""
    if func.namespace == "c10d":
        return [leaf for leaf in written_by_collective(func, args) if _is_decoded(leaf)]
    given = {**dict(zip((arg.name for arg in func._schema.arguments), args, strict=False)), **kwargs}
    writes = [arg.name for arg in func._schema.arguments if arg.alias_info is not None and arg.alias_info.is_write]
    leaves = tree_leaves([given.get(name) for name in writes])
    return [leaf for leaf in leaves if _is_decoded(leaf)]


def written_by_collective(func: Any, args: tuple[Any, ...]) -> list[Any]:
    """What a function of ``torch.distributed`` writes into: its first argument, which its schema does not say."""
    return [] if func._schema.name == "c10d::send" else tree_leaves(args[0])


def _same(func: Any, tensor: ScaledTensor) -> ScaledTensor:
    return tensor.view_onto(tensor.payload)


def _view(func: Any, tensor: ScaledTensor, *args: Any, **kwargs: Any) -> ScaledTensor:
    return tensor.view_onto(func(tensor.payload, *args, **kwargs))


def _rows(func: Any, tensor: ScaledTensor, *args: Any, **kwargs: Any) -> ScaledTensor | list[ScaledTensor]:
    """Views of parts."""
    views = func(tensor.payload, *args, **kwargs)
    if isinstance(views, (list, tuple)):
        return [tensor.part_onto(view) for view in views]
    return tensor.part_onto(views)


def _slice(func: Any, tensor: ScaledTensor, *args: Any, **kwargs: Any) -> Any:
    """Views of rows or columns; of decoded values where they cut blocks that share a scale."""
    try:
        return _rows(func, tensor, *args, **kwargs)
    except NotImplementedError:
        return _read(func, (tensor, *args), kwargs)


def _as_strided(
    func: Any, tensor: ScaledTensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> ScaledTensor:
    if tuple(size) != tuple(tensor.shape) or tuple(stride) != tensor.stride() or offset:
        raise NotImplementedError(
            f"as_strided of a ScaledTensor of shape {tuple(tensor.shape)} to {tuple(size)}: only to its own shape"
        )
    return tensor.view_onto(tensor.payload)


def _clone(func: Any, tensor: ScaledTensor, *, memory_format: Any = None) -> Tensor:
    """A plain tensor, which takes arithmetic and whose bits are its values."""
    return tensor.value_here().to(tensor.dtype)


def _empty_like(func: Any, tensor: ScaledTensor, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> Tensor:
    """Like an owned weight a plain tensor: what is put aside in it keeps its values, and it takes arithmetic."""
    if tensor.owner is not None or dtype not in (None, tensor.dtype):
        return torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device=device or tensor.device)
    return tensor.like(torch.empty_like(tensor.payload, device=device), torch.empty_like(tensor.scale, device=device))


def _zeros_like(func: Any, tensor: ScaledTensor, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> Tensor:
    """A plain tensor, as a gradient or an optimizer's state is."""
    return torch.zeros(tensor.shape, dtype=dtype or tensor.dtype, device=device or tensor.device)


def _new(
    func: Any, tensor: ScaledTensor, size: Sequence[int], *, dtype: Any = None, device: Any = None, **kwargs: Any
) -> Tensor:
    """Rows of a weight without an owner, as FSDP2 makes them; otherwise a plain tensor."""
    is_rows = len(size) == tensor.dim() and tuple(size[1:]) == tuple(tensor.shape[1:])
    if tensor.owner is not None or not is_rows or dtype not in (None, tensor.dtype):
        plain = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return func(plain, size, dtype=dtype, device=device, **kwargs)
    payload = func(tensor.payload, size, device=device)
    return tensor.sized(payload, is_zero=func is _aten.new_zeros.default)


def _to_copy(func: Any, tensor: ScaledTensor, *, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
    device = device or tensor.payload.device
    if tensor.owner is not None:
        return tensor.value_here().to(device, kwargs.get("dtype") or tensor.dtype, non_blocking=non_blocking)
    return tensor.like(
        tensor.payload.to(device, non_blocking=non_blocking, copy=True),
        tensor.scale.to(device, non_blocking=non_blocking, copy=True),
    )


def _copy_(func: Any, destination: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not is_scaled(destination):
        assert is_scaled(source)
        return destination.copy_(source.value_here())
    destination.assign(source)
    return destination


def _is_pinned(func: Any, tensor: ScaledTensor, device: Any = None) -> bool:
    return tensor.payload.is_pinned()


def _pin_memory(func: Any, tensor: ScaledTensor, device: Any = None) -> ScaledTensor:
    return tensor.like(tensor.payload.pin_memory(), tensor.scale.pin_memory())


def _fill_(func: Any, tensor: ScaledTensor, *args: Any, **kwargs: Any) -> ScaledTensor:
    """Functions that overwrite all values, such as those of `torch.nn.init`: rounded once."""
    if tensor.payload.device.type != "meta":
        tensor.assign(func(torch.empty(tensor.shape, device=tensor.device), *args, **kwargs))
    return tensor


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: _same,
    _aten.alias.default: _same,
    _aten.view.default: _view,
    _aten._unsafe_view.default: _view,
    _aten.slice.Tensor: _slice,
    _aten.split.Tensor: _rows,
    _aten.split_with_sizes.default: _rows,
    _aten.as_strided.default: _as_strided,
    _aten.clone.default: _clone,
    _aten.empty_like.default: _empty_like,
    _aten.zeros_like.default: _zeros_like,
    _aten.new_empty.default: _new,
    _aten.new_zeros.default: _new,
    _aten._to_copy.default: _to_copy,
    _aten.copy_.default: _copy_,
    _aten.is_pinned.default: _is_pinned,
    _aten._pin_memory.default: _pin_memory,
    _aten.uniform_.default: _fill_,
    _aten.normal_.default: _fill_,
    _aten.zero_.default: _fill_,
    _aten.fill_.Scalar: _fill_,
}
