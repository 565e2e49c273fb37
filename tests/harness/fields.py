"""What two objects differ in: to see whether a restored object is the one that was saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def differing_fields(one: Any, other: Any, *, ignored: frozenset[str] = frozenset()) -> list[str]:
    """The paths of attributes, items and keys in which two objects differ: tensors bit for bit, everything else by
    value. Functions and iterators are passed over.

    Args:
        ignored: names of attributes that may differ.
    """
    return [*_differing(one, other, ignored, "", set())]


def _differing(one: Any, other: Any, ignored: frozenset[str], path: str, seen: set[int]) -> Iterator[str]:
    if id(one) in seen:
        return
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype or not torch.equal(_bits(one), _bits(other)):
            yield path
    elif type(one) is not type(other):
        yield path
    elif isinstance(one, (int, float, str, bytes, type(None))):
        if one != other:
            yield path
    else:
        seen.add(id(one))
        if isinstance(one, (Mapping, Sequence)) and len(one) != len(other):
            yield path
        for name, (ours, theirs) in _parts(one, other):
            if name not in ignored:
                yield from _differing(ours, theirs, ignored, f"{path}.{name}", seen)


def _parts(one: Any, other: Any) -> Iterator[tuple[str, tuple[Any, Any]]]:
    if isinstance(one, Mapping):
        yield from ((str(key), (value, other.get(key))) for key, value in one.items())
    elif isinstance(one, Sequence):
        yield from ((str(index), pair) for index, pair in enumerate(zip(one, other, strict=False)))
    elif type(one).__module__.startswith("fp8_megatron"):
        names = [*getattr(one, "__dict__", {}), *getattr(type(one), "__slots__", ())]
        yield from ((name, (getattr(one, name), getattr(other, name, None))) for name in names)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().contiguous().view(-1).view(torch.uint8)
