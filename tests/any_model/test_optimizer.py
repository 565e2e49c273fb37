"""FP8Optimizer on one rank: torch's Adam(W), param groups, unused parameters, written values, GradScaler."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from fp8_megatron.any_model.build import build_optimizer
from fp8_megatron.any_model.initialize import initialize
from fp8_megatron.any_model.optimizer import FP8Optimizer
from fp8_megatron.any_model.torch_optimizers import OptimizerError
from fp8_megatron.dtypes import StorageDtype
from fp8_megatron.nn.module import DEFAULT_RECIPE, FP8Linear
from fp8_megatron.quantization.scaled_tensor import ScaledTensor
from fp8_megatron.quantization.stats import snr_db
from tests.harness.fp8_models import master_of

LEVELS = ["O1", "O2", "O3"]


class Plain(torch.nn.Module):
    """Parameters that stay as they are: a matrix, vectors, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in {"matrix": (48, 40), "bias": (200,), "norm": (90,), "scalar": ()}.items():
            self.register_parameter(name, torch.nn.Parameter(torch.randn(shape, generator=generator)))


class Linears(torch.nn.Module):
    """Two FP8 linear layers and a norm; `old` are the FP32 weights that they replace."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        linears = [torch.nn.Linear(64, 96), torch.nn.Linear(96, 32)]
        self.first, self.second = (FP8Linear(linear.in_features, linear.out_features) for linear in linears)
        for layer, linear in zip((self.first, self.second), linears, strict=True):
            bias = torch.nn.Parameter(linear.bias.detach().bfloat16())
            layer.take(linear.weight, bias, recipe=DEFAULT_RECIPE, weight=StorageDtype.FP8)
        self.norm = torch.nn.LayerNorm(96)
        self.old = {linear.weight: self[index].weight for index, linear in enumerate(linears)}

    def __getitem__(self, index: int) -> FP8Linear:
        return (self.first, self.second)[index]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.norm(self.first(x.bfloat16()).float()).bfloat16()).float()
        return y


def linears(level: str, *, lr: float = 1e-2, **settings: float) -> tuple[Linears, FP8Optimizer]:
    module = Linears()
    optimizer = torch.optim.AdamW(module.parameters(), lr=lr, **settings)  # type: ignore[arg-type]
    # The user's optimizer holds the weights that are in the model before they are replaced.
    back = {new: old for old, new in module.old.items()}
    for group in optimizer.param_groups:
        group["params"] = [back.get(param, param) for param in group["params"]]
    return module, build_optimizer(module, optimizer, module.old, level)


def inputs(seed: int = 1) -> Tensor:
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(seed))


def loss_of(module: Linears, seed: int = 1) -> Tensor:
    cotangent = torch.randn(32, 32, generator=torch.Generator().manual_seed(1000 + seed))
    return (module(inputs(seed)) * cotangent).sum() / 32


def gradients(module: torch.nn.Module, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(10 + step)
    return {name: torch.randn(param.shape, generator=generator) for name, param in module.named_parameters()}


def train(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, is_used: Callable[[str, int], bool], num_steps: int = 12
) -> None:
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    for step in range(num_steps):
        optimizer.zero_grad()
        given = gradients(module, step)
        for name, param in module.named_parameters():
            if is_used(name, step):
                param.grad = given[name]
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
@pytest.mark.parametrize("skips", [False, True], ids=["all_used", "some_unused"])
def test_fp32_parameters_are_updated_as_by_torch(kind: type[torch.optim.Adam], skips: bool) -> None:
    """At O1 all state of FP32 parameters is FP32. Both sides round each of 12 updates of at most lr (0.1 in sum
    0.1 · Σ 1/n = 0.31) a few times: 12 · 4 · 2⁻²⁴ · (|p| ≤ 4) = 1.1e-5."""

    def is_used(name: str, step: int) -> bool:
        return not skips or ((name != "norm" or step > 3) and (name != "matrix" or step % 3 > 0))

    ours, theirs = Plain(), Plain()
    outcomes = []
    for module in (ours, theirs):
        groups = [
            {"params": [module.matrix, module.norm], "weight_decay": 0.5},
            {"params": [module.bias, module.scalar], "lr": 3e-2, "betas": (0.8, 0.99), "weight_decay": 0.0},
        ]
        optimizer: torch.optim.Optimizer = kind(groups, lr=0.1)
        if module is ours:
            optimizer = build_optimizer(module, optimizer, {}, "O1")
        train(module, optimizer, is_used)
        outcomes.append({name: param.detach().clone() for name, param in module.named_parameters()})
    for name, expected in outcomes[1].items():
        assert torch.allclose(outcomes[0][name], expected, rtol=0, atol=1.1e-5), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_keep_their_dtype_beside_a_master(dtype: torch.dtype) -> None:
    """Steps of 2⁻¹² · |p| are lost in BF16 weights, not in masters: 40 equal ones move the weight by 1%."""
    module = Plain().to(dtype)
    before = {name: param.detach().clone() for name, param in module.named_parameters()}
    optimizer = build_optimizer(module, torch.optim.AdamW(module.parameters(), lr=2.0**-12, weight_decay=0.0), {}, "O3")
    for _ in range(40):
        for param in module.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
    for name in ("matrix", "bias"):
        param = module.get_parameter(name)
        assert param.dtype == dtype
        # Adam's steps with a constant gradient are lr each, 40 · 2⁻¹² = 2⁻⁶·⁷ in all. Each of 200 or more weights
        # rounds by 2⁻⁹ of itself at most, so their mean by 2⁻⁹ / √200 = 2⁻¹³, 1.3% of the sum.
        moved = (before[name].float() - param.detach().float()).mean().item()
        assert moved == pytest.approx(40 * 2.0**-12, rel=0.05), name


@pytest.mark.parametrize("level", LEVELS)
def test_linear_weights_follow_adamw_in_float64(level: str) -> None:
    """Gradients enter in E4M3 with a scale for each 128: an error of 2⁻⁴/√3 at most of each, 31 dB. Adam's first
    update is lr · sign(g) whatever g's rounding, and moments in FP8 keep 2 to 3 bits: 20 dB of the total change."""
    module, optimizer = linears(level, lr=1e-3, weight_decay=0.1)
    names = ["first.weight", "second.weight"]
    params = dict(module.named_parameters())
    start = {name: params[name].owner.value().double() for name in names}  # type: ignore[attr-defined]
    copies = [torch.nn.Parameter(start[name].clone()) for name in names]
    reference = torch.optim.AdamW(copies, lr=1e-3, weight_decay=0.1)
    for step in range(10):
        given = gradients(module, step)
        for name, copied in zip(names, copies, strict=True):
            copied.grad = given[name].double()
            params[name].grad = given[name].to(params[name].dtype)
        for param in (module.norm.weight, module.first.bias):
            param.grad = torch.zeros_like(param)
        reference.step()
        optimizer.step()
    for name, copied in zip(names, copies, strict=True):
        change = params[name].owner.value().double() - start[name]  # type: ignore[attr-defined]
        assert snr_db(change, copied.detach() - start[name]) > 15.0, name


