"""Complex parameters beside FP8 layers, as of Fourier neural operators: trained as torch's AdamW trains them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import fp8_megatron
from fp8_megatron.any_model.sharded_param import ShardedParam
from fp8_megatron.any_model.torch_optimizers import OptimizerError
from fp8_megatron.device.group import Group
from fp8_megatron.optimizer.rules.adamw import AdamW
from tests.harness.ranks import RankPool, on_default_group

SIZE = 32
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Spectral(torch.nn.Module):
    """Complex parameters with no, one and three dimensions, a complex linear layer, and an FP8 layer."""

    def __init__(self) -> None:
        super().__init__()
        self.modes = torch.nn.Parameter(torch.randn(4, SIZE, SIZE // 2 + 1, dtype=torch.cfloat) / SIZE)
        self.shift = torch.nn.Parameter(torch.randn(SIZE // 2 + 1, dtype=torch.cfloat))
        self.turn = torch.nn.Parameter(torch.randn((), dtype=torch.cfloat))
        self.mix = torch.nn.Linear(SIZE // 2 + 1, SIZE // 2 + 1, dtype=torch.cfloat)
        self.out = torch.nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = self.mix(torch.einsum("bf,csf->bf", torch.fft.rfft(x), self.modes.conj()) + self.shift)
        y: Tensor = self.out(torch.fft.irfft(self.turn * spectrum, SIZE))
        return y


def build(
    level: str, *, has_fp8: bool = True, seed: int = 0, device: str = "cpu"
) -> tuple[Spectral, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Spectral().to(device)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if has_fp8:
        model, optimizer = fp8_megatron.initialize(model, optimizer, level)
    return model, optimizer


def complex_parts(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: param for name, param in model.named_parameters() if param.is_complex()}


def give_gradients(model: torch.nn.Module, step: int) -> None:
    """The same to each model, and the second half of them on top of the first."""
    generator = torch.Generator().manual_seed(step)
    for param in complex_parts(model).values():
        for _ in range(2):
            x = torch.randn(param.shape, dtype=torch.cfloat, generator=generator).to(param.device)
            ((param * x).sum() * 3j).real.backward()


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("device", DEVICES)
def test_steps_are_those_of_torch(level: str, device: str) -> None:
    model, optimizer = build(level, device=device)
    plain, plain_optimizer = build(level, has_fp8=False, device=device)
    for step in range(4):
        for one, its_optimizer in ((model, optimizer), (plain, plain_optimizer)):
            give_gradients(one, step)
            if step == 2:
                torch.nn.utils.clip_grad_norm_(complex_parts(one).values(), 1.0)
            its_optimizer.step()
            its_optimizer.zero_grad()
    expected = complex_parts(plain)
    for name, param in complex_parts(model).items():
        torch.testing.assert_close(param, expected[name], rtol=1e-5, atol=1e-6)
    states = [one.state_dict()["state"] for one in (optimizer, plain_optimizer)]
    for index, param in enumerate(model.parameters()):
        if param.is_complex():
            for key in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(states[0][index][key], states[1][index][key], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("device", DEVICES)
def test_forward_and_backward_train_it_beside_an_fp8_layer(device: str) -> None:
    model, optimizer = build("O2", device=device)
    reported = fp8_megatron.any_model.report(model)
    assert reported.fp8 == ("out",) and reported.stays == {"mix": "its weight is complex"}
    x, losses = torch.randn(64, SIZE).to(device), []
    for _ in range(20):
        loss = (model(x) - x).square().mean()
        loss.backward()
        assert all(param.grad is not None and param.grad.is_complex() for param in complex_parts(model).values())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_state_and_values_go_through_a_checkpoint_and_a_copy() -> None:
    model, optimizer = build("O2")
    give_gradients(model, 0)
    optimizer.step()
    again, other = build("O2", seed=1)
    again.load_state_dict(model.state_dict())
    other.load_state_dict(optimizer.state_dict())
    copied = copy.deepcopy(model)
    for one, its_optimizer in ((model, optimizer), (again, other)):
        its_optimizer.zero_grad()
        with torch.no_grad():
            one.shift.mul_(2j)
        give_gradients(one, 1)
        its_optimizer.step()
    expected = complex_parts(model)
    for name, param in complex_parts(again).items():
        assert torch.equal(param, expected[name])
    assert copied.modes.is_complex() and not torch.equal(copied.modes, model.modes)


def test_a_gradient_that_is_not_finite_skips_the_step() -> None:
    model, optimizer = build("O2")
    before = model.shift.detach().clone()
    model.shift.grad = torch.full_like(model.shift, complex(0.0, torch.inf))
    optimizer.step()
    assert torch.equal(model.shift, before) and optimizer.num_skipped_steps == 1  # type: ignore[attr-defined]


def _trained(group: Group) -> dict[str, Any]:
    model, optimizer = build("O2", seed=group.rank())
    torch.manual_seed(0)
    give_gradients(model, group.rank())
    optimizer.step()
    return {name: param.detach().clone() for name, param in complex_parts(model).items()}


def test_replicas_take_the_mean(ranks: RankPool) -> None:
    first, second = ranks.run(on_default_group, _trained, num_ranks=2)
    plain, optimizer = build("O2", has_fp8=False)
    for step in range(2):
        give_gradients(plain, step)
    for param in plain.parameters():
        if param.grad is not None:
            param.grad /= 2
    optimizer.step()
    for name, param in complex_parts(plain).items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], param.detach(), rtol=1e-5, atol=1e-6)


def test_shards_of_a_complex_parameter_are_an_error() -> None:
    with pytest.raises(OptimizerError, match=r"modes is torch\.complex64: .*initialize alone, or .*view_as_real"):
        ShardedParam("modes", Spectral().modes, AdamW({}))
