"""SGD, Lion and Muon for any model: torch's numbers, state dicts, and ``fully_shard``."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import fp8_megatron
from fp8_megatron.any_model.optimizer import FP8Optimizer
from fp8_megatron.any_model.torch_optimizers import OptimizerError
from fp8_megatron.errors import UserError
from fp8_megatron.quantization.scaled_tensor import ScaledTensor
from fp8_megatron.quantization.stats import snr_db
from tests.any_model.test_fsdp_optimizer import build as build_sharded
from tests.any_model.test_fsdp_optimizer import train_step, whole_weights
from tests.harness.fp8_models import assert_equal, masters
from tests.harness.ranks import RankPool, on_default_group

Params = Iterable[torch.nn.Parameter]


class Lion(torch.optim.Optimizer):
    """What `initialize` reads of lion-pytorch's optimizer."""

    def __init__(self, params: Params, lr: float = 1e-3, decoupled_weight_decay: bool = False) -> None:
        self.decoupled_wd = decoupled_weight_decay
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.1})


Lion.__module__ = "lion_pytorch.lion_pytorch"


def sgd(params: Params) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1)


def dampened(params: Params) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-2, momentum=0.8, dampening=0.4)


MAKERS: dict[str, Callable[[Params], torch.optim.Optimizer]] = {"sgd": sgd, "dampened": dampened, "lion": Lion}


def small(*, in_fp8: bool) -> torch.nn.Sequential:
    """Layers of whole FP8 sizes, or such that stay in FP32."""
    width = 64 if in_fp8 else 5
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.LayerNorm(width), torch.nn.Linear(width, width))


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        width = model[0].in_features  # type: ignore[index]
        x, cotangent = torch.randn(2, 32, width, generator=generator)
        optimizer.zero_grad()
        (model(x).float() * cotangent).mean().backward()
        optimizer.step()


@pytest.mark.parametrize("name", ["sgd", "dampened"])
def test_plain_parameters_move_as_torchs(name: str) -> None:
    theirs, ours = small(in_fp8=False), small(in_fp8=False)
    optimizer = MAKERS[name](theirs.parameters())
    ours, fp8 = fp8_megatron.initialize(ours, MAKERS[name](ours.parameters()), "O1")
    train(theirs, optimizer, range(5))
    train(ours, fp8, range(5))
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def muon(params: Params) -> torch.optim.Optimizer:
    return torch.optim.Muon([param for param in params if param.ndim == 2], lr=1e-2, weight_decay=0.1)


def matched(params: Params) -> torch.optim.Optimizer:
    """Wide and tall matrices have other factors under torch's two rules."""
    matrices = [param for param in params if param.ndim == 2]
    return torch.optim.Muon(matrices, lr=1e-2, momentum=0.9, nesterov=False, adjust_lr_fn="match_rms_adamw")


@pytest.mark.parametrize("maker", [muon, matched])
def test_matrices_move_as_torchs_muon_moves_them(maker: Callable[[Params], torch.optim.Optimizer]) -> None:
    """Both round to BF16, at other places. The coefficients multiply a small singular value by 3.44⁵ = 480, and its
    rounding of 2⁻⁹ likewise: its direction, one of five, may be another. Measured 21 dB or more, and 13 with the wrong
    form of the momentum. Nothing else moves: the rest is another optimizer's."""
    theirs, ours = small(in_fp8=False), small(in_fp8=False)
    optimizer, start = maker(theirs.parameters()), [param.detach().clone() for param in theirs.parameters()]
    ours, fp8 = fp8_megatron.initialize(ours, maker(ours.parameters()), "O1")
    train(theirs, optimizer, range(5))
    train(ours, fp8, range(5))
    for mine, other, before in zip(ours.parameters(), theirs.parameters(), start, strict=True):
        if mine.ndim == 2:
            assert snr_db(mine.detach() - before, other.detach() - before) > 18.0
        else:
            assert torch.equal(mine, before)


def test_muon_trains_fp8_layers_beside_an_adamw_of_the_rest() -> None:
    model = small(in_fp8=True)
    rest = torch.optim.AdamW([param for param in model.parameters() if param.ndim < 2], lr=1e-2)
    model, optimizer = fp8_megatron.initialize(model, muon(model.parameters()), "O3")
    assert isinstance(model[0].weight, ScaledTensor)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    train(model, optimizer, range(2))
    rest.step()
    after = model.state_dict()
    assert all(not torch.equal(after[name], value) for name, value in before.items())
    assert optimizer.storage_bytes["momentum_buffer"] == 2 * 64 * 64  # a byte an element


