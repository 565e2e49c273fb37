"""NVFP4 operands: the specification against float64, numbers of the rule, torchao, Transformer Engine's formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8_megatron.device.device import UnsupportedDeviceError
from fp8_megatron.dtypes import E4M3
from fp8_megatron.formats.recipes import roles_of
from fp8_megatron.kernels import ops
from fp8_megatron.kernels.quantize.nvfp4 import E2M1_MAX, hadamard
from fp8_megatron.quantization.stats import snr_db

NUMBERS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def values(rows: int = 64, columns: int = 128, *, seed: int = 0) -> Tensor:
    """Rows whose magnitudes differ by six decades, with a row of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator) * torch.logspace(-4, 2, rows)[:, None]
    x[3] = 0.0
    return x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("tiles", [False, True])
def test_each_value_is_the_nearest_number_of_its_block(dtype: torch.dtype, tiles: bool) -> None:
    x = values().to(dtype)
    payload, scales, total = ops.quantize_nvfp4(x, tiles=tiles)
    assert payload.dtype == scales.dtype == E4M3 and scales.shape == ((4, 8) if tiles else (64, 8))
    assert total == x.abs().max().float() / (448.0 * 6.0)
    wide = ops.dequantize_nvfp4(torch.ones_like(payload), scales.float() * total).double()
    numbers = torch.cat([NUMBERS, -NUMBERS]).double()
    nearest = (x.double()[..., None] - wide[..., None] * numbers).abs().amin(-1)
    # The scaled value is rounded in FP32, by 2⁻²³ of at most 6.
    error = (x.double() - payload.double() * wide).abs()
    assert (error <= nearest + 2.0**-20 * wide).all()
    blocks = (
        x.double().abs().view(64 // 16, 16, 8, 16).amax(dim=(1, 3))
        if tiles
        else x.double().abs().view(64, 8, 16).amax(2)
    )
    exact = (blocks / 6.0 / total.double()).clamp(2.0**-6, 448.0)
    assert ((scales.double() / exact - 1.0).abs() <= 2.0**-4).all()


def test_numbers_of_the_rule() -> None:
    """Halves go to the even number; beyond 5 is 6, also what the rounding of a scale left above it."""
    x = torch.zeros(1, 32)
    x[0, :16] = torch.tensor(
        [6.0, 0.25, 0.26, 0.75, 1.25, 1.26, 1.75, 2.5, 2.51, 3.5, 5.0, 5.01, -0.25, -2.5, -5.5, 0.0]
    )
    x[0, 16] = 6.0 * 448.0  # makes the matrix's scale 1
    payload, scales, total = ops.quantize_nvfp4(x)
    assert total == 1.0 and scales.float().tolist() == [[1.0, 448.0]]
    expected = [6.0, 0.0, 0.5, 1.0, 1.0, 1.5, 2.0, 2.0, 3.0, 4.0, 4.0, 6.0, -0.0, -2.0, -6.0, 0.0]
    assert payload[0, :16].float().tolist() == expected
    assert math.copysign(1.0, payload[0, 12].item()) == -1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_alike_torchaos(dtype: torch.dtype) -> None:
    theirs = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    for seed in range(4):
        x = values(256, 256, seed=seed).to(dtype)
        payload, scales, total = ops.quantize_nvfp4(x)
        of_theirs = theirs.per_tensor_amax_to_scale(x.abs().max())
        their_scales, packed = theirs.nvfp4_quantize(x, per_tensor_scale=of_theirs)
        assert torch.equal(of_theirs, total)
        assert torch.equal(scales.view(torch.uint8), their_scales.view(torch.uint8).view(scales.shape))
        assert torch.equal(ops.packed_e2m1(payload), packed.view(torch.uint8))


def transformer_engines(x: Tensor, *, height: int) -> tuple[Tensor, Tensor]:
    """The numbers [R, K] and scales of blocks by the formulas of Transformer Engine's ``NVFP4QuantizerRef``."""
    rows, columns = x.shape
    blocks = x.float().reshape(rows // height, height, columns // 16, 16)
    largest = blocks.abs().amax(dim=(1, 3))
    encode = torch.tensor(448.0 * 6.0) / x.abs().max().float()
    scales = (largest * (encode * torch.tensor(6.0).reciprocal())).clamp(max=448.0).to(E4M3)
    of_block = (1.0 / (scales.float() * (1.0 / encode))).clamp(max=torch.finfo(torch.float32).max)
    scaled = (blocks * of_block[:, None, :, None]).clamp(-6.0, 6.0).reshape(rows, columns)
    bounds = (NUMBERS[1:] + NUMBERS[:-1]) / 2
    # A bound itself goes to the even number: those below 0.5, 1.5, 3 and 6 down, the others up.
    below = torch.bucketize(scaled.abs(), bounds, right=False)
    above = torch.bucketize(scaled.abs(), bounds, right=True)
    return NUMBERS[torch.where(below % 2 == 0, below, above)].copysign(scaled), scales


@pytest.mark.parametrize("tiles", [False, True])
def test_beside_transformer_engines(tiles: bool) -> None:
    """Bit for bit where the matrix's scale is a power of two. Otherwise products are rounded in another order: some
    numbers fall on the other side. Their scales may be below 2⁻⁶; these rows differ by three decades at most."""
    x = values()[24:56]
    for amax, exact in ((2688.0, True), (x.abs().max().item(), False)):
        x[5, 5] = amax
        height = 16 if tiles else 1
        payload, scales, _ = ops.quantize_nvfp4(x, tiles=tiles)
        numbers, their_scales = transformer_engines(x, height=height)
        normal = (their_scales.float() >= 2.0**-6).repeat_interleave(height, 0).repeat_interleave(16, 1)
        assert normal.float().mean() > (0.1 if exact else 0.9)
        differ = (payload.float() != numbers)[normal].float().mean()
        assert differ == 0.0 if exact else differ < 2e-3
        at_scales = their_scales.float() >= 2.0**-6
        assert (scales.float() == their_scales.float())[at_scales].float().mean() >= (1.0 if exact else 0.99)


def test_gradients_are_rounded_without_bias() -> None:
    """The mean over n draws is off by at most 5 / √n of half a step of 2; to nearest it would be off by half a step."""
    torch.manual_seed(0)
    x = torch.linspace(-5.9, 5.9, 256).repeat(2000, 1)
    payload, scales, total = ops.quantize_nvfp4(x, stochastic=True)
    found = ops.dequantize_nvfp4(payload, scales.float() * total)
    assert len(found[:, 100].unique()) == 2
    inside = found.abs().amax(0) < E2M1_MAX * scales.float().max() * total  # the last number is not rounded up
    error = (found.double().mean(0) - x[0].double()).abs()[inside]
    assert error.max() < 2.0 * 5.0 / math.sqrt(2000)
    assert (found.double() - x.double()).mean().abs() < 5e-3


def test_both_operands_of_a_rotated_product_give_the_product() -> None:
    matrix = hadamard(torch.device("cpu"))
    assert torch.equal(matrix @ matrix.t(), torch.eye(16)) and (matrix.abs() == 0.25).all()
    x, g = values(256, 64).double(), values(256, 32, seed=1).double()
    rotated = [(y.t().reshape(-1, 16) @ matrix.double()).view(-1, 256) for y in (g, x)]
    torch.testing.assert_close(rotated[0] @ rotated[1].t(), g.t() @ x)
    spread = torch.zeros(16, 32)
    spread[:, 3] = 1.0
    spread[7, 3] = 1000.0  # one outlier in a block of wgrad
    payload, _, total = ops.quantize_nvfp4(spread.t(), rotates=True)
    plain, _, plain_total = ops.quantize_nvfp4(spread.t())
    assert payload[3].float().count_nonzero() == 16 and plain[3].float().count_nonzero() == 1
    assert total < plain_total / 3.9


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("tiles", [False, True])
def test_values_that_are_not_finite_stay_visible(bad: float, tiles: bool) -> None:
    x = torch.ones(32, 32)
    x[3, 5] = bad
    payload, scales, total = ops.quantize_nvfp4(x, tiles=tiles)
    assert not (ops.dequantize_nvfp4(payload, scales.float() * total) @ torch.ones(32)).isfinite().any()


def test_a_layers_products_and_refusals() -> None:
    """E2M1 in two operands leaves about 18 dB, and about 14 where one is rounded at random. Wgrad's are rotated."""
    roles = roles_of("nvfp4", False)
    x, g, w = (
        values(64, 256),
        values(64, 128, seed=1),
        torch.randn(128, 256, generator=torch.Generator().manual_seed(2)),
    )
    x_cast, g_cast = (role.cast(y, transposed=True) for role, y in ((roles.input, x), (roles.grad_output, g)))
    w_cast = roles.weight.cast(w, transposed=True)
    products: list[tuple[Any, Any, Tensor, float]] = [
        (x_cast, w_cast, x.double() @ w.double().t(), 16.0),
        (g_cast, w_cast.t, g.double() @ w.double(), 12.5),
        (g_cast.t, x_cast.t, g.double().t() @ x.double(), 12.5),
    ]
    for a, b, exact, least in products:
        assert snr_db(a.multiply(b, torch.float32), exact) > least
    with pytest.raises(ValueError, match="in multiples of 16, not 24 × 40"):
        ops.quantize_nvfp4(torch.ones(24, 40))
    roles.input.check_device(torch.device("cpu"))
    with pytest.raises(UnsupportedDeviceError, match=r"nvfp4 has no GEMM for GPUs yet.*choose --fp8-recipe mxfp8"):
        roles.input.check_device(torch.device("cuda", 0))
