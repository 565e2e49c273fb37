"""FP8 layers of classes that are derived from `torch.nn.Linear` and multiply as it does.

Libraries derive such classes to add to a layer, not to change its forward: torchtitan's ``Linear`` has a configuration
and initialisers. Its FP8 layer is of both classes, so it keeps what the library added. A forward that casts the weight
to the input's dtype, as nanochat's, computes the same, and an FP8 layer has no use for the cast.
"""

from __future__ import annotations

import inspect
import itertools
import types
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from .module import FP8Linear


def multiplies_as_linear(layer: torch.nn.Module) -> bool:
    """Whether a layer does what `torch.nn.Linear` does with a weight and a bias that it holds.

    Its class has that forward, or one of its own that only casts weight and bias (`_casts_alone`). torch's attention
    reads the weight of a `NonDynamicallyQuantizableLinear` itself.
    """
    kind = type(layer)
    if not isinstance(layer, torch.nn.Linear) or kind is NonDynamicallyQuantizableLinear:
        return False
    if kind.__call__ is not torch.nn.Linear.__call__:
        return False
    return kind.forward is torch.nn.Linear.forward or _casts_alone(kind.forward, has_bias=layer.bias is not None)


def _casts_alone(forward: Callable[..., Any], *, has_bias: bool) -> bool:
    """Whether a forward is ``F.linear(x, self.weight, self.bias)``, whose weight and bias may be cast, as nanochat does
    in place of autocast. It is called with tensors without memory, and with a layer that has nothing else.
    """
    if not isinstance(forward, types.FunctionType) or hasattr(forward, "__wrapped__"):
        return False
    if len(inspect.signature(forward).parameters) != 2:
        return False
    for dtype, stored in itertools.product((torch.float32, torch.bfloat16), repeat=2):
        x, weight, bias = (
            _Seen.of(torch.empty(shape, dtype=its_dtype, device="meta"), role)
            for role, its_dtype, shape in (("x", dtype, (2, 4)), ("weight", stored, (3, 4)), ("bias", stored, (3,)))
        )
        layer = types.SimpleNamespace(weight=weight, bias=bias if has_bias else None, in_features=4, out_features=3)
        try:
            made = forward(layer, x)
        except _MixedDtypes:
            if dtype is stored:
                return False  # a dtype of its own
            continue  # as in torch.nn.Linear; an FP8 layer takes them
        except Exception:  # whatever it needs, it is not this layer
            return False
        if getattr(made, "role", "") != ("weight and bias" if has_bias else "weight alone"):
            return False
    return True


class _MixedDtypes(Exception):
    """torch multiplies no two dtypes."""


class _Seen(torch.Tensor):
    """A tensor without memory that knows what it is in a forward.

    Attributes:
        role: x, weight, bias, or the product's: which of them it has. Empty: something else was done.
    """

    role: str = ""

    @classmethod
    def of(cls, value: torch.Tensor, role: str) -> _Seen:
        """`value` with a role."""
        seen = value.as_subclass(cls)
        seen.role = role
        return seen

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.nn.functional.linear:
            return cls._product(*args, **(kwargs or {}))
        made = super().__torch_function__(func, types, args, kwargs)
        if isinstance(made, _Seen) and made is not args[0]:
            is_cast = func in _CASTS and getattr(args[0], "role", "") in ("weight", "bias")
            made.role = args[0].role if is_cast else ""
        return made

    @classmethod
    def _product(cls, input: Any, weight: Any, bias: Any = None) -> _Seen:
        if input.dtype != weight.dtype or (bias is not None and input.dtype != bias.dtype):
            raise _MixedDtypes
        roles = [getattr(one, "role", "") for one in (input, weight, bias)]
        role = {"x weight bias": "weight and bias", "x weight ": "weight alone"}.get(" ".join(roles), "")
        return cls.of(torch.empty(2, 3, dtype=input.dtype, device="meta"), role)


_CASTS = frozenset(
    (
        torch.Tensor.to,
        torch.Tensor.type,
        torch.Tensor.type_as,
        torch.Tensor.float,
        torch.Tensor.half,
        torch.Tensor.bfloat16,
    )
)


class DerivedFP8Linear(FP8Linear):
    """An `FP8Linear` that is also of another class; `fp8_class` makes its classes.

    Attributes:
        derived_from: the other class. Plain copies have it.
    """

    derived_from: ClassVar[type[torch.nn.Module]]

    def plain_class(self) -> type[torch.nn.Module]:
        """See `FP8Linear.plain_class`."""
        return self.derived_from

    def __reduce_ex__(self, protocol: Any) -> Any:
        state: Any = super().__reduce_ex__(2)[2:]
        return (_new, (self.derived_from,), *state)  # pickle finds a class by its name, and this one has none


def fp8_class(kind: type[torch.nn.Module]) -> type[FP8Linear]:
    """The class of the FP8 layers of a class that `multiplies_as_linear`; always the same one."""
    if kind not in _CLASSES:
        names = {"derived_from": kind, "__module__": kind.__module__, "__doc__": kind.__doc__}
        _CLASSES[kind] = types.new_class(
            f"FP8{kind.__name__}", (DerivedFP8Linear, kind), exec_body=lambda namespace: namespace.update(names)
        )
    return _CLASSES[kind]


_CLASSES: dict[Any, type[FP8Linear]] = {torch.nn.Linear: FP8Linear}


def _new(kind: type[torch.nn.Module]) -> FP8Linear:
    made = fp8_class(kind)
    return made.__new__(made)