def with_adamw(params: Params) -> list[torch.optim.Optimizer]:
    params = list(params)
    return [muon(params), torch.optim.AdamW([param for param in params if param.ndim < 2], lr=1e-2, betas=(0.8, 0.9))]


def test_two_optimizers_move_as_torchs() -> None:
    """Given the same gradients. Schedulers that hold the given optimizers set the rates of the one that is returned."""
    theirs, ours = small(in_fp8=False), small(in_fp8=False)
    optimizers, start = with_adamw(theirs.parameters()), [param.detach().clone() for param in theirs.parameters()]
    given = with_adamw(ours.parameters())
    ours, fp8 = fp8_megatron.initialize(ours, given, "O1")
    schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (*optimizers, *given)]
    generator = torch.Generator().manual_seed(2)
    for _ in range(4):
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            other.grad = torch.randn(mine.shape, generator=generator)
            mine.grad = other.grad.clone()
        for one in (*optimizers, fp8, *schedules):
            one.step()
    for mine, other, before in zip(ours.parameters(), theirs.parameters(), start, strict=True):
        if mine.ndim == 2:
            assert snr_db(mine.detach() - before, other.detach() - before) > 18.0
        else:
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_two_optimizers_have_one_state_and_skip_together() -> None:
    def build() -> tuple[torch.nn.Module, FP8Optimizer]:
        model = small(in_fp8=True)
        return fp8_megatron.initialize(model, with_adamw(model.parameters()), "O3", recipe="delayed")

    model, optimizer = build()
    train(model, optimizer, range(3))
    state = optimizer.state_dict()
    assert [set(state["state"][number]) & {"exp_avg", "momentum_buffer_payload"} for number in (0, 2)] == [
        {"momentum_buffer_payload"},
        {"exp_avg"},
    ]
    other, resumed = build()
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(state)
    train(model, optimizer, range(3, 6))
    train(other, resumed, range(3, 6))
    before = masters(model)
    assert_equal(before, masters(other))
    model(torch.full((2, 64), torch.inf)).sum().backward()
    optimizer.step()
    assert_equal(masters(model), before)
    assert optimizer.num_skipped_steps == 1
    with pytest.raises(ValueError, match=r"param_groups\[1\] has .* and no betas: it is another optimizer's"):
        resumed.load_state_dict({**state, "param_groups": [state["param_groups"][0]] * 2})


def replicated_run(group: Any) -> dict[str, Tensor]:
    model = small(in_fp8=True)
    model, optimizer = fp8_megatron.initialize(model, with_adamw(model.parameters()), "O3", process_group=group)
    train(model, optimizer, range(4))
    return model.state_dict()


def test_two_optimizers_over_replicas_have_the_bits_of_one_rank(ranks: RankPool) -> None:
    (alone,) = ranks.run(on_default_group, replicated_run, num_ranks=1)
    for num_ranks in (2, 4):
        for found in ranks.run(on_default_group, replicated_run, num_ranks=num_ranks):
            assert_equal(found, alone)


def test_a_matrix_that_is_unfrozen_has_its_own_rule() -> None:
    model = small(in_fp8=True)
    model[2].weight.requires_grad_(False)
    model, optimizer = fp8_megatron.initialize(model, with_adamw(model.parameters()), "O3")
    train(model, optimizer, range(1))
    before = model.state_dict()["2.weight"].clone()
    model[2].weight.requires_grad_()
    train(model, optimizer, range(1, 3))
    assert not torch.equal(model.state_dict()["2.weight"], before)
    assert "momentum_buffer_payload" in optimizer.state_dict()["state"][1]


def test_shares_of_two_optimizers_are_checked() -> None:
    def initialize(*optimizers: torch.optim.Optimizer) -> FP8Optimizer:
        return fp8_megatron.initialize(model, optimizers)[1]

    model = small(in_fp8=True)
    matrices, rest = with_adamw(model.parameters())
    with pytest.raises(OptimizerError, match=r"optimizer\[0\] and optimizer\[1\] both hold 0.weight: give it to one"):
        initialize(matrices, torch.optim.AdamW(model.parameters()))
    with pytest.raises(OptimizerError, match=r"none of the optimizers holds 2.weight: give them to one"):
        initialize(torch.optim.Muon([model[0].weight]), rest)
    with pytest.raises(OptimizerError, match="optimizer is empty"):
        initialize()
    handles = [one.register_step_pre_hook(lambda *_: None) for one in (matrices, rest)]
    with pytest.raises(OptimizerError, match="several of the optimizers have hooks"):
        initialize(matrices, rest)
    handles[0].remove()
    optimizer = initialize(matrices, rest)
    with pytest.raises(OptimizerError, match="no group says whose it is"):
        optimizer.add_param_group({"params": [model[0].weight]})
    with pytest.raises(UserError, match="is an FP8Optimizer already"):
        fp8_megatron.initialize(small(in_fp8=True), [optimizer, rest])