def test_a_closure_computes_the_loss() -> None:
    module, optimizer = linears("O2")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(module)
        loss.backward()
        return loss

    before = module.first.weight.dequantize()
    assert torch.is_tensor(optimizer.step(closure))
    assert not torch.equal(module.first.weight.dequantize(), before)


@pytest.mark.parametrize("level", LEVELS)
def test_a_step_with_a_gradient_that_is_not_finite_changes_nothing(level: str) -> None:
    module, optimizer = linears(level)
    loss_of(module).backward()
    optimizer.step()
    before = [master_of(param) for param in module.parameters()]
    optimizer.zero_grad()
    (loss_of(module) * math.inf).backward()
    optimizer.step()
    assert optimizer.num_skipped_steps == 1
    for param, expected in zip(module.parameters(), before, strict=True):
        assert torch.equal(master_of(param), expected)
    optimizer.zero_grad()
    loss_of(module).backward()
    optimizer.step()
    assert optimizer.num_skipped_steps == 1
    assert not torch.equal(master_of(module.first.weight), before[0])


@pytest.mark.parametrize("role", ["input", "output gradient"])
@pytest.mark.parametrize("scales_rows", [False, True])
def test_a_value_that_a_delayed_scale_clamps_skips_the_step_and_is_named(role: str, scales_rows: bool) -> None:
    """Behind the clamped inf everything is finite: without a name nobody would know why nothing moves.

    With a gradient scale for each row, as a head has, it is not clamped. It spreads to the layers behind.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3)))
    optimizer: FP8Optimizer
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters()), recipe="delayed")
    model[1].scales_grad_rows = scales_rows
    spoils = False

    def spoil(value: Tensor) -> Tensor:
        value = value.clone()
        value[3, 5] = math.inf if spoils else value[3, 5]
        return value

    def backward() -> None:
        optimizer.zero_grad()
        hidden = model[0](torch.randn(64, 32))
        y = model[1](spoil(hidden) if role == "input" else hidden)
        if role != "input":
            y.register_hook(spoil)
        model[2](y).square().mean().backward()

    for step in range(4):
        spoils = step == 2
        before = [master_of(param) for param in model.parameters()]
        backward()
        optimizer.step()
        moved = [not torch.equal(master_of(p), old) for p, old in zip(model.parameters(), before, strict=True)]
        assert moved == [step != 2] * 6
        assert optimizer.num_skipped_steps == int(step >= 2)
        assert optimizer.skip_cause == (f"not finite: {role} of 1" if step >= 2 else None)
    optimizer.zero_grad()
    model(torch.randn(64, 32)).square().mean().backward()
    model[2].bias.grad.fill_(math.nan)
    optimizer.step()
    assert optimizer.num_skipped_steps == 2 and optimizer.skip_cause is None, "no cast was bad"


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_written_values_are_not_reverted(level: str, dtype: torch.dtype) -> None:
    """A written value is the next step's start. With a learning rate of 0 the step changes nothing."""
    module, optimizer = linears(level, lr=0.0)
    if dtype is torch.bfloat16:
        module = Plain().bfloat16()  # type: ignore[assignment]
        optimizer = build_optimizer(module, torch.optim.AdamW(module.parameters(), lr=0.0), {}, level)
    written = {}
    for index, (name, param) in enumerate(module.named_parameters()):
        value = torch.randn(param.shape, generator=torch.Generator().manual_seed(index))
        # Numbers that every storage holds: 1, 1.25, 1.5, 1.75 times powers of two, of both signs.
        value = torch.ldexp(torch.round(value * 4) / 4, torch.tensor(-2)).to(param.dtype)
        written[name] = value
        if index % 3 == 2 and not isinstance(param, ScaledTensor):
            param.data = value.clone()
            continue
        with torch.no_grad():
            param.copy_(value)
    for param in module.parameters():
        param.grad = torch.ones_like(param.dequantize() if isinstance(param, ScaledTensor) else param).to(param.dtype)
    optimizer.step()
    for name, param in module.named_parameters():
        assert torch.equal(master_of(param).to(written[name].dtype), written[name]), name


