"""cuBLASLt called directly: bit for bit what torch's own call gives."""

from __future__ import annotations

import pytest
import torch

from fp8_megatron.dtypes import E4M3, E5M2, MAX_FINITE
from fp8_megatron.kernels.gemm import cublaslt

pytestmark = pytest.mark.gpu


def _operands(m: int, n: int, k: int, a_dtype: torch.dtype = E4M3) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(m + n + k)
    a, b = (torch.randn(rows, k, device="cuda", generator=generator) for rows in (m, n))
    scales = (torch.rand(2, 4, device="cuda", generator=generator) + 0.5)[:, :1]  # 16 bytes apart
    return a.to(a_dtype), b.to(E4M3), scales[0], scales[1]


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("use_fast_accum", [False, True])
@pytest.mark.parametrize("a_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("shape", [(16, 16, 16), (512, 1536, 256), (4096, 1024, 8192)], ids=str)
def test_equal_to_torch(
    shape: tuple[int, int, int], a_dtype: torch.dtype, use_fast_accum: bool, out_dtype: torch.dtype
) -> None:
    a, b, scale_a, scale_b = _operands(*shape, a_dtype)
    for bias in (None, torch.randn(shape[1], device="cuda").bfloat16()):
        if bias is not None and out_dtype is torch.float32:
            continue  # torch refuses it
        expected = torch._scaled_mm(
            a, b.t(), scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=out_dtype, use_fast_accum=use_fast_accum
        )
        out = torch.full_like(expected, torch.nan)
        for _ in range(2):  # the plan is made, then used
            cublaslt.matmul(a, b, scale_a, scale_b, bias, out, use_fast_accum=use_fast_accum)
            assert torch.equal(out, expected)


def test_each_call_takes_its_own_scales() -> None:
    a, b, scale_a, scale_b = _operands(256, 128, 64)
    once, twice = (torch.empty(256, 128, dtype=torch.float32, device="cuda") for _ in range(2))
    cublaslt.matmul(a, b, scale_a, scale_b, None, once, use_fast_accum=False)
    cublaslt.matmul(a, b, (2 * scale_a).clone(), scale_b, None, twice, use_fast_accum=False)
    assert torch.equal(twice, 2 * once)


@pytest.mark.parametrize(("a_dtype", "out_dtype"), [(E4M3, E4M3), (E5M2, E4M3), (E5M2, E5M2)])
@pytest.mark.parametrize("shape", [(16, 32, 16), (512, 1536, 256), (4096, 1024, 8192)], ids=str)
def test_the_gemm_casts_its_result_itself(
    shape: tuple[int, int, int], a_dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    a, b, scale_a, scale_b = _operands(*shape, a_dtype)
    product = torch._scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.float32)
    out = torch.empty(shape[:2], dtype=out_dtype, device="cuda")
    amax, inverse = torch.zeros(2, 4, device="cuda")[:, :1]
    largest = MAX_FINITE[out_dtype]
    for headroom in (4.0, 1.0, 0.25):  # the last one saturates
        inverse.copy_(largest / (headroom * product.abs().max()))
        amax.zero_()
        cublaslt.matmul(a, b, scale_a, scale_b, None, out, use_fast_accum=False, inverse=inverse, amax=amax)
        assert amax.item() == pytest.approx(product.abs().max().item(), rel=1e-5)
        expected = (product * inverse).clamp(-largest, largest).to(out_dtype)
        # Sums in another order round the other way at times: to the next number of 3 bits of mantissa, or of 2.
        assert (out.view(torch.uint8) == expected.view(torch.uint8)).float().mean() > 0.999
        rtol, atol = (0.13, 2**-9) if out_dtype is E4M3 else (0.26, 2**-16)
        torch.testing.assert_close(out.float(), expected.float(), rtol=rtol, atol=atol)


def test_a_nan_stays_one_in_fp8() -> None:
    a, b, scale_a, scale_b = _operands(256, 128, 64)
    a.view(torch.uint8)[3, 5] = 0x7F
    out = torch.empty(256, 128, dtype=E4M3, device="cuda")
    amax, inverse = torch.ones(2, 4, device="cuda")[:, :1]
    cublaslt.matmul(a, b, scale_a, scale_b, None, out, use_fast_accum=False, inverse=inverse, amax=amax)
    assert out[3].float().isnan().all() and out[4].float().isfinite().all()


def test_a_refusal_names_the_problem() -> None:
    a, b, scale_a, _ = _operands(256, 128, 64)
    unaligned = torch.ones(4, device="cuda")[1:2]
    out = torch.empty(256, 128, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(RuntimeError, match=r"cuBLASLt .*float8_e4m3fn \[256, 64\] × .* \[128, 64\]ᵀ"):
        cublaslt.matmul(a, b, scale_a, unaligned, None, out, use_fast_accum=False)


@pytest.mark.parametrize("use_fast_accum", [False, True])
@pytest.mark.parametrize("shape", [(16, 32, 16), (512, 1536, 256), (4096, 1024, 8192)], ids=str)
def test_the_gemm_adds_and_rounds_once(shape: tuple[int, int, int], use_fast_accum: bool) -> None:
    """Within one BF16 step of the sum in FP32, whose products may be added up in another order."""
    a, b, scale_a, scale_b = _operands(*shape)
    addend = (torch.randn(shape[:2], device="cuda") * 100).bfloat16()
    for bias in (None, torch.randn(shape[1], device="cuda").bfloat16()):
        product = torch._scaled_mm(
            a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.float32, use_fast_accum=use_fast_accum
        )
        exact = product + addend.float() + (0 if bias is None else bias.float())
        for given in (addend, addend.clone()):  # the plan is made, then used with another address
            before = given.clone()
            out = torch.full_like(addend, torch.nan)
            cublaslt.matmul(a, b, scale_a, scale_b, bias, out, use_fast_accum=use_fast_accum, addend=given)
            assert ((out.float() - exact).abs() <= 2**-8 * exact.abs() + 1e-3 * product.abs().max()).all()
            assert torch.equal(given, before)
        wrong = (out != exact.bfloat16()).float().mean()
        assert wrong < 0.02 or use_fast_accum, wrong
