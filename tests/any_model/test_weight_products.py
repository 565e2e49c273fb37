"""Modules that multiply with their layer's weight themselves: the layer's FP8 GEMMs, its gradients, or an error."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fp8_megatron
from fp8_megatron.any_model import replace_linears, report
from fp8_megatron.any_model.fsdp import build_sharded_optimizer
from fp8_megatron.dtypes import StorageDtype
from fp8_megatron.formats.recipes import RecipeName
from fp8_megatron.nn.conv1d import FP8Conv1D
from fp8_megatron.nn.module import DEFAULT_RECIPE, FP8Linear
from fp8_megatron.quantization.stats import snr_db
from tests.harness.fp8_models import shard
from tests.harness.ranks import RankPool, on_default_group

#: Noise of an E4M3 operand times another, and of E5M2 times E4M3 (tests/nn/test_linear.py), less 1 dB for the sample.
E4M3_E4M3_DB, E5M2_E4M3_DB = 27.5, 23.5
SIZE = 128
LEVELS = ("O1", "O2", "O3")
RECIPES: tuple[RecipeName, ...] = ("tensorwise", "delayed", "blockwise")

#: How a module computes x·Wᵀ with its layer.
PRODUCTS: dict[str, Callable[[Tensor, torch.nn.Linear], Tensor]] = {
    "linear": lambda x, layer: F.linear(x, layer.weight),
    "keywords": lambda x, layer: F.linear(input=x, weight=layer.weight, bias=None),
    "x @ w.t()": lambda x, layer: x @ layer.weight.t(),
    "matmul": lambda x, layer: torch.matmul(x, layer.weight.T),
    "transpose": lambda x, layer: x.matmul(layer.weight.transpose(-2, -1)),
    "w @ x": lambda x, layer: (layer.weight @ x.transpose(1, 2)).transpose(1, 2),
}


class Reader(torch.nn.Module):
    """An attention's projections: `read` computes with the first one's weight."""

    def __init__(self, read: Callable[[Tensor, torch.nn.Linear], Tensor], *, bias: bool, twice: bool = False) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(SIZE)
        self.qkv = torch.nn.Linear(SIZE, 3 * SIZE, bias=bias)
        self.proj = torch.nn.Linear(3 * SIZE, SIZE)
        self.read, self.twice = read, twice

    def forward(self, x: Tensor) -> Tensor:
        y = self.read(self.norm(x), self.qkv)
        if self.twice:
            y = y + self.read(self.norm(x).sin(), self.qkv)
        made: Tensor = self.proj(torch.tanh(y))
        return made


def call_layer(x: Tensor, layer: torch.nn.Linear) -> Tensor:
    made: Tensor = layer(x)
    return made


def read_with_bias(x: Tensor, layer: torch.nn.Linear) -> Tensor:
    return F.linear(x, layer.weight, layer.bias)


def trained(
    read: Callable[[Tensor, torch.nn.Linear], Tensor],
    level: str = "O2",
    recipe: RecipeName = "tensorwise",
    *,
    bias: bool = False,
    twice: bool = False,
    reentrant: bool | None = None,
    autocast: bool = True,
) -> list[Tensor]:
    """Everything that three steps of two micro-batches compute and leave behind."""
    torch.manual_seed(0)
    model = Reader(read, bias=bias, twice=twice)
    user = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = fp8_megatron.initialize(model, user, level, recipe=recipe)
    assert set(report(model).fp8) == {"qkv", "proj"}
    seen: list[Tensor] = []
    for _ in range(3):
        for _ in range(2):
            x, cotangent = torch.randn(2, 7, SIZE, requires_grad=True), torch.randn(2, 7, SIZE)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                y = model(x) if reentrant is None else checkpoint(model, x, use_reentrant=reentrant)
            y.backward(cotangent.to(y.dtype))
            assert x.grad is not None
            seen += [y.detach(), x.grad]
        seen += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        seen.append(model(torch.randn(2, 7, SIZE)))
    return [*seen, *model.state_dict().values()]


def assert_equal(got: list[Tensor], expected: list[Tensor]) -> None:
    assert len(got) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_linear_with_the_layers_bias_is_the_layer(level: str, recipe: RecipeName) -> None:
    assert_equal(trained(read_with_bias, level, recipe, bias=True), trained(call_layer, level, recipe, bias=True))


@pytest.mark.parametrize("product", list(PRODUCTS))
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_every_product_is_the_layer(product: str, recipe: RecipeName) -> None:
    assert_equal(trained(PRODUCTS[product], "O3", recipe), trained(call_layer, "O3", recipe))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("product", ["linear", "x @ w.t()"])
def test_under_activation_checkpoints(product: str, reentrant: bool) -> None:
    """A reentrant checkpoint runs the first forward without autograd."""
    expected = trained(call_layer, recipe="delayed", reentrant=reentrant)
    assert_equal(trained(PRODUCTS[product], recipe="delayed", reentrant=reentrant), expected)


@pytest.mark.parametrize("autocast", [True, False])
def test_a_weight_that_is_read_twice(autocast: bool) -> None:
    expected = trained(call_layer, twice=True, autocast=autocast, bias=True)
    assert_equal(trained(read_with_bias, twice=True, autocast=autocast, bias=True), expected)


class CutBias(torch.nn.Module):
    """Swin V2's and BEiT's: the bias is put together of three parts, and is not the layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(SIZE, 3 * SIZE, bias=False)
        self.q_bias = torch.nn.Parameter(torch.randn(SIZE))
        self.register_buffer("k_bias", torch.zeros(SIZE), persistent=False)
        self.v_bias = torch.nn.Parameter(torch.randn(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        bias = torch.cat((self.q_bias, self.k_bias, self.v_bias))
        return F.linear(x, weight=self.qkv.weight, bias=bias)


@pytest.mark.parametrize("level", [None, *LEVELS])
def test_gradients_of_another_bias_are_those_of_fp32(level: str | None) -> None:
    torch.manual_seed(1)
    model = CutBias()
    plain = copy.deepcopy(model)
    if level is None:  # the gradient comes by autograd
        replace_linears(model)
    else:
        model, _ = fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters()), level)
    x, cotangent = torch.randn(2, 33, SIZE), torch.randn(2, 33, 3 * SIZE)
    outcomes = []
    for each in (model, plain):
        leaf = x.clone().requires_grad_()
        y = each(leaf)
        y.backward(cotangent)
        weight_grad = each.qkv.weight.grad
        assert leaf.grad is not None and weight_grad is not None and y.dtype is torch.float32
        outcomes.append((y, leaf.grad, weight_grad.clone(), each.q_bias.grad, each.v_bias.grad))
    limits = (E4M3_E4M3_DB, E5M2_E4M3_DB, E5M2_E4M3_DB, 50.0, 50.0)  # sums of BF16 gradients in FP32
    for got, expected, limit in zip(*outcomes, limits, strict=True):
        assert snr_db(got.float(), expected) > limit


