"""The end of a step under delayed scaling on a GPU: one launch, bit for bit the specification."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8_megatron.kernels import ops
from fp8_megatron.kernels.scales import reference as amax_history

pytestmark = pytest.mark.gpu


def state(length: int, n: int) -> dict[str, Tensor]:
    """Amaxes with zeros, infinities and NaNs among them, in the step and in the history."""
    generator = torch.Generator().manual_seed(length + n)
    amax, history = (torch.rand(shape, generator=generator) * 100 for shape in ((n,), (length, n)))
    for values in (amax, history.view(-1)):
        for step, bad in ((3, 0.0), (7, math.inf), (11, math.nan)):
            values[::step] = bad
    record, written = torch.rand(n, 4, generator=generator), torch.rand(n, 8, 4, generator=generator) * 120
    written[1::4] = 0.0
    fp_max = torch.tensor([448.0, 57344.0, 112.0]).repeat(n)[:n]
    previous = torch.rand(n, 4, generator=generator)
    previous[::5, 0] = math.inf  # slots that have seen no value
    history[:, ::5] = 0.0
    return {
        "amax": amax,
        "record": record,
        "written": written,
        "history": history,
        "fp_max": fp_max,
        "previous": previous,
    }


@pytest.mark.parametrize("keeps_largest", [True, False])
@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize(("length", "n"), [(1, 1), (2, 3), (16, 300), (17, 64), (1024, 75), (5000, 3)])
@pytest.mark.parametrize("square_sum", [1.5, math.inf, math.nan])
def test_one_launch_gives_what_the_specification_gives(
    length: int, n: int, keeps_largest: bool, power_of_two: bool, square_sum: float
) -> None:
    total = torch.tensor([square_sum])
    expected, measured = state(length, n), {name: value.cuda() for name, value in state(length, n).items()}
    for _ in range(3):
        settings = {"keeps_largest": keeps_largest, "power_of_two": power_of_two}
        by_specification = amax_history.update_amax_history_(*expected.values(), total, **settings)
        on_gpu = ops.update_amax_history_(*measured.values(), total.cuda(), **settings)
        for mine, theirs in zip(on_gpu, by_specification, strict=True):
            assert torch.equal(mine.cpu(), theirs)
        for name, value in expected.items():
            assert torch.equal(measured[name].cpu().nan_to_num(-1.0, -2.0), value.nan_to_num(-1.0, -2.0)), name
        # The next step's amaxes.
        for some in (expected, measured):
            some["amax"].copy_(torch.linspace(0.0, 9.0, n))
            some["previous"].fill_(0.25)


@pytest.mark.parametrize("keeps_largest", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_sequences_of_steps_are_those_of_the_specification(seed: int, keeps_largest: bool) -> None:
    """Whole runs from the first step on, in which each kernel reads what its last step left: amaxes jump, are zero or
    not finite, clamp too much, and come beside other ranks' sums."""
    n, generator = 5, torch.Generator().manual_seed(seed)
    role, order = torch.zeros(n, dtype=torch.int32), torch.arange(1, n + 1, dtype=torch.int32)
    limits, fp_max = torch.full((n,), 464.0), torch.full((n,), 448.0)
    scales, history, streak = torch.zeros(n, 4), torch.zeros(4, n), torch.zeros(1)
    scales[:, 0] = math.inf
    on_gpu = scales.cuda(), history.cuda(), streak.cuda()
    for _ in range(40):
        amax = 10.0 ** torch.randint(-6, 7, (n,), generator=generator).float()
        chance = torch.rand(n, generator=generator)
        amax[chance < 0.1] = 0.0
        amax[chance > 0.97] = [math.inf, math.nan][seed % 2]
        clamped = 100.0 * (1.0 - scales[:, 0] * 448.0 / amax).nan_to_num(0.0).clamp(0.0, 1.0)
        record = torch.stack([amax, clamped, torch.full((n,), 100.0), torch.zeros(n)], dim=1)
        written, total = torch.zeros(n, 2, 4), torch.tensor([3.0])
        beside = ([0.0] * 17 + [1.0, math.inf, math.nan])[int(torch.randint(20, (1,), generator=generator))]
        given = [x.cuda() for x in (record, written, limits, role, order, total, fp_max)]
        scales = one_step(
            amax_history,
            record,
            written,
            limits,
            role,
            order,
            total,
            fp_max,
            scales,
            history,
            streak,
            beside=beside,
            keeps_largest=keeps_largest,
        )
        on_gpu = (one_step(ops, *given, *on_gpu, beside=beside, keeps_largest=keeps_largest), *on_gpu[1:])
        assert torch.equal(given[5].cpu().nan_to_num(-1.0, -2.0), total.nan_to_num(-1.0, -2.0))
        for mine, theirs in zip(on_gpu, (scales, history, streak), strict=True):
            assert torch.equal(mine.cpu(), theirs)


