"""MX operands and their GEMM: the specification against float64, against numbers of the rule, and against torchao."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fp8_megatron.device.device import UnsupportedDeviceError
from fp8_megatron.dtypes import E4M3, E5M2, MAX_FINITE
from fp8_megatron.kernels import ops
from fp8_megatron.kernels.gemm import mx_cuda
from tests.kernels.cases import FILLS, INPUT_DTYPES, Case

SHAPES = ((32, 32), (64, 160), (96, 384))
CASES = [Case(shape) for shape in SHAPES] + [Case((64, 128), dtype, fill) for fill in FILLS for dtype in INPUT_DTYPES]


def exact_bytes(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The exponents of the scales [rows, columns / 32] in float64: the least e with amax ≤ fp_max · 2^(e − 127)."""
    amax = x.double().view(x.shape[0], -1, 32).abs().amax(dim=2)
    mantissa, exponent = torch.frexp(amax / MAX_FINITE[dtype])
    exponents = (exponent - (mantissa == 0.5).int() + 127).clamp_min(0)
    return exponents.masked_fill(amax == 0, 0).masked_fill(~amax.isfinite(), 255)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_quantize_mx(case: Case, dtype: torch.dtype) -> None:
    x = case.make("cpu")
    payload, scales, payload_t, scales_t = ops.quantize_mx(x, dtype, transposed=True)
    smallest = 2.0**-9 if dtype == E4M3 else 2.0**-16
    mantissa_bits = 3 if dtype == E4M3 else 2
    for value, q, s in ((x, payload, scales), (x.t().contiguous(), payload_t, scales_t)):
        assert q.shape == value.shape and q.is_contiguous() and s.shape == (value.shape[0], value.shape[1] // 32)
        exponents = s.view(torch.uint8).int()
        normal = value.abs().float().view(value.shape[0], -1, 32).amax(dim=2) >= 2.0**-126
        assert torch.equal(exponents[normal], exact_bytes(value, dtype).int()[normal])
        # A number is rounded by at most half of 2^-mantissa_bits of itself, a subnormal one by half of the smallest.
        step = s.float().double().repeat_interleave(32, dim=1)
        decoded = ops.dequantize_mx(q, s).double()
        bound = (value.double().abs() * 2.0**-mantissa_bits).maximum(smallest * step) / 2
        finite = step.isfinite() & (exponents > 0).repeat_interleave(32, dim=1)
        assert ((decoded - value.double()).abs() <= bound)[finite].all()
        assert decoded[step.isnan()].isnan().all()
        assert (decoded == 0)[(exponents == 0).repeat_interleave(32, dim=1)].all()


def test_numbers_of_the_rule() -> None:
    """448 fits at 2⁰ exactly; the next number takes 2¹. FLOOR would clamp 480 to 448, and RCEIL rounds it at 2¹."""
    amaxes = [448.0, 450.0, 480.0, 1.0, 1.75, 2.0, 0.0, 2.0**-120, math.inf, math.nan]
    x = torch.zeros(len(amaxes) + 22, 32)
    x[: len(amaxes), 3] = torch.tensor(amaxes)
    x[: len(amaxes), 5] = 0.25
    payload, scales, _, _ = ops.quantize_mx(x, E4M3)
    assert scales[: len(amaxes), 0].view(torch.uint8).tolist() == [127, 128, 128, 119, 119, 120, 117, 117, 255, 255]
    assert payload[:6, 3].float().tolist() == [448.0, 224.0, 240.0, 256.0, 448.0, 256.0]
    assert payload[:6, 5].float().tolist() == [0.25, 0.125, 0.125, 64.0, 64.0, 32.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_alike_torchaos(dtype: torch.dtype) -> None:
    """Scales and payloads of RCEIL, for magnitudes over 40 decades, zeros, and amaxes about the largest number."""
    mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 128, generator=generator) * torch.logspace(-20, 20, 256)[:, None]
    x[3] = 0.0
    x[5, :32], x[5, 32:64] = 448.0 * 2.0**5, 450.0 * 2.0**5
    x = x.to(dtype)
    payload, scales, payload_t, scales_t = ops.quantize_mx(x, E4M3, transposed=True)
    for value, q, s in ((x, payload, scales), (x.t().contiguous(), payload_t, scales_t)):
        of_theirs, theirs = mx_tensor.to_mx(value, E4M3, 32, mx_tensor.ScaleCalculationMode.RCEIL)
        assert torch.equal(s.view(torch.uint8), of_theirs.view(torch.uint8))
        assert torch.equal(q.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("summands", ["", "bias", "addend", "both"])
def test_the_gemm(summands: str, out_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(rows, 256, generator=generator) for rows in (64, 96))
    (qa, sa, _, _), (qb, sb, _, _) = ops.quantize_mx(a, E4M3), ops.quantize_mx(b, E4M3)
    bias = torch.randn(96, generator=generator).to(out_dtype) if summands in ("bias", "both") else None
    if out_dtype == torch.float32:
        bias = None
    addend = torch.randn(64, 96, generator=generator).to(out_dtype) if summands in ("addend", "both") else None
    out = torch.empty(64, 96, dtype=out_dtype)
    ops.mx_mm_into_(out, qa, qb, sa, sb, bias=bias, addend=addend)
    exact = ops.dequantize_mx(qa, sa).double() @ ops.dequantize_mx(qb, sb).double().t()
    for summand in (bias, addend):
        exact = exact if summand is None else exact + summand.double()
    # Rounded once; FP32 sums of 256 products are off by less than 256 · 2⁻²⁴ of the sum of their magnitudes, about 200.
    torch.testing.assert_close(
        out.double(), exact, rtol=2.0**-8 if out_dtype == torch.bfloat16 else 0.0, atol=256 * 2.0**-24 * 200
    )


def test_scales_in_the_order_of_cublaslt() -> None:
    """Byte ``16 (r mod 32) + 4 ⌊r / 32⌋ + c`` of its tile of 128 rows and 4 columns; zeros fill tiles up."""
    rows, columns = 160, 6
    scales = torch.randint(1, 255, (rows, columns), dtype=torch.uint8).view(torch.float8_e8m0fnu)
    swizzled = mx_cuda.swizzled(scales).view(torch.uint8)
    assert swizzled.shape == (2 * 2 * 512,)
    for row, column in ((0, 0), (1, 0), (33, 3), (127, 5), (128, 4), (159, 5)):
        tile = row // 128 * 2 + column // 4
        at = 512 * tile + 16 * (row % 32) + 4 * (row % 128 // 32) + column % 4
        assert swizzled[at] == scales.view(torch.uint8)[row, column]
    assert swizzled.count_nonzero() == rows * columns


def test_refusals_name_the_value() -> None:
    x = torch.ones(64, 64)
    payload, scales, _, _ = ops.quantize_mx(x, E4M3)
    with pytest.raises(ValueError, match="in multiples of 32, not 48 × 64"):
        ops.quantize_mx(x[:48], E4M3)
    with pytest.raises(ValueError, match="into no layout"):
        ops.quantize_mx(x, E4M3, rowwise=False)
    out = torch.empty(64, 64)
    with pytest.raises(ValueError, match=r"scales of b \[64, 64\] are torch.float8_e8m0fnu \[64, 2\], not"):
        ops.mx_mm_into_(out, payload, payload, scales, scales.float())
    with pytest.raises(ValueError, match=r"multiples of 32; a is \[48, 64\]"):
        ops.mx_mm_into_(out, payload[:48], payload, scales[:48], scales)


def test_an_older_gpu_is_told_what_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    mx_cuda.check_device.cache_clear()
    with pytest.raises(UnsupportedDeviceError, match=r"mxfp8 needs .* 10.0 .* has 9.0: choose --fp8-recipe blockwise"):
        ops.check_mx(torch.device("cuda", 0))
    mx_cuda.check_device.cache_clear()
    ops.check_mx(torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_cast_on_a_gpu(case: Case) -> None:
    """The bits of the specification."""
    x = case.make("cuda")
    for rowwise, transposed in ((True, True), (True, False), (False, True)):
        expected = ops.quantize_mx(x.cpu(), E4M3, rowwise=rowwise, transposed=transposed)
        for actual, wanted in zip(
            ops.quantize_mx(x, E4M3, rowwise=rowwise, transposed=transposed), expected, strict=True
        ):
            nan = wanted.float().isnan()
            assert torch.equal(actual.cpu().float().isnan(), nan)
            assert torch.equal(actual.cpu().view(torch.uint8)[~nan], wanted.view(torch.uint8)[~nan])
