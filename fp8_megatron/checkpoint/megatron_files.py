"""Files that Megatron-LM wrote with `torch.save`, read without executing anything.

They hold tensors among Python objects: the run's arguments, enums, states of generators. `torch.load` would need all of
Megatron's code for them, and runs what the pickle names. The reader here knows the classes of tensors and of arguments
by name. Every other class becomes an `Opaque`, which keeps nothing.
"""

from __future__ import annotations

import argparse
import collections
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from .files import CheckpointError

#: What a file may name: constructors of data alone. torch itself resolves the names of storages.
_ADMITTED = {
    ("argparse", "Namespace"): argparse.Namespace,
    ("types", "SimpleNamespace"): SimpleNamespace,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "defaultdict"): collections.defaultdict,
    ("torch", "Size"): torch.Size,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): torch._utils._rebuild_parameter,
    ("torch.storage", "TypedStorage"): torch.storage.TypedStorage,
    ("torch.storage", "UntypedStorage"): torch.storage.UntypedStorage,
    **{("torch", name): getattr(torch, name) for name in ("float32", "float16", "bfloat16", "int64", "int32", "uint8")},
    **{
        ("torch", f"{name}Storage"): getattr(torch, f"{name}Storage")
        for name in ("Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool", "Double")
    },
    **{("builtins", name): kind for name, kind in (("set", set), ("dict", dict), ("list", list), ("int", int))},
}


class Opaque:
    """Stands for an object of any other class. It takes what a pickle gives it, and keeps nothing."""

    def __new__(cls, *_: Any, **__: Any) -> Opaque:
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        """Drop an element of a list."""

    def extend(self, values: Any) -> None:
        """Drop elements of a list."""


class _Unpickler(pickle.Unpickler):
    """Builds tensors, containers and arguments; everything else is an `Opaque`."""

    def find_class(self, module: str, name: str) -> Any:
        return _ADMITTED.get((module, name), Opaque)


class _PickleModule:
    """What `torch.load` asks of a pickle module."""

    Unpickler = _Unpickler
    UnpicklingError = pickle.UnpicklingError
    __name__ = "fp8_megatron.checkpoint.megatron_files"

    @staticmethod
    def load(file: Any, **settings: Any) -> Any:
        """As `pickle.load`."""
        return _Unpickler(file, **settings).load()


def read_megatron_file(path: Path) -> Any:
    """The content of a file of `torch.save`; tensors are mapped from it.

    Raises:
        CheckpointError: missing or damaged.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=False, pickle_module=_PickleModule, mmap=True)
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint file {path} is missing; copy it too") from None
    except Exception as first:
        if "mmap" not in str(first):
            raise CheckpointError(f"checkpoint file {path} is damaged ({first}); copy it again") from first
    try:  # torch's format before 1.6 cannot be mapped
        return torch.load(path, map_location="cpu", weights_only=False, pickle_module=_PickleModule)
    except Exception as error:
        raise CheckpointError(f"checkpoint file {path} is damaged ({error}); copy it again") from error


def mapping(value: Any, what: str, path: Path) -> dict[Any, Any]:
    """`value`, which has to be a dictionary.

    Raises:
        CheckpointError: it is none.
    """
    if not isinstance(value, dict):
        raise CheckpointError(f"checkpoint file {path}: {what} is a {type(value).__name__}, not a dictionary")
    return value
