"""Layers that take the same input share its cast: fewer casts and bytes, the same bits."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fp8_megatron
from fp8_megatron.nn import shared_cast
from fp8_megatron.nn.module import FP8Linear
from tests.harness.counted_calls import count_calls

WIDTH, ROWS, STEPS = 128, 128, 3  # blocks have 128 elements
CASTS = ("quantize_current", "quantize_with_scale", "quantize_blocks")


class Block(torch.nn.Module):
    """Query, key and value of one tensor; then a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.gate, self.up = (torch.nn.Linear(WIDTH, 2 * WIDTH) for _ in range(2))
        self.down = torch.nn.Linear(2 * WIDTH, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        y = x + self.q(h).tanh() * self.k(h).sigmoid() + self.v(h)
        h = self.norm(y)
        return y + self.down(torch.nn.functional.silu(self.gate(h)) * self.up(h))


Model = tuple[torch.nn.Sequential, torch.optim.Optimizer]


def build(level: str = "O3", recipe: str = "delayed", *, shares: bool = True) -> Model:
    torch.manual_seed(0)
    model = torch.nn.Sequential(Block()).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, converted = fp8_megatron.initialize(model, optimizer, opt_level=level, recipe=recipe)
    if not shares:
        for layer in layers(model):
            layer.sharing = None  # type: ignore[assignment]
    return model, converted


def layers(model: torch.nn.Module) -> Iterator[FP8Linear]:
    return (module for module in model.modules() if isinstance(module, FP8Linear))


def train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, forward: Callable[[Tensor], Tensor] | None = None
) -> list[Tensor]:
    """Steps of two micro-batches; the outputs."""
    generator = torch.Generator().manual_seed(1)
    outputs = []
    for _ in range(STEPS):
        for _ in range(2):
            x, cotangent = (torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.bfloat16) for _ in range(2))
            y = (forward or model)(x)
            y.backward(cotangent)
            outputs.append(y.detach())
        optimizer.step()
        optimizer.zero_grad()
    return outputs


def state(model: torch.nn.Module, optimizer: Any) -> dict[str, Tensor]:
    histories = {f"history {i}": history.history for i, history in enumerate(optimizer._histories)}
    return {**model.state_dict(), **histories}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    different = [key for key in one if not torch.equal(one[key], other[key])]
    assert not different, different


@pytest.mark.parametrize(("level", "recipe"), [("O1", "delayed"), ("O3", "tensorwise"), ("O3", "blockwise")])
def test_the_bits_are_those_of_own_casts(level: str, recipe: str) -> None:
    shared, alone = build(level, recipe), build(level, recipe, shares=False)
    for y, expected in zip(train(*shared), train(*alone), strict=True):
        assert torch.equal(y, expected)
    assert_same(state(*shared), state(*alone))


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
def test_an_input_is_cast_once(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = build(recipe=recipe)
    train(model, optimizer)
    calls = count_calls(monkeypatch)
    model(torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)).sum()
    assert sum(calls[name] for name in CASTS) == 3  # of query, key and value; of gate and up; of down
    assert sum(number for name, number in calls.items() if "scaled_mm" in name) == 6


def test_backward_keeps_an_input_once() -> None:
    model, optimizer = build()
    train(model, optimizer)
    kept = Counter[tuple[torch.Size, int]]()

    def pack(tensor: Tensor) -> Tensor:
        if tensor.dtype is torch.float8_e4m3fn:
            kept[tensor.shape, tensor.data_ptr()] += 1
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = model(torch.randn(ROWS, WIDTH, dtype=torch.bfloat16))
    assert sorted(kept.values()) == [1, 2, 3]
    y.sum().backward()
    assert shared_cast._offer is None


class Pair(torch.nn.Module):
    """Two layers of one tensor, with `between` them."""

    def __init__(self, between: Callable[[Tensor], object] = lambda h: None, frozen: str = "") -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.between, self.frozen = between, frozen
        if frozen:
            getattr(self, frozen).weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = x + 1.0
        if not h.requires_grad:
            h.requires_grad_()
        y = self.first(h)
        self.between(h)
        return y * self.second(h)


def pair(recipe: str, **settings: Any) -> Model:
    torch.manual_seed(0)
    model: Any = Pair(**settings).to(torch.bfloat16)
    return fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), recipe=recipe)


