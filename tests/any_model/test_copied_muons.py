"""Muons that are copied as a file: Jordan's, by their classes' names and the fields of their groups; nanochat's not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fp8_megatron
from fp8_megatron.errors import UserError
from fp8_megatron.quantization.stats import snr_db
from tests.optimizer.test_muon import exact

Groups = list[dict[str, Any]]


def jordans(name: str) -> Any:
    """A class with his fields, in float64, and the polar factor by singular values."""

    def init(self: Any, params: Any, **numbers: float) -> None:
        defaults = {} if name.endswith("Adam") else {"lr": 0.02, "weight_decay": 0.0, "momentum": 0.95, **numbers}
        torch.optim.Optimizer.__init__(self, params, defaults)

    @torch.no_grad()
    def step(self: Any) -> None:
        for group in self.param_groups:
            move = muon_step if group["use_muon"] else adam_step
            for param in group["params"]:
                update = move(param.grad.double(), self.state[param], group)
                param.copy_(param.double() * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * update)

    return type(name, (torch.optim.Optimizer,), {"__init__": init, "step": step})


def muon_step(grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    beta, (rows, columns) = group["momentum"], grad.shape
    average = state["average"] = beta * state.get("average", torch.zeros_like(grad)) + (1 - beta) * grad
    return exact(beta * average + (1 - beta) * grad, "simple") * max(1.0, rows / columns) ** 0.5


def adam_step(grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    step = state["step"] = state.get("step", 0) + 1
    moments = []
    for key, beta, new in zip(("first", "second"), group["betas"], (grad, grad.square()), strict=True):
        state[key] = beta * state.get(key, torch.zeros_like(grad)) + (1 - beta) * new
        moments.append(state[key] / (1 - beta**step))
    return moments[0] / (moments[1].sqrt() + group["eps"])


Muon, SingleDeviceMuon = jordans("Muon"), jordans("SingleDeviceMuon")
MuonWithAuxAdam, MuonAdamW = jordans("MuonWithAuxAdam"), jordans("MuonAdamW")


def model_of() -> torch.nn.Sequential:
    """Tall and wide matrices that stay in FP32."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(20, 36), torch.nn.GELU(), torch.nn.Linear(36, 20))


def groups_of(model: torch.nn.Module) -> Groups:
    matrices = [param for param in model.parameters() if param.ndim == 2]
    rest = [param for param in model.parameters() if param.ndim < 2]
    muon = {"params": matrices, "lr": 0.05, "momentum": 0.9, "weight_decay": 0.3, "use_muon": True}
    return [
        {"params": rest, "lr": 0.04, "betas": (0.8, 0.95), "eps": 1e-10, "weight_decay": 0.2, "use_muon": False},
        muon,
    ]


def test_jordans_muon_with_adam_moves_as_his() -> None:
    """BF16 rounds the polar factor to 2⁻⁹ a step: 30 dB of five updates, as in tests/optimizer/test_muon.py. A scale or
    momentum of another convention leaves less than 20."""
    theirs, ours = model_of(), model_of()
    optimizer, start = MuonWithAuxAdam(groups_of(theirs)), [param.detach().clone() for param in theirs.parameters()]
    given = MuonWithAuxAdam(groups_of(ours))
    schedule = torch.optim.lr_scheduler.ExponentialLR(given, 0.5)
    own_schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    ours, fp8 = fp8_megatron.initialize(ours, given, "O1")
    generator = torch.Generator().manual_seed(2)
    for _ in range(5):
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            other.grad = torch.randn(mine.shape, generator=generator)
            mine.grad = other.grad.clone()
        for one in (optimizer, fp8, schedule, own_schedule):
            one.step()
    for mine, other, before in zip(ours.parameters(), theirs.parameters(), start, strict=True):
        if mine.ndim == 2:
            assert snr_db(mine.detach() - before, other.detach() - before) > 28.0
        else:
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [Muon, SingleDeviceMuon])
def test_jordans_muon_alone_takes_groups_later(kind: Any) -> None:
    model = model_of()
    fp8 = fp8_megatron.initialize(model, kind([model[0].weight], momentum=0.9), "O1")[1]
    fp8.add_param_group({"params": [model[2].weight]})
    added = fp8.param_groups[1]
    assert (added["momentum"], added["ns_steps"], added["nesterov"]) == (0.9, 5, True)
    assert added["ns_coefficients"] == (3.4445, -4.7750, 2.0315) and added["adjust_lr_fn"] == "original"


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (
            lambda model: MuonAdamW([{**groups_of(model)[1], "kind": "muon", "ns_steps": 5, "beta2": 0.9}]),
            r"MuonAdamW: nanochat's has a second moment \(NorMuon\), .* which this Muon does not do: give ",
        ),
        (
            lambda model: MuonWithAuxAdam([{**groups_of(model)[1], "beta2": 0.9, "wd": 0.1}]),
            r"param_groups\[0\] has beta2, wd, which is not read: take torch's Muon",
        ),
        (
            lambda model: MuonWithAuxAdam([{**groups_of(model)[0], "momentum": 0.9}]),
            r"param_groups\[0\] has momentum, which is not read",
        ),
        (
            lambda model: MuonWithAuxAdam([{"params": [model[0].weight], "lr": 0.1, "use_muon": True}]),
            r"param_groups\[0\] has no momentum: take torch's Muon",
        ),
        (lambda model: Muon(list(model.parameters())), r"0\.bias has shape \(36,\), and Muon takes matrices"),
    ],
)
def test_what_the_rule_does_not_do_is_said(optimizer: Any, message: str) -> None:
    model = model_of()
    with pytest.raises(UserError, match=message):
        fp8_megatron.initialize(model, optimizer(model), "O1")


def test_a_muon_of_a_library_is_no_copy() -> None:
    """emerging_optimizers' has the same fields and other coefficients, and is derived from a class of its own."""

    kind = type("Muon", (SingleDeviceMuon,), {})
    model = model_of()
    with pytest.raises(UserError, match=r"Muon: FP8 state needs one of .*torch.optim.Muon"):
        fp8_megatron.initialize(model, kind([model[0].weight]), "O1")
