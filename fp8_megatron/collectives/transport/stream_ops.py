"""Operations of a CUDA stream without a kernel: write or await a number, copy bytes, meet another stream (CUDA driver
API).

A copy on another stream costs the host 40 µs through torch and 5 here; a tensor-parallel layer has ten of them.
Addresses are plain numbers: the caller keeps their memory until the stream has used it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch

_WAIT_VALUE_32, _WRITE_VALUE_32 = 1, 2
#: Waits until the number has reached the value, in cyclic order.
_WAIT_UNTIL_REACHED = 0


class _Operation(ctypes.Structure):
    """CUstreamBatchMemOpParams, as far as waits and writes use it."""

    _fields_ = [
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("padding", ctypes.c_uint64),
    ]


class WriteThenWait:
    """Write one value to some places, then wait until others have it, as one operation of a stream.

    Args:
        written, awaited: addresses of 32-bit numbers.
    """

    def __init__(self, written: Sequence[int], awaited: Sequence[int]) -> None:
        operations = [(_WRITE_VALUE_32, address, 0) for address in written]
        operations += [(_WAIT_VALUE_32, address, _WAIT_UNTIL_REACHED) for address in awaited]
        self._operations = (_Operation * len(operations))(
            *(_Operation(operation, address, 0, flags, 0, 0) for operation, address, flags in operations)
        )

    def queue(self, value: int, stream: int) -> None:
        """Raises RuntimeError where the driver refuses."""
        for operation in self._operations:
            operation.value = value & 0xFFFFFFFF
        count = len(self._operations)
        _check("cuStreamBatchMemOp", _driver().cuStreamBatchMemOp_v2(stream, count, self._operations, 0))


def write_value(address: int, value: int, stream: int) -> None:
    """Write 32 bits after the stream's earlier work; whoever sees them sees that work too."""
    _check("cuStreamWriteValue32", _driver().cuStreamWriteValue32_v2(stream, address, value & 0xFFFFFFFF, 0))


def wait_value(address: int, value: int, stream: int) -> None:
    """Hold the stream until the 32 bits have reached `value`, in cyclic order."""
    status = _driver().cuStreamWaitValue32_v2(stream, address, value & 0xFFFFFFFF, _WAIT_UNTIL_REACHED)
    _check("cuStreamWaitValue32", status)


def copy(target: int, source: int, nbytes: int, stream: int) -> None:
    """Copy bytes between memory of this GPU and of GPUs that are mapped here."""
    _check("cuMemcpyDtoDAsync", _driver().cuMemcpyDtoDAsync_v2(target, source, nbytes, stream))


def record(event: int, stream: int) -> None:
    """Record a CUDA event after the stream's work so far."""
    _check("cuEventRecord", _driver().cuEventRecord(event, stream))


def wait_event(event: int, stream: int) -> None:
    """Hold the stream until an event's work is over."""
    _check("cuStreamWaitEvent", _driver().cuStreamWaitEvent(stream, event, 0))


def current_stream(device: torch.device) -> int:
    """The driver's handle of torch's current stream."""
    return torch._C._cuda_getCurrentRawStream(device.index)


def _check(name: str, status: int) -> None:
    if status:
        raise RuntimeError(f"{name} failed with CUDA driver error {status}")


@functools.cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    stream, address, number = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint
    driver.cuStreamBatchMemOp_v2.argtypes = [stream, number, ctypes.c_void_p, number]
    driver.cuStreamWriteValue32_v2.argtypes = [stream, address, ctypes.c_uint32, number]
    driver.cuStreamWaitValue32_v2.argtypes = [stream, address, ctypes.c_uint32, number]
    driver.cuEventRecord.argtypes = [ctypes.c_void_p, stream]
    driver.cuStreamWaitEvent.argtypes = [stream, ctypes.c_void_p, number]
    driver.cuMemcpyDtoDAsync_v2.argtypes = [address, address, ctypes.c_size_t, stream]
    return driver
