"""The declarations of the operators: schemas, fake versions, GPU variants and errors, under FakeTensor and compile."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8_megatron.activation_functions import KINDS, Activation
from fp8_megatron.device.device import UnsupportedDeviceError
from fp8_megatron.dtypes import E4M3, E5M2
from fp8_megatron.kernels import ops, registration

T, K = 32, 64
N = T * K


def _flat(dtype: torch.dtype, block: int) -> ops.FlatState:
    payload, scales = torch.empty(N, dtype=dtype), torch.empty(N // block)
    ops.quantize_blockwise_(torch.rand(N), payload, scales)
    return ops.FlatState(payload, scales)


def _fp8(rows: int, columns: int, dtype: torch.dtype = E4M3) -> Tensor:
    return torch.randn(rows, columns).to(dtype)


def _mx_scales(rows: int, columns: int) -> Tensor:
    return torch.rand(rows, columns // 32).to(torch.float8_e8m0fnu)


def _routing_map() -> Tensor:
    """Each token to two of three experts, or to fewer; every expert has one."""
    token = torch.arange(T)[:, None]
    return ((token + torch.arange(3)) % 3 > 0) & (token % 5 > 0)


def samples() -> dict[str, list[tuple[Any, ...]]]:
    """Operator → arguments of the specification; each optional argument is given in one of them and not in another."""
    x, weight, vector = torch.randn(T, K).bfloat16(), torch.rand(K).bfloat16(), torch.rand(T)
    one, scale, amax = torch.ones(1), torch.tensor([0.01]), torch.zeros(1)
    grads, z = torch.randn(2, T, K).bfloat16(), torch.randn(T, 2 * K).bfloat16()
    qkv = [torch.randn(T // 4, 4, 2, width).bfloat16() for width in (32, 16, 16)]
    turns = torch.randn(T // 4, 2, 4), torch.randn(T // 4, 2, 8)
    rotations = ops.Rotation(turns[0], 16, False), ops.Rotation(turns[1], 16, True)
    wide_x, wide_weight = torch.randn(T, 256).bfloat16(), torch.rand(256).bfloat16()
    small = torch.rand(16).bfloat16()
    qk_norms = ops.QKNorm(small, small, None, None, 1e-5, True), ops.QKNorm(small, small, small, small, 1e-5, False)
    labels, none = torch.randint(K, (T,)), torch.empty(0)
    state = ops.AdamState(_flat(E4M3, 128), _flat(torch.int8, 256), _flat(torch.uint8, 256), _flat(torch.float16, 256))
    state.master.payload.div_(4.0)  # below its scale: the step writes another scale, for any update
    plain = ops.AdamState(*(ops.FlatState(torch.rand(N)) for _ in range(4)))
    split = ops.SplitAdamState(
        *state[:3], _fp8(1, N)[0], torch.zeros(N, dtype=torch.int8), one.clone(), 2 * one, torch.zeros(2).int()
    )
    hyper = ops.AdamHyper(1e-3, 0.9, 0.95, 1e-8, 0.1, decoupled=True)
    norm = (x, weight, vector, vector)
    records, places = (torch.rand(3, 4), torch.rand(3, 2, 4)), torch.arange(3, dtype=torch.int32)
    gradient = (grads, None, *norm, True), (grads[:1], x, x, weight, none, vector, False)
    rows, stored = _flat(E4M3, 128), _flat(torch.float16, 256)
    activations = [(Activation(kind), z if row.is_gated else x) for kind, row in KINDS.items()]
    heads = [torch.randn(64, 2, n, 128).to(E4M3) for n in (4, 2, 2)]
    attention = ops.AttentionInputs(*heads, scale, scale, scale)
    written = ops.AttentionGradCasts(*(ops.WrittenCast(one, one, torch.zeros(1)) for _ in range(4)))
    of_heads, log_sums = torch.randn(64, 2, 4, 128), 5 * torch.ones(2, 4, 64)
    offsets, source, rows_of_tokens = ops.routed_rows(_routing_map(), 3 * 128, 2)
    probs = torch.where(source < 0, 0.0, torch.rand(3 * 128))
    of_experts, grad_of_experts = torch.randn(3 * 128, 2 * K).bfloat16(), torch.randn(3 * 128, K).bfloat16()
    gated, plain_experts = (of_experts, Activation("swiglu")), (grad_of_experts, Activation("squared_relu"))
    geglu, experts, tokens = (of_experts, Activation("quick_geglu")), ops.ExpertRows(probs, offsets), ops.ExpertRows()
    groups = torch.tensor([0, 128, 128, 256], dtype=torch.int32)  # the second expert has no rows
    routed, bias = torch.randn(T, 16), torch.rand(16)
    choices = [(None, ops.Choice(4, False, False, 0, 0, 1.0)), (bias, ops.Choice(4, True, False, 4, 2, 2.5))]
    choices += [(None, ops.Choice(2, False, True, 4, 1, 1.0)), (None, ops.Choice(1, True, False, 0, 0, 2.5))]
    return {
        "amax": [(x,)],
        "quantize_current": [(x, E4M3, False, True, True), (x, E5M2, True, False, True)],
        "quantize_with_scale": [(x, scale, E4M3, True, True, amax), (x, scale, E5M2, True, False, None)],
        "quantize_grad_output": [(x, E5M2, None, True, None, True), (x, E5M2, scale, False, amax, False)],
        "quantize_qkv_grad": [(qkv, E5M2, None, False, None, True), (qkv, E5M2, scale, False, amax, False)],
        "transpose": [(_fp8(T, K),), (_fp8(3 * T, K).view(3, T, K),)],
        "rotate_qk_": [(torch.randn(T, 128).bfloat16(), one_rotation, 2) for one_rotation in rotations],
        "split_rotated_qkv": [(torch.randn(T, 128).bfloat16(), one_rotation, 2) for one_rotation in rotations],
        "norm_rotate_qk": [(torch.randn(T, 128).bfloat16(), *one, 2) for one in zip(rotations, qk_norms, strict=True)],
        "norm_rotate_qk_backward": [
            (qkv, torch.randn(T, 128).bfloat16(), *one) for one in zip(rotations, qk_norms, strict=True)
        ],
        "unrotate_qkv_grad": [(qkv, one_rotation) for one_rotation in rotations],
        "rotated_qkv_grad_amax": [(qkv, one_rotation) for one_rotation in rotations],
        "quantize_rotated_qkv_grad": [
            (qkv, rotations[0], E5M2, None, False, None, True, []),
            (qkv, rotations[1], E5M2, scale, False, amax, False, []),
            ([grad.to(E5M2) for grad in qkv], rotations[0], E5M2, scale, False, amax, True, [scale, one, one]),
        ],
        "quantize_rotated_qkv": [
            (torch.randn(T, 128).bfloat16(), rotations[0], ops.QKVCasts(*3 * [ops.KnownCast(scale, None)]), 2),
            (
                torch.randn(T, 128).bfloat16(),
                rotations[1],
                ops.QKVCasts(*(ops.KnownCast(scale, torch.zeros(3)) for _ in range(3))),
                2,
            ),
        ],
        "norm": [(x, weight, None, 1e-5, True), (x, weight, weight, 1e-5, False)],
        "norm_amax": [(x, weight, None, 1e-5, True), (x, weight, weight, 1e-5, False)],
        "norm_quantize": [
            (x, weight, None, E4M3, 1e-5, True, None, False, None),
            (x, weight, weight, E4M3, 1e-5, False, scale, False, amax),
        ],
        "norm_requantize": [
            (x, weight, None, none, vector, scale, E4M3, True),
            (x, weight, weight, vector, vector, scale, E4M3, False),
        ],
        "norm_quantize_blocks": [
            (wide_x, wide_weight, None, E4M3, 1e-5, True, True),
            (wide_x, wide_weight, wide_weight, E4M3, 1e-5, False, False),
        ],
        "norm_requantize_blocks": [
            (wide_x, wide_weight, None, none, vector, E4M3, True),
            (wide_x, wide_weight, wide_weight, vector, vector, E4M3, False),
        ],
        "norm_amax_scaled": [(x, weight, None, none, vector, vector), (x, weight, weight, vector, vector, vector)],
        "norm_quantize_scaled": [
            (x, weight, None, none, vector, vector, E4M3, None, False, True),
            (x, weight, weight, vector, vector, vector, E4M3, scale, False, False),
        ],
        "norm_backward": [*gradient],
        "norm_backward_quantize": [
            (*gradient[0][:-1], E5M2, True, scale, amax, True),
            (*gradient[1][:-1], E5M2, False, scale, None, False),
        ],
        "activation_amax": [
            *((inputs, function, tokens) for function, inputs in activations),
            *((*one, experts) for one in (gated, plain_experts)),
        ],
        "activation_backward_amax": [
            *((x, inputs, function, tokens) for function, inputs in activations),
            *((grad_of_experts, *one, experts) for one in (gated, plain_experts)),
        ],
        "activation_quantize": [
            *(
                (inputs, function, E4M3, tokens, given, False, None if given is None else amax)
                for (function, inputs), given in zip(activations, cycle((None, scale)), strict=False)
            ),
            (*gated, E4M3, experts, None, False, None),
            (*plain_experts, E4M3, experts, scale, False, amax),
            (*geglu, E4M3, experts, scale, False, torch.zeros(3)),
        ],
        "activation_backward_quantize": [
            *(
                (x, inputs, function, E5M2, tokens, given, False, of_given, E4M3, scale, given is None)
                for (function, inputs), (given, of_given) in zip(
                    activations, cycle(((None, None), (scale, amax))), strict=False
                )
            ),
            (grad_of_experts, *gated, E5M2, experts, None, True, None, E4M3, scale, False),
            (grad_of_experts, *plain_experts, E5M2, experts, scale, False, amax, E4M3, scale, False),
            (grad_of_experts, *geglu, E5M2, experts, scale, False, torch.zeros(3), E4M3, scale, False),
        ],
        "activation_quantize_blocks": [(wide_x, Activation(kind), E4M3, row.is_gated) for kind, row in KINDS.items()],
        "activation_backward_quantize_blocks": [
            (
                wide_x[:, : 256 // row.num_inputs].contiguous(),
                wide_x,
                Activation(kind),
                E4M3,
                row.is_gated,
                row.is_gated,
            )
            for kind, row in KINDS.items()
        ],
        "routed_rows": [(_routing_map(), 4 * 128, 2), (_routing_map(), 3 * 128, 3)],
        "gather_rows": [
            (_fp8(T, K), source, 3, offsets, True, True),
            (_fp8(T, K, E5M2), source, 3, offsets, False, True),
            (x, source, 3, offsets, True, False),
        ],
        "gather_blocks": [
            (_fp8(T, 128), torch.rand(1, T), source, 3, offsets, True, True, True),
            (_fp8(T, 144)[:, :128], torch.rand(T, 4)[:, :1].t(), source, 3, offsets, False, True, False),
            (_fp8(T, 256, E5M2), torch.rand(2, T), source, 3, offsets, True, False, False),
        ],
        "sum_rows": [(of_experts, rows_of_tokens)],
        "expert_activation": [(*one, experts) for one in (gated, plain_experts)],
        "expert_activation_backward": [(grad_of_experts, *one, experts) for one in (gated, plain_experts)],
        "expert_activation_quantize_blocks": [
            (torch.randn(3 * 128, 256).bfloat16(), probs, offsets, Activation("swiglu"), E4M3, True),
            (torch.randn(3 * 128, 128).bfloat16(), probs, offsets, Activation("gelu"), E4M3, False),
        ],
        "expert_activation_backward_quantize_blocks": [
            (
                torch.randn(3 * 128, 128).bfloat16(),
                torch.randn(3 * 128, width).bfloat16(),
                probs,
                offsets,
                kind,
                E4M3,
                True,
            )
            for kind, width in ((Activation("swiglu"), 256), (Activation("squared_relu"), 128))
        ],
        "choose_experts": [(logits, bias, how) for logits in (routed, routed.bfloat16()) for bias, how in choices],
        "choose_experts_backward": [
            (routed, ops.choose_experts(routed, bias, how)[1], torch.randn(routed.shape), how) for bias, how in choices
        ],
        "cross_entropy_statistics": [(x, labels, 0, K), (x, labels, 3, 0)],
        "cross_entropy_backward_": [(x.clone(), labels, vector, vector, 2, K - 3)],
        "token_scales": [(vector, vector - 1.0, vector)],
        "cross_entropy_backward_quantize": [
            (x, labels, vector, vector, scale, E5M2, 0, K),
            (x, labels, vector, vector, scale, E5M2, 2, K - 3),
        ],
        "scaled_mm": [(_fp8(T, K), _fp8(16, K), scale, scale, None, torch.bfloat16, False)],
        "scaled_mm_into_": [
            (x[:, :16].clone(), _fp8(T, K), _fp8(16, K), scale, scale, weight[:16], True, x[:, 16:32].clone()),
            (torch.empty(T, 16), _fp8(T, K), _fp8(16, K), scale, scale, None, False, None),
        ],
        "scaled_mm_to_fp8_": [
            (torch.empty(T, 16, dtype=E4M3), amax.clone(), _fp8(T, K), _fp8(16, K), scale, scale, one)
        ],
        "grouped_mm": [
            (_fp8(256, K), _fp8(3 * 48, K).view(3, 48, K), scale, torch.rand(3, 4)[:, 0], groups),
            (_fp8(256, 128), _fp8(3 * 256, 128).view(3, 256, 128), torch.rand(1, 256), torch.rand(3, 2, 4), groups),
        ],
        "grouped_wgrad_": [
            (torch.randn(3, 48, K), _fp8(48, 256, E5M2), _fp8(K, 256), scale, one, groups, True),
            (torch.randn(3, 48, K).bfloat16(), _fp8(48, 256), _fp8(K, 256), scale, one, groups, False),
            (torch.randn(3, 48, K), _fp8(48, 256), _fp8(K, 256), torch.rand(2, 48), torch.rand(2, K), groups, True),
        ],
        "grouped_wgrad_to_fp8_": [
            (
                torch.zeros(3, 48, 128).to(E4M3),
                torch.empty(3 * 48),
                _fp8(48, 256),
                _fp8(128, 256),
                torch.rand(2, 48),
                torch.rand(2, 128),
                groups,
            ),
            (
                torch.zeros(3, 48, 128).to(E4M3),
                torch.empty(3 * 48),
                _fp8(48, 256, E5M2),
                _fp8(128, 256),
                scale,
                one,
                groups,
            ),
        ],
        "fp8_attention": [(attention, scale.reciprocal(), 0.125)],
        "fp8_attention_backward": [
            (attention, of_heads.to(E5M2), scale, of_heads.to(E4M3), scale, log_sums, written, 0.125)
        ],
        "merge_attention": [
            ([of_heads.bfloat16(), of_heads[:32].bfloat16()], [log_sums, log_sums[..., :32].clone()], torch.bfloat16)
        ],
        "sum_partials": [
            ([of_heads.bfloat16(), of_heads[:32].bfloat16()], True, torch.bfloat16),
            ([of_heads.bfloat16(), of_heads[:16].bfloat16(), of_heads], False, torch.float32),
        ],
        "quantize_blockwise_": [(torch.rand(N - 3), *_flat(E4M3, 128)), (x.view(-1), *_flat(torch.int8, 256))],
        "dequantize_blockwise": [tuple(_flat(E4M3, 128))],
        "quantize_weight": [
            *((stored.payload.view(T, K), stored.scales, scale, E4M3, transposed) for transposed in (False, True)),
            (stored.payload.view(2, T // 2, K), stored.scales, scale.repeat(2), E4M3, True),
        ],
        "accumulate_rows_": [
            (*rows, torch.rand(N // 2), 0.5, True, 1, _fp8(1, N // 2)[0], torch.rand(N // 256), None),
            (x.view(-1), None, torch.zeros(N // 2).bfloat16(), 1.0, False, -1, None, None, weight.repeat(T // 2)),
        ],
        "update_amax_history_": [
            (torch.rand(3), *records, torch.rand(4, 3), 448 * torch.ones(3), torch.rand(3, 4), bad, True, False)
            for bad in (one, one * math.nan)
        ],
        "examine_records_": [
            (
                *records,
                torch.rand(3, 4),
                torch.rand(3),
                places,
                places + 1,
                torch.zeros(1),
                one.clone(),
                4,
                math.inf,
                4,
            ),
            (*records, torch.rand(3, 4), torch.rand(3), places, places + 1, torch.zeros(1), torch.zeros(1), 1, 0.0, 4),
        ],
        "count_underflow_": [
            (torch.rand(N), _fp8(1, N)[0], torch.zeros(2, dtype=torch.int64), is_sample) for is_sample in (False, True)
        ],
        "measure_cast_": [(x, _fp8(T, K), torch.rand(T, 1), torch.zeros(64, dtype=torch.float64))],
        "quantize_blocks": [(x, E4M3, True, True, True, False), (x, E5M2, False, True, False, True)],
        "quantize_tiles": [(x, E4M3, True, True, False), (x, E4M3, False, True, True)],
        "quantize_mx": [(x, E4M3, True, True), (x, E4M3, False, True), (torch.randn(96, 32), E4M3, True, False)],
        "mx_mm_into_": [
            (torch.empty(T, 32), _fp8(T, K), _fp8(32, K), _mx_scales(T, K), _mx_scales(32, K), None, torch.rand(T, 32))
        ],
        "transpose_tiles": [(_fp8(T, K), torch.rand(1, 4))],
        "block_scaled_mm_into_": [
            (torch.empty(T, 16), _fp8(T, K), _fp8(16, K), torch.rand(1, T), torch.rand(1, 16), None, torch.rand(T, 16))
        ],
        "squared_norm": [tuple(_flat(E4M3, 128)), (x.view(-1), None)],
        "adamw_step_": [
            (state, hyper, one, one.clone(), torch.empty(N).bfloat16(), torch.empty(2)),
            (plain, hyper, one, one.clone(), None, None),
        ],
        "adamw_split_step_": [(split, hyper, one, one.clone(), torch.empty(2))],
        "momentum_step_": [
            (ops.MomentumState(state.grad, state.exp_avg), x.view(-1).clone(), 0.9, True, one, one.clone()),
            (ops.MomentumState(plain.grad, plain.exp_avg), x.view(-1).clone(), 0.9, False, one, one.clone()),
        ],
        "orthogonal_step_": [
            (x.view(-1), *(state.master, ops.Places(), 0.1, 0.1, one, one.clone()), torch.rand(N), torch.rand(2)),
            (x.view(-1), *(plain.master, ops.Places(), 0.1, 0.1, one, one.clone()), None, None),
        ],
        "orthogonal_split_step_": [
            (x.view(-1), ops.SplitMaster(*split[3:]), 0.1, 0.1, one, one.clone(), torch.empty(2))
        ],
        "symmetric_mm_": [
            (torch.empty(2, T, T).bfloat16(), grads, None, 1.0, 0.0),
            (torch.empty(2, K, K).bfloat16(), grads.mT, torch.zeros(2, K, K).bfloat16(), 2.0, 0.5),
        ],
        "symmetric_times_": [
            (torch.empty_like(grads), torch.eye(T).repeat(2, 1, 1).bfloat16(), grads, 0.5),
            (torch.empty_like(grads).mT, torch.eye(K).repeat(2, 1, 1).bfloat16(), grads.mT, 0.5),
        ],
        "derive_fp8_weights_": [(*_flat(torch.float16, 256), _fp8(1, N)[0], one, torch.zeros(2).int())],
    }


OPERATORS = registration.operators()


def test_every_operator_is_tested() -> None:
    assert set(samples()) == set(OPERATORS)


@pytest.mark.parametrize("name", OPERATORS)
def test_fake_version(name: str) -> None:
    """It gives the specification's shapes, dtypes and strides, with symbolic shapes and functionalised too."""
    operator = getattr(torch.ops.fp8_megatron, name).default
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for arguments in samples()[name]:
        torch.library.opcheck(operator, tuple(flat(arguments)), test_utils=checks)