@pytest.mark.parametrize("level", LEVELS)
def test_weights_that_are_perturbed_and_restored_around_a_backward(level: str) -> None:
    """As by SAM. The next step starts from the master's bits."""
    (module, optimizer), (twin, _) = linears(level), linears(level)
    loss_of(module).backward()
    params = list(module.parameters())
    aside = [param.data.clone() for param in params]
    with torch.no_grad():
        for param in params:
            assert param.grad is not None
            param.add_(param.grad.clone(), alpha=0.05)
            param.data.clamp_(-0.125, 0.125)
    for layer, other in zip((module.first, module.second), (twin.first, twin.second), strict=True):
        assert layer.weight.grad is not None
        moved = (master_of(other.weight) + 0.05 * layer.weight.grad.clone()).clamp(-0.125, 0.125)
        # The weight advertises BF16, in which the sum is computed.
        torch.testing.assert_close(master_of(layer.weight), moved, rtol=2**-7, atol=2**-13)
    optimizer.zero_grad()
    loss_of(module).backward()
    for param, value in zip(params, aside, strict=True):
        param.data = value
    for param, value in zip(params, aside, strict=True):
        assert torch.equal(master_of(param), value.float())


def test_a_value_that_comes_back_in_16_bits_keeps_the_master() -> None:
    module, _ = linears("O3")
    master = module.first.weight.owner.value()  # type: ignore[union-attr]
    before = module.first.weight.dequantize()
    assert not torch.equal(master, master.bfloat16().float())
    with torch.no_grad():
        module.first.weight.copy_(master.bfloat16())
    assert torch.equal(module.first.weight.owner.value(), master)  # type: ignore[union-attr]
    assert torch.equal(module.first.weight.dequantize(), before)


