"""Probes of casts: what they measure of every kind of source is what float64 says of the values and the payload."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8_megatron.activation_functions import Activation
from fp8_megatron.dtypes import MAX_FINITE
from fp8_megatron.formats.blockwise import Blocks
from fp8_megatron.formats.format import Quantized
from fp8_megatron.formats.mxfp8 import MXFP8
from fp8_megatron.formats.recipes import RecipeName
from fp8_megatron.kernels import ops
from fp8_megatron.kernels.ops import Statistic
from fp8_megatron.moe.layers.sources import ExpertActivationGradSource, ExpertActivationSource
from fp8_megatron.quantization import cast_health
from fp8_megatron.quantization.amax_history import AmaxHistory
from fp8_megatron.quantization.cast_health import CastProbe
from fp8_megatron.quantization.recipe import LinearQuantizers, Recipe
from fp8_megatron.quantization.sources import (
    ActivationGradSource,
    ActivationSource,
    GradSource,
    NormSource,
    QKVGradSource,
    TensorSource,
)

T, K = 128, 256
double = torch.float64


def drawn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


def probe() -> CastProbe:
    made = CastProbe()
    made.statistics, made.is_due = torch.zeros(ops.NUM_STATISTICS, dtype=double), True
    return made


def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(x.double(), x.shape[-1:], weight.double(), bias.double(), 1e-5)


def swiglu(z: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=1)
    return gate * torch.sigmoid(gate) * up


def swiglu_backward(grad: Tensor, z: Tensor) -> Tensor:
    leaf = z.double().requires_grad_()
    (found,) = torch.autograd.grad(swiglu(leaf), leaf, grad.double())
    return found


def sources() -> dict[str, tuple[str, Any, Callable[[], Tensor]]]:
    """Name → (role, source, its values in float64)."""
    x, weight, bias, z = drawn(T, K), drawn(K, seed=1), drawn(K, seed=2), drawn(T, 2 * K, seed=3)
    qkv = [drawn(16, 8, 2, width, seed=width) for width in (64, 32, 32)]
    activation_format = Recipe("tensorwise", False).roles.input
    activation_grad = ActivationGradSource(x, z, Activation("swiglu"), activation_format, None, False)
    return {
        "tensor": ("input", TensorSource(x, transposed=True), x.double),
        "gradient": ("grad_output", GradSource(x, column_sums=True), x.double),
        "qkv": ("grad_output", QKVGradSource(qkv), lambda: torch.cat(qkv, dim=-1).double().view(T, -1)),
        "norm": ("input", NormSource(x, weight, bias, 1e-5, False), lambda: norm(x, weight, bias)),
        "activation": ("input", ActivationSource(z, Activation("swiglu")), lambda: swiglu(z.double())),
        "activation gradient": ("grad_output", activation_grad, lambda: swiglu_backward(x, z)),
    }


def quantizers(recipe: RecipeName, saturation: float) -> LinearQuantizers:
    """With probes; delayed scales are `saturation` times too small for values of amax 1."""
    history = AmaxHistory(2, "max", power_of_two=False) if recipe == "delayed" else None
    made = Recipe(recipe, False, history, has_probes=True).linear_quantizers()
    if history is not None:
        history.allocate(torch.device("cpu"))
        assert history.amax is not None
        history.amax.fill_(1 / saturation)
        history.update(None)
    for quantizer in (made.input, made.grad_output):
        assert quantizer.probe is not None
        quantizer.probe.statistics = torch.zeros(ops.NUM_STATISTICS, dtype=double)
    return made


def restored(operand: Quantized) -> tuple[Tensor, Tensor]:
    """What the payload stands for, and the scale of each element, in float64."""
    scale = operand.scale.double()
    if isinstance(operand.format, Blocks):
        scale = scale.t().repeat_interleave(128, dim=1)
    elif isinstance(operand.format, MXFP8):
        scale = scale.repeat_interleave(32, dim=1)
    return operand.payload.double() * scale, scale.expand(operand.payload.shape)


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
@pytest.mark.parametrize("is_grad", [False, True])
def test_rows_of_no_expert_are_not_measured(recipe: RecipeName, is_grad: bool) -> None:
    """Nobody writes their payloads and scales, and they are not counted."""
    made = Recipe(recipe, False, has_probes=True).grouped_quantizers()
    z, offsets = drawn(256, 2 * K, seed=3), torch.tensor([0, 128, 128]).int()
    probs = torch.cat([torch.rand(128), torch.zeros(128)])  # of no token: 0
    forward = ExpertActivationSource(z, probs, offsets, Activation("swiglu"))
    source, quantizer, size = forward, made.input, K
    if is_grad:
        scale = torch.ones(1) if recipe == "tensorwise" else None
        source = ExpertActivationGradSource(drawn(256, K), forward, made.input.format, scale)  # type: ignore[assignment]
        quantizer, size = made.grad_output, 2 * K
    cast = quantizer.quantize(source)
    operand = cast if isinstance(cast, Quantized) else cast.operand
    operand.payload.view(torch.uint8)[128:] = 0x7F
    if recipe == "blockwise":
        operand.scale[:, 128:] = torch.nan
    assert quantizer.probe is not None
    quantizer.probe.statistics = torch.zeros(ops.NUM_STATISTICS, dtype=double)
    quantizer.probe.measure_source(source, cast)
    found = quantizer.probe.statistics
    assert found[Statistic.COUNT] == 128 * size and found[Statistic.NON_FINITE] == 0
    noise = 10 * torch.log10(found[Statistic.SQUARES] / found[Statistic.ERRORS])
    assert noise > (24.0 if is_grad and recipe == "tensorwise" else 30.0)


@pytest.mark.parametrize("sampled_elements", [1 << 21, 1 << 12])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise", "mxfp8"])
@pytest.mark.parametrize("name", sources())
def test_a_probe_measures_what_was_cast(
    name: str, recipe: RecipeName, sampled_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under mxfp8, values that are computed are rounded to 16 bits before the cast: by up to 2⁻⁹ each."""
    monkeypatch.setattr(cast_health, "SAMPLED_ELEMENTS", sampled_elements)
    role, source, values = sources()[name]
    made = quantizers(recipe, saturation=2.0)
    if name == "activation gradient":
        scale = torch.ones(1) if recipe in ("tensorwise", "delayed") else None
        source = replace(source, activation_format=made.input.format, activation_scale=scale)
    quantizer = getattr(made, role)
    quantizer.quantize(source)
    assert not quantizer.probe.statistics.any(), "nothing was due"
    quantizer.probe.is_due = True
    cast = quantizer.quantize(source)
    assert not quantizer.probe.is_due
    operand = cast if isinstance(cast, Quantized) else cast.operand

    value = values()
    step = cast_health.row_step(*value.shape)
    rows = torch.arange(T)[::step]
    if name == "qkv":  # whole sequence positions of 8 rows each
        rows = torch.arange(T).view(16, 8)[::step].reshape(-1)
    assert (step > 1) == (sampled_elements == 1 << 12)
    decoded, scale = (tensor[rows] for tensor in restored(operand))
    value = value[rows]
    largest = MAX_FINITE[operand.format.dtype]
    found = quantizer.probe.statistics
    assert found[Statistic.COUNT] == value.numel() and found[Statistic.NON_FINITE] == 0
    tolerance = 1e-4  # FP32 against float64: about 2⁻²⁰ of a value
    if recipe == "mxfp8":
        value = value.bfloat16().double()
        tolerance = 2e-3  # an FP32 value on the other side of a border between two BF16 values: 2⁻⁸, of some elements
    for statistic, expected in {
        Statistic.AMAX: value.abs().max(),
        Statistic.SQUARES: value.square().sum(),
        Statistic.ERRORS: (decoded - value).square().sum(),
        Statistic.FOURTHS: value.pow(4).sum(),
        Statistic.FILL: (value.abs() / scale / largest).max(),
    }.items():
        torch.testing.assert_close(found[statistic], expected, rtol=tolerance, atol=0.0)
    saturated = (value.abs() / scale > largest).sum()
    if recipe == "delayed":
        assert found[Statistic.SATURATED] == pytest.approx(saturated.item(), rel=0.01) and saturated > 0
    else:
        assert found[Statistic.SATURATED] == 0


