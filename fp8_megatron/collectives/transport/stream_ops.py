"""What a CUDA stream does with no kernel: write or await a number, copy bytes, meet another stream (CUDA driver API).

Through torch a copy on another stream costs the host 40 µs, here 5; a tensor-parallel layer has ten of them.
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
    """After what the stream has done so far, and seen wherever it is seen, write 32 bits."""
    _check("cuStreamWriteValue32", _driver().cuStreamWriteValue32_v2(stream, address, value & 0xFFFFFFFF, 0))


def wait_value(address: int, value: int, stream: int) -> None:
    """Hold the stream until the 32 bits have come to `value`, in cyclic order."""
    status = _driver().cuStreamWaitValue32_v2(stream, address, value & 0xFFFFFFFF, _WAIT_UNTIL_REACHED)
    _check("cuStreamWaitValue32", status)


def copy(target: int, source: int, nbytes: int, stream: int) -> None:
    """Copy bytes between memory of this GPU or of one that is mapped here."""
    _check("cuMemcpyDtoDAsync", _driver().cuMemcpyDtoDAsync_v2(target, source, nbytes, stream))


def record(event: int, stream: int) -> None:
    """Let a CUDA event stand for what the stream has been given so far."""
    _check("cuEventRecord", _driver().cuEventRecord(event, stream))


def wait_event(event: int, stream: int) -> None:
    """Hold the stream until what an event stands for is over."""
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
