"""`GradTensor`: what ``p.grad`` is where the gradient is not stored in the parameter's own dtype and shape."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..quantization.scaled_functions import written_by_collective
from ..quantization.value_view import Decoded

if TYPE_CHECKING:
    from .gradients import ParamGrad

_aten = torch.ops.aten
_DATA: Any = torch.Tensor.data  # the descriptor


class GradTensor(Decoded):
    """A gradient in FP8, in a wider accumulator, or in shards, as a tensor that torch's own tools take. Replicas that
    share it all call what reads or writes it, in the same order.

    It has the shape and dtype of its parameter. Norms, products with a number, sums, `zero_` and the check for numbers
    that are not finite work on the storage itself. Any other function that returns new values gets the gradient as a
    plain tensor. A function that writes into the gradient gets the plain tensor too, and its result is stored. Views
    decode it when they are read, and write through it.
    """

    _source: weakref.ref[ParamGrad]

    @staticmethod
    def __new__(cls, source: ParamGrad, param: Tensor) -> GradTensor:
        self = torch.Tensor._make_wrapper_subclass(cls, param.shape, dtype=param.dtype, device=param.device)
        # Weak: the parameter holds its source, which leads back to it. torch does not show Python's collector what
        # ``p.grad`` refers to, so a strong reference would keep the whole model in memory for good.
        self._source = weakref.ref(source)
        return self

    @property
    def source(self) -> ParamGrad:
        """Where the gradient is stored.

        Raises:
            RuntimeError: the parameter is gone.
        """
        source = self._source()
        if source is None:
            raise RuntimeError("the parameter of this gradient is gone: keep p.grad.clone(), not p.grad")
        return source

    @property
    def data(self) -> Tensor:
        """A view without autograd, as of any tensor. What is assigned is written: the gradient keeps its storage.

        Raises:
            ValueError: what is assigned has another shape.
        """
        view: Tensor = _DATA.__get__(self)
        return view

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.shape != self.shape:
            raise ValueError(
                f"a gradient {tuple(self.shape)} cannot become {tuple(value.shape)} through .data: give it its "
                f"parameter's shape"
            )
        if not (isinstance(value, GradTensor) and value.source is self.source):
            with torch.no_grad():
                self.copy_(value)

    def dense(self) -> Tensor:
        """The gradient as a plain tensor (a copy)."""
        return self.source.values().to(self.dtype)

    def master_value(self) -> Tensor:
        """See `Decoded.master_value`. All replicas call it."""
        return self.source.values()

    def value_here(self) -> Tensor:
        """The same: replicas share a gradient, and all of them read it."""
        return self.source.values()

    def assign(self, value: Tensor) -> None:
        """See `Decoded.assign`."""
        self.source.assign_(value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.dense()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dense().__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"GradTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def,override]
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(*args, **kwargs)
        if func.namespace == "c10d" and any(isinstance(leaf, cls) for leaf in written_by_collective(func, args)):
            raise NotImplementedError(
                f"{func} would write into a gradient in FP8 or in shards: give it p.grad.clone(), and write the result "
                f"back with p.grad.copy_(…). Where initialize found several ranks, p.grad is their mean already"
            )
        if func._schema.is_mutable:
            return _store_result(func, args, kwargs)
        if any(result.alias_info is not None for result in func._schema.returns):
            return args[0].view_values(func, args[1:], kwargs)
        return func(*_densified(args), **_densified(kwargs))


def _densified(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.dense() if isinstance(leaf, GradTensor) else leaf, tree)


def _store_result(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a function that writes into its first argument, on plain copies, and store what it wrote."""
    target, others = args[0], args[1:]
    mutated = [argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments]
    if any(mutated[1:]):
        raise NotImplementedError(f"{func} would write into a gradient in FP8 or in shards: give it p.grad.clone()")
    plain = _densified(target)
    func(plain, *_densified(others), **_densified(kwargs))
    targets, results = ([target], [plain]) if isinstance(target, Tensor) else (target, plain)
    for grad, result in zip(targets, results, strict=True):
        if isinstance(grad, GradTensor):
            grad.source.assign_(result)
    return target if func._schema.returns else None  # functions of lists return nothing


