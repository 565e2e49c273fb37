"""Casts with a given scale count the elements that they clamp, on every device: the counts against float64.

FP32 arithmetic of the fused operators moves a value by some 10⁻⁶ of itself, so about one of 10⁵ values lies on the
other side of the limit; the output of a norm's backward is rounded to BF16 first, 2⁻⁹, and its count is compared after
that rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8_megatron.activation_functions import Activation
from fp8_megatron.dtypes import CLAMPED_ABOVE, E4M3, E5M2, MAX_FINITE
from fp8_megatron.kernels import ops

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.gpu),
]
#: Rows and columns: one tile with a border, many programs, rows as long as GPT-7B's, rows beyond the CUDA kernel's.
SHAPES = [(48, 96), (4096, 1024), (160, 4096), (64, 8192)]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def norm_output(x: Tensor, weight: Tensor, bias: Tensor | None, *, rms: bool) -> Tensor:
    wide = x.double()
    centred = wide if rms else wide - wide.mean(dim=1, keepdim=True)
    y = centred / (centred.square().mean(dim=1, keepdim=True) + 1e-5).sqrt() * weight.double()
    return y if bias is None else y + bias.double()


def swiglu(z: Tensor) -> Tensor:
    gate, up = z.double().chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up


def gelu(z: Tensor) -> Tensor:
    return torch.nn.functional.gelu(z.double(), approximate="tanh")


def grad_of(function: Callable[[Tensor], Tensor], z: Tensor, grad: Tensor) -> Tensor:
    leaf = z.double().requires_grad_()
    (found,) = torch.autograd.grad(function(leaf), leaf, grad.double())
    return found


class Case:
    """An operator's call, given a scale and where to record, and the values it casts in float64."""

    def __init__(self, dtype: torch.dtype, values: Tensor, call: Callable[[Tensor, Tensor, str], Any]) -> None:
        self.dtype, self.values, self.call = dtype, values, call


