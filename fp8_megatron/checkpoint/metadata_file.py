"""``.metadata``: the description of a checkpoint's tensors, a pickle of torch.distributed.checkpoint's `Metadata`.

It is written so that every supported torch reads it. The reader knows the names of such a description, imports none of
them, and checks every size and place before anything is allocated.
"""

from __future__ import annotations

import copyreg
import io
import math
import pickle
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties

from ..sharding.region import Shape
from .files import CheckpointError
from .pickles import DTYPES, PickledObject, read_pickled

_T = TypeVar("_T")

METADATA = ".metadata"
#: The largest size, and the largest number of elements, that a tensor may state.
_MOST = 2**48


class _AnyTorchPickler(pickle.Pickler):
    """Writes `TensorProperties` so that every supported torch reads them: without the strides that torch 2.14 added."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, TensorProperties):
            return copyreg.__newobj__, (TensorProperties,), obj.__getstate__()[:5]  # type: ignore[attr-defined]
        return NotImplemented


def pickled(metadata: Metadata) -> bytes:
    """The bytes of ``.metadata``, which every supported torch reads."""
    stream = io.BytesIO()
    _AnyTorchPickler(stream).dump(metadata)
    return stream.getvalue()


@dataclass(frozen=True)
class Written:
    """Where a tensor's chunk or an object was written; `global_shape` is None for an object, which has no rectangle.

    Attributes:
        dtype: of the payload.
    """

    key: str
    global_shape: Shape | None
    offset: Shape
    sizes: Shape
    file: str
    start: int
    length: int
    dtype: torch.dtype = torch.float32


class FilePart(NamedTuple):
    """Bytes [start, start + length) of a file of a checkpoint."""

    file: str
    start: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint; `dtype` is that of the payload."""

    dtype: torch.dtype
    shape: Shape
    chunks: list[Written]


class _Metadata(PickledObject):
    pass


class _Tensor(PickledObject):
    pass


class _BytesEntry(PickledObject):
    pass


_DESCRIBED = {"Metadata": _Metadata, "TensorStorageMetadata": _Tensor, "BytesStorageMetadata": _BytesEntry}
#: All names in a pickle of `Metadata`, and what is made of them.
_ADMITTED: dict[tuple[str, str], Any] = {
    ("torch", "Size"): tuple,
    **{("torch", name): getattr(torch, name) for name in DTYPES},
    ("torch.serialization", "_get_layout"): PickledObject,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): PickledObject,
    **{
        ("torch.distributed.checkpoint.metadata", name): _DESCRIBED.get(name, PickledObject)
        for name in (
            *_DESCRIBED,
            "ChunkStorageMetadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "_MEM_FORMAT_ENCODING",
        )
    },
    # Added by megatron-core's own writer.
    ("pathlib", "PosixPath"): PickledObject,
    **{
        ("torch.distributed.checkpoint.planner", name): PickledObject
        for name in ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")
    },
}


