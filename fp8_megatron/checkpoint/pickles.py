"""The one door for pickles of a checkpoint: files of `torch.save`, and torch.distributed.checkpoint's ``.metadata``.

A pickle names classes and functions, and plain reading calls them. Here a file is read for data alone. Files of
`torch.save` go through `torch.load(weights_only=True)` with the lists below, and with nothing that other code has
allowed. TorchScript archives hold programs: they are refused before anything is read.
"""

from __future__ import annotations

import argparse
import collections
import io
import pickle
import pickletools
import threading
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import torch
from torch import Tensor

from .files import CheckpointError, opened, read_file, reread

#: Dtypes of saved tensors.
DTYPES = "float32 float64 float16 bfloat16 float8_e4m3fn float8_e5m2 uint8 int8 int16 int32 int64 bool".split()
_STORAGES = "Float Half BFloat16 Long Int Short Char Byte Bool Double Untyped".split()
#: What the pickle of a single tensor names. torch makes all of it without calling anything else.
_OF_TENSORS = frozenset(
    {
        "collections.OrderedDict",
        "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_tensor_v3",
        *(f"torch.{name}" for name in DTYPES),
        *(f"torch.{name}Storage" for name in _STORAGES),
        *(f"torch.storage.{name}Storage" for name in ("Typed", "Untyped")),
    }
)


class Opaque:
    """Stands for an object of a class that is not read. It takes what a pickle gives it, and keeps nothing."""

    def __new__(cls, *_: Any, **__: Any) -> Opaque:
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def _plain_dict(*_: Any) -> dict[Any, Any]:
    return {}


#: What a file of Megatron-LM may hold beside tensors. Each other name becomes an `Opaque`, and is not imported.
_OF_MEGATRON: Mapping[str, Callable[..., Any]] = {
    "argparse.Namespace": argparse.Namespace,
    "types.SimpleNamespace": SimpleNamespace,
    "collections.OrderedDict": collections.OrderedDict,
    "collections.defaultdict": _plain_dict,
    "builtins.dict": _plain_dict,
    "torch.Size": torch.Size,
    "torch._utils._rebuild_parameter": torch._utils._rebuild_parameter,
}
#: Levels of containers, and their number: a checkpoint has some ten, and a few for each tensor.
_MOST_LEVELS = 64
_MOST_CONTAINERS = 2_000_000
#: torch keeps one list of allowed names for the process.
_torchs_list = threading.Lock()


def read_megatron_file(path: Path, part: tuple[int, int] | None = None) -> Any:
    """The content of a file that Megatron-LM wrote with `torch.save`; tensors are mapped from it.

    It holds tensors among Python objects: the run's arguments, enums, states of generators. Tensors, containers and
    arguments are read; every other object becomes an `Opaque`.

    Args:
        part: where in the file it starts, and its length; None: it is the file.

    Raises:
        CheckpointError: missing, damaged, or a TorchScript archive.
    """
    try:
        source: Path | io.BytesIO = path if part is None else io.BytesIO(reread(lambda: _bytes_of(path, *part)))
        names = reread(lambda: _names_in_file(path)) if isinstance(source, Path) else _names_in(source)
        unknown = names - _OF_TENSORS - _OF_MEGATRON.keys()
        with _only([(kind, name) for name, kind in _OF_MEGATRON.items()] + [(Opaque, name) for name in unknown]):
            if not isinstance(source, Path):
                source.seek(0)
            content = torch.load(source, map_location="cpu", weights_only=True, mmap=part is None)
        _check_nesting(content)
        return content
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint file {path} is missing; copy it too") from None
    except _BadFile as refused:
        raise CheckpointError(f"checkpoint file {path} {refused}") from None
    except Exception as error:  # torch raises almost anything for a damaged archive
        raise CheckpointError(f"checkpoint file {path} is damaged ({_said(error)}); copy it again") from error


def read_tensor(file: IO[bytes]) -> Tensor:
    """The tensor that `torch.save` wrote to a stream, on the CPU.

    Raises:
        ValueError: it is none, or names more than a tensor needs; other errors of torch.
    """
    try:
        unknown = _names_in(file) - _OF_TENSORS
    except _BadFile as refused:
        raise ValueError(f"it {refused}") from None
    if unknown:
        raise ValueError(f"it names {min(unknown)}, which no tensor needs")
    file.seek(0)
    value = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(value, Tensor):
        raise ValueError(f"it holds a {type(value).__name__}, not a tensor")
    return value


