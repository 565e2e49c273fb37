"""The rank pool itself: results, failures, hangs, and that neither poisons the next call."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from tests.harness.ranks import _MOST_KNOWN, RankError, RankPool, on_default_group


def _sum_of_ranks(group: torch.distributed.ProcessGroup, offset: int) -> tuple[int, float]:
    total = torch.tensor([float(group.rank() + offset)])
    torch.distributed.all_reduce(total)
    return group.rank(), total.item()


def _fail_on_rank_1(group: torch.distributed.ProcessGroup) -> None:
    if group.rank() == 1:
        raise ArithmeticError("the reason")
    torch.distributed.barrier()


def _fail_on_rank_1_and_say_so_late() -> None:
    try:
        on_default_group(_fail_on_rank_1)
    except ArithmeticError as error:
        reason = str(error)
    time.sleep(0.5)  # the error is gone and with it the group: rank 0's connection is broken by now
    raise ArithmeticError(reason)


def _when(number: int) -> int:
    return time.monotonic_ns()


def _die_on_rank_1(group: torch.distributed.ProcessGroup) -> None:
    if group.rank() == 1:
        os._exit(3)
    torch.distributed.barrier()


def _hang_on_rank_1() -> None:
    time.sleep(60.0 * float(os.environ["RANK"]))


def _unpicklable() -> object:
    return lambda: None


def assert_works(pool: RankPool, num_ranks: int) -> None:
    results = pool.run(on_default_group, _sum_of_ranks, 10, num_ranks=num_ranks)
    total = sum(10.0 + rank for rank in range(num_ranks))
    assert results == [(rank, total) for rank in range(num_ranks)]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_results_come_in_rank_order(ranks: RankPool, num_ranks: int) -> None:
    assert_works(ranks, num_ranks)


def test_a_failure_names_its_rank_and_does_not_poison(ranks: RankPool) -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 of 2(?s:.)*_fail_on_rank_1(?s:.)*ArithmeticError: the reason"):
        ranks.run(on_default_group, _fail_on_rank_1, num_ranks=2)
    assert time.monotonic() - started < 30.0  # rank 0 was not waited for
    assert_works(ranks, 2)


def test_the_first_failure_is_the_one_that_broke_the_others(ranks: RankPool) -> None:
    # Rank 0's broken connection is heard of before rank 1's reason.
    with pytest.raises(RankError, match=r"^rank 1 of 2(?s:.)*ArithmeticError: the reason\nthen rank 0: "):
        ranks.run(_fail_on_rank_1_and_say_so_late, num_ranks=2)


def test_a_dead_rank_is_reported_and_replaced(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="rank 1 of 2: the process died"):
        ranks.run(on_default_group, _die_on_rank_1, num_ranks=2)
    assert_works(ranks, 4)


def test_a_hung_rank_is_killed(ranks: RankPool) -> None:
    assert_works(ranks, 2)
    with pytest.raises(RankError, match=r"ranks \[1\] of 2 did not answer within 1.0 s"):
        ranks.run(_hang_on_rank_1, num_ranks=2, timeout_seconds=1.0)
    assert_works(ranks, 2)


def test_what_does_not_pickle_is_an_error_of_the_rank(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"rank 0 of 1(?s:.)*pickle"):
        ranks.run(_unpicklable, num_ranks=1)


def _of_groups_in_a_cycle() -> int:
    """How many threads of groups there are; this call leaves three groups more."""
    torch.distributed.init_process_group("gloo")
    groups: list[object] = [torch.distributed.new_group() for _ in range(3)]
    groups.append(groups)
    threads = Path("/proc/self/task").iterdir()
    number = sum((thread / "comm").read_text().startswith("gloo") for thread in threads)
    torch.distributed.destroy_process_group()
    return number


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads as Linux names them")
def test_groups_of_an_earlier_call_are_gone(ranks: RankPool) -> None:
    first, *later = (ranks.run(_of_groups_in_a_cycle, num_ranks=2) for _ in range(4))
    assert first[0] > 0 and later == [first] * 3


def test_the_last_results_are_kept(ranks: RankPool) -> None:
    first = ranks.run_once(_when, 0, num_ranks=1)
    others = [ranks.run_once(_when, number, num_ranks=1) for number in range(1, _MOST_KNOWN)]
    assert ranks.run_once(_when, 0, num_ranks=1) == first != others[0]
    ranks.run_once(_when, _MOST_KNOWN, num_ranks=1)
    assert ranks.run_once(_when, 0, num_ranks=1) == first
    assert ranks.run_once(_when, 1, num_ranks=1) != others[0]
