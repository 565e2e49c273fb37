"""Which linear layers become FP8, and what stays the same about a model."""

from __future__ import annotations

import copy
import io
import logging
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils.parametrizations import weight_norm

import fp8_megatron
from fp8_megatron.any_model import plain_model, replace_linears, report
from fp8_megatron.any_model.linears import build_recipe
from fp8_megatron.dtypes import STATE_BLOCK, StorageDtype
from fp8_megatron.nn.conv1d import FP8Conv1D
from fp8_megatron.nn.module import FP8Linear
from fp8_megatron.quantization.scaled_tensor import ScaledTensor
from fp8_megatron.quantization.stats import snr_db

#: A stored E4M3 weight beside its value, and a block-scaled FP16 one (10 mantissa bits: 7 · 6.02 dB more), less 1 dB.
E4M3_DB, FP16_DB = 30.5, 72.6


class Tied(torch.nn.Module):
    """An embedding and a head with one weight, and two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(48, 32)
        self.first, self.second = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)
        self.second.weight = self.first.weight
        self.head = torch.nn.Linear(32, 48, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(self.embedding(tokens))))


def test_layers_are_replaced_in_place() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 16, bias=False))
    first, bias, norm = model[0], model[0].bias, model[1].weight
    names, old = [name for name, _ in model.named_parameters()], [model[0].weight, model[2].weight]
    values = [weight.detach().clone() for weight in old]
    replaced = replace_linears(model)
    assert model[0] is first and model[0].bias is bias and model[1].weight is norm
    assert [name for name, _ in model.named_parameters()] == names
    assert list(replaced) == old and list(replaced.values()) == [model[0].weight, model[2].weight]
    for index, value in zip((0, 2), values, strict=True):
        weight = model[index].weight
        assert isinstance(model[index], FP8Linear) and isinstance(weight, torch.nn.Parameter)
        assert isinstance(weight, ScaledTensor) and weight.payload.dtype is torch.float8_e4m3fn and weight.requires_grad
        assert weight.dtype is torch.float32  # as the user's was
        assert snr_db(weight.dequantize(), value) > E4M3_DB


def test_trained_weights_in_fp16_and_frozen_ones_in_fp8() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 64))
    model[1].weight.requires_grad_(False)
    value = model[0].weight.detach().clone()
    replace_linears(model, weight=StorageDtype.FP16)
    trained, frozen = model[0].weight, model[1].weight
    assert trained.payload.dtype is torch.float16 and trained.scale.numel() == 64 * 128 // STATE_BLOCK
    assert snr_db(trained.dequantize(), value) > FP16_DB
    assert frozen.payload.dtype is torch.float8_e4m3fn and not frozen.requires_grad and trained.requires_grad


def test_tied_layers_share_the_new_weight_and_an_embeddings_stays() -> None:
    model = Tied()
    replace_linears(model)
    assert isinstance(model.first, FP8Linear) and model.first.weight is model.second.weight
    assert type(model.head) is torch.nn.Linear and model.head.weight is model.embedding.weight
    assert report(model).stays == {"head": "its weight is also that of embedding"}
    assert len(list(model.parameters())) == 4


def test_a_layer_that_stays_keeps_those_that_share_its_weight() -> None:
    model = Tied()
    replace_linears(model, filter=lambda name, _: name != "second")
    assert report(model).stays["first"] == "its weight is also that of second"
    assert type(model.first) is type(model.second) is torch.nn.Linear and model.first.weight is model.second.weight


class Derived(torch.nn.Linear):
    """Its forward may be anything."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, 2.0 * self.weight, self.bias)


class Configured:
    """What a library adds to its layers, as torchtitan does."""

    depth = 0

    def init_states(self) -> None:
        for parameter in self.parameters():  # type: ignore[attr-defined]
            torch.nn.init.normal_(parameter, std=0.5**self.depth)


class ConfiguredLinear(torch.nn.Linear, Configured):
    """Multiplies as `torch.nn.Linear`."""

    def __init__(self, depth: int) -> None:
        super().__init__(32, 64)
        self.depth = depth


