"""FP8 on both sides of attention: heads rotated and cast to E4M3, and E5M2 gradients rotated back and cast again.

The specifications against float64, the Triton kernels bit for bit against the specifications.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fp8_megatron.dtypes import CLAMPED_ABOVE, E4M3, E5M2
from fp8_megatron.kernels import ops
from fp8_megatron.kernels.ops import KnownCast, QKVCasts, Rotation
from tests.kernels.test_rope import (
    INTERLEAVED,
    SHAPES,
    assert_same_bits,
    exact,
    gradients,
    normal,
    on_gpu,
    rotation_of,
)

#: Of test_rope.py, and without angles.
SHAPES = [*SHAPES, (64, 2, 2, 4, 128, 0), (20, 1, 3, 1, 80, 0)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
#: Of query, key and value: near the cast's largest value, below it, and so small that some values clamp.
SCALES = (2.0**-6, 1.7e-2, 2.5e-3)


def projected(shape: tuple[int, ...]) -> Tensor:
    seq, batch, groups, heads, head_dim, _ = shape
    return normal(seq * batch, groups * (heads + 2) * head_dim, seed=1)


def casts(size: int | None, device: str = "cpu") -> QKVCasts:
    """With records of `size` numbers, or none."""
    known = [
        KnownCast(torch.full((1,), scale, device=device), None if size is None else torch.zeros(size, device=device))
        for scale in SCALES
    ]
    return QKVCasts(*known)


def fp8_gradients(shape: tuple[int, ...], *, by_head: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    """E5M2, and their dequantising scales."""
    scales = [torch.full((1,), scale) for scale in (3e-7, 2.0**-21, 1e-7)]
    grads = [
        ops.encode(grad, scale, E5M2) for grad, scale in zip(gradients(shape, by_head=by_head), scales, strict=True)
    ]
    return grads, scales


def decoded(grads: list[Tensor], scales: list[Tensor]) -> list[Tensor]:
    return [ops.decode(grad, scale) for grad, scale in zip(grads, scales, strict=True)]


def exact_heads(y: Tensor, rotation: Rotation, shape: tuple[int, ...]) -> list[Tensor]:
    """Query and key rotated, and value, float64 [T, columns]."""
    seq, batch, groups, heads, head_dim, _ = shape
    parts = y.view(seq, batch, groups, -1).split([heads * head_dim, head_dim, head_dim], dim=3)
    turned = exact(parts[0], rotation), exact(parts[1], rotation), parts[2].double()
    return [part.reshape(seq * batch, -1) for part in turned]


@INTERLEAVED
@shapes
def test_casts_the_rotated_heads_once(shape: tuple[int, ...], interleaved: bool) -> None:
    """E4M3 rounds by at most 2⁻⁴ of a value, or half of its smallest subnormal number, 2⁻⁹. FP32 products and a sum add
    3 · 2⁻²⁴ of the pair."""
    rotation, y, known = rotation_of(shape, interleaved), projected(shape), casts(3)
    payloads = ops.quantize_rotated_qkv(y, rotation, known, heads_per_group=shape[3])
    expected = exact_heads(y, rotation, shape)
    for payload, cast, value in zip(payloads, known, expected, strict=True):
        assert payload.dtype == E4M3 and payload.is_contiguous() and payload.shape == value.shape
        scale, record = cast.scale.item(), cast.record
        assert record is not None
        clamped = value.abs() > CLAMPED_ABOVE[E4M3] * scale
        error = (payload.double() * scale - value).abs()
        bound = 2.0**-4 * value.abs() + 2.0**-10 * scale + 3 * 2.0**-24 * y.abs().max()
        assert (error <= bound)[~clamped].all()
        assert (payload.float().abs() == 448)[clamped].all()
        assert record[0].item() == pytest.approx(value.abs().max().item(), rel=1e-6)
        # Values within 10⁻⁶ of the limit may fall on either side of it.
        assert abs(record[1].item() - clamped.sum().item()) <= 1 and record[2] == value.numel()
    assert known.value.record is not None and known.value.record[1] > 0


@INTERLEAVED
@shapes
def test_fp8_gradients_are_cast_as_their_values(shape: tuple[int, ...], interleaved: bool) -> None:
    rotation, scale = rotation_of(shape, interleaved), torch.full((1,), 2.0**-22)
    grads, scales = fp8_gradients(shape)
    records = torch.zeros(2, 3)
    measured = ops.quantize_rotated_qkv_grad(
        grads, rotation, E5M2, scale=scale, column_sums=True, amax_out=records[0], grad_scales=scales
    )
    expected = ops.quantize_rotated_qkv_grad(
        decoded(grads, scales), rotation, E5M2, scale=scale, column_sums=True, amax_out=records[1]
    )
    assert_same_bits(measured, expected)
    assert torch.equal(records[0], records[1]) and records[0, 0] > 0


@pytest.mark.gpu
@INTERLEAVED
@shapes
@pytest.mark.parametrize("size", [None, 1, 3])
@pytest.mark.parametrize("value", [None, math.inf, math.nan], ids=str)
def test_kernels_cast_heads_bit_for_bit(
    shape: tuple[int, ...], interleaved: bool, size: int | None, value: float | None
) -> None:
    rotation, y, heads = rotation_of(shape, interleaved), projected(shape), shape[3]
    if value is not None:
        y[3, 1] = y[5, heads * shape[4] + 2] = y[6, -1] = value
    known, moved = casts(size), casts(size, "cuda")
    expected = ops.quantize_rotated_qkv(y, rotation, known, heads_per_group=heads)
    measured = ops.quantize_rotated_qkv(y.cuda(), on_gpu(rotation), moved, heads_per_group=heads)
    for one, other in zip(measured, expected, strict=True):  # NaNs have two signs
        torch.testing.assert_close(one.cpu().float(), other.float(), rtol=0, atol=0, equal_nan=True)
    for cast, wanted in zip(moved, known, strict=True):
        if cast.record is not None and wanted.record is not None:
            torch.testing.assert_close(cast.record.cpu(), wanted.record, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@INTERLEAVED
@shapes
@pytest.mark.parametrize("by_head", [False, True], ids=["by_token", "by_head"])
def test_kernels_cast_fp8_gradients_bit_for_bit(shape: tuple[int, ...], interleaved: bool, by_head: bool) -> None:
    rotation = rotation_of(shape, interleaved)
    grads, scales = fp8_gradients(shape, by_head=by_head)
    moved = [grad.cuda() for grad in grads], [scale.cuda() for scale in scales]
    # 10⁻⁹: some elements clamp, so that their count is tested, too.
    for scale in (torch.full((1,), 1e-7), torch.full((1,), 1e-9)):
        wanted, record = torch.zeros(3), torch.zeros(3, device="cuda")
        expected = ops.quantize_rotated_qkv_grad(
            grads, rotation, E5M2, scale=scale, column_sums=True, amax_out=wanted, grad_scales=scales
        )
        measured = ops.quantize_rotated_qkv_grad(
            moved[0],
            on_gpu(rotation),
            E5M2,
            scale=scale.cuda(),
            column_sums=True,
            amax_out=record,
            grad_scales=moved[1],
        )
        assert_same_bits(measured[:2], expected[:2])
        torch.testing.assert_close(measured[2].cpu(), expected[2], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(record.cpu(), wanted, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[5] == 0], ids=str)
def test_kernels_without_angles_move_the_same_values(shape: tuple[int, ...]) -> None:
    rotation, y, grads = rotation_of(shape, False), projected(shape), gradients(shape)
    turned, moved = on_gpu(rotation), [grad.cuda() for grad in grads]
    parts = ops.split_rotated_qkv(y.cuda(), turned, heads_per_group=shape[3])
    assert_same_bits(parts, ops.split_rotated_qkv(y, rotation, heads_per_group=shape[3]))
    assert_same_bits((ops.unrotate_qkv_grad(moved, turned),), (ops.unrotate_qkv_grad(grads, rotation),))
    assert_same_bits((ops.rotated_qkv_grad_amax(moved, turned),), (ops.rotated_qkv_grad_amax(grads, rotation),))
    measured = ops.quantize_rotated_qkv_grad(moved, turned, E5M2, scale=None, column_sums=False)
    assert_same_bits(measured, ops.quantize_rotated_qkv_grad(grads, rotation, E5M2, scale=None, column_sums=False))
