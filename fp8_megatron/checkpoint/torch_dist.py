"""Rectangles of tensors in files: megatron-core's ``torch_dist``, and the same with state in its storage dtypes.

A folder holds ``*.distcp`` files of concatenated rectangles and ``.metadata``: a pickle of
torch.distributed.checkpoint's `Metadata` that says which rectangle of which tensor is where. In ``torch_dist`` each
rectangle is FP32 as `torch.save` writes it, and megatron-core can read the folder. It adds ``metadata.json``, the
format's name, and ``common.pt``. In this project's own format each rectangle is encoded in its storage dtype
(`encoding`); ``metadata.json`` has another name, so megatron-core refuses the folder. The reader here reads both.
Reading executes nothing.

`megatron.core.dist_checkpointing.save` is not used: it calls CUDA on a CPU and starts processes for each save. These
processes outlive a killed trainer and may write into the next one's folder; without psutil they hang. torch's reader is
not used because it reads ``.metadata`` with plain `pickle`.
"""

from __future__ import annotations

import io
import json
import math
import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ..sharding.region import Shape
from .encoding import HEAD_BYTES, Encoded, decode, is_encoded
from .files import CheckpointError, reread
from .manifest import NUM_READERS, ChecksummedFile, FileEntry, in_order, write_file
from .metadata_file import METADATA, Written, pickled, read_metadata
from .pickles import read_tensor
from .saved_blocks import SavedBlocks

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

