"""Code that reads FP8 weights in a training loop: a penalty in the loss, a norm for a log, pruning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils import parametrizations, prune, spectral_norm

import fp8_megatron
from fp8_megatron.device.group import Group
from fp8_megatron.errors import UserError
from fp8_megatron.quantization.stats import snr_db
from tests.harness.ranks import RankPool, on_default_group

SIZE = 32
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def build(level: str = "O2", device: str = "cpu") -> tuple[torch.nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE, bias=False)).to(device)
    return fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters()), level)


def penalty(weight: torch.Tensor) -> torch.Tensor:
    return 0.5 * weight.pow(2).sum() + weight[3:5].t().sum()


def backward(model: torch.nn.Module, num_micro_batches: int, seed: int = 0) -> None:
    torch.manual_seed(seed)
    weight: Any = model.get_parameter("0.weight")
    for _ in range(num_micro_batches):
        x = torch.randn(16, SIZE).to(weight.device)
        (model(x).square().mean() + penalty(weight)).backward()


@pytest.mark.parametrize("num_micro_batches", [1, 3])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_penalty_in_the_loss_has_its_gradient(
    level: str, device: str, num_micro_batches: int, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = build(level, device)
    plain = fp8_megatron.any_model.plain_model(model)
    for one in (model, plain):
        backward(one, num_micro_batches)
    grads = [one.get_parameter("0.weight").grad for one in (model, plain)]
    assert grads[0] is not None and grads[1] is not None
    assert snr_db(grads[0].clone(), grads[1]) > 40.0  # stored in 16 bits: two gradients a backward
    assert sum("read its decoded values" in message for message in caplog.messages) == 1
    assert "0.weight" in caplog.text
    before = model[0].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model[0].weight.detach().clone(), before)


@pytest.mark.parametrize("has_hook", [False, True])
def test_layers_give_no_such_warning(has_hook: bool, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = build()
    if has_hook:
        model[0].weight.register_hook(lambda grad: 2.0 * grad)  # type: ignore[no-untyped-call]
    for _ in range(2):
        model(torch.randn(16, SIZE)).square().mean().backward()
        model[0].weight.grad.add_(1.0)  # type: ignore[union-attr]
        optimizer.step()
    assert not caplog.messages


def _penalised(group: Group, level: str) -> tuple[torch.Tensor, torch.Tensor]:
    model, optimizer = build(level)
    backward(model, 2, seed=group.rank())
    assert model[0].weight.grad is not None
    grad = model[0].weight.grad.clone()
    optimizer.step()
    return grad, model[0].weight.detach().clone()


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_replicas_share_a_penalty(ranks: RankPool, level: str) -> None:
    (first, value), (second, other) = ranks.run(on_default_group, _penalised, level, num_ranks=2)
    assert torch.equal(first, second) and torch.equal(value, other)
    plain = fp8_megatron.any_model.plain_model(build(level)[0])
    for seed in range(2):
        backward(plain, 2, seed)
    expected = plain[0].weight.grad
    assert expected is not None
    assert snr_db(first, expected / 2) > 25.0  # FP8 between ranks


CHANGES: dict[str, Callable[[torch.nn.Module], object]] = {
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": spectral_norm,
    "orthogonal": parametrizations.orthogonal,
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_a_weight_that_is_computed_since_initialize_is_an_error(change: str) -> None:
    model, _ = build()
    with pytest.raises((UserError, NotImplementedError), match="before initialize"):
        CHANGES[change](model[0])
        model(torch.randn(4, SIZE))


def test_pruning_that_is_made_permanent_trains_on() -> None:
    model, optimizer = build()
    prune.l1_unstructured(model[0], "weight", 0.5)
    prune.remove(model[0], "weight")
    assert (model[0].weight == 0).float().mean() == 0.5
    before = model[0].weight.detach().clone()
    model(torch.randn(16, SIZE)).square().mean().backward()
    optimizer.step()
    assert not torch.equal(model[0].weight.detach().clone(), before)