def test_a_probe_measures_once() -> None:
    quantizer = quantizers("tensorwise", 1.0).input
    assert quantizer.probe is not None and quantizer.probe.statistics is not None
    quantizer.probe.is_due = True
    for _ in range(3):
        quantizer.quantize(TensorSource(drawn(T, K)))
    assert quantizer.probe.statistics[Statistic.COUNT] == T * K


def test_weights_in_tiles_and_stored_weights() -> None:
    """A stored weight has no error; one cast from 16 bits has that of its tiles' scales."""
    recipe = Recipe("blockwise", False)
    weight = drawn(208, 384) * torch.logspace(-3, 0, 208)[:, None]
    operand = recipe.roles.weight.cast(weight)
    scale = operand.scale[:, :3].repeat_interleave(128, 0)[:208].repeat_interleave(128, 1).double()
    errors = (operand.payload.double() * scale - weight.double()).square().sum()
    measured, stored = probe(), probe()
    measured.measure_weight(weight, operand)
    stored.measure_stored(operand)
    assert measured.statistics is not None and stored.statistics is not None
    torch.testing.assert_close(measured.statistics[Statistic.ERRORS], errors, rtol=1e-12, atol=0.0)
    assert stored.statistics[Statistic.ERRORS] < 1e-13 * stored.statistics[Statistic.SQUARES]
    assert stored.statistics[Statistic.UNDERFLOWED] == 0


@pytest.mark.parametrize("numel", [100, 1000, 4096])
def test_flat_gradients_in_blocks(numel: int) -> None:
    grad = drawn(numel) * torch.logspace(-6, 0, numel)
    padded = -(-numel // 128) * 128
    payload, scales = torch.empty(padded, dtype=torch.float8_e4m3fn), torch.empty(padded // 128)
    ops.quantize_blockwise_(grad, payload, scales)
    measured = probe()
    measured.measure_blocks(grad, payload, scales)
    assert measured.statistics is not None and not measured.is_due
    whole = numel // 128 * 128
    errors = (payload.double() * scales.double().repeat_interleave(128))[:whole] - grad[:whole].double()
    assert measured.statistics[Statistic.COUNT] == whole
    torch.testing.assert_close(measured.statistics[Statistic.ERRORS], errors.square().sum(), rtol=1e-12, atol=0.0)
