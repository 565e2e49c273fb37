"""Send and receive buffers of gradients. A rank reuses a few buffers for any number of buckets."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from ..collectives.reduce_scatter import ReduceScatterWork
from ..collectives.wire import WireTensor
from ..dtypes import StorageDtype
from .transport import SendMemory

#: Buckets in flight while the next one is written. Six were no faster for GPT-7B on 4 GPUs.
_IN_FLIGHT = 2


@dataclass(frozen=True)
class Staging:
    """Memory for one bucket: this rank's send buffer and receive buffer."""

    sent: WireTensor
    received: WireTensor

    def narrowed(self, numel: int) -> Staging:
        """Its first `numel` elements (views)."""
        return Staging(self.sent.slice(0, numel), self.received.slice(0, numel))

    @property
    def nbytes(self) -> int:
        """Bytes of both buffers."""
        return self.sent.nbytes + self.received.nbytes


@dataclass(frozen=True)
class _Reduction:
    """A reduction under way, and where its result belongs."""

    staging: Staging
    work: ReduceScatterWork
    accumulator: Tensor
    adds: bool


class StagingPool:
    """Buffers for buckets of one wire dtype, shared by all gradient buffers of a rank.

    At most two buckets are in flight. Taking a third buffer waits for the oldest (on CUDA the stream waits) and adds
    its result to its accumulator. Results are added in the order in which they were sent.
    """

    def __init__(self, dtype: StorageDtype, memory: SendMemory) -> None:
        self.dtype = dtype
        self._memory = memory
        self._numel = 0
        self._free: list[Staging] = []
        self._in_flight: deque[_Reduction] = deque()
        self._num_made = 0

    def reserve(self, numel: int) -> None:
        """Make every buffer large enough for buckets of `numel` elements; before the first `take`."""
        assert self._num_made == 0, "buffers were made already"
        self._numel = max(self._numel, numel)

    @property
    def has_buffers(self) -> bool:
        """Whether buffers were made; their size stays."""
        return self._num_made > 0

    def take(self) -> Staging:
        """A buffer to fill: a new one if fewer than the limit are in flight, else the oldest, once its bytes have
        arrived.
        """
        if self._free:
            return self._free.pop()
        if len(self._in_flight) >= _IN_FLIGHT:
            self._receive_oldest()
            return self._free.pop()
        self._num_made += 1
        return self._make(self._memory)

    def await_arrival(self, staging: Staging, work: ReduceScatterWork, accumulator: Tensor, *, adds: bool) -> None:
        """Take `staging` back; write or add the result of `work` to `accumulator` once it has arrived."""
        self._in_flight.append(_Reduction(staging, work, accumulator, adds))

    def drain(self) -> None:
        """Wait for everything in flight."""
        while self._in_flight:
            self._receive_oldest()

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers once the pipeline is full; before that, a lower bound."""
        return self._make(SendMemory(torch.device("meta"))).nbytes * max(self._num_made, _IN_FLIGHT)

    def _make(self, memory: SendMemory) -> Staging:
        received = WireTensor.empty(self._numel, self.dtype, memory.device)
        sent = WireTensor(memory.zeros(received.nbytes, torch.uint8), None).carve(self._numel, self.dtype)
        return Staging(sent, received)

    def _receive_oldest(self) -> None:
        arrival = self._in_flight.popleft()
        arrival.work.wait_into(arrival.accumulator, add=arrival.adds)
        self._free.append(arrival.staging)


class StagingPools:
    """A rank's pools, one for each wire dtype and each memory in use."""

    def __init__(self) -> None:
        self._pools: dict[tuple[StorageDtype, SendMemory], StagingPool] = {}

    def pool(self, dtype: StorageDtype, memory: SendMemory) -> StagingPool:
        """The pool for buffers of `dtype` in `memory`."""
        return self._pools.setdefault((dtype, memory), StagingPool(dtype, memory))

    @property
    def has_buffers(self) -> bool:
        """Whether a pool has made buffers."""
        return any(pool.has_buffers for pool in self._pools.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(pool.nbytes for pool in self._pools.values())
