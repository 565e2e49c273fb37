"""Explicit casts and products of `msamp`, against float64."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch


@pytest.fixture(autouse=True)
def names(msamp: ModuleType) -> None:
    """The module is importable."""


def _qtypes() -> list:
    from msamp.common.dtype import Dtypes

    return [Dtypes.kfloat8_e4m3, Dtypes.kfloat8_e5m2, Dtypes.kfloat16, Dtypes.kbfloat16, Dtypes.kfloat32]


#: Half a unit in the last place, relative: 2^-(mantissa bits + 1).
HALF_UNIT = {"kFloat8E4M3": 2**-4, "kFloat8E5M2": 2**-3, "kFloat16": 2**-11, "kBFloat16": 2**-8, "kFloat32": 2**-24}
#: The least subnormal of FP8 over its largest number; half of it is the most that a tiny value loses.
SUBNORMAL = {"kFloat8E4M3": 2**-9 / 448, "kFloat8E5M2": 2**-16 / 57344}


def test_a_cast_loses_half_a_unit() -> None:
    from msamp.common.tensor import cast

    x = torch.randn(7, 33) * 1e-3
    for qtype in _qtypes():
        y = cast(x, qtype)
        assert y.shape == x.shape and y.qtype == qtype
        # A power-of-two scale leaves up to a factor of two of the range unused.
        floor = SUBNORMAL.get(qtype.name, 0.0) * x.abs().max().item()
        assert ((y.float() - x).abs() <= x.abs() * HALF_UNIT[qtype.name] + floor).all(), qtype


def test_the_scale_is_a_power_of_two_that_keeps_the_amax() -> None:
    from msamp.common.dtype import Dtypes, Floating
    from msamp.common.tensor import ScalingMeta

    amax = torch.tensor([0.0, 1e-6, 3.0, 448.0, 1e6, float("inf"), float("nan")])
    before = torch.full_like(amax, 7.0)
    scale = ScalingMeta.compute_scaling_factor(amax, before, Floating.qfp_max[Dtypes.kfloat8_e4m3], 0)
    assert scale[[0, 5, 6]].tolist() == [7.0] * 3  # nothing to go by: the scale before
    used = amax[1:5] * scale[1:5]
    assert ((used > 224) & (used <= 448)).all()
    assert torch.frexp(scale[1:5]).mantissa.tolist() == [0.5] * 4


def test_a_given_scale_saturates() -> None:
    from msamp.common.dtype import Dtypes
    from msamp.common.tensor import ScalingMeta, TypeCast

    meta = ScalingMeta(Dtypes.kfloat8_e4m3)
    with ScalingMeta.in_time_scaling_context(False):
        payload = TypeCast.cast_to_fp8(torch.tensor([1.0, 1000.0, -1000.0]), meta)
    assert TypeCast.cast_from_fp8(payload, meta, Dtypes.kfloat32).tolist() == [1.0, 448.0, -448.0]
    assert ScalingMeta.in_time_scaling


def test_a_product_of_any_size() -> None:
    from msamp.common.dtype import Dtypes
    from msamp.common.tensor import cast
    from msamp.operators.gemm import Gemm

    a, b, bias = torch.randn(5, 19), torch.randn(7, 19), torch.randn(5)
    fp8_a, fp8_b = cast(a, Dtypes.kfloat8_e4m3), cast(b, Dtypes.kfloat8_e5m2)
    exact = fp8_b.float().double() @ fp8_a.float().double().t()
    out = Gemm.fp8_gemm(fp8_a, fp8_b, Dtypes.kfloat32, bias=bias)
    # FP32 sums of 19 products: 19 roundings of at most the largest partial sum.
    limit = 20 * 2**-24 * (fp8_b.float().abs() @ fp8_a.float().abs().t()).max().item()
    assert (out - bias - exact).abs().max() <= 2 * limit
    start = torch.ones(7, 5)
    assert torch.equal(Gemm.fp8_gemm(fp8_a, fp8_b, Dtypes.kfloat32, accumulate=True, out=start), out - bias + 1)


def test_adding_to_fp8_rounds_the_sum_once() -> None:
    from msamp.common.dtype import Dtypes
    from msamp.common.tensor import cast
    from msamp.operators.arithmetic import Arithmetic

    x, other = torch.randn(4, 24), torch.randn(4, 24)
    total = cast(x, Dtypes.kfloat8_e4m3)
    expected = cast(total.float() + other, Dtypes.kfloat8_e4m3)
    Arithmetic.add_to_fp8(total.value, total.meta, other)
    assert torch.equal(total.value, expected.value) and torch.equal(total.meta.scale_inv, expected.meta.scale_inv)


def test_torch_knows_the_few_functions_that_it_is_handed() -> None:
    from msamp.common.dtype import Dtypes
    from msamp.common.tensor import cast

    x = cast(torch.randn(4, 24), Dtypes.kfloat8_e4m3)
    assert not torch.is_floating_point(x) and torch.zeros_like(x).shape == (4, 24)
    found_inf, values = torch.zeros(1), x.float()
    torch._amp_foreach_non_finite_check_and_unscale_([x, torch.ones(2)], found_inf, torch.tensor(0.25))
    assert found_inf.item() == 0 and torch.equal(x.float(), values * 0.25)
    with pytest.raises(TypeError, match=r"torch\.matmul does not take a ScalingTensor: call \.float\(\)"):
        torch.matmul(x, torch.ones(24, 4))
