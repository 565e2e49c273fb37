"""`fp8_megatron.initialize` on a GPU: training, every input dtype, autocast, odd rows, and Inductor."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import fp8_megatron
from fp8_megatron.any_model import plain_model
from fp8_megatron.nn.module import FP8Linear
from fp8_megatron.quantization.recipe import Recipe
from fp8_megatron.quantization.scaled_tensor import ScaledTensor
from fp8_megatron.quantization.stats import snr_db

pytestmark = pytest.mark.gpu

WIDTH, ROWS = 256, 512
RECIPES = ("tensorwise", "delayed", "blockwise")
#: Noise of an E4M3 operand times another, and of E5M2 times E4M3 (tests/nn/test_linear.py), less 1 dB for the sample.
E4M3_E4M3_DB, E5M2_E4M3_DB = 27.5, 23.5


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


def trained(level: str | None, recipe: str, *, compiled: str | None = None, steps: int = 200) -> list[float]:
    """Losses under a level; of FP32 AdamW without one."""
    model = model_of()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    if level is not None:
        model, optimizer = fp8_megatron.initialize(model, optimizer, opt_level=level, recipe=recipe)  # type: ignore[arg-type]
    forward = torch.compile(model, mode=compiled) if compiled else model
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
    eager, compiled = (trained(level, "delayed", compiled=mode, steps=steps) for mode in (None, "default"))
    assert compiled == pytest.approx(eager, rel=0.03)


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


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 77, 256])
def test_values_and_gradients(recipe: str, dtype: torch.dtype, bias_dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512, device="cuda", dtype=bias_dtype))
    fp8_megatron.replace_linears(model, recipe=recipe)  # type: ignore[arg-type]
    layer = model[0]
    assert isinstance(layer, FP8Linear)
    x = torch.randn(rows, 256, device="cuda").to(dtype).requires_grad_()
    cotangent = torch.randn(rows, 512, device="cuda").to(dtype)
    y = layer(x)
    y.backward(cotangent)
    assert y.dtype is dtype and x.grad is not None and layer.weight.grad is not None and layer.bias.grad is not None
    if rows < 16:  # too few for a ratio of noise
        assert y.isfinite().all() and layer.weight.grad.isfinite().all()
        return
    weight, wide_x, g = layer.weight.dequantize().double(), x.detach().double(), cotangent.double()
    assert snr_db(y.detach().double() - layer.bias.detach().double(), wide_x @ weight.t()) > E4M3_E4M3_DB
    assert snr_db(x.grad, g @ weight) > E5M2_E4M3_DB and snr_db(layer.weight.grad, g.t() @ wide_x) > E5M2_E4M3_DB
    assert snr_db(layer.bias.grad, g.sum(dim=0)) > 51.5  # two roundings to BF16 (tests/nn/test_any_model.py)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("rows", [77, 256])
def test_inductor_has_the_bits_of_eager_mode(recipe: str, rows: int) -> None:
    """A linear layer alone: nothing around it that a compiler would fuse."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512, device="cuda"))
    fp8_megatron.replace_linears(model, recipe=recipe)  # type: ignore[arg-type]
    x = torch.randn(rows, 256, device="cuda").bfloat16()
    cotangent = torch.randn(rows, 512, device="cuda").bfloat16()

    def run(call: object) -> list[Tensor | None]:
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        y = call(leaf)  # type: ignore[operator]
        y.backward(cotangent)
        return [y.detach(), leaf.grad, model[0].weight.grad, model[0].bias.grad]

    torch._dynamo.reset()
    expected = run(model)
    for ours, theirs in zip(run(torch.compile(model, fullgraph=True)), expected, strict=True):
        assert ours is not None and theirs is not None and torch.equal(ours, theirs)


def test_graphs_of_the_compiler_leave_fp8_layers_out() -> None:
    """mode="reduce-overhead" replays CUDA graphs; backward's writes to the optimizer's storage must not be replayed."""
    torch._dynamo.reset()
    eager, compiled = (trained("O2", "tensorwise", compiled=mode, steps=50) for mode in (None, "reduce-overhead"))
    assert compiled[-1] == pytest.approx(eager[-1], rel=0.05)


def test_layers_move_to_the_gpu_and_are_copied_there() -> None:
    torch.manual_seed(0)
    layer = FP8Linear(256, 512, recipe=Recipe("tensorwise", power_of_two=False), dtype=torch.float32)
    x = torch.randn(32, 256)
    expected = layer(x)
    layer.cuda()
    assert layer.weight.device.type == layer.weight.payload.device.type == "cuda"
    # The GEMM of a GPU sums in another order, and its fast accumulation keeps fewer bits.
    assert snr_db(layer(x.cuda()).cpu().detach(), expected.detach()) > E4M3_E4M3_DB
    copied = copy.deepcopy(layer)
    assert torch.equal(copied(x.cuda()), layer(x.cuda()))
    plain = plain_model(torch.nn.Sequential(layer))
    assert type(plain[0]) is torch.nn.Linear and torch.equal(plain[0].weight, layer.weight.dequantize())
