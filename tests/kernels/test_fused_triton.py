"""Norm and activation fused with their casts, on a GPU against their specification computed on the CPU.

Sums over a row and σ are rounded otherwise there: a payload may differ by one code where a value falls beside a
rounding boundary, which an FP32 error of 1e-6 makes of about 1e-6 · 2⁴ of the elements; 1e-3 are allowed.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8_megatron.activation_functions import KINDS, Activation
from fp8_megatron.dtypes import E4M3, E5M2
from fp8_megatron.kernels import ops, reference
from fp8_megatron.kernels.activation import reference as activation
from fp8_megatron.kernels.cross_entropy import reference as cross_entropy
from fp8_megatron.kernels.norm import reference as norm
from fp8_megatron.kernels.quantize import reference as qkv
from fp8_megatron.kernels.quantize import reference as quantize
from fp8_megatron.kernels.wire import reference as wire
from fp8_megatron.quantization.stats import snr_db

pytestmark = pytest.mark.gpu

SHAPES = [(16, 32), (260, 1008), (1024, 1024), (512, 5120), (2052, 4096)]
FP32_DB = 110.0
BF16_DB = 60.0


def normal(*shape: int, seed: int, size: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * size).to(dtype)


def cuda(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else tensor.cuda() for tensor in tensors]


def assert_same_payload(measured: Tensor, expected: Tensor) -> None:
    assert measured.shape == expected.shape and measured.dtype == expected.dtype
    codes, wanted = measured.cpu().view(torch.uint8), expected.view(torch.uint8)
    magnitude, wanted_magnitude = codes & 0x7F, wanted & 0x7F
    # 0 and −0 differ by the sign bit alone, and a derivative of 0 has either.
    differs = (codes != wanted) & ((magnitude | wanted_magnitude) != 0)
    assert differs.float().mean() < 1e-3
    # Codes are ordered as magnitudes are.
    steps = magnitude.int() - wanted_magnitude.int()
    assert steps.abs().max() <= 1


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rms", [False, True], ids=["layernorm", "rmsnorm"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("power_of_two", [False, True], ids=["exact", "pow2"])
def test_norm_quantize(shape: tuple[int, int], rms: bool, has_bias: bool, power_of_two: bool) -> None:
    x = normal(*shape, seed=1, size=3.0) + 0.5
    weight, bias = 1 + normal(shape[1], seed=2, size=0.3), normal(shape[1], seed=3, size=0.3) if has_bias else None
    settings = {"eps": 1e-5, "rms": rms, "scale": None, "power_of_two": power_of_two}
    payload, scale, mean, rstd = norm.norm_quantize(x, weight, bias, E4M3, **settings)
    measured = ops.norm_quantize(*cuda(x, weight, bias), E4M3, **settings)
    torch.testing.assert_close(measured[1].cpu(), scale, rtol=1e-5, atol=0)
    torch.testing.assert_close(measured[2].cpu(), mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(measured[3].cpu(), rstd, rtol=1e-5, atol=0)
    assert_same_payload(measured[0], payload)
    amax = ops.norm_amax(*cuda(x, weight, bias), eps=1e-5, rms=rms)
    torch.testing.assert_close(amax.cpu(), norm.norm_amax(x, weight, bias, eps=1e-5, rms=rms), rtol=1e-5, atol=0)

    given, recorded = scale * 2, torch.zeros(1, device="cuda")
    again = ops.norm_quantize(*cuda(x, weight, bias), E4M3, eps=1e-5, rms=rms, scale=given.cuda(), amax_out=recorded)[0]
    assert_same_payload(
        again,
        norm.norm_quantize(x, weight, bias, eps=1e-5, rms=rms, dtype=E4M3, scale=given)[0],
    )
    torch.testing.assert_close(recorded, amax, rtol=1e-6, atol=0)
    for transposed in (False, True):
        if transposed and shape[0] % 4:
            continue
        requantized = ops.norm_requantize(*cuda(x, weight, bias, mean, rstd, given), E4M3, transposed=transposed)
        expected = norm.norm_requantize(x, weight, bias, mean, rstd, given, E4M3, transposed=transposed)
        assert_same_payload(requantized, expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rms", [False, True], ids=["layernorm", "rmsnorm"])
def test_norm_in_16_bits(shape: tuple[int, int], rms: bool) -> None:
    x, weight = normal(*shape, seed=1, size=3.0) + 0.5, 1 + normal(shape[1], seed=2, size=0.3)
    bias = None if rms else normal(shape[1], seed=3, size=0.3)
    y, mean, rstd = norm.norm(x, weight, bias, eps=1e-5, rms=rms)
    measured = ops.norm(*cuda(x, weight, bias), eps=1e-5, rms=rms)
    assert measured[0].dtype == torch.bfloat16
    assert snr_db(measured[0].cpu(), y) > BF16_DB
    torch.testing.assert_close(measured[1].cpu(), mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(measured[2].cpu(), rstd, rtol=1e-5, atol=0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rms", [False, True], ids=["layernorm", "rmsnorm"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("has_residual", [False, True], ids=["alone", "residual"])
def test_norm_backward(shape: tuple[int, int], rms: bool, has_bias: bool, has_residual: bool) -> None:
    x, weight = normal(*shape, seed=1, size=3.0) + 0.5, 1 + normal(shape[1], seed=2, size=0.3)
    grad, residual = normal(*shape, seed=4, size=1e-3), normal(*shape, seed=5, size=1e-3) if has_residual else None
    mean, rstd = norm.statistics(x, 1e-5, rms)
    expected = norm.norm_backward(grad[None], residual, x, weight, mean, rstd, has_bias=has_bias)
    measured = ops.norm_backward(*cuda(grad[None], residual, x, weight, mean, rstd), has_bias=has_bias)
    assert snr_db(measured[0].cpu(), expected[0]) > BF16_DB
    assert snr_db(measured[1].cpu(), expected[1]) > FP32_DB
    assert measured[2].shape == expected[2].shape
    if has_bias:
        assert snr_db(measured[2].cpu(), expected[2]) > FP32_DB


@pytest.mark.parametrize("num_parts", [2, 3, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norm_backward_of_summands(shape: tuple[int, int], num_parts: int) -> None:
    """Bit for bit that of their sum in rank order, rounded once."""
    x, weight, residual = normal(*shape, seed=1), 1 + normal(shape[1], seed=2, size=0.3), normal(*shape, seed=5)
    parts = normal(num_parts, *shape, seed=4)
    operands = cuda(residual, x, weight, *norm.statistics(x, 1e-5, False))
    measured = ops.norm_backward(parts.cuda(), *operands, has_bias=True)
    expected = ops.norm_backward(wire.sum_of_rows(parts)[None].cuda(), *operands, has_bias=True)
    assert torch.equal(measured[0], expected[0])
    for mine, theirs in zip(measured[1:], expected[1:], strict=True):
        assert snr_db(mine, theirs) > FP32_DB


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("power_of_two", [False, True], ids=["exact", "pow2"])
def test_activation(shape: tuple[int, int], kind: str, power_of_two: bool) -> None:
    (rows, width), function = shape, Activation(kind)
    z = normal(rows, function.row.num_inputs * width, seed=1, size=3.0)
    grad = normal(*shape, seed=2, size=1e-4)
    payload, scale = activation.activation_quantize(z, function, E4M3, scale=None, power_of_two=power_of_two)
    measured, taken = ops.activation_quantize(z.cuda(), function, E4M3, scale=None, power_of_two=power_of_two)
    torch.testing.assert_close(taken.cpu(), scale, rtol=1e-5, atol=0)
    assert_same_payload(measured, payload)
    recorded = torch.zeros(1, device="cuda")
    again, _ = ops.activation_quantize(z.cuda(), function, E4M3, scale=taken, amax_out=recorded)
    assert torch.equal(again.view(torch.uint8), measured.view(torch.uint8))
    torch.testing.assert_close(recorded, ops.activation_amax(z.cuda(), function), rtol=1e-6, atol=0)

    settings = {"scale": None, "power_of_two": power_of_two, "activation_dtype": E4M3, "column_sums": True}
    expected = activation.activation_backward_quantize(grad, z, function, E5M2, **settings, activation_scale=scale)
    on_gpu = cuda(grad, z)
    result = ops.activation_backward_quantize(*on_gpu, function, E5M2, **settings, activation_scale=scale.cuda())
    for index in range(3):
        assert_same_payload(result[index], expected[index])
        if kind == "squared_relu":  # no fast exponential
            assert torch.equal(result[index].cpu().view(torch.uint8), expected[index].view(torch.uint8))
    assert snr_db(result[3].cpu(), expected[3]) > FP32_DB - 10
    torch.testing.assert_close(result[4].cpu(), expected[4], rtol=1e-5, atol=0)
    recorded = torch.zeros(1, device="cuda")
    given = ops.activation_backward_quantize(
        *cuda(grad, z), function, E5M2, scale=result[4], amax_out=recorded,
        activation_dtype=E4M3, activation_scale=scale.cuda(), column_sums=False,
    )  # fmt: skip
    assert torch.equal(given[0].view(torch.uint8), result[0].view(torch.uint8)) and given[3].numel() == 0
    torch.testing.assert_close(recorded, ops.activation_backward_amax(*cuda(grad, z), function), rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(16, 32), (260, 1008), (2052, 4096)], ids=str)
@pytest.mark.parametrize("current", [True, False], ids=["current", "given"])
def test_quantize_grad_output(shape: tuple[int, int], current: bool) -> None:
    x = normal(*shape, seed=1, size=1e-3)
    scale = None if current else torch.full((1,), 1e-7)
    expected = quantize.quantize_grad_output(x, E5M2, scale=scale)
    given = None if scale is None else scale.cuda()
    measured = ops.quantize_grad_output(x.cuda(), E5M2, scale=given)
    for index in (0, 1):
        assert torch.equal(measured[index].cpu().view(torch.uint8), expected[index].view(torch.uint8))
    assert snr_db(measured[2].cpu(), expected[2]) > FP32_DB
    assert torch.equal(measured[3].cpu(), expected[3])
    rows, nothing, sums, _ = ops.quantize_grad_output(x.cuda(), E5M2, scale=given, transposed=False)
    assert torch.equal(rows.view(torch.uint8), measured[0].view(torch.uint8)) and nothing.numel() == 0
    assert torch.equal(sums, measured[2])


@pytest.mark.parametrize("widths", [(64, 64, 64), (256, 128, 128), (160, 80, 80)], ids=str)
@pytest.mark.parametrize("layout", ["sbgw", "bgsw"])
@pytest.mark.parametrize("current", [True, False], ids=["current", "given"])
def test_quantize_qkv_grad(widths: tuple[int, ...], layout: str, current: bool) -> None:
    """Bitwise, from contiguous gradients and from attention's own layout [b, groups, s, width]."""
    grads = [normal(36, 3, 2, width, seed=seed, size=1e-3) for seed, width in enumerate(widths)]
    if layout == "bgsw":
        grads = [grad.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3) for grad in grads]
    scale = None if current else torch.full((1,), 1e-7)
    expected = qkv.quantize_qkv_grad(grads, E5M2, scale=scale, column_sums=True)
    recorded = None if current else torch.zeros(1, device="cuda")
    measured = ops.quantize_qkv_grad(
        [grad.cuda() for grad in grads], E5M2, scale=None if scale is None else scale.cuda(), amax_out=recorded,
        column_sums=True,
    )  # fmt: skip
    for index in (0, 1):
        assert torch.equal(measured[index].cpu().view(torch.uint8), expected[index].view(torch.uint8))
    assert snr_db(measured[2].cpu(), expected[2]) > FP32_DB
    assert torch.equal(measured[3].cpu(), expected[3])
    if recorded is not None:
        assert recorded.item() == max(grad.abs().max().item() for grad in grads)


