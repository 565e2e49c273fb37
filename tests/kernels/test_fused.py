"""The specifications of fused norms, activations and cross-entropy, against float64."""

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
from fp8_megatron.quantization import unfused
from fp8_megatron.quantization.stats import snr_db

#: FP32 arithmetic on sums of some hundred terms keeps more than this; BF16 and FP8 roundings far less.
FP32_DB = 110.0
#: One rounding to BF16: 54.6 dB where values spread over binades evenly, less for the sample.
BF16_DB = 53.5
E4M3_DB, E5M2_DB = 31.0, 25.0
T, K = 48, 96


def normal(*shape: int, seed: int, size: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * size).bfloat16()


def double_norm(x: Tensor, weight: Tensor, bias: Tensor | None, rms: bool) -> Tensor:
    if rms:
        y = torch.nn.functional.rms_norm(x, (K,), weight, 1e-5)
        return y if bias is None else y + bias
    return torch.nn.functional.layer_norm(x, (K,), weight, bias, 1e-5)


@pytest.mark.parametrize("rms", [False, True], ids=["layernorm", "rmsnorm"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_norm(rms: bool, has_bias: bool) -> None:
    x, weight = normal(T, K, seed=1, size=3.0) + 0.5, 1 + normal(K, seed=2, size=0.3)
    bias = normal(K, seed=3) if has_bias else None
    grad, residual = normal(T, K, seed=4, size=1e-3), normal(T, K, seed=5, size=1e-3)
    leaves = [tensor.double().requires_grad_() for tensor in (x, weight) + (() if bias is None else (bias,))]
    expected = double_norm(leaves[0], leaves[1], leaves[2] if has_bias else None, rms)
    expected.backward(grad.double())

    payload, scale, mean, rstd = ops.norm_quantize(x, weight, bias, E4M3, eps=1e-5, rms=rms, scale=None)
    assert payload.dtype == E4M3 and mean.numel() == (0 if rms else T)
    assert snr_db(reference.decode(payload, scale), expected.detach()) > E4M3_DB
    largest = expected.detach().abs().max().float().view(1)
    torch.testing.assert_close(scale * 448.0, largest, rtol=1e-5, atol=0)
    torch.testing.assert_close(ops.norm_amax(x, weight, bias, eps=1e-5, rms=rms), largest, rtol=1e-5, atol=0)

    grad_x, grad_weight, grad_bias = ops.norm_backward(grad[None], residual, x, weight, mean, rstd, has_bias=has_bias)
    assert grad_x.dtype == torch.bfloat16
    assert snr_db(grad_x, leaves[0].grad + residual.double()) > BF16_DB
    alone = ops.norm_backward(grad[None], None, x, weight, mean, rstd, has_bias=has_bias)[0]
    assert snr_db(alone, leaves[0].grad) > BF16_DB
    assert snr_db(grad_weight, leaves[1].grad) > FP32_DB
    if has_bias:
        assert snr_db(grad_bias, leaves[2].grad) > FP32_DB

    amax_out = torch.zeros(1)
    given, taken, *_ = ops.norm_quantize(x, weight, bias, E4M3, eps=1e-5, rms=rms, scale=2 * scale, amax_out=amax_out)
    assert taken.numel() == 0 and torch.equal(amax_out, ops.norm_amax(x, weight, bias, eps=1e-5, rms=rms))
    again = ops.norm_requantize(x, weight, bias, mean, rstd, 2 * scale, E4M3, transposed=False)
    assert torch.equal(again.view(torch.uint8), given.view(torch.uint8))
    turned = ops.norm_requantize(x, weight, bias, mean, rstd, 2 * scale, E4M3, transposed=True)
    assert torch.equal(turned.view(torch.uint8), given.view(torch.uint8).t())


def double_activation(z: Tensor, function: Activation) -> Tensor:
    kind = function.kind
    if kind == "gelu":
        return torch.nn.functional.gelu(z, approximate="tanh")
    if kind == "gelu_erf":
        return torch.nn.functional.gelu(z)
    if kind == "squared_relu":
        return torch.relu(z).square()
    gate, up = z.chunk(2, dim=1)
    if kind == "clamped_swiglu":
        limit, alpha, offset = function.parameters
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(alpha * gate) * (up + offset)
    if kind == "quick_geglu":
        return gate * torch.sigmoid(1.702 * gate) * up
    assert kind == "swiglu"
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("function", [*map(Activation, KINDS), Activation("clamped_swiglu", (2.0, 1.0, 0.0))], ids=str)
@pytest.mark.parametrize("size", [0.01, 3.0, 300.0])
def test_activation(function: Activation, size: float) -> None:
    z, grad = normal(T, function.row.num_inputs * K, seed=1, size=size), normal(T, K, seed=2, size=1e-4)
    exact = z.double().requires_grad_()
    expected = double_activation(exact, function)
    expected.backward(grad.double())
    payload, scale = ops.activation_quantize(z, function, E4M3, scale=None)
    assert snr_db(reference.decode(payload, scale), expected.detach()) > E4M3_DB
    torch.testing.assert_close(
        ops.activation_amax(z, function), expected.detach().abs().max().float().view(1), rtol=1e-5, atol=0
    )
    result = ops.activation_backward_quantize(
        grad, z, function, E5M2, scale=None, activation_dtype=E4M3, activation_scale=scale, column_sums=True
    )
    grad_z, grad_z_t, activation_t, sums, grad_scale = result
    assert snr_db(reference.decode(grad_z, grad_scale), exact.grad) > E5M2_DB
    assert torch.equal(grad_z_t.view(torch.uint8), grad_z.view(torch.uint8).t())
    assert torch.equal(activation_t.view(torch.uint8), payload.view(torch.uint8).t())
    assert snr_db(sums, exact.grad.sum(dim=0)) > FP32_DB - 10  # sums of both signs cancel
    largest = exact.grad.abs().max().float().view(1)
    torch.testing.assert_close(ops.activation_backward_amax(grad, z, function), largest, rtol=1e-5, atol=0)
    torch.testing.assert_close(grad_scale * 57344.0, largest, rtol=1e-5, atol=0)
    assert snr_db(unfused.activated(z.float(), function), expected.detach()) > FP32_DB
    assert snr_db(unfused.activation_backward(grad.float(), z.float(), function), exact.grad) > FP32_DB


def test_the_exact_gelu_keeps_its_tail() -> None:
    """Of z from -8 on, whose E5M2 gradient is still above 0; 1 + erf(z / √2) has no digit left there."""
    function = Activation("gelu_erf")
    z = torch.linspace(-8.0, -1.0, 513).view(1, -1)
    exact = z.double().requires_grad_()
    expected = exact * (0.5 * torch.erfc(-(0.5**0.5) * exact))
    grad = normal(*z.shape, seed=1)
    expected.backward(grad.double())
    torch.testing.assert_close(activation.activated(z, function).double(), expected.detach(), rtol=1e-5, atol=0)
    found = activation.grad_of_input(grad, z, function).double()
    torch.testing.assert_close(found, exact.grad, rtol=1e-5, atol=1e-7)


def test_grad_output_in_one_read() -> None:
    g = normal(T, K, seed=1, size=1e-3)
    payload, payload_t, sums, scale = ops.quantize_grad_output(g, E5M2, scale=None)
    plain = ops.quantize_current(g, E5M2, transposed=True)
    for mine, theirs in zip((payload, payload_t), plain[:2], strict=True):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
    assert torch.equal(scale, plain[2]) and snr_db(sums, g.double().sum(dim=0)) > FP32_DB
    rows, nothing, sums_again, _ = ops.quantize_grad_output(g, E5M2, scale=scale, transposed=False)
    assert torch.equal(rows.view(torch.uint8), payload.view(torch.uint8)) and nothing.numel() == 0
    assert torch.equal(sums_again, sums)


@pytest.mark.parametrize("num_parts", [2, 4])
def test_norm_backward_of_summands(num_parts: int) -> None:
    """Bit for bit that of their sum in FP32, rounded once: as if a reduction had brought it."""
    x, weight, parts = normal(T, K, seed=1), 1 + normal(K, seed=2, size=0.3), normal(num_parts, T, K, seed=3)
    statistics = norm.statistics(x, 1e-5, rms=False)
    total = torch.zeros(T, K)
    for part in parts:
        total += part.float()
    ours = ops.norm_backward(parts, None, x, weight, *statistics, has_bias=True)
    expected = ops.norm_backward(total.bfloat16()[None], None, x, weight, *statistics, has_bias=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours, expected, strict=True))


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "both_layouts"])
def test_norm_backward_with_the_cast_of_its_gradient(transposed: bool) -> None:
    x, weight, grad = normal(T, K, seed=1), 1 + normal(K, seed=2, size=0.3), normal(1, T, K, seed=3)
    arguments = (grad, normal(T, K, seed=4), x, weight, *norm.statistics(x, 1e-5, rms=False))
    scale, amax = torch.full((1,), 1e-4), torch.zeros(1)
    *grads, payload, payload_t, sums = ops.norm_backward_quantize(
        *arguments, E5M2, has_bias=True, scale=scale, amax_out=amax, transposed=transposed
    )
    expected = ops.norm_backward(*arguments, has_bias=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(grads, expected, strict=True))
    assert torch.equal(payload.view(torch.uint8), reference.encode(grads[0], scale, E5M2).view(torch.uint8))
    assert amax == grads[0].abs().max() and torch.equal(sums, grads[0].float().sum(dim=0))
    assert payload_t.numel() == 0 or torch.equal(payload_t.view(torch.uint8), payload.view(torch.uint8).t())
    assert (payload_t.numel() > 0) == transposed