def test_what_is_no_matrix_is_refused() -> None:
    model = small(in_fp8=True)
    _, optimizer = fp8_megatron.initialize(model, muon(model.parameters()), "O3")
    with pytest.raises(OptimizerError, match=r"1.weight has shape \(64,\), and Muon takes matrices"):
        optimizer.add_param_group({"params": [model[1].weight]})


@pytest.mark.parametrize("name", [*MAKERS, "muon"])
@pytest.mark.parametrize("level", ["O1", "O3"])
def test_a_resumed_run_goes_on_bit_for_bit(name: str, level: str) -> None:
    def build() -> tuple[torch.nn.Sequential, FP8Optimizer]:
        model = small(in_fp8=True)
        model, optimizer = fp8_megatron.initialize(model, {**MAKERS, "muon": muon}[name](model.parameters()), level)
        return model, optimizer

    model, optimizer = build()
    train(model, optimizer, range(3))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, optimizer, range(3, 6))
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed, other = build()
    train(resumed, other, range(7, 8))
    resumed.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    train(resumed, other, range(3, 6))
    assert_equal(masters(resumed), masters(model))


def test_takes_the_state_of_torchs_sgd() -> None:
    theirs, ours = small(in_fp8=False), small(in_fp8=False)
    optimizer = dampened(theirs.parameters())
    train(theirs, optimizer, range(3))
    ours, fp8 = fp8_megatron.initialize(ours, dampened(ours.parameters()), "O1")
    ours.load_state_dict(theirs.state_dict())
    fp8.load_state_dict(optimizer.state_dict())
    train(theirs, optimizer, range(3, 6))
    train(ours, fp8, range(3, 6))
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_state_of_another_optimizer_is_refused() -> None:
    model = small(in_fp8=False)
    adam = torch.optim.AdamW(model.parameters())
    train(model, adam, range(1))
    _, optimizer = fp8_megatron.initialize(model, sgd(model.parameters()), "O1")
    with pytest.raises(ValueError, match="and no momentum: it is another optimizer's"):
        optimizer.load_state_dict(adam.state_dict())


def test_what_a_rule_does_not_do_is_refused() -> None:
    model = small(in_fp8=False)
    with pytest.raises(UserError, match="divides the decay by lr"):
        fp8_megatron.initialize(model, Lion(model.parameters(), decoupled_weight_decay=True), "O1")
    with pytest.raises(OptimizerError, match="leave maximize out"):
        fp8_megatron.initialize(model, torch.optim.SGD(model.parameters(), maximize=True), "O1")


SHARDED: dict[str, Any] = {**MAKERS, "muon": with_adamw}


def sharded_run(group: Any, name: str, folder: str) -> tuple[list[float], dict[str, Tensor]]:
    """Three steps, saved; three more."""
    model, optimizer = build_sharded("O3", torch.bfloat16, optimizer_of=SHARDED[name])
    for step in range(3):
        train_step(model, optimizer, step)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    return [train_step(model, optimizer, step) for step in range(3, 6)], whole_weights(model)


def sharded_resume(group: Any, name: str, folder: str) -> tuple[list[float], dict[str, Tensor]]:
    model, optimizer = build_sharded("O3", torch.bfloat16, optimizer_of=SHARDED[name])
    train_step(model, optimizer, 7)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return [train_step(model, optimizer, step) for step in range(3, 6)], whole_weights(model)


@pytest.mark.parametrize(("name", "num_ranks"), [("sgd", 2), ("lion", 2), ("muon", 2), ("muon", 4)])
def test_shards_train_and_resume_bit_for_bit(ranks: RankPool, tmp_path: Path, name: str, num_ranks: int) -> None:
    """Muon's matrices are whole on their owners, also those of 50 rows over four ranks."""
    args = (name, str(tmp_path))
    losses, weights = ranks.run(on_default_group, sharded_run, *args, num_ranks=num_ranks)[0]
    alone, alone_weights = ranks.run(on_default_group, sharded_run, name, str(tmp_path / "one"), num_ranks=1)[0]
    assert alone == losses and all(torch.equal(alone_weights[key], value) for key, value in weights.items())
    for resumed, resumed_weights in ranks.run(on_default_group, sharded_resume, *args, num_ranks=num_ranks):
        assert resumed == losses
        assert all(torch.equal(resumed_weights[key], value) for key, value in weights.items())
