"""The only entry to the kernels: typed functions that call the ``fp8_megatron::`` operators (see `registration`).

Each function names its specification in plain PyTorch, which documents arguments, shapes and numerics.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..device.device import UnsupportedDeviceError
from ..dtypes import COMPANDED_DTYPES, E4M3, FP8_DTYPES, FP8_GEMM_MULTIPLE, GEMM_BLOCK
from . import registration
from .activation import reference as activation
from .adamw import reference as _adamw  # noqa: F401 (declares its operators, as the others do)
from .adamw.operands import AdamHyper, AdamState, FlatState, SplitAdamState
from .adamw.split_master import join_master as join_master
from .adamw.split_master import next_weight_scales as next_weight_scales
from .adamw.split_master import split_master as split_master
from .attention import partials as _partials  # noqa: F401
from .attention.blocks import BlockKernel as BlockKernel
from .attention.blocks import attention_block as attention_block
from .attention.blocks import attention_block_backward as attention_block_backward
from .attention.reference import AttentionGradCasts as AttentionGradCasts
from .attention.reference import AttentionInputs as AttentionInputs
from .attention.reference import WrittenCast as WrittenCast
from .cross_entropy.reference import KEPT as KEPT
from .cross_entropy.reference import PAYLOAD_SCALE as PAYLOAD_SCALE
from .gemm.block_scaled import check_block_scaled_mm
from .gemm.reference import check_scaled_mm
from .health.reference import LOWEST_EXPONENT as LOWEST_EXPONENT
from .health.reference import NUM_MAXIMA as NUM_MAXIMA
from .health.reference import NUM_STATISTICS as NUM_STATISTICS
from .health.reference import Statistic as Statistic
from .norm import reference as _norm  # noqa: F401
from .quantize import reference as _quantize  # noqa: F401
from .quantize import weight as _weight  # noqa: F401
from .quantize.blocks import dequantize_blocks as dequantize_blocks
from .quantize.blockwise import load_state as load_state
from .reference import decode as decode
from .reference import encode as encode
from .reference import round_up_to_power_of_two as round_up_to_power_of_two
from .reference import scale_from_amax as scale_from_amax
from .rope.normed import QKNorm as QKNorm
from .rope.quantized import KnownCast as KnownCast
from .rope.quantized import QKVCasts as QKVCasts
from .rope.reference import Rotation as Rotation
from .rounding import Places as Places
from .rounding import seed_of as seed_of
from .scales.reference import RECORD_SIZE as RECORD_SIZE
from .scales.reference import REPORT_HEAD as REPORT_HEAD
from .scales.reference import REPORT_SUMS as REPORT_SUMS
from .scales.reference import SAMPLE_EVERY as SAMPLE_EVERY
from .scales.reference import SAMPLED_FROM as SAMPLED_FROM
from .wire.reference import sum_of_rows as sum_of_rows

_OPS = registration.callables()


def amax(x: Tensor) -> Tensor:
    """`reference.amax`: FP32 [1]."""
    return _OPS.amax(x)


def quantize_current(
    x: Tensor, dtype: torch.dtype, *, power_of_two: bool = False, rowwise: bool = True, transposed: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """`quantize.reference.quantize_current`: payload [M, K], transposed payload [K, M], scale [1]."""
    assert x.ndim == 2 and dtype in FP8_DTYPES, (x.shape, dtype)
    return _OPS.quantize_current(x, dtype, power_of_two, rowwise, transposed)


def quantize_with_scale(
    x: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    *,
    rowwise: bool = True,
    transposed: bool = False,
    amax_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`quantize.reference.quantize_with_scale`: payload [M, K], transposed payload [K, M]."""
    assert x.ndim == 2 and dtype in FP8_DTYPES, (x.shape, dtype)
    return _OPS.quantize_with_scale(x, scale, dtype, rowwise, transposed, amax_out)


