"""Copies of a model in training: averages of weights, plain models, adapters beside frozen FP8 weights."""

from __future__ import annotations

import copy
import io
import warnings

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


@pytest.mark.parametrize("level", LEVELS)
def test_a_plain_copy_has_the_masters_values_and_is_independent(level: str) -> None:
    model, optimizer = build(level)
    step(model, optimizer)
    copied = plain_model(model)
    assert [type(layer) for layer in copied] == [torch.nn.Linear, torch.nn.ReLU, torch.nn.Linear]
    assert vars(copied[0]).keys() == vars(torch.nn.Linear(32, 64)).keys()
    assert list(copied.state_dict()) == list(model.state_dict())
    for name, value in model.state_dict().items():
        assert torch.equal(copied.state_dict()[name], value)
    before = {name: value.clone() for name, value in copied.state_dict().items()}
    step(model, optimizer)
    assert all(torch.equal(copied.state_dict()[name], value) for name, value in before.items())
    assert not torch.equal(model.state_dict()["0.weight"], before["0.weight"])
    torch.optim.AdamW(copied.parameters()).step()
    assert repr(copied[0]) == repr(torch.nn.Linear(32, 64))


@pytest.mark.parametrize("level", LEVELS)
def test_an_average_in_a_plain_copy_is_the_average(level: str) -> None:
    model, optimizer = build(level)
    average, decay = plain_model(model), 0.999
    expected = {name: value.double() for name, value in model.state_dict().items()}
    for _ in range(20):
        step(model, optimizer)
        for ours, new in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
            ours.lerp_(new, 1 - decay)
        for name, new in model.state_dict().items():
            expected[name].lerp_(new.double(), 1 - decay)
    for name, value in average.state_dict().items():
        # 20 roundings to FP32, 2⁻²⁴ of a value each.
        torch.testing.assert_close(value.double(), expected[name], rtol=20 * 2**-24, atol=1e-9)
    averaged = torch.optim.swa_utils.AveragedModel(plain_model(model))
    for _ in range(2):
        averaged.update_parameters(plain_model(model))


def test_an_average_in_an_fp8_copy_is_warned_of() -> None:
    model, optimizer = build("O3")
    step(model, optimizer)
    with pytest.warns(UserWarning, match="an average .* loses small updates, .*state_dict.*; average .*plain_model"):
        copied = copy.deepcopy(model)
    x = torch.randn(16, 32)
    assert isinstance(copied[0], FP8Linear) and torch.equal(copied(x), model(x))
    step(model, optimizer)
    assert not torch.equal(copied(x), model(x))
    averaged = torch.optim.swa_utils.AveragedModel(plain_model(model))
    averaged.update_parameters(model)  # the first update copies
    with pytest.raises(NotImplementedError, match="not defined on a ScaledTensor"):
        averaged.update_parameters(model)


def test_a_copy_can_be_initialised_again() -> None:
    """A frozen reference, or a second run from the first one's weights."""
    model, optimizer = build("O2")
    step(model, optimizer)
    copied = plain_model(model)
    copied, second = fp8_megatron.initialize(copied, torch.optim.AdamW(copied.parameters(), lr=1e-3), "O2")
    step(copied, second)


def test_a_pickled_model_can_be_initialised_again() -> None:
    model, optimizer = build("O2")
    step(model, optimizer)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    loaded, second = fp8_megatron.initialize(loaded, torch.optim.AdamW(loaded.parameters(), lr=1e-3), "O2")
    step(loaded, second)


@pytest.mark.parametrize("level", LEVELS)
def test_a_model_is_saved_and_loaded_into_a_plain_and_an_fp8_one(level: str) -> None:
    model, optimizer = build(level)
    step(model, optimizer)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    plain = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16))
    plain.load_state_dict(state)
    other, other_optimizer = build(level)
    other.load_state_dict(state)
    for name, value in other.state_dict().items():
        assert torch.equal(value, state[name]), name
    step(other, other_optimizer)  # the master has the loaded value: a step moves it by about the learning rate
    assert (other.state_dict()["0.weight"] - state["0.weight"]).abs().max() < 2e-3


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


def test_peft_finds_fp8_layers() -> None:
    """Adapters that are added to a model that is in FP8 already."""
    peft = pytest.importorskip("peft")
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 16))
    fp8_megatron.replace_linears(model)
    model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["0", "2"]))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer = fp8_megatron.initialize(model, optimizer, "O3")
    step_input = torch.randn(5, 64)
    model(step_input).square().mean().backward()
    optimizer.step()
    frozen = [p for p in model.parameters() if isinstance(p, ScaledTensor)]
    assert len(frozen) == 2 and not any(p.requires_grad for p in frozen)


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
