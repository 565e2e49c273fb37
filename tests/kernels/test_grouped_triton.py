"""Rows grouped by expert on a GPU, against their specification computed on the CPU.

Movements are the same bits. Activations are as in `test_fused_triton`. Behind the last group a payload means nothing.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8_megatron.activation_functions import KINDS, Activation
from fp8_megatron.dtypes import E4M3, E5M2
from fp8_megatron.kernels import ops
from fp8_megatron.kernels.activation import reference
from fp8_megatron.kernels.grouped import activation_reference, rows_reference
from fp8_megatron.kernels.quantize import blocks
from fp8_megatron.quantization.stats import snr_db
from tests.kernels.test_fused_triton import FP32_DB, assert_same_payload, normal

pytestmark = pytest.mark.gpu

#: BF16 values of which a few are rounded to the neighbour.
BF16_DB = 70.0
#: Tokens, experts, and experts of a token.
ROUTINGS = [(16, 2, 1), (300, 8, 2), (1000, 128, 8), (129, 5, 3), (64, 1, 1)]


def routing(num_tokens: int, num_experts: int, top_k: int, *, share: float = 1.0) -> Tensor:
    """bool [T, E]: the first experts are liked most, the last has no token; `share` of all places are kept."""
    generator = torch.Generator().manual_seed(num_tokens)
    scores = torch.rand(num_tokens, num_experts, generator=generator) - torch.linspace(0, 0.5, num_experts)
    scores[:, -1] -= 2.0 * (num_experts > top_k)
    chosen = torch.zeros(num_tokens, num_experts, dtype=torch.bool)
    chosen.scatter_(1, scores.topk(top_k).indices, True)
    return chosen & (torch.rand(num_tokens, num_experts, generator=generator) < share)


def equal(measured: Tensor, expected: Tensor) -> bool:
    codes = [x.contiguous().view(torch.uint8) for x in (measured.cpu(), expected)]
    return measured.dtype == expected.dtype and torch.equal(*codes)


@pytest.mark.parametrize("sizes", ROUTINGS, ids=str)
@pytest.mark.parametrize("share", [1.0, 0.5, 0.0])
def test_routed_rows(sizes: tuple[int, int, int], share: float) -> None:
    chosen, num_rows = routing(*sizes, share=share), ops.most_rows(sizes[0], sizes[2], sizes[1])
    expected = rows_reference.routed_rows(chosen, num_rows, sizes[2])
    for one, other in zip(ops.routed_rows(chosen.cuda(), num_rows, sizes[2]), expected, strict=True):
        assert equal(one, other)
    part = chosen[:, : max(sizes[1] // 2, 1)]  # of a rank that holds some experts: not contiguous
    for one, other in zip(
        ops.routed_rows(chosen.cuda()[:, : part.shape[1]], num_rows, sizes[2]),
        rows_reference.routed_rows(part, num_rows, sizes[2]),
        strict=True,
    ):
        assert equal(one, other)


@pytest.mark.parametrize("width", [16, 144, 2048])
@pytest.mark.parametrize("dtype", [E4M3, E5M2, torch.bfloat16], ids=str)
def test_gather_rows_and_sum_rows(width: int, dtype: torch.dtype) -> None:
    chosen, num_rows = routing(300, 8, 2, share=0.8), ops.most_rows(300, 2, 8)
    offsets, source, rows = rows_reference.routed_rows(chosen, num_rows, 2)
    end = int(offsets[-1])
    x = normal(300, width, seed=1).to(dtype)
    on_gpu = x.cuda(), source.cuda(), 8, offsets.cuda()
    transposed = dtype != torch.bfloat16
    expected = rows_reference.gather_rows(x, source, 8, offsets, transposed=transposed)
    both = ops.gather_rows(*on_gpu, transposed=transposed)
    assert equal(both[0][:end], expected[0][:end])
    assert equal(ops.gather_rows(*on_gpu)[0][:end], expected[0][:end])
    if transposed:
        assert equal(both[1][:, :end], expected[1][:, :end])
        nothing, alone = ops.gather_rows(*on_gpu, rowwise=False, transposed=True)
        assert nothing.numel() == 0 and equal(alone[:, :end], expected[1][:, :end])
    y = normal(num_rows, width, seed=2)
    y[end:] = torch.nan
    assert equal(ops.sum_rows(y.cuda(), rows.cuda()), rows_reference.sum_rows(y, rows))


@pytest.mark.parametrize("width", [128, 640])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("power_of_two", [False, True], ids=["exact", "power_of_two"])
def test_gather_blocks(width: int, dtype: torch.dtype, power_of_two: bool) -> None:
    chosen, num_rows = routing(300, 8, 2, share=0.8), ops.most_rows(300, 2, 8)
    offsets, source, _ = rows_reference.routed_rows(chosen, num_rows, 2)
    end = int(offsets[-1])
    payload, scales, *_ = blocks.quantize_blocks(normal(304, width, seed=1), dtype, power_of_two=power_of_two)
    scales[:, 7] = torch.nan
    expected = rows_reference.gather_blocks(
        payload, scales, source, 8, offsets, transposed=True, power_of_two=power_of_two
    )
    # As ranks send them: a row's scales behind it, in bytes.
    packed = torch.cat([payload.view(torch.uint8), torch.zeros(304, 16, dtype=torch.uint8)], dim=1).cuda()
    strided = packed[:, :width].view(dtype), scales.cuda().t().contiguous().t()
    for x, own in ((payload.cuda(), scales.cuda()), strided):
        for rowwise, transposed in ((True, True), (True, False), (False, True)):
            settings = dict(rowwise=rowwise, transposed=transposed, power_of_two=power_of_two)
            found = ops.gather_blocks(x, own, source.cuda(), 8, offsets.cuda(), **settings)
            written = ((0, end, rowwise), (1, end, rowwise), (1, end, transposed), (0, end // 128, transposed))
            for one, other, (dim, count, is_wanted) in zip(found, expected, written, strict=True):
                if is_wanted:
                    assert equal(one.narrow(dim, 0, count), other.narrow(dim, 0, count))
                else:
                    assert one.numel() == 0


@pytest.mark.parametrize("width", [128, 384])
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("share", [0.7, 0.0], ids=["rows", "no rows"])
def test_activation_in_blocks(width: int, kind: str, share: float) -> None:
    """Values differ at rounding boundaries, as in `test_activation`; scales then by a power of two, so SNRs are
    compared. Each value keeps E4M3's 31.5 dB of a normal sample, less what wide blocks make subnormal."""
    num_rows = ops.most_rows(200, 2, 4)
    offsets, source, _ = rows_reference.routed_rows(routing(200, 4, 2, share=share), num_rows, 2)
    end, has_token = int(offsets[-1]), (source >= 0)[:, None]
    probs = torch.where(source < 0, 0.0, torch.rand(num_rows, generator=torch.Generator().manual_seed(3)))
    z = torch.where(has_token, normal(num_rows, KINDS[kind].num_inputs * width, seed=1, size=3.0), 0.0)
    grad = torch.where(has_token, normal(num_rows, width, seed=2, size=1e-4), 0.0)
    z[end:], grad[end:], probs[end:] = torch.nan, torch.inf, torch.nan
    operands, settings = (z, probs, offsets, Activation(kind), E4M3), {"power_of_two": True}
    on_gpu = (z.cuda(), probs.cuda(), offsets.cuda(), Activation(kind), E4M3)
    expected = (
        *activation_reference.expert_activation_quantize_blocks(*operands, **settings),
        *activation_reference.expert_activation_backward_quantize_blocks(grad, *operands, **settings),
    )
    found = (
        *ops.expert_activation_quantize_blocks(*on_gpu, **settings),
        *ops.expert_activation_backward_quantize_blocks(grad.cuda(), *on_gpu, **settings),
    )
    assert all(
        one.shape == other.shape and one.dtype == other.dtype for one, other in zip(found, expected, strict=True)
    )
    if end == 0:
        return
    for place in (0, 2, 4, 6):
        rows = slice(end) if place < 4 else (slice(None), slice(end))
        own, exact = (
            ops.dequantize_blocks(four[place].cpu(), four[place + 1].cpu())[rows] for four in (found, expected)
        )
        assert snr_db(own, exact) > 45.0, place
        scales, wanted = (four[place + 1].cpu() for four in (found, expected))
        scales, wanted = (one[:, :end] if place < 4 else one[: end // 128] for one in (scales, wanted))
        assert (scales == wanted).float().mean() > 0.98, place
    assert snr_db(found[8][:end].cpu(), expected[8][:end]) > FP32_DB - 10


@pytest.mark.parametrize("width", [16, 272, 1024])
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("share", [0.7, 0.0], ids=["rows", "no rows"])
def test_activation(width: int, kind: str, share: float) -> None:
    num_rows = ops.most_rows(200, 2, 4)
    offsets, source, _ = rows_reference.routed_rows(routing(200, 4, 2, share=share), num_rows, 2)
    end, has_token = int(offsets[-1]), (source >= 0)[:, None]
    assert end < num_rows
    probs = torch.where(source < 0, 0.0, torch.rand(num_rows, generator=torch.Generator().manual_seed(3)))
    z = torch.where(has_token, normal(num_rows, KINDS[kind].num_inputs * width, seed=1, size=3.0), 0.0)
    grad = torch.where(has_token, normal(num_rows, width, seed=2, size=1e-4), 0.0)
    z[end:], grad[end:], probs[end:] = torch.nan, torch.inf, torch.nan
    operands, rows = (z, Activation(kind)), ops.ExpertRows(probs, offsets)
    on_gpu, own = (z.cuda(), Activation(kind)), ops.ExpertRows(probs.cuda(), offsets.cuda())

    wanted = (
        activation_reference.expert_activation(*operands, rows),
        *activation_reference.expert_activation_backward(grad, *operands, rows),
    )
    found = (
        ops.expert_activation(*on_gpu, own),
        *ops.expert_activation_backward(grad.cuda(), *on_gpu, own),
    )
    for one, other, least in zip(found, wanted, (BF16_DB, BF16_DB, FP32_DB - 10), strict=True):
        assert one.dtype == other.dtype and (end == 0 or snr_db(one[:end].cpu(), other[:end]) > least)
    payload, scale = reference.activation_quantize(*operands, E4M3, rows, scale=None)
    measured, taken = ops.activation_quantize(*on_gpu, E4M3, own, scale=None)
    torch.testing.assert_close(taken.cpu(), scale, rtol=1e-5, atol=0)
    amax = ops.activation_amax(*on_gpu, own)
    torch.testing.assert_close(amax.cpu(), reference.activation_amax(*operands, rows), rtol=1e-5, atol=0)
    settings = {"scale": None, "activation_dtype": E4M3}
    expected = reference.activation_backward_quantize(grad, *operands, E5M2, rows, **settings, activation_scale=scale)
    result = ops.activation_backward_quantize(grad.cuda(), *on_gpu, E5M2, own, **settings, activation_scale=taken)
    torch.testing.assert_close(result[4].cpu(), expected[4], rtol=1e-5, atol=0)
    backward_amax = ops.activation_backward_amax(grad.cuda(), *on_gpu, own)
    if end:
        assert_same_payload(measured[:end], payload[:end])
        for index, values in ((0, result[0][:end]), (1, result[1][:, :end]), (2, result[2][:, :end])):
            assert_same_payload(values, expected[index][:end] if index == 0 else expected[index][:, :end])
        assert snr_db(result[3][:end].cpu(), expected[3][:end]) > FP32_DB - 10

    record, of_grad = torch.zeros(3, device="cuda"), torch.zeros(3, device="cuda")
    again, _ = ops.activation_quantize(*on_gpu, E4M3, own, scale=taken, amax_out=record)
    assert equal(again[:end], measured[:end].cpu())
    given = ops.activation_backward_quantize(
        grad.cuda(),
        *on_gpu,
        E5M2,
        own,
        scale=result[4] / 4,
        amax_out=of_grad,
        activation_dtype=E4M3,
        activation_scale=taken,
    )
    assert equal(given[2][:, :end], result[2][:, :end].cpu()) and equal(given[3][:end], result[3][:end].cpu())
    wanted = torch.zeros(3)
    reference.activation_backward_quantize(
        grad,
        *operands,
        E5M2,
        rows,
        scale=expected[4] / 4,
        amax_out=wanted,
        activation_dtype=E4M3,
        activation_scale=scale,
    )
    torch.testing.assert_close(record[0:1], amax, rtol=1e-6, atol=0)
    torch.testing.assert_close(of_grad[0:1], backward_amax, rtol=1e-6, atol=0)
    assert record[1] == 0 and record[2] == end * width and of_grad[2] == wanted[2]
    torch.testing.assert_close(of_grad[1].cpu(), wanted[1], rtol=0.01, atol=1.0)
