"""The block-scaled GEMM and the casts of its operands: the specification against float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fp8_megatron.device.device import UnsupportedDeviceError
from fp8_megatron.dtypes import E4M3, E5M2, MAX_FINITE
from fp8_megatron.kernels import ops
from tests.kernels.cases import FILLS, FP8, INPUT_DTYPES, Case

#: A block and less, whole blocks, blocks cut short in either direction.
SHAPES = ((16, 16), (128, 128), (48, 640), (272, 336), (384, 256))


def snr_db(value: Tensor, truth: Tensor) -> float:
    """Signal-to-noise ratio in dB, in float64."""
    noise = (value.double() - truth.double()).square().sum()
    return math.inf if noise == 0 else float(10 * torch.log10(truth.double().square().sum() / noise))


def exact_scales(x: Tensor, dtype: torch.dtype, height: int, width: int, *, power_of_two: bool) -> Tensor:
    """float64 scales [⌈rows / height⌉, ⌈columns / width⌉] of the blocks of `x`."""
    rows, columns = x.shape
    whole = torch.nn.functional.pad(x.double(), (0, -columns % width, 0, -rows % height))
    blocks = whole.view(whole.shape[0] // height, height, whole.shape[1] // width, width)
    amax = blocks.abs().amax(dim=(1, 3))
    scales = (amax / MAX_FINITE[dtype]).clamp_min(2.0**-126)
    if power_of_two:
        mantissa, exponent = torch.frexp(scales)
        scales = torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).int())
    return scales.masked_fill(amax == 0, 1.0).masked_fill(~amax.isfinite(), math.nan)


def assert_close_to_input(payload: Tensor, scales: Tensor, x: Tensor) -> None:
    """Every element within half a step of its format; NaN in the blocks that are not finite, and nowhere else.

    `scales` has the shape of `x`. A number is rounded by at most half of 2^-mantissa_bits of itself, a subnormal one by
    half of the smallest; FP32's roundings of the scale, of its reciprocal and of two products add 4 · 2⁻²⁴.
    """
    mantissa_bits, smallest = (3, 2.0**-9) if payload.dtype == E4M3 else (2, 2.0**-16)
    finite = scales.isfinite()
    decoded = payload.double() * scales
    bound = (x.double().abs() * 2.0**-mantissa_bits).maximum(smallest * scales) / 2 + x.double().abs() * 2.0**-22
    assert ((decoded - x.double()).abs() <= bound)[finite].all()
    assert decoded[~finite].isnan().all() and payload.float().isnan()[~finite].all()


@pytest.mark.parametrize("power_of_two", [False, True], ids=["exact", "power_of_two"])
@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize(
    "case",
    [Case(shape) for shape in SHAPES] + [Case((144, 272), dtype, fill) for fill in FILLS for dtype in INPUT_DTYPES],
    ids=str,
)
def test_quantize_blocks(case: Case, dtype: torch.dtype, power_of_two: bool) -> None:
    x = case.make("cpu")
    payload, scales, payload_t, scales_t, sums = ops.quantize_blocks(
        x, dtype, transposed=True, column_sums=True, power_of_two=power_of_two
    )
    for value, q, s in ((x, payload, scales), (x.t(), payload_t, scales_t)):
        expected = exact_scales(value, dtype, 1, 128, power_of_two=power_of_two)
        assert s.is_contiguous() and q.is_contiguous() and s.shape == expected.t().shape and q.shape == value.shape
        # A scale is one division, correctly rounded; a power of two is exact.
        torch.testing.assert_close(s.t().double(), expected, rtol=0 if power_of_two else 2**-24, atol=0, equal_nan=True)
        assert_close_to_input(q, s.t().double().repeat_interleave(128, 1)[:, : value.shape[1]], value)
    # M ≤ 384 additions in FP32, each rounds what is at most Σ|x| by 2⁻²⁴.
    error = (sums.double() - x.double().sum(0)).abs()
    known = x.double().sum(0).isfinite()
    assert (error <= x.shape[0] * 2**-24 * x.double().abs().sum(0))[known].all()
    assert not sums[~known].isfinite().any()


@pytest.mark.parametrize("power_of_two", [False, True], ids=["exact", "power_of_two"])
@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize(
    "case",
    [Case(shape) for shape in SHAPES] + [Case((144, 272), dtype, fill) for fill in FILLS for dtype in INPUT_DTYPES],
    ids=str,
)
def test_quantize_tiles(case: Case, dtype: torch.dtype, power_of_two: bool) -> None:
    w = case.make("cpu")
    payload, scales, payload_t, scales_t = ops.quantize_tiles(w, dtype, transposed=True, power_of_two=power_of_two)
    expected = exact_scales(w, dtype, 128, 128, power_of_two=power_of_two)
    rows, columns = expected.shape
    assert scales.shape == (rows, 4 * math.ceil(columns / 4)) and scales_t.shape == (columns, 4 * math.ceil(rows / 4))
    assert scales.is_contiguous() and scales_t.is_contiguous()
    assert (scales[:, columns:] == 1).all() and (scales_t[:, rows:] == 1).all()
    torch.testing.assert_close(
        scales[:, :columns].double(), expected, rtol=0 if power_of_two else 2**-24, atol=0, equal_nan=True
    )
    torch.testing.assert_close(scales_t[:, :rows], scales[:, :columns].t(), rtol=0, atol=0, equal_nan=True)
    of_elements = scales.double().repeat_interleave(128, 0).repeat_interleave(128, 1)[: w.shape[0], : w.shape[1]]
    assert_close_to_input(payload, of_elements, w)
    assert torch.equal(payload_t.view(torch.uint8), payload.view(torch.uint8).t())


def test_layouts_can_be_had_apart() -> None:
    x = Case((144, 272)).make("cpu")
    both, tiles = ops.quantize_blocks(x, E4M3, transposed=True), ops.quantize_tiles(x, E4M3, transposed=True)
    for rowwise, transposed in ((True, False), (False, True)):
        wanted = (rowwise, rowwise, transposed, transposed)
        for whole, part in (
            (both, ops.quantize_blocks(x, E4M3, rowwise=rowwise, transposed=transposed)),
            (tiles, ops.quantize_tiles(x, E4M3, rowwise=rowwise, transposed=transposed)),
        ):
            for value, expected, kept in zip(part, whole, wanted, strict=False):
                assert value.dtype == expected.dtype
                assert torch.equal(value.float(), expected.float()) if kept else value.numel() == 0
    assert both[4].numel() == 0
    for value, expected in zip(ops.transpose_tiles(*tiles[:2]), tiles[2:], strict=True):
        assert torch.equal(value.float(), expected.float())


def test_blocks_hold_what_one_scale_loses() -> None:
    """Rows whose magnitudes lie decades apart: E4M3's 31.5 dB (test_reference) in every row, with blocks alone."""
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)) * torch.logspace(0, -6, 64)[:, None]
    payload, scales, *_ = ops.quantize_blocks(x, E4M3)
    decoded = ops.dequantize_blocks(payload, scales)
    one, _, scale = ops.quantize_current(x, E4M3)
    # A row's 512 errors scatter by √(2 / 512) = 6%, 0.3 dB; a block's amax of 128 leaves fewer subnormal numbers.
    assert min(snr_db(decoded[i], x[i]) for i in range(64)) > 30
    assert snr_db(one[-1].float() * scale, x[-1]) < 5  # 10⁻⁶ of the amax is below E4M3's smallest


