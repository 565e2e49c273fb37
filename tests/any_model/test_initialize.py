"""`fp8_megatron.initialize`: training by a plain loop, and errors that name the value and the fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fp8_megatron
from fp8_megatron.any_model.optimizer import FP8Optimizer
from fp8_megatron.errors import UserError
from fp8_megatron.nn.module import FP8Linear

LEVEL_NAMES = ("O1", "O2", "O3")


def build_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.LayerNorm(64), torch.nn.GELU(), torch.nn.Linear(64, 32)
    )


def losses(model: torch.nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 40) -> list[float]:
    """A plain training loop."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 32, generator=generator)
    target = (x @ torch.randn(32, 32, generator=generator)).tanh()
    result = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = (model(x) - target).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        result.append(loss.item())
    return result


@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_a_plain_loop_trains(level: str) -> None:
    model = build_model()
    expected = losses(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    model = build_model()
    result, optimizer = fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), level)
    assert result is model and isinstance(optimizer, FP8Optimizer) and isinstance(model[0], FP8Linear)
    measured = losses(model, optimizer)
    # It falls to a tenth; FP8's noise moves it by percents (tests/any_model/test_architectures.py), a fault by more.
    assert expected[-1] < 0.1 * expected[0] and measured[-1] < 1.2 * expected[-1]
    assert optimizer.num_skipped_steps == 0


@pytest.mark.parametrize(("first", "second"), [("0", "4"), ("1", "5")], ids=["linear", "norm"])
def test_two_parameters_in_one_memory_are_refused(first: str, second: str) -> None:
    """torch trains both in that memory. Here each would get memory of its own."""
    model = torch.nn.Sequential(*build_model(), torch.nn.Linear(32, 64), torch.nn.LayerNorm(64))
    one, other = model.get_submodule(first).weight, model.get_submodule(second).weight
    other.data = one.data
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(UserError, match=rf"{first}.weight and {second}.weight are two parameters in one memory"):
        fp8_megatron.initialize(model, optimizer)
    assert not isinstance(model[0], FP8Linear)
    for parameter in (one, other):  # nobody trains them, so they stay alike
        parameter.requires_grad_(False)
    fp8_megatron.initialize(model, optimizer)


@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_state_dict_holds_the_values_that_the_model_had(level: str) -> None:
    """FP16 masters and weights: 10 mantissa bits are 2⁻¹¹ of a value."""
    model = build_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters()), level)
    for name, value in model.state_dict().items():
        assert type(value) is torch.Tensor and value.dtype is torch.float32
        torch.testing.assert_close(value, before[name], rtol=2**-11, atol=0.0 if value.ndim == 1 else 1e-7)


def _second_call(model: torch.nn.Module) -> None:
    fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters()))
    fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters()))


def _other_model(model: torch.nn.Module) -> None:
    fp8_megatron.initialize(model, torch.optim.AdamW(build_model().parameters()))


def _replaced_before(model: torch.nn.Module) -> None:
    fp8_megatron.replace_linears(model)
    fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters()), recipe="delayed")