def call(name: str, arguments: tuple[Any, ...]) -> Any:
    """What callers inside the package call, with the arguments of `samples`."""
    return getattr(ops, name)(**dict(zip(OPERATORS[name].parameters, arguments, strict=True)))


def flat(arguments: Iterable[Any]) -> Iterator[Any]:
    """The operands that a bundle stands for, in order, in its place."""
    for argument in arguments:
        if hasattr(argument, "_fields"):
            yield from flat(argument)
        else:
            yield argument


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8).clone()


@pytest.mark.parametrize("name", OPERATORS)
def test_writes_what_its_schema_says(name: str) -> None:
    """And no output shares memory. (opcheck's own check compares with arithmetic that FP8 does not have.)"""
    operator = getattr(torch.ops.fp8_megatron, name).default
    schema = operator._schema.arguments
    written: set[str] = set()
    for arguments in samples()[name]:
        operands = list(flat(arguments))
        tensors = [value if isinstance(value, list) else [value] for value in operands]
        before = [[_bytes(x) if isinstance(x, Tensor) else None for x in group] for group in tensors]
        outputs = operator(*operands)
        for argument, group, old in zip(schema, tensors, before, strict=True):
            changed = any(x is not None and not torch.equal(_bytes(y), x) for x, y in zip(old, group, strict=True))
            if changed:
                assert argument.alias_info is not None and argument.alias_info.is_write, argument.name
                written.add(argument.name)
        given = {x.untyped_storage().data_ptr() for group in tensors for x in group if isinstance(x, Tensor)}
        for output in outputs if isinstance(outputs, tuple) else [outputs]:
            assert output is None or not output.numel() or output.untyped_storage().data_ptr() not in given
    assert written == {argument.name for argument in schema if argument.alias_info is not None}


