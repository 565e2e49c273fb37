"""Launch lists on a GPU: the layers of other models compute the same bits through them as through Python."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fp8_megatron
from fp8_megatron.kernels import launch_list
from fp8_megatron.nn import local
from fp8_megatron.nn.module import FP8Linear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with FP8"),
]
_NO_DEVICE = 10**6


@pytest.fixture(autouse=True)
def new_lists() -> Iterator[None]:
    for lists in (local._forwards, local._products, local._backwards):
        lists._known.clear()
        lists.num_refused = 0
    yield
    for lists in (local._forwards, local._products, local._backwards):
        lists._known.clear()


def num_lists() -> tuple[int, int]:
    """Of forwards and of backwards."""
    return local._forwards.num_lists, local._backwards.num_lists


def model_of(bias: bool, dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = (torch.nn.Linear(256, 512, bias), torch.nn.GELU(), torch.nn.Linear(512, 256, bias))
    return torch.nn.Sequential(*layers).to("cuda", dtype)


def results(
    level: Any, recipe: Any, *, bias: bool, dtype: torch.dtype, autocast: bool = False, steps: int = 6
) -> list[Tensor]:
    """Outputs, gradients and weights of some steps of two micro-batches each, of two shapes."""
    model = model_of(bias, dtype)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = fp8_megatron.initialize(model, optimizer, opt_level=level, recipe=recipe)
    generator = torch.Generator("cuda").manual_seed(1)
    seen = []
    for _ in range(steps):
        for rows in (256, 128):
            x = torch.randn(rows // 64, 64, 256, generator=generator, device="cuda").to(dtype).requires_grad_()
            grad = torch.randn(rows // 64, 64, 256, generator=generator, device="cuda")
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                y = model(x)
            y.backward(grad.to(y.dtype))
            assert x.grad is not None
            seen += [y.detach(), x.grad]
        seen += [p.grad.float().clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        seen += [value.clone() for value in model.state_dict().values()]
    return seen


class Siblings(torch.nn.Module):
    """Three layers of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(256, 256) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        h = torch.nn.functional.gelu(x)
        one, two, three = (layer(h) for layer in self.layers)
        return torch.tanh(one) * two + three


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_siblings_compute_the_bits_of_layers_alone(monkeypatch: pytest.MonkeyPatch, level: Any, recipe: Any) -> None:
    def trained(shares: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model: Any = Siblings().to("cuda", torch.bfloat16)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = fp8_megatron.initialize(model, optimizer, opt_level=level, recipe=recipe)
        for layer in model.layers:
            layer.sharing = layer.sharing if shares else None
        generator, seen = torch.Generator("cuda").manual_seed(1), []
        for _ in range(6):
            x, grad = (torch.randn(128, 256, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in "xg")
            y = model(x.requires_grad_())
            y.backward(grad)
            optimizer.step()
            optimizer.zero_grad()
            seen += [y.detach(), x.grad, *(value.clone() for value in model.state_dict().values())]
        return seen

    with monkeypatch.context() as patch:
        patch.setattr(launch_list, "first_device", _NO_DEVICE)
        expected = trained(shares=False)
    got = trained(shares=True)
    assert local._products.num_lists == 1
    for index, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert torch.equal(one, other), index


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_lists_compute_the_bits_of_python(
    monkeypatch: pytest.MonkeyPatch, level: str, recipe: str, bias: bool, dtype: torch.dtype
) -> None:
    settings: dict[str, Any] = dict(bias=bias, dtype=dtype, autocast=dtype is torch.float32)
    with monkeypatch.context() as patch:
        patch.setattr(launch_list, "first_device", _NO_DEVICE)
        expected = results(level, recipe, **settings)
        assert num_lists() == (0, 0)
    with monkeypatch.context() as patch:
        patch.setattr(launch_list, "_MOST_TRIES", 0)
        results(level, recipe, steps=2, **settings)  # Triton compiles; some keys have one call
    for lists in (local._forwards, local._products, local._backwards):
        lists._known.clear()
    got = results(level, recipe, **settings)
    # Delayed scales have no lists in the first step, which is the only one whose first gradient is stored in FP8.
    num_first = 2 if recipe == "tensorwise" else 0
    num_forwards, num_backwards = num_lists()
    assert num_forwards == 4, "two layers and two shapes"
    # The second gradient of the first step makes the storage wider: that happens once, so a list may not be made.
    assert 4 + num_first <= num_backwards <= 4 + 2 * num_first, "one overwrites, the other adds"
    assert local._forwards.num_refused == local._backwards.num_refused == 0
    for index, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert torch.equal(one, other), index


def test_a_list_allocates_as_python_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak is the same: what Python would free before the end is free."""

    def peak() -> int:
        gc.collect()  # the model before
        before = torch.cuda.memory_allocated()
        model = torch.nn.Linear(4096, 4096, device="cuda", dtype=torch.bfloat16)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        wrapped, optimizer = fp8_megatron.initialize(model, optimizer, opt_level="O3", recipe="delayed")
        x = torch.randn(2048, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(5):
            torch.cuda.reset_peak_memory_stats()
            wrapped(x).backward(x.detach())
            optimizer.step()
            optimizer.zero_grad()
        return torch.cuda.max_memory_allocated() - before

    with monkeypatch.context() as patch:
        patch.setattr(launch_list, "_MOST_TRIES", 0)
        peak()  # workspaces stay
        expected = peak()
        assert num_lists() == (0, 0)
    assert peak() == expected
    assert num_lists() == (1, 1)


def test_other_streams_and_frozen_weights() -> None:
    torch.manual_seed(0)
    layer = FP8Linear(256, 256, device="cuda")
    x = torch.randn(128, 256, device="cuda", dtype=torch.bfloat16)
    outputs = []
    stream = torch.cuda.Stream()
    for _ in range(6):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.no_grad():
            outputs.append(layer(x))
        torch.cuda.current_stream().wait_stream(stream)
        with torch.no_grad():
            outputs.append(layer(x))
    assert num_lists()[0] == 1
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    layer.weight.requires_grad_(False)
    grads = []
    for _ in range(5):
        leaf = x.clone().requires_grad_()
        layer(leaf).backward(x)
        grads.append(leaf.grad)
    assert all(torch.equal(grad, grads[0]) for grad in grads)  # type: ignore[arg-type]
    assert num_lists()[1] == 1