def _with(**settings: Any) -> Callable[[torch.nn.Module], None]:
    return lambda model: fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters()), **settings)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (_second_call, "0.weight has an FP8 optimizer already: initialize is called once"),
        (_with(opt_level="O4"), r"opt_level\('O4'\) is not one of O1, O2, O3"),
        (_with(recipe="mxfp4"), r"recipe\('mxfp4'\) is not one of"),
        (_replaced_before, "has FP8 layers already: give recipe, filter and recompute_activations to"),
        (_other_model, "a parameter of shape .* that the model did not have"),
        (
            lambda model: fp8_megatron.initialize(model, torch.optim.Rprop(model.parameters(), lr=0.1)),
            "torch.optim.rprop.Rprop: FP8 state needs one of torch.optim.adam.Adam",
        ),
        (lambda model: _with()(torch.nn.DataParallel(model)), "the model is a DataParallel: call initialize first"),
        (
            lambda model: fp8_megatron.initialize(model, torch.optim.AdamW([*model.parameters(), model[0].weight])),
            "the optimizer holds 0.weight twice",
        ),
        (
            lambda model: _with()(torch.nn.Sequential(model, torch.nn.LazyLinear(8))),
            "1.weight has no shape yet: call the model once",
        ),
        (_with(filter="lm_head"), r"filter\('lm_head'\) is not a function: give one of \(name, layer\)"),
        (_with(gradient_accumulation_steps=0), r"gradient_accumulation_steps\(0\) is less than 1: leave it out"),
        (_with(gradient_accumulation_steps="2"), r"gradient_accumulation_steps\('2'\) is not a whole number"),
        (_with(gradient_accumulation_steps=2.5), r"gradient_accumulation_steps\(2.5\) is not a whole number"),
        (_with(process_group=-100), r"process_group\(-100\) is no process group that has this rank: give one of"),
        (
            lambda model: fp8_megatron.initialize(torch.optim.AdamW(model.parameters()), model),  # type: ignore[type-var]
            r"model has the type AdamW: call initialize\(model, optimizer\) with a torch.nn.Module",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_errors_name_the_value_and_the_fix(call: Callable[[torch.nn.Module], None], message: str) -> None:
    with pytest.raises((UserError, ValueError), match=message):
        call(build_model())


@pytest.mark.parametrize("compiled", [torch.jit.script, lambda model: torch.jit.trace(model, torch.randn(2, 32))])
def test_what_torchscript_has_compiled_is_an_error(compiled: Callable[[torch.nn.Module], Any]) -> None:
    """A part without parameters stays as it is."""
    for model, name in (
        (compiled(build_model()), "the model"),
        (torch.nn.Sequential(torch.nn.Linear(32, 64), compiled(build_model())), "1"),
    ):
        with pytest.raises(UserError, match=rf"^{name} is a \w+, whose code .*: give the module that torch\.jit"):
            _with()(model)
    _with()(torch.nn.Sequential(torch.nn.Linear(32, 64), torch.jit.script(torch.nn.ReLU())))


@pytest.mark.parametrize("saves_fp8", [False, True])
def test_state_that_is_loaded_too_early_is_an_error(saves_fp8: bool) -> None:
    """`initialize` stands between building the optimizer and loading its state."""
    model = build_model()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
    if saves_fp8:
        model, optimizer = fp8_megatron.initialize(model, optimizer)
    losses(model, optimizer, num_steps=1)
    state = optimizer.state_dict()
    resumed = build_model()
    early = torch.optim.AdamW(resumed.parameters())
    early.load_state_dict(state)
    with pytest.raises(UserError, match=r"has state of \d+ parameters: call initialize before .* load the state into"):
        fp8_megatron.initialize(resumed, early)
    assert type(resumed[0]) is torch.nn.Linear
    _, right = fp8_megatron.initialize(resumed, torch.optim.AdamW(resumed.parameters()))
    right.load_state_dict(state)
    assert float(right.state_dict()["state"][0]["step"]) == 1.0


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_the_default_device_changes_nothing(recipe: Any) -> None:
    """On a GPU it is often "cuda". Here it is one whose values nobody can read."""
    x, found = torch.randn(16, 32), []
    for device in ("cpu", "meta"):
        model = build_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with torch.device(device):
            model, optimizer = fp8_megatron.initialize(model, optimizer, recipe=recipe)
            for _ in range(3):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                optimizer.load_state_dict(optimizer.state_dict())
        found.append(model[0].plain_weight())
    assert torch.equal(*found)


def test_another_default_dtype_is_an_error_that_leaves_the_model_alone() -> None:
    model = build_model().bfloat16()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with pytest.raises(
            UserError, match=r"default dtype is torch.bfloat16: call .*set_default_dtype\(torch.float32\)"
        ):
            fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters()))
    finally:
        torch.set_default_dtype(before)
    assert type(model[0]) is torch.nn.Linear


@pytest.mark.parametrize("builds_first", [True, False])
def test_layers_of_another_optimizer_stay(builds_first: bool) -> None:
    """As where Muon has the matrices. Its weights were replaced, and it trained nothing."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3)), torch.nn.MultiheadAttention(32, 2))
    frozen = model[2].requires_grad_(False)
    matrices = [model[0].weight, model[3].in_proj_weight]
    others = [param for param in model.parameters() if all(param is not one for one in matrices)]
    muon = torch.optim.SGD(matrices, lr=0.1) if builds_first else None
    model, optimizer = fp8_megatron.initialize(model, torch.optim.AdamW(others))
    muon = muon or torch.optim.SGD(matrices, lr=0.1)
    assert [type(layer) is FP8Linear for layer in model[:3]] == [False, True, True] and model[2] is frozen
    reason = "its weight is trained, and not by this optimizer"
    assert fp8_megatron.any_model.report(model).stays == dict.fromkeys(("0", "3", "3.out_proj"), reason)
    before = [matrix.detach().clone() for matrix in matrices]
    x = model[:3](torch.randn(8, 32, generator=torch.Generator().manual_seed(1)))
    model[3](x, x, x)[0].square().mean().backward()
    muon.step()
    optimizer.step()
    assert all(not torch.equal(matrix, old) for matrix, old in zip(matrices, before, strict=True))


@pytest.mark.parametrize("keeps", [True, False])
def test_a_list_of_old_weights_is_warned_of(keeps: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Clipping it would leave the model's weights out."""
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.LayerNorm(32), torch.nn.Linear(32, 32))
    params = list(model.parameters())
    user, steps = torch.optim.AdamW(params), []
    user.register_step_pre_hook(lambda *_: steps.append(1))
    model, optimizer = fp8_megatron.initialize(model, user, recompute_activations=True)
    optimizer.register_step_pre_hook(lambda *_: steps.append(2))
    if not keeps:
        params = list(model.parameters())
    for _ in range(2):
        model(torch.randn(8, 32)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
    assert steps == [1, 2, 1, 2]
    logged = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    warnings = [message for message in logged if "recompute_activations" not in message]
    assert len(warnings) == keeps and len(logged) == 1 + keeps
    assert not keeps or "2 weights are still held as they were before FP8 (0.weight, 2.weight)" in warnings[0]