def cases(rows: int, columns: int) -> dict[str, Case]:
    x, grad = normal(rows, columns), normal(rows, columns, seed=1)
    weight, bias, wide = normal(columns, seed=2), normal(columns, seed=3), normal(rows, 2 * columns, seed=4)
    qkv = [normal(rows // 2, 2, 2, width, seed=5 + width) for width in (columns // 2, 16, 16)]

    def on(device: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.to(device) for tensor in tensors)

    def flat(transposed: bool, dtype: torch.dtype = E4M3) -> Case:
        return Case(
            dtype,
            x.double(),
            lambda scale, record, device: ops.quantize_with_scale(
                x.to(device), scale, dtype, rowwise=True, transposed=transposed, amax_out=record
            ),
        )

    def grad_output(transposed: bool) -> Case:
        return Case(
            E5M2,
            x.double(),
            lambda scale, record, device: ops.quantize_grad_output(
                x.to(device), E5M2, scale=scale, amax_out=record, transposed=transposed
            ),
        )

    def norm(rms: bool) -> Case:
        own_bias = None if rms else bias
        return Case(
            E4M3,
            norm_output(x, weight, own_bias, rms=rms),
            lambda scale, record, device: ops.norm_quantize(
                *on(device, x, weight),
                None if own_bias is None else own_bias.to(device),
                E4M3,
                eps=1e-5,
                rms=rms,
                scale=scale,
                amax_out=record,
            ),
        )

    def activation(kind: str) -> Case:
        z, function = (x, gelu) if kind == "gelu" else (wide, swiglu)
        return Case(
            E4M3,
            function(z),
            lambda scale, record, device: ops.activation_quantize(
                z.to(device), Activation(kind), E4M3, scale=scale, amax_out=record
            ),
        )

    def activation_grad(kind: str, column_sums: bool) -> Case:
        z, function = (x, gelu) if kind == "gelu" else (wide, swiglu)
        return Case(
            E5M2,
            grad_of(function, z, grad),
            lambda scale, record, device: ops.activation_backward_quantize(
                *on(device, grad, z),
                Activation(kind),
                E5M2,
                scale=scale,
                amax_out=record,
                activation_dtype=E4M3,
                activation_scale=torch.ones(1, device=device),
                column_sums=column_sums,
            ),
        )

    def norm_grad(transposed: bool) -> Case:
        def call(scale: Tensor, record: Tensor, device: str) -> Any:
            summands, residual, rows_in, own = on(device, grad[None], x, x, weight)
            mean = rows_in.float().mean(dim=1)
            rstd = 1.0 / (rows_in.float().var(dim=1, correction=0) + 1e-5).sqrt()
            return ops.norm_backward_quantize(
                summands, residual, rows_in, own, mean, rstd, E5M2,
                has_bias=True, scale=scale, amax_out=record, transposed=transposed,
            )  # fmt: skip

        zero = torch.zeros(columns, dtype=torch.bfloat16)
        through_norm = grad_of(lambda leaf: norm_output(leaf, weight, zero, rms=False), x, grad)
        return Case(E5M2, (through_norm + x.double()).bfloat16().double(), call)

    return {
        "rows": flat(False),
        "rows e5m2": flat(False, E5M2),
        "both layouts": flat(True),
        "output gradient": grad_output(True),
        "output gradient, rows": grad_output(False),
        "qkv gradient": Case(
            E5M2,
            torch.cat(qkv, dim=3).double(),
            lambda scale, record, device: ops.quantize_qkv_grad(
                list(on(device, *qkv)), E5M2, scale=scale, column_sums=True, amax_out=record
            ),
        ),
        "layer norm": norm(False),
        "rms norm": norm(True),
        "gelu": activation("gelu"),
        "swiglu": activation("swiglu"),
        "gelu gradient": activation_grad("gelu", True),
        "swiglu gradient": activation_grad("swiglu", False),
        "swiglu gradient, summed": activation_grad("swiglu", True),
        "norm gradient": norm_grad(True),
        "norm gradient, rows": norm_grad(False),
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", cases(48, 96))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_clamped_elements_are_counted(shape: tuple[int, int], name: str, device: str) -> None:
    """Scales that clamp nothing, single elements and most of them; records add up over casts."""
    if device == "cpu" and shape != SHAPES[0]:
        pytest.skip("one shape is enough for the specification")
    case = cases(*shape)[name]
    magnitudes = case.values.abs().flatten()
    limit, numel = CLAMPED_ABOVE[case.dtype], magnitudes.numel()
    largest = magnitudes.max().item()
    # One unit of BF16: the sum before the rounding may lie on the other side of a boundary between two numbers.
    margin = 2**-7 if "norm gradient" in name else 1e-5
    record, sure, unsure = torch.zeros(3, device=device), 0, 0
    for fraction in (1.0, 0.9, 0.1):
        scale = torch.tensor([fraction * largest / MAX_FINITE[case.dtype]], device=device)
        case.call(scale, record, device)
        scaled = magnitudes / scale.item()
        sure += int((scaled > limit * (1 + margin)).sum())
        unsure += int(((scaled / limit - 1).abs() <= margin).sum())
        assert sure <= record[1].item() <= sure + unsure
    assert record[2].item() == 3 * numel
    assert record[0].item() == pytest.approx(largest, rel=margin)
    assert sure > 0.02 * numel
    alone = torch.zeros(1, device=device)
    case.call(scale, alone, device)
    assert torch.equal(alone, record[:1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_bad_value_beside_clamped_ones(bad: float, transposed: bool, device: str) -> None:
    """An inf is clamped and counted. A NaN stays a NaN; it hides neither its own amax nor the others' counts."""
    x = torch.ones(64, 256, dtype=torch.bfloat16)
    x[3, :5] = 2.0
    x[60, 7] = bad
    record = torch.zeros(3, device=device)
    ops.quantize_with_scale(
        x.to(device), torch.tensor([1 / 448], device=device), E4M3, transposed=transposed, amax_out=record
    )
    amax, clamped, numel = record.tolist()
    assert clamped == (5 if math.isnan(bad) else 6) and numel == x.numel()
    assert math.isnan(amax) if math.isnan(bad) else amax == math.inf