#: A rank writes this many files in parallel; the next file is started when the earlier ones have this many bytes.
NUM_FILES = 4
_MIN_FILE_BYTES = 1 << 24
#: Bytes of chunks waiting to be written; the last chunk may exceed this.
_UNWRITTEN_BYTES = 1 << 27
_FORMATS = {
    "fp32": {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    },
    "native": {"sharded_backend": "fp8_megatron_native", "sharded_backend_version": 1},
}


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a tensor to write: FP32, or in its storage dtype; on the CPU."""

    key: str
    global_shape: Shape
    offset: Shape
    value: Tensor | Encoded


def write_chunks(
    folder: Path, rank: int, chunks: Iterable[Chunk | str], *, num_files: int = NUM_FILES
) -> tuple[list[Written], list[FileEntry]]:
    """Write a rank's files, each in a separate thread; without chunks there are no files.

    Args:
        num_files: upper limit. Each thread competes with concurrent training for Python's lock.
        chunks: rectangles; a string is the key of an empty object (megatron-core keeps one per linear layer). Chunks
            are drawn while earlier ones are written.
    """
    files: list[_ChunkFile] = []
    with ExitStack() as open_files, ExitStack() as threads:

        def tasks() -> Iterator[tuple[int, Future[Written]]]:
            for chunk in chunks:
                file = min(files, key=lambda file: file.num_bytes, default=None)
                if file is None or (file.num_bytes >= _MIN_FILE_BYTES and len(files) < num_files):
                    file = _ChunkFile(folder, f"__{rank}_{len(files)}.distcp", open_files, threads)
                    files.append(file)
                yield file.submit(chunk)

        written = list(in_order(tasks(), limit_bytes=_UNWRITTEN_BYTES))
    return written, [file.entry for file in files]


class _ChunkFile:
    """A file that a thread appends chunks to.

    Args:
        open_files, threads: exit stacks that close the file and end the thread. The thread must end first.
    """

    def __init__(self, folder: Path, name: str, open_files: ExitStack, threads: ExitStack) -> None:
        self._name = name
        self._file = open_files.enter_context(ChecksummedFile(folder, name))
        self._thread = threads.enter_context(ThreadPoolExecutor(1))
        self.num_bytes = 0

    @property
    def entry(self) -> FileEntry:
        return self._file.entry

    def submit(self, chunk: Chunk | str) -> tuple[int, Future[Written]]:
        """Queue a chunk for writing: its bytes, and where it will be."""
        num_bytes = 0 if isinstance(chunk, str) else chunk.value.nbytes
        self.num_bytes += num_bytes
        return num_bytes, self._thread.submit(self._write, chunk)

    def _write(self, chunk: Chunk | str) -> Written:
        start = self._file.size
        if isinstance(chunk, str):
            torch.save([None], self._file)  # type: ignore[arg-type]  # it has what torch asks of a stream
            return Written(chunk, None, (), (), self._name, start, self._file.size - start)
        value = chunk.value
        if isinstance(value, Encoded):
            value.write(self._file)
            dtype = value.payload.dtype
        else:
            if value.untyped_storage().nbytes() != value.nbytes:
                value = value.clone()  # torch would save the whole storage of a view
            torch.save(value, self._file)  # type: ignore[arg-type]
            dtype = value.dtype
        sizes = tuple(value.shape)
        length = self._file.size - start
        return Written(chunk.key, chunk.global_shape, chunk.offset, sizes, self._name, start, length, dtype)


def write_metadata(
    folder: Path, written: Iterable[Written], *, common: dict[str, Any] | None, checkpoint_id: str
) -> list[FileEntry]:
    """Write the description of all ranks' files; called on one rank.

    Args:
        common: plain numbers and strings for ``common.pt``, which megatron-core's readers require; None if chunks are
            in their storage dtypes, which those cannot read.
    """
    tensors: dict[str, Any] = {}
    storage = {}
    for item in written:
        offset = None if item.global_shape is None else torch.Size(item.offset)
        storage[MetadataIndex(item.key, offset)] = _StorageInfo(item.file, item.start, item.length)
        if item.global_shape is None:
            tensors[item.key] = BytesStorageMetadata()
            continue
        if item.key not in tensors:
            properties = TensorProperties(dtype=item.dtype)
            tensors[item.key] = TensorStorageMetadata(properties, torch.Size(item.global_shape), [])
        tensors[item.key].chunks.append(ChunkStorageMetadata(torch.Size(item.offset), torch.Size(item.sizes)))
    metadata = Metadata(tensors, storage_data=storage, storage_meta=StorageMeta(checkpoint_id))
    metadata.version = CURRENT_DCP_VERSION
    name = json.dumps(_FORMATS["native" if common is None else "fp32"])
    entries = [
        write_file(folder, METADATA, pickled(metadata)),
        write_file(folder, "metadata.json", name.encode()),
    ]
    if common is not None:
        stream = io.BytesIO()
        torch.save(common, stream)
        entries.append(write_file(folder, "common.pt", stream.getvalue()))
    return entries


@dataclass(frozen=True)
class Wanted:
    """A rectangle to read: its elements are written to `target`, FP32, flat and in order.

    Attributes:
        blocks: takes the rectangle's scale blocks as they were saved; None if nobody asks for them.
        start: place of `target` in the part that `blocks` is of.
    """

    offset: Shape
    sizes: Shape
    target: Tensor
    blocks: SavedBlocks | None = None
    start: int = 0


@dataclass(frozen=True)
class PlannedRead:
    """A saved chunk, and what is wanted of it."""

    item: Written
    overlaps: list[tuple[Wanted, tuple[Shape, Shape]]]

    def place(self, value: Tensor | Encoded) -> None:
        """Copy the chunk's elements to their targets. It is decoded where the targets are."""
        device = self.overlaps[0][0].target.device
        encoded = None
        if isinstance(value, Encoded):
            encoded = value.to(device)
            value = encoded.decode()
        moved = value.to(device, non_blocking=True)
        for want, (offset, sizes) in self.overlaps:
            source = moved[_slices(offset, self.item.offset, sizes)]
            want.target.view(want.sizes)[_slices(offset, want.offset, sizes)].copy_(source)
            if encoded is not None and want.blocks is not None:
                run = _run(offset, sizes, self.item.offset, self.item.sizes)
                own = _run(offset, sizes, want.offset, want.sizes)
                if run is not None and own is not None:
                    want.blocks.take(encoded, run, math.prod(sizes), want.start + own)


