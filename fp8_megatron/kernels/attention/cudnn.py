"""Causal attention on FP8 operands by cuDNN's ``sdpa_fp8`` and ``sdpa_fp8_backward``, on Hopper.

cuDNN's frontend (the package nvidia-cudnn-frontend) builds a graph and a plan for a geometry once. Each call then
passes addresses alone. It runs the cuDNN that PyTorch has loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import cudnn
import torch
from torch import Tensor

from ...device.device import UnsupportedDeviceError
from ...dtypes import E4M3, E5M2
from .reference import PROBABILITY_SCALE, AttentionGradCasts, AttentionInputs, check_attention

_TYPES = {
    E4M3: cudnn.data_type.FP8_E4M3,
    E5M2: cudnn.data_type.FP8_E5M2,
    torch.float32: cudnn.data_type.FLOAT,
}
#: Columns of a head. cuDNN's backward takes no other on Hopper.
HEAD_WIDTH = 128
#: The dimensions of a number.
_NUMBER = (1, 1, 1, 1)


class _Geometry(NamedTuple):
    """Dimensions and strides as cuDNN takes them, and the dtype."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class _GraphPlan(NamedTuple):
    """A built graph, the identifiers of its operands in the order of the call, and the bytes of its workspace."""

    graph: Any
    uids: tuple[int, ...]
    workspace: int


