"""Copies of a model in training: averages of weights, plain models, adapters beside frozen FP8 weights."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fp8_megatron
from fp8_megatron.any_model import plain_model, report
from fp8_megatron.nn.module import FP8Linear
from fp8_megatron.quantization.scaled_tensor import ScaledTensor
from fp8_megatron.quantization.stats import snr_db

LEVELS = ("O1", "O2", "O3")


def build(level: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16))
    return fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), level)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x = torch.randn(16, 32)
    loss = (model(x) - x[:, :16].sin()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


COPIES: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {"deepcopy": copy.deepcopy, "plain": plain_model}


@pytest.mark.parametrize("make", list(COPIES))
@pytest.mark.parametrize("level", LEVELS)
def test_a_copy_is_plain_has_the_masters_values_and_is_independent(level: str, make: str) -> None:
    model, optimizer = build(level)
    step(model, optimizer)
    model[2].weight.has_no_decay = True
    copied = COPIES[make](model)
    assert [type(layer) for layer in copied] == [torch.nn.Linear, torch.nn.ReLU, torch.nn.Linear]
    assert vars(copied[0]).keys() == vars(torch.nn.Linear(32, 64)).keys()
    assert vars(copied[0].weight) == {} and vars(copied[2].weight) == {"has_no_decay": True}
    assert list(copied.state_dict()) == list(model.state_dict())
    for name, value in model.state_dict().items():
        assert torch.equal(copied.state_dict()[name], value)
        assert copied.get_parameter(name).requires_grad
    before = {name: value.clone() for name, value in copied.state_dict().items()}
    step(model, optimizer)
    assert all(torch.equal(copied.state_dict()[name], value) for name, value in before.items())
    assert not torch.equal(model.state_dict()["0.weight"], before["0.weight"])
    torch.optim.AdamW(copied.parameters()).step()
    assert repr(copied[0]) == repr(torch.nn.Linear(32, 64))


def test_copies_of_tied_frozen_and_untrained_layers() -> None:
    """A tied weight stays one. What no optimizer trains has no master, and stays in FP8."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
    model[1].weight = model[0].weight
    model[2].weight.requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, _ = fp8_megatron.initialize(model, torch.optim.AdamW(trained), "O3")
    x = torch.randn(16, 32)
    copied, plain = copy.deepcopy(model), plain_model(model)
    assert copied[0].weight is copied[1].weight and plain[0].weight is plain[1].weight
    assert isinstance(copied[2], FP8Linear) and torch.equal(copied[2](x), model[2](x))
    assert type(plain[2]) is torch.nn.Linear and not plain[2].weight.requires_grad
    assert torch.equal(plain[2].weight, model[2].weight.dequantize())
    alone = copy.deepcopy(model[1])
    assert type(alone) is torch.nn.Linear and torch.equal(alone.weight, copied[1].weight)
    weights = copy.deepcopy(list(model.parameters()))
    assert not isinstance(weights[0], ScaledTensor) and isinstance(weights[0], torch.nn.Parameter)
    assert torch.equal(weights[0], copied[0].weight)


def _averaged_model(model: torch.nn.Module, decay: float, **settings: Any) -> Any:
    average = torch.optim.swa_utils.AveragedModel(model, **settings)
    average.update_parameters(model)  # the first update copies
    return lambda: average.update_parameters(model), average.module.parameters


def _of_state_dicts(model: torch.nn.Module, decay: float) -> Any:
    average = copy.deepcopy(model).eval()

    def update() -> None:
        ours, new = average.state_dict().values(), model.state_dict().values()
        torch._foreach_lerp_(list(ours), list(new), weight=1 - decay)

    return torch.no_grad()(update), average.parameters


def _of_parameters(model: torch.nn.Module, decay: float) -> Any:
    average = copy.deepcopy(model).requires_grad_(False)

    def update() -> None:
        ours = dict(average.named_parameters())
        for name, new in model.named_parameters():
            ours[name].mul_(decay).add_(new.data, alpha=1 - decay)

    return update, average.parameters


def _of_shadows(model: torch.nn.Module, decay: float) -> Any:
    shadows = [parameter.clone().detach() for parameter in model.parameters()]

    @torch.no_grad()
    def update() -> None:
        for shadow, new in zip(shadows, model.parameters(), strict=True):
            shadow.sub_((1 - decay) * (shadow - new))

    return update, lambda: shadows


AVERAGES: dict[str, Callable[[torch.nn.Module, float], Any]] = {
    "AveragedModel, one by one": lambda model, decay: _averaged_model(
        model, decay, avg_fn=torch.optim.swa_utils.get_ema_avg_fn(decay)
    ),
    "AveragedModel, all at once": lambda model, decay: _averaged_model(
        model, decay, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(decay)
    ),
    "of state dicts": _of_state_dicts,
    "of parameters": _of_parameters,
    "of shadows": _of_shadows,
}


@pytest.mark.parametrize("form", list(AVERAGES))
@pytest.mark.parametrize("level", LEVELS)
def test_an_average_in_a_copy_is_the_average(level: str, form: str) -> None:
    """The forms in which libraries and loops keep an average (EMA), against float64 of the masters."""
    model, optimizer = build(level)
    decay = 0.999
    update, read = AVERAGES[form](model, decay)
    expected = [value.double() for value in model.state_dict().values()]
    for _ in range(20):
        step(model, optimizer)
        update()
        for average, new in zip(expected, model.state_dict().values(), strict=True):
            average.lerp_(new.double(), 1 - decay)
    for average, new in zip(expected, model.state_dict().values(), strict=True):
        assert (average - new.double()).abs().max() > 1e-3, "the weights have moved away from their average"
    for average, exact in zip(read(), expected, strict=True):
        # 20 roundings to FP32 or fewer than 80, 2⁻²⁴ of a value each.
        torch.testing.assert_close(average.detach().double(), exact, rtol=80 * 2**-24, atol=1e-8)


