"""Rows between tensor-parallel ranks over shared memory: ranks are threads that wait where a stream would."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8_megatron.collectives import row_exchange
from fp8_megatron.collectives.row_exchange import RowExchange, gather_rows, sum_rows
from fp8_megatron.dtypes import E4M3

from .test_copy_engine import Member

CPU = torch.device("cpu")


class Node:
    """Ranks whose buffers are one process's memory; what a rank does on its streams may take its time."""

    def __init__(self, num_ranks: int) -> None:
        self.groups = [Member(rank, num_ranks, f"rank {rank} of a node") for rank in range(num_ranks)]
        self._pace = [torch.Generator().manual_seed(rank) for rank in range(num_ranks)]
        self._lock = threading.Lock()
        self._buffers: dict[int, list[Tensor]] = {}
        self.told: dict[tuple[int, int, int], int] = {}
        self.news = threading.Condition()
        for rank, group in enumerate(self.groups):
            exchange = RowExchange(rank, num_ranks, functools.partial(self._allocate, [0]), NodeLink(self, rank))
            row_exchange.register(group, exchange)  # type: ignore[arg-type]

    def _allocate(self, calls: list[int], nbytes: int) -> list[Tensor]:
        """The buffers of a rank's n-th call: every rank asks for the same ones."""
        with self._lock:
            empty = [torch.zeros(nbytes, dtype=torch.uint8) for _ in self.groups]
            buffers = self._buffers.setdefault(calls[0], empty)
        calls[0] += 1
        assert buffers[0].numel() == nbytes
        return buffers

    def dawdle(self, rank: int) -> None:
        """Sometimes delay the caller."""
        if float(torch.rand(1, generator=self._pace[rank])) < 0.2:
            time.sleep(0.003)

    def set_back(self, reader: int, *, first_channel: int) -> None:
        """Nobody has told `reader` anything on the channels from this one."""
        with self.news:
            for key in self.told:
                if key[1] == reader and key[2] >= first_channel:
                    self.told[key] = 0

    def run(self, work: Callable[[int, Any], Any]) -> list[Any]:
        """What each rank's `work(rank, group)` gives."""
        with ThreadPoolExecutor(len(self.groups)) as pool:
            return list(pool.map(work, range(len(self.groups)), self.groups))


class NodeLink:
    """`peer_link.Link` of a rank of a `Node`; what it sends, another thread sends later, as a stream would."""

    def __init__(self, node: Node, rank: int) -> None:
        self._node, self._rank = node, rank
        self._queue: ThreadPoolExecutor = ThreadPoolExecutor(1)
        self._last: Future[None] = self._queue.submit(lambda: None)

    def start(self) -> None:
        self._queue.submit(self._node.dawdle, self._rank)

    def copy(self, source: Tensor, target: Tensor) -> None:
        assert source.is_contiguous() and target.is_contiguous() and source.nbytes == target.nbytes
        self._queue.submit(target.copy_, source)

    def tell(self, peer: int, channel: int, number: int) -> None:
        self._last = self._queue.submit(self._tell, (self._rank, peer, channel), number)

    def _tell(self, key: tuple[int, int, int], number: int) -> None:
        with self._node.news:
            assert number == self._node.told.get(key, 0) + 1, "one after the other"
            self._node.told[key] = number
            self._node.news.notify_all()

    def sent(self, name: str, turn: int) -> Sent:
        return Sent(self._queue.submit(lambda: None))

    def wait(self, peer: int, channel: int, number: int) -> None:
        with self._node.news:
            key = (peer, self._rank, channel)
            assert self._node.news.wait_for(lambda: self._node.told.get(key, 0) >= number, timeout=30)
        self._node.dawdle(self._rank)


@dataclass
class Sent:
    """All that was queued before."""

    future: Future[None]

    def wait(self) -> None:
        self.future.result(timeout=30)


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_exchange, "_exchanges", {})


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

        def write(rows: slice, out: Tensor, adds_once: bool) -> None:
            written.append(rows.start * num_ranks // 64)
            assert adds_once == (written[-1] == rank)
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

    node = Node(num_ranks)

    def work(rank: int, group: Any) -> None:
        for turn, size in enumerate(sizes):

            def write(rows: slice, out: Tensor, _: bool, turn: int = turn, sign: int = 1) -> None:
                node.dawdle(rank)
                out.copy_(matrices[rank][turn][rows] * sign)

            write_others = functools.partial(write, sign=-1)

            gathered = gather_rows(shards[rank][turn], group)
            summing = sum_rows(write, (num_ranks * size, 8), torch.bfloat16, CPU, group)
            expected = torch.cat([shards[other][turn] for other in range(num_ranks)])
            whole = gathered.wait()
            node.dawdle(rank)
            assert torch.equal(whole, expected)
            mine = slice(rank * size, (rank + 1) * size)
            total = sum(matrices[other][turn][mine].float() for other in range(num_ranks))
            assert torch.equal(summing.wait(), total.bfloat16())  # type: ignore[union-attr]
            if turn % 3 == 0:
                again = gather_rows(shards[rank][turn] ^ 255, group)
                for rows, part in again.parts():
                    assert torch.equal(part, expected[rows] ^ 255)
                negated = sum_rows(write_others, (num_ranks * size, 8), torch.bfloat16, CPU, group)
                assert torch.equal(negated.wait(), -total.bfloat16())  # type: ignore[union-attr]

    node.run(work)


def test_an_exchange_before_the_last_one_was_waited_for_is_refused() -> None:
    def work(rank: int, group: Any) -> None:
        shard = torch.zeros(16, 16, dtype=torch.uint8)
        gather_rows(shard, group)
        with pytest.raises(AssertionError, match="was not waited for"):
            gather_rows(shard, group)

    Node(2).run(work)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_recorded_exchanges_are_launched_between_others(num_ranks: int) -> None:
    """A launch counts from 1 each time, at places that its ranks have reset, for any number of exchanges between
    launches.
    """
    node = Node(num_ranks)
    meeting = threading.Barrier(num_ranks)

    def work(rank: int, group: Any) -> None:
        exchange = row_exchange._exchanges[group.group_name]

        def exchange_some(count: int, seed: int) -> None:
            for turn in range(count):
                values = [float((17 * seed + 5 * turn + source) % 64) for source in range(num_ranks)]
                gathered = gather_rows(torch.full((16, 16), values[rank]).to(torch.uint8), group)
                assert gathered.wait().float().view(num_ranks, -1).unique(dim=1).view(-1).tolist() == values

                def write(rows: slice, out: Tensor, _: bool, value: float = values[rank]) -> None:
                    out.fill_(value)

                total = sum_rows(write, (16 * num_ranks, 16), torch.float32, CPU, group).wait()
                assert total.unique().tolist() == [sum(values)]

        for launch in range(6):
            exchange_some(launch % 3, launch)
            node.set_back(rank, first_channel=row_exchange._NUM_CHANNELS)
            meeting.wait(30)
            exchange.begin_recording()
            exchange_some(3, 100 + launch)
            exchange.end_recording()
            meeting.wait(30)

    node.run(work)
    usual = {number for (_, _, channel), number in node.told.items() if channel < row_exchange._NUM_CHANNELS}
    recorded = {number for (_, _, channel), number in node.told.items() if channel >= row_exchange._NUM_CHANNELS}
    assert usual == {0 + 1 + 2 + 0 + 1 + 2} and recorded == {3}
