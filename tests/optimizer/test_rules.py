"""SGD and Lion as update rules: against torch and a float64 reference, in FP32 and in FP8; skipped steps; parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8_megatron.dtypes import LEVELS, STATE_BLOCK, StorageFormats
from fp8_megatron.errors import UserError
from fp8_megatron.kernels import ops
from fp8_megatron.optimizer.rules.rule import build_rule
from fp8_megatron.quantization.stats import snr_db
from fp8_megatron.storage import StorageDtype

FP32 = StorageFormats(*[StorageDtype.FP32] * 5)
NUMEL = 64 * STATE_BLOCK
SGD_OPTIONS = [
    {},
    {"weight_decay": 0.1},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    {"momentum": 0.8, "dampening": 0.3},
]


def flat(value: Tensor, dtype: StorageDtype) -> ops.FlatState:
    """`value` as it is stored."""
    payload = torch.zeros(value.numel(), dtype=dtype.torch_dtype)
    if not dtype.is_scaled:
        return ops.FlatState(payload.copy_(value))
    scales = torch.ones(value.numel() // STATE_BLOCK)
    ops.quantize_blockwise_(value, payload, scales)
    return ops.FlatState(payload, scales)


class Run:
    """A flat parameter of seed 0, and the state of a rule."""

    def __init__(self, name: str, group: Mapping[str, Any], formats: StorageFormats) -> None:
        self.group = group
        self.rule = build_rule(name, group)
        self.start = 0.02 * torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
        self.master = flat(self.start, formats.master_weight or formats.weight)
        self.states = tuple(flat(torch.zeros(NUMEL), dtype) for dtype in self.rule.dtypes(formats))
        self.chunk_amax = torch.zeros(NUMEL // 4096)

    def operands(self, grad: Tensor) -> ops.FlatOperands:
        return ops.FlatOperands(ops.FlatState(grad), self.states, self.master, ops.Places(), None, self.chunk_amax)

    def step(self, number: int, grad: Tensor, factor: float = 1.0) -> None:
        arguments = {"grad_factor": torch.tensor([factor]), "step": torch.tensor([float(number)])}
        self.rule.step(self.operands(grad), self.group, **arguments)

    @property
    def value(self) -> Tensor:
        return ops.load_state(*self.master)


def gradient(number: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(number))


def lion_reference(value: Tensor, group: Mapping[str, Any], num_steps: int) -> Tensor:
    """Lion (arXiv 2302.06675, Algorithm 2) in float64."""
    beta1, beta2 = group["betas"]
    value, momentum = value.double(), torch.zeros(NUMEL, dtype=torch.float64)
    for number in range(1, num_steps + 1):
        grad = gradient(number).double()
        direction = torch.sign(beta1 * momentum + (1 - beta1) * grad)
        value = value - group["lr"] * (direction + group["weight_decay"] * value)
        momentum = beta2 * momentum + (1 - beta2) * grad
    return value


def sgd_group(options: Mapping[str, Any]) -> dict[str, Any]:
    return {"lr": 1e-2, "weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0, "nesterov": False, **options}


LION = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.99)}


@pytest.mark.parametrize("options", SGD_OPTIONS, ids=str)
def test_sgd_is_torchs(options: dict[str, Any]) -> None:
    run = Run("sgd", sgd_group(options), FP32)
    param = torch.nn.Parameter(run.start.clone())
    theirs = torch.optim.SGD([param], lr=1e-2, **options)
    for number in range(1, 11):
        param.grad = gradient(number)
        theirs.step()
        run.step(number, gradient(number))
    # Each step rounds a handful of FP32 operations on numbers below 1: 10 steps of 8 ulps.
    torch.testing.assert_close(run.value, param.detach(), rtol=0.0, atol=10 * 8 * 2.0**-24)


def test_lion_is_the_papers() -> None:
    run = Run("lion", LION, FP32)
    for number in range(1, 11):
        run.step(number, gradient(number))
    moved = (run.value - lion_reference(run.start, LION, 10)).abs()
    # A sum that is rounded across 0 takes the other sign, which is one element in a million steps at most.
    assert (moved > 10 * 8 * 2.0**-24).sum() <= 1


@pytest.mark.parametrize("name", ["sgd", "lion"])
def test_low_precision_moves_as_float64_does(name: str) -> None:
    """O3's master in FP16 and momentum in FP8, rounded stochastically: noise, and no drift."""
    group = sgd_group({"momentum": 0.9, "lr": 1e-4}) if name == "sgd" else {**LION, "lr": 1e-5}
    run, exact = Run(name, group, LEVELS["O3"]), Run(name, group, FP32)
    for number in range(1, 51):
        run.step(number, gradient(number))
        exact.step(number, gradient(number))
    movement, expected = run.value - run.start, exact.value - run.start
    slope = (movement @ expected / (expected @ expected)).item()
    assert slope == pytest.approx(1.0, abs=0.05)
    assert snr_db(expected, movement) > 10.0


@pytest.mark.parametrize("name", ["sgd", "lion"])
def test_a_bad_gradient_changes_no_byte(name: str) -> None:
    run = Run(name, sgd_group({"momentum": 0.9}) if name == "sgd" else LION, LEVELS["O3"])
    run.step(1, gradient(1))
    before = [tensor.clone() for stored in (*run.states, run.master) for tensor in stored]
    run.step(2, gradient(2), factor=float("nan"))
    after = [tensor for stored in (*run.states, run.master) for tensor in stored]
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("name", ["sgd", "lion"])
def test_a_step_in_parts_is_a_whole_step(name: str) -> None:
    group = sgd_group({"momentum": 0.9}) if name == "sgd" else LION
    whole, parts = Run(name, group, LEVELS["O3"]), Run(name, group, LEVELS["O3"])
    for number in range(1, 4):
        whole.step(number, gradient(number))
        operands = parts.operands(gradient(number))
        for start in range(0, NUMEL, NUMEL // 4):
            arguments = {"grad_factor": torch.ones(1), "step": torch.tensor([float(number)])}
            parts.rule.step(operands.part(start, start + NUMEL // 4), group, **arguments)
    assert torch.equal(whole.value, parts.value) and torch.equal(whole.chunk_amax, parts.chunk_amax)
    for mine, other in zip(whole.states, parts.states, strict=True):
        assert torch.equal(ops.load_state(*mine), ops.load_state(*other))


def test_nesterov_needs_momentum() -> None:
    with pytest.raises(UserError, match=r"nesterov needs momentum\(0\.0\) above 0"):
        build_rule("sgd", sgd_group({"nesterov": True}))


def test_sgd_without_momentum_stores_nothing() -> None:
    assert build_rule("sgd", sgd_group({})).dtypes(LEVELS["O3"]) == []
    assert [dtype.itemsize for dtype in build_rule("sgd", sgd_group({"momentum": 0.9})).dtypes(LEVELS["O3"])] == [1]
