"""The only entry to the kernels: every operator as a typed function (see `registration`), and what goes with them.

An operator takes what its specification in plain PyTorch takes. The specification documents arguments, shapes and
numerics, and says what is checked.
"""

# ruff: noqa: F401 (imported for those who import this module)

from __future__ import annotations

import torch
from torch import Tensor

from ..device.device import UnsupportedDeviceError
from . import reference as _shared
from .activation import reference as _activation
from .activation.reference import ExpertRows
from .adamw import reference as _adamw
from .adamw import split_master as _split_master
from .adamw.elementwise import FlatOperands, elementwise_step_
from .adamw.reference import AdamHyper, AdamState, FlatState, SplitAdamState
from .adamw.split_master import SplitMaster, join_master, next_weight_scales, split_master
from .attention import reference as _attention
from .attention.blocks import BlockKernel, attention_block, attention_block_backward
from .attention.reference import AttentionGradCasts, AttentionInputs, WrittenCast
from .cross_entropy import reference as _cross_entropy
from .cross_entropy.reference import KEPT, PAYLOAD_SCALE
from .gemm import reference as _gemm
from .grouped import activation_reference as _expert_activation
from .grouped import gemm_reference as _grouped_gemm
from .grouped import rows_reference as _rows
from .grouped.rows_reference import Groups, most_rows
from .health import reference as _health
from .health.reference import LOWEST_EXPONENT, NUM_MAXIMA, NUM_STATISTICS, Statistic, measured_block
from .muon import products_reference as _products
from .muon import reference as _muon
from .muon.reference import MomentumState
from .norm import reference as _norm
from .quantize import blocks as _blocks
from .quantize import blockwise as _blockwise
from .quantize import mx as _mx
from .quantize import reference as _quantize
from .quantize.blocks import dequantize_blocks
from .quantize.blockwise import load_state, restore_state_
from .quantize.mx import dequantize_mx
from .quantize.nvfp4 import dequantize_nvfp4, packed_e2m1, quantize_nvfp4
from .reference import decode, encode, round_up_to_power_of_two, scale_from_amax
from .registration import callable_of
from .rope import reference as _rope
from .rope.reference import KnownCast, QKNorm, QKVCasts, Rotation
from .rounding import Places, seed_of
from .router import reference as _router
from .router.reference import Choice
from .scales import reference as _scales
from .scales.reference import RECORD_SIZE, REPORT_HEAD, REPORT_SUMS, SAMPLE_EVERY, SAMPLED_FROM
from .wire import reference as _wire

amax = callable_of(_shared.amax)

quantize_current = callable_of(_quantize.quantize_current)
quantize_with_scale = callable_of(_quantize.quantize_with_scale)
quantize_grad_output = callable_of(_quantize.quantize_grad_output)
transpose = callable_of(_quantize.transpose)
quantize_qkv_grad = callable_of(_quantize.quantize_qkv_grad)

quantize_blocks = callable_of(_blocks.quantize_blocks)
quantize_tiles = callable_of(_blocks.quantize_tiles)
transpose_tiles = callable_of(_blocks.transpose_tiles)

quantize_mx = callable_of(_mx.quantize_mx)

quantize_blockwise_ = callable_of(_blockwise.quantize_blockwise_)
dequantize_blockwise = callable_of(_blockwise.dequantize_blockwise)
squared_norm = callable_of(_blockwise.squared_norm)
quantize_weight = callable_of(_blockwise.quantize_weight)

scaled_mm = callable_of(_gemm.scaled_mm)
scaled_mm_into_ = callable_of(_gemm.scaled_mm_into_)
scaled_mm_to_fp8_ = callable_of(_gemm.scaled_mm_to_fp8_)
block_scaled_mm_into_ = callable_of(_gemm.block_scaled_mm_into_)
mx_mm_into_ = callable_of(_gemm.mx_mm_into_)

grouped_mm = callable_of(_grouped_gemm.grouped_mm)
grouped_wgrad_ = callable_of(_grouped_gemm.grouped_wgrad_)
grouped_wgrad_to_fp8_ = callable_of(_grouped_gemm.grouped_wgrad_to_fp8_)

