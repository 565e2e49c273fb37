"""Tensors in dicts, lists, tuples and dataclasses: what a recorded step is called with, and what it returns."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Hashable, Iterator, Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError

#: What is part of a batch's kind: another value is another batch.
_CONSTANTS = (int, float, str, bytes, Enum, torch.dtype, torch.device, type(None))


def flattened(nest: Any, name: str, *, takes_constants: bool = True) -> tuple[Hashable, list[Tensor]]:
    """The kind of a nest (its structure, its tensors' shapes and dtypes, its constants), and its tensors in order.

    Args:
        name: of the nest, for errors.
        takes_constants: numbers, strings and the like may be in it; None always may.

    Raises:
        UserError: something else is in it, with its place and its type.
    """
    tensors: list[Tensor] = []
    return _kind(nest, name, takes_constants, tensors), tensors


def _kind(nest: Any, name: str, takes_constants: bool, tensors: list[Tensor]) -> Hashable:
    if isinstance(nest, Tensor):
        if type(nest) not in (Tensor, torch.nn.Parameter) or nest.layout is not torch.strided:
            raise UserError(f"{name} is a {type(nest).__name__} of layout {nest.layout}: give a plain, dense tensor")
        tensors.append(nest)
        return nest.shape, nest.dtype
    if nest is None or (takes_constants and isinstance(nest, _CONSTANTS)):
        return type(nest), nest
    items = _items(nest)
    if items is None:
        others = "numbers or strings, " if takes_constants else ""
        raise UserError(
            f"{name} is a {type(nest).__name__}: a recorded step takes and returns tensors, {others}and dicts, lists, "
            f"tuples and dataclasses of them"
        )
    return type(nest), *(
        (key, _kind(value, f"{name}[{key!r}]", takes_constants, tensors)) for key, value in items.items()
    )


def _items(nest: Any) -> Mapping[Any, Any] | None:
    """What is directly in a nest, by its key; None: this is no nest."""
    if isinstance(nest, Mapping):
        return nest
    if isinstance(nest, (list, tuple)):
        return dict(enumerate(nest))
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        return {field.name: getattr(nest, field.name) for field in dataclasses.fields(nest)}
    return None


def rebuilt(nest: Any, tensors: Iterator[Tensor]) -> Any:
    """The same nest with other tensors, in the order of `flattened`."""
    if isinstance(nest, Tensor):
        return next(tensors)
    items = _items(nest)
    if items is None:
        return nest
    values = {key: rebuilt(value, tensors) for key, value in items.items()}
    if isinstance(nest, (list, tuple)):
        # A named tuple takes its values one by one.
        return type(nest)(*values.values()) if hasattr(nest, "_fields") else type(nest)(values.values())
    made = copy.copy(nest)
    for key, value in values.items():
        if isinstance(nest, Mapping):
            made[key] = value
        else:
            object.__setattr__(made, key, value)  # a frozen dataclass, too
    return made