def test_the_callers_bias_takes_the_place_of_the_layers() -> None:
    torch.manual_seed(2)
    layer = FP8Linear(SIZE, SIZE)
    x, bias = torch.randn(5, SIZE), torch.randn(SIZE)
    without = F.linear(x, layer.weight)
    assert torch.equal(F.linear(x, layer.weight, torch.zeros(SIZE)), without)
    assert not torch.equal(layer(x), without)
    assert snr_db(F.linear(x, layer.weight, bias), without + bias) > 40.0  # the output is rounded to BF16
    with pytest.raises(ValueError, match=r"FP8Linear: the bias is \(1,\), not \(128,\)"):
        F.linear(x, layer.weight, torch.ones(1))
    with pytest.raises(ValueError, match="the input's last size is not 128"):
        F.linear(torch.randn(5, 16), layer.weight)


@pytest.mark.parametrize("product", list(PRODUCTS))
def test_frozen_weights(product: str) -> None:
    """And copies of them, and pickles, which have layers of their own."""
    torch.manual_seed(3)
    model = Reader(PRODUCTS[product], bias=False)
    model.qkv.requires_grad_(False)
    model, _ = fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters()), "O3")
    file = io.BytesIO()
    torch.save(model.qkv, file)
    file.seek(0)
    x, cotangent = torch.randn(2, 3, SIZE), torch.randn(2, 3, 3 * SIZE)
    expected = None
    for layer in (model.qkv, copy.deepcopy(model.qkv), torch.load(file, weights_only=False)):
        for compute in (call_layer, PRODUCTS[product]):
            leaf = x.clone().requires_grad_()
            y = compute(leaf, layer)
            y.backward(cotangent)
            assert layer.weight.grad is None and leaf.grad is not None
            expected = expected or [y.detach(), leaf.grad]
            assert_equal([y.detach(), leaf.grad], expected)
        layer.eval()
        del layer


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_autograd_it_is_the_layer_too(mode: Any) -> None:
    """A detached weight is its values."""
    torch.manual_seed(4)
    layer = FP8Linear(SIZE, SIZE, bias=False).eval()
    x = torch.randn(2, 16, SIZE, dtype=torch.bfloat16)
    with mode():
        for product in PRODUCTS.values():
            assert torch.equal(product(x, layer), layer(x))
        decoded = F.linear(x, layer.weight.detach().clone())
        assert torch.equal(F.linear(x, layer.weight.detach()), decoded)
        assert torch.equal(layer.weight @ layer.weight.t(), layer.weight.clone() @ layer.weight.clone().t())
        assert not torch.equal(layer(x), decoded)