@pytest.mark.parametrize("num_shards", [1, 4])
def test_cross_entropy(num_shards: int) -> None:
    logits, vocab = normal(T, 64, seed=1, size=3.0), 64
    labels = torch.randint(vocab, (T,), generator=torch.Generator().manual_seed(2))
    grad = torch.rand(T, generator=torch.Generator().manual_seed(3))
    exact = logits.double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(exact, labels, reduction="none")
    expected.backward(grad.double())
    shards = [shard.contiguous() for shard in logits.chunk(num_shards, dim=1)]
    width = vocab // num_shards
    found = [ops.cross_entropy_statistics(shard, labels, first=index * width) for index, shard in enumerate(shards)]
    highest = torch.stack([largest for largest, _, _ in found]).amax(dim=0)
    total = sum(total * torch.exp(largest - highest) for largest, total, _ in found)
    log_sum_exp = highest + torch.log(total)
    target = sum(target for _, _, target in found)
    assert snr_db(log_sum_exp - target, expected.detach()) > FP32_DB
    for index, shard in enumerate(shards):
        ops.cross_entropy_backward_(shard, labels, log_sum_exp, grad, first=index * width)
    assert snr_db(torch.cat(shards, dim=1), exact.grad) > BF16_DB


@pytest.mark.parametrize("first", [0, 100])
def test_cross_entropy_gradient_in_fp8(first: int) -> None:
    """Of a shard, with a scale that bounds it; tokens' gradients of either sign, some zero."""
    logits, width = normal(T, 64, seed=1, size=3.0), 64
    labels = torch.randint(-width, width, (T,), generator=torch.Generator().manual_seed(2)) + first
    grad = torch.randn(T, generator=torch.Generator().manual_seed(3)) * 1e-3
    grad[::7] = 0.0
    log_sum_exp = torch.logsumexp(torch.cat([logits, normal(T, 64, seed=4)], dim=1).double(), dim=1)
    onehot = (torch.arange(first, first + width) == labels[:, None]).double()
    exact = (torch.exp(logits.double() - log_sum_exp[:, None]) - onehot) * grad.double()[:, None]
    operands = (logits, labels, log_sum_exp.float(), grad)
    scale = reference.scale_from_amax(grad.abs().max().view(1), E5M2, power_of_two=False)
    payload, payload_t = ops.cross_entropy_backward_quantize(*operands, scale, E5M2, first=first)
    assert payload.dtype == E5M2 and snr_db(reference.decode(payload, scale), exact) > E5M2_DB - 1.0  # 48 labels
    assert torch.equal(payload_t.view(torch.uint8), payload.view(torch.uint8).t())
    assert not reference.decode(payload[::7]).any()
    plain = logits.clone().float()
    ops.cross_entropy_backward_(plain, *operands[1:], first=first)
    assert torch.equal(reference.encode(plain, scale, E5M2).view(torch.uint8), payload.view(torch.uint8))