@pytest.mark.parametrize("shape", [(3, 64), (64, 50304), (17, 5000)], ids=str)
@pytest.mark.parametrize("offset", [0, 100], ids=["whole", "shard"])
def test_cross_entropy(shape: tuple[int, int], offset: int) -> None:
    logits = normal(*shape, seed=1, size=5.0)
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(shape[1], (shape[0],), generator=generator)
    grad = torch.rand(shape[0], generator=generator)
    expected = cross_entropy.cross_entropy_statistics(logits, labels, first=offset, num_columns=shape[1])
    on_gpu = logits.cuda()
    measured = ops.cross_entropy_statistics(on_gpu, labels.cuda(), first=offset)
    assert torch.equal(measured[0].cpu(), expected[0]) and torch.equal(measured[2].cpu(), expected[2])
    torch.testing.assert_close(measured[1].cpu(), expected[1], rtol=1e-5, atol=0)
    log_sum_exp = expected[0] + expected[1].log()
    cross_entropy.cross_entropy_backward_(logits, labels, log_sum_exp, grad, first=offset, num_columns=shape[1])
    ops.cross_entropy_backward_(on_gpu, *(x.cuda() for x in (labels, log_sum_exp, grad)), first=offset)
    assert snr_db(on_gpu.cpu(), logits) > BF16_DB


