"""AutoScale: its measurements, when μ halves and how it grows, and that the same scales encode and decode."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from fp8_megatron.collectives.autoscale import SATURATION_THRESHOLD, AutoScale
from fp8_megatron.dtypes import E4M3, GRAD_BLOCK
from fp8_megatron.kernels.quantize import blockwise

CPU = torch.device("cpu")


def quantized(value: Tensor) -> tuple[Tensor, Tensor]:
    payload = torch.empty(value.numel(), dtype=E4M3)
    scales = torch.empty(value.numel() // GRAD_BLOCK)
    blockwise.quantize_blockwise_(value, payload, scales)
    return payload, scales


def two_tensors(**kwargs: float) -> AutoScale:
    """Tensor 0 has three blocks, tensor 1 has one."""
    return AutoScale(2, torch.tensor([0, 0, 0, 1], dtype=torch.int32), CPU, **kwargs)  # type: ignore[arg-type]


def gaussian(num_blocks: int = 4) -> Tensor:
    return torch.randn(num_blocks * GRAD_BLOCK, generator=torch.Generator().manual_seed(0))


def reduce_alone(autoscale: AutoScale, value: Tensor) -> Tensor:
    """One rank's reduction; what it decodes to."""
    payload, scales = quantized(value)
    autoscale.update(autoscale.measure(payload, scales))
    codes = torch.empty_like(payload)
    autoscale.requantize_(payload, scales, codes)
    autoscale.note_sum(codes, 0)
    return blockwise.dequantize_blockwise(codes, autoscale.block_scales)


