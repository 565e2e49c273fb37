"""Transformer Engine's modules as FP8 layers, with stand-ins for the real ones (`te_stand_ins`).

Noise as in `tests/nn/test_fused.py`: two E4M3 operands a GEMM of fprop give 28.5 dB, an E5M2 and an E4M3 one of dgrad
and wgrad 24.5. Bounds are those powers added over the GEMMs on the way, less 1 dB for the sample, and 1 more for
gradients of vectors, which have 128 elements.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import fp8_megatron
from fp8_megatron.any_model import plain_model, replace_linears, report
from fp8_megatron.any_model.te_layers import ACTIVATIONS, FP8LayerNormLinear, FP8LayerNormMLP, FP8TELinear
from fp8_megatron.errors import UserError
from fp8_megatron.quantization.scaled_tensor import ScaledTensor
from fp8_megatron.quantization.stats import snr_db
from tests.any_model.te_stand_ins import GroupedLinear, LayerNormLinear, LayerNormMLP, Linear, QuantizedTensor

ONE_GEMM_DB, ONE_GRAD_DB = 27.5, 22.0
#: A gated activation multiplies two of fc1's outputs, so that their noise adds.
MLP_DB, MLP_GRAD_DB = 22.7, 18.5
#: A derivative with a step: noise of 28.5 dB in z, 0.038 σ, turns the sign of 0.038 / π of all z, whose whole gradient
#: is then wrong. That is 2.4% of the half that has one; with 1% of other noise 14.7 dB, less 2.
STEP_GRAD_DB = 12.7


def convert(module: torch.nn.Module, **arguments: Any) -> tuple[Any, Any]:
    """(FP8, a float64 copy of what it was)."""
    exact = copy.deepcopy(module).double()
    model = torch.nn.Sequential(module)
    replace_linears(model, **arguments)
    return model[0], exact


def check(module: Any, exact: Any, forward_db: float, backward_db: float, rows: int = 77) -> None:
    """Values, and the gradients of the input and of every plain parameter."""
    generator = torch.Generator().manual_seed(7)
    x = (torch.randn(rows, 128, generator=generator) * 2 + 0.3).bfloat16().requires_grad_()
    x64 = x.detach().double().requires_grad_()
    y, expected = module(x), exact(x64)
    ours, theirs = (value if isinstance(value, tuple) else (value,) for value in (y, expected))
    assert len(ours) == len(theirs)
    assert all(
        one.dtype is torch.bfloat16 and one.shape == other.shape for one, other in zip(ours, theirs, strict=True)
    )
    assert snr_db(ours[0].double(), theirs[0].detach()) > forward_db
    for one, other in zip(ours[1:], theirs[1:], strict=True):
        assert snr_db(one.double(), other.detach()) > 45.0  # BF16
    cotangent = torch.randn(theirs[0].shape, generator=generator).bfloat16()
    ours[0].backward(cotangent)
    theirs[0].backward(cotangent.double())
    assert snr_db(x.grad.double(), x64.grad) > backward_db
    found = {key: param.grad for key, param in module.named_parameters()}
    for key, param in exact.named_parameters():
        ours_key = key.replace("fc1_", "fc1.").replace("fc2_", "fc2.")
        if ours_key in found and param.grad is not None:
            assert snr_db(found[ours_key].double(), param.grad) > backward_db, key


@pytest.mark.parametrize("bias", [True, False], ids=["bias", ""])
@pytest.mark.parametrize("returns", [{}, {"return_bias": True}], ids=["", "returns_bias"])
def test_linear(bias: bool, returns: dict[str, bool]) -> None:
    if returns and not bias:
        pytest.skip("there is no bias to return")
    torch.manual_seed(0)
    module, exact = convert(Linear(128, 64, bias=bias, **returns))
    assert type(module) is FP8TELinear and isinstance(module.weight, ScaledTensor)
    check(module, exact, ONE_GEMM_DB, ONE_GRAD_DB)


@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("zero_centered", [False, True], ids=["", "zero_centered"])
@pytest.mark.parametrize("returns", [(), ("return_bias",), ("return_layernorm_output", "return_bias")], ids=str)
def test_layer_norm_linear(norm: str, zero_centered: bool, returns: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    settings = {"normalization": norm, "zero_centered_gamma": zero_centered, **dict.fromkeys(returns, True)}
    module, exact = convert(LayerNormLinear(128, 64, **settings))
    assert type(module) is FP8LayerNormLinear
    check(module, exact, ONE_GEMM_DB, ONE_GRAD_DB)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_layer_norm_mlp(activation: str) -> None:
    torch.manual_seed(0)
    module, exact = convert(LayerNormMLP(128, 256, activation=activation))
    assert type(module) is FP8LayerNormMLP
    check(module, exact, MLP_DB, STEP_GRAD_DB if activation in ("relu", "reglu") else MLP_GRAD_DB)


@pytest.mark.parametrize(
    "settings", [{"checkpoint": True}, {"return_bias": True, "return_layernorm_output": True}], ids=str
)
@pytest.mark.parametrize("activation", ["swiglu", "silu"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", ""])
def test_layer_norm_mlp_in_other_forms(settings: dict[str, Any], activation: str, bias: bool) -> None:
    if "return_bias" in settings and not bias:
        pytest.skip("there is no bias to return")
    torch.manual_seed(0)
    mlp = LayerNormMLP(128, 256, activation=activation, bias=bias, normalization="RMSNorm", **settings)
    check(*convert(mlp), MLP_DB, MLP_GRAD_DB)


@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
@pytest.mark.parametrize("kind", [LayerNormLinear, LayerNormMLP])
def test_other_recipes(recipe: str, kind: Any) -> None:
    torch.manual_seed(0)
    module, exact = convert(kind(128, 256), recipe=recipe)
    check(module, exact, MLP_DB, MLP_GRAD_DB)


@pytest.mark.parametrize("kind", [LayerNormLinear, LayerNormMLP])
def test_padding_changes_nothing(kind: Any) -> None:
    """77 rows get three more. They are copies of the last, so no scale changes, and they leave no gradient."""
    torch.manual_seed(0)
    module, _ = convert(kind(128, 256))
    x = torch.randn(80, 128).bfloat16()
    whole = module(torch.cat([x[:77], x[76:77].expand(3, -1)]))
    assert torch.equal(module(x[:77]), whole[:77])
    assert module(x[:0]).shape == (0, whole.shape[1])


@pytest.mark.parametrize("kind", [LayerNormLinear, LayerNormMLP])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("returns_norm", [False, True], ids=["", "returns_norm"])
def test_dtypes_autocast_and_plain_copies(kind: Any, dtype: torch.dtype, returns_norm: bool) -> None:
    torch.manual_seed(0)
    module, exact = convert(kind(128, 256, return_layernorm_output=returns_norm))

    def outputs(layer: Any, x: Tensor) -> tuple[Tensor, ...]:
        y = layer(x)
        return y if returns_norm else (y,)

    x = torch.randn(2, 24, 128).to(dtype)
    expected = outputs(exact, x.double())
    for y, value in zip(outputs(module, x), expected, strict=True):
        assert y.dtype is dtype and snr_db(y.double(), value.detach()) > MLP_DB
    for y, value in zip(outputs(plain_model(module), x), expected, strict=True):
        assert y.dtype is dtype and snr_db(y.double(), value.detach()) > 28.0  # the rounded weights
    with torch.autocast("cpu", torch.bfloat16):
        assert all(y.dtype is torch.bfloat16 for y in outputs(module, x))


@pytest.mark.parametrize("kind", [LayerNormLinear, LayerNormMLP])
def test_a_frozen_weight_has_no_gradient_and_the_norm_has(kind: Any) -> None:
    torch.manual_seed(0)
    module = kind(128, 256)
    for key, param in module.named_parameters():
        param.requires_grad_("layer_norm" in key)
    check(*convert(module), MLP_DB, MLP_GRAD_DB)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_model_trains_like_its_original(level: str, compiled: bool) -> None:
    if compiled and level != "O3":
        pytest.skip("one level shows it")

    def build() -> torch.nn.Module:
        torch.manual_seed(0)
        split = ("query", "key", "value")
        return torch.nn.Sequential(
            LayerNormLinear(64, 96, split=split),
            Linear(96, 64),
            LayerNormMLP(64, 128, activation="swiglu"),
            Linear(64, 32),
        )

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, call: Any) -> list[float]:
        generator = torch.Generator().manual_seed(1)
        matrix, losses = torch.randn(64, 32, generator=generator) / 8, []
        for _ in range(60):
            x = torch.randn(128, 64, generator=generator)
            target = (x @ matrix).tanh() + 0.5 * torch.randn(128, 32, generator=generator)  # noise: a floor of 0.25
            loss = (call(x) - target).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    plain = build()
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=2e-3), plain)
    model = build()
    model, optimizer = fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters(), lr=2e-3), level)
    assert len(report(model).fp8) == 5 and not report(model).stays
    measured = train(model, optimizer, torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model)
    ends = sum(expected[-5:]), sum(measured[-5:])
    assert ends[0] < 5 * 0.5 * expected[0]
    assert ends[1] < 1.02 * ends[0], ends


def split_model() -> torch.nn.Sequential:
    return torch.nn.Sequential(LayerNormLinear(64, 96, split=("query", "key", "value")), LayerNormMLP(96, 128))


def test_state_dicts_have_the_original_names() -> None:
    torch.manual_seed(0)
    original, other = split_model(), split_model()
    expected = original.state_dict()
    model = copy.deepcopy(original)
    model, _ = fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters()), "O2")
    state = model.state_dict()
    assert set(state) == set(expected)
    for key, value in expected.items():
        assert state[key].shape == value.shape or not value.numel()
        assert not value.numel() or snr_db(state[key], value) > 70.0, key  # FP16 masters
    other.load_state_dict(state)  # the originals take ours, strictly
    assert all(torch.equal(other.state_dict()[key], state[key]) for key in expected if expected[key].numel())
    torch.manual_seed(1)
    third = split_model()
    model.load_state_dict(third.state_dict())  # and ours theirs
    assert all(
        snr_db(model.state_dict()[key], value) > 70.0 for key, value in third.state_dict().items() if value.numel()
    )


def test_copies_and_plain_copies() -> None:
    torch.manual_seed(0)
    model = split_model()
    exact = copy.deepcopy(model).double()
    replace_linears(model)
    x = torch.randn(32, 64)
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    plain = plain_model(model)
    assert not any(isinstance(param, ScaledTensor) for param in plain.parameters()) and not report(plain).fp8
    assert (
        snr_db(plain(x).double(), exact(x.double()).detach()) > 25.7
    )  # the rounded weights of three layers, 31.5 dB each
    assert list(plain.state_dict()) == list(model.state_dict())
    for ours, new in zip(plain.state_dict().values(), model.state_dict().values(), strict=True):
        ours.lerp_(new, 0.5)
    model, _ = fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters()), "O3")
    copied = copy.deepcopy(model)
    assert not report(copied).fp8 and copied(x).shape == (32, 96)
    assert all(
        torch.equal(ours, new)
        for ours, new in zip(copied.state_dict().values(), model.state_dict().values(), strict=True)
    )
    again, _ = fp8_megatron.initialize(copied, torch.optim.AdamW(copied.parameters()), "O2", recipe="delayed")
    assert report(again).fp8 == report(model).fp8
    again(x).sum().backward()


def refused(module: torch.nn.Module, **changes: Any) -> str:
    for name, value in changes.items():
        setattr(module, name, value)
    with pytest.raises(UserError) as error:
        replace_linears(torch.nn.ModuleDict({"layer": module}))
    assert "\n" not in str(error.value) and "layer" in str(error.value)
    return str(error.value)


def test_refusals_name_the_module_and_the_setting() -> None:
    assert "tp_size=2" in refused(Linear(32, 32), tp_size=2)
    assert "sequence_parallel=True" in refused(LayerNormLinear(32, 32), sequence_parallel=True)
    assert "fuse_wgrad_accumulation=True" in refused(LayerNormMLP(32, 32), fuse_wgrad_accumulation=True)
    delayed = Linear(32, 32)
    delayed.wgrad_store.delay_wgrad_compute = lambda: True
    assert "delay_wgrad_compute" in refused(delayed)
    model = torch.nn.ModuleDict({"layer": Linear(32, 32, tp_size=2)})
    replace_linears(model, filter=lambda name, layer: False)  # it is left alone
    assert report(model).stays == {"layer": "the filter refuses it"}


def test_asking_for_their_fp8_tensors_is_an_error() -> None:
    module, _ = convert(Linear(32, 32))
    with pytest.raises(ValueError, match="fp8_output=True asks for Transformer Engine's own FP8 tensors"):
        module(torch.randn(16, 32), fp8_output=True)
    with pytest.raises(ValueError, match="fp8_grad=True"):
        module(torch.randn(16, 32), is_first_microbatch=True, fp8_grad=True)


def test_what_stays_has_a_reason() -> None:
    class Derived(Linear):
        pass

    tied = LayerNormMLP(64, 128)
    model = torch.nn.ModuleDict(
        {"derived": Derived(32, 32), "odd": LayerNormMLP(64, 100), "grouped": GroupedLinear(), "tied": tied}
    )
    model["embedding"] = torch.nn.Embedding(64, 128)
    model["embedding"].weight = tied.fc2_weight
    model["partly"] = Linear(32, 96, split=("key", "value"))
    model["partly"].key_weight.requires_grad_(False)
    model["hooked"] = Linear(32, 96, split=("key", "value"))
    model["hooked"].value_weight.register_hook(lambda grad: grad)
    replace_linears(model)
    assert report(model).stays == {
        "derived": "Derived is a class of its own",
        "odd": "its size 100 is not a multiple of 16",
        "grouped": "GroupedLinear is a class of its own",
        "tied": "its weight is also that of embedding",
        "partly": "parts of its weight are frozen",
        "hooked": "a hook waits for the gradient of a part of its weight",
    }


class Quantized(QuantizedTensor):
    """A weight in Transformer Engine's FP8 that keeps what it was made from."""

    def get_high_precision_init_val(self) -> Tensor | None:
        return self.__dict__.get("kept")