def _detach(grad: GradTensor) -> GradTensor:
    with torch.inference_mode(grad.is_inference()):  # torch gives a view the version counter of its base
        return GradTensor(grad.source, grad)


def _scaled_by(invert: bool) -> Callable[..., Any]:
    """In-place multiplication, or division if `invert`, of one gradient or a list of tensors by a number."""
    whole = _aten.div_.Tensor if invert else _aten.mul_.Tensor

    def scale(target: Any, factor: Any) -> Any:
        for index, grad in enumerate([target] if isinstance(target, Tensor) else target):
            own = factor[index] if isinstance(factor, list | tuple) else factor
            if not isinstance(grad, GradTensor):
                grad.div_(own) if invert else grad.mul_(own)
            elif isinstance(own, Tensor) and own.numel() > 1:
                _store_result(whole, (grad, own), {})
            else:
                grad.source.scale_(1.0 / own if invert else own)
        return target if isinstance(target, Tensor) else None

    return scale


def _zero(target: Any) -> Any:
    for grad in [target] if isinstance(target, Tensor) else target:
        grad.source.zero_() if isinstance(grad, GradTensor) else grad.zero_()
    return target if isinstance(target, Tensor) else None


def _add(target: Tensor, other: Any, *, alpha: float = 1) -> Tensor:
    plain = _densified(other)
    if not isinstance(target, GradTensor):
        return target.add_(plain, alpha=alpha)
    if not isinstance(plain, Tensor):
        plain = torch.full_like(target.dense(), plain)
    plain = plain.expand(target.shape)
    target.source.add_(plain if alpha == 1 else plain * alpha)
    return target


def _copy(target: Tensor, other: Tensor, non_blocking: bool = False) -> Tensor:
    plain = _densified(other)
    if not isinstance(target, GradTensor):
        return target.copy_(plain, non_blocking)
    target.source.assign_(plain.to(target.device).expand(target.shape))
    return target


def _vector_norm(
    grad: GradTensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    if ord != 2 or dim is not None or keepdim:
        return torch.linalg.vector_norm(grad.dense(), ord, dim, keepdim, dtype=dtype)
    norm = grad.source.squared_norm().sqrt().reshape(())
    return norm if dtype is None else norm.to(dtype)


def _foreach_norm(grads: Sequence[Tensor], ord: Any = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
    return [torch.linalg.vector_norm(grad, ord, dtype=dtype) for grad in grads]


def _check_and_unscale(grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """GradScaler's: `found_inf` [1] becomes 1 if an element is not finite; all gradients are multiplied."""
    plain = [grad for grad in grads if not isinstance(grad, GradTensor)]
    if plain:
        torch._amp_foreach_non_finite_check_and_unscale_(plain, found_inf, inv_scale)
    for grad in grads:
        if isinstance(grad, GradTensor):
            is_bad = ~torch.isfinite(grad.source.squared_norm())
            found_inf.copy_(torch.maximum(found_inf, is_bad.to(found_inf.dtype).view_as(found_inf)))
            grad.source.scale_(inv_scale)


_HANDLERS: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: _detach,
    _aten.alias.default: _detach,
    _aten.mul_.Tensor: _scaled_by(False),
    _aten.mul_.Scalar: _scaled_by(False),
    _aten.div_.Tensor: _scaled_by(True),
    _aten.div_.Scalar: _scaled_by(True),
    _aten._foreach_mul_.Scalar: _scaled_by(False),
    _aten._foreach_mul_.ScalarList: _scaled_by(False),
    _aten._foreach_mul_.Tensor: _scaled_by(False),
    _aten._foreach_mul_.List: _scaled_by(False),
    _aten._foreach_div_.Scalar: _scaled_by(True),
    _aten._foreach_div_.ScalarList: _scaled_by(True),
    _aten._foreach_div_.Tensor: _scaled_by(True),
    _aten._foreach_div_.List: _scaled_by(True),
    _aten.zero_.default: _zero,
    _aten._foreach_zero_.default: _zero,
    _aten.add_.Tensor: _add,
    _aten.copy_.default: _copy,
    _aten.linalg_vector_norm.default: _vector_norm,
    _aten._foreach_norm.Scalar: _foreach_norm,
    _aten._amp_foreach_non_finite_check_and_unscale_.default: _check_and_unscale,
}
