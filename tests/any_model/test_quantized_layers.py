"""Models whose layers hold FP8 weights with scales, of transformers and compressed-tensors, are trained on."""

from __future__ import annotations

import types
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="its FP8 layers are taken (pip install -e '.[dev]')")

from transformers import Qwen3MoeConfig
from transformers.integrations.compressed_tensors import CompressedTensorsFP8Linear
from transformers.integrations.fbgemm_fp8 import FbgemmFp8Linear
from transformers.integrations.finegrained_fp8 import FP8Experts as TheirExperts
from transformers.integrations.finegrained_fp8 import FP8GroupedLinear
from transformers.integrations.finegrained_fp8 import FP8Linear as TheirLinear

import fp8_megatron
from fp8_megatron.any_model import plain_model
from fp8_megatron.dtypes import E4M3
from fp8_megatron.errors import UserError
from fp8_megatron.moe.any_model.experts import FP8Experts
from fp8_megatron.nn.module import FP8Linear

Layer = torch.nn.Module


def _fill(layer: Layer, scale: str, spread: tuple[int, int] | None) -> Tensor:
    """Draw a weight and its scales. Returns payload · scale in float64, rounded once to FP32.

    Args:
        scale: the scale's name.
        spread: rows and columns that share a scale; None: the layer has one scale.
    """
    weight, scales = layer._parameters["weight"], layer._parameters[scale]
    assert weight is not None and scales is not None
    rows, columns = weight.shape
    weight.data.copy_((torch.randn(rows, columns) * 100).to(E4M3))
    scales.data.copy_(torch.rand(scales.shape).add(0.5) * 1e-3)
    across, down = spread or (rows, columns)
    table = scales.data.double().reshape(-(-rows // across), -(-columns // down))
    return (weight.data.double() * table[torch.arange(rows) // across][:, torch.arange(columns) // down]).float()


def _blocks(width: int, out: int) -> tuple[Layer, Tensor]:
    layer = TheirLinear(width, out, block_size=(128, 128), has_bias=True)
    torch.nn.init.normal_(layer.bias)
    return layer, _fill(layer, "weight_scale_inv", (128, 128))


def _tensor(width: int, out: int) -> tuple[Layer, Tensor]:
    layer = TheirLinear(width, out, activation_scheme="static")
    return layer, _fill(layer, "weight_scale_inv", None)


def _fbgemm(width: int, out: int) -> tuple[Layer, Tensor]:
    layer = FbgemmFp8Linear(width, out, bias=True)
    return layer, _fill(layer, "weight_scale", (1, width))


def _rowwise(width: int, out: int) -> tuple[Layer, Tensor]:
    layer = CompressedTensorsFP8Linear(width, out)
    return layer, _fill(layer, "weight_scale", (1, width))


def _compressed(width: int, out: int) -> tuple[Layer, Tensor]:
    """What compressed-tensors makes of a `torch.nn.Linear`."""
    layer = torch.nn.Linear(width, out)
    layer.weight = torch.nn.Parameter(torch.zeros(out, width, dtype=E4M3), requires_grad=True)
    layer.weight_scale = torch.nn.Parameter(torch.ones(out, 1, dtype=torch.bfloat16), requires_grad=False)
    layer.register_buffer("input_scale", torch.ones(1))
    layer.quantization_scheme = object()
    layer.forward = lambda x: pytest.fail("its forward casts")  # type: ignore[assignment]
    return layer, _fill(layer, "weight_scale", (1, width))


KINDS = [_blocks, _tensor, _fbgemm, _rowwise, _compressed]


def _models(make: Callable[[int, int], tuple[Layer, Tensor]]) -> tuple[torch.nn.Sequential, torch.nn.Sequential]:
    """A model of quantised layers, and one of plain layers with the values of theirs."""
    torch.manual_seed(3)
    quantized, plain = torch.nn.Sequential(), torch.nn.Sequential()
    for width, out in ((256, 384), (384, 144)):
        layer, value = make(width, out)
        own = torch.nn.Linear(width, out, bias=layer.bias is not None)
        own.weight.data.copy_(value)
        if layer.bias is not None:
            own.bias.data.copy_(layer.bias.data)
        quantized.extend((layer, torch.nn.GELU()))
        plain.extend((own, torch.nn.GELU()))
    return quantized, plain


def _train(model: Layer, optimizer: torch.optim.Optimizer) -> list[float]:
    torch.manual_seed(5)
    losses = []
    for _ in range(3):
        x, target = torch.randn(64, 256), torch.randn(64, 144)
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_training_goes_on_from_payload_times_scale(
    make: Callable[[int, int], tuple[Layer, Tensor]], level: str
) -> None:
    """Every bit of every step is that of a model whose plain FP32 weights are payload · scale."""
    losses, states = [], []
    for model in _models(make):
        model, optimizer = fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), level)
        assert isinstance(model[0], FP8Linear) and isinstance(model[2], FP8Linear)
        losses.append(_train(model, optimizer))
        states.append(model.state_dict())
        assert set(dict(model.named_parameters())) <= {f"{i}.{name}" for i in (0, 2) for name in ("weight", "bias")}
        assert type(plain_model(model)[0]) is torch.nn.Linear
    assert losses[0] == losses[1]
    for name, value in states[1].items():
        assert torch.equal(states[0][name], value.to(states[0][name].dtype)), name


def test_layers_that_stay_are_plain_and_trained() -> None:
    model, twin = _models(_blocks)
    names = {"0": "filter", "2": ""}
    model, optimizer = fp8_megatron.initialize(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), filter=lambda name, layer: names[name] != "filter"
    )
    stays = model[0]
    assert type(stays) is torch.nn.Linear and torch.equal(stays.weight, twin[0].weight)
    before = stays.weight.detach().clone()
    _train(model, optimizer)
    moved = (stays.weight - before).abs()
    assert 1e-3 < moved.median() < 5e-2, "about three steps of the learning rate"


def test_frozen_weights_are_rounded_once() -> None:
    model, twin = _models(_blocks)
    for one in (model, twin):
        one[0].requires_grad_(False)
    pair = [fp8_megatron.initialize(one, torch.optim.AdamW(one.parameters()))[0] for one in (model, twin)]
    assert torch.equal(*(one[0].weight.dequantize() for one in pair))


def test_the_model_is_saved_as_a_plain_one() -> None:
    model, _ = _models(_compressed)
    removed: list[Layer] = []
    model.hf_quantizer = types.SimpleNamespace(remove_quantization_config=removed.append)
    model.ct_decompress_hook = model.register_forward_pre_hook(lambda *_: pytest.fail("it would decompress"))
    model, optimizer = fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters()))
    _train(model, optimizer)
    assert removed == [model] and not hasattr(model, "ct_decompress_hook")


