"""What two objects differ in: to see whether a restored object is the one that was saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def differing_fields(one: Any, other: Any, *, ignored: frozenset[str] = frozenset(), path: str = "") -> list[str]:
    """The paths of attributes, items and keys in which two objects differ: tensors bit for bit, everything else by
    value. Functions and iterators are passed over.

    Args:
        ignored: names of attributes that may differ.
    """
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        is_same = one.shape == other.shape and one.dtype == other.dtype and torch.equal(_bits(one), _bits(other))
        return [] if is_same else [path]
    if type(one) is not type(other):
        return [path]
    found: list[str] = []
    for name, (ours, theirs) in _parts(one, other):
        if name not in ignored:
            found += differing_fields(ours, theirs, ignored=ignored, path=f"{path}.{name}")
    if isinstance(one, (Mapping, Sequence)) and not isinstance(one, str) and len(one) != len(other):
        found.append(path)
    if isinstance(one, (int, float, str, bytes, type(None))) and one != other:
        found.append(path)
    return found


def _parts(one: Any, other: Any) -> Iterator[tuple[str, tuple[Any, Any]]]:
    if isinstance(one, Mapping):
        yield from ((str(key), (value, other.get(key))) for key, value in one.items())
    elif isinstance(one, Sequence) and not isinstance(one, (str, bytes)):
        yield from ((str(index), pair) for index, pair in enumerate(zip(one, other, strict=False)))
    elif type(one).__module__.startswith("fp8_megatron"):
        names = [*getattr(one, "__dict__", {}), *getattr(type(one), "__slots__", ())]
        yield from ((name, (getattr(one, name), getattr(other, name, None))) for name in names)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
