"""Ranks of a node meet on a stream with no kernel: the GPU's front end writes and waits for counters in memory.

A kernel that spins takes registers of a multiprocessor away from the GEMM beside it for as long as it waits. A stream's
memory operations (CUDA driver API, "Stream memory operations") wait before anything is launched.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

_WAIT_VALUE_32, _WRITE_VALUE_32 = 1, 2
#: Waits until the counter has reached the value, in cyclic order.
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


class StreamBarrier:
    """Called by every rank on one of its streams: what follows on the stream waits until all have come this far.

    What a rank's stream did before the call, the others' streams see after it. Calls of one barrier are made on one
    stream, in the same order by every rank. A wait has no end of its own: `failures.RankWatch` ends a process whose
    exchanges do not.

    Args:
        counters: by rank, its int32 [d] zeros, where element r is written by rank r; mapped into this process.
        rank: this one.

    Raises:
        RuntimeError: the driver refuses.
    """

    def __init__(self, counters: Sequence[Tensor], rank: int) -> None:
        others = [other for other in range(len(counters)) if other != rank]
        size = counters[rank].element_size()
        written = [(_WRITE_VALUE_32, counters[other].data_ptr() + rank * size, 0) for other in others]
        awaited = [(_WAIT_VALUE_32, counters[rank].data_ptr() + other * size, _WAIT_UNTIL_REACHED) for other in others]
        self._device = counters[rank].device.index
        self._operations = (_Operation * (2 * len(others)))(
            *(_Operation(operation, address, 0, flags, 0, 0) for operation, address, flags in (*written, *awaited))
        )
        self._count = 0
        self._kept_mapped = tuple(counters)

    def __call__(self) -> None:
        """Queue a meeting on the current stream."""
        self._count += 1
        for operation in self._operations:
            operation.value = self._count & 0xFFFFFFFF
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        status = _driver().cuStreamBatchMemOp_v2(stream, len(self._operations), self._operations, 0)
        if status:
            raise RuntimeError(f"cuStreamBatchMemOp failed with CUDA driver error {status}")


def write_on_stream(address: int, value: int, device: int) -> None:
    """After what the current stream of `device` has done so far, write 32 bits at `address`.

    Raises:
        RuntimeError: the driver refuses.
    """
    stream = torch._C._cuda_getCurrentRawStream(device)
    status = _driver().cuStreamWriteValue32_v2(stream, address, value & 0xFFFFFFFF, 0)
    if status:
        raise RuntimeError(f"cuStreamWriteValue32 failed with CUDA driver error {status}")


@functools.cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuStreamWriteValue32_v2.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
    driver.cuStreamBatchMemOp_v2.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint]
    return driver