def _patched() -> torch.nn.Linear:
    layer = torch.nn.Linear(32, 32)
    layer.forward = lambda x: x  # type: ignore[method-assign]
    return layer


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (torch.nn.Linear(32, 10), "its size 10 is not a multiple of 16"),
        (weight_norm(torch.nn.Linear(32, 32)), "it is parametrised"),
        (Derived(32, 32), "the forward of Derived is not F.linear(x, weight, bias), even without its casts"),
        (_patched(), "its forward is patched"),
    ],
    ids=["size", "parametrised", "derived", "patched"],
)
def test_reasons_to_stay(layer: torch.nn.Module, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), layer)
    kind = type(layer)
    with caplog.at_level(logging.INFO):
        replace_linears(model)
    assert type(model[1]) is kind and report(model).stays == {"1": reason}
    line = f"FP8: 1 of 2 linear layers, {100 * 1024 / sum(p.numel() for p in model.parameters()):.1f}% of"
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith(line)
    assert caplog.messages[0].endswith(f"parameters; unchanged: 1 ({reason})")


def test_a_model_without_an_fp8_layer_warns(caplog: pytest.LogCaptureFixture) -> None:
    replace_linears(torch.nn.Sequential(Derived(32, 32)))
    line = "FP8: 0 of 1 linear layers, 0.0% of 1,056 parameters; unchanged: 0 (the forward of Derived is not F.linear("
    assert len(caplog.records) == 1 and caplog.records[0].levelname == "WARNING"
    assert caplog.messages[0].startswith(line)


def _forward_of(forward: Callable[..., Any]) -> type[torch.nn.Linear]:
    return type("Own", (torch.nn.Linear,), {"forward": forward})


CASTS: dict[str, Callable[..., Any]] = {
    "weight": lambda self, x: F.linear(x, self.weight.to(dtype=x.dtype)),
    "weight and bias": lambda self, x: F.linear(
        x, self.weight.to(x.dtype), bias=None if self.bias is None else self.bias.type_as(x)
    ),
    "nothing": lambda self, input: F.linear(input, self.weight, self.bias),
}
CHANGES: dict[str, Callable[..., Any]] = {
    "input": lambda self, x: F.linear(2 * x, self.weight, self.bias),
    "input's dtype": lambda self, x: F.linear(x.to(self.weight.dtype), self.weight, self.bias),
    "dtype": lambda self, x: F.linear(x.float(), self.weight.float(), self.bias),
    "output": lambda self, x: F.linear(x, self.weight, self.bias).relu(),
    "no bias": lambda self, x: F.linear(x, self.weight.to(x.dtype)),
    "attribute": lambda self, x: F.linear(x, self.weight, self.bias) * self.scale,
    "training": lambda self, x: F.linear(x, self.weight if self.training else -self.weight, self.bias),
    "adapter": lambda self, x: F.linear(x, self.weight, self.bias) + self.adapter(x),
    "argument": lambda self, x, scale=1.0: F.linear(x, self.weight, self.bias),
    "two": lambda self, x: F.linear(F.linear(x, self.weight), self.weight, self.bias),
    "matmul": lambda self, x: x @ self.weight.t(),
    "error": lambda self, x: F.linear(x, self.weight, self.bias).item(),
}


@pytest.mark.parametrize("forward", list(CASTS))
def test_a_forward_that_only_casts_becomes_fp8(forward: str) -> None:
    """As nanochat's ``Linear``. The layer keeps its class, and a plain copy has its forward."""
    torch.manual_seed(0)
    kind = _forward_of(CASTS[forward])
    layer = kind(32, 64, bias=forward != "weight")
    twin = torch.nn.Linear(32, 64, bias=forward != "weight")
    twin.load_state_dict(layer.state_dict())
    model, expected = torch.nn.Sequential(layer), torch.nn.Sequential(twin)
    replace_linears(model)
    replace_linears(expected)
    assert isinstance(model[0], FP8Linear) and isinstance(model[0], kind)
    x = torch.randn(4, 32, dtype=torch.bfloat16)
    assert torch.equal(model(x), expected(x))
    assert type(plain_model(model)[0]) is kind


@pytest.mark.parametrize("forward", list(CHANGES))
def test_a_forward_that_does_something_else_stays(forward: str) -> None:
    layer = _forward_of(CHANGES[forward])(32, 64)
    model = torch.nn.Sequential(layer)
    replace_linears(model)
    assert not isinstance(model[0], FP8Linear) and "the forward of Own is not" in report(model).stays["0"]


