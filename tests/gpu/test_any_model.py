"""`fp8_megatron.initialize` on a GPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import fp8_megatron
from fp8_megatron.quantization.scaled_tensor import ScaledTensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with FP8"),
]

WIDTH, ROWS = 256, 512


def model_of(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(64, WIDTH), torch.nn.LayerNorm(WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, WIDTH)]
    return torch.nn.Sequential(*layers, torch.nn.GELU(), torch.nn.Linear(WIDTH, 16)).cuda()


def batch(step: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(step)
    x = torch.randn(rows, 64, generator=generator, device="cuda")
    return x, torch.sin(x[:, :16])


def loss_of(forward: Any, step: int, rows: int = ROWS) -> Tensor:
    x, target = batch(step, rows)
    with torch.autocast("cuda", torch.bfloat16):
        y = forward(x)
    return (y.float() - target).square().mean()


def trained(level: str | None, recipe: str, *, compiled: bool = False, steps: int = 200) -> list[float]:
    """Losses under a level; of FP32 AdamW without one."""
    model = model_of()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    if level is not None:
        model, optimizer = fp8_megatron.initialize(model, optimizer, opt_level=level, recipe=recipe)  # type: ignore[arg-type]
    forward = torch.compile(model) if compiled else model
    losses = []
    for step in range(steps):
        loss = loss_of(forward, step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


@pytest.fixture(scope="module")
def exact() -> list[float]:
    return trained(None, "")


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_it_learns_as_fp32_does(level: str, recipe: str, exact: list[float]) -> None:
    """From 0.45, the mean square of the target, to 0.05. The noise of FP8 in the output, 25 dB below the target, adds
    0.0014 of them; the last losses are means over 20 steps of 512 rows, so chance moves them by some percent.
    """
    losses = trained(level, recipe)
    assert sum(exact[-20:]) / 20 < 0.2 * exact[0]
    assert sum(losses[-20:]) / 20 == pytest.approx(sum(exact[-20:]) / 20, rel=0.15)


def test_blockwise_learns() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.GELU(), torch.nn.Linear(256, 128)).cuda()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer = fp8_megatron.initialize(model, optimizer, opt_level="O3", recipe="blockwise")
    losses = []
    for step in range(100):
        x = torch.randn(256, 128, generator=torch.Generator("cuda").manual_seed(step), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = (model(x).float() - x.tanh()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_the_compiled_model_learns_alike(level: str) -> None:
    """The compiler fuses what is between linear layers and rounds it otherwise."""
    steps = 40
    eager, compiled = (trained(level, "delayed", compiled=compiled, steps=steps) for compiled in (False, True))
    assert compiled == pytest.approx(eager, rel=0.03)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_step_does_not_wait_for_the_device(level: str, recipe: str) -> None:
    model = model_of()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer = fp8_megatron.initialize(model, optimizer, opt_level=level, recipe=recipe)  # type: ignore[arg-type]
    inputs = batch(0)

    def step() -> None:
        for _ in range(2):
            with torch.autocast("cuda", torch.bfloat16):
                y = model(inputs[0])
            (y.float() - inputs[1]).square().mean().backward()
        fp8_megatron.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    step()  # kernels are compiled, and the gradients' storage becomes wide enough for two
    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("rows", [1, 17, 500])
def test_any_number_of_rows(rows: int) -> None:
    model = model_of()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    plain = copy.deepcopy(model)
    model, _ = fp8_megatron.initialize(model, optimizer, opt_level="O3")
    x, _ = batch(0, rows)
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        found, expected = model(x).float(), plain(x).float()
    assert found.shape == expected.shape
    # Two roundings to E4M3 a layer, 31 dB each, in three layers.
    assert float((found - expected).square().mean() / expected.square().mean()) < 3 * 2 * 10**-2.8


def test_accumulated_gradients_equal_those_of_the_whole_batch() -> None:
    grads = []
    for parts in (1, 4):
        model = model_of()
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        model, optimizer = fp8_megatron.initialize(model, optimizer, opt_level="O3")
        x, target = batch(0)
        for rows, wanted in zip(x.chunk(parts), target.chunk(parts), strict=True):
            with torch.autocast("cuda", torch.bfloat16):
                y = model(rows)
            ((y.float() - wanted).square().mean() / parts).backward()
        grads.append([param.grad.clone().float() for param in model.parameters() if param.grad is not None])
    for whole, summed in zip(*grads, strict=True):
        noise = (whole - summed).square().sum() / whole.square().sum()
        # Other rounding of activations, of their gradients (E5M2, 25 dB) and of the weight's gradient.
        assert float(noise) < 10**-1.8


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_resumed_run_goes_on_bit_for_bit(level: str, tmp_path: Any) -> None:
    def start() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = model_of()
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        return fp8_megatron.initialize(model, optimizer, opt_level=level)

    def go_on(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
        losses = []
        for step in steps:
            loss = loss_of(model, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    model, optimizer = start()
    go_on(model, optimizer, range(4))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    uninterrupted = go_on(model, optimizer, range(4, 8))
    other, other_optimizer = start()
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    other.load_state_dict(saved["model"])
    other_optimizer.load_state_dict(saved["optimizer"])
    assert go_on(other, other_optimizer, range(4, 8)) == uninterrupted


def test_grad_scaler_skips_what_is_not_finite() -> None:
    model = model_of()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer = fp8_megatron.initialize(model, optimizer, opt_level="O2")
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    before = [param.dequantize() if isinstance(param, ScaledTensor) else param.clone() for param in model.parameters()]
    scaler.scale(loss_of(model, 0) * torch.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    after = [param.dequantize() if isinstance(param, ScaledTensor) else param for param in model.parameters()]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert scaler.get_scale() == 2.0**9 and optimizer.num_skipped_steps == 1  # type: ignore[attr-defined]
