"""The only door to the kernels: schemas of the ``fp8_megatron::`` operators and typed functions that call them.

A CPU tensor takes `reference`; a CUDA tensor takes the Triton variant, and the FP8 GEMM takes cuBLASLt through
``torch._scaled_mm``. Which is which is decided by the dispatcher and nothing else: there is no silent fall-back.
Arguments, shapes and numerics are documented at the functions of the same name in `reference` (the split master's:
`split_master`).

One exception, in `_REFERENCE_ON_CUDA`, `_TAKES_STATE` and `_triton_or_reference` alone: operators and storage that have
no kernel yet (companded moments, the split master) take the reference on a GPU too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..formats import COMPANDED_DTYPES, E4M3, FP8_DTYPES
from . import reference, split_master
from .scaled_mm import check_scaled_mm, scaled_mm_cublaslt

_LIBRARY = torch.library.Library("fp8_megatron", "DEF")

_SCHEMAS = {
    "amax": "(Tensor x) -> Tensor",
    "quantize_current": "(Tensor x, ScalarType dtype, bool power_of_two, bool rowwise, bool transposed)"
    " -> (Tensor, Tensor, Tensor)",
    "quantize_with_scale": "(Tensor x, Tensor scale, ScalarType dtype, bool rowwise, bool transposed,"
    " Tensor(a!)? amax_out) -> (Tensor, Tensor)",
    "transpose": "(Tensor payload) -> Tensor",
    "scaled_mm": "(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias, ScalarType out_dtype,"
    " bool use_fast_accum) -> Tensor",
    "quantize_blockwise_": "(Tensor x, Tensor(a!) payload, Tensor(b!) scales) -> ()",
    "dequantize_blockwise": "(Tensor payload, Tensor scales) -> Tensor",
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
    "transpose": reference.transpose,
    "scaled_mm": _reference_scaled_mm,
    "quantize_blockwise_": reference.quantize_blockwise_,
    "dequantize_blockwise": reference.dequantize_blockwise,
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
    "transpose": "quantize_triton",
    "quantize_blockwise_": "blockwise_triton",
    "dequantize_blockwise": "blockwise_triton",
    "squared_norm": "blockwise_triton",
    "adamw_step_": "adamw_triton",
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


#: Operators that may meet companded state. The others are not asked: a step launches hundreds of them.
_TAKES_STATE = ("adamw_step_", "quantize_blockwise_", "dequantize_blockwise")
#: Operators that take the reference on a GPU: a kernel is to follow.
_REFERENCE_ON_CUDA = ("adamw_split_step_",)


def _triton_or_reference(name: str) -> Callable[..., Any]:
    """The Triton variant; the reference where an operand is companded, which the kernels cannot read yet."""
    triton, reference_variant = _lazy_triton(name, _TRITON[name]), _CPU[name]

    def call(*args: Any) -> Any:
        companded = any(isinstance(arg, Tensor) and arg.dtype in COMPANDED_DTYPES for arg in args)
        return (reference_variant if companded else triton)(*args)

    return call


def _cuda_variant(name: str) -> Callable[..., Any]:
    if name == "scaled_mm":
        return scaled_mm_cublaslt
    if name in _REFERENCE_ON_CUDA:
        return _CPU[name]
    return _triton_or_reference(name) if name in _TAKES_STATE else _lazy_triton(name, _TRITON[name])


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
    """`reference.quantize_blockwise_`: flat x [n] → payload [n], scales [n / block], in place."""
    assert x.numel() == payload.numel() and payload.numel() % scales.numel() == 0, (x.shape, payload.shape)
    _OPS.quantize_blockwise_(x, payload, scales)


def dequantize_blockwise(payload: Tensor, scales: Tensor) -> Tensor:
    """`reference.dequantize_blockwise`: FP32 [n]."""
    return _OPS.dequantize_blockwise(payload, scales)


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