def test_measures_the_amax_of_each_tensor() -> None:
    payload, scales = quantized(gaussian())
    amax, seen = two_tensors().measure(payload, scales)
    value = blockwise.dequantize_blockwise(payload, scales).abs()
    assert amax.tolist() == [value[: 3 * GRAD_BLOCK].max().item(), value[3 * GRAD_BLOCK :].max().item()]
    assert seen.eq(-1.0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_block_is_left_out_of_the_amax_and_stays_bad(bad: float) -> None:
    value = gaussian()
    value[GRAD_BLOCK] = bad
    autoscale = two_tensors()
    payload, scales = quantized(value)
    amax = autoscale.measure(payload, scales)[0]
    blocks = blockwise.dequantize_blockwise(payload, scales).view(4, GRAD_BLOCK).abs()
    assert amax.tolist() == [blocks[[0, 2]].max().item(), blocks[3].max().item()]
    decoded = reduce_alone(autoscale, value).view(4, GRAD_BLOCK)
    assert decoded[1].isnan().all() and decoded[[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("mu", [2.0**-8, 0.25, 0.3, 1.0])
@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 1e30])
def test_the_same_scale_encodes_and_decodes(mu: float, magnitude: float) -> None:
    """Powers of two: values in range and above the subnormals come back bit for bit, for any μ and amax.

    Elements within 2⁻⁶ · 448 · μ of the amax are above the subnormals; at μ = 2⁻⁸ that is all from 2⁻⁶·2⁸ = 4/7 on, so
    there only the largest are asked for."""
    value = gaussian() * magnitude
    autoscale = two_tensors(initial_mu=mu)
    decoded, sent = reduce_alone(autoscale, value), blockwise.dequantize_blockwise(*quantized(value))
    normal = sent.abs() >= 2**-6 * autoscale.block_scales.repeat_interleave(GRAD_BLOCK)
    assert torch.equal(decoded[normal], sent[normal]) and normal.sum() >= 4
    step = 2**-9 * autoscale.block_scales.repeat_interleave(GRAD_BLOCK)
    assert ((decoded - sent).abs() <= step / 2).all()
    amax = autoscale.measure(*quantized(value))[0]
    scale = autoscale.block_scales[[0, 3]].double()
    ratio = amax.double() / 448.0 / mu / scale
    assert ((ratio > 0.5 - 1e-6) & (ratio <= 1.0 + 1e-6)).all() and scale.log2().frac().eq(0).all()


def test_mu_halves_after_saturation_and_grows_after_none() -> None:
    """Tensor 0 saturates at μ = 8 (its largest element is at 8 · 224 or more), tensor 1 is constant zero but one
    element far below the common range; the change comes with the next reduction."""
    value = gaussian()
    value[3 * GRAD_BLOCK :] = 0.0
    autoscale = two_tensors(initial_mu=8.0)
    reduce_alone(autoscale, value)
    assert autoscale.mu.eq(8.0).all() and autoscale.saturated_fraction.eq(-1.0).all()
    at_448 = autoscale.measure(*quantized(value))[1]
    assert at_448[0] > SATURATION_THRESHOLD and at_448[1] == -1.0
    reduce_alone(autoscale, value)
    assert autoscale.mu.tolist() == [4.0, 8.0], "a tensor of zeros says nothing"
    assert autoscale.saturated_fraction[0] == at_448[0]


def test_the_fraction_is_exact_and_so_is_the_threshold() -> None:
    """3 of 3 · 128 elements are at ±448: a fraction of 2⁻⁷. A tensor below the threshold of 10⁻⁵ needs more than
    100,000 elements: 1 of 2¹⁷ (7.6 · 10⁻⁶) grows, 2 of 2¹⁷ (1.5 · 10⁻⁵) halves."""
    value = torch.ones(4 * GRAD_BLOCK)
    value[[1, 130, 260]] = torch.tensor([448.0, -448.0, 448.0])
    autoscale = two_tensors()
    reduce_alone(autoscale, value)
    assert autoscale.measure(*quantized(value))[1].tolist() == [2**-7, 0.0]
    for num_saturated, expected in ((1, 2.0**0.001), (2, 0.5)):
        large = torch.ones(1 << 17)
        large[:num_saturated] = 448.0
        autoscale = AutoScale(1, torch.zeros(1 << 10, dtype=torch.int64), CPU)
        for _ in range(2):
            reduce_alone(autoscale, large)
        assert autoscale.mu.item() == pytest.approx(expected, rel=1e-6)


def test_a_skipped_step_leaves_nothing() -> None:
    """What the last step that was taken has seen moves μ in the next one, once."""
    value, zero = gaussian(), torch.zeros(4 * GRAD_BLOCK)
    autoscale = two_tensors(initial_mu=8.0)
    steps = [(value, True), (zero, False), (value.clone().fill_(math.inf), False), (value, True)]
    path = []
    for grad, is_taken in steps:
        autoscale.begin_step()
        for _ in range(2):
            reduce_alone(autoscale, grad)
        autoscale.end_step(torch.tensor([is_taken]))
        path.append(autoscale.mu.tolist())
    assert path[0][0] == 4.0 and path[2] == path[1] == path[0]
    steadily = two_tensors(initial_mu=8.0)
    for _ in range(4):
        reduce_alone(steadily, value)
    assert path[3] == steadily.mu.tolist()


def test_mu_hovers_where_it_just_fits() -> None:
    """A tensor of 512 elements may have none at 448. Its amax is at 1.75 times a power of two, the most that a scale
    takes; at μ = 1 it is at 448, at 1/2 it is not, and μ stays between."""
    value = gaussian().clamp(-1.75, 1.75)
    autoscale = AutoScale(1, torch.zeros(4), CPU)
    path = []
    for _ in range(2500):
        payload_amax = torch.tensor([1.75])
        fraction = 0.01 if autoscale.mu.item() > 0.999 else 0.0
        autoscale.update(torch.stack([payload_amax, torch.tensor([fraction])]))
        path.append(autoscale.mu.item())
    assert min(path) > 0.49 and max(path) <= 1.001
    assert sum(b < a for a, b in itertools.pairwise(path)) == 2
    autoscale = AutoScale(1, torch.zeros(4), CPU)
    reduce_alone(autoscale, value)
    assert autoscale.measure(*quantized(value))[1] > 0
    reduce_alone(autoscale, value)
    assert autoscale.mu == 0.5 and autoscale.measure(*quantized(value))[1] == 0


def test_underflow_fraction() -> None:
    """Tensor 0: one element of 448 · 2²⁰ beside 2 · 128 − 1 of size 1, which its scale of 2²⁰ makes zero, and a block
    of zeros, which do not count."""
    value = torch.ones(4 * GRAD_BLOCK)
    value[0], value[GRAD_BLOCK : 2 * GRAD_BLOCK] = 448.0 * 2**20, 0.0
    autoscale = two_tensors()
    reduce_alone(autoscale, value)
    # In the outlier's own block the first rounding, to blocks, has made them zero already.
    assert autoscale.underflow_fraction.tolist() == [pytest.approx(128 / 129), 0.0]


def test_a_saturated_sum_counts_in_its_shard() -> None:
    autoscale = two_tensors()
    reduce_alone(autoscale, torch.ones(4 * GRAD_BLOCK))
    codes = torch.ones(2 * GRAD_BLOCK).to(E4M3)
    codes[GRAD_BLOCK + 5] = 448.0
    autoscale.note_sum(codes, first_block=2)  # a block of tensor 0, then that of tensor 1
    assert autoscale.measure(*quantized(gaussian()))[1].tolist() == [0.0, 2**-7]


def test_state_continues() -> None:
    value = gaussian()
    autoscale = two_tensors(initial_mu=8.0)
    reduce_alone(autoscale, value)
    other = two_tensors()
    other.load_state_dict({name: state.clone() for name, state in autoscale.state_dict().items()})
    for _ in range(3):
        assert torch.equal(reduce_alone(autoscale, value), reduce_alone(other, value))
        assert torch.equal(autoscale.mu, other.mu)
    assert autoscale.mu[0] < 8.0