@pytest.mark.parametrize(
    ("shape", "num_columns"),
    [((16, 64), 41), ((16, 64), 0), ((64, 50304), 50257), ((64, 8448), 4096), ((1000, 16768), 16721)],
    ids=str,
)
def test_padding_takes_no_part_in_the_cross_entropy(shape: tuple[int, int], num_columns: int) -> None:
    logits = normal(*shape, seed=1, size=5.0)
    logits[:, num_columns:] = 1e30
    logits[::2, num_columns:] = torch.nan
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(max(num_columns, 1), (shape[0],), generator=generator) - 10 * (num_columns == 0)
    grad = torch.rand(shape[0], generator=generator)
    expected = cross_entropy.cross_entropy_statistics(logits, labels, num_columns=num_columns)
    on_gpu = logits.cuda()
    measured = ops.cross_entropy_statistics(on_gpu, labels.cuda(), num_columns=num_columns)
    assert torch.equal(measured[0].cpu(), expected[0]) and torch.equal(measured[2].cpu(), expected[2])
    torch.testing.assert_close(measured[1].cpu(), expected[1], rtol=1e-5, atol=0)
    log_sum_exp = expected[0].clamp(min=-10.0) + expected[1].clamp(min=1.0).log()
    grad[3] = torch.inf
    operands = tuple(operand.cuda() for operand in (labels, log_sum_exp, grad))
    scale = torch.full((1,), 1e-6, device="cuda")
    quantized = ops.cross_entropy_backward_quantize(on_gpu, *operands, scale, E5M2, num_columns=num_columns)
    wanted = cross_entropy.cross_entropy_backward_quantize(
        logits, labels, log_sum_exp, grad, scale.cpu(), E5M2, num_columns=num_columns
    )
    assert_same_payload(quantized[0], wanted[0])
    assert torch.equal(quantized[1].view(torch.uint8), quantized[0].view(torch.uint8).t())
    cross_entropy.cross_entropy_backward_(logits, labels, log_sum_exp, grad, num_columns=num_columns)
    ops.cross_entropy_backward_(on_gpu, *operands, num_columns=num_columns)
    assert not on_gpu[:, num_columns:].any() and not quantized[0].float()[:, num_columns:].any()
    finite = torch.arange(shape[0]) != 3
    if num_columns:
        assert snr_db(on_gpu.cpu()[finite], logits[finite]) > BF16_DB


