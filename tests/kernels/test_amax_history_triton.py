"""The end of a step under delayed scaling on a GPU: one launch, bit for bit the specification."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fp8_megatron.kernels import ops
from fp8_megatron.kernels.scales import reference as amax_history

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def state(length: int, n: int) -> dict[str, Tensor]:
    """Amaxes with zeros, infinities and NaNs among them, in the step and in the history."""
    generator = torch.Generator().manual_seed(length + n)
    amax, history = (torch.rand(shape, generator=generator) * 100 for shape in ((n,), (length, n)))
    for values in (amax, history.view(-1)):
        for step, bad in ((3, 0.0), (7, math.inf), (11, math.nan)):
            values[::step] = bad
    written = torch.rand(n, 8, 4, generator=generator) * 120
    written[1::4] = 0.0
    fp_max = torch.tensor([448.0, 57344.0, 112.0]).repeat(n)[:n]
    previous = torch.rand(n, 4, generator=generator)
    return {"amax": amax, "written": written, "history": history, "fp_max": fp_max, "previous": previous}


@pytest.mark.parametrize("keeps_largest", [True, False])
@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize(("length", "n"), [(1, 1), (2, 3), (16, 300), (17, 64), (1024, 75), (5000, 3)])
def test_one_launch_gives_what_the_specification_gives(
    length: int, n: int, keeps_largest: bool, power_of_two: bool
) -> None:
    expected, measured = state(length, n), {name: value.cuda() for name, value in state(length, n).items()}
    for _ in range(3):
        by_specification = amax_history.update_amax_history_(*expected.values(), keeps_largest, power_of_two)
        on_gpu = ops.update_amax_history_(*measured.values(), keeps_largest=keeps_largest, power_of_two=power_of_two)
        for mine, theirs in zip(on_gpu, by_specification, strict=True):
            assert torch.equal(mine.cpu(), theirs)
        for name, value in expected.items():
            assert torch.equal(measured[name].cpu().nan_to_num(-1.0, -2.0), value.nan_to_num(-1.0, -2.0)), name
        # The next step's amaxes.
        for some in (expected, measured):
            some["amax"].copy_(torch.linspace(0.0, 9.0, n))
            some["previous"].fill_(0.25)