@pytest.mark.parametrize("keeps", [False, True], ids=["dequantised", "kept"])
def test_weights_in_their_fp8_are_taken(keeps: bool) -> None:
    """The masters start from what the weights were made from, if it is kept, and from the decoded weights otherwise."""
    torch.manual_seed(0)
    module, value = Linear(32, 64), torch.randn(64, 32)
    decoded = value.to(torch.float8_e4m3fn).float()
    weight = torch.nn.Parameter(decoded.as_subclass(Quantized))
    weight.dequantize = lambda: decoded.clone()  # type: ignore[method-assign]
    if keeps:
        weight.kept = value  # type: ignore[attr-defined]
    module._parameters["weight"] = weight
    model = torch.nn.Sequential(module)
    model, _ = fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters()), "O3")
    assert snr_db(model.state_dict()["0.weight"], value if keeps else decoded) > 70.0


def test_weights_in_their_fp8_that_stay_are_refused() -> None:
    module = Linear(32, 40)
    module._parameters["weight"] = torch.nn.Parameter(torch.randn(40, 32).as_subclass(Quantized))
    assert "fp8_model_init" in refused(module)


def test_parts_of_a_weight_in_two_groups_are_refused() -> None:
    model = torch.nn.Sequential(Linear(32, 96, split=("query", "key", "value")))
    groups = [{"params": [model[0].query_weight]}, {"params": [model[0].key_weight, model[0].value_weight]}]
    with pytest.raises(UserError, match=r"param_groups\[0\] and \[1\] hold parts of one weight"):
        fp8_megatron.initialize(model, torch.optim.AdamW(groups), "O2")
