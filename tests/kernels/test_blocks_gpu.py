"""Variants of the block-scaled GEMM and of its operands' casts: bitwise the specification, the GEMM by its error."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8_megatron.dtypes import E4M3, E5M2
from fp8_megatron.kernels import ops
from fp8_megatron.kernels.gemm import cublaslt
from tests.kernels.cases import FILLS, FP8, INPUT_DTYPES, Case
from tests.kernels.test_blocks import FORMATS, SHAPES, operands, product_in_float64, snr_db
from tests.kernels.test_triton import Guards, assert_same, guards  # noqa: F401

pytestmark = pytest.mark.gpu

CASES = (
    [Case(shape, dtype) for shape in SHAPES for dtype in INPUT_DTYPES]
    + [Case((144, 272), dtype, fill) for fill in FILLS[1:] for dtype in INPUT_DTYPES]
    + [Case((16, 4112)), Case((4112, 16))]
)
LAYOUTS = ((True, True), (True, False), (False, True))


@pytest.mark.parametrize("power_of_two", [False, True], ids=["exact", "power_of_two"])
@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_quantize_blocks(case: Case, dtype: torch.dtype, power_of_two: bool, guards: Guards) -> None:  # noqa: F811
    x = case.make("cuda")
    *expected, expected_sums = ops.quantize_blocks(
        x.cpu(), dtype, transposed=True, column_sums=True, power_of_two=power_of_two
    )
    exact = x.cpu().double().sum(0)
    # At most M = 4112 additions in FP32, each rounds what is at most Σ|x| by 2⁻²⁴.
    bound = x.shape[0] * 2**-24 * x.cpu().double().abs().sum(0)
    for rowwise, transposed in LAYOUTS:
        for column_sums in (False, True):
            asked = dict(rowwise=rowwise, transposed=transposed, column_sums=column_sums, power_of_two=power_of_two)
            *found, sums = ops.quantize_blocks(x, dtype, **asked)
            for actual, wanted, kept in zip(found, expected, (rowwise, rowwise, transposed, transposed), strict=True):
                assert_same(actual, wanted if kept else wanted.new_empty(0))
            assert sums.shape == (expected_sums.shape if column_sums else (0,))
            if column_sums:
                known = expected_sums.isfinite()
                assert (sums.cpu().isfinite() == known).all()
                assert ((sums.cpu() - exact).abs() <= bound)[known].all()
    assert_same(x, case.make("cpu"))


@pytest.mark.parametrize("power_of_two", [False, True], ids=["exact", "power_of_two"])
@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_quantize_tiles(case: Case, dtype: torch.dtype, power_of_two: bool, guards: Guards) -> None:  # noqa: F811
    w = case.make("cuda")
    expected = ops.quantize_tiles(w.cpu(), dtype, transposed=True, power_of_two=power_of_two)
    for rowwise, transposed in LAYOUTS:
        found = ops.quantize_tiles(w, dtype, rowwise=rowwise, transposed=transposed, power_of_two=power_of_two)
        for actual, wanted, kept in zip(found, expected, (rowwise, rowwise, transposed, transposed), strict=True):
            assert_same(actual, wanted if kept else wanted.new_empty(0))
    payload, scales, payload_t, scales_t = ops.quantize_tiles(w, dtype, transposed=True, power_of_two=power_of_two)
    for actual, wanted in zip(ops.transpose_tiles(payload, scales), (payload_t, scales_t), strict=True):
        assert_same(actual, wanted.cpu())


@pytest.mark.parametrize("power_of_two", [False, True], ids=["exact", "power_of_two"])
@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_scales_of_amaxes_of_any_size(dtype: torch.dtype, power_of_two: bool) -> None:
    """Each row has another amax, from the least subnormal number to the largest."""
    generator = torch.Generator().manual_seed(0)
    amaxes = torch.randint(1, 0x7F800000, (4096,), generator=generator, dtype=torch.int32).view(torch.float32)
    x = amaxes[:, None] * (2 * torch.rand(4096, 128, generator=generator) - 1)
    x[:, 5] = amaxes
    found = ops.quantize_blocks(x.cuda(), dtype, power_of_two=power_of_two)[:2]
    for actual, wanted in zip(found, ops.quantize_blocks(x, dtype, power_of_two=power_of_two), strict=False):
        assert_same(actual, wanted)


def test_casts_take_a_strided_input(guards: Guards) -> None:  # noqa: F811
    x = Case((160, 512)).make("cuda")
    for view in (x[:, 64:320], x.t(), x[::2]):
        for cast in (ops.quantize_blocks, ops.quantize_tiles):
            expected = cast(view.cpu(), E4M3, transposed=True)
            for actual, wanted in zip(cast(view, E4M3, transposed=True), expected, strict=True):
                assert_same(actual, wanted)


def on_gpu(operand: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return operand[0].cuda(), operand[1].cuda()


@pytest.mark.parametrize("formats", FORMATS, ids=str)
@pytest.mark.parametrize("tiles", ["a", "b", "neither"])
@pytest.mark.parametrize(
    "shape", [(16, 16, 128), (16, 16, 16), (272, 336, 400), (16, 16, 2048), (256, 528, 4096)], ids=str
)
def test_block_scaled_mm(shape: tuple[int, int, int], tiles: str, formats: tuple[torch.dtype, torch.dtype]) -> None:
    m, n, k = shape
    on_cpu = operands(m, n, k, formats, tiles)
    truth = product_in_float64(on_cpu[0][0], on_cpu[1][0], on_cpu[0][1], on_cpu[1][1])
    (a, scales_a), (b, scales_b) = map(on_gpu, on_cpu)
    size = truth.std().float()
    bias = (torch.randn(n, generator=torch.Generator().manual_seed(2)) * size).bfloat16()
    for dtype in (torch.bfloat16, torch.float32):
        addend = (torch.randn(m, n, generator=torch.Generator().manual_seed(1)) * size).to(dtype)
        for given, given_bias in ((None, None), (addend, None), (None, bias), (addend, bias)):
            if given_bias is not None and dtype == torch.float32:
                continue
            expected = truth + sum(value.double() for value in (given, given_bias) if value is not None)
            out = torch.full((m, n), torch.nan, dtype=dtype, device="cuda")
            summands = dict(
                bias=None if given_bias is None else given_bias.cuda(), addend=None if given is None else given.cuda()
            )
            for _ in range(2):  # the plan is made, then used
                ops.block_scaled_mm_into_(out, a, b, scales_a, scales_b, **summands)
            # BF16's rounding is 54 dB or better (test_blocks). The tensor core keeps about 13 fraction bits of a sum
            # over a block, whose four truncations of 2⁻¹³ of the sum so far give 66 dB where they are random.
            assert snr_db(out.cpu(), expected) > 50


def test_each_call_takes_its_own_scales() -> None:
    (a, scales_a), (b, scales_b) = map(on_gpu, operands(256, 128, 384, (E4M3, E4M3), "b"))
    once, twice = (torch.empty(256, 128, device="cuda") for _ in range(2))
    ops.block_scaled_mm_into_(once, a, b, scales_a, scales_b)
    ops.block_scaled_mm_into_(twice, a, b, 2 * scales_a, scales_b)
    assert torch.equal(twice, 2 * once)


@pytest.mark.parametrize("rows", [512, 8192])
@pytest.mark.parametrize("tiles", ["b", "neither"])
def test_equal_to_torchs_own_call(tiles: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes the heuristic's first algorithm; here it is the fastest that writes the same bits."""
    monkeypatch.setattr(cublaslt, "_plans", {})
    monkeypatch.setattr(cublaslt, "_chosen", {})  # else earlier tests' problems may be all that are timed
    (a, scales_a), (b, scales_b) = map(on_gpu, operands(rows, 768, 1024, (E4M3, E4M3), tiles))
    of_b = scales_b if tiles == "neither" else scales_b[:, : 1024 // 128].t()
    expected = torch._scaled_mm(a, b.t(), scale_a=scales_a.t(), scale_b=of_b, out_dtype=torch.bfloat16)
    assert torch.equal(ops.block_scaled_mm(a, b, scales_a, scales_b), expected)
    (timed,) = cublaslt._chosen
    assert timed.scale_mode_a == cublaslt.BLOCK_SCALES
    assert timed.scale_mode_b == (cublaslt.TILE_SCALES if tiles == "b" else cublaslt.BLOCK_SCALES)


def test_a_nan_stays_in_its_row() -> None:
    (a, scales_a), (b, scales_b) = map(on_gpu, operands(32, 48, 256, (E4M3, E4M3), "b"))
    scales_a[1, 7] = torch.nan
    out = ops.block_scaled_mm(a, b, scales_a, scales_b)
    assert out[7].isnan().all() and out.isnan().sum() == 48


@pytest.mark.parametrize("power_of_two", [False, True], ids=["exact", "power_of_two"])
def test_a_linear_layers_three_gemms(power_of_two: bool) -> None:
    """Forward and both gradients for a random gradient, cast and multiplied on the GPU, by the specification's."""
    generator = torch.Generator().manual_seed(0)
    tokens, inputs, outputs = 512, 640, 1152
    drawn = [
        torch.randn(shape, generator=generator).bfloat16()
        for shape in ((tokens, inputs), (outputs, inputs), (tokens, outputs))
    ]
    results = []
    for x, w, grad in (drawn, [value.cuda() for value in drawn]):
        kept = dict(transposed=True, power_of_two=power_of_two)
        x_rows, x_scales, x_t, x_scales_t, _ = ops.quantize_blocks(x, E4M3, **kept)
        g_rows, g_scales, g_t, g_scales_t, grad_bias = ops.quantize_blocks(grad, E5M2, column_sums=True, **kept)
        w_rows, w_scales, w_t, w_scales_t = ops.quantize_tiles(w, E4M3, **kept)
        results.append(
            (
                ops.block_scaled_mm(x_rows, w_rows, x_scales, w_scales),
                ops.block_scaled_mm(g_rows, w_t, g_scales, w_scales_t),
                ops.block_scaled_mm(g_t, x_t, g_scales_t, x_scales_t, out_dtype=torch.float32),
                grad_bias,
            )
        )
    for expected, found in zip(*results, strict=True):
        # Two roundings to BF16 of nearly the same numbers: 54 dB each at the worst, 51 together.
        assert snr_db(found.cpu(), expected) > 50
