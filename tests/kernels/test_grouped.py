"""The specifications of rows grouped by expert, against plain loops and float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fp8_megatron.activation_functions import Activation
from fp8_megatron.dtypes import E4M3, E5M2, GROUP_ROWS
from fp8_megatron.kernels import ops, reference
from fp8_megatron.quantization.stats import snr_db
from tests.kernels.test_fused import E4M3_DB, E5M2_DB, double_activation, normal

TOKENS, EXPERTS, TOP_K, HIDDEN, WIDTH = 300, 5, 2, 48, 96
#: Sums of some hundred FP32 products of both signs.
FP32_DB = 100.0
#: One rounding to BF16.
BF16_DB = 54.5


def routing(kind: str) -> Tensor:
    """bool [TOKENS, EXPERTS]."""
    scores = torch.rand(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(0))
    if kind == "one expert has all":
        scores[:, 3] = 2.0
    elif kind == "expert without tokens":
        scores[:, 1] = -1.0
    chosen = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter_(1, scores.topk(TOP_K).indices, True)
    if kind == "dropped":
        chosen &= scores > 0.6
    if kind == "no token":
        chosen[:] = False
    return chosen


KINDS = ("even", "one expert has all", "expert without tokens", "dropped", "no token")


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_experts(kind: str) -> None:
    chosen = routing(kind)
    num_rows = ops.most_rows(TOKENS, TOP_K, EXPERTS)
    offsets, source, rows = ops.routed_rows(chosen, num_rows, TOP_K)
    wanted, at = torch.full((num_rows,), -1), 0
    of_tokens: list[list[int]] = [[] for _ in range(TOKENS)]
    for expert in range(EXPERTS):
        assert offsets[expert] == at and at % GROUP_ROWS == 0
        tokens = [token for token in range(TOKENS) if chosen[token, expert]]
        for place, token in enumerate(tokens):
            wanted[at + place] = token * EXPERTS + expert
            of_tokens[token].append(at + place)
        at += math.ceil(len(tokens) / GROUP_ROWS) * GROUP_ROWS
    assert offsets[EXPERTS] == at <= num_rows
    assert torch.equal(source, wanted.int())
    assert rows.tolist() == [of_token + [-1] * (TOP_K - len(of_token)) for of_token in of_tokens]


def test_most_rows_is_reached() -> None:
    """Three experts take 2 · 128 + 1 rows, 1 and 1; a fourth stays empty."""
    chosen = torch.zeros(257, 4, dtype=torch.bool)
    chosen[:, 0], chosen[0, 1:3] = True, True
    assert ops.routed_rows(chosen, 5 * 128, 3)[0].tolist() == [0, 384, 512, 640, 640]
    assert ops.most_rows(1, 3, 4) == 3 * 128 and ops.most_rows(1, 8, 2) == 2 * 128
    assert ops.most_rows(257, 3, 4, capacity=129) == 4 * 256 and ops.most_rows(257, 3, 4, capacity=257) == 9 * 128
    with pytest.raises(AssertionError, match="640 rows of experts have room for 512"):
        ops.routed_rows(chosen, 4 * 128, 3)


@pytest.mark.parametrize("dtype", [E4M3, E5M2, torch.bfloat16], ids=str)
def test_rows_are_gathered_and_summed(dtype: torch.dtype) -> None:
    chosen = routing("dropped")
    num_rows = ops.most_rows(TOKENS, TOP_K, EXPERTS)
    offsets, source, rows = ops.routed_rows(chosen, num_rows, TOP_K)
    x = normal(TOKENS, HIDDEN, seed=1).to(dtype)
    is_fp8 = dtype != torch.bfloat16
    gathered, turned = ops.gather_rows(x, source, EXPERTS, offsets, transposed=is_fp8)
    for row, origin in enumerate(source.tolist()):
        expected = torch.zeros(HIDDEN) if origin < 0 else x[origin // EXPERTS].float()
        assert torch.equal(gathered[row].float(), expected)
    assert not is_fp8 or torch.equal(turned.float(), gathered.float().t())
    y = normal(num_rows, HIDDEN, seed=2)
    total = ops.sum_rows(y, rows)
    for token, of_token in enumerate(rows.tolist()):
        expected = sum((y[row].float() for row in of_token if row >= 0), torch.zeros(HIDDEN))
        assert torch.equal(total[token], expected.bfloat16())


@pytest.mark.parametrize("routed", KINDS)
@pytest.mark.parametrize("power_of_two", [False, True])
def test_rows_and_scales_of_blocks_are_gathered(routed: str, power_of_two: bool) -> None:
    """Each row has its token's bits and scales. Blocks of the transpose are cast again: under powers of two without
    rounding again, but for what becomes subnormal."""
    offsets, source, _ = ops.routed_rows(routing(routed), ops.most_rows(TOKENS, TOP_K, EXPERTS), TOP_K)
    end, has_token = int(offsets[-1]), source >= 0
    sizes = 2.0 ** torch.randint(-3, 4, (304, 1), generator=torch.Generator().manual_seed(5))
    x = normal(304, 256, seed=1) * sizes
    payload, scales, *_ = ops.quantize_blocks(x, E4M3, power_of_two=power_of_two)
    packed = torch.cat([payload.view(torch.uint8), torch.zeros(304, 16, dtype=torch.uint8)], dim=1)
    strided = packed[:, :256].view(E4M3), scales.t().contiguous().t()  # as ranks send them
    found = ops.gather_blocks(payload, scales, source, EXPERTS, offsets, transposed=True, power_of_two=power_of_two)
    again = ops.gather_blocks(*strided, source, EXPERTS, offsets, transposed=True, power_of_two=power_of_two)
    assert all(map(torch.equal, *([one.view(torch.uint8) for one in all_four] for all_four in (found, again))))
    token = source.clamp(min=0).long() // EXPERTS
    assert torch.equal(found[0].float(), torch.where(has_token[:, None], payload.float()[token], 0.0))
    assert torch.equal(found[1], torch.where(has_token, scales[:, token], 1.0))
    values = ops.dequantize_blocks(*found[:2])[:end].double()
    columns = ops.dequantize_blocks(*found[2:]).t()[:end].double()
    if power_of_two:
        smallest = found[3].repeat_interleave(GROUP_ROWS, dim=0)[:end] * 2.0**-6
        assert torch.equal(columns[values.abs() >= smallest], values[values.abs() >= smallest])
    assert end == 0 or snr_db(columns, values) > (50.0 if power_of_two else E4M3_DB)


@pytest.mark.parametrize("kind", ["swiglu", "gelu", "squared_relu"])
@pytest.mark.parametrize("routed", KINDS)
def test_activation_of_experts_in_blocks(kind: str, routed: str) -> None:
    function, width = Activation(kind), 256
    offsets, source, _ = ops.routed_rows(routing(routed), ops.most_rows(TOKENS, TOP_K, EXPERTS), TOP_K)
    end, num_rows, has_token = int(offsets[-1]), len(source), (source >= 0)[:, None]
    probs = torch.where(source < 0, 0.0, torch.rand(num_rows, generator=torch.Generator().manual_seed(3)))
    z = torch.where(has_token, normal(num_rows, width * function.row.num_inputs, seed=1, size=3.0), 0.0)
    grad = torch.where(has_token, normal(num_rows, width, seed=2, size=1e-4), 0.0)
    leaves = z.double().requires_grad_(), probs.double().requires_grad_()
    exact = leaves[1][:, None] * double_activation(leaves[0], function)
    exact.backward(grad.double())
    exact, (exact_z, exact_probs) = exact.detach(), (leaf.grad for leaf in leaves)
    z[end:], grad[end:], probs[end:] = torch.nan, torch.inf, torch.nan  # nobody reads them

    payload, scales = ops.expert_activation_quantize_blocks(z, probs, offsets, function, E4M3, power_of_two=True)
    *layouts, grad_probs = ops.expert_activation_backward_quantize_blocks(
        grad, z, probs, offsets, function, E4M3, power_of_two=True
    )
    found = ops.dequantize_blocks(payload, scales), *map(ops.dequantize_blocks, layouts[::2], layouts[1::2])
    for values, expected in zip(found, (exact, exact_z, exact_z.t(), exact.t()), strict=True):
        rows = slice(end) if len(values) == num_rows else (slice(None), slice(end))
        assert values.shape == expected.shape
        assert end == 0 or snr_db(values[rows], expected[rows]) > E4M3_DB
    assert end == 0 or snr_db(grad_probs[:end], exact_probs[:end]) > FP32_DB
    for one in (scales, layouts[1]):
        assert (torch.frexp(one[:, :end]).mantissa == 0.5).all()


@pytest.mark.parametrize("kind", ["swiglu", "quick_geglu", "gelu", "gelu_erf", "squared_relu"])
@pytest.mark.parametrize("routed", KINDS)
def test_activation_of_experts(kind: str, routed: str) -> None:
    function = Activation(kind)
    offsets, source, _ = ops.routed_rows(routing(routed), ops.most_rows(TOKENS, TOP_K, EXPERTS), TOP_K)
    end, num_rows = int(offsets[-1]), len(source)
    has_token = (source >= 0)[:, None]
    generator = torch.Generator().manual_seed(3)
    probs = torch.where(source < 0, 0.0, torch.rand(num_rows, generator=generator))
    width = WIDTH * function.row.num_inputs
    z = torch.where(has_token, normal(num_rows, width, seed=1, size=3.0), 0.0)
    grad = torch.where(has_token, normal(num_rows, WIDTH, seed=2, size=1e-4), 0.0)
    leaves = z.double().requires_grad_(), probs.double().requires_grad_()
    exact = leaves[1][:, None] * double_activation(leaves[0], function)
    exact.backward(grad.double())
    exact, (exact_z, exact_probs) = exact.detach(), (leaf.grad for leaf in leaves)
    z[end:], grad[end:], probs[end:] = torch.nan, torch.inf, torch.nan  # nobody reads them

    rows = ops.ExpertRows(probs, offsets)
    payload, scale = ops.activation_quantize(z, function, E4M3, rows, scale=None)
    result = ops.activation_backward_quantize(
        grad, z, function, E5M2, rows, scale=None, activation_dtype=E4M3, activation_scale=scale
    )
    grad_z, grad_z_t, activation_t, grad_probs, grad_scale = result
    for turned, plain in ((activation_t, payload), (grad_z_t, grad_z)):
        assert torch.equal(turned[:, :end].float(), plain[:end].float().t())
        assert not plain[:end][~has_token[:end, 0]].float().any()
    in_16_bits = ops.expert_activation(z, function, rows)
    grad_in_16_bits, own_grad_probs = ops.expert_activation_backward(grad, z, function, rows)
    for found, wanted in ((in_16_bits, exact), (grad_in_16_bits, exact_z)):
        assert found.dtype == z.dtype and (end == 0 or snr_db(found[:end], wanted[:end]) > BF16_DB)
    assert torch.equal(own_grad_probs[:end], grad_probs[:end])
    largest, largest_z = (x.abs().max().float().view(1) for x in (exact, exact_z))
    amax = ops.activation_amax(z, function, rows)
    torch.testing.assert_close(amax, largest, rtol=1e-5, atol=0)
    backward_amax = ops.activation_backward_amax(grad, z, function, rows)
    torch.testing.assert_close(backward_amax, largest_z, rtol=1e-5, atol=0)
    if end == 0:
        assert scale == 1.0 and grad_scale == 1.0
        return
    assert snr_db(reference.decode(payload, scale)[:end], exact[:end]) > E4M3_DB
    assert snr_db(reference.decode(grad_z, grad_scale)[:end], exact_z[:end]) > E5M2_DB
    assert snr_db(grad_probs[:end], exact_probs[:end]) > FP32_DB
    assert torch.equal(scale, amax / 448.0) and torch.equal(grad_scale, backward_amax / 57344.0)

    record = torch.zeros(3)
    given = dict(scale=scale / 2, amax_out=record)
    ops.activation_quantize(z, function, E4M3, rows, **given)
    clamped = (ops.activation_quantize(z, function, E4M3, rows, scale=scale)[0].float().abs() >= 224).sum()
    assert torch.equal(record[:1], amax) and record[2] == end * WIDTH and 0 < record[1] <= clamped


def test_a_nan_of_a_token_reaches_the_amax() -> None:
    offsets, source, _ = ops.routed_rows(routing("even"), ops.most_rows(TOKENS, TOP_K, EXPERTS), TOP_K)
    z, probs = normal(len(source), 2 * WIDTH, seed=1), (source >= 0).float()
    z[int(offsets[2]), 5] = torch.nan
    rows = ops.ExpertRows(probs, offsets)
    assert ops.activation_amax(z, Activation("swiglu"), rows).isnan()
    payload, scale = ops.activation_quantize(z, Activation("swiglu"), E4M3, rows, scale=torch.ones(1))
    assert scale.numel() == 0 and payload.float().isnan().sum() == 1