@pytest.mark.parametrize("name", OPERATORS)
def test_no_operator_computes_under_fake_tensors(name: str) -> None:
    """What callers inside the package hold, too: a fake tensor of a GPU is no tensor for the GPU's variant."""
    with FakeTensorMode(allow_non_fake_inputs=False):
        for arguments in samples()[name]:
            on_gpu = torch.utils._pytree.tree_map_only(
                Tensor, lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda"), arguments
            )
            outputs = call(name, on_gpu)
            for output in torch.utils._pytree.tree_leaves(outputs):
                assert output is None or output.device.type == "cuda"


def linear_layer(x: Tensor, weight: Tensor, grad: Tensor, state: ops.AdamState) -> tuple[Tensor, Tensor]:
    """A layer's casts and GEMMs and its optimizer, which writes in place."""
    recorded = torch.zeros(1)
    a, _, scale_a = ops.quantize_current(x, E4M3)
    b, _, scale_b = ops.quantize_current(weight, E4M3)
    out = ops.scaled_mm(a, b, scale_a, scale_b)
    _, g_t, sums, scale = ops.quantize_grad_output(grad, E5M2, scale=None, amax_out=recorded)
    into = torch.empty(len(weight), len(weight))
    ops.scaled_mm_into_(into, g_t, g_t.view(E4M3), scale, scale)
    one = torch.ones(1)
    hyper = ops.AdamHyper(1e-3, 0.9, 0.95, 1e-8, 0.1, decoupled=True)
    ops.adamw_step_(state, hyper, grad_factor=one, step=one)
    return out + recorded + sums, into


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_without_a_graph_break(backend: str) -> None:
    def run(layer: Callable[..., Any]) -> list[Tensor]:
        generator = torch.Generator(torch.get_default_device()).manual_seed(0)
        x, weight, grad = (torch.randn(32, 32, generator=generator).bfloat16() for _ in range(3))
        state = ops.AdamState(*(ops.FlatState(torch.rand(256, generator=generator)) for _ in range(4)))
        outputs = layer(x, weight, grad, state)
        return [*outputs, *(moved.payload for moved in state[:4])]

    expected = run(linear_layer)
    actual = run(torch.compile(linear_layer, backend=backend, fullgraph=True))
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", OPERATORS)
def test_the_gpu_variant_takes_what_the_specification_takes(name: str) -> None:
    """Read from its source: a machine without a GPU has no Triton to import it with."""
    declared = OPERATORS[name]
    if declared.gpu_module is None:
        pytest.skip("it has none")
    spec = importlib.util.find_spec(declared.gpu_module)
    assert spec is not None and spec.origin is not None, declared.gpu_module
    tree = ast.parse(Path(spec.origin).read_text())
    variant = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    specification = inspect.signature(declared.reference)
    taken = [(argument.arg, ast.unparse(argument.annotation)) for argument in variant.args.args if argument.annotation]
    assert taken == [(each.name, each.annotation) for each in specification.parameters.values()], declared.gpu_module
    assert variant.returns is not None and ast.unparse(variant.returns) == specification.return_annotation
    assert not variant.args.kwonlyargs and not variant.args.defaults


