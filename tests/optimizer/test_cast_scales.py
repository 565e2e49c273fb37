"""The scales that linear weights in 16 bits are cast with: kept by the optimizer, and always those of the values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fp8_megatron.dtypes import E4M3
from fp8_megatron.formats.tensorwise import Tensorwise
from fp8_megatron.kernels import ops
from fp8_megatron.quantization.scaled_tensor import ScaledTensor
from tests.any_model.test_optimizer import linears, loss_of


def cast_of_values(weight: ScaledTensor) -> tuple[Tensor, Tensor]:
    """The cast that takes the amax of the decoded weight."""
    cast = Tensorwise(E4M3).cast(weight.dequantize(), transposed=True)
    return cast.payload_t.view(torch.uint8), cast.scale


def check(weight: ScaledTensor) -> None:
    columns, scale = cast_of_values(weight)
    cast = weight.gemm_operand(Tensorwise(E4M3), transposed=True)
    assert torch.equal(cast.payload.view(torch.uint8), columns) and torch.equal(cast.scale, scale)
    rows = weight.gemm_operand(Tensorwise(E4M3))
    assert torch.equal(rows.payload.view(torch.uint8).t(), columns) and torch.equal(rows.scale, scale)


def count_amaxes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The later casts by whether they take the amax themselves (current), or have a scale (given)."""
    casts: list[str] = []
    for name, kind in (("quantize_current", "current"), ("quantize_with_scale", "given"), ("quantize_weight", "given")):
        cast = getattr(ops, name)
        monkeypatch.setattr(ops, name, lambda *of, cast=cast, kind=kind, **how: casts.append(kind) or cast(*of, **how))
    return casts


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_follow_the_steps(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, optimizer = linears(level)
    scales = []
    for step in range(3):
        loss_of(module, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        check(module.first.weight)
        check(module.second.weight)
        scales.append(float(module.first.weight.gemm_operand(Tensorwise(E4M3)).scale))
    assert len(set(scales)) == 3, "the steps left the amax as it was, so this shows nothing"
    casts = count_amaxes(monkeypatch)
    module.first.weight.gemm_operand(Tensorwise(E4M3))
    module.first.weight.gemm_operand(Tensorwise(E4M3), transposed=True)
    assert casts == ["given", "given"]


def test_stay_in_a_skipped_step() -> None:
    module, optimizer = linears("O2")
    (loss_of(module) * float("inf")).backward()
    optimizer.step()
    assert optimizer.num_skipped_steps == 1
    check(module.first.weight)


@pytest.mark.parametrize("is_used", [True, False], ids=["with a gradient", "without one"])
def test_follow_written_values(is_used: bool) -> None:
    module, optimizer = linears("O2")
    with torch.no_grad():
        module.first.weight.copy_(torch.randn(96, 64) * 3)
    check(module.first.weight)
    if is_used:
        loss_of(module).backward()
    else:
        module.second(torch.randn(32, 96).bfloat16()).square().mean().backward()
    optimizer.step()
    check(module.first.weight)


WRITES: dict[str, Callable[[ScaledTensor], object]] = {
    "itself": lambda weight: weight.copy_(torch.randn(96, 64) * 3),
    "its data": lambda weight: weight.data.copy_(torch.randn(96, 64) * 3),
    "some rows": lambda weight: weight[8:16].copy_(torch.randn(8, 64) * 3),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_are_not_used_after_a_write_that_no_owner_saw(write: Callable[[ScaledTensor], object]) -> None:
    module, _ = linears("O2")
    weight = module.first.weight
    weight.owner = None
    with torch.no_grad():
        write(weight)
    check(weight)


def test_are_not_those_of_some_rows() -> None:
    module, _ = linears("O2")
    with torch.no_grad():
        check(module.first.weight[8:16])