def test_cross_entropy_gradient_of_small_probabilities() -> None:
    """A bound far above the gradient costs nothing: probabilities down to 2⁻²⁹ keep E5M2's relative steps (within
    2⁻³), those below 2⁻³³ become zero."""
    exponents = torch.arange(-40, 0)
    logits = (exponents * 0.6931471805599453).view(1, -1).repeat(4, 1)
    labels, log_sum_exp, grad = torch.full((4,), -1), torch.zeros(4), torch.tensor([1.0, 0.5, 1e-3, 0.0])
    scale = torch.full((1,), 1.0 / 57344.0)
    payload, _ = ops.cross_entropy_backward_quantize(logits, labels, log_sum_exp, grad, scale, E5M2)
    measured, exact = reference.decode(payload, scale)[0], torch.exp2(exponents.float())
    normal_range = exponents >= -29
    assert ((measured - exact).abs() <= exact / 8)[normal_range].all()
    assert (measured[exponents >= -32] > 0).all() and not measured[exponents < -33].any()


def test_scales_of_tokens() -> None:
    """1 − p to FP32's precision for p from 0 to 1 − 2⁻²⁰, and LEAST beyond, also where rounding makes p more than 1."""
    loss = torch.cat([torch.logspace(-8, 3, 500), torch.tensor([0.0, -1e-6, 200.0])])
    log_sum_exp = torch.rand(len(loss), generator=torch.Generator().manual_seed(1)) * 16
    target = log_sum_exp - loss
    upstream = torch.randn(len(loss), generator=torch.Generator().manual_seed(2))
    upstream[:3] = torch.tensor([0.0, torch.nan, torch.inf])
    factors, scales, payload_scale = ops.token_scales(log_sum_exp, target, upstream)
    exact = -torch.expm1(target.double() - log_sum_exp.double()).clamp(max=-(2.0**-20))
    torch.testing.assert_close(factors.double(), 1.0 / (cross_entropy.KEPT * exact), rtol=4 * 2.0**-24, atol=0)
    torch.testing.assert_close(scales[3:].double(), (exact * upstream)[3:], rtol=3 * 2.0**-24, atol=0)
    assert scales[0] == 0.0 and scales[1].isnan() and scales[2] == torch.inf
    assert payload_scale == 2.0**-15


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rms", [False, True])
def test_norm_with_a_scale_of_each_row(rms: bool, transposed: bool) -> None:
    x, weight = normal(T, K, seed=1, size=3.0) + 0.5, 1 + normal(K, seed=2, size=0.3)
    bias = None if rms else normal(K, seed=3, size=0.3)
    row_scales = torch.randn(T, generator=torch.Generator().manual_seed(4)) * 1e-3
    row_scales[5:9] = 0.0
    mean, rstd = norm.statistics(x, 1e-5, rms=rms)
    values = (x.double() - (0.0 if rms else mean.double()[:, None])) * rstd.double()[:, None] * weight.double()
    exact = (values if bias is None else values + bias.double()) * row_scales.double()[:, None]
    operands = (x, weight, bias, mean, rstd, row_scales)
    amax = ops.norm_amax_scaled(*operands)
    torch.testing.assert_close(amax.double(), exact.abs().max().view(1), rtol=1e-6, atol=0)
    payload, scale = ops.norm_quantize_scaled(*operands, E4M3, scale=None, transposed=transposed)
    assert torch.equal(scale, reference.scale_from_amax(amax, E4M3, power_of_two=False))
    assert payload.shape == ((K, T) if transposed else (T, K))
    rows = payload.float().t() if transposed else payload.float()
    assert snr_db(rows * scale, exact) > E4M3_DB and not rows[5:9].any()
    again, taken = ops.norm_quantize_scaled(*operands, E4M3, scale=scale, transposed=transposed)
    assert taken.numel() == 0 and torch.equal(again.view(torch.uint8), payload.view(torch.uint8))
    larger = ops.norm_quantize_scaled(*operands, E4M3, scale=None, power_of_two=True)[1]
    assert larger.log2() == larger.log2().floor() and scale <= larger < 2 * scale


