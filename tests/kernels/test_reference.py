"""The reference kernels against float64 and torch.optim."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fp8_megatron.dtypes import E4M3, E5M2, MAX_FINITE
from fp8_megatron.kernels import ops, reference
from fp8_megatron.kernels.gemm.reference import check_scaled_mm
from fp8_megatron.kernels.quantize import blockwise
from fp8_megatron.kernels.quantize import reference as quantize
from tests.kernels.cases import BLOCK_PAYLOADS, BLOCKS, FP8, MATRICES, Case, adam

INF, NAN = math.inf, math.nan


def snr_db(value: Tensor, truth: Tensor) -> float:
    """Signal-to-noise ratio in dB, in float64."""
    truth = truth.double()
    noise = (value.double() - truth).square().sum()
    return INF if noise == 0 else float(10 * torch.log10(truth.square().sum() / noise))


def bits(value: Tensor) -> Tensor:
    """The bytes of `value`, every NaN made the same."""
    value = value.contiguous()
    if not value.is_floating_point():
        return value
    nan = value.float().isnan()
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[value.element_size()]
    return torch.where(nan, torch.full_like(value.view(width), 0x7F), value.view(width))


def codes_of(dtype: torch.dtype) -> Tensor:
    """The 256 numbers of an FP8 format in float64, from its definition (arXiv 2209.05433, Table 1)."""
    mantissa_bits, bias = (3, 7) if dtype == E4M3 else (2, 15)
    numbers = []
    for code in range(256):
        sign = -1.0 if code & 0x80 else 1.0
        exponent, mantissa = (code & 0x7F) >> mantissa_bits, code & (2**mantissa_bits - 1)
        if dtype == E4M3 and code & 0x7F == 0x7F:
            number = NAN
        elif dtype == E5M2 and exponent == 31:
            number = NAN if mantissa else INF
        elif exponent == 0:
            number = mantissa * 2.0 ** (1 - bias - mantissa_bits)
        else:
            number = (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)
        numbers.append(sign * number)
    return torch.tensor(numbers, dtype=torch.float64)


def nearest_even(x: Tensor, dtype: torch.dtype) -> Tensor:
    """float64 `x` to the nearest finite number of an FP8 format, ties to the even code, by search in its table."""
    table = codes_of(dtype)[:128]
    table = table[table.isfinite()]  # magnitudes ascend with their codes
    middle = (table[1:] + table[:-1]) / 2
    magnitude = x.abs().contiguous()
    below = torch.bucketize(magnitude, middle, right=False)  # a tie goes to the lower code …
    above = torch.bucketize(magnitude, middle, right=True)  # … or to the upper one
    code = torch.where(below % 2 == 0, below, above)
    return torch.where(x.isnan(), x, table[code] * torch.where(torch.signbit(x), -1.0, 1.0))


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_decode_of_every_code(dtype: torch.dtype) -> None:
    payload = torch.arange(256, dtype=torch.uint8).view(dtype)
    truth = codes_of(dtype)
    assert torch.equal(bits(reference.decode(payload)), bits(truth.float()))
    scale = torch.tensor([0.375])
    torch.testing.assert_close(reference.decode(payload, scale).double(), truth * 0.375, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_encode_rounds_to_nearest_even_and_saturates(dtype: torch.dtype) -> None:
    limit = MAX_FINITE[dtype]
    table = codes_of(dtype)
    table = table[table.isfinite()]
    middles = (table[:-1] + table[1:]) / 2  # ties, exact in FP32
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(20000, generator=generator) * 2.0 ** (torch.rand(20000, generator=generator) * 30 - 18)
    x = torch.cat([table, middles, middles * (1 + 2**-20), middles * (1 - 2**-20), random.double()]).float()
    x = torch.cat([x, torch.tensor([limit, -limit, 1.01 * limit, 1e30, -1e30, INF, -INF, NAN, 0.0, -0.0])])
    encoded = reference.encode(x, torch.ones(1), dtype)
    truth = nearest_even(x.double().clamp(-limit, limit), dtype)
    assert torch.equal(bits(reference.decode(encoded)), bits(truth.float()))
    assert reference.decode(reference.encode(torch.tensor([INF]), torch.ones(1), dtype)) == limit


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", [*FP8, torch.float16], ids=str)
def test_scale_from_amax(dtype: torch.dtype, power_of_two: bool) -> None:
    limit = MAX_FINITE[dtype]
    amax = torch.tensor([0.0, INF, NAN, 1e-45, 1e-39, limit, limit * 2**-20, 3.0, 1.0, 2.0**127])
    scale = reference.scale_from_amax(amax, dtype, power_of_two=power_of_two)
    assert scale[0] == 1.0  # an all-zero tensor
    assert scale[1:3].isnan().all()  # nothing that is not finite may look like a number
    assert (scale[3:5] >= 2.0**-126).all()  # a reciprocal that is finite
    assert scale[5] == 1.0 and scale[6] == 2.0**-20
    exact = amax[5:].double() / limit
    if power_of_two:
        assert torch.equal(scale[5:].double(), 2.0 ** exact.log2().ceil())
        assert (torch.frexp(scale[3:]).mantissa == 0.5).all()
    else:
        # One correctly rounded division: half a unit in the last place, 2⁻²⁴ relative.
        torch.testing.assert_close(scale[5:].double(), exact, rtol=2**-24, atol=0)


def test_round_up_to_power_of_two() -> None:
    scale = torch.tensor([1.0, 1.0 + 2**-23, 1.5, 2.0, 2.0**-126, 1e-45, 0.7, INF])
    expected = torch.tensor([1.0, 2.0, 2.0, 2.0, 2.0**-126, 2.0**-126, 1.0, INF])
    assert torch.equal(reference.round_up_to_power_of_two(scale), expected)
    assert reference.round_up_to_power_of_two(torch.tensor([NAN])).isnan()


@pytest.mark.parametrize("case", [case for case in MATRICES if math.prod(case.shape) < 2**18], ids=str)
def test_amax(case: Case) -> None:
    x = case.make("cpu")
    # float64's own maximum of magnitudes, which propagates a NaN.
    torch.testing.assert_close(
        reference.amax(x).double(), x.double().abs().max().view(1), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_quantize_snr_of_a_gaussian(dtype: torch.dtype) -> None:
    x = Case((512, 1024), torch.float32).make("cpu")
    payload, _, scale = quantize.quantize_current(x, dtype, power_of_two=False, rowwise=True, transposed=False)
    measured = snr_db(reference.decode(payload, scale), x)
    # The error is uniform over the interval a number is rounded in, of width 2^(e - mantissa bits) in the binade
    # [2ᵉ, 2ᵉ⁺¹): a noise of width² / 12, averaged over where the numbers lie. 31.5 dB for E4M3, 6 less for E5M2.
    mantissa_bits, min_exponent = (3, -6) if dtype == E4M3 else (2, -14)
    exponent = torch.frexp((x / scale).double()).exponent - 1
    width = 2.0 ** (exponent.clamp_min(min_exponent) - mantissa_bits).double() * scale.double()
    predicted = float(10 * torch.log10(x.double().square().sum() / (width.square() / 12).sum()))
    assert abs(predicted - (31.5 if dtype == E4M3 else 25.5)) < 0.5
    # The ratio of n = 2¹⁹ samples scatters by about 10/ln 10 · √(2/n) = 0.01 dB; E5M2's intervals are wide enough for
    # the slope of the density inside one to show (0.07 dB).
    assert abs(measured - predicted) < 0.1


@pytest.mark.parametrize("case", [case for case in MATRICES if math.prod(case.shape) < 2**18], ids=str)
@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_quantize_layouts_agree(case: Case, dtype: torch.dtype) -> None:
    x = case.make("cpu")
    payload, payload_t, scale = ops.quantize_current(x, dtype, transposed=True)
    assert torch.equal(bits(payload.t()), bits(payload_t)) and payload_t.is_contiguous()
    assert torch.equal(bits(ops.transpose(payload)), bits(payload_t))
    recorded = torch.zeros(1)
    again, empty = ops.quantize_with_scale(x, scale, dtype, amax_out=recorded)
    assert torch.equal(bits(again), bits(payload)) and empty.numel() == 0
    torch.testing.assert_close(recorded, reference.amax(x), rtol=0, atol=0, equal_nan=True)
    neither = ops.quantize_current(x, dtype, rowwise=False, transposed=True)
    assert neither[0].numel() == 0 and torch.equal(bits(neither[1]), bits(payload_t))


def test_quantize_with_scale_raises_the_amax_and_saturates() -> None:
    x = torch.tensor([[3.0, -5.0]])
    recorded = torch.tensor([7.0])
    payload, _ = ops.quantize_with_scale(x, torch.tensor([0.01]), E4M3, amax_out=recorded)
    assert recorded == 7.0
    assert torch.equal(reference.decode(payload), torch.tensor([[288.0, -448.0]]))  # 300 rounds to 288; 500 saturates
    ops.quantize_with_scale(x * 2, torch.tensor([0.01]), E4M3, amax_out=recorded)
    assert recorded == 10.0


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("payload_dtype", BLOCK_PAYLOADS, ids=str)
def test_blockwise_round_trip(payload_dtype: torch.dtype, block: int) -> None:
    n = 16 * block
    x = Case((n,), torch.float32, "outlier").make("cpu") * torch.logspace(-20, 20, n)
    payload, scales = torch.empty(n, dtype=payload_dtype), torch.empty(16)
    ops.quantize_blockwise_(x, payload, scales)
    assert (torch.frexp(scales).mantissa == 0.5).all()
    decoded = ops.dequantize_blockwise(payload, scales)
    # Half a step: 2^-(mantissa bits + 1) of a normal number, half the smallest number of one that is not.
    mantissa_bits, smallest = (3, 2.0**-9) if payload_dtype == E4M3 else (10, 2.0**-24)
    bound = torch.maximum(x.abs() * 2.0 ** -(mantissa_bits + 1), (scales * smallest / 2).repeat_interleave(block))
    assert ((decoded - x).abs() <= bound).all()
    # Encoding what was decoded changes nothing, or states would drift while they are only stored and loaded. (The
    # scale may halve where the block's largest number was rounded down to a power of two: what it means stays.)
    again, again_scales = torch.empty_like(payload), torch.empty_like(scales)
    ops.quantize_blockwise_(decoded, again, again_scales)
    assert torch.equal(bits(ops.dequantize_blockwise(again, again_scales)), bits(decoded))


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_blockwise_poisons_only_the_block_that_is_not_finite(bad: float) -> None:
    x = torch.randn(512)
    x[200] = bad
    payload, scales = torch.empty(512, dtype=E4M3), torch.empty(4)
    ops.quantize_blockwise_(x, payload, scales)
    decoded = ops.dequantize_blockwise(payload, scales)
    assert decoded[128:256].isnan().all() and decoded[:128].isfinite().all() and decoded[256:].isfinite().all()
    assert ops.squared_norm(payload, scales).isnan()


def test_squared_norm() -> None:
    numel = 1 << 20
    x = Case((numel,), torch.float32).make("cpu")
    payload, scales = torch.empty(numel, dtype=E4M3), torch.empty(numel // 128)
    ops.quantize_blockwise_(x, payload, scales)
    truth = ops.dequantize_blockwise(payload, scales).double().square().sum()
    # Added in pairs: log₂ n · 2⁻²⁴ at most; one after the other it was 9e-5 for 5 million on one processor.
    torch.testing.assert_close(ops.squared_norm(payload, scales).double()[0], truth, rtol=2e-6, atol=0)
    torch.testing.assert_close(ops.squared_norm(x, None).double()[0], x.double().square().sum(), rtol=2e-6, atol=0)


@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)], ids=str)
def test_scaled_mm(formats: tuple[torch.dtype, torch.dtype]) -> None:
    m, n, k = 48, 80, 256
    a, _, scale_a = ops.quantize_current(Case((m, k)).make("cpu", 1), formats[0])
    b, _, scale_b = ops.quantize_current(Case((n, k)).make("cpu", 2), formats[1])
    bias = torch.randn(n, dtype=torch.bfloat16)
    truth = (codes_of(formats[0])[a.view(torch.uint8).int()] * scale_a.double()) @ (
        codes_of(formats[1])[b.view(torch.uint8).int()] * scale_b.double()
    ).t() + bias.double()
    out = ops.scaled_mm(a, b, scale_a, scale_b, bias=bias, out_dtype=torch.float32)
    # √K roundings of 2⁻²⁵ each: 16 · 3e-8 = 5e-7, 126 dB; 110 leaves room for an unlucky order of summation.
    assert snr_db(out, truth) > 110
    out = ops.scaled_mm(a, b, scale_a, scale_b, bias=bias)
    # BF16's rounding: a step of 2⁻⁷ in [1, 2), noise 2⁻¹⁴ / 12, mean square 7/3 there: 56.6 dB.
    assert out.dtype == torch.bfloat16 and snr_db(out, truth) > 55


def test_check_scaled_mm_names_what_hopper_refuses() -> None:
    def zeros(m: int, n: int, dtype: torch.dtype = E4M3) -> Tensor:
        return torch.zeros(m, n).to(dtype)

    check_scaled_mm(zeros(16, 32), zeros(48, 32))
    with pytest.raises(ValueError, match="E5M2"):
        check_scaled_mm(zeros(16, 32, E5M2), zeros(48, 32, E5M2))
    with pytest.raises(ValueError, match="bfloat16"):
        check_scaled_mm(zeros(16, 32, torch.bfloat16), zeros(48, 32))
    with pytest.raises(ValueError, match="K-major"):
        check_scaled_mm(zeros(16, 32), zeros(32, 48).t())
    with pytest.raises(ValueError, match="differ in K"):
        check_scaled_mm(zeros(16, 32), zeros(48, 64))
    for m, n, k, name in ((8, 16, 16, "M=8"), (16, 24, 16, "N=24"), (16, 16, 40, "K=40")):
        with pytest.raises(ValueError, match=name):
            ops.scaled_mm(zeros(m, k), zeros(n, k), torch.ones(1), torch.ones(1))


@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
def test_adamw_step_against_torch(decoupled: bool) -> None:
    n, lr, betas, eps, weight_decay, steps = 1000, 1e-2, (0.9, 0.999), 1e-8, 0.1, 20
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(n, generator=generator)
    parameter = torch.nn.Parameter(master.double())
    optimizer = (torch.optim.AdamW if decoupled else torch.optim.Adam)(
        [parameter], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay
    )
    exp_avg, exp_avg_sq, weight = torch.zeros(n), torch.zeros(n), torch.empty(n, dtype=torch.bfloat16)
    for step in range(1, steps + 1):
        grad = torch.randn(n, generator=generator)
        parameter.grad = 0.5 * grad.double()
        optimizer.step()
        ops.adamw_step_(
            **adam(
                grad,
                None,
                exp_avg,
                None,
                exp_avg_sq,
                None,
                master,
                None,
                weight,
                None,
                torch.tensor([0.5]),
                torch.tensor([float(step)]),
                lr=lr,
                beta1=betas[0],
                beta2=betas[1],
                eps=eps,
                weight_decay=weight_decay,
                decoupled=decoupled,
            )
        )
    # Against float64, per step: two roundings of the parameter (|p| < 4: 2 · 2⁻²³) and of the update (|u| ≤ lr) the
    # relative error of 1 - 0.999ᵗ in FP32, 2⁻²⁵ · t / (t · 0.001) = 3e-5, halved by the root. Over 20 steps 8e-6.
    torch.testing.assert_close(master.double(), parameter.detach(), rtol=0, atol=1e-5)
    assert torch.equal(weight, master.bfloat16())


class O3State:
    """Flat states of level O3 beside the same in FP32, stepped with the same gradients."""

    n = 8192

    def __init__(self) -> None:
        self.hyper = dict(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, decoupled=True)
        n = self.n
        master = torch.randn(n, generator=torch.Generator().manual_seed(0)) * 0.02
        self.exact = [torch.zeros(n), torch.zeros(n), master.clone()]
        self.states: list[Tensor] = []
        for dtype, value in ((E4M3, torch.zeros(n)), (torch.float16, torch.zeros(n)), (torch.float16, master)):
            payload, scales = torch.empty(n, dtype=dtype), torch.empty(n // 256)
            blockwise.quantize_blockwise_(value, payload, scales)
            self.states += [payload, scales]
        self.grad = torch.empty(n, dtype=E4M3)
        self.grad_scales = torch.empty(n // 128)
        self.chunk_amax = torch.empty(2)

    def step(self, grad: Tensor, grad_factor: float, step: int) -> None:
        ops.quantize_blockwise_(grad, self.grad, self.grad_scales)
        factor, count = torch.tensor([grad_factor]), torch.tensor([float(step)])
        ops.adamw_step_(
            **adam(self.grad, self.grad_scales, *self.states, None, self.chunk_amax, factor, count, **self.hyper)
        )
        m, v, p = self.exact
        ops.adamw_step_(**adam(grad, None, m, None, v, None, p, None, None, None, factor, count, **self.hyper))

    def master(self) -> Tensor:
        return ops.dequantize_blockwise(self.states[4], self.states[5])


def test_adamw_step_in_level_o3_follows_fp32() -> None:
    state = O3State()
    start = state.exact[2].clone()
    generator = torch.Generator().manual_seed(1)
    for step in range(1, 51):
        state.step(1e-3 * torch.randn(state.n, generator=generator), 1.0, step)
    # Noise of the master after 50 steps. Rounding to FP16: a step of 2⁻¹⁰ is 74.6 dB once, 57.6 fifty times. Update:
    # E4M3 (31.5 dB) rounds the gradient once and the moment at each step, stochastically (twice the power), of which
    # about five rounds are still alive in it: 31.5 - 10 log₁₀(11) = 21 dB below a travel that is 28 dB below the
    # weights (4% of them): 49 dB.
    assert snr_db(state.master(), state.exact[2]) > 48
    # What was learned, the travel alone, must be there too, not only the weights it started from.
    assert snr_db(state.master() - start, state.exact[2] - start) > 20


def test_adamw_step_reports_the_amax_of_the_stored_master() -> None:
    state = O3State()
    state.step(torch.randn(state.n), 1.0, 1)
    assert torch.equal(state.chunk_amax, state.master().abs().view(2, -1).amax(dim=1))


@pytest.mark.parametrize("factor", [NAN, INF, -INF])
def test_adamw_step_is_skipped_where_the_factor_is_not_finite(factor: float) -> None:
    state = O3State()
    state.step(torch.randn(state.n), 1.0, 1)
    before = [tensor.clone() for tensor in [*state.states, *state.exact, state.chunk_amax]]
    state.step(torch.randn(state.n), factor, 2)
    for old, new in zip(before, [*state.states, *state.exact, state.chunk_amax], strict=True):
        assert torch.equal(bits(old), bits(new))


def test_derive_fp8_weights() -> None:
    n, chunk = 8 * 256, 512
    master = torch.randn(n) * torch.tensor([1.0, 1.0, 100.0, 1e-3]).repeat_interleave(chunk)
    payload, scales = torch.empty(n, dtype=torch.float16), torch.empty(8)
    ops.quantize_blockwise_(master, payload, scales)
    stored = ops.dequantize_blockwise(payload, scales)
    chunk_tensor = torch.tensor([0, 0, 1, 2], dtype=torch.int32)
    tensors = stored.split([2 * chunk, chunk, chunk])
    weight_scales = torch.stack([reference.scale_from_amax(t.abs().max(), E4M3, power_of_two=False) for t in tensors])
    weights = torch.empty(n, dtype=E4M3)
    ops.derive_fp8_weights_(payload, scales, weights, weight_scales, chunk_tensor)
    for tensor, weight, scale in zip(tensors, weights.split([2 * chunk, chunk, chunk]), weight_scales, strict=True):
        one, _ = ops.quantize_with_scale(tensor.view(1, -1), scale.view(1), E4M3)
        assert torch.equal(bits(one.view(-1)), bits(weight))


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3, 4])
def test_accumulate_rows(num_rows: int, add: bool) -> None:
    """One FP32 rounding for each product and each sum, in the order of the rows; nothing but the accumulator moves."""
    n, factor = 3 * 128, 1.0 / num_rows
    payload, scales = torch.empty(num_rows * n, dtype=E4M3), torch.empty(num_rows * n // 128)
    ops.quantize_blockwise_(torch.randn(num_rows * n), payload, scales)
    before = [payload.view(torch.uint8).clone(), scales.clone()]
    accumulator = torch.randn(n)
    expected = accumulator.clone() if add else torch.full((n,), -0.0)  # -0 + x is x
    for row in range(num_rows):
        row_scales = (scales.view(num_rows, -1)[row] * factor).repeat_interleave(128)
        expected = expected + payload.view(num_rows, n)[row].float() * row_scales
    ops.accumulate_rows_(payload, scales, accumulator, factor=factor, add=add)
    assert torch.equal(bits(accumulator), bits(expected))
    assert torch.equal(payload.view(torch.uint8), before[0]) and torch.equal(scales, before[1])


def test_an_addend_is_added_to_the_rounded_sum() -> None:
    """As a reduction in BF16 and an addition behind it do, so that who carries the rows does not change the result."""
    rows, addend = torch.randn(2, 384).bfloat16(), 30 * torch.randn(384).bfloat16()
    total = torch.full((384,), torch.nan, dtype=torch.bfloat16)
    ops.accumulate_rows_(rows.view(-1), None, total, factor=1.0, add=False, addend=addend)
    assert torch.equal(total, addend + (rows[0] + rows[1]))


@pytest.mark.parametrize("dtype", [*BLOCK_PAYLOADS, torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("numel", [1, 256, 300, 1023])
def test_a_shorter_input_is_filled_up_with_zeros(numel: int, dtype: torch.dtype) -> None:
    x = torch.rand(numel)
    payload, scales = torch.empty(1024, dtype=dtype), torch.empty(4)
    expected, expected_scales = torch.empty(1024, dtype=dtype), torch.empty(4)
    ops.quantize_blockwise_(x, payload, scales)
    ops.quantize_blockwise_(torch.cat([x, torch.zeros(1024 - numel)]), expected, expected_scales)
    assert torch.equal(bits(payload), bits(expected)) and torch.equal(scales, expected_scales)
