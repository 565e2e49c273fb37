"""Scale rules: the scale for an amax of zero, infinity or NaN, and which values are kept."""

from __future__ import annotations

import math

import pytest
import torch

from fp8_megatron.formats import E4M3, E5M2, MAX_FINITE
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
        torch.zeros(5, 2, 4),
        torch.zeros(1, 5),
        fp_max,
        torch.nn.functional.pad(previous[:, None], (0, 3)),
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
    amax, written, history = torch.tensor([1.0, 2.0]), torch.zeros(2, 2, 4), torch.tensor([[5.0, 6.0], [7.0, 8.0]])
    written[1, 1, 0] = 3.0
    ones = torch.ones(2, 4)
    ops.update_amax_history_(
        amax, written, history, torch.full((2,), 448.0), ones, keeps_largest=True, power_of_two=False
    )
    assert torch.equal(history, torch.tensor([[1.0, 3.0], [5.0, 6.0]]))
    assert not amax.any() and not written.any() and torch.equal(ones, torch.ones(2, 4))
