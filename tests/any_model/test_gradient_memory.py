"""Gradients of FP8 weights take memory from backward until nobody has them any more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fp8_megatron
from fp8_megatron.sharding import whole_grads
from fp8_megatron.sharding.whole_grads import WholeGradBuffer

NUM_LAYERS, WIDTH = 6, 64
#: Elements, so that two layers share a section.
SECTION = 2 * WIDTH * WIDTH


def build(level: Any = "O2", **settings: Any) -> tuple[Any, Any, WholeGradBuffer]:
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
    model, optimizer = fp8_megatron.initialize(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), opt_level=level, **settings
    )
    (buffer,) = [space.buffer for space in optimizer._spaces if space.buffer.scales is not None]
    assert isinstance(buffer, WholeGradBuffer)
    return model, optimizer, buffer


def forward(model: Any, seed: int, layers: range = range(NUM_LAYERS)) -> Tensor:
    y = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(seed))
    for layer in layers:
        y = model[layer](y)
    return y.square().sum()


@pytest.fixture(autouse=True)
def small_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_grads, "_LEAST_SECTION", SECTION)


def memory_of_nans(section: whole_grads.Section) -> None:
    """`Section.hold`, where the memory that it gets has been used before."""
    if not section.is_held:
        section.payload.untyped_storage().resize_(section.payload.nbytes)
        section.payload.view(torch.uint8).fill_(255)
        section.is_held = True


@pytest.mark.parametrize("drops", ["optimizer", "model", "none"])
def test_there_is_none_between_zero_grad_and_backward(drops: str) -> None:
    model, optimizer, buffer = build()
    assert buffer.nbytes == 0
    sizes = []
    for step in range(3):
        loss = forward(model, step)
        sizes.append(buffer.nbytes)
        loss.backward()
        sizes.append(buffer.nbytes)
        optimizer.step()
        assert model[0].weight.grad.norm() > 0, "a gradient stays after the step"
        if drops == "none":
            for param in model.parameters():
                param.grad = None
        else:
            {"optimizer": optimizer, "model": model}[drops].zero_grad()
    assert sizes == 3 * [0, NUM_LAYERS * WIDTH * WIDTH]


def test_gradients_that_somebody_has_stay() -> None:
    """While others are added, in evaluation, and where one of a section is left."""
    model, optimizer, buffer = build()
    forward(model, 0).backward()
    whole = buffer.nbytes
    with torch.no_grad():
        forward(model, 1)
    forward(model, 1)
    assert buffer.nbytes == whole
    for layer in model[1:]:
        layer.weight.grad = None
    kept = model[0].weight.grad.clone()
    forward(model, 2)
    assert buffer.nbytes == whole // 3, "the section of the first two layers"
    assert torch.equal(model[0].weight.grad.clone(), kept)
    optimizer.step()


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_weights_are_those_of_memory_that_stays(monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    """Bit for bit, over steps that leave layers out, add gradients, widen the storage and zero it."""

    def trained(is_pinned: bool) -> list[Tensor]:
        model, optimizer, buffer = build(level)
        if is_pinned:
            buffer.pin()
        for step in range(12):
            layers = range(step % 3, NUM_LAYERS)
            for micro_batch in range(1 if step < 6 else 2):
                forward(model, 10 * step + micro_batch, layers).backward()
            optimizer.step()
            if step % 4 == 3:
                optimizer.zero_grad(set_to_none=False)
            elif step % 4 == 1:
                model[5].weight.grad = None
                forward(model, 7, range(5)).backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                optimizer.zero_grad()
            assert is_pinned or step % 4 == 3 or not forward(model, 0).isnan()
        return [value.float() for value in model.state_dict().values()]

    expected = trained(is_pinned=True)
    monkeypatch.setattr(whole_grads.Section, "hold", memory_of_nans)
    got = trained(is_pinned=False)
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


def test_neighbours_of_gradients_that_the_user_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer has no gradient and lies before one that has: what its new memory held counts for nothing."""
    monkeypatch.setattr(whole_grads.Section, "hold", memory_of_nans)
    model, optimizer, buffer = build()
    before = model[0].weight.dequantize()
    model[1].weight.grad = torch.ones(WIDTH, WIDTH)
    optimizer.step()
    assert buffer.nbytes == SECTION and optimizer.num_skipped_steps == 0
    assert torch.equal(model[0].weight.dequantize(), before)


def test_zeros_stay_where_others_widen_the_storage() -> None:
    model, optimizer, buffer = build()
    forward(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    for seed in (1, 2):
        forward(model, seed, range(2)).backward()
    assert buffer.scales is None, "two gradients of the first layers"
    assert model[5].weight.grad.norm() == 0
    optimizer.step()
    assert optimizer.num_skipped_steps == 0


def test_a_gradient_that_was_given_back() -> None:
    model, optimizer, _ = build()
    forward(model, 0).backward()
    grad = model[0].weight.grad
    optimizer.zero_grad()
    forward(model, 1)
    with pytest.raises(RuntimeError, match=r"0\.weight is gone.*keep p\.grad\.clone"):
        grad.clone()
    for layer in model:
        layer.weight.grad = grad if layer is model[0] else torch.zeros(WIDTH, WIDTH)
    with pytest.raises(RuntimeError, match=r"0\.weight is gone"):
        optimizer.step()


def test_a_recorded_step_keeps_addresses() -> None:
    model, optimizer, buffer = build()
    step = fp8_megatron.record_step(lambda x: model(x).square().sum().backward(), model)
    addresses = buffer.addresses
    for seed in range(3):
        step(torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(seed)))
        optimizer.step()
        optimizer.zero_grad()
    assert buffer.addresses == addresses and all(addresses)
