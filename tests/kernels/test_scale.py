"""Scale rules: the scale for an amax of zero, infinity or NaN, and which values are kept."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fp8_megatron.dtypes import E4M3, E5M2, MAX_FINITE
from fp8_megatron.kernels import ops, reference
from fp8_megatron.kernels.reference import scale_from_amax


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("power_of_two", [False, True])
def test_current_scale_reaches_the_largest_number(dtype: torch.dtype, power_of_two: bool) -> None:
    amax = torch.rand(1000, generator=torch.Generator().manual_seed(0)) * 100.0 + 1e-3
    scale = scale_from_amax(amax, dtype, power_of_two=power_of_two)
    fraction = amax.double() / scale.double() / MAX_FINITE[dtype]
    # One FP32 rounding off full range; a power of two is at most a factor of 2 above it, and never saturates.
    lowest, highest = (0.5, 1.0) if power_of_two else (1 - 2**-23, 1 + 2**-23)
    assert fraction.min() >= lowest and fraction.max() <= highest
    encoded = reference.decode(reference.encode(amax, scale, dtype), scale)
    relative_step = 2**-4 if dtype == E4M3 else 2**-3  # half a unit in the last place of 3 or 2 mantissa bits
    torch.testing.assert_close(encoded, amax, rtol=relative_step, atol=0)


def test_current_scale_of_zero_and_of_bad_values() -> None:
    scale = scale_from_amax(torch.tensor([0.0, math.inf, math.nan]), E4M3, power_of_two=False)
    assert scale[0] == 1.0 and scale[1:].isnan().all()


@pytest.mark.parametrize("power_of_two", [False, True])
def test_delayed_scale_keeps_the_old_one(power_of_two: bool) -> None:
    previous = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5])
    amax = torch.tensor([0.0, math.inf, math.nan, 3.0, 60000.0])
    fp_max = torch.tensor([448.0, 448.0, 448.0, 448.0, 57344.0])
    scales, inverses = ops.update_amax_history_(
        amax.clone(),
        torch.zeros(5, 4),
        torch.zeros(5, 2, 4),
        torch.zeros(1, 5),
        fp_max,
        torch.nn.functional.pad(previous[:, None], (0, 3)),
        torch.ones(1),
        keeps_largest=False,
        power_of_two=power_of_two,
    )
    scale = scales[:, 0]
    assert torch.equal(inverses[:, 0], 1 / scale) and not scales[:, 1:].any()
    assert torch.equal(scale[:3], previous[:3])
    expected = amax[3:] / fp_max[3:]
    if power_of_two:
        expected = 2.0 ** expected.log2().ceil()
    assert torch.equal(scale[3:], expected)


def test_a_closed_step_is_pushed_and_forgotten() -> None:
    amax, record, written = torch.tensor([1.0, 3.0]), torch.ones(2, 4), torch.ones(2, 2, 4)
    history, ones, fp_max = torch.tensor([[5.0, 6.0], [7.0, 8.0]]), torch.ones(2, 4), torch.full((2,), 448.0)
    total = torch.ones(1)
    ops.update_amax_history_(
        amax, record, written, history, fp_max, ones, total, keeps_largest=True, power_of_two=False
    )
    assert torch.equal(history, torch.tensor([[1.0, 3.0], [5.0, 6.0]]))
    assert not record.any() and not written.any() and torch.equal(ones, torch.ones(2, 4))


@pytest.mark.parametrize("square_sum", [math.inf, math.nan])
@pytest.mark.parametrize("keeps_largest", [True, False])
def test_a_step_with_a_bad_value_leaves_the_history(square_sum: float, keeps_largest: bool) -> None:
    """Only of a NaN is it known that a cast saw the value."""
    amax = torch.tensor([9.0, math.inf, 2.0, math.inf])
    history, previous = torch.tensor([[1.0, 2.0, 0.0, 0.0], [3.0, 4.0, 0.0, math.inf]]), torch.ones(4, 4) / 7
    fp_max, before = torch.full((4,), 448.0), history.clone()
    scales, _ = ops.update_amax_history_(
        amax,
        torch.ones(4, 4),
        torch.ones(4, 2, 4),
        history,
        fp_max,
        previous,
        torch.tensor([square_sum]),
        keeps_largest=keeps_largest,
        power_of_two=False,
    )
    old = previous[:, 0]
    if math.isnan(square_sum):
        assert torch.equal(history, before)
        expected = old
    else:
        assert torch.equal(history, torch.stack([amax, before[0]]))
        first = [9.0, 2.0 if keeps_largest else math.nan, 2.0, math.nan]
        expected = torch.where(torch.tensor(first).isnan(), old, torch.tensor(first) / 448.0)
    assert torch.equal(scales[:, 0], expected)


def examined(record: list[list[float]], written: list[float], scale: list[float], streak: float = 0.0) -> Any:
    """The amaxes, report, sum of squares and streak of three slots: two of role 0, one of role 1, blamed backwards."""
    places = torch.zeros(3, 2, 4)
    places[:, 1, 0] = torch.tensor(written)
    scales = torch.nn.functional.pad(torch.tensor(scale)[:, None], (0, 3))
    limits = torch.tensor([464.0, 464.0, 61440.0])
    role, order = torch.tensor([0, 0, 1], dtype=torch.int32), torch.tensor([3, 2, 1], dtype=torch.int32)
    square_sum, row = torch.tensor([2.0]), torch.tensor([streak])
    amax, report = ops.examine_records_(
        torch.tensor(record),
        places,
        scales,
        limits,
        role,
        order,
        square_sum,
        row,
        num_roles=2,
        most_saturated=0.25,
        recurs_within=4,
    )
    return amax.tolist(), report.tolist(), square_sum.item(), row.item()


def test_a_report_counts_by_role_and_finds_the_worst() -> None:
    record = [[500.0, 10.0, 100.0, 3.0], [400.0, 1.0, 50.0, 4.0], [1e5, 30.0, 120.0, 0.0]]
    amax, report, total, streak = examined(record, [0.0, 470.0, 0.0], [1.0, 1.0, 2.0], streak=3.0)
    assert amax == [500.0, 470.0, 1e5] and total == 2.0 and streak == 2.0
    assert report == [0.0, 0.25, 1.0, *[11.0, 150.0, 2.0], *[30.0, 120.0, 0.0]]


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_report_names_the_first_value_that_is_not_finite(bad: float) -> None:
    record = [[bad, 0.0, 1.0, 0.0], [1.0, 0.0, 1.0, 0.0], [1.0, 0.0, 1.0, 0.0]]
    amax, report, total, _ = examined(record, [0.0, bad, 0.0], [1.0, 1.0, 1.0])
    assert amax == [math.inf, math.inf, 1.0] and report[:3] == [2.0, 0.0, 0.0] and math.isnan(total)


def test_too_much_saturation_skips_the_step_and_is_followed_when_it_stays() -> None:
    """The first time the amaxes are dropped (NaN), the second time the next scales fit them (inf), then the step
    counts. Steps between them are an end of it after four."""
    record = [[500.0, 26.0, 100.0, 0.0], [1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]
    _, report, total, streak = examined(record, [0.0, 0.0, 0.0], [1.0, 1.0, 1.0])
    assert math.isnan(total) and streak == 8.0
    assert report[0] == 0.0 and report[1] == pytest.approx(0.26) and report[2] == 3.0
    for before, expected in ((8.0, math.inf), (5.0, math.inf), (4.0, 2.0), (1.0, 2.0)):
        _, _, total, streak = examined(record, [0.0, 0.0, 0.0], [1.0, 1.0, 1.0], streak=before)
        assert total == expected and streak == 4.0
    record[0][1] = 0.0
    for before, after in ((8.0, 7.0), (5.0, 0.0), (4.0, 3.0), (1.0, 0.0), (0.0, 0.0)):
        assert examined(record, [0.0, 0.0, 0.0], [1.0, 1.0, 1.0], streak=before)[2:] == (2.0, after)