class TorchDistReader:
    """Reads rectangles of the tensors of a checkpoint in either format, however it was cut. Each rank reads for itself,
    with several threads.

    Args:
        files: names that may be read (the manifest's); None allows all in the folder.

    Attributes:
        shapes: of every tensor.

    Raises:
        CheckpointError: as `read_metadata`.
    """

    def __init__(self, folder: Path, files: Collection[str] | None = None) -> None:
        self._folder = folder
        self.shapes: dict[str, Shape] = {}
        self._chunks: dict[str, dict[int, list[Written]]] = defaultdict(lambda: defaultdict(list))
        for key, tensor in read_metadata(folder, files).items():
            self.shapes[key] = tensor.shape
            for item in tensor.chunks:
                # Indexed by the first axis, to find a layer's chunks among those of hundreds of layers.
                first = item.offset[0] if len(tensor.shape) > 1 and item.sizes[0] == 1 else -1
                self._chunks[key][first].append(item)

    def read(self, key: str, wanted: list[Wanted]) -> None:
        """Fill every target.

        Raises:
            CheckpointError: a part was not saved, or a file is damaged.
        """
        plan = self.plan(key, wanted)
        if len(plan) < 2:
            for planned in plan:
                self._place(planned)
            return
        with ThreadPoolExecutor(NUM_READERS) as threads:
            list(threads.map(self._place, plan))

    def _place(self, planned: PlannedRead) -> None:
        planned.place(self.load(planned.item))

    def plan(self, key: str, wanted: list[Wanted]) -> list[PlannedRead]:
        """What fills every target. Each saved chunk that overlaps a target is read once. Reads nothing.

        Raises:
            CheckpointError: a part was not saved.
        """
        groups = self._chunks[key]
        firsts = {-1}
        if len(groups) > 1 or -1 not in groups:  # a flat tensor of millions of elements has one group
            firsts |= {first for want in wanted for first in range(want.offset[0], want.offset[0] + want.sizes[0])}
        missing = sum(math.prod(want.sizes) for want in wanted)
        planned = []
        for first in sorted(firsts & groups.keys()):
            for item in groups[first]:
                overlaps = [(want, box) for want in wanted if (box := _overlap(item, want)) is not None]
                if overlaps:
                    planned.append(PlannedRead(item, overlaps))
                    missing -= sum(math.prod(sizes) for _, (_, sizes) in overlaps)
        if missing:
            raise self._unsaved(missing, key)
        return planned

    def _unsaved(self, missing: int, key: str) -> CheckpointError:
        return CheckpointError(f"{self._folder}: {missing} elements of {key} were not saved; use another iteration")

    def chunks(self, key: str) -> Iterator[Written]:
        """Where each saved chunk of a tensor is."""
        return (item for group in self._chunks[key].values() for item in group)

    def read_whole(self, key: str) -> Tensor:
        """A whole tensor, FP32 on the CPU."""
        return self._filled(key, (0,) * len(self.shapes[key]), self.shapes[key])

    def read_layer(self, key: str, layer: int | None) -> Tensor:
        """One layer of a tensor that stacks them, or a whole tensor without layers (None), FP32 on the CPU."""
        if layer is None:
            return self.read_whole(key)
        shape = self.shapes[key][1:]
        return self._filled(key, (layer, *(0 for _ in shape)), (1, *shape)).view(shape)

    def _filled(self, key: str, offset: Shape, sizes: Shape) -> Tensor:
        """A rectangle, FP32 on the CPU. Memory is taken for what was saved, not for what a description claims."""
        saved, needed = sum(math.prod(item.sizes) for item in self.chunks(key)), math.prod(sizes)
        if saved < needed:
            raise self._unsaved(needed - saved, key)
        value = torch.empty(sizes)
        self.read(key, [Wanted(offset, sizes, value.view(-1))])
        return value

    def load(self, item: Written, *, pinned: bool = False) -> Tensor | Encoded:
        """A saved chunk, on the CPU.

        Args:
            pinned: in pinned memory, for copies to a GPU.

        Raises:
            CheckpointError: the file is damaged.
        """
        path = self._folder / item.file
        try:
            value = reread(lambda: _read(path, item, pinned=pinned))
        except Exception as error:  # torch raises almost anything for a damaged archive
            raise CheckpointError(
                f"checkpoint file {path} is damaged: {item.key} at byte {item.start}: {error}; use another iteration"
            ) from error
        if isinstance(value, Encoded):
            return value
        if tuple(value.shape) != item.sizes:
            raise CheckpointError(f"checkpoint file {path} is damaged: {item.key} is not of shape {item.sizes} in it")
        return value.pin_memory() if pinned else value