class Experts(torch.nn.Module):
    """Weights of all experts in one parameter, as in transformers 5, beside others that stay."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.token = torch.nn.Parameter(torch.zeros(1, 1, 32))
        self.experts = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(num_experts, 32, 32))])
        self.embedding = torch.nn.Embedding(96, 32)
        self.norm = torch.nn.LayerNorm((4, 32))
        self.convolution = torch.nn.Conv1d(32, 32, 3)
        self.head = torch.nn.Linear(32, 96)
        self.narrow = torch.nn.Linear(32, 10)


@pytest.mark.parametrize(("num_experts", "level"), [(16, "WARNING"), (0, "INFO")])
def test_matrices_of_no_linear_layer_are_named(num_experts: int, level: str, caplog: pytest.LogCaptureFixture) -> None:
    """A warning if they are more than what is in FP8."""
    model = Experts(num_experts)
    if not num_experts:
        model.convolution = torch.nn.Conv1d(32, 8, 3)
    with caplog.at_level(logging.INFO):
        replace_linears(model)
    convolution = model.convolution.weight
    reported = report(model)
    expected = {"convolution.weight": convolution.shape} | (
        {"experts.0": torch.Size((num_experts, 32, 32))} if num_experts else {}
    )
    assert {name: one.shape for name, one in reported.others.items()} == expected
    assert reported.matrices == convolution.numel() + num_experts * 1024 + 96 * 32 + 10 * 32
    share = 100 * convolution.numel() / reported.matrices
    line = f"Conv1d is no torch.nn.Linear: {convolution.numel():,} parameters with 3 dimensions, {share:.1f}% of all"
    assert line in str(reported) and ("experts.0 (ParameterList" in str(reported)) == bool(num_experts)
    assert [(record.levelname, record.message) for record in caplog.records] == [(level, str(reported))]


def test_a_derived_class_that_multiplies_as_torchs() -> None:
    """Its FP8 layer has torch's bits and what the class adds; copies and pickles have the class."""
    torch.manual_seed(0)
    derived, plain = (torch.nn.Sequential(layer) for layer in (ConfiguredLinear(1), torch.nn.Linear(32, 64)))
    plain.load_state_dict(derived.state_dict())
    for model in (derived, plain):
        replace_linears(model)
    x, layer = torch.randn(16, 32), derived[0]
    assert isinstance(layer, FP8Linear) and isinstance(layer, ConfiguredLinear)
    assert torch.equal(derived(x), plain(x)) and report(derived).fp8 == ("0",)
    stored = io.BytesIO()
    torch.save(derived, stored)
    stored.seek(0)
    for copied in (torch.load(stored, weights_only=False), copy.deepcopy(derived)):
        assert type(copied[0]) is type(layer) and copied[0].depth == 1 and torch.equal(copied(x), plain(x))
    assert type(plain_model(derived)[0]) is ConfiguredLinear
    layer.init_states()
    assert layer.weight.dequantize().std().item() == pytest.approx(0.5, rel=0.1)  # 2,048 values: ±1.6% is one σ


def test_sizes_of_the_blockwise_recipe() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.Linear(256, 64))
    replace_linears(model, recipe="blockwise")
    assert isinstance(model[0], FP8Linear) and report(model).stays == {"1": "its size 64 is not a multiple of 128"}
    assert model(torch.randn(3, 128)).shape == (3, 64)


