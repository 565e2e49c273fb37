"""State of FP8Optimizer: torch's shape, plain tensors, exact round trips."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import fp8_megatron
from fp8_megatron.any_model.build import build_optimizer
from fp8_megatron.any_model.linears import build_recipe, replace_linears
from fp8_megatron.any_model.optimizer import FP8Optimizer
from fp8_megatron.any_model.torch_optimizers import OptimizerError
from fp8_megatron.dtypes import LEVELS
from fp8_megatron.quantization.stats import snr_db
from tests.harness.fp8_models import assert_equal, masters


def build(level: str, dtype: torch.dtype = torch.float32, recipe: str = "tensorwise") -> tuple[Any, FP8Optimizer]:
    """A small model with everything that is stored in its own way; other values at every call."""
    model = torch.nn.Sequential(
        torch.nn.Embedding(40, 48),
        torch.nn.Linear(48, 80),
        torch.nn.LayerNorm(80),
        torch.nn.Linear(80, 16),
        torch.nn.Linear(16, 3),
    ).to(dtype)
    params = list(model.parameters())
    optimizer = torch.optim.AdamW([{"params": params[::2]}, {"params": params[1::2], "lr": 3e-3}], lr=1e-2)
    replaced = replace_linears(model, recipe=build_recipe(recipe), weight=LEVELS[level].weight)  # type: ignore[arg-type]
    return model, build_optimizer(model, optimizer, replaced, level)


def train(model: Any, optimizer: FP8Optimizer, steps: range, num_micro_batches: int = 1) -> None:
    for step in steps:
        optimizer.zero_grad()
        for micro_batch in range(num_micro_batches):
            generator = torch.Generator().manual_seed(100 * step + micro_batch)
            tokens = torch.randint(0, 40, (32,), generator=generator)
            cotangent = torch.randn(32, 3, generator=generator)
            (model(tokens).float() * cotangent).sum().backward()
        optimizer.step()


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_first", [True, False])
def test_a_resumed_run_goes_on_bit_for_bit(level: str, dtype: torch.dtype, model_first: bool) -> None:
    recipe = "delayed" if model_first else "tensorwise"
    torch.manual_seed(1)
    model, optimizer = build(level, dtype, recipe)
    train(model, optimizer, range(3), num_micro_batches=2)
    saved = through_a_file(model.state_dict()), through_a_file(optimizer.state_dict())
    train(model, optimizer, range(3, 6), num_micro_batches=2)
    torch.manual_seed(2)
    resumed, other = build(level, dtype, recipe)
    parts = [(resumed, saved[0]), (other, saved[1])]
    for target, state in parts if model_first else reversed(parts):
        target.load_state_dict(state)
    train(resumed, other, range(3, 6), num_micro_batches=2)
    assert_equal(masters(resumed), masters(model))


def test_a_state_dict_has_torchs_shape() -> None:
    model, optimizer = build("O3")
    train(model, optimizer, range(2))
    state = optimizer.state_dict()
    plain = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters()).state_dict()
    assert state.keys() == plain.keys()
    assert [group["params"] for group in state["param_groups"]] == [[0, 1, 2, 3, 4], [5, 6, 7, 8]]
    assert plain["param_groups"][0].keys() <= state["param_groups"][0].keys()
    assert sorted(state["state"]) == list(range(9))
    for entry in state["state"].values():
        assert entry["step"] == 2.0
        for tensor in entry.values():
            assert type(tensor) is torch.Tensor
    weight = state["state"][5]  # of the first linear layer
    assert weight["exp_avg_payload"].dtype == torch.float8_e4m3fn
    assert weight["exp_avg_payload"].shape == (80, 48)
    assert weight["master_weight_scale"].shape == (80 * 48 // 256,)


def test_state_of_another_level_is_rounded() -> None:
    model, optimizer = build("O1")
    train(model, optimizer, range(2))
    other_model, other = build("O3")
    other_model.load_state_dict(model.state_dict())
    other.load_state_dict(optimizer.state_dict())
    saved, loaded = optimizer.state_dict()["state"], other.state_dict()["state"]
    exact, rounded = (
        saved[5]["exp_avg"],
        loaded[5]["exp_avg_payload"].float() * loaded[5]["exp_avg_scale"].repeat_interleave(256).view(80, 48),
    )
    # E4M3 has 3 bits after the first: half a unit is 2⁻⁴ of a value, and 2⁻¹⁰ of a scale that is the amax / 448 · 2 at
    # most where values are subnormal.
    assert torch.allclose(rounded, exact, rtol=2.0**-4, atol=exact.abs().max().item() * 2.0**-10 / 224)


def test_torchs_own_state_is_taken_on() -> None:
    """The moments of an AdamW run in FP32, at O1, where they are FP32."""
    plain = torch.nn.Linear(16, 32)
    reference = torch.optim.AdamW(plain.parameters())
    plain(torch.randn(4, 16)).square().sum().backward()
    reference.step()
    model = torch.nn.Sequential(torch.nn.Linear(16, 32))
    user = torch.optim.AdamW(model.parameters())
    optimizer = build_optimizer(model, user, replace_linears(model, weight=LEVELS["O1"].weight), "O1")
    model[0].load_state_dict(plain.state_dict())
    optimizer.load_state_dict(reference.state_dict())
    state = optimizer.state_dict()["state"]
    for index, entry in reference.state_dict()["state"].items():
        assert torch.equal(state[index]["exp_avg"], entry["exp_avg"])
        assert torch.equal(state[index]["exp_avg_sq"], entry["exp_avg_sq"])
        assert state[index]["step"] == 1.0


@pytest.mark.parametrize("out_features", [64, 32])
def test_moments_of_gpt2s_conv1d_are_torchs(out_features: int) -> None:
    """Its weight is [in, out] in transformers and [out, in] here. Both directions, and through another level."""
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D

    def build_conv1d() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Sequential(conv1d(out_features, 32))
        return model, torch.optim.AdamW(model.parameters())

    plain, reference = build_conv1d()
    model, optimizer = build_conv1d()
    model.load_state_dict(plain.state_dict())
    model, o1 = fp8_megatron.initialize(model, optimizer, opt_level="O1")
    x, cotangent = torch.randn(16, 32), torch.randn(16, out_features)
    for module, own in ((plain, reference), (model, o1)):
        (module(x) * cotangent).sum().backward()
        own.step()
    expected = copy.deepcopy(reference.state_dict()["state"][0])
    assert snr_db(o1.state_dict()["state"][0]["exp_avg"], expected["exp_avg"]) > 20.0  # E5M2 has 25.5 dB, E4M3 31.5
    o1.load_state_dict(reference.state_dict())
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(o1.state_dict()["state"][0][key], expected[key])
    reference.load_state_dict(copy.deepcopy(o1.state_dict()))
    reference.step()
    _, o2 = fp8_megatron.initialize(*build_conv1d(), opt_level="O2")
    o2.load_state_dict(o1.state_dict())
    o1.load_state_dict(o2.state_dict())
    assert snr_db(o1.state_dict()["state"][0]["exp_avg"], expected["exp_avg"]) > 30.5  # E4M3 has 31.5 dB


def assert_equal_states(state: dict[str, Any], expected: dict[str, Any]) -> None:
    assert state["param_groups"] == expected["param_groups"]
    for number, entry in expected["state"].items():
        for key, value in entry.items():
            assert torch.equal(state["state"][number][key].float(), value.float()), (number, key)


@pytest.mark.parametrize("damage", ["other_optimizer", "other_shape", "no_state"])
def test_a_state_that_does_not_fit_changes_nothing(damage: str) -> None:
    """The state of SGD, or of an 8-bit Adam, would leave the moments at zero beside a late step. SGD without momentum
    has none, and would start the moments anew."""
    model, optimizer = build("O2")
    train(model, optimizer, range(2))
    before, weights = copy.deepcopy(optimizer.state_dict()), masters(model)
    state = copy.deepcopy(before)
    state["param_groups"][0]["lr"] = 7.0
    last = max(state["state"])
    if damage == "other_optimizer":
        state["state"][last] = {"step": torch.tensor(9.0), "momentum_buffer": torch.zeros(3)}
    elif damage == "no_state":
        groups = [{"params": group["params"]} for group in optimizer.param_groups]
        state = torch.optim.SGD(groups, lr=7.0).state_dict()
    else:
        state["state"][last] = {key: value[:1] for key, value in state["state"][last].items() if value.ndim}
    messages = {"other_optimizer": "momentum_buffer", "no_state": "no betas: it is another"}
    with pytest.raises(ValueError, match=messages.get(damage, "has the shape")):
        optimizer.load_state_dict(state)
    assert_equal_states(optimizer.state_dict(), before)
    assert_equal(masters(model), weights)


#: What may be wrong with the last parameter's entry: how it comes to be, and what the error says.
DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no_moment": (lambda entry: entry.pop("exp_avg"), "no exp_avg"),
    "moment_is_none": (lambda entry: entry.update(exp_avg_sq=None), "no exp_avg_sq"),
    "no_step": (lambda entry: entry.pop("step"), "no step"),
    "step_is_nan": (lambda entry: entry.update(step=torch.tensor(math.nan)), "step is tensor.nan"),
    "step_is_negative": (lambda entry: entry.update(step=-1.0), "step is -1.0"),
    "step_is_text": (lambda entry: entry.update(step="x"), "step is 'x'"),
    "moment_is_a_list": (lambda entry: entry.update(exp_avg=[0.0]), "exp_avg is a list"),
    "nan": (lambda entry: entry["exp_avg"].view(-1)[-1:].fill_(math.nan), "exp_avg has NaN or inf"),
    "inf": (lambda entry: entry["exp_avg_sq"].view(-1)[-1:].fill_(math.inf), "exp_avg_sq has NaN, inf or a neg"),
    "negative": (lambda entry: entry["exp_avg_sq"].view(-1)[-1:].fill_(-1e-9), "exp_avg_sq has NaN, inf or a neg"),
}


@pytest.mark.parametrize("damage", list(DAMAGES))
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_moments_that_are_missing_or_not_finite_are_refused(level: str, damage: str) -> None:
    """torch would take a NaN, and the weight would be NaN after the next step."""
    model, optimizer = build(level)
    train(model, optimizer, range(2))
    before, weights = copy.deepcopy(optimizer.state_dict()), masters(model)
    state, (break_, message) = copy.deepcopy(before), DAMAGES[damage]
    number = next(number for number, entry in reversed(state["state"].items()) if "exp_avg" in entry)
    break_(state["state"][number])
    with pytest.raises(ValueError, match=rf"(weight|bias): .*{message}"):
        optimizer.load_state_dict(state)
    assert_equal_states(optimizer.state_dict(), before)
    assert_equal(masters(model), weights)
    del state["state"][number]
    optimizer.load_state_dict(state)  # as torch does: these moments start anew
    assert not optimizer.state_dict()["state"][number]["exp_avg"].any()


@pytest.mark.parametrize("scale", [None, torch.ones(0), torch.full((15,), math.nan)], ids=["none", "few", "nan"])
def test_a_payload_is_refused_without_its_scales(scale: Any) -> None:
    model, optimizer = build("O2")
    train(model, optimizer, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    number = next(number for number, entry in state["state"].items() if "exp_avg_payload" in entry)
    if scale is None:
        del state["state"][number]["exp_avg_scale"]
    else:
        state["state"][number]["exp_avg_scale"] = scale
    with pytest.raises(ValueError, match=r"exp_avg_scale has|exp_avg has NaN"):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_torchs_distributed_checkpoint_resumes_the_run(tmp_path: Path, recipe: str) -> None:
    torch.manual_seed(1)
    model, optimizer = build("O3", torch.bfloat16, recipe)
    train(model, optimizer, range(3))
    saved = get_state_dict(model, optimizer)
    checkpoint.save({"model": saved[0], "optimizer": saved[1]}, checkpoint_id=tmp_path)
    train(model, optimizer, range(3, 5))
    torch.manual_seed(2)
    resumed, other = build("O3", torch.bfloat16, recipe)
    template = get_state_dict(resumed, other)
    state: dict[str, Any] = {"model": template[0], "optimizer": template[1]}
    checkpoint.load(state, checkpoint_id=tmp_path)
    set_state_dict(resumed, other, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    train(resumed, other, range(3, 5))
    assert_equal(masters(resumed), masters(model))


@pytest.mark.parametrize("saved_level", ["O3", "O1"])
def test_a_flattened_state_is_the_nested_one(saved_level: str) -> None:
    """Of another level too, whose entries have other names."""
    torch.manual_seed(1)
    model, optimizer = build(saved_level, recipe="delayed")
    train(model, optimizer, range(3))
    resumed = []
    for flattens in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flattens)
        saved = get_state_dict(model, optimizer, options=options)
        other, its_optimizer = build("O3", recipe="delayed")
        set_state_dict(
            other, its_optimizer, model_state_dict=saved[0], optim_state_dict=copy.deepcopy(saved[1]), options=options
        )
        train(other, its_optimizer, range(3, 5))
        resumed.append((masters(other), its_optimizer.state_dict()["state"]))
    (nested, nested_state), (flat, flat_state) = resumed
    assert_equal(flat, nested)
    for number, entry in nested_state.items():
        for key, value in entry.items():
            assert torch.equal(flat_state[number][key], value), (number, key)


def test_other_groups_are_refused() -> None:
    _, optimizer = build("O2")
    state = optimizer.state_dict()
    state["param_groups"] = state["param_groups"][:1]
    with pytest.raises(ValueError, match=r"\[5\] parameters, the optimizer's have \[5, 4\]"):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_each_value_has_its_own_storage(level: str) -> None:
    """Savers write a tensor's whole storage, and safetensors refuses tensors that share one."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 48))
    fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters()), opt_level=level)
    values = list(model.state_dict().values())
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in values)
    assert len({value.untyped_storage().data_ptr() for value in values}) == len(values)


