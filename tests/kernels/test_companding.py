"""Companded int8 and uint8 state against float64, and its stochastic rounding."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fp8_megatron.kernels import companding, reference, rounding
from fp8_megatron.kernels.quantize import blockwise
from tests.kernels.cases import Case

BLOCK = 256
INT8, UINT8 = torch.int8, torch.uint8
DTYPES = (INT8, UINT8)
DEGREE = {INT8: 2, UINT8: 4}
LARGEST = {INT8: 127, UINT8: 255}
#: Relative error of a decoded value: the division's 2⁻²⁴ to the degree, each product's, the scale's.
RTOL = {INT8: 4 * 2**-24, UINT8: 8 * 2**-24}


def noise_of(numel: int, step: int) -> Tensor:
    """As a second moment of the optimizer is rounded."""
    bits = rounding.rounding_bits(numel, torch.tensor([float(step)]), rounding.Places())
    return rounding.uniform(rounding.exp_avg_sq_bits(bits, 23))


def table(dtype: torch.dtype) -> Tensor:
    """Values of the codes 0 … largest at scale 1, float64, from the definition."""
    return (torch.arange(LARGEST[dtype] + 1, dtype=torch.float64) / LARGEST[dtype]) ** DEGREE[dtype]


def stored(x: Tensor, dtype: torch.dtype, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    payload, scales = torch.empty(x.numel(), dtype=dtype), torch.empty(x.numel() // BLOCK)
    blockwise.store_state_(x, payload, scales, noise)
    return payload, scales


def through(x: Tensor, dtype: torch.dtype, noise: Tensor | None = None) -> Tensor:
    return blockwise.load_state(*stored(x, dtype, noise))


def values(dtype: torch.dtype, fill: str = "gaussian", num_blocks: int = 64) -> Tensor:
    """Blocks over 24 decades; uint8's are squares of them over 12."""
    x = Case((num_blocks * BLOCK,), torch.float32, fill).make("cpu")
    magnitude = torch.logspace(-12, 12, x.numel()) if dtype is INT8 else torch.logspace(-6, 6, x.numel())
    x = x * magnitude
    return x if dtype is INT8 else x.square()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_code_decodes_to_its_definition(dtype: torch.dtype) -> None:
    scale = torch.tensor([0.1])
    codes = torch.arange(LARGEST[dtype] + 1).to(dtype)
    decoded = reference.decode(codes, scale)
    torch.testing.assert_close(decoded.double(), table(dtype) * scale.double(), rtol=RTOL[dtype], atol=0)
    assert (decoded.diff() > 0).all()
    assert decoded[-1] == scale  # the amax is kept exactly
    if dtype is INT8:
        assert torch.equal(reference.decode(-codes, scale), -decoded)