@pytest.mark.parametrize("fill", ["zero", "outlier", "nan", "inf"])
def test_a_block_keeps_its_trouble_to_itself(fill: str) -> None:
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    clean = ops.quantize_blocks(x, E4M3, transposed=True)
    bad = x.clone()
    if fill == "zero":
        bad[128:, 256:384] = 0
    else:
        bad[200, 300] = {"outlier": -1e4, "nan": math.nan, "inf": -math.inf}[fill]
    found = ops.quantize_blocks(bad, E4M3, transposed=True)
    if fill == "zero":
        assert (found[1][2, 128:] == 1).all() and (found[3][1, 256:384] == 1).all()
    else:
        assert (found[1] != clean[1]).nonzero().tolist() == [[2, 200]]
        assert (found[3] != clean[3]).nonzero().tolist() == [[1, 300]]
    if fill in ("nan", "inf"):
        assert found[0][200, 256:384].isnan().all() and found[0].isnan().sum() == 128
        assert found[2][300, 128:].isnan().all() and found[2].isnan().sum() == 128
        tiles, scales, *_ = ops.quantize_tiles(bad, E4M3)
        assert scales[1, 2].isnan() and scales.isnan().sum() == 1 and tiles.isnan().sum() == 128 * 128


def operands(
    m: int, n: int, k: int, formats: tuple[torch.dtype, torch.dtype], tiles: str, *, power_of_two: bool = False
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(payload, scales) of a [m, k] and of b [n, k], rows of decades apart; `tiles` names the one with tiles."""
    generator = torch.Generator().manual_seed(m + n + k)
    cast = []
    for name, rows, dtype in (("a", m, formats[0]), ("b", n, formats[1])):
        x = torch.randn(rows, k, generator=generator) * 10.0 ** torch.rand(rows, 1, generator=generator)
        quantize = ops.quantize_tiles if name == tiles else ops.quantize_blocks
        cast.append(quantize(x, dtype, power_of_two=power_of_two)[:2])
    return cast[0], cast[1]


def product_in_float64(a: Tensor, b: Tensor, scales_a: Tensor, scales_b: Tensor) -> Tensor:
    """Σ_j (a_j b_jᵀ) · scales_a_j · scales_b_j over the blocks of K, as the GEMM is defined."""
    out = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float64)
    for j in range(math.ceil(a.shape[1] / 128)):
        part = a[:, 128 * j : 128 * j + 128].double() @ b[:, 128 * j : 128 * j + 128].double().t()
        factors = []
        for payload, scales in ((a, scales_a), (b, scales_b)):
            of_blocks = scales.shape == (math.ceil(payload.shape[1] / 128), payload.shape[0])
            factors.append(scales[j] if of_blocks else scales[:, j].repeat_interleave(128)[: payload.shape[0]])
        out += part * factors[0].double()[:, None] * factors[1].double()[None, :]
    return out


FORMATS = ((E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3))


@pytest.mark.parametrize("formats", FORMATS, ids=str)
@pytest.mark.parametrize("tiles", ["a", "b", "neither"])
@pytest.mark.parametrize("shape", [(16, 16, 128), (272, 144, 640), (48, 64, 400)], ids=str)
def test_block_scaled_mm(shape: tuple[int, int, int], tiles: str, formats: tuple[torch.dtype, torch.dtype]) -> None:
    m, n, k = shape
    (a, scales_a), (b, scales_b) = operands(m, n, k, formats, tiles)
    truth = product_in_float64(a, b, scales_a, scales_b)
    out = torch.full((m, n), torch.nan)
    ops.block_scaled_mm_into_(out, a, b, scales_a, scales_b)
    # Two roundings of 2⁻²⁴ in each factor, and a sum of K terms in FP32: each addition rounds the sum of random signs
    # so far, √i of a term, by 2⁻²⁴ / √3 at most, altogether √(K / 6) · 2⁻²⁴ of the result: 124 dB at K = 640.
    assert snr_db(out, truth) > 120
    addend = torch.randn(m, n, generator=torch.Generator().manual_seed(1)) * truth.std().float()
    ops.block_scaled_mm_into_(out, a, b, scales_a, scales_b, addend=addend)
    assert snr_db(out, truth + addend.double()) > 120
    bias = torch.randn(n, generator=torch.Generator().manual_seed(2)).bfloat16() * truth.std().bfloat16()
    for given in (None, addend.bfloat16()):
        rounded = torch.full((m, n), torch.nan, dtype=torch.bfloat16)
        ops.block_scaled_mm_into_(rounded, a, b, scales_a, scales_b, bias=bias, addend=given)
        whole = truth + bias.double() + (0 if given is None else given.double())
        # BF16 rounds a number by 2⁻⁹ of it at most: no less than 54 dB.
        assert snr_db(rounded, whole) > 54
    assert snr_db(ops.block_scaled_mm(a, b, scales_a, scales_b, bias=bias), truth + bias.double()) > 54


def test_a_nan_stays_in_its_row() -> None:
    (a, scales_a), (b, scales_b) = operands(32, 48, 256, (E4M3, E4M3), "b")
    scales_a[1, 7] = torch.nan
    out = ops.block_scaled_mm(a, b, scales_a, scales_b)
    assert out[7].isnan().all() and out.isnan().sum() == 48


def test_a_linear_layers_three_gemms() -> None:
    """The layouts fit: forward, both gradients of y = x Wᵀ for a random gradient, near those of what was cast."""
    generator = torch.Generator().manual_seed(0)
    tokens, inputs, outputs = 256, 384, 640
    x, w, grad = (
        torch.randn(shape, generator=generator) for shape in ((tokens, inputs), (outputs, inputs), (tokens, outputs))
    )
    x_rows, x_scales, x_t, x_scales_t, _ = ops.quantize_blocks(x, E4M3, transposed=True)
    g_rows, g_scales, g_t, g_scales_t, grad_bias = ops.quantize_blocks(grad, E5M2, transposed=True, column_sums=True)
    w_rows, w_scales, w_t, w_scales_t = ops.quantize_tiles(w, E4M3, transposed=True)
    leaves = [leaf.double().requires_grad_() for leaf in (x, w, torch.zeros(outputs))]
    y = torch.nn.functional.linear(*leaves)
    y.backward(grad.double())
    expected = (y.detach(), *(leaf.grad for leaf in leaves))
    found = (
        ops.block_scaled_mm(x_rows, w_rows, x_scales, w_scales, out_dtype=torch.float32),
        ops.block_scaled_mm(g_rows, w_t, g_scales, w_scales_t, out_dtype=torch.float32),
        ops.block_scaled_mm(g_t, x_t, g_scales_t, x_scales_t, out_dtype=torch.float32),
        grad_bias,
    )
    # The noise of a product is that of its two operands: two of E4M3's 31.5 dB (test_reference) give 28.5, E5M2's
    # 25.5 with E4M3's 24.5; 1 dB for blocks, whose amax varies. Sums of M = 256 in FP32 are 120 dB and better.
    for value, truth, least in zip(found, expected, (27.5, 23.5, 23.5, 120), strict=True):
        assert snr_db(value, truth) > least


def test_refusals_name_the_value() -> None:
    (a, scales_a), (b, scales_b) = operands(32, 48, 256, (E4M3, E4M3), "b")
    odd = torch.ones(32, 40)
    with pytest.raises(ValueError, match="in multiples of 16, not 32 × 40"):
        ops.quantize_blocks(odd, E4M3)
    with pytest.raises(ValueError, match="in multiples of 16, not 32 × 40"):
        ops.quantize_tiles(odd, E4M3)
    with pytest.raises(ValueError, match="into no layout"):
        ops.quantize_blocks(torch.ones(32, 48), E4M3, rowwise=False, column_sums=True)
    with pytest.raises(ValueError, match="into no layout"):
        ops.quantize_tiles(torch.ones(32, 48), E4M3, rowwise=False)
    with pytest.raises(ValueError, match=r"K=136 is not a multiple of 16 \(M=32 N=48 K=136\)"):
        ops.block_scaled_mm(a[:, :136].contiguous(), b[:, :136].contiguous(), scales_a, scales_b)
    with pytest.raises(ValueError, match="M=24 is not a multiple of 16"):
        ops.block_scaled_mm(a[:24], b, scales_a[:, :24].contiguous(), scales_b)
    with pytest.raises(ValueError, match=r"a is \[32, 256\], b is \[48, 128\]"):
        ops.block_scaled_mm(a, b[:, :128].contiguous(), scales_a, scales_b)
    with pytest.raises(ValueError, match="contiguous"):
        ops.block_scaled_mm(a, b.t().contiguous().t(), scales_a, scales_b)
    with pytest.raises(ValueError, match=r"not torch.float8_e5m2 ×"):
        ops.block_scaled_mm(a.view(E5M2), b.view(E5M2), scales_a, scales_b)
    with pytest.raises(ValueError, match=r"\[2, 32\] for 1×128 blocks or \[1, 4\] for 128×128 tiles, not .* \[32, 2\]"):
        ops.block_scaled_mm(a, b, scales_a.t(), scales_b)
    tiles = ops.quantize_tiles(torch.ones(32, 256), E4M3)
    with pytest.raises(ValueError, match="one side only"):
        ops.block_scaled_mm(tiles[0], b, tiles[1], scales_b)


def test_a_gpu_without_block_scaling_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    ops.check_block_scaling(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    with pytest.raises(UnsupportedDeviceError, match=r"9\.0 \(Hopper\), not 8\.9: take another FP8 recipe"):
        ops.check_block_scaling(torch.device("cuda", 0))
