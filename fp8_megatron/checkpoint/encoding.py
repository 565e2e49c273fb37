"""State in the dtype that training stores it in: one rectangle of a tensor as a run of bytes, and back to FP32.

An encoded rectangle is a safetensors document with the tensors `scales`, `payload` and, for split masters,
`correction`. It can be decoded without the rest of the checkpoint. `torch.save` takes three times the CPU time of its
checksum; safetensors' own writer copies each tensor twice. Here it is written from the state's own memory.

Scales belong to blocks of 256 elements of a rank's flat parameter. A rectangle may begin and end inside a block. It
then holds the whole block's scale, and the place of its first element in its block.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ..dtypes import STATE_BLOCK, StorageDtype
from ..kernels import ops
from ..sharding.region import Shape

#: An encoded rectangle begins with the length of its header, in this many bytes.
HEAD_BYTES = 8
_MAX_HEADER_BYTES = 4096
#: Its tensors begin at a multiple of this many bytes.
_ALIGNMENT = 64
#: Storage dtypes without their scales, which are FP32 for one block or, for a split master, for the parameter.
_BY_DTYPE = {dtype.torch_dtype: dtype for dtype in StorageDtype if dtype is not StorageDtype.SPLIT}
_SAFETENSORS_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int8: "I8",
    torch.uint8: "U8",
}


class _Sink(Protocol):
    def write(self, data: bytes | memoryview, /) -> int: ...


@dataclass(frozen=True)
class Encoded:
    """A rectangle of a tensor as training stores it.

    Attributes:
        form: storage dtype of the payload; `StorageDtype.SPLIT` is E4M3 with a correction.
        shape: sizes of the rectangle; n is their product.
        payload: [n], row by row.
        scales: FP32 [⌈(first + n) / 256⌉], of a split master [1]; None for fp32 and bf16.
        correction: int8 [n] of a split master, else None.
        first: place of the first element in its scale block.
    """

    form: StorageDtype
    shape: Shape
    payload: Tensor
    scales: Tensor | None = None
    correction: Tensor | None = None
    first: int = 0

    @classmethod
    def of_state(cls, payload: Tensor, scales: Tensor | None) -> Encoded:
        """A flat run [n] of state that begins at a scale block."""
        return cls(_BY_DTYPE[payload.dtype], tuple(payload.shape), payload, scales)

    @classmethod
    def of_split_master(cls, payload: Tensor, correction: Tensor, scale: Tensor) -> Encoded:
        """A flat run [n] of a split master; `scale` is FP32 [1]."""
        return cls(StorageDtype.SPLIT, tuple(payload.shape), payload, scale.repeat(1), correction)  # repeat: stride 1

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for _, tensor in self._tensors())

    def rectangle(self, start: int, shape: Shape) -> Encoded:
        """Elements of a flat run from `start` on, as a rectangle (views)."""
        stop = start + math.prod(shape)
        scales = self.scales
        if scales is not None and self.form is not StorageDtype.SPLIT:
            scales = scales[start // STATE_BLOCK : -(-stop // STATE_BLOCK)]
        return replace(
            self,
            shape=shape,
            payload=self.payload[start:stop],
            scales=scales,
            correction=None if self.correction is None else self.correction[start:stop],
            first=start % STATE_BLOCK if self.form.is_scaled else 0,
        )

    def decode(self) -> Tensor:
        """FP32 of `shape`, on the payload's device."""
        return self._decoded().view(self.shape)

    def _decoded(self) -> Tensor:
        if self.correction is not None:
            assert self.scales is not None
            return ops.join_master(self.payload, self.correction, self.scales)
        if self.scales is None:
            return self.payload.float()
        numel = self.payload.numel()
        if self.first == 0 and numel % STATE_BLOCK == 0:
            return ops.load_state(self.payload, self.scales)
        blocks = self.payload.new_zeros(self.scales.numel() * STATE_BLOCK)
        blocks[self.first : self.first + numel] = self.payload
        return ops.load_state(blocks, self.scales)[self.first : self.first + numel]

    def to(self, device: torch.device) -> Encoded:
        """The same on a device, without waiting for the copies."""
        moved: dict[str, Any] = {name: tensor.to(device, non_blocking=True) for name, tensor in self._tensors()}
        return replace(self, **moved)

    def on_cpu(self) -> Encoded:
        """The same in the host's memory, complete."""
        moved: dict[str, Any] = {name: tensor.cpu() for name, tensor in self._tensors()}
        return replace(self, **moved)

    def write(self, file: _Sink) -> None:
        """Append the encoded rectangle to a file. The tensors are on the CPU."""
        file.write(_header(self.form, math.prod(self.shape), self.first))
        for _, tensor in self._tensors():
            file.write(memoryview(tensor.contiguous().view(torch.uint8).numpy()))  # type: ignore[arg-type]

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) in the order of the file: a tensor of smaller elements follows one of larger ones."""
        named = (("scales", self.scales), ("payload", self.payload), ("correction", self.correction))
        return ((name, tensor) for name, tensor in named if tensor is not None)


def is_encoded(head: bytes) -> bool:
    """Whether bytes begin an encoded rectangle, with a header's length. Archives of `torch.save` do not."""
    return len(head) >= HEAD_BYTES and 0 < int.from_bytes(head[:HEAD_BYTES], "little") <= _MAX_HEADER_BYTES


