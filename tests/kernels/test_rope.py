"""RoPE's specification against complex numbers in float64 and against megatron-core; the Triton kernels against it."""

from __future__ import annotations

import math

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from torch import Tensor

from fp8_megatron.dtypes import E5M2
from fp8_megatron.kernels import ops
from fp8_megatron.kernels.ops import QKNorm, Rotation
from fp8_megatron.kernels.rope import reference as rope
from fp8_megatron.nn.rope import cos_sin_table, rope_frequencies
from fp8_megatron.quantization.stats import snr_db

#: s, b, groups, query heads of a group, columns of a head, rotated columns.
SHAPES = [
    (8, 2, 2, 2, 16, 16),
    (12, 3, 1, 4, 32, 8),
    (36, 3, 2, 1, 128, 128),
    (64, 4, 8, 4, 128, 128),
    (20, 1, 3, 2, 80, 80),
    (20, 2, 3, 5, 96, 24),
    (16, 2, 2, 2, 80, 20),
    (40, 2, 2, 2, 256, 256),
]
INTERLEAVED = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def normal(*shape: int, seed: int, size: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * size).to(dtype)


def rotation_of(shape: tuple[int, ...], interleaved: bool) -> Rotation:
    """Angles at positions 1000 and later, so that every pair turns."""
    sequence, head_dim, rotary_dim = shape[0], shape[4], shape[5]
    if rotary_dim == 0:
        return Rotation(torch.empty(sequence, 2, 0), head_dim, False)
    table = cos_sin_table(rope_frequencies(rotary_dim, 10000), 1000 + sequence)[1000:]
    return Rotation(table.contiguous(), head_dim, interleaved)


def gradients(shape: tuple[int, ...], *, by_head: bool = False) -> list[Tensor]:
    """BF16 gradients of query, key and value; `by_head`: in memory [b, heads, s, d], as attention writes them."""
    seq, batch, groups, heads, head_dim, _ = shape
    grads = [
        normal(seq, batch, groups, width * head_dim, seed=seed, size=1e-3) for seed, width in enumerate((heads, 1, 1))
    ]
    if by_head:
        grads = [grad.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3) for grad in grads]
    return grads


def exact(x: Tensor, rotation: Rotation, *, inverse: bool = False) -> Tensor:
    """Query or key [s, b, groups, heads · d] in float64, each pair multiplied by exp(i · angle)."""
    cos_sin, head_dim, interleaved = rotation
    half = cos_sin.shape[2]
    if half == 0:
        return x.double()
    heads = x.double().reshape(*x.shape[:2], -1, head_dim)
    turned = heads[..., : 2 * half]
    pairs = turned.unflatten(-1, (half, 2)) if interleaved else turned.unflatten(-1, (2, half)).transpose(-1, -2)
    angle = torch.complex(cos_sin[:, 0].double(), cos_sin[:, 1].double())[:, None, None]
    product = torch.view_as_complex(pairs.contiguous()) * (angle.conj() if inverse else angle)
    pairs = torch.view_as_real(product)
    turned = pairs.flatten(-2) if interleaved else pairs.transpose(-1, -2).flatten(-2)
    return torch.cat([turned, heads[..., 2 * half :]], dim=-1).view(x.shape)


@INTERLEAVED
@shapes
def test_rotates_in_place_by_the_angles(shape: tuple[int, ...], interleaved: bool) -> None:
    """One rounding to BF16 is at most 2⁻⁸ of the value; two products and a sum in FP32 add 3 · 2⁻²⁴ of the pair."""
    seq, batch, groups, heads, head_dim, rotary_dim = shape
    rotation = rotation_of(shape, interleaved)
    y = normal(seq * batch, groups * (heads + 2) * head_dim, seed=1)
    before = y.clone().view(seq, batch, groups, heads + 2, head_dim)
    query, key, value = ops.split_rotated_qkv(y, rotation, heads_per_group=heads)
    assert torch.equal(y, before.view(y.shape))
    ops.rotate_qk_(y, rotation, heads_per_group=heads)
    after = y.view(seq, batch, groups, heads + 2, head_dim)
    assert torch.equal(after[..., -1, :], before[..., -1, :])  # value
    split = [part.view(seq, batch, groups, -1, head_dim) for part in (query, key, value)]
    assert torch.equal(torch.cat(split, dim=3), after)
    assert torch.equal(after[..., rotary_dim:], before[..., rotary_dim:])
    query_key = before[..., :-1, :].flatten(3)
    expected = exact(query_key, rotation).view(*after.shape[:3], -1, head_dim)
    error = (after[..., :-1, :].double() - expected).abs()
    assert (error <= 2.0**-8 * expected.abs() + 3 * 2.0**-24 * query_key.abs().max()).all()
    assert (after[..., :-1, :rotary_dim] != before[..., :-1, :rotary_dim]).float().mean() > 0.5