def one_step(
    operators: Any,
    record: Tensor,
    written: Tensor,
    limits: Tensor,
    role: Tensor,
    order: Tensor,
    total: Tensor,
    fp_max: Tensor,
    scales: Tensor,
    history: Tensor,
    streak: Tensor,
    *,
    beside: float,
    keeps_largest: bool,
) -> Tensor:
    """The scales behind a step; `beside` is what other ranks add to the sum of squares."""
    settings = {"num_roles": 1, "most_saturated": 0.5, "recurs_within": 4}
    amax, _ = operators.examine_records_(record, written, scales, limits, role, order, total, streak, **settings)
    total += beside
    rule = {"keeps_largest": keeps_largest, "power_of_two": False}
    return operators.update_amax_history_(amax, record, written, history, fp_max, scales, total, **rule)[0]


def records(n: int, *, saturated: bool, bad: float | None) -> list[Tensor]:
    """Arguments of `examine_records_` up to the sum of squares; whole counts, whose sums FP32 holds exactly."""
    generator = torch.Generator().manual_seed(n)
    record = torch.randint(1, 100, (n, 4), generator=generator).float()
    record[:, 1] = torch.randint(0, 50, (n,), generator=generator) if saturated else 0
    record[:, 2] = torch.randint(0, 3, (n,), generator=generator) * 100
    written = torch.randint(0, 120, (n, 8, 4), generator=generator).float()
    if bad is not None:
        record[n // 2, 0] = written[-1, 7, 0] = bad
    scales, limits = torch.rand(n, 4, generator=generator) / 4 + 0.1, torch.tensor([464.0, 61440.0]).repeat(n)[:n]
    role = torch.randint(0, 4, (n,), generator=generator, dtype=torch.int32)
    order = torch.randperm(n, generator=generator).int() + 1
    return [record, written, scales, limits, role, order]


@pytest.mark.parametrize("bad", [None, math.inf, math.nan])
@pytest.mark.parametrize("saturated", [True, False])
@pytest.mark.parametrize("n", [1, 2, 75, 1024, 3000])
def test_records_are_examined_as_the_specification_does(n: int, saturated: bool, bad: float | None) -> None:
    given = records(n, saturated=saturated, bad=bad)
    for most_saturated, before in (
        (0.1, 0.0),
        (0.1, 5.0),
        (0.1, 4.0),
        *((math.inf, left) for left in (0.0, 1.0, 5.0, 7.0)),
    ):
        total, streak = torch.tensor([3.0]), torch.tensor([before])
        on_gpu_total, on_gpu_streak = total.cuda(), streak.cuda()
        roles = {"num_roles": 4, "most_saturated": most_saturated, "recurs_within": 4}
        expected = amax_history.examine_records_(*given, total, streak, **roles)
        on_gpu = (value.cuda() for value in given)
        found = ops.examine_records_(*on_gpu, on_gpu_total, on_gpu_streak, **roles)
        assert torch.equal(on_gpu_streak.cpu(), streak)
        for mine, theirs in zip(found, expected, strict=True):
            assert torch.equal(mine.cpu(), theirs)
        assert torch.equal(on_gpu_total.cpu().nan_to_num(-1.0, -2.0), total.nan_to_num(-1.0, -2.0))
        assert bad is None or math.isnan(total.item())
