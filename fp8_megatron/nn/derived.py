"""FP8 layers of classes that are derived from `torch.nn.Linear` and multiply as it does.

Libraries derive such classes to add to a layer, not to change its forward: torchtitan's ``Linear`` has a configuration
and initialisers. Its FP8 layer is of both classes, so it keeps what the library added.
"""

from __future__ import annotations

import types
from typing import Any, ClassVar

import torch
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from .module import FP8Linear


def multiplies_as_linear(kind: type[torch.nn.Module]) -> bool:
    """Whether the layers of a class do what those of `torch.nn.Linear` do with a weight and a bias that they hold.

    torch's attention reads the weight of a `NonDynamicallyQuantizableLinear` itself.
    """
    if not issubclass(kind, torch.nn.Linear) or kind is NonDynamicallyQuantizableLinear:
        return False
    return all(getattr(kind, name) is getattr(torch.nn.Linear, name) for name in ("forward", "__call__"))


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