@pytest.mark.parametrize("block", [(128, 128), None])
def test_experts(block: tuple[int, int] | None) -> None:
    """Their scales: of 128 × 128 elements, or of gate, of up and of the second projection."""
    config = Qwen3MoeConfig(hidden_size=128, moe_intermediate_size=256, num_experts=4, hidden_act="silu")
    config._experts_implementation = "eager"
    theirs, values = TheirExperts(config, block_size=block), {}
    for name in ("gate_up_proj", "down_proj"):
        weight, scale = theirs._parameters[name], theirs._parameters[f"{name}_scale_inv"]
        assert weight is not None and scale is not None
        weight.data.copy_((torch.randn(weight.shape) * 100).clamp(-448, 448).to(E4M3))
        scale.data.copy_(torch.rand(scale.shape).add(0.5) * 1e-3)
        rows, columns = (weight.shape[1] // scale.shape[1], weight.shape[2] // scale.shape[2])
        spread = scale.data.double().repeat_interleave(rows, 1).repeat_interleave(columns, 2)
        values[name] = (weight.data.double() * spread).float()
    model, _ = fp8_megatron.initialize(theirs, torch.optim.AdamW(theirs.parameters(), lr=0.0), "O2")
    assert isinstance(model, FP8Experts)
    assert set(model.state_dict()) == {"gate_up_proj", "down_proj"}
    for name, value in plain_model(model).state_dict().items():
        # The master is FP16 with a scale for 256 values, and the state dict BF16, as a model without other weights.
        torch.testing.assert_close(value.float(), values[name], rtol=2**-8 + 2**-11, atol=2**-20)
    x, probs = torch.randn(32, 128), torch.rand(32, 2)
    index = torch.rand(32, 4).topk(2).indices
    expected = torch.zeros(32, 128)
    for token in range(32):
        for expert, prob in zip(index[token], probs[token], strict=True):
            gate, up = (values["gate_up_proj"][expert] @ x[token]).chunk(2)
            expected[token] += prob * (values["down_proj"][expert] @ (torch.nn.functional.silu(gate) * up))
    with torch.no_grad():
        output = model(x, index, probs)
    noise = (output - expected).norm() / expected.norm()
    assert 1e-3 < noise < 0.1, "within FP8's error, and FP8 indeed"


def _small_blocks() -> Layer:
    return TheirLinear(256, 256, block_size=(64, 64))


def _grouped() -> Layer:
    return FP8GroupedLinear(256, 256, n_groups=2, block_size=(128, 128))


def _packed() -> Layer:
    layer = torch.nn.Linear(256, 256)
    del layer.weight
    layer.weight_packed = torch.nn.Parameter(torch.zeros(256, 32, dtype=torch.int32), requires_grad=False)
    return layer


def _without_scale() -> Layer:
    layer = torch.nn.Linear(256, 256)
    layer.weight = torch.nn.Parameter(torch.zeros(256, 256, dtype=E4M3))
    return layer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_small_blocks, r"1 is a FP8Linear with block_size\(\(64, 64\)\), not \(128, 128\): load the model with dequ"),
        (_grouped, "1 is a FP8GroupedLinear with FP8 weights, which no FP8 layer replaces: load the model with"),
        (_packed, "1 is a Linear with packed weights, which no FP8 layer replaces: load the model with"),
        (_without_scale, r"1\.weight of a Linear is FP8 without a scale beside it: give it a weight_scale"),
    ],
)
def test_others_are_refused_by_name_and_nothing_changes(make: Callable[[], Layer], message: str) -> None:
    model = torch.nn.Sequential(_blocks(256, 256)[0], make())
    before = {name: type(module) for name, module in model.named_modules()}
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(UserError, match=message):
        fp8_megatron.initialize(model, optimizer)
    assert {name: type(module) for name, module in model.named_modules()} == before
    assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))
