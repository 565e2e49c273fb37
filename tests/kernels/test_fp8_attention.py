"""FP8 attention against float64 attention of the same FP8 values: the specification, and cuDNN's kernels on a GPU.

Noise as a signal-to-noise ratio: one cast keeps 31.5 dB in E4M3 and 25.5 dB in E5M2 (tests/nn/test_linear.py). A
product's sum over keys keeps the ratio of its cast factor. So O has the noise of P's cast and of its own: 28.5 dB. dQ
and dK have that of dS's cast and of their own, both E5M2: 22.5 dB. dV has that of P's cast and of its own: 24.5 dB.
Tests allow 1.5 dB: rows with few keys average less, and D inherits O's noise.
"""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch
from torch import Tensor

from fp8_megatron.dtypes import E4M3, E5M2, MAX_FINITE
from fp8_megatron.kernels import ops
from fp8_megatron.quantization.stats import snr_db

SLACK_DB = 1.5
HAS_KERNELS = torch.cuda.is_available() and importlib.util.find_spec("cudnn") is not None
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not HAS_KERNELS, reason="needs a Hopper GPU and nvidia-cudnn-frontend"),
        ],
    ),
]


def cast(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scale = ops.scale_from_amax(ops.amax(x), dtype, power_of_two=False)
    return ops.encode(x, scale, dtype), scale


def make_inputs(s: int, b: int, heads: int, groups: int, d: int, device: str) -> ops.AttentionInputs:
    generator = torch.Generator().manual_seed(0)
    casts = [cast(torch.randn(s, b, n, d, generator=generator).to(device), E4M3) for n in (heads, groups, groups)]
    return ops.AttentionInputs(*(payload for payload, _ in casts), *(scale for _, scale in casts))


def exact(inputs: ops.AttentionInputs, grad: Tensor, softmax_scale: float) -> list[Tensor]:
    """O, dQ, dK, dV, log Σ exp and dS in float64."""
    query, key, value = (
        (payload.double() * scale.double()).requires_grad_()
        for payload, scale in zip(inputs[:3], inputs[3:], strict=True)
    )
    repeats = query.shape[2] // key.shape[2]
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2)
    scores.retain_grad()
    masked = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf) * softmax_scale
    out = (masked.softmax(dim=-1) @ v).permute(2, 0, 1, 3)
    out.backward(grad)
    gradients = [query.grad, key.grad, value.grad]
    assert all(x is not None for x in gradients) and scores.grad is not None
    return [out.detach(), *gradients, masked.logsumexp(dim=-1).detach(), scores.grad]  # type: ignore[list-item]


def written(amax: Tensor) -> ops.WrittenCast:
    scale = ops.scale_from_amax(amax.float().reshape(1), E5M2, power_of_two=False)
    return ops.WrittenCast(scale, scale.reciprocal(), torch.zeros_like(scale))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(128, 2, 4, 4, 128), (256, 1, 4, 2, 128), (192, 3, 4, 1, 128)])
def test_values_and_gradients(shape: tuple[int, int, int, int, int], device: str) -> None:
    s, b, heads, _, d = shape
    inputs = make_inputs(*shape, device)
    softmax_scale = 1 / math.sqrt(d)
    generator = torch.Generator().manual_seed(1)
    grad, scale_grad = cast((1e-4 * torch.randn(s, b, heads, d, generator=generator)).to(device), E5M2)
    true = exact(inputs, grad.double() * scale_grad.double(), softmax_scale)

    out, log_sum_exp = ops.fp8_attention(inputs, inputs.scale_value.reciprocal(), softmax_scale=softmax_scale)
    assert out.dtype == E4M3 and out.is_contiguous() and out.shape == (s, b, heads, d)
    assert snr_db(out.double() * inputs.scale_value, true[0]) > 28.5 - SLACK_DB
    # FP32 sums of s exponentials of scores with |score| < 2⁵: both errors stay below 2⁻¹⁶.
    torch.testing.assert_close(log_sum_exp, true[4].float(), rtol=0, atol=1e-3 if device == "cuda" else 2.0**-16)

    casts = ops.AttentionGradCasts(*(written(x.abs().max()) for x in (true[5], *true[1:4])))
    grads = ops.fp8_attention_backward(
        inputs, grad, scale_grad, out, inputs.scale_value, log_sum_exp, casts, softmax_scale=softmax_scale
    )
    bounds = (22.5, 22.5, 24.5)
    for payload, of_cast, gradient, bound in zip(grads, casts[1:], true[1:4], bounds, strict=True):
        assert payload.dtype == E5M2 and payload.is_contiguous() and payload.shape == gradient.shape
        assert snr_db(payload.double() * of_cast.scale, gradient) > bound - SLACK_DB
    for of_cast, gradient in zip(casts, (true[5], *true[1:4]), strict=True):
        # The amax is of the values before the cast; its own noise is that of one of them.
        assert of_cast.amax.item() == pytest.approx(gradient.abs().max().item(), rel=0.15)


@pytest.mark.parametrize("device", DEVICES)
def test_strides_do_not_matter(device: str) -> None:
    """Query, key and value as views of one tensor give the bits of contiguous ones."""
    s, b, heads, d = 128, 2, 4, 128
    inputs = make_inputs(s, b, heads, heads, d, device)
    whole = torch.cat([x.view(torch.uint8) for x in inputs[:3]], dim=3).view(E4M3)
    views = ops.AttentionInputs(*whole.split(d, dim=3), *inputs[3:])
    assert not views.query.is_contiguous()
    for one, other in zip(
        ops.fp8_attention(inputs, inputs.scale_value.reciprocal(), softmax_scale=0.125),
        ops.fp8_attention(views, inputs.scale_value.reciprocal(), softmax_scale=0.125),
        strict=True,
    ):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("device", DEVICES)
def test_an_amax_beyond_the_scale_saturates_and_is_written(device: str) -> None:
    s, b, heads, d = 128, 1, 2, 128
    inputs = make_inputs(s, b, heads, heads, d, device)
    grad, scale_grad = cast(torch.randn(s, b, heads, d).to(device), E5M2)
    out, log_sum_exp = ops.fp8_attention(inputs, inputs.scale_value.reciprocal(), softmax_scale=0.125)
    one = torch.ones(1, device=device)
    tiny = 2.0**-20 * one
    casts = ops.AttentionGradCasts(
        ops.WrittenCast(tiny * 2.0**7, 2.0**13 * one, 0 * one), *(ops.WrittenCast(tiny, 2.0**20 * one, 0 * one),) * 3
    )
    grads = ops.fp8_attention_backward(
        inputs, grad, scale_grad, out, inputs.scale_value, log_sum_exp, casts, softmax_scale=0.125
    )
    for payload, of_cast in zip(grads, casts[1:], strict=True):
        assert payload.float().abs().max() == MAX_FINITE[E5M2]
        assert of_cast.amax.item() > MAX_FINITE[E5M2] * tiny.item()


def test_shapes_are_checked() -> None:
    inputs = make_inputs(32, 1, 4, 2, 24, "cpu")
    with pytest.raises(ValueError, match=r"multiple of 16, not 24"):
        ops.fp8_attention(inputs, torch.ones(1), softmax_scale=1.0)
    inputs = make_inputs(32, 1, 3, 2, 16, "cpu")
    with pytest.raises(ValueError, match=r"groups that divide heads, not \[32, 1, 3, 16\]"):
        ops.fp8_attention(inputs, torch.ones(1), softmax_scale=1.0)