def trained_pair(recipe: str, *, shares: bool, x_requires_grad: bool = True, **settings: Any) -> list[Tensor]:
    model, optimizer = pair(recipe, **settings)
    if not shares:
        for layer in layers(model):
            layer.sharing = None  # type: ignore[assignment]
    generator, outputs = torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        x, cotangent = (torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.bfloat16) for _ in range(2))
        y = model(x.requires_grad_(x_requires_grad))
        y.backward(cotangent)
        optimizer.step()
        outputs += [y.detach(), *([] if x.grad is None else [x.grad])]
        optimizer.zero_grad()
    return [*outputs, *state(model, optimizer).values()]


def _write(h: Tensor) -> None:
    with torch.no_grad():
        h.mul_(2.0)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"between": _write},
        {"frozen": "first"},
        {"frozen": "second"},
        {"x_requires_grad": False},
    ],
    ids=["plain", "written between", "first frozen", "second frozen", "leaf"],
)
def test_of_special_inputs(settings: dict[str, Any], recipe: str) -> None:
    with_sharing = trained_pair(recipe, shares=True, **settings)
    for tensor, expected in zip(with_sharing, trained_pair(recipe, shares=False, **settings), strict=True):
        assert torch.equal(tensor, expected)


def test_a_tensor_that_was_written_to_is_cast_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = pair("delayed")
    x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(2):
        model(x).sum().backward()
        optimizer.step()
    calls = count_calls(monkeypatch)
    model(x)
    assert calls["quantize_with_scale"] == 1
    shared_cast.withdraw()
    calls.clear()
    model.between = _write  # type: ignore[assignment]
    model(x)
    assert calls["quantize_with_scale"] == 2


def test_a_slot_whose_input_changes_is_its_own_again() -> None:
    model, optimizer = pair("delayed")
    (history,) = optimizer._histories  # type: ignore[attr-defined]
    x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(3):
        model(x).sum().backward()
        optimizer.step()
    first, second = (layer.quantizers.input.slot for layer in layers(model))
    assert history.history[0, second] == history.history[0, first] > 0
    first_layer, second_layer = layers(model)
    (first_layer(x * 1.0) + second_layer(x * 0.125)).sum().backward()
    optimizer.step()
    assert history.history[0, second] == history.history[0, first] / 8


def test_a_static_input_is_cast_in_each_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph whose recording lacked a cast, because an earlier forward had made it, would repeat old values."""
    torch.manual_seed(0)
    model: Any = torch.nn.ModuleList([torch.nn.Linear(WIDTH, WIDTH) for _ in range(2)]).to(torch.bfloat16)
    model, _ = fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters()))
    static = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    calls = count_calls(monkeypatch)
    for forwards in range(1, 4):
        for layer in model:
            layer(static)
        assert calls["quantize_current"] == 2 * forwards


def test_what_changes_is_learnt() -> None:
    model, _ = pair("tensorwise")
    first, second = layers(model)
    x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    model(x).sum().backward()
    assert first.sharing.num_followers == 1 and second.sharing.num_followers == 0
    for _ in range(shared_cast._MOST_ALONE):
        assert first.sharing.offers
        first(x * 1.0).sum().backward()
        assert first.sharing.num_followers == 0
    assert not first.sharing.offers


def test_layers_of_two_recipes_cast_for_themselves() -> None:
    one, other = (pair(recipe)[0] for recipe in ("delayed", "delayed"))
    first, second = next(layers(one)), next(layers(other))
    x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(3):
        h = x * 1.0
        (first(h) + second(h)).sum().backward()
    assert first.sharing.num_followers == 0


def test_copies_share_nothing_with_the_original() -> None:
    model: Any = Pair().to(torch.bfloat16)
    fp8_megatron.replace_linears(model)
    model(torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    twin = copy.deepcopy(model)
    assert len(list(layers(twin))) > 1
    assert all(one.sharing is not other.sharing for one, other in zip(layers(model), layers(twin), strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_of_recomputed_layers(reentrant: bool) -> None:
    def trained(shares: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
        model, optimizer = build(shares=shares)

        def forward(x: Tensor) -> Tensor:
            x.requires_grad_()
            for block in model:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x

        return train(model, optimizer, forward), state(model, optimizer)

    (outputs, result), (expected_outputs, expected) = trained(True), trained(False)
    for y, expected_y in zip(outputs, expected_outputs, strict=True):
        assert torch.equal(y, expected_y)
    assert_same(result, expected)


def test_casts_without_gradients_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = build()
    train(model, optimizer)
    calls = count_calls(monkeypatch)
    with torch.no_grad():
        model(torch.randn(ROWS, WIDTH, dtype=torch.bfloat16))
    assert calls["quantize_with_scale"] == 6