def _check_nesting(content: Any) -> None:
    """Check that a recursive reader gets to the end of all containers.

    Raises:
        _BadFile: they are nested too deep, or hold themselves.
    """
    left: list[tuple[Any, int]] = [([content], 0)]
    count = 0
    while left:
        value, depth = left.pop()
        count += 1
        if depth > _MOST_LEVELS or count > _MOST_CONTAINERS:
            raise _BadFile(f"is damaged (it nests deeper than {_MOST_LEVELS} levels, or holds itself); copy it again")
        children = value.values() if isinstance(value, dict) else value
        left += [(child, depth + 1) for child in children if isinstance(child, dict | list | tuple)]


def _bytes_of(path: Path, start: int, length: int) -> bytes:
    with opened(path) as file:
        file.seek(start)
        return file.read(length)


def _names_in_file(path: Path) -> set[str]:
    with opened(path) as file:
        return _names_in(file)


class _BadFile(ValueError):
    """What is wrong with a file, as the end of a sentence that begins with the file."""


def _names_in(file: IO[bytes]) -> set[str]:
    """The classes and functions that a file of `torch.save` names, as ``module.name``. Builds nothing.

    Raises:
        _BadFile: a TorchScript archive, an archive that is compressed, or no archive.
    """
    try:
        archive = zipfile.ZipFile(file)
    except zipfile.BadZipFile as error:
        raise _BadFile(f"is damaged ({error}), or was saved by torch before 1.6; copy it again") from None
    with archive:
        entries = archive.infolist()
        parts = [entry.filename.split("/")[1:] for entry in entries]
        if any(part == ["constants.pkl"] or part[:1] == ["code"] for part in parts):
            raise _BadFile("is a TorchScript archive, which is not read: it holds a program; save it with torch.save")
        pickles = [entry for entry, part in zip(entries, parts, strict=True) if part == ["data.pkl"]]
        if len(pickles) != 1 or any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise _BadFile("is damaged (it is no archive that torch.save wrote); copy it again")
        return set(_globals(archive.read(pickles[0])))


def _globals(content: bytes) -> Iterator[str]:
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name == "GLOBAL":
            module, name = str(argument).split(" ", 1)
            # As torch and `pickle` read names of Python 2, which its protocol has.
            module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
            yield f"{module}.{name}"
        elif opcode.name in ("STACK_GLOBAL", "INST"):
            raise _BadFile(f"is damaged ({opcode.name} is not of torch.save's protocol); copy it again")


@contextmanager
def _only(allowed: Iterable[tuple[Callable[..., Any], str]]) -> Iterator[None]:
    """While the block runs, torch admits these names beside those of tensors, and none that other code has added."""
    with _torchs_list:
        before = torch.serialization.get_safe_globals()
        try:
            torch.serialization.clear_safe_globals()
            torch.serialization.add_safe_globals(list(allowed))
            yield
        finally:
            torch.serialization.clear_safe_globals()
            torch.serialization.add_safe_globals(before)


def _said(error: Exception) -> str:
    """What torch says is wrong, without its advice to trust the file."""
    paragraphs = str(error).split("\n\n")
    is_advised = len(paragraphs) > 1 and paragraphs[0].startswith("Weights only load failed")
    return paragraphs[-2 if is_advised else 0].rpartition("WeightsUnpickler error: ")[2].strip()


class PickledObject:
    """An object of a class that is known by name alone. Its fields are what the pickle says, unchecked."""

    fields: Any = None

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, fields: Any) -> None:
        self.fields = fields

    def get(self, name: str) -> Any:
        """A field; None if there is none."""
        return self.fields.get(name) if isinstance(self.fields, dict) else None


class _DataUnpickler(pickle.Unpickler):
    """Builds what `admitted` gives for each name, and refuses every other name."""

    def __init__(self, file: IO[bytes], admitted: Mapping[tuple[str, str], Any]) -> None:
        super().__init__(file)
        self._admitted = admitted

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._admitted:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no description of tensors needs")
        return self._admitted[module, name]

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to objects outside of it")


def read_pickled(path: Path, admitted: Mapping[tuple[str, str], Any]) -> Any:
    """The content of a plain pickle.

    Args:
        admitted: by (module, name), what a name of the pickle stands for: `PickledObject` classes and constants.

    Raises:
        CheckpointError: missing, damaged, or it names something else.
    """
    try:
        return _DataUnpickler(io.BytesIO(read_file(path)), admitted).load()
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint file {path} is missing") from None
    except Exception as error:  # a damaged pickle raises almost anything
        raise CheckpointError(f"checkpoint file {path} is not loaded: {error}") from None


def mapping(value: Any, what: str, path: Path) -> dict[Any, Any]:
    """`value`, which has to be a dictionary.

    Raises:
        CheckpointError: it is none.
    """
    if not isinstance(value, dict):
        raise CheckpointError(f"checkpoint file {path}: {what} is a {type(value).__name__}, not a dictionary")
    return value