@pytest.mark.parametrize("num_columns", [0, 1, 41, 63])
def test_padding_takes_no_part_in_the_cross_entropy(num_columns: int) -> None:
    """Whatever the padding columns hold, the rest gets the bits that it gets without them."""
    logits = normal(T, 64, seed=1, size=3.0)
    logits[:, num_columns:] = torch.tensor([torch.nan, torch.inf, -1e30, 1e30]).bfloat16().repeat(16)[num_columns:]
    labels = torch.randint(-8, max(num_columns, 1), (T,), generator=torch.Generator().manual_seed(2))
    labels[labels >= num_columns] = -1
    log_sum_exp = torch.rand(T, generator=torch.Generator().manual_seed(3)) + 12
    grad = torch.rand(T, generator=torch.Generator().manual_seed(4))
    grad[1] = torch.inf
    rest = logits[:, :num_columns].contiguous()
    largest, total, target = ops.cross_entropy_statistics(logits, labels, num_columns=num_columns)
    if num_columns:
        for found, expected in zip((largest, total, target), ops.cross_entropy_statistics(rest, labels), strict=True):
            assert torch.equal(found, expected)
    else:
        assert (largest == torch.finfo(torch.float32).min).all() and not total.any() and not target.any()
    payload, payload_t = ops.cross_entropy_backward_quantize(
        logits, labels, log_sum_exp, grad, torch.full((1,), 1e-4), E5M2, num_columns=num_columns
    )
    ops.cross_entropy_backward_(rest, labels, log_sum_exp, grad)
    ops.cross_entropy_backward_(logits, labels, log_sum_exp, grad, num_columns=num_columns)
    assert torch.equal(logits[:, :num_columns].view(torch.int16), rest.view(torch.int16))
    assert not logits[:, num_columns:].any()
    assert not payload.float()[:, num_columns:].any() and not payload_t.float()[num_columns:].any()


