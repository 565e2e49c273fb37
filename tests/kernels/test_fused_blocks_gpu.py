"""Kernels that compute and cast into blocks, on a GPU against their specification computed on the CPU.

Sums over a row and σ are rounded otherwise there (`test_fused_triton`): values differ by 1e-6 of themselves, and
payloads where that crosses a rounding boundary. A block's scale then differs, too, by its last bits, or by a factor of
2 if it is a power of two; both are as good, so decoded values are compared. At most 1e-3 of the elements differ, by at
most one of E4M3's steps (1/8): 20 · log₁₀(8) + 30 = 48 dB at the least, 45 with room.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8_megatron.activation_functions import KINDS, Activation
from fp8_megatron.dtypes import E4M3, GEMM_BLOCK
from fp8_megatron.kernels import ops
from fp8_megatron.kernels.quantize.blocks import decode_blocks
from fp8_megatron.quantization.stats import snr_db
from tests.kernels.test_rope import assert_same_bits, normal

pytestmark = pytest.mark.gpu

SHAPES = [(16, 128), (272, 384), (128, 1024), (512, 4096)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
rounding = pytest.mark.parametrize("power_of_two", [False, True], ids=["exact", "pow2"])
FP32_DB, SAME_DB = 100.0, 45.0


def cuda(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else tensor.cuda() for tensor in tensors]


def assert_same_blocks(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Payload and scales, twice or three times, one behind the other."""
    assert all(
        one.shape == other.shape and one.dtype == other.dtype for one, other in zip(found, expected, strict=True)
    )
    for place in range(0, len(found), 2):
        payload, scales, wanted, wanted_scales = (
            found[place].cpu(),
            found[place + 1].cpu(),
            *expected[place : place + 2],
        )
        assert snr_db(decode_blocks(payload, scales), decode_blocks(wanted, wanted_scales)) > SAME_DB, place
        close = torch.isclose(scales, wanted_scales, rtol=1e-5, atol=0)
        assert close.float().mean() > 0.98, place
        assert (scales / wanted_scales)[~close].log2().abs().le(1.0).all()


@shapes
@rounding
@pytest.mark.parametrize("rms", [False, True], ids=["layernorm", "rmsnorm"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_norm(shape: tuple[int, int], rms: bool, has_bias: bool, power_of_two: bool) -> None:
    x = normal(*shape, seed=1, size=3.0) + 0.5
    weight, bias = 1 + normal(shape[1], seed=2, size=0.3), normal(shape[1], seed=3, size=0.3) if has_bias else None
    settings = {"eps": 1e-5, "rms": rms, "power_of_two": power_of_two}
    expected = ops.norm_quantize_blocks(x, weight, bias, E4M3, **settings)
    payload, scales, mean, rstd = ops.norm_quantize_blocks(*cuda(x, weight, bias), E4M3, **settings)
    assert_same_blocks((payload, scales), expected[:2])
    torch.testing.assert_close(mean.cpu(), expected[2], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rstd.cpu(), expected[3], rtol=1e-5, atol=0)

    again = ops.norm_requantize_blocks(*cuda(x, weight, bias), mean, rstd, E4M3, power_of_two=power_of_two)
    wanted = ops.norm_requantize_blocks(x, weight, bias, *expected[2:], E4M3, power_of_two=power_of_two)
    assert_same_blocks(again, wanted)


@shapes
@rounding
@pytest.mark.parametrize("kind", list(KINDS))
def test_activation(shape: tuple[int, int], kind: str, power_of_two: bool) -> None:
    (rows, width), function = shape, Activation(kind)
    z = normal(rows, function.row.num_inputs * width, seed=1, size=3.0)
    grad = normal(*shape, seed=2, size=1e-4)
    settings = {"power_of_two": power_of_two}
    found = ops.activation_quantize_blocks(z.cuda(), function, E4M3, **settings)
    assert_same_blocks(found, ops.activation_quantize_blocks(z, function, E4M3, **settings))
    for column_sums in (False, True):
        settings = {"power_of_two": power_of_two, "column_sums": column_sums}
        *found, sums = ops.activation_backward_quantize_blocks(*cuda(grad, z), function, E4M3, **settings)
        *expected, wanted = ops.activation_backward_quantize_blocks(grad, z, function, E4M3, **settings)
        if kind == "squared_relu":  # no fast exponential
            assert_same_bits(found, expected)
        assert_same_blocks(tuple(found), tuple(expected))
        assert sums.shape == wanted.shape
        if column_sums:
            assert snr_db(sums.cpu(), wanted) > FP32_DB


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_value_stays_in_its_blocks(bad: float) -> None:
    """Its blocks have the scale NaN, all others are as without it."""
    z, grad = normal(256, 512, seed=1), normal(256, 512, seed=2)
    function = Activation("squared_relu")
    calm = ops.activation_backward_quantize_blocks(*cuda(grad, z), function, E4M3, column_sums=False)
    grad[130, 200] = bad
    z[130, 200] = 1.0
    found = ops.activation_backward_quantize_blocks(*cuda(grad, z), function, E4M3, column_sums=False)
    assert found[1][1, 130].isnan() and found[1].isnan().sum() == 1
    assert found[3][1, 200].isnan() and found[3].isnan().sum() == 1
    assert found[5].isfinite().all()
    finite = found[1].isfinite()
    assert torch.equal(found[1][finite], calm[1][finite])


def test_widths_that_are_no_whole_blocks_are_refused() -> None:
    x, weight = normal(16, GEMM_BLOCK + 16, seed=1), normal(GEMM_BLOCK + 16, seed=2)
    with pytest.raises(ValueError, match="a norm in blocks has a multiple of 128 columns, not 144"):
        ops.norm_quantize_blocks(x, weight, None, E4M3, eps=1e-5, rms=True)
    with pytest.raises(ValueError, match="an activation in blocks has a multiple of 128 columns, not 144"):
        ops.activation_quantize_blocks(x, Activation("gelu"), E4M3)
