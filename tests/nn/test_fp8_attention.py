"""FP8 attention with the projection behind it, against float64, and over the first steps of delayed scaling.

tests/kernels/test_fp8_attention.py has the noise of the kernels. Here the casts of query, key and value, of the weight
and of two output gradients add theirs.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fp8_megatron.nn.attention import AttentionOperands, fp8_attention_linear
from fp8_megatron.nn.gemms import LinearParams
from fp8_megatron.quantization.amax_history import AmaxHistory
from fp8_megatron.quantization.attention import AttentionQuantizers
from fp8_megatron.quantization.recipe import Recipe
from fp8_megatron.quantization.scaled_tensor import ScaledTensor
from fp8_megatron.quantization.stats import snr_db

SEQ, BATCH, HEADS, GROUPS, WIDTH, OUT = 96, 2, 4, 2, 32, 64
SCALE = 1 / math.sqrt(WIDTH)


class Layer:
    """Its casts, weight and random operands."""

    def __init__(self, *, gradient: float = 1e-5) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.history = AmaxHistory(4, "max", power_of_two=False)
        recipe = Recipe("delayed", False, self.history)
        self.quantizers = AttentionQuantizers.of(recipe)
        self.linear_quantizers = recipe.linear_quantizers()
        self.history.allocate(torch.device("cpu"))
        self.weight = ScaledTensor.quantize(random(OUT, HEADS * WIDTH) / math.sqrt(HEADS * WIDTH))
        whole = random(SEQ, BATCH, GROUPS, (HEADS // GROUPS + 2) * WIDTH).bfloat16()
        self.query, self.key, self.value = whole.split((HEADS // GROUPS * WIDTH, WIDTH, WIDTH), dim=3)
        self.addend = random(SEQ, BATCH, OUT).bfloat16()
        self.cotangent = (gradient * random(SEQ, BATCH, OUT)).bfloat16()

    def step(self) -> list[Tensor]:
        """Output, and gradients of query, key, value, weight and addend."""
        leaves = [x.detach().requires_grad_() for x in (self.query, self.key, self.value)]
        weight = self.weight.detach().requires_grad_()
        addend = self.addend.clone().requires_grad_()
        heads = leaves[0].reshape(SEQ, BATCH, HEADS, WIDTH)
        y = fp8_attention_linear(
            AttentionOperands(heads, leaves[1], leaves[2], self.quantizers, SCALE),
            LinearParams(weight, None, self.linear_quantizers),
            addend=addend,
        )
        grads = torch.autograd.grad(y, [*leaves, weight, addend], self.cotangent)
        return [y, *grads]

    def exact(self) -> list[Tensor]:
        """The same in float64, without a cast."""
        leaves = [x.double().requires_grad_() for x in (self.query, self.key, self.value)]
        weight, addend = self.weight.dequantize().double().requires_grad_(), self.addend.double().requires_grad_()
        q = leaves[0].reshape(SEQ, BATCH, HEADS, WIDTH).permute(1, 2, 0, 3)
        k, v = (x.permute(1, 2, 0, 3).repeat_interleave(HEADS // GROUPS, dim=1) for x in leaves[1:])
        context = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = context.permute(2, 0, 1, 3).reshape(SEQ, BATCH, -1) @ weight.t() + addend
        return [y, *torch.autograd.grad(y, [*leaves, weight, addend], self.cotangent.double())]


@pytest.mark.parametrize("steps", [1, 3])
def test_values_and_gradients(steps: int) -> None:
    """In the first step, whose scales come from the values, and later."""
    layer = Layer()
    for _ in range(steps):
        results = layer.step()
        layer.history.update(None)
    true = layer.exact()
    # Noise powers of E4M3 (31.5 dB) and E5M2 (25.5 dB) casts. y without its addend: V, P, O and the weight is exact:
    # 26.7 dB; softmax passes on the noise of Q and K as a change of P, about as large as P's own. Gradients: two
    # E5M2 casts in front of dS and dV's product, dS's own, and the result's: 19.5 dB, and V, K or Q's 31.5 dB.
    bounds = (24.0, 17.5, 17.5, 19.0, 20.0)
    y, grads = results[0] - layer.addend, results[1:5]
    exact_y = true[0] - layer.addend.double()
    for value, exact, bound in zip([y, *grads], [exact_y, *true[1:5]], bounds, strict=True):
        assert snr_db(value.double(), exact) > bound
    assert torch.equal(results[5], layer.cotangent)


def test_later_steps_have_the_first_ones_scales() -> None:
    """The same values give the same gradients, but for the headroom of casts in the kernel."""
    layer = Layer()
    first = layer.step()
    layer.history.update(None)
    second = layer.step()
    assert torch.equal(first[0], second[0])
    for one, other in zip(first[1:4], second[1:4], strict=True):
        assert snr_db(other.double(), one.double()) > 20


def test_backward_keeps_a_byte_a_value() -> None:
    layer = Layer()
    kept: list[Tensor] = []
    leaves = [x.detach().requires_grad_() for x in (layer.query, layer.key, layer.value)]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        fp8_attention_linear(
            AttentionOperands(leaves[0].reshape(SEQ, BATCH, HEADS, WIDTH), *leaves[1:], layer.quantizers, SCALE),
            LinearParams(layer.weight, None, layer.linear_quantizers),
        )
    tokens = SEQ * BATCH
    values = tokens * WIDTH * (2 * HEADS + 2 * GROUPS)
    assert sum(x.nbytes for x in kept) == values + 4 * tokens * HEADS + 3 * 4


def test_a_non_finite_query_marks_the_step() -> None:
    layer = Layer()
    layer.step()
    layer.history.update(None)
    layer.query[3, 1, 0, 5] = math.inf
    layer.step()
    squares = torch.zeros(1)
    layer.history.examine(squares)
    assert not torch.isfinite(squares).item()


def test_current_scaling_is_refused() -> None:
    with pytest.raises(ValueError, match=r"needs delayed scaling; recipe tensorwise"):
        AttentionQuantizers.of(Recipe("tensorwise", False))