@pytest.mark.parametrize("level", LEVELS)
def test_parameters_are_unfrozen_between_steps(level: str) -> None:
    """They train as in a group that is added behind their first backward, bit for bit, and a resumed run goes on."""

    def start(gives: bool) -> tuple[torch.nn.Sequential, FP8Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.LayerNorm(32), torch.nn.Linear(32, 32))
        model[:2].requires_grad_(False)
        groups = [{"params": list(model[2].parameters())}]
        groups += [{"params": list(model[:2].parameters()), "lr": 0.03}] if gives else []
        return initialize(model, torch.optim.AdamW(groups, lr=0.1), opt_level=level)

    def train(model: torch.nn.Module, optimizer: FP8Optimizer, adds: Sequence[dict[str, object]] = ()) -> None:
        for seed in range(3):
            x = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed))
            (model(x) - x).square().mean().backward()
            for group in adds if seed == 0 else ():
                optimizer.add_param_group(group)
            optimizer.step()
            optimizer.zero_grad()

    (model, optimizer), (other, others) = start(gives=True), start(gives=False)
    train(model, optimizer)
    train(other, others)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for each in (model, other):
        each.requires_grad_(True)
    train(model, optimizer)
    train(other, others, [{"params": list(other[:2].parameters()), "lr": 0.03}])
    for name, value in model.state_dict().items():
        assert not torch.equal(value, before[name])
        assert torch.equal(value, other.state_dict()[name])

    resumed, again = start(gives=True)
    resumed.requires_grad_(True)
    resumed.load_state_dict(model.state_dict())
    again.load_state_dict(optimizer.state_dict())
    train(model, optimizer)
    train(resumed, again)
    for name, value in model.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name])


def test_moments_of_frozen_parameters_that_are_left_out_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    module = Plain()
    saved = build_optimizer(module, torch.optim.AdamW(module.parameters()), {}, "O1").state_dict()
    other = Plain()
    other.matrix.requires_grad_(False)
    optimizer = build_optimizer(other, torch.optim.AdamW(other.parameters()), {}, "O1")
    optimizer.load_state_dict(saved)
    assert "moments of parameters that are frozen (matrix)" in caplog.text
    caplog.clear()
    other.matrix.requires_grad_(True)
    optimizer.load_state_dict(saved)
    assert not caplog.text


@pytest.mark.parametrize(
    "change",
    [
        lambda optimizer: optimizer.param_groups.pop(),
        lambda optimizer: optimizer.param_groups[0]["params"].pop(),
        lambda optimizer: optimizer.param_groups[0].update(params=[*optimizer.param_groups[1]["params"]]),
        lambda optimizer: setattr(optimizer, "param_groups", [dict(group) for group in optimizer.param_groups]),
    ],
    ids=["group_gone", "parameter_gone", "other_parameters", "copied_groups"],
)
def test_groups_that_a_step_would_not_follow_are_an_error(change: Callable[[FP8Optimizer], object]) -> None:
    module = Plain()
    groups = [{"params": [module.matrix, module.bias]}, {"params": [module.norm, module.scalar]}]
    optimizer = build_optimizer(module, torch.optim.AdamW(groups), {}, "O2")
    module.matrix.grad = torch.ones_like(module.matrix)
    optimizer.param_groups[0]["params"] = [*optimizer.param_groups[0]["params"]]  # an equal list
    optimizer.step()
    change(optimizer)
    with pytest.raises(OptimizerError, match=r"param_groups are not those.*add_param_group"):
        optimizer.step()