CROSS_ENTROPY_SHAPES = [(16, 32), (4, 16), (64, 50304), (260, 1008), (1000, 16768)]


def cross_entropy_operands(shape: tuple[int, int], offset: int, *, size: float = 5.0) -> tuple[Tensor, ...]:
    """Logits, labels (some of another shard), log Σ exp over this shard and another, gradients of either sign."""
    logits = normal(*shape, seed=1, size=size)
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(shape[1], (shape[0],), generator=generator) - offset
    log_sum_exp = torch.logsumexp(logits.float(), dim=1) + 0.5
    grad = torch.randn(shape[0], generator=generator) * 1e-3
    grad[::5] = 0.0
    return logits, labels, log_sum_exp, grad


@pytest.mark.parametrize("shape", CROSS_ENTROPY_SHAPES, ids=str)
@pytest.mark.parametrize("offset", [0, 10], ids=["whole", "shard"])
def test_cross_entropy_backward_quantize(shape: tuple[int, int], offset: int) -> None:
    """What it makes of the gradient is exact, and so are both layouts; the gradient's exponential is the GPU's."""
    operands = cross_entropy_operands(shape, offset)
    logits, labels, log_sum_exp, grad = (operand.cuda() for operand in operands)
    values = logits.float()
    ops.cross_entropy_backward_(values, labels, log_sum_exp, grad)
    for size in (1e-3 / 57344, 3e-8):
        scale = torch.full((1,), size)
        expected = cross_entropy.cross_entropy_backward_quantize(*operands, scale, E5M2)
        payload, payload_t = ops.cross_entropy_backward_quantize(logits, labels, log_sum_exp, grad, scale.cuda(), E5M2)
        assert_same_payload(payload, expected[0])
        assert torch.equal(payload_t.view(torch.uint8), payload.view(torch.uint8).t())
        # Bitwise: the same arithmetic in the kernel that writes the gradient itself, then the reference's cast.
        cast = reference.encode(values.cpu(), scale, E5M2)
        assert torch.equal(payload.cpu().view(torch.uint8), cast.view(torch.uint8))
    moved = ops.cross_entropy_backward_quantize(
        logits, labels + 1000, log_sum_exp, grad, scale.cuda(), E5M2, first=1000
    )
    assert torch.equal(moved[0].view(torch.uint8), payload.view(torch.uint8))
    assert torch.equal(logits.cpu(), operands[0])  # only read