class Pair(NamedTuple):
    """A bundle."""

    values: Tensor
    factor: float


class Bundles(NamedTuple):
    """A bundle of bundles."""

    first: Pair
    second: Pair


def scale_pair_(pairs: Bundles, out: Tensor) -> None:
    """A specification of this test alone."""
    pairs.first.values.mul_(pairs.first.factor)
    out.copy_(pairs.second.values * pairs.second.factor)


def twice(x: Tensor) -> Tensor:
    """Another."""
    return 2 * x


def test_a_bundle_is_flattened_at_the_operators_boundary() -> None:
    registration.operator(gpu=None, mutates=["first", "out"])(scale_pair_)
    try:
        declared = registration.operators()["scale_pair_"]
        assert declared.schema() == (
            "scale_pair_(Tensor(a0!) first_values, float first_factor, Tensor second_values, float second_factor, "
            "Tensor(a4!) out) -> ()"
        )
        first, second, out = torch.ones(4), torch.ones(4), torch.empty(4)
        registration.callable_of(scale_pair_)(Bundles(Pair(first, 2.0), Pair(second, 3.0)), out)
        assert (first == 2.0).all() and (second == 1.0).all() and (out == 3.0).all()
    finally:
        registration._operators.pop("scale_pair_")


def test_a_missing_variant_names_the_operator_and_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    registration.operator(gpu=None, fake=lambda x: torch.empty_like(x))(twice)
    try:
        missing = registration.operators()["twice"]
        with pytest.raises(
            UnsupportedDeviceError, match=r"^fp8_megatron::twice has no variant for cuda tensors; .*cpu$"
        ):
            missing.gpu_variant()
    finally:
        registration._operators.pop("twice")
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "fp8_megatron.kernels.norm.triton", raising=False)
    with pytest.raises(UnsupportedDeviceError, match=r"norm_amax has no variant for cuda tensors: .*triton"):
        OPERATORS["norm_amax"].gpu_variant()