def test_scaled_mm_into_rows() -> None:
    a, b = normal(32, 48, seed=1), normal(16, 48, seed=2)
    (x, _, scale_x), (y, _, scale_y) = ops.quantize_current(a, E5M2), ops.quantize_current(b, E4M3)
    out = torch.full((64, 16), 7.0, dtype=torch.bfloat16)
    ops.scaled_mm_into_(out[16:48], x, y, scale_x, scale_y)
    assert torch.equal(out[16:48], ops.scaled_mm(x, y, scale_x, scale_y))
    assert (out[:16] == 7.0).all() and (out[48:] == 7.0).all()


@pytest.mark.parametrize("has_bias", [False, True])
def test_scaled_mm_rounds_once_with_what_it_adds(has_bias: bool) -> None:
    a, b, addend = normal(32, 48, seed=1), normal(16, 48, seed=2), normal(32, 16, seed=3).bfloat16() * 100
    bias = normal(16, seed=4).bfloat16() if has_bias else None
    (x, _, scale_x), (y, _, scale_y) = ops.quantize_current(a, E4M3), ops.quantize_current(b, E4M3)
    out, before = torch.empty_like(addend), addend.clone()
    ops.scaled_mm_into_(out, x, y, scale_x, scale_y, bias=bias, addend=addend)
    exact = ops.scaled_mm(x, y, scale_x, scale_y, bias=bias, out_dtype=torch.float32)
    assert torch.equal(out, (exact + addend.float()).bfloat16()) and torch.equal(addend, before)
    assert not torch.equal(out, exact.bfloat16() + addend)


def test_scaled_mm_refuses_an_addend_of_another_form() -> None:
    x, y, scale = torch.zeros(32, 48).to(E4M3), torch.zeros(16, 48).to(E4M3), torch.ones(1)
    out = torch.empty(32, 16, dtype=torch.bfloat16)
    for addend in (torch.zeros(32, 16), torch.zeros(16, dtype=torch.bfloat16), torch.zeros(16, 32).bfloat16().t()):
        with pytest.raises(AssertionError):
            ops.scaled_mm_into_(out, x, y, scale, scale, addend=addend)