@pytest.mark.parametrize("fill", ["gaussian", "outlier"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stores_the_nearest_value(dtype: torch.dtype, fill: str) -> None:
    """As near as any code is, by search in float64; so within half the gap around it.

    With c = root(|x| / amax) and h = 1 / largest, the gap is (c + h)ᵏ - cᵏ at most: for k = 2 half of it is c·h + h²/2,
    for k = 4 less than 2h·(c + h)³.
    """
    x = values(dtype, fill)
    decoded = through(x, dtype).double().view(-1, BLOCK)
    blocks = x.double().view(-1, BLOCK)
    amax = blocks.abs().amax(dim=1, keepdim=True)
    share = (blocks.abs() / amax).contiguous()
    above = torch.bucketize(share, table(dtype)).clamp(1, LARGEST[dtype])
    nearest = torch.minimum((table(dtype)[above] - share).abs(), (share - table(dtype)[above - 1]).abs())
    error = (decoded - blocks).abs() / amax
    floored = (decoded > 0) & (share < table(dtype)[1]) if dtype is UINT8 else torch.zeros_like(share, dtype=torch.bool)
    assert (error <= nearest + RTOL[dtype] * share)[~floored].all()
    c, h = share ** (1 / DEGREE[dtype]), 1 / LARGEST[dtype]
    bound = c * h + h * h / 2 if dtype is INT8 else 2 * h * (c + h) ** 3
    assert (error <= bound + RTOL[dtype] * share)[~floored].all()
    assert (error[floored] <= table(dtype)[1] * (1 + 1e-6)).all()
    assert (decoded.sign() * blocks.sign() >= 0).all()


@pytest.mark.parametrize("fill", ["gaussian", "outlier", "zero", "wide"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_storing_an_unchanged_value_again_changes_nothing(dtype: torch.dtype, fill: str) -> None:
    """Whatever the noise, its extremes included: a state that is only loaded and stored does not drift."""
    x = values(dtype, fill) if fill != "wide" else Case((64 * BLOCK,), torch.float32, fill).make("cpu").clamp(-1e9, 1e9)
    x = x if dtype is INT8 else x.abs()
    payload, scales = stored(x, dtype, noise_of(x.numel(), 1))
    decoded = blockwise.load_state(payload, scales)
    noises = [noise_of(x.numel(), step) for step in (1, 2, 1000)]
    for noise in [None, torch.zeros_like(x), torch.full_like(x, 1 - 2**-24), *noises]:
        again, again_scales = stored(decoded, dtype, noise)
        assert torch.equal(again, payload) and torch.equal(again_scales, scales)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_block_that_decays_as_a_whole_keeps_its_codes(dtype: torch.dtype) -> None:
    """Its scale carries the decay: ten times 0.9, as after a gradient that stopped, to FP32 rounding and nearest."""
    x = values(dtype)
    payload, scales = stored(x, dtype)
    value = blockwise.load_state(payload, scales)
    for _ in range(10):
        value = through(0.9 * value, dtype)
    again, again_scales = stored(value, dtype)
    assert torch.equal(again, payload)
    torch.testing.assert_close(again_scales, scales * 0.9**10, rtol=20 * 2**-24, atol=0)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_poisons_its_block(dtype: torch.dtype, bad: float) -> None:
    x = torch.rand(3 * BLOCK)
    x[300] = bad
    noise = torch.rand(3 * BLOCK)
    for given in (None, noise):
        decoded = through(x, dtype, given).view(3, BLOCK)
        assert decoded[1].isnan().all() and decoded[[0, 2]].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_magnitudes_beyond_a_given_scale_saturate(dtype: torch.dtype) -> None:
    x = torch.tensor([1.0001, 1.5, 1e30])
    for noise in (None, torch.zeros(3), torch.full((3,), 1 - 2**-24)):
        assert reference.encode(x, torch.ones(1), dtype, noise).tolist() == 3 * [LARGEST[dtype]]


def test_zeros_and_signs() -> None:
    x = torch.zeros(2 * BLOCK)
    x[0], x[1], x[2] = 1.0, -1e-3, 1e-30
    for dtype in DTYPES:
        payload, scales = stored(x, dtype)
        assert scales.tolist() == [1.0, 1.0] and not payload[3:].any()  # an all-zero block has scale 1
    assert stored(x, INT8)[0][1] < 0
    assert stored(x, UINT8)[0][1] == 0  # a second moment is never negative


def test_a_second_moment_above_zero_never_becomes_zero() -> None:
    """Else its update would be the first moment over eps. It becomes the smallest code: a smaller update is safe."""
    x = torch.full((BLOCK,), 1e-20)
    x[0] = 1.0
    for noise in (None, torch.full_like(x, 1 - 2**-24), torch.zeros_like(x)):
        assert (stored(x, UINT8, noise)[0][1:] == 1).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stochastic_rounding_is_right_on_average(dtype: torch.dtype) -> None:
    """An int8's value and a uint8's code. Over 1,000 steps the mean is within six standard errors, gap · √(p(1-p)) /
    √1000 ≤ gap / 63, everywhere."""
    x = values(dtype, num_blocks=8)

    def unit(share: Tensor) -> Tensor:
        """What is exact on average."""
        return share if dtype is INT8 else share.sqrt().sqrt()

    def of_block(value: Tensor) -> Tensor:
        return unit(value.double().abs().view(-1, BLOCK) / amax.double())

    amax = x.abs().view(-1, BLOCK).amax(dim=1, keepdim=True)
    total = torch.zeros_like(of_block(x))
    for step in range(1000):
        noise = noise_of(x.numel(), step)
        total += of_block(through(x, dtype, noise))
    share = of_block(x).contiguous()
    code = torch.bucketize(share, unit(table(dtype)), right=True).clamp_max(LARGEST[dtype]) - 1
    gap = unit(table(dtype))[code + 1] - unit(table(dtype))[code]
    regular = (share >= unit(table(dtype))[1]) if dtype is UINT8 else torch.ones_like(share, dtype=torch.bool)
    assert ((total / 1000 - share).abs() <= 6 * gap / 63 + 1e-6 * share)[regular].all()
    # The test can fail: rounded to nearest, most means are farther off.
    error = (of_block(through(x, dtype)) - share).abs()
    assert (error > 6 * gap / 63)[regular].float().mean() > 0.5


@pytest.mark.parametrize("exponent", [-120, -60, -1, 0, 1, 60])
def test_square_roots_are_correctly_rounded(exponent: int) -> None:
    """Neither neighbour is nearer: the halves of the distances to them, squared in float64, lie around the number.

    A half way point has 25 bits and its square 50: exact in float64.
    """
    x = torch.ldexp(1 + 3 * torch.rand(2**16, generator=torch.Generator().manual_seed(0)), torch.tensor(exponent))
    root = companding.square_root(x)
    above, below = (root.nextafter(torch.tensor(bound)).double() for bound in (math.inf, 0.0))
    assert (((root.double() + below) / 2).square() <= x.double()).all()
    assert (((root.double() + above) / 2).square() >= x.double()).all()
    assert torch.equal(companding.square_root(torch.tensor([0.0, 4.0, math.inf])), torch.tensor([0.0, 2.0, math.inf]))


@pytest.mark.parametrize(("beta", "num_steps"), [(0.9, 20), (0.95, 40), (0.999, 2000)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_averages_decay_without_gradients(dtype: torch.dtype, beta: float, num_steps: int) -> None:
    """Elements whose gradient stopped, in a block where one goes on: their average falls by a factor e² as it should.

    Rounded to nearest, an element stands still where (1 - beta) of it is less than half a gap: k / (2·code) of it,
    which is every code at beta = 0.999 and the small ones at 0.9.
    """
    x = torch.full((16 * BLOCK,), 0.02)
    x[::BLOCK] = 1.0
    mean: dict[str, float] = {}
    for kind in ("stochastic", "nearest"):
        value = x.clone()
        for step in range(num_steps):
            noise = noise_of(x.numel(), step)
            value = through(torch.where(x == 1.0, x, beta * value), dtype, noise if kind == "stochastic" else None)
        mean[kind] = (value[x != 1.0].mean() / 0.02).item()
    expected = beta**num_steps
    # 4,080 independent averages, each with a standard deviation of at most its start: 1/64; four of them.
    assert mean["stochastic"] == pytest.approx(expected, abs=4 / 64)
    if beta == 0.999:
        assert mean["nearest"] > 0.95