def fp8_attention(inputs: AttentionInputs, inverse_out: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """`reference.fp8_attention`; cuDNN subtracts a running maximum and casts exp of the difference.

    Raises:
        UnsupportedDeviceError: the GPU is no Hopper.
        ValueError: heads are not `HEAD_WIDTH` wide.
    """
    _check(inputs)
    query, key, value = inputs[:3]
    device = query.device
    s, b, heads, _ = query.shape
    out = torch.empty(query.shape, dtype=E4M3, device=device)
    log_sum_exp = torch.empty((b, heads, s), dtype=torch.float32, device=device)
    plan = _forward_plan(
        *(_of_tokens(x) for x in (query, key, value, out)), _of_statistics(log_sum_exp), softmax_scale, device.index
    )
    probability = _probability_scales(device.index)
    unused = torch.empty((2, 4), dtype=torch.float32, device=device)  # amaxes of P and O
    operands = (query, key, value, *inputs[3:], *probability, inverse_out, out, log_sum_exp, *unused)
    _run(plan, operands, device)
    return out, log_sum_exp


def fp8_attention_backward(
    inputs: AttentionInputs,
    grad: Tensor,
    scale_grad: Tensor,
    out: Tensor,
    scale_out: Tensor,
    log_sum_exp: Tensor,
    casts: AttentionGradCasts,
    softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.fp8_attention_backward`.

    Raises:
        UnsupportedDeviceError: the GPU is no Hopper.
        ValueError: heads are not `HEAD_WIDTH` wide.
    """
    _check(inputs)
    query, key, value = inputs[:3]
    device = query.device
    grads = [torch.empty(x.shape, dtype=grad.dtype, device=device) for x in (query, key, value)]
    plan = _backward_plan(
        *(_of_tokens(x) for x in (query, key, value, out, grad, *grads)),
        _of_statistics(log_sum_exp),
        softmax_scale,
        device.index,
    )
    scale_probability, inverse_probability = _probability_scales(device.index)
    operands = (
        *(query, key, value, out, grad, log_sum_exp),
        *(*inputs[3:], scale_out, scale_grad, scale_probability, casts.scores.scale),
        *(inverse_probability, casts.query.inverse, casts.key.inverse, casts.value.inverse, casts.scores.inverse),
        *grads,
        *(casts.query.amax, casts.key.amax, casts.value.amax, casts.scores.amax),
    )
    _run(plan, operands, device)
    return grads[0], grads[1], grads[2]


def _check(inputs: AttentionInputs) -> None:
    check_attention(inputs)
    check_device(inputs.query.device.index)
    width = inputs.query.shape[3]
    if width != HEAD_WIDTH:
        raise ValueError(f"cuDNN's FP8 attention takes heads of {HEAD_WIDTH} columns on Hopper, not {width}")


@cache
def check_device(device: int) -> None:
    """Refuse a GPU without these kernels.

    Raises:
        UnsupportedDeviceError: no Hopper.
    """
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) != (9, 0):
        raise UnsupportedDeviceError(
            f"FP8 attention runs on GPUs of compute capability 9.0 (Hopper), not {major}.{minor}: drop "
            "fp8_dot_product_attention"
        )


@cache
def _forward_plan(
    query: _Geometry,
    key: _Geometry,
    value: _Geometry,
    out: _Geometry,
    log_sum_exp: _Geometry,
    softmax_scale: float,
    device: int,
) -> _GraphPlan:
    graph = _new_graph(device)
    tensors = [_tensor(graph, geometry) for geometry in (query, key, value)]
    names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    numbers = {name: _number(graph) for name in names}
    results = graph.sdpa_fp8(
        **dict(zip("qkv", tensors, strict=True)),
        **numbers,
        attn_scale=softmax_scale,
        generate_stats=True,
        use_causal_mask=True,
    )
    _give_back(results, (out, log_sum_exp, *2 * [_Geometry(_NUMBER, _NUMBER, torch.float32)]))
    return _built(graph, [*tensors, *numbers.values(), *results], device)


@cache
def _backward_plan(
    query: _Geometry,
    key: _Geometry,
    value: _Geometry,
    out: _Geometry,
    grad: _Geometry,
    grad_query: _Geometry,
    grad_key: _Geometry,
    grad_value: _Geometry,
    log_sum_exp: _Geometry,
    softmax_scale: float,
    device: int,
) -> _GraphPlan:
    graph = _new_graph(device)
    given = (query, key, value, out, grad, log_sum_exp)
    tensors = dict(zip(("q", "k", "v", "o", "dO", "stats"), (_tensor(graph, x) for x in given), strict=True))
    names = [f"descale_{name}" for name in ("q", "k", "v", "o", "dO", "s", "dP")]
    names += [f"scale_{name}" for name in ("s", "dQ", "dK", "dV", "dP")]
    numbers = {name: _number(graph) for name in names}
    results = graph.sdpa_fp8_backward(**tensors, **numbers, attn_scale=softmax_scale, use_causal_mask=True)
    _give_back(results, (grad_query, grad_key, grad_value, *4 * [_Geometry(_NUMBER, _NUMBER, torch.float32)]))
    return _built(graph, [*tensors.values(), *numbers.values(), *results], device)


def _new_graph(device: int) -> Any:
    return cudnn.pygraph(
        io_data_type=cudnn.data_type.FP8_E4M3,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=_handle(device),
    )


def _tensor(graph: Any, geometry: _Geometry) -> Any:
    return graph.tensor(dim=list(geometry.shape), stride=list(geometry.strides), data_type=_TYPES[geometry.dtype])


def _number(graph: Any) -> Any:
    return _tensor(graph, _Geometry(_NUMBER, _NUMBER, torch.float32))


def _give_back(results: Sequence[Any], geometries: Sequence[_Geometry]) -> None:
    """Make these results outputs of their graph."""
    for result, geometry in zip(results, geometries, strict=True):
        result.set_output(True).set_dim(list(geometry.shape)).set_stride(list(geometry.strides))
        result.set_data_type(_TYPES[geometry.dtype])


def _built(graph: Any, operands: Sequence[Any], device: int) -> _GraphPlan:
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    return _GraphPlan(graph, tuple(operand.get_uid() for operand in operands), graph.get_workspace_size())


def _run(plan: _GraphPlan, operands: Sequence[Tensor], device: torch.device) -> None:
    handle = _handle(device.index)
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
    workspace = torch.empty(max(plan.workspace, 1), dtype=torch.uint8, device=device)
    addresses = [operand.data_ptr() for operand in operands]
    plan.graph.execute(dict(zip(plan.uids, addresses, strict=True)), workspace.data_ptr(), handle=handle)


@cache
def _handle(device: int) -> Any:
    with torch.cuda.device(device):
        return cudnn.create_handle()


@cache
def _probability_scales(device: int) -> tuple[Tensor, Tensor]:
    """P's dequantising scale and its reciprocal, FP32 [1], 16-byte aligned."""
    scales = torch.tensor([[PROBABILITY_SCALE], [1.0 / PROBABILITY_SCALE]], device=torch.device("cuda", device))
    padded = torch.nn.functional.pad(scales, (0, 3))
    return padded[0, :1], padded[1, :1]


def _of_tokens(x: Tensor) -> _Geometry:
    """[s, b, heads, d] as cuDNN's [b, heads, s, d]."""
    s, b, heads, d = x.shape
    of_s, of_b, of_heads, of_d = x.stride()
    return _Geometry((b, heads, s, d), (of_b, of_heads, of_s, of_d), x.dtype)


def _of_statistics(log_sum_exp: Tensor) -> _Geometry:
    b, heads, s = log_sum_exp.shape
    return _Geometry((b, heads, s, 1), (heads * s, s, 1, 1), torch.float32)
