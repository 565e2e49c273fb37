"""Folders of safetensors files, one tensor in memory at a time: reading, and writing in shards with an index.

The safetensors package writes a file only if all its tensors are in memory. The format is a header of names, dtypes and
offsets, then the bytes. Shapes are known in advance, so this module writes files tensor by tensor.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import torch
from safetensors import safe_open
from torch import Tensor

from ..checkpoint.files import CheckpointError, opened, read_file, write_text

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_DTYPE_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.uint8: "U8",
    torch.float8_e8m0fnu: "F8_E8M0",
}


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of a tensor that is not in memory."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return prod(self.shape) * self.dtype.itemsize


class SafetensorsFolder:
    """The tensors of a folder: one file, or shards with an index.

    Args:
        folder: with ``model.safetensors`` or ``model.safetensors.index.json``; of both the first, as in transformers.

    Raises:
        CheckpointError: there are no weights or they have another format, or a file is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: tuple[str, Any] | None = None
        self.file_of = self._files()

    def _files(self) -> dict[str, str]:
        if (self._folder / WEIGHTS_FILE).is_file():
            return dict.fromkeys(open_safetensors(self._folder / WEIGHTS_FILE).keys(), WEIGHTS_FILE)
        index = self._folder / INDEX_FILE
        if index.is_file():
            try:
                weight_map = json.loads(read_file(index))["weight_map"]
            except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
                raise CheckpointError(
                    f"{index} is not an index of safetensors files ({error!r}); fetch it again"
                ) from error
            if not isinstance(weight_map, dict) or not weight_map:
                raise CheckpointError(f"{index}: weight_map is no object of tensors and their files; fetch it again")
            for name, file in weight_map.items():
                if not isinstance(file, str) or file in ("", ".", "..") or "\0" in file or Path(file).name != file:
                    raise CheckpointError(
                        f"{index}: weight_map gives {name!r} the file {file!r}, which is not a file of its folder; "
                        f"fetch it again"
                    )
            return dict(weight_map)
        found = sorted(path.name for path in self._folder.glob("*.bin"))
        hint = f" (it has {found[0]}: load and save it with transformers, which writes safetensors)" if found else ""
        raise CheckpointError(f"{self._folder} has neither {WEIGHTS_FILE} nor {INDEX_FILE}{hint}")

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self.file_of)

    def spec(self, name: str) -> TensorSpec:
        """Name, dtype and shape of a tensor, without reading it."""
        part = self._file(name).get_slice(name)
        dtypes = {text: dtype for dtype, text in _DTYPE_NAMES.items()}
        dtype = dtypes.get(part.get_dtype())
        if dtype is None:
            raise CheckpointError(
                f"{self._folder}: {name!r} is {part.get_dtype()}; weights in {', '.join(dtypes)} can be read"
            )
        return TensorSpec(name, dtype, tuple(part.get_shape()))

    def read(self, name: str, index: int | None = None) -> Tensor:
        """A tensor as it is stored, or the part of it at an index of its first axis.

        Raises:
            CheckpointError: there is no tensor of that name, or its file is damaged.
        """
        file = self._file(name)
        try:
            return file.get_tensor(name) if index is None else file.get_slice(name)[index]
        except Exception as error:  # SafetensorError, and torch's own for a dtype that it lacks
            raise CheckpointError(
                f"{self._folder / self.file_of[name]}: {name!r} cannot be read ({error}); fetch the file again"
            ) from error

    def _file(self, name: str) -> Any:
        if name not in self.file_of:
            raise CheckpointError(f"{self._folder} has no tensor {name!r}")
        file = self.file_of[name]
        if self._open is None or self._open[0] != file:
            self._open = (file, open_safetensors(self._folder / file))
            missing = {key for key, value in self.file_of.items() if value == file} - set(self._open[1].keys())
            if missing:
                raise CheckpointError(f"{self._folder / file} has no {min(missing)!r}, which {INDEX_FILE} says it has")
        return self._open[1]


class SafetensorsWriter:
    """Writes the tensors of a folder one by one, in any order. A context manager; its exit completes the files.

    Args:
        folder: created if it does not exist.
        specs: all tensors, in the order in which they fill shards.
        max_shard_bytes: maximum size of a shard, unless a single tensor is larger.

    Raises:
        CheckpointError: on exit, a tensor was never written.
    """

    def __init__(self, folder: Path, specs: Sequence[TensorSpec], *, max_shard_bytes: int) -> None:
        self._folder = folder
        self._specs = {spec.name: spec for spec in specs}
        self._shards = _shards(specs, max_shard_bytes)
        self._unwritten = set(self._specs)

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._places: dict[str, tuple[BinaryIO, int]] = {}
        self._files = []
        for file_name, specs in self._shards.items():
            file = open(self._folder / file_name, "wb")
            self._files.append(file)
            self._places |= {name: (file, start) for name, start in _write_header(file, specs).items()}
        return self

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor. Its dtype and shape must match its spec."""
        spec = self._specs[name]
        assert tensor.dtype == spec.dtype and tuple(tensor.shape) == spec.shape, (spec, tensor.dtype, tensor.shape)
        file, start = self._places[name]
        file.seek(start)
        file.write(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        self._unwritten.discard(name)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
            file.close()
        if error is not None:
            return
        if self._unwritten:
            raise CheckpointError(f"{self._folder}: {min(self._unwritten)!r} was never written")
        if len(self._shards) > 1:
            weight_map = {spec.name: file for file, specs in self._shards.items() for spec in specs}
            total = sum(spec.nbytes for spec in self._specs.values())
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            write_text(self._folder / INDEX_FILE, json.dumps(index, indent=2) + "\n")


def open_safetensors(path: Path) -> Any:
    """A safetensors file whose tensors are read on demand; a context manager.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    try:
        opened(path).close()
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing, although {INDEX_FILE} names it; fetch it") from None
    except Exception as error:  # SafetensorError and errors of the system
        raise CheckpointError(f"{path} is damaged ({error}); fetch it again") from error


def _shards(specs: Sequence[TensorSpec], max_shard_bytes: int) -> Mapping[str, list[TensorSpec]]:
    """File name → its tensors. Files are filled in order."""
    shards: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if shards[-1] and size + spec.nbytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += spec.nbytes
    if len(shards) == 1:
        return {WEIGHTS_FILE: shards[0]}
    return {
        f"model-{number:05d}-of-{len(shards):05d}.safetensors": shard for number, shard in enumerate(shards, start=1)
    }


def _write_header(file: BinaryIO, specs: Sequence[TensorSpec]) -> dict[str, int]:
    """Write a file's header and set its size; returns the byte at which each tensor starts.

    Tensors with wider elements come first, so that each tensor is aligned to its element size.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts, offset = {}, 0
    for spec in sorted(specs, key=lambda spec: -spec.dtype.itemsize):
        entry = {"dtype": _DTYPE_NAMES[spec.dtype], "shape": list(spec.shape)}
        header[spec.name] = {**entry, "data_offsets": [offset, offset + spec.nbytes]}
        starts[spec.name] = offset
        offset += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    data = 8 + len(text)
    file.truncate(data + offset)
    return {name: data + start for name, start in starts.items()}