def quantize_grad_output(
    x: Tensor,
    dtype: torch.dtype,
    *,
    scale: Tensor | None,
    power_of_two: bool = False,
    amax_out: Tensor | None = None,
    transposed: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`quantize.reference.quantize_grad_output`: payload [M, K], transpose [K, M], column sums [K], the scale taken."""
    assert x.ndim == 2 and dtype in FP8_DTYPES, (x.shape, dtype)
    return _OPS.quantize_grad_output(x, dtype, scale, power_of_two, amax_out, transposed)


def norm_amax(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, rms: bool) -> Tensor:
    """`norm.reference.norm_amax`: FP32 [1]."""
    return _OPS.norm_amax(x, weight, bias, eps, rms)


def norm_quantize(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    eps: float,
    rms: bool,
    scale: Tensor | None,
    power_of_two: bool = False,
    amax_out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`norm.reference.norm_quantize`: payload [T, K], the scale taken, mean [T], rstd [T]."""
    assert x.ndim == 2 and weight.shape == x.shape[1:] and dtype in FP8_DTYPES, (x.shape, weight.shape, dtype)
    return _OPS.norm_quantize(x, weight, bias, eps, rms, dtype, scale, power_of_two, amax_out)


def norm_requantize(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    *,
    transposed: bool,
) -> Tensor:
    """`norm.reference.norm_requantize`: payload [T, K], or [K, T]."""
    return _OPS.norm_requantize(x, weight, bias, mean, rstd, scale, dtype, transposed)


def norm_amax_scaled(
    x: Tensor, weight: Tensor, bias: Tensor | None, mean: Tensor, rstd: Tensor, row_scales: Tensor
) -> Tensor:
    """`norm.reference.norm_amax_scaled`: FP32 [1]."""
    assert row_scales.shape == rstd.shape == x.shape[:1], (row_scales.shape, rstd.shape, x.shape)
    return _OPS.norm_amax_scaled(x, weight, bias, mean, rstd, row_scales)


def norm_quantize_scaled(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    row_scales: Tensor,
    dtype: torch.dtype,
    *,
    scale: Tensor | None,
    power_of_two: bool = False,
    transposed: bool = False,
) -> tuple[Tensor, Tensor]:
    """`norm.reference.norm_quantize_scaled`: payload [T, K] or [K, T], the scale taken."""
    assert row_scales.shape == rstd.shape == x.shape[:1] and dtype in FP8_DTYPES, (row_scales.shape, x.shape, dtype)
    return _OPS.norm_quantize_scaled(x, weight, bias, mean, rstd, row_scales, dtype, scale, power_of_two, transposed)


def norm_backward(
    grad: Tensor,
    residual_grad: Tensor | None,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *,
    has_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`norm.reference.norm_backward`: gradients of x [T, K], of the weight [K] and of the bias [K]."""
    assert grad.shape[1:] == x.shape and grad.ndim == 3, (grad.shape, x.shape)
    return _OPS.norm_backward(grad, residual_grad, x, weight, mean, rstd, has_bias)


def norm_backward_quantize(
    grad: Tensor,
    residual_grad: Tensor | None,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    dtype: torch.dtype,
    *,
    has_bias: bool,
    scale: Tensor,
    amax_out: Tensor | None,
    transposed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`norm.reference.norm_backward_quantize`: the three gradients of `norm_backward`; of the first the payload [T, K],
    its transpose [K, T] and its column sums [K]."""
    assert grad.shape[1:] == x.shape and grad.ndim == 3, (grad.shape, x.shape)
    return _OPS.norm_backward_quantize(
        grad, residual_grad, x, weight, mean, rstd, has_bias, dtype, scale, amax_out, transposed
    )


def activation_amax(z: Tensor, kind: str) -> Tensor:
    """`activation.reference.activation_amax`: FP32 [1]."""
    return _OPS.activation_amax(z, kind)


def activation_backward_amax(grad: Tensor, z: Tensor, kind: str) -> Tensor:
    """`activation.reference.activation_backward_amax`: FP32 [1]."""
    return _OPS.activation_backward_amax(grad, z, kind)


def activation_quantize(
    z: Tensor,
    kind: str,
    dtype: torch.dtype,
    *,
    scale: Tensor | None,
    power_of_two: bool = False,
    amax_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`activation.reference.activation_quantize`: payload [T, F], the scale taken."""
    assert z.ndim == 2 and kind in activation.INPUTS and dtype in FP8_DTYPES, (z.shape, kind, dtype)
    return _OPS.activation_quantize(z, kind, dtype, scale, power_of_two, amax_out)


def activation_backward_quantize(
    grad: Tensor,
    z: Tensor,
    kind: str,
    dtype: torch.dtype,
    *,
    scale: Tensor | None,
    activation_dtype: torch.dtype,
    activation_scale: Tensor,
    column_sums: bool,
    power_of_two: bool = False,
    amax_out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`activation.reference.activation_backward_quantize`: gradient of z [T, Z] and [Z, T], activation [F, T], column
    sums [Z], the scale taken."""
    assert z.shape[1] == activation.INPUTS[kind] * grad.shape[1], (z.shape, grad.shape, kind)
    return _OPS.activation_backward_quantize(
        grad, z, kind, dtype, scale, power_of_two, amax_out, activation_dtype, activation_scale, column_sums
    )


def cross_entropy_statistics(
    logits: Tensor, labels: Tensor, *, first: int = 0, num_columns: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`cross_entropy.reference.cross_entropy_statistics`: a row's maximum, Σ exp and label's logit, FP32 [T].

    `num_columns` None: no column is padding.
    """
    assert logits.ndim == 2 and logits.is_contiguous() and labels.shape == logits.shape[:1], (
        logits.shape,
        labels.shape,
    )
    return _OPS.cross_entropy_statistics(logits, labels, first, _num_columns(logits, num_columns))


def cross_entropy_backward_(
    logits: Tensor, labels: Tensor, log_sum_exp: Tensor, grad: Tensor, *, first: int = 0, num_columns: int | None = None
) -> None:
    """`cross_entropy.reference.cross_entropy_backward_`: logits → their gradient, in place."""
    _OPS.cross_entropy_backward_(logits, labels, log_sum_exp, grad, first, _num_columns(logits, num_columns))


def token_scales(log_sum_exp: Tensor, target: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`cross_entropy.reference.token_scales`: factors [T] of the cast, scales [T], the payload's scale [1]."""
    assert log_sum_exp.shape == target.shape == upstream.shape and upstream.dtype == torch.float32, (
        log_sum_exp.shape,
        target.shape,
        upstream.shape,
        upstream.dtype,
    )
    return _OPS.token_scales(log_sum_exp, target, upstream)


def cross_entropy_backward_quantize(
    logits: Tensor,
    labels: Tensor,
    log_sum_exp: Tensor,
    grad: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    *,
    first: int = 0,
    num_columns: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`cross_entropy.reference.cross_entropy_backward_quantize`: payload [T, V], transpose [V, T]."""
    assert logits.is_contiguous() and labels.shape == log_sum_exp.shape == grad.shape == logits.shape[:1], (
        logits.shape,
        labels.shape,
        grad.shape,
    )
    assert grad.dtype == torch.float32 and dtype in FP8_DTYPES, (grad.dtype, dtype)
    return _OPS.cross_entropy_backward_quantize(
        logits, labels, log_sum_exp, grad, scale, dtype, first, _num_columns(logits, num_columns)
    )


def _num_columns(logits: Tensor, num_columns: int | None) -> int:
    """Columns of `logits` [T, V] that are no padding."""
    if num_columns is None:
        return logits.shape[1]
    assert 0 <= num_columns <= logits.shape[1], (num_columns, logits.shape)
    return num_columns


def quantize_qkv_grad(
    grads: list[Tensor],
    dtype: torch.dtype,
    *,
    scale: Tensor | None,
    column_sums: bool,
    power_of_two: bool = False,
    amax_out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`quantize.reference.quantize_qkv_grad`: payload [T, N], transpose [N, T], column sums [N], the scale taken."""
    assert len(grads) == 3 and grads[1].shape == grads[2].shape, [grad.shape for grad in grads]
    return _OPS.quantize_qkv_grad(grads, dtype, scale, power_of_two, amax_out, column_sums)


def rotate_qk_(y: Tensor, rotation: Rotation, *, heads_per_group: int) -> None:
    """`rope.reference.rotate_qk_`: query and key in y [T, N], in place."""
    _check_projection(y, rotation, heads_per_group)
    _OPS.rotate_qk_(y, rotation, heads_per_group)


def split_rotated_qkv(y: Tensor, rotation: Rotation, *, heads_per_group: int) -> tuple[Tensor, Tensor, Tensor]:
    """`rope.reference.split_rotated_qkv`: query [T, groups · heads · d], key and value [T, groups · d]."""
    _check_projection(y, rotation, heads_per_group)
    return _OPS.split_rotated_qkv(y, rotation, heads_per_group)


def quantize_rotated_qkv(
    y: Tensor, rotation: Rotation, casts: QKVCasts, *, heads_per_group: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`rope.quantized.quantize_rotated_qkv`: query [T, groups · heads · d], key and value [T, groups · d] in E4M3."""
    _check_projection(y, rotation, heads_per_group)
    assert len({0 if cast.record is None else cast.record.numel() for cast in casts}) == 1, casts
    return _OPS.quantize_rotated_qkv(y, rotation, casts, heads_per_group)


def unrotate_qkv_grad(grads: list[Tensor], rotation: Rotation) -> Tensor:
    """`rope.reference.unrotate_qkv_grad`: [T, N]."""
    _check_rotated(grads, rotation)
    return _OPS.unrotate_qkv_grad(grads, rotation)


def rotated_qkv_grad_amax(grads: list[Tensor], rotation: Rotation) -> Tensor:
    """`rope.reference.rotated_qkv_grad_amax`: FP32 [1]."""
    _check_rotated(grads, rotation)
    return _OPS.rotated_qkv_grad_amax(grads, rotation)


def quantize_rotated_qkv_grad(
    grads: list[Tensor],
    rotation: Rotation,
    dtype: torch.dtype,
    *,
    scale: Tensor | None,
    column_sums: bool,
    power_of_two: bool = False,
    amax_out: Tensor | None = None,
    grad_scales: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`rope.reference.quantize_rotated_qkv_grad`: payload [T, N], transpose [N, T], column sums [N], scale taken."""
    _check_rotated(grads, rotation)
    assert (grads[0].dtype in FP8_DTYPES) == (len(grad_scales) == 3) and (scale is not None or not grad_scales)
    return _OPS.quantize_rotated_qkv_grad(
        grads, rotation, dtype, scale, power_of_two, amax_out, column_sums, list(grad_scales)
    )


def norm_rotate_qk(y: Tensor, rotation: Rotation, norm: QKNorm, *, heads_per_group: int) -> tuple[Tensor, Tensor]:
    """`rope.normed.norm_rotate_qk`: query [T, groups · heads · d] and key [T, groups · d]."""
    _check_projection(y, rotation, heads_per_group)
    return _OPS.norm_rotate_qk(y, rotation, norm, heads_per_group)


def norm_rotate_qk_backward(
    grads: list[Tensor], y: Tensor, rotation: Rotation, norm: QKNorm
) -> tuple[Tensor, Tensor, Tensor]:
    """`rope.normed.norm_rotate_qk_backward`: gradients of y [T, N], of the weights and of the biases [2, d]."""
    _check_rotated(grads, rotation)
    return _OPS.norm_rotate_qk_backward(grads, y, rotation, norm)


def _check_projection(y: Tensor, rotation: Rotation, heads_per_group: int) -> None:
    assert y.ndim == 2 and y.is_contiguous() and y.shape[0] % rotation.cos_sin.shape[0] == 0, (y.shape, rotation)
    assert y.shape[1] % ((heads_per_group + 2) * rotation.head_dim) == 0, (y.shape, heads_per_group)
    _check_rotation(rotation)


def _check_rotated(grads: list[Tensor], rotation: Rotation) -> None:
    assert len(grads) == 3 and grads[1].shape == grads[2].shape, [grad.shape for grad in grads]
    assert grads[1].shape[3] == rotation.head_dim, (grads[1].shape, rotation.head_dim)
    assert grads[0].shape[0] == rotation.cos_sin.shape[0], (grads[0].shape, rotation.cos_sin.shape)
    _check_rotation(rotation)


def _check_rotation(rotation: Rotation) -> None:
    cos_sin = rotation.cos_sin
    assert cos_sin.dtype == torch.float32 and cos_sin.is_contiguous() and cos_sin.shape[1] == 2, cos_sin.shape
    assert 2 * cos_sin.shape[2] <= rotation.head_dim and rotation.head_dim % 2 == 0, (cos_sin.shape, rotation.head_dim)


def fp8_attention(inputs: AttentionInputs, inverse_out: Tensor, *, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """`attention.reference.fp8_attention`: the output in E4M3 [s, b, heads, d], and FP32 [b, heads, s]."""
    assert all(x.dtype == E4M3 for x in inputs[:3]), [x.dtype for x in inputs[:3]]
    return _OPS.fp8_attention(inputs, inverse_out, softmax_scale)


def fp8_attention_backward(
    inputs: AttentionInputs,
    grad: Tensor,
    scale_grad: Tensor,
    out: Tensor,
    scale_out: Tensor,
    log_sum_exp: Tensor,
    casts: AttentionGradCasts,
    *,
    softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`attention.reference.fp8_attention_backward`: gradients of query, key and value in the dtype of `grad`."""
    assert grad.dtype in FP8_DTYPES and grad.shape == out.shape, (grad.dtype, grad.shape)
    return _OPS.fp8_attention_backward(inputs, grad, scale_grad, out, scale_out, log_sum_exp, casts, softmax_scale)


def merge_attention(outs: list[Tensor], log_sum_exps: list[Tensor], *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`attention.partials.merge_attention`: [s, b, heads, d], and FP32 [b, heads, s]."""
    return _OPS.merge_attention(outs, log_sum_exps, dtype)


def sum_partials(parts: list[Tensor], *, at_end: bool, dtype: torch.dtype) -> Tensor:
    """`attention.partials.sum_partials`: [s, …]."""
    return _OPS.sum_partials(parts, at_end, dtype)


def transpose(payload: Tensor) -> Tensor:
    """`quantize.reference.transpose`: FP8 [M, K] → contiguous [K, M]."""
    assert payload.ndim == 2 and payload.dtype in FP8_DTYPES, (payload.shape, payload.dtype)
    return _OPS.transpose(payload)


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
) -> Tensor:
    """`gemm.reference.scaled_mm`: a [M, K] · b [N, K]ᵀ → [M, N]; the limits of Hopper's GEMM hold on every device."""
    check_scaled_mm(a, b)
    return _OPS.scaled_mm(a, b, scale_a, scale_b, bias, out_dtype, use_fast_accum)


def scaled_mm_into_(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    bias: Tensor | None = None,
    use_fast_accum: bool = False,
    addend: Tensor | None = None,
) -> None:
    """`gemm.reference.scaled_mm_into_`: `scaled_mm`, plus `addend`, written to contiguous `out` [M, N] in its dtype."""
    shape = check_scaled_mm(a, b)
    assert out.shape == shape and out.is_contiguous(), (out.shape, shape)
    if addend is not None:
        assert addend.shape == out.shape and addend.dtype == out.dtype, (addend.shape, addend.dtype)
        assert addend.is_contiguous(), addend.stride()
    _OPS.scaled_mm_into_(out, a, b, scale_a, scale_b, bias, use_fast_accum, addend)


def scaled_mm_to_fp8_(
    out: Tensor, amax: Tensor, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, inverse: Tensor
) -> None:
    """`gemm.reference.scaled_mm_to_fp8_`: a [M, K] · b [N, K]ᵀ cast to contiguous FP8 `out` [M, N], and its amax."""
    shape = check_scaled_mm(a, b)
    assert out.shape == shape and out.is_contiguous(), (out.shape, shape)
    assert out.dtype in FP8_DTYPES and amax.shape == (1,) and inverse.shape == (1,), (out.dtype, amax, inverse)
    _OPS.scaled_mm_to_fp8_(out, amax, a, b, scale_a, scale_b, inverse)


def quantize_blocks(
    x: Tensor,
    dtype: torch.dtype,
    *,
    rowwise: bool = True,
    transposed: bool = False,
    column_sums: bool = False,
    power_of_two: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`blocks.quantize_blocks`: payload [M, K], scales [⌈K / 128⌉, M], transpose [K, M], its scales [⌈M / 128⌉, K],
    column sums [K].

    Raises:
        ValueError: M or K is not a multiple of 16, or neither layout is requested.
    """
    assert dtype in FP8_DTYPES, dtype
    _check_operand(x, rowwise or transposed)
    return _OPS.quantize_blocks(x, dtype, rowwise, transposed, column_sums, power_of_two)


def quantize_tiles(
    w: Tensor, dtype: torch.dtype, *, rowwise: bool = True, transposed: bool = False, power_of_two: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`blocks.quantize_tiles`: payload [N, K], scales [⌈N / 128⌉, ⌈K / 128⌉ padded], transpose [K, N], its scales.

    Raises:
        ValueError: N or K is not a multiple of 16, or neither layout is requested.
    """
    assert dtype in FP8_DTYPES, dtype
    _check_operand(w, rowwise or transposed)
    return _OPS.quantize_tiles(w, dtype, rowwise, transposed, power_of_two)


def transpose_tiles(payload: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """`blocks.transpose_tiles`: FP8 [N, K] and its tiles' scales → [K, N] and its tiles' scales.

    Raises:
        ValueError: N or K is not a multiple of 16.
    """
    assert payload.dtype in FP8_DTYPES, payload.dtype
    _check_operand(payload, True)
    return _OPS.transpose_tiles(payload, scales)


def _check_operand(x: Tensor, any_layout: bool) -> None:
    rows, columns = x.shape
    if rows % FP8_GEMM_MULTIPLE or columns % FP8_GEMM_MULTIPLE:
        raise ValueError(
            f"block-scaled operands have sizes in multiples of {FP8_GEMM_MULTIPLE}, not {rows} × {columns}"
        )
    if not any_layout:
        raise ValueError("quantisation into no layout: set rowwise, transposed or both")


def block_scaled_mm_into_(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    scales_a: Tensor,
    scales_b: Tensor,
    *,
    bias: Tensor | None = None,
    addend: Tensor | None = None,
) -> None:
    """`block_scaled.block_scaled_mm_into_`: a [M, K] · b [N, K]ᵀ, plus bias and addend, to contiguous `out` [M, N].

    Raises:
        ValueError: see `check_block_scaled_mm`.
    """
    check_block_scaled_mm(a, b, scales_a, scales_b)
    assert out.shape == (a.shape[0], b.shape[0]) and out.is_contiguous(), (out.shape, a.shape, b.shape)
    assert bias is None or out.dtype == bias.dtype != torch.float32, (bias, out.dtype)
    if addend is not None:
        assert addend.shape == out.shape and addend.dtype == out.dtype, (addend.shape, addend.dtype)
        assert addend.is_contiguous(), addend.stride()
    _OPS.block_scaled_mm_into_(out, a, b, scales_a, scales_b, bias, addend)


def block_scaled_mm(
    a: Tensor,
    b: Tensor,
    scales_a: Tensor,
    scales_b: Tensor,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """`block_scaled_mm_into_` a new tensor [M, N] in `out_dtype`."""
    out = torch.empty((a.shape[0], b.shape[0]), dtype=out_dtype, device=a.device)
    block_scaled_mm_into_(out, a, b, scales_a, scales_b, bias=bias)
    return out


def check_fp8_attention(device: torch.device) -> None:
    """Refuse a GPU that `fp8_attention` cannot run on; a CPU runs its specification.

    Raises:
        UnsupportedDeviceError: no Hopper, or the package nvidia-cudnn-frontend is not installed.
    """
    if device.type != "cuda":
        return
    try:
        from .attention.cudnn import check_device as check
    except ImportError as error:
        raise UnsupportedDeviceError(
            f"fp8_dot_product_attention runs in cuDNN's kernels through a package that is not installed ({error}): pip "
            "install nvidia-cudnn-frontend"
        ) from error
    check(torch.cuda.current_device() if device.index is None else device.index)


def check_block_scaling(device: torch.device) -> None:
    """Refuse a GPU that `block_scaled_mm_into_` does not run on; a CPU runs the specification.

    Raises:
        UnsupportedDeviceError: with what it needs.
    """
    if device.type != "cuda":
        return
    from .gemm.block_scaled_cublaslt import check_device  # a GPU variant: not loaded before it is needed

    check_device(torch.cuda.current_device() if device.index is None else device.index)


def quantize_blockwise_(x: Tensor, payload: Tensor, scales: Tensor) -> None:
    """`quantize.blockwise.quantize_blockwise_`: flat x [≤ n] → payload [n], scales [n / block], in place."""
    assert x.numel() <= payload.numel() and payload.numel() % scales.numel() == 0, (x.shape, payload.shape)
    _OPS.quantize_blockwise_(x, payload, scales)


def dequantize_blockwise(payload: Tensor, scales: Tensor) -> Tensor:
    """`quantize.blockwise.dequantize_blockwise`: FP32 [n]."""
    return _OPS.dequantize_blockwise(payload, scales)


def quantize_weight(weight: Tensor, scales: Tensor, scale: Tensor, dtype: torch.dtype, *, transposed: bool) -> Tensor:
    """`quantize.weight.quantize_weight`: FP16 [N, K] with block scales → payload [N, K], or [K, N]."""
    assert weight.ndim == 2 and weight.is_contiguous() and weight.dtype == torch.float16, (weight.shape, weight.dtype)
    assert scales.is_contiguous() and weight.numel() % scales.numel() == 0, (weight.shape, scales.shape)
    return _OPS.quantize_weight(weight, scales, scale, dtype, transposed)


def accumulate_rows_(
    payload: Tensor,
    scales: Tensor | None,
    accumulator: Tensor,
    *,
    factor: float,
    add: bool,
    own: tuple[int, Tensor, Tensor | None] | None = None,
    addend: Tensor | None = None,
) -> None:
    """`wire.reference.accumulate_rows_`: FP8 rows [d · n] with block scales, or BF16 or FP32 rows without, into an
    accumulator [n], in place."""
    n = accumulator.numel()
    assert accumulator.dtype in (torch.float32, torch.bfloat16), accumulator.dtype
    assert (payload.dtype in FP8_DTYPES) == (scales is not None), payload.dtype
    assert payload.numel() % n == 0, (payload.shape, n)
    assert scales is None or n % (payload.numel() // scales.numel()) == 0, (payload.shape, scales.shape, n)
    row, own_payload, own_scales = (-1, None, None) if own is None else own
    if own_payload is not None:
        assert 0 <= row < payload.numel() // n and own_payload.shape == (n,), (row, own_payload.shape, n)
        assert own_payload.dtype == payload.dtype and (own_scales is None) == (scales is None), own_payload.dtype
    if addend is not None:
        assert addend.shape == (n,) and addend.dtype == accumulator.dtype and addend.is_contiguous(), addend.shape
    _OPS.accumulate_rows_(payload, scales, accumulator, factor, add, row, own_payload, own_scales, addend)


def examine_records_(
    record: Tensor,
    written: Tensor,
    scales: Tensor,
    clamped_above: Tensor,
    role: Tensor,
    order: Tensor,
    square_sum: Tensor,
    streak: Tensor,
    *,
    num_roles: int,
    most_saturated: float,
) -> tuple[Tensor, Tensor]:
    """`scales.reference.examine_records_`: the step's amaxes FP32 [n], and the report FP32 [3 + 3 · num_roles]."""
    n = record.shape[0]
    assert record.shape == (n, RECORD_SIZE) and written.shape[::2] == scales.shape, (written.shape, scales.shape)
    assert clamped_above.shape == role.shape == order.shape == (n,), order.shape
    assert square_sum.shape == streak.shape == (1,), (square_sum.shape, streak.shape)
    return _OPS.examine_records_(
        record, written, scales, clamped_above, role, order, square_sum, streak, num_roles, most_saturated
    )


def update_amax_history_(
    amax: Tensor,
    record: Tensor,
    written: Tensor,
    history: Tensor,
    fp_max: Tensor,
    previous: Tensor,
    square_sum: Tensor,
    *,
    keeps_largest: bool,
    power_of_two: bool,
) -> tuple[Tensor, Tensor]:
    """`scales.reference.update_amax_history_`: the next scales and their reciprocals, FP32 [n, stride] in column 0."""
    n = history.shape[1]
    assert amax.shape == fp_max.shape == (n,) and record.shape == (n, RECORD_SIZE), (amax.shape, record.shape, n)
    assert written.shape[::2] == previous.shape, (written.shape, previous.shape)
    return _OPS.update_amax_history_(
        amax, record, written, history, fp_max, previous, square_sum, keeps_largest, power_of_two
    )


def count_underflow_(value: Tensor, payload: Tensor, counts: Tensor, *, is_sample: bool = False) -> None:
    """`scales.reference.count_underflow_`: adds to int64 [2], in place."""
    assert value.ndim == 1 and payload.shape == value.shape and payload.dtype in FP8_DTYPES, (value, payload)
    assert counts.dtype == torch.int64 and counts.shape == (2,), (counts.dtype, counts.shape)
    _OPS.count_underflow_(value, payload, counts, is_sample)


def measure_cast_(value: Tensor, payload: Tensor, scales: Tensor, statistics: Tensor) -> None:
    """`health.reference.measure_cast_`: adds to FP64 [64], in place."""
    assert value.ndim == 2 and payload.shape == value.shape and payload.dtype in FP8_DTYPES, (value.shape, payload)
    assert scales.shape == (value.shape[0], -(-value.shape[1] // GEMM_BLOCK)), (scales.shape, value.shape)
    assert statistics.dtype == torch.float64 and statistics.shape == (NUM_STATISTICS,), statistics
    assert statistics.is_contiguous() and scales.dtype == torch.float32, (statistics.stride(), scales.dtype)
    _OPS.measure_cast_(value, payload, scales, statistics)


def squared_norm(payload: Tensor, scales: Tensor | None) -> Tensor:
    """`quantize.blockwise.squared_norm`: Σ x², FP32 [1]."""
    return _OPS.squared_norm(payload, scales)


def adamw_step_(
    state: AdamState,
    hyper: AdamHyper,
    *,
    grad_factor: Tensor,
    step: Tensor,
    weight: Tensor | None = None,
    chunk_amax: Tensor | None = None,
) -> None:
    """`adamw.reference.adamw_step_`: one fused Adam(W) pass over flat storage, in place."""
    _check_moments(state.exp_avg, state.exp_avg_sq)
    assert state.master.payload.dtype not in COMPANDED_DTYPES, state.master.payload.dtype
    _OPS.adamw_step_(state, hyper, grad_factor, step, weight, chunk_amax)


def adamw_split_step_(
    state: SplitAdamState, hyper: AdamHyper, *, grad_factor: Tensor, step: Tensor, chunk_amax: Tensor
) -> None:
    """`split_master.adamw_split_step_`: one Adam(W) pass over FP8 weights with a byte of correction, in place."""
    _check_moments(state.exp_avg, state.exp_avg_sq)
    assert state.weight.dtype == E4M3 and state.correction.dtype == torch.int8, (state.weight, state.correction)
    assert state.weight_scales.is_contiguous() and state.new_weight_scales.is_contiguous(), state.weight_scales.stride()
    _OPS.adamw_split_step_(state, hyper, grad_factor, step, chunk_amax)


def _check_moments(exp_avg: FlatState, exp_avg_sq: FlatState) -> None:
    """Check that each companded dtype holds the moment it is for: uint8 has no sign, int8 wastes half of its codes on
    values below zero."""
    dtypes = exp_avg.payload.dtype, exp_avg_sq.payload.dtype
    assert dtypes[0] != torch.uint8 and dtypes[1] != torch.int8, dtypes


def derive_fp8_weights_(
    master: Tensor, master_scales: Tensor | None, payload: Tensor, weight_scales: Tensor, chunk_tensor: Tensor
) -> None:
    """`adamw.reference.derive_fp8_weights_`: FP8 weights from their master, in place."""
    _OPS.derive_fp8_weights_(master, master_scales, payload, weight_scales, chunk_tensor)
