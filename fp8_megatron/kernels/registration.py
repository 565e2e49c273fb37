"""The ``fp8_megatron::`` operators: their schemas, and which variant a device takes.

A CPU tensor takes the specification (`reference` and its neighbours); a CUDA tensor takes the Triton variant, the FP8
GEMM cuBLASLt, and one kernel csrc's (`norm_cuda`). The device alone decides: there is no silent fall-back.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from . import reference
from .activation import reference as activation
from .adamw import split_master
from .cross_entropy import reference as cross_entropy
from .gemm import block_scaled
from .gemm.scaled_mm import scaled_mm_cublaslt, scaled_mm_into_cublaslt_, scaled_mm_to_fp8_cublaslt_
from .norm import reference as norm
from .quantize import blocks, qkv
from .scales import amax_history, underflow

_LIBRARY = torch.library.Library("fp8_megatron", "DEF")

_SCHEMAS = {
    "amax": "(Tensor x) -> Tensor",
    "quantize_current": "(Tensor x, ScalarType dtype, bool power_of_two, bool rowwise, bool transposed)"
    " -> (Tensor, Tensor, Tensor)",
    "quantize_with_scale": "(Tensor x, Tensor scale, ScalarType dtype, bool rowwise, bool transposed,"
    " Tensor(a!)? amax_out) -> (Tensor, Tensor)",
    "quantize_grad_output": "(Tensor x, ScalarType dtype, Tensor? scale, bool power_of_two, Tensor(a!)? amax_out,"
    " bool transposed) -> (Tensor, Tensor, Tensor, Tensor)",
    "quantize_qkv_grad": "(Tensor[] grads, ScalarType dtype, Tensor? scale, bool power_of_two,"
    " Tensor(a!)? amax_out, bool column_sums) -> (Tensor, Tensor, Tensor, Tensor)",
    "quantize_blocks": "(Tensor x, ScalarType dtype, bool rowwise, bool transposed, bool column_sums,"
    " bool power_of_two) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "quantize_tiles": "(Tensor w, ScalarType dtype, bool rowwise, bool transposed, bool power_of_two)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    "transpose_tiles": "(Tensor payload, Tensor scales) -> (Tensor, Tensor)",
    "block_scaled_mm_into_": "(Tensor(a!) out, Tensor a, Tensor b, Tensor scales_a, Tensor scales_b, Tensor? bias,"
    " Tensor? addend) -> ()",
    "transpose": "(Tensor payload) -> Tensor",
    "norm_amax": "(Tensor x, Tensor weight, Tensor? bias, float eps, bool rms) -> Tensor",
    "norm_quantize": "(Tensor x, Tensor weight, Tensor? bias, float eps, bool rms, ScalarType dtype, Tensor? scale,"
    " bool power_of_two, Tensor(a!)? amax_out) -> (Tensor, Tensor, Tensor, Tensor)",
    "norm_requantize": "(Tensor x, Tensor weight, Tensor? bias, Tensor mean, Tensor rstd, Tensor scale,"
    " ScalarType dtype, bool transposed) -> Tensor",
    "norm_backward": "(Tensor grad, Tensor? residual_grad, Tensor x, Tensor weight, Tensor mean, Tensor rstd,"
    " bool has_bias) -> (Tensor, Tensor, Tensor)",
    "norm_backward_quantize": "(Tensor grad, Tensor? residual_grad, Tensor x, Tensor weight, Tensor mean, Tensor rstd,"
    " bool has_bias, ScalarType dtype, Tensor scale, Tensor(a!)? amax_out, bool transposed)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "activation_amax": "(Tensor z, str kind) -> Tensor",
    "activation_backward_amax": "(Tensor grad, Tensor z, str kind) -> Tensor",
    "activation_quantize": "(Tensor z, str kind, ScalarType dtype, Tensor? scale, bool power_of_two,"
    " Tensor(a!)? amax_out) -> (Tensor, Tensor)",
    "activation_backward_quantize": "(Tensor grad, Tensor z, str kind, ScalarType dtype, Tensor? scale,"
    " bool power_of_two, Tensor(a!)? amax_out, ScalarType activation_dtype, Tensor activation_scale,"
    " bool column_sums) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "cross_entropy_statistics": "(Tensor logits, Tensor labels) -> (Tensor, Tensor, Tensor)",
    "cross_entropy_backward_": "(Tensor(a!) logits, Tensor labels, Tensor log_sum_exp, Tensor grad) -> ()",
    "cross_entropy_backward_quantize": "(Tensor logits, Tensor labels, Tensor log_sum_exp, Tensor grad,"
    " ScalarType dtype, Tensor? scale, bool power_of_two) -> (Tensor, Tensor, Tensor)",
    "scaled_mm": "(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias, ScalarType out_dtype,"
    " bool use_fast_accum) -> Tensor",
    "scaled_mm_into_": "(Tensor(a!) out, Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias,"
    " bool use_fast_accum, Tensor? addend) -> ()",
    "scaled_mm_to_fp8_": "(Tensor(a!) out, Tensor(b!) amax, Tensor a, Tensor b, Tensor scale_a, Tensor scale_b,"
    " Tensor inverse) -> ()",
    "quantize_blockwise_": "(Tensor x, Tensor(a!) payload, Tensor(b!) scales) -> ()",
    "dequantize_blockwise": "(Tensor payload, Tensor scales) -> Tensor",
    "accumulate_rows_": "(Tensor payload, Tensor? scales, Tensor(a!) accumulator, float factor, bool add, int own_row,"
    " Tensor? own_payload, Tensor? own_scales, Tensor? addend) -> ()",
    "update_amax_history_": "(Tensor(a!) amax, Tensor(b!) written, Tensor(c!) history, Tensor fp_max, Tensor previous,"
    " bool keeps_largest, bool power_of_two) -> (Tensor, Tensor)",
    "count_underflow_": "(Tensor value, Tensor payload, Tensor(a!) counts) -> ()",
    "squared_norm": "(Tensor payload, Tensor? scales) -> Tensor",
    "adamw_step_": "(Tensor grad, Tensor? grad_scales, Tensor(a!) exp_avg, Tensor(b!)? exp_avg_scales,"
    " Tensor(c!) exp_avg_sq, Tensor(d!)? exp_avg_sq_scales, Tensor(e!) master, Tensor(f!)? master_scales,"
    " Tensor(g!)? weight, Tensor(h!)? chunk_amax, Tensor grad_factor, Tensor step, float lr, float beta1, float beta2,"
    " float eps, float weight_decay, bool decoupled) -> ()",
    "adamw_split_step_": "(Tensor grad, Tensor? grad_scales, Tensor(a!) exp_avg, Tensor(b!)? exp_avg_scales,"
    " Tensor(c!) exp_avg_sq, Tensor(d!)? exp_avg_sq_scales, Tensor(e!) weight, Tensor(f!) correction,"
    " Tensor(g!) weight_scales, Tensor new_weight_scales, Tensor chunk_tensor, Tensor(h!) chunk_amax,"
    " Tensor grad_factor, Tensor step, float lr, float beta1, float beta2, float eps, float weight_decay,"
    " bool decoupled) -> ()",
    "derive_fp8_weights_": "(Tensor master, Tensor? master_scales, Tensor(a!) payload, Tensor weight_scales,"
    " Tensor chunk_tensor) -> ()",
}


def _reference_quantize_current(
    x: Tensor, dtype: torch.dtype, power_of_two: bool, rowwise: bool, transposed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return reference.quantize_current(x, dtype, power_of_two=power_of_two, rowwise=rowwise, transposed=transposed)


def _reference_quantize_with_scale(
    x: Tensor, scale: Tensor, dtype: torch.dtype, rowwise: bool, transposed: bool, amax_out: Tensor | None
) -> tuple[Tensor, Tensor]:
    return reference.quantize_with_scale(x, scale, dtype, rowwise=rowwise, transposed=transposed, amax_out=amax_out)


def _reference_scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:
    return reference.scaled_mm(a, b, scale_a, scale_b, bias=bias, out_dtype=out_dtype, use_fast_accum=use_fast_accum)


def _reference_accumulate_rows_(
    payload: Tensor,
    scales: Tensor | None,
    accumulator: Tensor,
    factor: float,
    add: bool,
    own_row: int,
    own_payload: Tensor | None,
    own_scales: Tensor | None,
    addend: Tensor | None,
) -> None:
    own = None if own_payload is None else (own_row, own_payload, own_scales)
    reference.accumulate_rows_(payload, scales, accumulator, factor=factor, add=add, own=own, addend=addend)


def _reference_adamw_step_(*args) -> None:  # type: ignore[no-untyped-def]
    *tensors, lr, beta1, beta2, eps, weight_decay, decoupled = args
    reference.adamw_step_(
        *tensors, lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, decoupled=decoupled
    )


def _reference_adamw_split_step_(*args) -> None:  # type: ignore[no-untyped-def]
    *tensors, lr, beta1, beta2, eps, weight_decay, decoupled = args
    split_master.adamw_split_step_(
        *tensors, lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, decoupled=decoupled
    )


_CPU: dict[str, Callable[..., Any]] = {
    "amax": reference.amax,
    "quantize_current": _reference_quantize_current,
    "quantize_with_scale": _reference_quantize_with_scale,
    "quantize_grad_output": reference.quantize_grad_output,
    "quantize_qkv_grad": qkv.quantize_qkv_grad,
    "quantize_blocks": blocks.quantize_blocks,
    "quantize_tiles": blocks.quantize_tiles,
    "transpose_tiles": blocks.transpose_tiles,
    "block_scaled_mm_into_": block_scaled.block_scaled_mm_into_,
    "transpose": reference.transpose,
    "norm_amax": norm.norm_amax,
    "norm_quantize": norm.norm_quantize,
    "norm_requantize": norm.norm_requantize,
    "norm_backward": norm.norm_backward,
    "norm_backward_quantize": norm.norm_backward_quantize,
    "activation_amax": activation.activation_amax,
    "activation_backward_amax": activation.activation_backward_amax,
    "activation_quantize": activation.activation_quantize,
    "activation_backward_quantize": activation.activation_backward_quantize,
    "cross_entropy_statistics": cross_entropy.cross_entropy_statistics,
    "cross_entropy_backward_": cross_entropy.cross_entropy_backward_,
    "cross_entropy_backward_quantize": cross_entropy.cross_entropy_backward_quantize,
    "scaled_mm": _reference_scaled_mm,
    "scaled_mm_into_": reference.scaled_mm_into_,
    "scaled_mm_to_fp8_": reference.scaled_mm_to_fp8_,
    "quantize_blockwise_": reference.quantize_blockwise_,
    "dequantize_blockwise": reference.dequantize_blockwise,
    "accumulate_rows_": _reference_accumulate_rows_,
    "update_amax_history_": amax_history.update_amax_history_,
    "count_underflow_": underflow.count_underflow_,
    "squared_norm": reference.squared_norm,
    "adamw_step_": _reference_adamw_step_,
    "adamw_split_step_": _reference_adamw_split_step_,
    "derive_fp8_weights_": reference.derive_fp8_weights_,
}

#: Operator → module of its GPU variant, imported on the first CUDA call (a CPU machine has no Triton).
_GPU_MODULES = {
    "amax": "quantize_triton",
    "quantize_current": "quantize_triton",
    "quantize_with_scale": "quantize_triton",
    "quantize_grad_output": "grad_output_triton",
    "quantize_qkv_grad": "grad_output_triton",
    "quantize_blocks": "quantize.blocks_triton",
    "quantize_tiles": "quantize.blocks_triton",
    "transpose_tiles": "quantize.blocks_triton",
    "block_scaled_mm_into_": "gemm.block_scaled_cublaslt",
    "transpose": "quantize_triton",
    "norm_amax": "norm_triton",
    "norm_quantize": "norm_triton",
    "norm_requantize": "norm_triton",
    "norm_backward": "norm_triton",
    "norm_backward_quantize": "norm_cuda",
    "activation_amax": "activation_triton",
    "activation_backward_amax": "activation_triton",
    "activation_quantize": "activation_triton",
    "activation_backward_quantize": "activation_triton",
    "cross_entropy_statistics": "cross_entropy_triton",
    "cross_entropy_backward_": "cross_entropy_triton",
    "cross_entropy_backward_quantize": "cross_entropy_triton",
    "quantize_blockwise_": "blockwise_triton",
    "dequantize_blockwise": "blockwise_triton",
    "accumulate_rows_": "wire_triton",
    "update_amax_history_": "amax_history_triton",
    "count_underflow_": "underflow_triton",
    "squared_norm": "blockwise_triton",
    "adamw_step_": "adamw_triton",
    "adamw_split_step_": "split_adamw_triton",
    "derive_fp8_weights_": "adamw_triton",
}

_CUBLASLT: dict[str, Callable[..., Any]] = {
    "scaled_mm": scaled_mm_cublaslt,
    "scaled_mm_into_": scaled_mm_into_cublaslt_,
    "scaled_mm_to_fp8_": scaled_mm_to_fp8_cublaslt_,
}


def _lazy(name: str, module: str) -> Callable[..., Any]:
    loaded = None

    def call(*args: Any) -> Any:
        nonlocal loaded
        if loaded is None:
            from importlib import import_module

            loaded = getattr(import_module(f"{__package__}.{module}"), name)
        return loaded(*args)

    return call


def _cuda_variant(name: str) -> Callable[..., Any]:
    if name in _CUBLASLT:
        return _CUBLASLT[name]
    return _lazy(name, _GPU_MODULES[name])


def callables() -> SimpleNamespace:
    """By name, the operators for callers inside this package.

    A plain CUDA tensor goes to its variant directly: the dispatcher would cost the host 4 to 8 µs a call and choose the
    same. Whatever else there is (tracing, fake tensors, other devices) takes the operator.
    """
    return SimpleNamespace(**{name: _callable(name) for name in _SCHEMAS})


def _callable(name: str) -> Callable[..., Any]:
    operator = getattr(getattr(torch.ops, _LIBRARY.ns), name).default
    on_cuda = _cuda_variant(name)

    def call(first: Any, *others: Any) -> Any:
        tensor = first[0] if type(first) is list else first
        if type(tensor) is Tensor and tensor.is_cuda:
            return on_cuda(first, *others)
        return operator(first, *others)

    return call


for _name, _schema in _SCHEMAS.items():
    _LIBRARY.define(_name + _schema)
    _LIBRARY.impl(_name, _CPU[_name], "CPU")
    _LIBRARY.impl(_name, _cuda_variant(_name), "CUDA")