REFUSED: dict[str, Callable[[Tensor, FP8Linear], object]] = {
    "detached": lambda x, layer: F.linear(x, layer.weight.detach()),
    "rows": lambda x, layer: F.linear(x, layer.weight[:32]),
    "transposed twice": lambda x, layer: x @ layer.weight.t().t(),
    "not transposed": lambda x, layer: x @ layer.weight,
    "of a transpose": lambda x, layer: F.linear(x, layer.weight.t()),
    "a vector": lambda x, layer: layer.weight @ x[0],
    "addmm": lambda x, layer: torch.addmm(x[:, 0], x, layer.weight.t()),
    "two weights": lambda x, layer: F.linear(layer.weight, layer.weight),
    "a weight as bias": lambda x, layer: F.linear(x, layer.weight, layer.weight),
    "transposed without autograd": lambda x, layer: x @ _transposed_without_autograd(layer),
}


def _transposed_without_autograd(layer: FP8Linear) -> Tensor:
    with torch.no_grad():
        return layer.weight.t()


@pytest.mark.parametrize("operation", list(REFUSED))
def test_what_would_lose_a_gradient_is_refused(operation: str) -> None:
    layer = FP8Linear(SIZE, SIZE)
    with pytest.raises(NotImplementedError, match=r"keep the layer a torch\.nn\.Linear"):
        REFUSED[operation](torch.randn(4, SIZE), layer)


