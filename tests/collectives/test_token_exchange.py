"""Which tokens ranks get, what comes back, and what that sends. Values are whole numbers, so every sum is exact."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8_megatron.device.memory import HostCopy
from fp8_megatron.moe.layers.experts import grouped_by_expert
from fp8_megatron.moe.layers.token_exchange import AllGather, AllToAll, TokenExchange
from fp8_megatron.moe.layers.token_flight import exchange_choices
from tests.harness.ranks import RankPool, on_default_group
from tests.harness.traffic import counted_traffic

RANKS, TOKENS, HIDDEN, EXPERTS, TOP_K = 4, 40, 32, 8, 3
KINDS = ["usual", "one rank has all", "a rank has none", "a rank sends none"]


def routing(kind: str) -> Tensor:
    """Which experts the tokens of each rank go to, bool [ranks, T, E]; token 3 is dropped."""
    scores = torch.rand(RANKS, TOKENS, EXPERTS, generator=torch.Generator().manual_seed(1))
    top_k = 2 if kind == "one rank has all" else TOP_K
    if kind == "one rank has all":
        scores[:, :, 4:6] += 1.0  # of four parts the third, of two the second
    if kind == "a rank has none":
        scores[:, :, 2:4] -= 1.0
    chosen = torch.zeros(scores.shape, dtype=torch.bool).scatter_(2, scores.topk(top_k).indices, True)
    chosen[:, 3] = False
    if kind == "a rank sends none":
        chosen[1] = False
    return chosen


def numbers(*shape: int, seed: int) -> Tensor:
    """Whole numbers that BF16 holds, and sums of many."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).float()


def _exchange(group: torch.distributed.ProcessGroup, kind: str, num_parts: int, gathers: bool) -> tuple[Tensor, ...]:
    """By rank: the tokens of its experts and their choices, what comes back, and the gradient of the choices."""
    rank, chosen = group.rank(), routing(kind)[group.rank()]
    exchange: TokenExchange = AllGather(group, num_parts) if gathers else AllToAll(chosen, group, num_parts, TOP_K)
    probs = numbers(RANKS, TOKENS, EXPERTS, seed=2)[rank].abs().requires_grad_()
    received_probs, received_map = exchange_choices(probs, chosen, exchange)
    is_real = received_map.any(dim=1)
    x = exchange.send(numbers(RANKS, TOKENS, HIDDEN, seed=3)[rank].bfloat16()).wait()[is_real]
    # What a rank's experts give to a token depends on the token and the rank.
    y = torch.full((len(received_map), HIDDEN), torch.nan).bfloat16()
    y[is_real] = x * (rank + 1)
    if gathers:
        y[~is_real] = 0.0
    summed = exchange.sum(y).wait()
    received_probs.backward(torch.where(received_map, received_probs.detach() + rank, torch.nan))
    assert probs.grad is not None
    return x, received_probs[is_real].detach(), summed, probs.grad


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("num_parts", [4, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_go_to_their_experts_and_back(ranks: RankPool, kind: str, num_parts: int, gathers: bool) -> None:
    """With two parts, two ranks have halves of each expert."""
    chosen, of_part = routing(kind), EXPERTS // num_parts
    x, probs = numbers(RANKS, TOKENS, HIDDEN, seed=3), numbers(RANKS, TOKENS, EXPERTS, seed=2).abs()
    parts = [rank // (RANKS // num_parts) for rank in range(RANKS)]
    goes = [chosen[:, :, part * of_part : (part + 1) * of_part] for part in parts]
    results = ranks.run(on_default_group, _exchange, kind, num_parts, gathers, num_ranks=RANKS)
    for rank, (received, received_probs, summed, grad) in enumerate(results):
        mine = slice(parts[rank] * of_part, (parts[rank] + 1) * of_part)
        assert torch.equal(received.float(), x[goes[rank].any(dim=2)])
        assert torch.equal(received_probs, torch.where(chosen, probs, 0.0)[:, :, mine][goes[rank].any(dim=2)])
        factor = sum((other + 1) * goes[other][rank].any(dim=1) for other in range(RANKS))
        assert torch.equal(summed.float(), x[rank] * factor[:, None])
        holders = [[other for other in range(RANKS) if parts[other] == expert // of_part] for expert in range(EXPERTS)]
        expected = torch.stack(
            [len(each) * probs[rank, :, expert] + sum(each) for expert, each in enumerate(holders)], dim=1
        )
        assert torch.equal(grad, torch.where(chosen[rank], expected, 0.0))


def _sent(group: torch.distributed.ProcessGroup, kind: str) -> tuple[dict[str, int], int, int]:
    """Bytes of tokens there, of sums back and of choices; rows of experts; how often the host waits."""
    chosen, reads = routing(kind)[group.rank()], []
    read = HostCopy.read
    HostCopy.read = lambda copy: reads.append(1) or read(copy)  # type: ignore[method-assign, func-returns-value]
    try:
        exchange = AllToAll(chosen, group, RANKS, TOP_K)
        bytes_of = {}
        with counted_traffic() as traffic:
            whole = exchange.send(torch.zeros(TOKENS, HIDDEN, dtype=torch.uint8)).wait()
        bytes_of["there"] = traffic["all_to_all"]
        with counted_traffic() as traffic:
            exchange.sum(torch.zeros(len(whole), HIDDEN, dtype=torch.bfloat16)).wait()
        bytes_of["back"] = traffic["all_to_all"]
        with counted_traffic() as traffic:
            _, routing_map = exchange_choices(torch.ones(TOKENS, EXPERTS), chosen, exchange)
        bytes_of["choices"] = traffic["all_to_all"]
        groups = grouped_by_expert(routing_map, TOP_K, None, exchange.num_routed)
        assert len(groups.source) >= int(groups.offsets[-1])
        return bytes_of, len(groups.source), len(reads)
    finally:
        HostCopy.read = read  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_is_sent_once_to_each_rank_with_experts_of_it(ranks: RankPool, kind: str) -> None:
    """And to no other. Rows of experts have room for those that are routed there, each expert's filled up to 128."""
    chosen = routing(kind).unflatten(2, (RANKS, -1))  # by rank of the expert
    results = ranks.run(on_default_group, _sent, kind, num_ranks=RANKS)
    for rank, (bytes_of, num_rows, num_reads) in enumerate(results):
        others = [other for other in range(RANKS) if other != rank]
        there, back = int(chosen[rank].any(dim=2)[:, others].sum()), int(chosen[others].any(dim=3)[:, :, rank].sum())
        of_choices = there * EXPERTS // RANKS * 4
        assert bytes_of == {"there": there * HIDDEN, "back": 2 * back * HIDDEN, "choices": of_choices}
        assert there <= TOKENS * TOP_K
        assert num_rows <= int(chosen[:, :, rank].sum()) + 128 * EXPERTS // RANKS
        assert num_reads == 1
