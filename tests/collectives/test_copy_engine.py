"""Which bytes a rank pulls from which peer: ranks are simulated in one process, on plain memory."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch

from fp8_megatron.collectives.all_gather import all_gather_each
from fp8_megatron.collectives.reduce_scatter import start_all_to_all
from fp8_megatron.collectives.transport import copy_engine
from fp8_megatron.collectives.transport.copy_engine import PeerMemory
from fp8_megatron.collectives.wire import WireTensor
from fp8_megatron.config.schema import ParallelConfig
from fp8_megatron.dtypes import StorageDtype
from fp8_megatron.mcore.topology import initialized
from fp8_megatron.sharding.transport import TransportChoice, TransportError, send_memory

CPU = torch.device("cpu")


@dataclass
class Member:
    """A group seen from one of its ranks."""

    own_rank: int
    num_ranks: int
    group_name: str = "ranks of a test"

    def rank(self) -> int:
        return self.own_rank

    def size(self) -> int:
        return self.num_ranks


class World:
    """Ranks with a shared buffer each; the barrier only counts."""

    def __init__(self, num_ranks: int, nbytes: int) -> None:
        self.groups = [Member(rank, num_ranks) for rank in range(num_ranks)]
        self.buffers = [torch.zeros(nbytes, dtype=torch.uint8) for _ in self.groups]
        self.num_met = [0 for _ in self.groups]
        for rank, group in enumerate(self.groups):
            barrier = functools.partial(self._meet, rank)
            copy_engine.register(PeerMemory(group, self.buffers, barrier))  # type: ignore[arg-type]

    def _meet(self, rank: int) -> None:
        self.num_met[rank] += 1


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_engine, "_memories", {})


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("dtype", [StorageDtype.FP8, StorageDtype.BF16])
def test_all_to_all_brings_every_version_of_a_shard(num_ranks: int, dtype: StorageDtype) -> None:
    numel = num_ranks * 256
    whole = [WireTensor.empty(2 * numel, dtype, CPU) for _ in range(num_ranks)]
    world = World(num_ranks, whole[0].nbytes)
    sent = [WireTensor(b, None).carve(2 * numel, dtype).slice(0, numel) for b in world.buffers]  # a narrower bucket
    values = [torch.randn(numel) for _ in sent]
    for wire, value in zip(sent, values, strict=True):
        wire.store_(value)
    for rank, group in enumerate(world.groups):
        received = WireTensor.empty(numel, dtype, CPU)
        for work in start_all_to_all(sent[rank], received, group):  # type: ignore[arg-type]
            work.wait()
        shard = slice(256 * rank, 256 * (rank + 1))
        expected = torch.cat([wire.load()[shard] for wire in sent])
        assert torch.equal(received.load(), expected)
        assert world.num_met[rank] == 2


def test_all_gather_spreads_every_shard_and_meets_once_at_the_end() -> None:
    num_ranks, sizes = 4, [32 * (1 + index % 3) for index in range(19)]
    starts = [num_ranks * sum(sizes[:index]) for index in range(len(sizes))]
    world = World(num_ranks, num_ranks * sum(sizes))
    shards = [[torch.randint(256, (size,)).to(torch.uint8) for size in sizes] for _ in range(num_ranks)]

    def full(rank: int, index: int) -> torch.Tensor:
        return world.buffers[rank][starts[index] : starts[index] + num_ranks * sizes[index]]

    for rank in range(num_ranks):  # what each rank does before the barrier
        for index, shard in enumerate(shards[rank]):
            full(rank, index).view(num_ranks, -1)[rank].copy_(shard)
    for rank, group in enumerate(world.groups):
        pairs = [(full(rank, index), shards[rank][index]) for index in range(len(sizes))]
        for work in all_gather_each(pairs, group):  # type: ignore[arg-type]
            work.wait()
        assert world.num_met[rank] == 4
    expected = torch.cat([torch.cat([shards[rank][index] for rank in range(num_ranks)]) for index in range(len(sizes))])
    for rank in range(num_ranks):
        assert torch.equal(world.buffers[rank], expected)


def test_memory_belongs_to_its_group() -> None:
    world = World(2, 1024)
    other = Member(0, 2, group_name="another")
    view = world.buffers[0][128:256].view(torch.bfloat16)
    assert copy_engine.memory_of(view, world.groups[0]) is not None  # type: ignore[arg-type]
    assert copy_engine.memory_of(view, other) is None  # type: ignore[arg-type]
    assert copy_engine.memory_of(torch.empty(4), world.groups[0]) is None  # type: ignore[arg-type]


def test_asking_for_copy_engines_without_gpus_says_why() -> None:
    with initialized(ParallelConfig(), 1, CPU) as topology:
        assert topology.replicas.grad_memory.group is None
        group = Member(0, 2)
        with pytest.raises(TransportError, match=r"dp_transport\(copy_engine\).*needs GPUs; give --dp-transport nccl"):
            send_memory(TransportChoice("copy_engine", "dp_transport"), group, CPU)  # type: ignore[arg-type]