norm = callable_of(_norm.norm)
norm_amax = callable_of(_norm.norm_amax)
norm_quantize = callable_of(_norm.norm_quantize)
norm_requantize = callable_of(_norm.norm_requantize)
norm_quantize_blocks = callable_of(_norm.norm_quantize_blocks)
norm_requantize_blocks = callable_of(_norm.norm_requantize_blocks)
norm_amax_scaled = callable_of(_norm.norm_amax_scaled)
norm_quantize_scaled = callable_of(_norm.norm_quantize_scaled)
norm_backward = callable_of(_norm.norm_backward)
norm_backward_quantize = callable_of(_norm.norm_backward_quantize)

activation_amax = callable_of(_activation.activation_amax)
activation_backward_amax = callable_of(_activation.activation_backward_amax)
activation_quantize = callable_of(_activation.activation_quantize)
activation_backward_quantize = callable_of(_activation.activation_backward_quantize)
activation_quantize_blocks = callable_of(_activation.activation_quantize_blocks)
activation_backward_quantize_blocks = callable_of(_activation.activation_backward_quantize_blocks)

choose_experts = callable_of(_router.choose_experts)
choose_experts_backward = callable_of(_router.choose_experts_backward)
routed_rows = callable_of(_rows.routed_rows)
gather_rows = callable_of(_rows.gather_rows)
gather_blocks = callable_of(_rows.gather_blocks)
sum_rows = callable_of(_rows.sum_rows)
expert_activation = callable_of(_expert_activation.expert_activation)
expert_activation_backward = callable_of(_expert_activation.expert_activation_backward)
expert_activation_quantize_blocks = callable_of(_expert_activation.expert_activation_quantize_blocks)
expert_activation_backward_quantize_blocks = callable_of(_expert_activation.expert_activation_backward_quantize_blocks)

cross_entropy_statistics = callable_of(_cross_entropy.cross_entropy_statistics)
cross_entropy_backward_ = callable_of(_cross_entropy.cross_entropy_backward_)
token_scales = callable_of(_cross_entropy.token_scales)
cross_entropy_backward_quantize = callable_of(_cross_entropy.cross_entropy_backward_quantize)

rotate_qk_ = callable_of(_rope.rotate_qk_)
split_rotated_qkv = callable_of(_rope.split_rotated_qkv)
unrotate_qkv_grad = callable_of(_rope.unrotate_qkv_grad)
rotated_qkv_grad_amax = callable_of(_rope.rotated_qkv_grad_amax)
quantize_rotated_qkv_grad = callable_of(_rope.quantize_rotated_qkv_grad)
quantize_rotated_qkv = callable_of(_rope.quantize_rotated_qkv)
norm_rotate_qk = callable_of(_rope.norm_rotate_qk)
norm_rotate_qk_backward = callable_of(_rope.norm_rotate_qk_backward)

fp8_attention = callable_of(_attention.fp8_attention)
fp8_attention_backward = callable_of(_attention.fp8_attention_backward)
merge_attention = callable_of(_attention.merge_attention)
sum_partials = callable_of(_attention.sum_partials)

accumulate_rows_ = callable_of(_wire.accumulate_rows_)

examine_records_ = callable_of(_scales.examine_records_)
update_amax_history_ = callable_of(_scales.update_amax_history_)
count_underflow_ = callable_of(_scales.count_underflow_)

measure_cast_ = callable_of(_health.measure_cast_)

adamw_step_ = callable_of(_adamw.adamw_step_)
derive_fp8_weights_ = callable_of(_adamw.derive_fp8_weights_)

adamw_split_step_ = callable_of(_split_master.adamw_split_step_)

momentum_step_ = callable_of(_muon.momentum_step_)
orthogonal_step_ = callable_of(_muon.orthogonal_step_)
orthogonal_split_step_ = callable_of(_muon.orthogonal_split_step_)
symmetric_mm_ = callable_of(_products.symmetric_mm_)
symmetric_times_ = callable_of(_products.symmetric_times_)


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


def check_mx(device: torch.device) -> None:
    """Refuse a GPU that `mx_mm_into_` does not run on; a CPU runs the specification.

    Raises:
        UnsupportedDeviceError: with what it needs.
    """
    if device.type != "cuda":
        return
    from .gemm.mx_cuda import check_device  # a GPU variant: not loaded before it is needed

    check_device(torch.cuda.current_device() if device.index is None else device.index)


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
    from .gemm.cuda import check_device  # a GPU variant: not loaded before it is needed

    check_device(torch.cuda.current_device() if device.index is None else device.index)
