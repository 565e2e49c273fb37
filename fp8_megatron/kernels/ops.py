"""The only door to the kernels: schemas of the ``fp8_megatron::`` operators and typed functions that call them.

A CPU tensor takes `reference`; a CUDA tensor takes the Triton variant, and the FP8 GEMM takes cuBLASLt through
``torch._scaled_mm``. Which is which is decided by the dispatcher and nothing else: there is no silent fall-back.
Arguments, shapes and numerics are documented at the functions of the same name in `reference` (the split master's:
`split_master`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..formats import COMPANDED_DTYPES, E4M3, FP8_DTYPES
from . import activation, cross_entropy, norm, qkv, reference, split_master
from .scaled_mm import check_scaled_mm, scaled_mm_cublaslt

_LIBRARY = torch.library.Library("fp8_megatron", "DEF")

_SCHEMAS = {
    "amax": "(Tensor x) -> Tensor",
    "quantize_current": "(Tensor x, ScalarType dtype, bool power_of_two, bool rowwise, bool transposed)"
    " -> (Tensor, Tensor, Tensor)",
    "quantize_with_scale": "(Tensor x, Tensor scale, ScalarType dtype, bool rowwise, bool transposed,"
    " Tensor(a!)? amax_out) -> (Tensor, Tensor)",
    "quantize_grad_output": "(Tensor x, ScalarType dtype, Tensor? scale, bool power_of_two, Tensor(a!)? amax_out)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    "quantize_qkv_grad": "(Tensor[] grads, ScalarType dtype, Tensor? scale, bool power_of_two,"
    " Tensor(a!)? amax_out, bool column_sums) -> (Tensor, Tensor, Tensor, Tensor)",
    "transpose": "(Tensor payload) -> Tensor",
    "norm_amax": "(Tensor x, Tensor weight, Tensor? bias, float eps, bool rms) -> Tensor",
    "norm_quantize": "(Tensor x, Tensor weight, Tensor? bias, float eps, bool rms, ScalarType dtype, Tensor? scale,"
    " bool power_of_two, Tensor(a!)? amax_out) -> (Tensor, Tensor, Tensor, Tensor)",
    "norm_requantize": "(Tensor x, Tensor weight, Tensor? bias, Tensor mean, Tensor rstd, Tensor scale,"
    " ScalarType dtype, bool transposed) -> Tensor",
    "norm_backward": "(Tensor grad, Tensor? residual_grad, Tensor x, Tensor weight, Tensor mean, Tensor rstd,"
    " bool has_bias) -> (Tensor, Tensor, Tensor)",
    "activation_amax": "(Tensor z, str kind) -> Tensor",
    "activation_backward_amax": "(Tensor grad, Tensor z, str kind) -> Tensor",
    "activation_quantize": "(Tensor z, str kind, ScalarType dtype, Tensor? scale, bool power_of_two,"
    " Tensor(a!)? amax_out) -> (Tensor, Tensor)",
    "activation_backward_quantize": "(Tensor grad, Tensor z, str kind, ScalarType dtype, Tensor? scale,"
    " bool power_of_two, Tensor(a!)? amax_out, ScalarType activation_dtype, Tensor activation_scale,"
    " bool column_sums) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "cross_entropy_statistics": "(Tensor logits, Tensor labels) -> (Tensor, Tensor, Tensor)",
    "cross_entropy_backward_": "(Tensor(a!) logits, Tensor labels, Tensor log_sum_exp, Tensor grad) -> ()",
    "scaled_mm": "(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias, ScalarType out_dtype,"
    " bool use_fast_accum) -> Tensor",
    "quantize_blockwise_": "(Tensor x, Tensor(a!) payload, Tensor(b!) scales) -> ()",
    "dequantize_blockwise": "(Tensor payload, Tensor scales) -> Tensor",
    "accumulate_rows_": "(Tensor payload, Tensor scales, Tensor(a!) accumulator, float factor, bool add) -> ()",
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


def _reference_accumulate_rows_(payload: Tensor, scales: Tensor, accumulator: Tensor, factor: float, add: bool) -> None:
    reference.accumulate_rows_(payload, scales, accumulator, factor=factor, add=add)


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
    "transpose": reference.transpose,
    "norm_amax": norm.norm_amax,
    "norm_quantize": norm.norm_quantize,
    "norm_requantize": norm.norm_requantize,
    "norm_backward": norm.norm_backward,
    "activation_amax": activation.activation_amax,
    "activation_backward_amax": activation.activation_backward_amax,
    "activation_quantize": activation.activation_quantize,
    "activation_backward_quantize": activation.activation_backward_quantize,
    "cross_entropy_statistics": cross_entropy.cross_entropy_statistics,
    "cross_entropy_backward_": cross_entropy.cross_entropy_backward_,
    "scaled_mm": _reference_scaled_mm,
    "quantize_blockwise_": reference.quantize_blockwise_,
    "dequantize_blockwise": reference.dequantize_blockwise,
    "accumulate_rows_": _reference_accumulate_rows_,
    "squared_norm": reference.squared_norm,
    "adamw_step_": _reference_adamw_step_,
    "adamw_split_step_": _reference_adamw_split_step_,
    "derive_fp8_weights_": reference.derive_fp8_weights_,
}

#: Operator → module of its Triton variant, imported on the first CUDA call (a CPU machine has no Triton).
_TRITON = {
    "amax": "quantize_triton",
    "quantize_current": "quantize_triton",
    "quantize_with_scale": "quantize_triton",
    "quantize_grad_output": "grad_output_triton",
    "quantize_qkv_grad": "grad_output_triton",
    "transpose": "quantize_triton",
    "norm_amax": "norm_triton",
    "norm_quantize": "norm_triton",
    "norm_requantize": "norm_triton",
    "norm_backward": "norm_triton",
    "activation_amax": "activation_triton",
    "activation_backward_amax": "activation_triton",
    "activation_quantize": "activation_triton",
    "activation_backward_quantize": "activation_triton",
    "cross_entropy_statistics": "cross_entropy_triton",
    "cross_entropy_backward_": "cross_entropy_triton",
    "quantize_blockwise_": "blockwise_triton",
    "dequantize_blockwise": "blockwise_triton",
    "accumulate_rows_": "wire_triton",
    "squared_norm": "blockwise_triton",
    "adamw_step_": "adamw_triton",
    "adamw_split_step_": "split_adamw_triton",
    "derive_fp8_weights_": "adamw_triton",
}


def _lazy_triton(name: str, module: str) -> Callable[..., Any]:
    loaded = None

    def call(*args: Any) -> Any:
        nonlocal loaded
        if loaded is None:
            from importlib import import_module

            loaded = getattr(import_module(f"{__package__}.{module}"), name)
        return loaded(*args)

    return call


def _cuda_variant(name: str) -> Callable[..., Any]:
    if name == "scaled_mm":
        return scaled_mm_cublaslt
    return _lazy_triton(name, _TRITON[name])


for _name, _schema in _SCHEMAS.items():
    _LIBRARY.define(_name + _schema)
    _LIBRARY.impl(_name, _CPU[_name], "CPU")
    _LIBRARY.impl(_name, _cuda_variant(_name), "CUDA")

_OPS = torch.ops.fp8_megatron


def amax(x: Tensor) -> Tensor:
    """`reference.amax`: FP32 [1]."""
    return _OPS.amax(x)


def quantize_current(
    x: Tensor, dtype: torch.dtype, *, power_of_two: bool = False, rowwise: bool = True, transposed: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.quantize_current`: payload [M, K], transposed payload [K, M], scale [1]."""
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
    """`reference.quantize_with_scale`: payload [M, K], transposed payload [K, M]."""
    assert x.ndim == 2 and dtype in FP8_DTYPES, (x.shape, dtype)
    return _OPS.quantize_with_scale(x, scale, dtype, rowwise, transposed, amax_out)


