"""An MLP over chunks of tokens beside the whole one: the same casts where scales are delayed or of blocks."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from fp8_megatron.activation_functions import Activation
from fp8_megatron.nn.chunked_mlp import fp8_norm_mlp_in_chunks
from fp8_megatron.nn.gemms import LinearParams
from fp8_megatron.nn.links import LinearLinks
from fp8_megatron.nn.mlp import fp8_norm_mlp
from fp8_megatron.nn.normed import NormParams
from fp8_megatron.quantization.amax_history import AmaxHistory
from fp8_megatron.quantization.early_cast import EarlyCast
from fp8_megatron.quantization.recipe import Recipe
from fp8_megatron.quantization.scaled_tensor import ScaledTensor
from fp8_megatron.quantization.sources import GradSource
from tests.harness.main_grad import KeptGrads
from tests.nn.test_fused import normal

SEQ, BATCH, HIDDEN, FFN, ROWS = 80, 4, 128, 256, 32


@dataclass
class Result:
    """What a step leaves."""

    y: Tensor
    grad_x: Tensor
    norm: Tensor
    biases: list[Tensor]
    weights: list[KeptGrads]
    scales: Tensor | None


def step(recipe_name: str, *, in_chunks: bool, adds_input: bool, early: bool = False) -> Result:
    """The last of two steps. The first one is whole, so that both forms have the same delayed scales."""
    history = AmaxHistory(4, "most_recent", power_of_two=False) if recipe_name == "delayed" else None
    recipe = Recipe(recipe_name, False, history, delays_weight_grads=history is not None)  # type: ignore[arg-type]
    own1, own2, receiver = recipe.linear_quantizers(), recipe.linear_quantizers(), EarlyCast()
    receiver.expect(recipe.linear_quantizers().grad_output, transposed=True)
    if history is not None:
        history.allocate(torch.device("cpu"))
    weights = [ScaledTensor.quantize(normal(*shape, seed=5, size=0.05)) for shape in ((2 * FFN, HIDDEN), (HIDDEN, FFN))]
    main_grads = [KeptGrads(weight.numel()) for weight in weights]
    for weight, main_grad in zip(weights, main_grads, strict=True):
        weight.requires_grad_().main_grad = main_grad  # type: ignore[attr-defined]
    biases = [normal(size, seed=4, size=0.2).bfloat16().requires_grad_() for size in (2 * FFN, HIDDEN)]
    links = LinearLinks()
    if early:
        links.early_cast.expect(own2.grad_output, transposed=not in_chunks)
    for index in range(2):
        x = normal(SEQ, BATCH, HIDDEN, seed=index, size=2.0).bfloat16().requires_grad_()
        norm_weight = (1 + normal(HIDDEN, seed=2, size=0.2)).bfloat16().requires_grad_()
        for bias in biases:
            bias.grad = None
        operands = (
            x,
            NormParams(norm_weight, None, 1e-5, True, receiver),
            LinearParams(weights[0], biases[0], own1),
            LinearParams(weights[1], biases[1], own2, links=links),
            Activation("swiglu"),
        )
        if in_chunks and index == 1:
            y, residual = fp8_norm_mlp_in_chunks(*operands, rows=ROWS, adds_input=adds_input)
        else:
            y, residual = fp8_norm_mlp(*operands, adds_input=adds_input)
        grad = normal(*y.shape, seed=6 + index, size=1e-3).bfloat16()
        if early and links.early_cast.known_scale() is not None:
            source = GradSource(grad.view(-1, HIDDEN), column_sums=True, transposed=not in_chunks)
            links.early_cast.put(grad, own2.grad_output.quantize(source))
        if residual is None:
            y.backward(grad)
        else:
            torch.autograd.backward([y, residual], [grad, grad])
        if history is not None:
            history.update(None)
    assert x.grad is not None and norm_weight.grad is not None
    grads = [bias.grad for bias in biases if bias.grad is not None]
    return Result(y.detach(), x.grad, norm_weight.grad, grads, main_grads, None if history is None else history.scale)


@pytest.mark.parametrize("adds_input", [True, False])
@pytest.mark.parametrize(
    ("recipe", "early"), [("delayed", False), ("delayed", True), ("blockwise", False), ("tensorwise", False)]
)
def test_the_chunks_are_the_whole(recipe: str, early: bool, adds_input: bool) -> None:
    """Casts and rows have the same bits. A weight's gradient is the same sum in another order, in FP32; the whole one
    is rounded to BF16 once, 2⁻⁹. A bias's is added in another order too.

    One chunk's own scale, under current scaling, moves the rounding of every value: noise of two casts a GEMM apart.
    """
    whole, parts = (step(recipe, in_chunks=cuts, adds_input=adds_input, early=early) for cuts in (False, True))
    same_casts = recipe != "tensorwise"
    for name in ("y", "grad_x", "norm"):
        mine, theirs = getattr(parts, name), getattr(whole, name)
        if same_casts:
            assert torch.equal(mine, theirs), name
        else:
            assert not torch.equal(mine, theirs)
            assert (mine - theirs).float().norm() < 0.15 * theirs.float().norm(), name
    bound = 2**-8 if same_casts else 0.15
    for mine, theirs in zip(parts.biases, whole.biases, strict=True):
        assert (mine - theirs).abs().max() <= (2**-7 if same_casts else 0.15) * theirs.abs().max()
    for mine, theirs in zip(parts.weights, whole.weights, strict=True):
        assert len(mine.grads) == len(theirs.grads) == 2  # one a step, whatever the chunks
        assert (mine.grads[-1] - theirs.grads[-1]).norm() < bound * theirs.grads[-1].norm()
        assert (mine.fp8 is None) == (theirs.fp8 is None) == (recipe != "delayed")
        if mine.fp8 is not None and theirs.fp8 is not None:
            apart = mine.fp8 != theirs.fp8  # a value at a border of two rounds to either
            assert apart.float().mean() < 0.01
            assert (mine.fp8 - theirs.fp8).norm() < 0.01 * theirs.fp8.norm()
    if parts.scales is not None and whole.scales is not None:  # of the next step, from the amaxes of this one
        torch.testing.assert_close(parts.scales, whole.scales, rtol=2**-8, atol=0.0)