@pytest.mark.parametrize("option", ["amsgrad", "maximize", "capturable", "differentiable"])
def test_an_option_that_would_be_ignored_is_an_error(option: str) -> None:
    """In a loaded state, in a group that is changed between steps, and in a new group."""
    model, optimizer = build("O2")
    train(model, optimizer, range(1))
    state = optimizer.state_dict()
    state["param_groups"][1][option] = True
    with pytest.raises(OptimizerError, match=rf"param_groups\[1\] has {option}=True.*leave {option} out"):
        optimizer.load_state_dict(state)
    optimizer.param_groups[0][option] = True
    with pytest.raises(OptimizerError, match=rf"param_groups\[0\] has {option}=True"):
        train(model, optimizer, range(1))


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_weight_decay_stays_that_of_the_optimizer(kind: type[torch.optim.Optimizer]) -> None:
    """The state of an Adam in AdamW: decay stays decoupled, as in torch; and the other way."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 32))
    model, optimizer = fp8_megatron.initialize(model, kind(model.parameters(), lr=0.1, weight_decay=0.1))
    other = {torch.optim.Adam: torch.optim.AdamW, torch.optim.AdamW: torch.optim.Adam}[kind]
    plain = torch.nn.Linear(16, 32)
    state = other(plain.parameters(), lr=0.2).state_dict()
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.2
    assert optimizer.param_groups[0]["decoupled_weight_decay"] is (kind is torch.optim.AdamW)


@pytest.mark.parametrize("copies", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copy_of_the_optimizer_is_an_error(copies: Callable[[Any], Any]) -> None:
    """It would have neither masters nor moments, and fail at its first step."""
    _, optimizer = build("O2")
    with pytest.raises(OptimizerError, match=r"save optimizer.state_dict\(\)"):
        copies(optimizer)


def test_a_parameter_that_a_loaded_state_replaces_is_an_error() -> None:
    """assign=True gives a norm a new parameter, which the optimizer does not have. FP8 layers keep theirs."""
    model, optimizer = build("O2")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(OptimizerError, match=r"assign=True\) has replaced 0\.weight.*or without assign"):
        model.load_state_dict(state, assign=True)
    model, optimizer = build("O2")
    with pytest.raises(OptimizerError, match=r"assign=True\) has replaced 0\.weight"):
        model[0].load_state_dict({"weight": state["0.weight"]}, assign=True)
    model, optimizer = build("O2")
    model.load_state_dict(state)
    model[1].load_state_dict({"weight": state["1.weight"], "bias": state["1.bias"]}, assign=True)
    copy.deepcopy(model).load_state_dict(state, assign=True)
    train(model, optimizer, range(1))
    assert not any(torch.equal(value, state[name]) for name, value in model.state_dict().items())
