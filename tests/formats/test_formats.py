"""Formats: what every one of them keeps to, and the FP8 linear layer under MXFP8."""

from __future__ import annotations

from typing import get_args, get_type_hints

import pytest
import torch

from fp8_megatron.config.precision import PrecisionConfig
from fp8_megatron.dtypes import STATE_BLOCK, StorageDtype
from fp8_megatron.formats.recipes import RecipeName, roles_of
from fp8_megatron.nn.module import FP8Linear
from fp8_megatron.quantization.recipe import Recipe
from fp8_megatron.quantization.stats import snr_db

RECIPES = get_args(RecipeName)
OPERANDS = [(recipe, role) for recipe in RECIPES for role in ("input", "weight", "grad_output")]


def test_the_configuration_knows_every_recipe() -> None:
    assert get_args(get_type_hints(PrecisionConfig)["fp8_recipe"]) == RECIPES
    for name in RECIPES:
        assert PrecisionConfig(fp8_recipe=name).gemm_multiple == roles_of(name, False).input.size_multiple


@pytest.mark.parametrize(("recipe", "role"), OPERANDS)
def test_scales_have_the_shape_that_is_said(recipe: RecipeName, role: str) -> None:
    format = getattr(roles_of(recipe, False), role)
    cast = format.cast(torch.randn(256, 384), transposed=True)
    assert cast.payload.dtype == cast.payload_t.dtype == format.dtype
    for operand in (cast, cast.t):
        assert operand.scale.shape == format.scale_shape(*operand.payload.shape)
        assert operand.scale.dtype == format.scale_dtype


@pytest.mark.parametrize(("recipe", "role"), OPERANDS)
def test_a_transpose_is_made_or_refused(recipe: RecipeName, role: str) -> None:
    format = getattr(roles_of(recipe, False), role)
    x = torch.randn(256, 384)
    rows, both = format.cast(x), format.cast(x, transposed=True)
    if format.transpose_keeps_scale:
        assert torch.equal(rows.transposed().payload.view(torch.uint8), both.payload_t.view(torch.uint8))
    else:
        with pytest.raises(ValueError, match="scales of its own for the transpose"):
            rows.transposed()


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
@pytest.mark.parametrize("dim", [0, 1])
def test_parts_join_to_the_cast_of_the_whole(recipe: RecipeName, dim: int) -> None:
    format = roles_of(recipe, False).input
    x = torch.randn(256, 256)
    joined, whole = format.joined([format.cast(part.contiguous()) for part in x.split(128, dim)], dim), format.cast(x)
    assert torch.equal(joined.payload.view(torch.uint8), whole.payload.view(torch.uint8))
    assert torch.equal(joined.scale.view(torch.uint8), whole.scale.view(torch.uint8))


@pytest.mark.parametrize("storage", [StorageDtype.FP8, StorageDtype.FP16])
@pytest.mark.parametrize(("recipe", "least"), [("blockwise", 27.0), ("mxfp8", 27.0), ("nvfp4", 12.0)])
def test_a_layers_products(recipe: RecipeName, least: float, storage: StorageDtype) -> None:
    """y and both gradients are near float64's of the layer's own weight, for operands whose rows differ in size.

    Noise is that of E4M3 in two operands, 28.5 dB, less 1.5 dB for a sample of 32 rows; of E2M1, one of them rounded
    stochastically, 14 dB.
    """
    torch.manual_seed(0)
    layer = FP8Linear(256, 2 * STATE_BLOCK, bias=False, recipe=Recipe(recipe, False), weight=storage)
    x = (torch.randn(128, 256) * torch.logspace(-3, 0, 128)[:, None]).bfloat16().requires_grad_()
    cotangent = torch.randn(128, 2 * STATE_BLOCK).bfloat16()
    y = layer(x)
    y.backward(cotangent)
    weight, exact_x, g = layer.weight.dequantize().double(), x.detach().double(), cotangent.double()
    assert x.grad is not None and layer.weight.grad is not None
    for rows, exact in zip(y.detach().split(32), (exact_x @ weight.t()).split(32), strict=True):
        assert snr_db(rows, exact) > least
    assert snr_db(x.grad, g @ weight) > least
    assert snr_db(layer.weight.grad, g.t() @ exact_x) > least