@pytest.mark.parametrize("where", ["logits", "log_sum_exp", "grad"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_cross_entropy_backward_quantize_of_what_is_not_finite(where: str, bad: float) -> None:
    """In one place: a NaN stays in its row, as in the reference."""
    operands = cross_entropy_operands((64, 256), 0)
    operands[["logits", "", "log_sum_exp", "grad"].index(where)][3] = bad
    scale = torch.full((1,), 1e-8)
    expected = cross_entropy.cross_entropy_backward_quantize(*operands, scale, E5M2)
    payload, payload_t = ops.cross_entropy_backward_quantize(*cuda(*operands), scale.cuda(), E5M2)
    values, wanted = reference.decode(payload.cpu()), reference.decode(expected[0])
    assert torch.equal(values.isnan(), wanted.isnan())
    assert torch.equal(payload_t.view(torch.uint8), payload.view(torch.uint8).t())
    finite = ~wanted.isnan()
    assert finite.any()
    assert_same_payload(payload.cpu()[finite], expected[0][finite])


@pytest.mark.parametrize("shape", [(6, 64), (16, 40)], ids=str)
def test_cross_entropy_backward_quantize_refuses(shape: tuple[int, int]) -> None:
    scale = torch.ones(1, device="cuda")
    with pytest.raises(ValueError, match="multiple of"):
        ops.cross_entropy_backward_quantize(*cuda(*cross_entropy_operands(shape, 0)), scale, E5M2)


def test_cross_entropy_backward_quantize_beyond_two_billion_elements() -> None:
    """Offsets of 64 bits: the last rows lie beyond 2³¹ elements of either layout."""
    tokens, width = 2**15 + 64, 2**16
    logits = normal(4, width, seed=1).cuda().repeat(tokens // 4, 1)
    labels, log_sum_exp, grad = torch.zeros(tokens, dtype=torch.int64), torch.full((tokens,), 12.0), torch.ones(tokens)
    scale = torch.full((1,), 1.0 / 57344.0)
    payload, payload_t = ops.cross_entropy_backward_quantize(logits, *cuda(labels, log_sum_exp, grad, scale), E5M2)
    codes, turned = payload.view(torch.uint8), payload_t.view(torch.uint8)
    for rows in (slice(0, 64), slice(tokens - 64, tokens)):
        assert torch.equal(codes[rows], codes[:64]) and torch.equal(turned[:, rows], codes[:64].t())


@pytest.mark.parametrize("tokens", [1, 1000, 4096])
def test_scales_of_tokens(tokens: int) -> None:
    """The exponential is the GPU's, within an ulp or two; products and the quotient are exact."""
    generator = torch.Generator().manual_seed(1)
    log_sum_exp = torch.rand(tokens, generator=generator) * 16
    target = log_sum_exp - torch.logspace(-9, 3, tokens)
    target[-1] = log_sum_exp[-1] + 1e-6  # p rounded to more than 1
    upstream = torch.randn(tokens, generator=generator)
    upstream[::5] = 0.0
    measured = [values.cpu() for values in ops.token_scales(*cuda(log_sum_exp, target, upstream))]
    for values, expected in zip(measured, cross_entropy.token_scales(log_sum_exp, target, upstream), strict=True):
        torch.testing.assert_close(values, expected, rtol=4 * 2.0**-24, atol=0)
    upstream[0], target[-1] = torch.nan, torch.nan
    factors, scales, _ = (values.cpu() for values in ops.token_scales(*cuda(log_sum_exp, target, upstream)))
    assert scales[0].isnan() and factors[-1].isnan() and scales[-1].isnan()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", ["layernorm", "layernorm, no bias", "rmsnorm"])
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
def test_norm_quantize_scaled(shape: tuple[int, int], form: str, transposed: bool) -> None:
    """Bit for bit: the statistics are given."""
    x, weight = normal(*shape, seed=1, size=3.0) + 0.5, 1 + normal(shape[1], seed=2, size=0.3)
    bias = normal(shape[1], seed=3, size=0.3) if form == "layernorm" else None
    row_scales = torch.randn(shape[0], generator=torch.Generator().manual_seed(4)) * 1e-3
    row_scales[5:9] = 0.0
    operands = (x, weight, bias, *norm.statistics(x, 1e-5, form == "rmsnorm"), row_scales)
    on_gpu = cuda(*operands)
    assert torch.equal(ops.norm_amax_scaled(*on_gpu).cpu(), norm.norm_amax_scaled(*operands))
    for given, power_of_two in ((None, False), (None, True), (torch.full((1,), 2e-5), False)):
        payload, taken = norm.norm_quantize_scaled(
            *operands, E4M3, scale=given, power_of_two=power_of_two, transposed=transposed
        )
        measured = ops.norm_quantize_scaled(
            *on_gpu, E4M3, scale=cuda(given)[0], power_of_two=power_of_two, transposed=transposed
        )
        assert torch.equal(measured[0].cpu().view(torch.uint8), payload.view(torch.uint8))
        assert torch.equal(measured[1].cpu(), taken)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_norm_quantize_scaled_of_what_is_not_finite(bad: float) -> None:
    """The scale that comes of it is a NaN, as in the reference: every value then is."""
    x, weight = normal(64, 256, seed=1), normal(256, seed=2)
    row_scales = torch.ones(64)
    row_scales[7] = bad
    operands = cuda(x, weight, None, *norm.statistics(x, 1e-5, True), row_scales)
    payload, scale = ops.norm_quantize_scaled(*operands, E4M3, scale=None, transposed=True)
    assert scale.isnan() and payload.float().isnan().all()


@pytest.mark.parametrize("first", [0, 16, 48])
def test_scaled_mm_into_rows(first: int) -> None:
    """cuBLASLt writes to rows of a larger tensor what it would write to one of its own, and nothing beside them."""
    a, b = normal(256, 512, seed=1).cuda(), normal(128, 512, seed=2).cuda()
    (x, _, scale_x), (y, _, scale_y) = ops.quantize_current(a, E5M2), ops.quantize_current(b, E4M3)
    out = torch.full((320, 128), 7.0, dtype=torch.bfloat16, device="cuda")
    ops.scaled_mm_into_(out[first : first + 256], x, y, scale_x, scale_y)
    assert torch.equal(out[first : first + 256], ops.scaled_mm(x, y, scale_x, scale_y))
    assert (out[:first] == 7.0).all() and (out[first + 256 :] == 7.0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    """A NaN reaches the payload or the scale, so that the step's check finds it."""
    x = normal(64, 256, seed=1)
    x[3, 5] = bad
    weight = torch.ones(256, dtype=torch.bfloat16)
    payload, scale, _, _ = ops.norm_quantize(*cuda(x, weight, None), E4M3, eps=1e-5, rms=False, scale=None)
    assert not torch.isfinite(reference.decode(payload.cpu(), scale.cpu())).all()
    payload, scale = ops.activation_quantize(x.cuda(), Activation("gelu"), E4M3, scale=None)
    assert not torch.isfinite(reference.decode(payload.cpu(), scale.cpu())).all()
