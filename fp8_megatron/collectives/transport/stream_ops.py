"""Operations of a CUDA stream without a kernel: write or await a number, copy bytes, meet another stream (CUDA driver
API), and the side stream of a collective.

A copy on another stream costs the host 40 µs through torch and 5 here; a tensor-parallel layer has ten of them.
Addresses are plain numbers: the caller keeps their memory until the stream has used it.

Ranks of a node meet so (`StreamBarrier`): the GPU's front end writes and awaits counters in memory. A spinning kernel
would take a multiprocessor's registers away from the concurrent GEMM while it waits.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ...graphs import exchanges

_WAIT_VALUE_32, _WRITE_VALUE_32 = 1, 2
#: Waits until the number has reached the value, in cyclic order.
_WAIT_UNTIL_REACHED = 0


@functools.cache
def stream_of(device: torch.device, priority: int = 0) -> torch.cuda.Stream:
    """The side stream of a CUDA device; one for each priority (below 0: before other streams' kernels)."""
    return torch.cuda.Stream(device, priority=priority)


@contextmanager
def side_stream(device: torch.device, priority: int = 0) -> Iterator[None]:
    """Work of the block follows all work of the current stream, which does not wait for it. On a CPU the block just
    runs.

    There is one side stream per device and priority, so blocks follow each other. Two rules keep memory safe without a
    `record_stream`. Memory that a block allocates is used only in side-stream blocks: it returns to the side stream's
    own pool. The caller's memory that a block uses must not be touched until the current stream has waited for the
    block's last collective, which follows everything in the block.
    """
    if device.type != "cuda":
        yield
        return
    stream = stream_of(device, priority)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield


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


class StreamBarrier:
    """Called by every rank on one of its streams: later work on the stream waits until all ranks have come this far.

    What a rank's stream did before the call is visible to the other ranks' streams after it. Every rank calls one
    barrier on one stream, in the same order. A wait has no timeout: `failures.RankWatch` ends a process whose exchanges
    do not finish.

    Args:
        counters: by rank, its int32 [d] zeros, where element r is written by rank r; mapped into this process.
        rank: this one.

    Raises:
        RuntimeError: the driver refuses.
    """

    def __init__(self, counters: Sequence[Tensor], rank: int) -> None:
        others = [other for other in range(len(counters)) if other != rank]
        size = counters[rank].element_size()
        written = [counters[other].data_ptr() + rank * size for other in others]
        awaited = [counters[rank].data_ptr() + other * size for other in others]
        self._device = counters[rank].device
        self._meet = WriteThenWait(written, awaited)
        self._count = 0
        self._kept_mapped = tuple(counters)

    def __call__(self) -> None:
        """Queue a meeting on the current stream."""
        self._count += 1
        self._meet.queue(self._count, current_stream(self._device))

    def restart(self) -> None:
        """Count from 0 again."""
        self._count = 0


class RecordableBarrier:
    """A `StreamBarrier`, or its counterpart in a CUDA graph that is being recorded (`recording`).

    Args:
        counters: by rank, its int32 [3, d] zeros: for barriers, for recorded barriers, and for launches of these.
        rank: this one.
    """

    def __init__(self, counters: Sequence[Tensor], rank: int) -> None:
        of_kinds = zip(*(own.unbind() for own in counters), strict=True)
        self._usual, self._recorded, launches = (StreamBarrier(places, rank) for places in of_kinds)
        self.recordable = exchanges.Recordable(
            begin=self._recorded.restart, end=lambda: None, places=counters[rank][1], meet=launches
        )

    def __call__(self) -> None:
        """Queue a meeting on the current stream."""
        (self._recorded if exchanges.is_recording() else self._usual)()
