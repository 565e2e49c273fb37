"""`initialize` on a GPU: every input dtype, autocast, odd rows, frozen weights, and Inductor."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import fp8_megatron
from fp8_megatron.any_model import plain_model
from fp8_megatron.nn.module import FP8Linear
from fp8_megatron.quantization.recipe import Recipe
from fp8_megatron.quantization.stats import snr_db

pytestmark = pytest.mark.gpu
#: Noise of an E4M3 operand times another, and of E5M2 times E4M3 (tests/nn/test_linear.py), less 1 dB for the sample.
E4M3_E4M3_DB, E5M2_E4M3_DB = 27.5, 23.5
LEVELS, RECIPES = ("O1", "O2", "O3"), ("tensorwise", "delayed", "blockwise")


def build() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(256, 512), torch.nn.LayerNorm(512), torch.nn.GELU(), torch.nn.Linear(512, 128)
    ).cuda()


def train(model: torch.nn.Module, call: object, optimizer: torch.optim.Optimizer) -> list[float]:
    """50 steps under autocast; the losses."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(200, 256, generator=generator).cuda()
    target = (x @ torch.randn(256, 128, generator=generator).cuda() / 16).tanh()
    losses = []
    for _ in range(50):
        with torch.autocast("cuda", torch.bfloat16):
            loss = (call(x) - target).float().square().mean()  # type: ignore[operator]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


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
    model = build()
    model, optimizer = fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), "O2")
    compiled = train(model, torch.compile(model, mode="reduce-overhead"), optimizer)
    model = build()
    model, optimizer = fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), "O2")
    eager = train(model, model, optimizer)
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