@INTERLEAVED
@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_is_megatrons_rotation(rotary_dim: int, interleaved: bool) -> None:
    """Of FP32 values, megatron-core's differs by roundings of its products alone."""
    x = normal(24, 2, 3, 16, seed=1, dtype=torch.float32)
    frequencies = rope_frequencies(rotary_dim, 10000)
    angles = torch.outer(torch.arange(24, dtype=torch.float64), frequencies)
    wide = angles.repeat_interleave(2, dim=1) if interleaved else torch.cat([angles, angles], dim=1)
    expected = _apply_rotary_pos_emb_bshd(x, wide[:, None, None].float(), rotary_interleaved=interleaved)
    measured = rope.rotated(x, Rotation(cos_sin_table(frequencies, 24), 16, interleaved))
    torch.testing.assert_close(measured, expected, rtol=0, atol=1e-5)  # an angle of 23 in FP32 is off by 2⁻²⁰


@INTERLEAVED
@shapes
def test_the_gradient_is_rotated_back(shape: tuple[int, ...], interleaved: bool) -> None:
    rotation, grads = rotation_of(shape, interleaved), gradients(shape)
    joined = ops.unrotate_qkv_grad(grads, rotation)
    parts = [exact(grads[0], rotation, inverse=True), exact(grads[1], rotation, inverse=True), grads[2].double()]
    expected = torch.cat(parts, dim=3).flatten(0, 1).flatten(1)
    error = (joined.double() - expected).abs()
    assert (error <= 2.0**-8 * expected.abs() + 3 * 2.0**-24 * max(grad.abs().max() for grad in grads)).all()

    amax = ops.rotated_qkv_grad_amax(grads, rotation)
    assert amax.item() == pytest.approx(expected.abs().max().item(), rel=1e-6)
    record, scale = torch.zeros(3), torch.full((1,), 2.0**-22)
    payload, payload_t, sums, _ = ops.quantize_rotated_qkv_grad(
        grads, rotation, E5M2, scale=scale, column_sums=True, amax_out=record
    )
    assert record[0] == amax and record[2] == payload.numel()
    assert torch.equal(payload_t.view(torch.uint8), payload.view(torch.uint8).t())
    # E5M2 has two bits of mantissa, and its smallest subnormal number is 2⁻¹⁶.
    error = (payload.double() * 2.0**-22 - expected).abs()
    assert (error <= 2.0**-3 * (1 + 1e-6) * expected.abs() + 2.0**-39).all()
    torch.testing.assert_close(sums.double(), expected.sum(dim=0), rtol=1e-5, atol=1e-6)


#: Also without RoPE: no column is rotated.
NORMED = [*SHAPES, (8, 2, 2, 2, 64, 0)]
STYLES = pytest.mark.parametrize("rms", [False, True], ids=["layernorm", "rmsnorm"])


def norm_of(head_dim: int, rms: bool, dtype: torch.dtype = torch.bfloat16) -> QKNorm:
    query, key, query_bias, key_bias = (normal(head_dim, seed=20 + i, size=0.2, dtype=dtype) for i in range(4))
    return QKNorm(1 + query, 1 + key, *((None, None) if rms else (query_bias, key_bias)), 1e-5, rms)