@pytest.mark.parametrize("strict", [False, True], ids=["traced", "strict"])
def test_export_takes_the_plain_model_alone(strict: bool) -> None:
    """An exported FP8 layer would have no weight, or the number that its layer has in this process."""
    model, optimizer = build("O3")
    step(model, optimizer)
    x = torch.randn(4, 32)
    with pytest.raises(Exception, match=r"torch\.export takes no FP8 layer.*plain_model\(model\)"):
        torch.export.export(model, (x,), strict=strict)
    plain = plain_model(model)
    torch.testing.assert_close(torch.export.export(plain, (x,), strict=strict).module()(x), plain(x), rtol=0, atol=0)


@pytest.mark.parametrize("form", ["data", "copy_", "load_state_dict"])
def test_an_average_in_frozen_fp8_layers_of_the_model_is_refused_or_warned_of(form: str) -> None:
    """As of a momentum encoder that is a part of the model (MoCo): FP8 rounds its moves away. Loading is no average,
    but for loads in every step."""
    torch.manual_seed(0)
    model = torch.nn.ModuleList([torch.nn.Linear(32, 16), torch.nn.Linear(32, 16).requires_grad_(False)])
    model, _ = fp8_megatron.initialize(model, torch.optim.AdamW(model[0].parameters()))
    query, key = model[0].weight, model[1].weight
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(10):
            key.data.copy_(query.data)
        for _ in range(7):
            model[1].load_state_dict(model[0].state_dict())
    average = 0.999 * key.data + 0.001 * torch.randn(16, 32)
    match = r"momentum encoder.*filter=…"
    if form == "load_state_dict":
        with pytest.warns(UserWarning, match=match):
            model[1].load_state_dict({"weight": average, "bias": model[1].bias})
        return
    with torch.no_grad(), pytest.raises(NotImplementedError, match=match):
        if form == "data":
            key.data = average
        else:
            key.data.copy_(average)


def test_a_pickled_model_can_be_initialised_again() -> None:
    model, optimizer = build("O2")
    step(model, optimizer)
    file = io.BytesIO()
    with pytest.warns(UserWarning, match="a pickled FP8 weight"):
        torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    loaded, second = fp8_megatron.initialize(loaded, torch.optim.AdamW(loaded.parameters(), lr=1e-3), "O2")
    step(loaded, second)


def test_adapters_beside_frozen_fp8_weights() -> None:
    """PEFT's LoRA: the base layers are FP8 at rest without state, the adapters are trained as they are."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 16))
    exact = copy.deepcopy(plain)
    model = peft.get_peft_model(plain, peft.LoraConfig(r=16, target_modules=["0", "2"], lora_dropout=0.0))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer = fp8_megatron.initialize(model, optimizer, "O3")
    layers = [layer for layer in model.modules() if isinstance(layer, FP8Linear)]
    assert len(layers) == 2 and all(layer.weight.payload.dtype is torch.float8_e4m3fn for layer in layers)
    assert set(report(model).stays.values()) == {"it is an adapter"} and len(report(model).stays) == 4
    x = torch.randn(64, 64)
    assert snr_db(model(x).detach(), exact(x).detach()) > 24.0  # two layers of two E4M3 operands: 28.5 − 3 dB, less 1.5
    target = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    payload, losses = layers[0].weight.payload.clone(), []
    for _ in range(30):
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert torch.equal(layers[0].weight.payload, payload) and layers[0].weight.grad is None
    adapters = peft.get_peft_model_state_dict(model)
    assert len(adapters) == 4 and {value.dtype for value in adapters.values()} == {torch.float32}


@pytest.mark.parametrize("level", LEVELS)
def test_a_pickled_model_says_what_it_leaves_out(level: str) -> None:
    """``torch.save(model)`` writes the stored weights; ``state_dict`` has the masters and says nothing."""
    model, optimizer = build(level)
    step(model, optimizer)
    with pytest.warns(UserWarning, match=r"has no master weight.*model\.state_dict\(\)"):
        torch.save(model, io.BytesIO())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save(model.state_dict(), io.BytesIO())
        torch.save(optimizer.state_dict(), io.BytesIO())
        torch.save(plain_model(model), io.BytesIO())


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_new_tensors_like_a_weight_in_training_are_plain(level: str) -> None:
    """They keep what is put aside or added up in them, in every size and dtype."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64))
    model, _ = fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters()), level)
    weight = model[0].weight
    kept = torch.empty_like(weight).copy_(weight.detach())
    assert torch.equal(kept, model.state_dict()["0.weight"])
    made = [
        weight.new_empty(64),
        weight.new_zeros(weight.shape),
        weight.new_ones(3),
        weight.detach().new_full((2,), 2.0),
    ]
    made += [weight.new_empty_strided((4, 4), (4, 1)), torch.empty_like(weight.data), kept]
    for tensor in made:
        assert type(tensor) is torch.Tensor and tensor.dtype == torch.float32 and not tensor.requires_grad
    total = made[1]
    total += 0.3
    assert torch.equal(total, torch.full((64, 32), 0.3))
    assert weight.new_zeros(weight.shape, dtype=torch.int64).dtype == torch.int64
