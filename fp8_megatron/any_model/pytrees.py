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


def flattened(tree: Any, name: str, *, takes_constants: bool = True) -> tuple[Hashable, list[Tensor]]:
    """The kind of a tree (its structure, its tensors' shapes and dtypes, its constants), and its tensors in order.

    Args:
        name: of the tree, for errors.
        takes_constants: numbers, strings and the like may be in it; None always may.

    Raises:
        UserError: something else is in it, with its place and its type.
    """
    tensors: list[Tensor] = []
    return _kind(tree, name, takes_constants, tensors), tensors


def _kind(tree: Any, name: str, takes_constants: bool, tensors: list[Tensor]) -> Hashable:
    if isinstance(tree, Tensor):
        if type(tree) not in (Tensor, torch.nn.Parameter) or tree.layout is not torch.strided:
            raise UserError(f"{name} is a {type(tree).__name__} of layout {tree.layout}: give a plain, dense tensor")
        tensors.append(tree)
        return tree.shape, tree.dtype
    if tree is None or (takes_constants and isinstance(tree, _CONSTANTS)):
        return type(tree), tree
    items = _items(tree)
    if items is None:
        others = "numbers or strings, " if takes_constants else ""
        raise UserError(
            f"{name} is a {type(tree).__name__}: a recorded step takes and returns tensors, {others}and dicts, lists, "
            f"tuples and dataclasses of them"
        )
    return type(tree), *(
        (key, _kind(value, f"{name}[{key!r}]", takes_constants, tensors)) for key, value in items.items()
    )


def _items(tree: Any) -> Mapping[Any, Any] | None:
    """What is directly in a tree, by its key; None: this is a leaf."""
    if isinstance(tree, Mapping):
        return tree
    if isinstance(tree, (list, tuple)):
        return dict(enumerate(tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
    return None


def rebuilt(tree: Any, tensors: Iterator[Tensor]) -> Any:
    """The same tree with other tensors, in the order of `flattened`."""
    if isinstance(tree, Tensor):
        return next(tensors)
    items = _items(tree)
    if items is None:
        return tree
    values = {key: rebuilt(value, tensors) for key, value in items.items()}
    if isinstance(tree, (list, tuple)):
        # A named tuple takes its values one by one.
        return type(tree)(*values.values()) if hasattr(tree, "_fields") else type(tree)(values.values())
    made = copy.copy(tree)
    for key, value in values.items():
        if isinstance(tree, Mapping):
            made[key] = value
        else:
            object.__setattr__(made, key, value)  # a frozen dataclass, too
    return made