def test_a_device_without_kernels_is_refused() -> None:
    """No fall-back to the CPU's: the dispatcher finds what refuses, for a device that nobody wrote a variant for."""
    x = torch.rand(4)
    of_another_device = torch._C.DispatchKeySet(torch._C.DispatchKey.MPS)
    with pytest.raises(UnsupportedDeviceError, match=r"^fp8_megatron::amax has no variant for .* cpu and cuda$"):
        torch.ops.fp8_megatron.amax.default.redispatch(of_another_device, x)
    assert torch.ops.fp8_megatron.amax(x.to("meta")).shape == (1,)  # shapes alone


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPERATORS)
def test_fake_version_of_the_gpu_variant(name: str) -> None:
    if OPERATORS[name].gpu_module is None:
        pytest.skip("it has none")
    for arguments in samples()[name]:
        arguments = torch.utils._pytree.tree_map_only(Tensor, lambda x: x.cuda(), arguments)
        with FakeTensorMode() as mode:
            fake = call(name, torch.utils._pytree.tree_map_only(Tensor, mode.from_tensor, arguments))
        try:
            outputs = torch.utils._pytree.tree_leaves(call(name, arguments))
        except UnsupportedDeviceError as error:  # of newer GPUs, or of a package that is not installed
            if not re.search("needs compute capability|No module named 'cudnn'", str(error)):
                raise
            pytest.skip(str(error))
        for expected, actual in zip(torch.utils._pytree.tree_leaves(fake), outputs, strict=True):
            if actual is not None:
                assert (actual.shape, actual.dtype, actual.device) == (expected.shape, expected.dtype, expected.device)
                assert actual.stride() == expected.stride()


@pytest.mark.gpu
def test_compiles_on_a_gpu() -> None:
    """The graph holds the operators, not their launchers; its results are bitwise those of direct calls."""
    torch.set_default_device("cuda")
    try:
        test_compiles_without_a_graph_break("aot_eager")
    finally:
        torch.set_default_device(None)