def decode(content: Tensor, shape: Shape) -> Encoded:
    """The rectangle of `shape` in its encoding, uint8 [bytes] (views).

    Raises:
        ValueError: it does not hold such a rectangle; says what differs.
    """
    size = int.from_bytes(content[:HEAD_BYTES].numpy().tobytes(), "little")
    start = HEAD_BYTES + size
    form, first = _described(content[HEAD_BYTES:start].numpy().tobytes(), math.prod(shape))
    layout = _layout(form, math.prod(shape), first)
    size = start + sum(numel * dtype.itemsize for _, dtype, numel in layout)
    if size != content.numel():
        raise ValueError(f"a rectangle of {content.numel()} bytes, and {size} belong to {form.value} of shape {shape}")
    tensors = {}
    for name, dtype, numel in layout:
        stop = start + numel * dtype.itemsize
        tensors[name] = content[start:stop].view(dtype)
        start = stop
    scales = tensors.get("scales")
    if scales is not None and not (scales.isnan() | ((scales > 0) & scales.isfinite())).all():
        raise ValueError("a scale that is negative, zero or infinite")
    return Encoded(form, shape, first=first, **tensors)


def _described(header: bytes, numel: int) -> tuple[StorageDtype, int]:
    """(form, place of the first element) of `numel` elements."""
    try:
        found = json.loads(header)
        about = found["__metadata__"]
        form, first = StorageDtype(about["form"]), int(about["first"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"a description that cannot be read ({error!r})") from None
    if not 0 <= first < (STATE_BLOCK if form.is_scaled else 1):
        raise ValueError(f"first({first}) outside of a block")
    expected = _description(form, numel, first)
    if found != expected:
        name = next(name for name in {**expected, **found} if found.get(name) != expected.get(name))
        raise ValueError(f"{name} as {found.get(name)}, where {form.value} has {expected.get(name)}")
    return form, first


def _header(form: StorageDtype, numel: int, first: int) -> bytes:
    """The length and the JSON of an encoding, padded with spaces."""
    text = json.dumps(_description(form, numel, first), separators=(",", ":")).encode()
    text += b" " * (-(HEAD_BYTES + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(HEAD_BYTES, "little") + text


def _description(form: StorageDtype, numel: int, first: int) -> dict[str, object]:
    """The JSON of an encoding, as safetensors defines it."""
    content: dict[str, object] = {"__metadata__": {"form": form.value, "first": str(first)}}
    start = 0
    for name, dtype, length in _layout(form, numel, first):
        stop = start + length * dtype.itemsize
        content[name] = {"dtype": _SAFETENSORS_NAMES[dtype], "shape": [length], "data_offsets": [start, stop]}
        start = stop
    return content


def _layout(form: StorageDtype, numel: int, first: int) -> list[tuple[str, torch.dtype, int]]:
    """(name, dtype, elements) of the tensors of an encoding, in order."""
    if form is StorageDtype.SPLIT:
        payload = StorageDtype.FP8.torch_dtype
        return [("scales", torch.float32, 1), ("payload", payload, numel), ("correction", form.torch_dtype, numel)]
    tensors = [("payload", form.torch_dtype, numel)]
    if form.is_scaled:
        tensors.insert(0, ("scales", torch.float32, -(-(first + numel) // STATE_BLOCK)))
    return tensors
