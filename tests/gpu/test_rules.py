"""SGD, Lion and Muon as update rules on a GPU: the CPU's numbers, no waiting for the GPU, and the same bits again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fp8_megatron
from fp8_megatron.any_model.optimizer import FP8Optimizer
from fp8_megatron.quantization.scaled_tensor import ScaledTensor
from fp8_megatron.quantization.stats import snr_db
from tests.any_model.test_rules import MAKERS, with_adamw

pytestmark = pytest.mark.gpu


RULES: dict[str, Any] = {**MAKERS, "muon": with_adamw}


@pytest.fixture
def forbids_waiting() -> Iterator[None]:
    """A call that waits for the GPU is an error, until the test has ended."""
    yield
    torch.cuda.set_sync_debug_mode("default")


def build(name: str, level: str, device: str) -> tuple[torch.nn.Sequential, FP8Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 512), torch.nn.LayerNorm(512), torch.nn.GELU(), torch.nn.Linear(512, 256)
    ).to(device)
    built: Any = fp8_megatron.initialize(model, RULES[name](model.parameters()), level)
    return built


def gradients(model: torch.nn.Module, step: int) -> None:
    """Set random gradients that are the same on every device."""
    generator = torch.Generator().manual_seed(step)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator).to(param.device, param.dtype)


def masters(model: torch.nn.Module) -> Tensor:
    values = [p.master_value() if isinstance(p, ScaledTensor) else p.detach() for p in model.parameters()]
    return torch.cat([value.float().flatten().cpu() for value in values])


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_moves_as_on_the_cpu(name: str, level: str) -> None:
    """Random bits are the same on both; gradients in FP8 are cast by other kernels, in the same way."""
    found, start = {}, None
    for device in ("cpu", "cuda"):
        model, optimizer = build(name, level, device)
        start = masters(model)
        for step in range(20):
            gradients(model, step)
            optimizer.step()
        found[device] = masters(model) - start
    # A sum that is rounded otherwise takes the next number of its grid, now and then; Lion's sign flips beside 0.
    # Muon's coefficients multiply what BF16 rounds: each device is 37 dB from float64 (tests/optimizer/test_muon.py).
    assert snr_db(found["cpu"], found["cuda"]) > (25.0 if name == "muon" else 30.0)


@pytest.mark.parametrize("name", RULES)
def test_training_learns_waits_for_nothing_and_repeats(forbids_waiting: None, name: str) -> None:
    outcomes = []
    for _ in range(2):
        model, optimizer = build(name, "O3", "cuda")
        generator = torch.Generator("cuda").manual_seed(1)
        x = torch.randn(512, 256, device="cuda", generator=generator)
        target = torch.randn(512, 256, device="cuda", generator=generator)
        losses = []
        for step in range(30):
            if step == 3:  # Triton compiles in the first steps
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
            optimizer.zero_grad()
            loss = (model(x) - target).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        torch.cuda.set_sync_debug_mode("default")
        outcomes.append((torch.stack(losses).cpu(), masters(model)))
    (losses, end), (again, same_end) = outcomes
    assert losses[-1] < losses[0] and torch.isfinite(losses).all()
    assert torch.equal(losses, again) and torch.equal(end, same_end)