def _read(path: Path, item: Written, *, pinned: bool) -> Tensor | Encoded:
    with path.open("rb", buffering=0) as file:
        part = _PartOfFile(file, item.start, item.length)
        if is_encoded(part.head()):
            return decode(part.content(pinned=pinned), item.sizes)
        return read_tensor(part)  # type: ignore[arg-type]  # it has what zipfile and torch ask of a stream


class _PartOfFile(io.RawIOBase):
    """Bytes [start, start + length) of an open file as a stream; torch reads a tensor's bytes directly into its
    storage.
    """

    def __init__(self, file: io.FileIO, start: int, length: int) -> None:
        self._file, self._start, self._length = file, start, length
        self._position = 0

    def head(self) -> bytes:
        """The first bytes, as many as tell an encoded rectangle."""
        start = self.read(min(HEAD_BYTES, self._length))
        self._position = 0
        return start

    def content(self, *, pinned: bool) -> Tensor:
        """All bytes, uint8 [length]."""
        if self._start + self._length > os.fstat(self._file.fileno()).st_size:
            raise ValueError(f"fewer than {self._length} bytes")  # before memory for them is taken
        content = torch.empty(self._length, dtype=torch.uint8, pin_memory=pinned)
        if self.readinto(content.numpy()) < self._length:  # type: ignore[arg-type]
            raise ValueError(f"fewer than {self._length} bytes")
        return content

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = origin + offset
        return self._position

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Fill `buffer` as far as there are bytes; a single system call stops at 2 GiB."""
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._position)]
        self._file.seek(self._start + self._position)
        filled = 0
        while filled < len(view) and (num_read := self._file.readinto(view[filled:])):
            filled += num_read
        self._position += filled
        return filled


def _overlap(item: Written, want: Wanted) -> tuple[Shape, Shape] | None:
    """(offset, sizes) of the overlap of a saved chunk and a wanted rectangle."""
    offset = tuple(max(a, b) for a, b in zip(item.offset, want.offset, strict=True))
    stop = tuple(min(a + n, b + m) for a, n, b, m in zip(item.offset, item.sizes, want.offset, want.sizes, strict=True))
    sizes = tuple(end - start for start, end in zip(offset, stop, strict=True))
    return (offset, sizes) if all(size > 0 for size in sizes) else None


def _slices(offset: Shape, origin: Shape, sizes: Shape) -> tuple[slice, ...]:
    return tuple(slice(at - start, at - start + n) for at, start, n in zip(offset, origin, sizes, strict=True))


def _run(offset: Shape, sizes: Shape, origin: Shape, whole: Shape) -> int | None:
    """Where a rectangle begins in a larger one at `origin`, both flat, if it is one run of that; else None."""
    if not sizes:
        return 0
    first = next((dim for dim, size in enumerate(sizes) if size > 1), len(sizes) - 1)
    if sizes[first + 1 :] != whole[first + 1 :]:
        return None
    start = 0
    for at, begin, size in zip(offset, origin, whole, strict=True):
        start = start * size + at - begin
    return start
