"""Rows between tensor-parallel ranks over shared memory: ranks played by threads that meet where a stream would."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8_megatron.collectives import copy_engine, row_exchange
from fp8_megatron.collectives.copy_engine import PeerMemory
from fp8_megatron.collectives.row_exchange import RowExchange, gather_rows, sum_rows
from fp8_megatron.formats import E4M3

from .test_copy_engine import Member

CPU = torch.device("cpu")


class Node:
    """Ranks whose buffers are one process's memory."""

    def __init__(self, num_ranks: int) -> None:
        self.groups = [Member(rank, num_ranks, f"rank {rank} of a node") for rank in range(num_ranks)]
        self.meeting = threading.Barrier(num_ranks, timeout=30)
        self._lock = threading.Lock()
        self._buffers: dict[int, list[Tensor]] = {}
        for rank, group in enumerate(self.groups):
            allocate = functools.partial(self._allocate, rank, [0])
            row_exchange.register(group, RowExchange(group, CPU, allocate))  # type: ignore[arg-type]

    def _allocate(self, rank: int, calls: list[int], nbytes: int) -> PeerMemory:
        """The call-th buffer of a rank: every rank asks for the same ones."""
        with self._lock:
            buffers = self._buffers.setdefault(calls[0], [torch.zeros(nbytes, dtype=torch.uint8) for _ in self.groups])
        calls[0] += 1
        assert buffers[0].numel() == nbytes
        return PeerMemory(self.groups[rank], buffers, self.meeting.wait)  # type: ignore[arg-type]

    def run(self, work: Callable[[int, Any], Any]) -> list[Any]:
        """What each rank's `work(rank, group)` gives."""
        with ThreadPoolExecutor(len(self.groups)) as pool:
            return list(pool.map(work, range(len(self.groups)), self.groups))


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(row_exchange, "_exchanges", {})
    monkeypatch.setattr(copy_engine, "_started", type(copy_engine._started)())
    yield


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_gathered_rows_arrive_part_by_part_the_own_first(num_ranks: int) -> None:
    shards = [torch.randn(16, 48).to(E4M3) for _ in range(num_ranks)]
    expected = torch.cat([shard.view(torch.uint8) for shard in shards])

    def work(rank: int, group: Any) -> None:
        gathered = gather_rows(shards[rank], group)
        seen = torch.zeros(num_ranks)
        for index, (rows, part) in enumerate(gathered.parts()):
            assert torch.equal(part.view(torch.uint8), expected[rows])
            assert index > 0 or (rows.start == 16 * rank and part is shards[rank])
            seen[rows.start // 16] += 1
        assert torch.equal(seen, torch.ones(num_ranks))
        assert torch.equal(gathered.wait().view(torch.uint8), expected)

    Node(num_ranks).run(work)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_sum_is_taken_in_fp32_in_rank_order(num_ranks: int, dtype: torch.dtype) -> None:
    matrices = torch.randn(num_ranks, 64, 32).to(dtype)
    expected = torch.zeros(64, 32)
    for matrix in matrices:
        expected += matrix.float()

    def work(rank: int, group: Any) -> Tensor:
        written = []

        def write(rows: slice, out: Tensor) -> None:
            written.append(rows.start * num_ranks // 64)
            out.copy_(matrices[rank][rows])

        total = sum_rows(write, (64, 32), dtype, CPU, group).wait()
        assert sorted(written) == list(range(num_ranks)) and written[-1] == rank  # the others wait for theirs
        return total

    assert torch.equal(torch.cat(Node(num_ranks).run(work)), expected.to(dtype))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_exchanges_of_a_layer_one_after_the_other(num_ranks: int) -> None:
    """Forward's order and backward's, where a gather is read only after the sum that started behind it; sizes vary, and
    ranks come at their own pace."""
    turns = 40
    sizes = [16 * (1 + (7 * turn) % 5) for turn in range(turns)]
    shards = [[torch.randint(256, (size, 8)).to(torch.uint8) for size in sizes] for _ in range(num_ranks)]
    matrices = [[torch.randn(num_ranks * size, 8).bfloat16() for size in sizes] for _ in range(num_ranks)]

    def work(rank: int, group: Any) -> None:
        pace = torch.Generator().manual_seed(rank)
        for turn, size in enumerate(sizes):

            def write(rows: slice, out: Tensor, turn: int = turn) -> None:
                if float(torch.rand(1, generator=pace)) < 0.2:
                    threading.Event().wait(0.002)
                out.copy_(matrices[rank][turn][rows])

            first = gather_rows(shards[rank][turn], group)
            second = gather_rows(shards[rank][turn] ^ 255, group)
            summing = sum_rows(write, (num_ranks * size, 8), torch.bfloat16, CPU, group)
            if turn % 3 == 0:
                sum_rows(write, (num_ranks * size, 8), torch.bfloat16, CPU, group).wait()
            expected = torch.cat([shards[other][turn] for other in range(num_ranks)])
            assert torch.equal(first.wait(), expected) and torch.equal(second.wait(), expected ^ 255)
            mine = slice(rank * size, (rank + 1) * size)
            total = sum(matrices[other][turn][mine].float() for other in range(num_ranks))
            assert torch.equal(summing.wait(), total.bfloat16())  # type: ignore[union-attr]

    Node(num_ranks).run(work)
