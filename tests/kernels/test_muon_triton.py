"""The elementwise halves of Muon's step, bit for bit as the reference on the CPU but for neighbours of int8 codes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fp8_megatron.dtypes import E4M3
from fp8_megatron.kernels import ops
from fp8_megatron.kernels.adamw import split_master
from fp8_megatron.kernels.muon import reference as muon
from fp8_megatron.kernels.quantize import blockwise
from tests.kernels.cases import PLACES
from tests.kernels.test_exact_triton import (
    BF16,
    FP16,
    FP32,
    INT8,
    Form,
    assert_all_same,
    assert_state_alike,
    copies,
    given,
    stored,
    values,
)
from tests.kernels.test_triton import Guards

pytestmark = pytest.mark.gpu

_GRAD: Form = (E4M3, 128)
#: Gradient, momentum and elements of a step: O3, int8, O1, a bfloat16 run, and sizes that end inside of a program.
MOMENTA: dict[str, tuple[Form, Form, int]] = {
    "O3": (_GRAD, (E4M3, 256), 3 * 4096),
    "int8": (_GRAD, (INT8, 256), 3 * 4096),
    "fp32": ((BF16, None), (FP32, None), 3 * 4096),
    "bf16": ((FP32, None), (BF16, None), 3 * 4096),
    "part_of_a_program": (_GRAD, (INT8, 256), 5 * 256 + 4096),
    "odd_size": ((FP32, None), (FP32, None), 4099),
}
FILLS = ("gaussian", "zero", "nan", "inf", "tiny")


def momentum_step_is_right(
    name: str, fill: str = "gaussian", *, nesterov: bool = True, factor: float = 0.7, places: str | None = None
) -> None:
    grad_form, form, n = MOMENTA[name]
    grad, momentum, *_ = values(n, fill)
    operands = [*stored(grad, grad_form), *stored(momentum, form), torch.zeros(n, dtype=BF16)]
    operands += [torch.tensor([factor]), torch.tensor([17.0])]
    before = blockwise.load_state(*operands[2:4]).clone()  # type: ignore[arg-type]
    guards = Guards()
    on_gpu = copies(operands, guards)
    for (grad_, grad_scales, payload, scales, direction, factor_, step), where, run in zip(
        (operands, on_gpu), given(places, n), (muon.momentum_step_, ops.momentum_step_), strict=True
    ):
        state = ops.MomentumState(
            ops.FlatState(grad_, grad_scales),  # type: ignore[arg-type]
            ops.FlatState(payload, scales),  # type: ignore[arg-type]
            where or ops.Places(),
        )
        run(state, direction, beta=0.95, nesterov=nesterov, grad_factor=factor_, step=step)  # type: ignore[arg-type]
    if form[0] is INT8:  # quotients differ in their last bit, and with it what some random bits round up
        assert_state_alike(*on_gpu[2:4], *operands[2:4], before=before)
    else:
        assert_all_same(on_gpu[2:4], operands[2:4])
    assert_all_same([*on_gpu[:2], *on_gpu[4:]], [*operands[:2], *operands[4:]])
    assert bool(operands[4].any()) == (fill != "zero" and math.isfinite(factor))  # type: ignore[union-attr]
    guards.check()


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("name", MOMENTA)
def test_momentum(name: str, nesterov: bool) -> None:
    momentum_step_is_right(name, nesterov=nesterov)


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("name", ["O3", "int8", "bf16"])
def test_momentum_of_awkward_values(name: str, fill: str) -> None:
    momentum_step_is_right(name, fill)


@pytest.mark.parametrize("places", PLACES)
def test_momentum_of_parts_of_parameters(places: str) -> None:
    momentum_step_is_right("O3", places=places)


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_step_of_the_momentum_is_skipped(factor: float) -> None:
    momentum_step_is_right("int8", factor=factor)


#: Master, weight beside it, elements of a chunk whose amax is asked for, and elements.
MASTERS: dict[str, tuple[Form, torch.dtype | None, int | None, int]] = {
    "O3": ((FP16, 256), None, 4096, 3 * 4096),
    "bf16_weight": ((FP16, 256), BF16, 4096, 3 * 4096),
    "fp32": ((FP32, None), BF16, None, 4099),
    "bf16": ((BF16, None), None, None, 3 * 4096),
    "fp8": ((E4M3, 256), None, 1024, 3 * 4096),
    "part_of_a_program": ((FP16, 256), BF16, None, 5 * 256 + 4096),
}
LR, DECAY = 0.02, 0.1


def directions(n: int, fill: str) -> Tensor:
    update = torch.randn(n, generator=torch.Generator().manual_seed(3))
    return {"gaussian": update, "zero": torch.zeros(n), "nan": update.index_fill(0, torch.tensor([n // 3]), math.nan)}[
        fill
    ].to(BF16)


def orthogonal_step_is_right(
    name: str, fill: str = "gaussian", *, factor: float = 0.7, places: str | None = None
) -> None:
    form, weight_dtype, chunk, n = MASTERS[name]
    beside = [None if weight_dtype is None else torch.zeros(n, dtype=weight_dtype)]
    beside.append(None if chunk is None else torch.zeros(n // chunk))
    operands: list[Tensor | None] = [directions(n, fill), *stored(values(n, "gaussian")[3], form), *beside]
    operands += [torch.tensor([factor]), torch.tensor([17.0])]
    before = operands[1].clone()  # type: ignore[union-attr]
    guards = Guards()
    on_gpu = copies(operands, guards)
    for (update, payload, scales, weight, amax, factor_, step), where, run in zip(
        (operands, on_gpu), given(places, n), (muon.orthogonal_step_, ops.orthogonal_step_), strict=True
    ):
        run(
            update,  # type: ignore[arg-type]
            ops.FlatState(payload, scales),  # type: ignore[arg-type]
            where or ops.Places(),
            **dict(lr=LR, weight_decay=DECAY, grad_factor=factor_, step=step, weight=weight, chunk_amax=amax),  # type: ignore[arg-type]
        )
    assert_all_same(on_gpu, operands)
    as_bytes = (tensor.view(torch.uint8) for tensor in (operands[1], before))  # type: ignore[union-attr]
    assert torch.equal(*as_bytes) == (not math.isfinite(factor))
    guards.check()


@pytest.mark.parametrize("fill", ["gaussian", "zero", "nan"])
@pytest.mark.parametrize("name", MASTERS)
def test_masters(name: str, fill: str) -> None:
    orthogonal_step_is_right(name, fill)


@pytest.mark.parametrize("places", PLACES)
def test_masters_of_parts_of_parameters(places: str) -> None:
    orthogonal_step_is_right("bf16_weight", places=places)


@pytest.mark.parametrize("factor", [math.nan, -math.inf])
def test_a_step_of_the_masters_is_skipped(factor: float) -> None:
    orthogonal_step_is_right("O3", factor=factor)


def split_step_is_right(
    fill: str = "gaussian", *, chunk: int = 4096, factor: float = 0.7, lr: float = LR, places: str | None = None
) -> None:
    n, num_chunks = 3 * chunk, 3
    scales, new_scales = torch.tensor([2.0**-12, 2.0**-10]), torch.tensor([2.0**-12, 2.0**-9])
    chunk_matrix = (torch.arange(num_chunks) % 2).int()
    master = values(n, "gaussian")[3].view(num_chunks, -1)
    master[:, ::19] = -0.0
    master[1, 5] = math.nan
    parts = split_master.split_master(master, scales[chunk_matrix.long()][:, None])
    operands: list[Tensor | None] = [directions(n, fill), *(part.view(-1) for part in parts), scales, new_scales]
    operands += [chunk_matrix, torch.zeros(num_chunks), torch.tensor([factor]), torch.tensor([17.0])]
    before = operands[2].clone()  # type: ignore[union-attr]
    guards = Guards()
    on_gpu = copies(operands, guards)
    for (update, *split, amax, factor_, step), where, run in zip(
        (operands, on_gpu), given(places, n), (muon.orthogonal_split_step_, ops.orthogonal_split_step_), strict=True
    ):
        numbers = dict(lr=lr, weight_decay=DECAY, grad_factor=factor_, step=step, chunk_amax=amax)
        run(update, ops.SplitMaster(*split, where or ops.Places()), **numbers)  # type: ignore[arg-type]
    assert_all_same(on_gpu, operands)
    assert torch.equal(operands[2], before) == (not math.isfinite(factor))  # type: ignore[arg-type]
    guards.check()


@pytest.mark.parametrize("fill", ["gaussian", "zero", "nan"])
@pytest.mark.parametrize("chunk", [512, 4096])
def test_split_masters(chunk: int, fill: str) -> None:
    split_step_is_right(fill, chunk=chunk)


def test_split_masters_saturate() -> None:
    split_step_is_right(lr=10.0)


@pytest.mark.parametrize("places", PLACES)
def test_split_masters_of_parts_of_parameters(places: str) -> None:
    split_step_is_right(places=places)


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_step_of_split_masters_is_skipped(factor: float) -> None:
    split_step_is_right(factor=factor)