class _Product(torch.autograd.Function):
    """A fused loss's product: x·Wᵀ with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, transposed: Tensor) -> Tensor:
        ctx.save_for_backward(x, transposed)
        return x @ transposed

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        x, transposed = ctx.saved_tensors
        return grad_output @ transposed.t(), x.t() @ grad_output


@pytest.mark.parametrize("level", LEVELS)
def test_a_function_with_a_backward_of_its_own_gives_the_weight_its_gradient(level: str) -> None:
    torch.manual_seed(8)
    layer = torch.nn.Linear(SIZE, SIZE, bias=False)
    layer, _ = fp8_megatron.initialize(layer, torch.optim.AdamW(layer.parameters()), level)
    x, cotangent = torch.randn(32, SIZE, requires_grad=True), torch.randn(32, SIZE)
    y = _Product.apply(x, layer.weight.t())
    assert torch.equal(y, layer(x))
    y.backward(cotangent)
    assert x.grad is not None and layer.weight.grad is not None
    assert snr_db(x.grad, cotangent @ layer.weight.detach().clone()) > E4M3_E4M3_DB
    assert snr_db(layer.weight.grad.clone(), cotangent.t() @ x.detach()) > E4M3_E4M3_DB  # stored in E4M3


def test_gpt2s_layer_is_refused() -> None:
    """Its code expects a weight [in, out]; that of a square layer would be multiplied without an error."""
    layer = FP8Conv1D.__new__(FP8Conv1D)
    torch.nn.Module.__init__(layer)
    layer.take(torch.randn(SIZE, SIZE).requires_grad_(), None, recipe=DEFAULT_RECIPE, weight=StorageDtype.FP8)
    for read in (PRODUCTS["linear"], PRODUCTS["x @ w.t()"]):
        with pytest.raises(NotImplementedError, match=r"keep the layer a torch\.nn\.Linear"):
            read(torch.randn(4, SIZE), layer)


def test_plain_weights_of_functional_call() -> None:
    torch.manual_seed(5)
    model = CutBias()
    plain = copy.deepcopy(model)
    replace_linears(model)
    x = torch.randn(3, SIZE)
    assert torch.equal(torch.func.functional_call(model, dict(plain.named_parameters()), x), plain(x))


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("product", [*PRODUCTS, "another bias"])
def test_compiled(product: str, level: str) -> None:
    """``F.linear`` is one graph. Other products break it."""
    torch._dynamo.reset()
    torch.manual_seed(6)
    is_whole = product in ("linear", "keywords", "another bias")
    model: torch.nn.Module = CutBias() if product == "another bias" else Reader(PRODUCTS[product], bias=False)
    model, optimizer = fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters()), level, recipe="delayed")
    compiled = torch.compile(model, backend=aot_eager, fullgraph=is_whole)
    x = torch.randn(2, 8, SIZE)
    outcomes = []
    for call in (model, compiled):
        if isinstance(model, Reader):  # the layer itself is what it is compared with
            model.read = call_layer if call is model else PRODUCTS[product]
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = call(leaf)
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(7)).to(y.dtype))
        assert leaf.grad is not None
        grads = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        assert len(grads) == len(list(model.parameters()))
        outcomes.append([y.detach(), leaf.grad, *grads])
        optimizer.zero_grad()
    assert_equal(*outcomes)


def _sharded(group: Any, reads: bool) -> list[Tensor]:
    """A block that ``fully_shard`` gathers for its forward."""
    torch.manual_seed(0)
    block = Reader(read_with_bias if reads else call_layer, bias=True)
    model = torch.nn.Sequential(block, torch.nn.LayerNorm(SIZE)).bfloat16()
    replace_linears(model)
    shard(block, model)
    optimizer = build_sharded_optimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), "O3")
    seen = []
    for step in range(2):
        torch.manual_seed(10 * step + group.rank())
        x, cotangent = torch.randn(2, 4, SIZE).bfloat16(), torch.randn(2, 4, SIZE).bfloat16()
        y = model(x)
        y.backward(cotangent)
        seen.append(y.detach())
        optimizer.step()
        optimizer.zero_grad()
    # A sharded weight is no layer's outside of the forward that gathers it.
    with pytest.raises((NotImplementedError, RuntimeError)):
        F.linear(x, block.qkv.weight)
    return [*seen, *(parameter.to_local().dequantize() for parameter in (block.qkv.weight, block.proj.weight))]


def test_in_a_block_that_fully_shard_gathers(ranks: RankPool) -> None:
    results = [ranks.run(on_default_group, _sharded, reads, num_ranks=2) for reads in (True, False)]
    for got, expected in zip(*results, strict=True):
        assert_equal(got, expected)