def read_metadata(folder: Path, files: Collection[str] | None = None) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint by key. Objects without a rectangle are left out.

    Args:
        files: names that may be read; None allows all in the folder.

    Raises:
        CheckpointError: missing, damaged, or no description of tensors that this folder's files hold.
    """
    return _checked(folder, files, lambda metadata: metadata.tensors())


def find_object(folder: Path, key: str) -> FilePart | None:
    """Where a checkpoint holds an object; None if it holds none of that key. Raises as `read_metadata`."""
    return _checked(folder, None, lambda metadata: metadata.object(key))


def _checked(folder: Path, files: Collection[str] | None, ask: Callable[[_CheckedMetadata], _T]) -> _T:
    path = folder / METADATA
    content = read_pickled(path, _ADMITTED)
    if not isinstance(content, _Metadata):
        raise CheckpointError(f"checkpoint file {path} is not loaded: it holds a {type(content).__name__}")
    try:
        return ask(_CheckedMetadata(folder, content, files))
    except ValueError as error:
        raise CheckpointError(
            f"checkpoint file {path} is damaged: {error}; copy it again, or use another iteration"
        ) from None


class _CheckedMetadata:
    """What a folder's ``.metadata`` says, checked against its files. Methods raise `ValueError`: what is wrong."""

    def __init__(self, folder: Path, content: _Metadata, files: Collection[str] | None) -> None:
        names = {path.name for path in folder.iterdir()} if files is None else files
        self._sizes = {name: (folder / name).stat().st_size for name in names if (folder / name).is_file()}
        self._entries = _mapping(content.get("state_dict_metadata"), "state_dict_metadata")
        self._places = {}
        for index, place in _mapping(content.get("storage_data"), "storage_data").items():
            key, offset = (index.get("fqn"), index.get("offset")) if isinstance(index, PickledObject) else (index, None)
            self._places[key, None if offset is None else _shape(offset, f"an offset of {key!r}")] = place

    def tensors(self) -> dict[str, StoredTensor]:
        found = {}
        for key, entry in self._entries.items():
            if not isinstance(key, str) or not key.isprintable() or not isinstance(entry, _Tensor | _BytesEntry):
                raise ValueError(f"{key!r} is no tensor's name, or a {type(entry).__name__}")
            if isinstance(entry, _Tensor):
                found[key] = self._tensor(key, entry)
        return found

    def object(self, key: str) -> FilePart | None:
        is_there = isinstance(self._entries.get(key), _BytesEntry)
        return self._part(key, self._places.get((key, None)), f"object {key}") if is_there else None

    def _part(self, key: str, place: Any, what: str) -> FilePart:
        """Where something of `key` is."""
        if not isinstance(place, PickledObject):
            raise ValueError(f"it names no file for the {what}")
        file, start, length = (place.get(name) for name in ("relative_path", "offset", "length"))
        if not isinstance(file, str) or file not in self._sizes:
            raise ValueError(f"it places {key} in {file!r}, which is no file of it")
        if not _is_count(start) or not _is_count(length) or start + length > self._sizes[file]:
            raise ValueError(f"{key} takes bytes {start!r} to + {length!r} of {file}, which has {self._sizes[file]}")
        return FilePart(file, start, length)

    def _tensor(self, key: str, entry: _Tensor) -> StoredTensor:
        shape = _shape(entry.get("size"), f"size of {key}")
        properties = entry.get("properties")
        fields = properties.fields if isinstance(properties, PickledObject) else None
        dtype = fields[0] if isinstance(fields, tuple) and fields else None
        chunks = entry.get("chunks")
        if not isinstance(dtype, torch.dtype) or not isinstance(chunks, list):
            raise ValueError(f"{key} has the dtype {dtype!r}, and chunks in a {type(chunks).__name__}")
        return StoredTensor(dtype, shape, [self._chunk(key, shape, dtype, chunk) for chunk in chunks])

    def _chunk(self, key: str, shape: Shape, dtype: torch.dtype, chunk: Any) -> Written:
        if not isinstance(chunk, PickledObject):
            raise ValueError(f"{key} has a {type(chunk).__name__} as a chunk")
        offset, sizes = (_shape(chunk.get(name), f"{name} of a chunk of {key}") for name in ("offsets", "sizes"))
        ends = [start + size for start, size in zip(offset, sizes, strict=False)]
        if not len(offset) == len(sizes) == len(shape) or any(
            end > size for end, size in zip(ends, shape, strict=True)
        ):
            raise ValueError(f"{key} of size {shape} has a chunk of sizes {sizes} at offsets {offset}")
        place = self._places.get((key, offset))
        file, start, length = self._part(key, place, f"chunk of {key} at offsets {offset}")
        if math.prod(sizes) > length:  # no element takes less than a byte
            raise ValueError(f"{key} has a chunk of sizes {sizes} in {length} bytes")
        return Written(key, shape, offset, sizes, file, start, length, dtype)


def _mapping(value: Any, name: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is a {type(value).__name__}, not a dictionary")
    return value


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST


def _shape(value: Any, name: str) -> Shape:
    if not isinstance(value, list | tuple) or not all(map(_is_count, value)) or math.prod(value) > _MOST:
        raise ValueError(f"{name} is {value!r}, not whole numbers of at least 0 with a product of at most 2^48")
    return tuple(value)
