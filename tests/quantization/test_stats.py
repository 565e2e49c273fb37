"""Underflow: exact for small tensors, from an even sample for large ones."""

from __future__ import annotations

import pytest
import torch

from fp8_megatron.formats import E4M3
from fp8_megatron.quantization.stats import SAMPLED_FROM, underflow_counts


def test_small_tensors_are_counted_whole() -> None:
    value = torch.tensor([0.0, 1.0, 1e-9, -1e-9, 2.0, -0.0])
    payload = value.clamp(-448, 448).to(E4M3)
    assert underflow_counts(value, payload).tolist() == [4.0, 2.0]


@pytest.mark.parametrize("extra", [0, 77])
def test_large_tensors_are_sampled_evenly(extra: int) -> None:
    """A third of the elements underflow; the sample of 2^16 elements says so within five standard deviations."""
    value = torch.ones(SAMPLED_FROM + extra)
    value[torch.rand(value.numel(), generator=torch.Generator().manual_seed(1)) < 1 / 3] = 1e-9
    nonzero, lost = underflow_counts(value, value.to(E4M3)).tolist()
    assert nonzero == SAMPLED_FROM / 16
    assert lost / nonzero == pytest.approx(1 / 3, abs=5 * (2 / 9 / nonzero) ** 0.5)


def test_the_sample_reaches_the_end() -> None:
    value = torch.ones(SAMPLED_FROM)
    value[SAMPLED_FROM // 2 :] = 1e-9
    nonzero, lost = underflow_counts(value, value.to(E4M3)).tolist()
    assert lost == nonzero / 2
