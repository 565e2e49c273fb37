"""``.metadata``: the description of a checkpoint's tensors, a pickle of torch.distributed.checkpoint's `Metadata`.

It is written so that every supported torch reads it. The reader admits the classes of such a description by name and
refuses all others, so reading executes nothing.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorProperties

from .files import CheckpointError

METADATA = ".metadata"


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


#: All names in a pickle of `Metadata`; the only callables are constructors of data.
_DTYPES = "float32 float64 float16 bfloat16 float8_e4m3fn float8_e5m2 uint8 int8 int16 int32 int64 bool".split()
_ADMITTED = {
    ("torch", "Size"),
    *(("torch", name) for name in _DTYPES),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    # Added by megatron-core's own writer.
    ("pathlib", "PosixPath"),
    *(
        ("torch.distributed.checkpoint.planner", name)
        for name in ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")
    ),
}


class _DataUnpickler(pickle.Unpickler):
    """Unpickles `Metadata` and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no description of tensors needs")
        return super().find_class(module, name)

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to objects outside of it")


def read_metadata(folder: Path) -> Metadata:
    """Read a checkpoint's ``.metadata``. Classes outside a short list are refused before any object is built.

    Raises:
        CheckpointError: missing, damaged, or not a description of tensors.
    """
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            metadata = _DataUnpickler(file).load()
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint file {path} is missing") from None
    except Exception as error:  # a damaged pickle raises almost anything
        raise CheckpointError(f"checkpoint file {path} is not loaded: {error}") from None
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise CheckpointError(f"checkpoint file {path} is not loaded: it holds a {type(metadata).__name__}")
    return metadata
