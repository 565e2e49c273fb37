"""Underflow: exact for small tensors, from an even sample for large ones."""

from __future__ import annotations

import pytest
import torch

from fp8_megatron.dtypes import E4M3
from fp8_megatron.kernels import ops
from fp8_megatron.kernels.scales import reference as underflow
from fp8_megatron.kernels.scales.reference import SAMPLED_FROM


def underflow_counts(value: torch.Tensor, payload: torch.Tensor, *, is_sample: bool = False) -> torch.Tensor:
    """Counted twice, so that adding up is seen too."""
    counts = torch.zeros(2, dtype=torch.int64, device=value.device)
    for _ in range(2):
        ops.count_underflow_(value, payload, counts, is_sample=is_sample)
    return counts / 2


def test_small_tensors_are_counted_whole() -> None:
    value = torch.tensor([0.0, 1.0, 1e-9, -1e-9, 2.0, -0.0])
    payload = value.clamp(-448, 448).to(E4M3)
    assert underflow_counts(value, payload).tolist() == [4.0, 2.0]


@pytest.mark.parametrize("extra", [0, 77])
def test_large_tensors_are_sampled_evenly(extra: int) -> None:
    """A third of the elements underflow; the sample of 2^16 elements agrees within five standard deviations."""
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


def test_a_sample_is_counted_whole() -> None:
    value = torch.ones(SAMPLED_FROM + 77)
    value[::2] = 1e-9
    counted = underflow_counts(value, value.to(E4M3), is_sample=True)
    assert counted.tolist() == [SAMPLED_FROM + 77, SAMPLED_FROM // 2 + 39]


@pytest.mark.gpu
@pytest.mark.parametrize("is_sample", [False, True])
@pytest.mark.parametrize("numel", [1, 130, 4096, SAMPLED_FROM - 1, SAMPLED_FROM + 77, 3 * SAMPLED_FROM + 128 * 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_triton_counts_as_the_specification(numel: int, dtype: torch.dtype, is_sample: bool) -> None:
    generator = torch.Generator().manual_seed(numel)
    value = torch.randn(numel, generator=generator) * (torch.rand(numel, generator=generator) < 0.8)
    value[torch.rand(numel, generator=generator) < 1 / 3] *= 1e-9
    value = value.to(dtype)
    payload = value.float().clamp(-448, 448).to(E4M3)
    expected = torch.zeros(2, dtype=torch.int64)
    underflow.count_underflow_(value, payload, expected, is_sample=is_sample)
    assert torch.equal(underflow_counts(value.cuda(), payload.cuda(), is_sample=is_sample).cpu(), expected.float())