def test_gpt2s_conv1d() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    exact = transformers.pytorch_utils.Conv1D(96, 32)
    model = torch.nn.Sequential(transformers.pytorch_utils.Conv1D(96, 32))
    model[0].load_state_dict(exact.state_dict())
    replaced = replace_linears(model)
    layer = model[0]
    assert isinstance(layer, FP8Conv1D) and (layer.in_features, layer.out_features) == (32, 96)
    assert [weight.shape for weight in (*replaced, *replaced.values())] == [(32, 96), (96, 32)]
    x = torch.randn(16, 32)
    assert snr_db(model(x).detach(), exact(x).detach()) > 27.5  # E4M3 × E4M3, as in tests/nn/test_module.py
    state = model.state_dict()
    assert state["0.weight"].shape == (32, 96) and snr_db(state["0.weight"], exact.weight.detach()) > E4M3_DB
    exact.load_state_dict({name.removeprefix("0."): value for name, value in state.items()})
    plain = plain_model(model)
    assert type(plain[0]) is transformers.pytorch_utils.Conv1D and torch.equal(plain[0].weight, state["0.weight"])
    frozen = copy.deepcopy(model)
    assert isinstance(frozen[0], FP8Conv1D) and torch.equal(frozen(x), model(x)), "nobody trains it: it stays in FP8"
    model, _ = fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters()), "O3")
    state = model.state_dict()
    copied = copy.deepcopy(model)
    assert type(copied[0]) is type(exact) and torch.equal(copied[0].weight, state["0.weight"])
    again = torch.nn.Sequential(transformers.pytorch_utils.Conv1D(96, 32))
    replace_linears(again)
    again.load_state_dict(state)
    assert torch.equal(again.state_dict()["0.weight"], state["0.weight"])


def test_hooks_and_notes_survive() -> None:
    layer = torch.nn.Linear(32, 16)
    seen: list[int] = []
    layer.register_forward_hook(lambda *_: seen.append(1))
    layer.weight.has_no_decay = True  # type: ignore[attr-defined]
    replace_linears(torch.nn.Sequential(layer))
    layer(torch.randn(4, 32))
    assert seen == [1] and layer.weight.has_no_decay  # type: ignore[attr-defined]


def test_hooks_of_a_weight_stay_until_they_are_removed() -> None:
    """A mask of the gradient, as of pruned weights, that was registered before the layer became FP8."""
    model = torch.nn.Sequential(torch.nn.Linear(32, 16))
    seen: list[torch.Size] = []
    handles = [
        model[0].weight.register_hook(lambda grad: grad * 0),
        model[0].weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.shape)),
    ]
    model, _ = fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters()))
    for are_there in (True, False):
        model(torch.randn(4, 32)).square().mean().backward()
        grad = model[0].weight.grad
        assert grad is not None and bool((grad.clone() == 0).all()) == are_there
        assert seen == [(16, 32)] * are_there
        for handle in handles:
            handle.remove()
        seen.clear()
        model.zero_grad()


def test_a_hook_keeps_gpt2s_conv1d() -> None:
    """The hook knows the gradient [in, out], which FP8 stores as [out, in]."""
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    model = torch.nn.Sequential(conv1d(32, 32), conv1d(32, 32))
    model[0].weight.register_hook(lambda grad: grad)
    replace_linears(model)
    assert type(model[0]) is conv1d and isinstance(model[1], FP8Linear)
    assert "a hook waits for its weight's gradient" in str(report(model))


@pytest.mark.parametrize(
    ("dtype", "recipe", "message"),
    [
        (torch.float64, "tensorwise", r"1\.weight is torch\.float64; .* cast the model"),
        (torch.float32, "mxfp4", r"recipe\('mxfp4'\) is not one of tensorwise, delayed, blockwise, mxfp8"),
    ],
)
def test_errors_name_the_value_and_the_fix(dtype: torch.dtype, recipe: str, message: str) -> None:
    model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(32, 16, dtype=dtype))
    with pytest.raises(ValueError, match=message):
        replace_linears(model, recipe=recipe)  # type: ignore[arg-type]


def test_a_history_belongs_to_one_model() -> None:
    recipe = build_recipe("delayed")
    replace_linears(torch.nn.Sequential(torch.nn.Linear(32, 32)), recipe=recipe)
    other = torch.nn.Sequential(torch.nn.Linear(32, 32))
    with pytest.raises(ValueError, match="belongs to another model: give each model a recipe of its own"):
        replace_linears(other, recipe=recipe)
    assert type(other[0]) is torch.nn.Linear


def test_the_package_imports_nothing_until_a_name_is_used() -> None:
    program = (
        "import sys, fp8_megatron; before = [m for m in sys.modules if m.startswith(('fp8_megatron.', 'torch'))]; "
        "print(before, fp8_megatron.FP8Linear.__name__, 'replace_linears' in dir(fp8_megatron))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["[]", "FP8Linear", "True"]
    with pytest.raises(AttributeError, match="no attribute 'initialise'"):
        fp8_megatron.initialise  # noqa: B018