def test_grad_scaler_divides_and_skips() -> None:
    """A power-of-two scale changes no bit of BF16 and FP8 gradients."""
    outcomes = []
    for scale in (1.0, 1024.0):
        module, optimizer = linears("O3")
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale > 1)
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(loss_of(module, step)).backward()
            if step == 2:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        outcomes.append([master_of(param) for param in module.parameters()])
    for plain, scaled in zip(*outcomes, strict=True):
        assert torch.equal(plain, scaled)
    optimizer.zero_grad()
    (scaler.scale(loss_of(module)) * math.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert optimizer.num_skipped_steps == 1


def test_float64_is_refused_by_name() -> None:
    module = Plain()
    module.norm = torch.nn.Parameter(module.norm.detach().double())
    with pytest.raises(OptimizerError, match=r"norm is torch\.float64"):
        build_optimizer(module, torch.optim.AdamW(module.parameters()), {}, "O2")


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_convolutions_keep_their_memory_format(memory_format: torch.memory_format) -> None:
    """At O1 all state of FP32 parameters is FP32: three updates of lr with a few roundings of 2⁻²⁴ each."""
    outcomes = []
    for is_ours in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Conv2d(16, 4, 1))
        model = model.to(memory_format=memory_format)  # type: ignore[call-overload]
        strides = [param.stride() for param in model.parameters()]
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if is_ours:
            optimizer = build_optimizer(model, optimizer, {}, "O1")
            assert model[0].weight.stride() == strides[0]
        for step in range(3):
            images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(images.to(memory_format=memory_format)).square().mean().backward()
            optimizer.step()
        assert model[0].weight.grad is not None and model[0].weight.grad.shape == (16, 3, 3, 3)
        state = optimizer.state_dict()["state"]
        optimizer.load_state_dict(optimizer.state_dict())
        outcomes.append(
            [param.detach() for param in model.parameters()] + [state[0]["exp_avg"], state[0]["exp_avg_sq"]]
        )
    for ours, theirs in zip(*outcomes, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_scheduler_of_the_users_optimizer_sees_our_steps() -> None:
    """It warned that it was stepped before its optimizer, and that it skips the first rate."""
    module = Plain()
    user = torch.optim.AdamW(module.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(user, step_size=1, gamma=0.5)
    optimizer = build_optimizer(module, user, {}, "O2")
    for param, grad in zip(module.parameters(), gradients(module, 0).values(), strict=True):
        param.grad = grad
    optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()


def test_hooks_of_the_users_optimizer_are_ours() -> None:
    """Loggers and EMAs register them; their handles still remove them."""
    module = Plain()
    user = torch.optim.AdamW(module.parameters())
    called: list[str] = []
    handles = [
        user.register_step_pre_hook(lambda *_: called.append("before")),
        user.register_step_post_hook(lambda *_: called.append("behind")),
        user.register_state_dict_post_hook(lambda *_: called.append("state")),
        user.register_load_state_dict_pre_hook(lambda *_: called.append("load")),
    ]
    optimizer = build_optimizer(module, user, {}, "O2")
    for _ in range(2):
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        for handle in handles:
            handle.remove()
    assert called == ["before", "behind", "state", "load"]


def _replace(optimizer: FP8Optimizer) -> None:
    optimizer.state = defaultdict(dict)


DROPS: dict[str, Callable[[FP8Optimizer], object]] = {
    "cleared": lambda optimizer: optimizer.state.clear(),
    "replaced": _replace,
    "emptied": lambda optimizer: [optimizer.state.update({param: {}}) for param in list(optimizer.state)],
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("drop", DROPS.values(), ids=DROPS)
def test_state_that_is_dropped_starts_anew(drop: Callable[[FP8Optimizer], object], level: str) -> None:
    """As in torch's optimizers. What follows has the bits of a state that was loaded without moments."""

    def train(forget: Callable[[FP8Optimizer], object]) -> tuple[dict[str, Tensor], set[float]]:
        module, optimizer = linears(level)
        for step in range(4):
            if step == 2:
                forget(optimizer)
            loss_of(module, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return module.state_dict(), {float(entry["step"]) for entry in optimizer.state_dict()["state"].values()}

    (expected, steps), (found, found_steps) = (
        train(lambda ours: ours.load_state_dict(ours.state_dict() | {"state": {}})),
        train(drop),
    )
    assert steps == found_steps == {2.0}
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_values_of_state_are_no_silent_nones() -> None:
    module, optimizer = linears("O2")
    entry = optimizer.state[module.first.weight]
    assert "exp_avg" in entry and set(entry.values()) == {None}  # as torch's tools see it
    for key, value in entry.items():
        entry[key] = value  # as Lightning moves state to a device
    for touch in (lambda: entry["exp_avg"].zero_(), lambda: entry.__setitem__("step", 0)):
        with pytest.raises(OptimizerError, match=r"read optimizer\.state_dict\(\), set with load_state_dict"):
            touch()
    with pytest.raises(KeyError):
        entry["max_exp_avg_sq"]