def exactly_normed(
    y: Tensor, rotation: Rotation, norm: QKNorm, shape: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value [s, b, groups, width] of y [T, N] in float64, by torch's own norms; differentiable."""
    seq, batch, groups, heads, head_dim, _ = shape
    query, key, value = y.view(seq, batch, groups, -1).split([heads * head_dim, head_dim, head_dim], dim=3)

    def normed(part: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        split = part.unflatten(3, (-1, head_dim))
        if norm.rms:
            split = torch.nn.functional.rms_norm(split, (head_dim,), weight, norm.eps)
        else:
            split = torch.nn.functional.layer_norm(split, (head_dim,), weight, bias, norm.eps)
        return exact(split.flatten(3), rotation)

    return normed(query, norm.query_weight, norm.query_bias), normed(key, norm.key_weight, norm.key_bias), value


def wide(norm: QKNorm) -> QKNorm:
    """Leaves in float64."""
    params = [None if param is None else param.double().requires_grad_() for param in norm[:4]]
    return QKNorm(params[0], params[1], params[2], params[3], norm.eps, norm.rms)  # type: ignore[arg-type]


@INTERLEAVED
@STYLES
@pytest.mark.parametrize("shape", NORMED, ids=str)
def test_norms_heads_before_rotating_them(shape: tuple[int, ...], rms: bool, interleaved: bool) -> None:
    """Values and the gradient of y round to BF16, which leaves 50 dB at least; sums in FP32 are 10⁻⁶ off."""
    seq, batch, groups, heads, head_dim, rotary_dim = shape
    rotation = rotation_of(shape, interleaved)
    norm = norm_of(head_dim, rms)
    y = normal(seq * batch, groups * (heads + 2) * head_dim, seed=1, size=3.0) + 0.5
    y64, norm64 = y.double().requires_grad_(), wide(norm)
    expected = exactly_normed(y64, rotation, norm64, shape)
    query, key = ops.norm_rotate_qk(y, rotation, norm, heads_per_group=heads)
    for part, whole in zip((query, key), expected[:2], strict=True):
        assert snr_db(part, whole.detach().reshape(part.shape)) > 50
    grads = gradients(shape, by_head=True)
    torch.autograd.backward(expected, [grad.double() for grad in grads])
    grad_y, of_weights, of_biases = ops.norm_rotate_qk_backward(grads, y, rotation, norm)
    assert y64.grad is not None and snr_db(grad_y, y64.grad) > 50
    for sums, params in ((of_weights, norm64[:2]), (of_biases, norm64[2:4])):
        for one, param in zip(sums, params, strict=False):
            assert param is not None and param.grad is not None and snr_db(one, param.grad) > 100
    assert of_biases.shape == (0 if rms else 2, head_dim)
    assert rotary_dim or torch.equal(rotation.cos_sin, torch.empty(seq, 2, 0))


@pytest.mark.gpu
@INTERLEAVED
@STYLES
@pytest.mark.parametrize("shape", NORMED, ids=str)
def test_kernels_norm_heads(shape: tuple[int, ...], rms: bool, interleaved: bool) -> None:
    """Sums over a head are rounded otherwise there: BF16 values differ where they fall beside a rounding boundary."""
    seq, batch, groups, heads, head_dim, _ = shape
    rotation, norm = rotation_of(shape, interleaved), norm_of(head_dim, rms)
    y = normal(seq * batch, groups * (heads + 2) * head_dim, seed=1, size=3.0) + 0.5
    moved = QKNorm(*(None if param is None else param.cuda() for param in norm[:4]), norm.eps, rms)  # type: ignore[arg-type]
    expected = ops.norm_rotate_qk(y, rotation, norm, heads_per_group=heads)
    for measured, wanted in zip(
        ops.norm_rotate_qk(y.cuda(), on_gpu(rotation), moved, heads_per_group=heads), expected, strict=True
    ):
        assert snr_db(measured.cpu(), wanted) > 60
    for by_head in (False, True):
        grads = gradients(shape, by_head=by_head)
        wanted = ops.norm_rotate_qk_backward(grads, y, rotation, norm)
        back = ops.norm_rotate_qk_backward([grad.cuda() for grad in grads], y.cuda(), on_gpu(rotation), moved)
        again = ops.norm_rotate_qk_backward([grad.cuda() for grad in grads], y.cuda(), on_gpu(rotation), moved)
        assert_same_bits(back, again)
        assert snr_db(back[0].cpu(), wanted[0]) > 60 and snr_db(back[1].cpu(), wanted[1]) > 100
        assert rms or snr_db(back[2].cpu(), wanted[2]) > 100


def bits(*tensors: Tensor) -> list[Tensor]:
    return [tensor.cpu().contiguous().view(torch.uint8) for tensor in tensors]


def assert_same_bits(measured: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for one, other in zip(bits(*measured), bits(*expected), strict=True):
        assert torch.equal(one, other)


def on_gpu(rotation: Rotation) -> Rotation:
    return rotation._replace(cos_sin=rotation.cos_sin.cuda())


@pytest.mark.gpu
@INTERLEAVED
@shapes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_kernels_rotate_bit_for_bit(shape: tuple[int, ...], interleaved: bool, dtype: torch.dtype) -> None:
    seq, batch, groups, heads, head_dim, _ = shape
    rotation = rotation_of(shape, interleaved)
    y = normal(seq * batch, groups * (heads + 2) * head_dim, seed=1, dtype=dtype)
    measured = y.cuda()
    parts = ops.split_rotated_qkv(measured, on_gpu(rotation), heads_per_group=heads)
    assert_same_bits(parts, ops.split_rotated_qkv(y, rotation, heads_per_group=heads))
    ops.rotate_qk_(measured, on_gpu(rotation), heads_per_group=heads)
    ops.rotate_qk_(y, rotation, heads_per_group=heads)
    assert_same_bits((measured,), (y,))
    for by_head in (False, True):
        grads = [grad.to(dtype) for grad in gradients(shape, by_head=by_head)]
        back = ops.unrotate_qkv_grad([grad.cuda() for grad in grads], on_gpu(rotation))
        assert_same_bits((back,), (ops.unrotate_qkv_grad(grads, rotation),))


@pytest.mark.gpu
@INTERLEAVED
@shapes
@pytest.mark.parametrize("by_head", [False, True], ids=["by_token", "by_head"])
@pytest.mark.parametrize("value", [None, math.inf, math.nan], ids=str)
def test_kernels_cast_bit_for_bit(
    shape: tuple[int, ...], interleaved: bool, by_head: bool, value: float | None
) -> None:
    """With a given scale and the values' own. An inf or a NaN beside columns that are not rotated stays by itself."""
    rotation, grads = rotation_of(shape, interleaved), gradients(shape, by_head=by_head)
    if value is not None:
        grads[0][3, 0, 0, 1] = value
        grads[1][5, 0, 0, shape[4] - 1] = value
    moved = [grad.cuda() for grad in grads]
    # 10⁻⁹: some elements clamp, so that their count is tested, too.
    for scale in (None, torch.full((1,), 1e-7), torch.full((1,), 1e-9)):
        expected_record = None if scale is None else torch.zeros(3)
        record = None if scale is None else torch.zeros(3, device="cuda")
        expected = ops.quantize_rotated_qkv_grad(
            grads, rotation, E5M2, scale=scale, column_sums=True, amax_out=expected_record
        )
        given = None if scale is None else scale.cuda()
        measured = ops.quantize_rotated_qkv_grad(
            moved, on_gpu(rotation), E5M2, scale=given, column_sums=True, amax_out=record
        )
        if value is None:
            assert_same_bits((*measured[:2], measured[3]), (*expected[:2], expected[3]))
            torch.testing.assert_close(measured[2].cpu(), expected[2], rtol=1e-4, atol=1e-6)
        else:  # NaNs have many bits
            for one, other in zip((*measured[:2], measured[3]), (*expected[:2], expected[3]), strict=True):
                torch.testing.assert_close(one.cpu().float(), other.float(), rtol=0, atol=0, equal_nan=True)
        if record is not None and expected_record is not None:
            torch.testing.assert_close(record.cpu(), expected_record, rtol=0, atol=0, equal_nan=True)
    amax = ops.rotated_qkv_grad_amax(moved, on_gpu(rotation)).cpu()
    torch.testing.assert_close(amax, ops.rotated_qkv_grad_amax(grads, rotation), rtol=0, atol=0, equal_nan=True)