def quantize_grad_output(
    x: Tensor, dtype: torch.dtype, *, scale: Tensor | None, power_of_two: bool = False, amax_out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`reference.quantize_grad_output`: payload [M, K], transpose [K, M], column sums [K], the scale taken."""
    assert x.ndim == 2 and dtype in FP8_DTYPES, (x.shape, dtype)
    return _OPS.quantize_grad_output(x, dtype, scale, power_of_two, amax_out)


def norm_amax(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, rms: bool) -> Tensor:
    """`norm.norm_amax`: FP32 [1]."""
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
    """`norm.norm_quantize`: payload [T, K], the scale taken, mean [T], rstd [T]."""
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
    """`norm.norm_requantize`: payload [T, K], or [K, T]."""
    return _OPS.norm_requantize(x, weight, bias, mean, rstd, scale, dtype, transposed)


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
    """`norm.norm_backward`: gradients of x [T, K], of the weight [K] and of the bias [K]."""
    assert grad.shape == x.shape, (grad.shape, x.shape)
    return _OPS.norm_backward(grad, residual_grad, x, weight, mean, rstd, has_bias)


def activation_amax(z: Tensor, kind: str) -> Tensor:
    """`activation.activation_amax`: FP32 [1]."""
    return _OPS.activation_amax(z, kind)


def activation_backward_amax(grad: Tensor, z: Tensor, kind: str) -> Tensor:
    """`activation.activation_backward_amax`: FP32 [1]."""
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
    """`activation.activation_quantize`: payload [T, F], the scale taken."""
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
    """`activation.activation_backward_quantize`: gradient of z [T, Z] and [Z, T], activation [F, T], column sums [Z],
    the scale taken."""
    assert z.shape[1] == activation.INPUTS[kind] * grad.shape[1], (z.shape, grad.shape, kind)
    return _OPS.activation_backward_quantize(
        grad, z, kind, dtype, scale, power_of_two, amax_out, activation_dtype, activation_scale, column_sums
    )


def cross_entropy_statistics(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`cross_entropy.cross_entropy_statistics`: maximum, Σ exp and the label's logit of every row, FP32 [T]."""
    assert logits.ndim == 2 and logits.is_contiguous() and labels.shape == logits.shape[:1], (
        logits.shape,
        labels.shape,
    )
    return _OPS.cross_entropy_statistics(logits, labels)


def cross_entropy_backward_(logits: Tensor, labels: Tensor, log_sum_exp: Tensor, grad: Tensor) -> None:
    """`cross_entropy.cross_entropy_backward_`: logits → their gradient, in place."""
    _OPS.cross_entropy_backward_(logits, labels, log_sum_exp, grad)


def quantize_qkv_grad(
    grads: list[Tensor],
    dtype: torch.dtype,
    *,
    scale: Tensor | None,
    column_sums: bool,
    power_of_two: bool = False,
    amax_out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`qkv.quantize_qkv_grad`: payload [T, N], transpose [N, T], column sums [N], the scale taken."""
    assert len(grads) == 3 and grads[1].shape == grads[2].shape, [grad.shape for grad in grads]
    return _OPS.quantize_qkv_grad(grads, dtype, scale, power_of_two, amax_out, column_sums)


def transpose(payload: Tensor) -> Tensor:
    """`reference.transpose`: FP8 [M, K] → contiguous [K, M]."""
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
    """`reference.scaled_mm`: a [M, K] · b [N, K]ᵀ → [M, N]; the limits of Hopper's GEMM hold on every device."""
    check_scaled_mm(a, b)
    return _OPS.scaled_mm(a, b, scale_a, scale_b, bias, out_dtype, use_fast_accum)


def quantize_blockwise_(x: Tensor, payload: Tensor, scales: Tensor) -> None:
    """`reference.quantize_blockwise_`: flat x [≤ n] → payload [n], scales [n / block], in place."""
    assert x.numel() <= payload.numel() and payload.numel() % scales.numel() == 0, (x.shape, payload.shape)
    _OPS.quantize_blockwise_(x, payload, scales)


def dequantize_blockwise(payload: Tensor, scales: Tensor) -> Tensor:
    """`reference.dequantize_blockwise`: FP32 [n]."""
    return _OPS.dequantize_blockwise(payload, scales)


def accumulate_rows_(payload: Tensor, scales: Tensor, accumulator: Tensor, *, factor: float, add: bool) -> None:
    """`reference.accumulate_rows_`: FP8 rows [d · n] with block scales into an FP32 accumulator [n], in place."""
    n = accumulator.numel()
    assert accumulator.dtype == torch.float32 and payload.dtype in FP8_DTYPES, (accumulator.dtype, payload.dtype)
    assert payload.numel() % n == 0 and n % (payload.numel() // scales.numel()) == 0, (payload.shape, scales.shape, n)
    _OPS.accumulate_rows_(payload, scales, accumulator, factor, add)


def squared_norm(payload: Tensor, scales: Tensor | None) -> Tensor:
    """`reference.squared_norm`: Σ x², FP32 [1]."""
    return _OPS.squared_norm(payload, scales)


def adamw_step_(
    grad: Tensor,
    grad_scales: Tensor | None,
    exp_avg: Tensor,
    exp_avg_scales: Tensor | None,
    exp_avg_sq: Tensor,
    exp_avg_sq_scales: Tensor | None,
    master: Tensor,
    master_scales: Tensor | None,
    weight: Tensor | None,
    chunk_amax: Tensor | None,
    grad_factor: Tensor,
    step: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
) -> None:
    """`reference.adamw_step_`: one fused Adam(W) pass over flat storage, in place."""
    _check_moments(exp_avg, exp_avg_sq)
    assert master.dtype not in COMPANDED_DTYPES, master.dtype
    _OPS.adamw_step_(
        grad,
        grad_scales,
        exp_avg,
        exp_avg_scales,
        exp_avg_sq,
        exp_avg_sq_scales,
        master,
        master_scales,
        weight,
        chunk_amax,
        grad_factor,
        step,
        lr,
        beta1,
        beta2,
        eps,
        weight_decay,
        decoupled,
    )


def adamw_split_step_(
    grad: Tensor,
    grad_scales: Tensor | None,
    exp_avg: Tensor,
    exp_avg_scales: Tensor | None,
    exp_avg_sq: Tensor,
    exp_avg_sq_scales: Tensor | None,
    weight: Tensor,
    correction: Tensor,
    weight_scales: Tensor,
    new_weight_scales: Tensor,
    chunk_tensor: Tensor,
    chunk_amax: Tensor,
    grad_factor: Tensor,
    step: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
) -> None:
    """`split_master.adamw_split_step_`: one Adam(W) pass over FP8 weights with a byte of correction, in place."""
    _check_moments(exp_avg, exp_avg_sq)
    assert weight.dtype == E4M3 and correction.dtype == torch.int8, (weight.dtype, correction.dtype)
    _OPS.adamw_split_step_(
        grad,
        grad_scales,
        exp_avg,
        exp_avg_scales,
        exp_avg_sq,
        exp_avg_sq_scales,
        weight,
        correction,
        weight_scales,
        new_weight_scales,
        chunk_tensor,
        chunk_amax,
        grad_factor,
        step,
        lr,
        beta1,
        beta2,
        eps,
        weight_decay,
        decoupled,
    )


def _check_moments(exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
    """The companded integers are each made for one moment: uint8 has no sign, int8 half of its codes below zero."""
    assert exp_avg.dtype != torch.uint8 and exp_avg_sq.dtype != torch.int8, (exp_avg.dtype, exp_avg_sq.dtype)


def derive_fp8_weights_(
    master: Tensor, master_scales: Tensor | None, payload: Tensor, weight_scales: Tensor, chunk_tensor: Tensor
) -> None:
    """`reference.derive_fp8_weights_`: FP8 weights from their master, in place."""
    _OPS.derive_fp8_weights_(master, master_scales, payload, weight_scales, chunk_tensor)
