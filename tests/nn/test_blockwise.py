"""fp8_linear under the blockwise recipe: values, gradients, what it keeps, and weights at rest with one scale.

Noise is that of E4M3 in each operand (test_linear.py): 31.5 dB, so 28.5 dB for a GEMM of two, less 0.5 dB for the
sample. Blocks with sizes of their own keep it for operands whose blocks differ by orders of magnitude, where one scale
does not.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fp8_megatron.dtypes import E4M3, GEMM_BLOCK, STATE_BLOCK
from fp8_megatron.formats.blockwise import Blocks, Tiles
from fp8_megatron.formats.format import Quantized
from fp8_megatron.kernels import ops
from fp8_megatron.kernels.quantize import blockwise
from fp8_megatron.nn.gemms import LinearParams
from fp8_megatron.nn.linear import fp8_linear
from fp8_megatron.quantization.recipe import Recipe
from fp8_megatron.quantization.scaled_tensor import ScaledTensor
from fp8_megatron.quantization.stats import snr_db
from tests.harness.main_grad import KeptGrads

E4M3_E4M3_DB = 28.5 - 0.5
#: One rounding to BF16 less 1 dB (test_linear.py).
BF16_DB = 54.5
SEQ, BATCH, IN, OUT = 64, 4, 384, 256
BLOCKS, TILES = Blocks(E4M3), Tiles(E4M3)


class Problem:
    """A layer's tensors and a random cotangent; blocks of channels and of tokens differ by up to 10⁴ in size."""

    def __init__(self, *, fp16_weight: bool = False, power_of_two: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        tokens = torch.tensor([1.0, 1e4]).repeat_interleave(SEQ * BATCH // 2).view(SEQ, BATCH, 1)
        channels = torch.tensor([1.0, 1e-3, 10.0]).repeat_interleave(GEMM_BLOCK)
        self.x = (normal(SEQ, BATCH, IN) * channels * tokens).bfloat16().requires_grad_()
        self.value = 0.02 * normal(OUT, IN)
        self.weight = ScaledTensor.quantize(self.value)
        if fp16_weight:
            payload, scales = torch.empty(OUT * IN, dtype=torch.float16), torch.empty(OUT * IN // STATE_BLOCK)
            blockwise.quantize_blockwise_(self.value.view(-1), payload, scales)
            self.weight = ScaledTensor(payload.view(OUT, IN), scales)
        self.weight.requires_grad_()
        self.main_grad = KeptGrads()
        self.weight.main_grad = self.main_grad  # type: ignore[attr-defined]
        self.bias = normal(OUT).bfloat16().requires_grad_()
        self.cotangent = (normal(SEQ, BATCH, OUT) * torch.tensor([1e-4, 1.0]).repeat_interleave(OUT // 2)).bfloat16()
        self.quantizers = Recipe("blockwise", power_of_two).linear_quantizers()

    def linear(self, x: Tensor | None = None, bias: Tensor | None = None, *, keeps_input: bool = False) -> Tensor:
        params = LinearParams(self.weight, bias, self.quantizers)
        return fp8_linear(self.x if x is None else x, params, keeps_input=keeps_input)


@pytest.mark.parametrize("keeps_input", [False, True])
@pytest.mark.parametrize("fp16_weight", [False, True], ids=["fp8_weight", "fp16_weight"])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_forward_and_gradients_against_float64(keeps_input: bool, fp16_weight: bool, power_of_two: bool) -> None:
    p = Problem(fp16_weight=fp16_weight, power_of_two=power_of_two)
    y = p.linear(bias=p.bias, keeps_input=keeps_input)
    y.backward(p.cotangent)
    x, g = p.x.detach().double().view(-1, IN), p.cotangent.double().view(-1, OUT)
    product = x @ p.value.double().t()
    # By halves of the tokens and of the channels: the larger half does not hide the smaller one's noise.
    for half, exact in zip(y.detach().double().sub(p.bias.double()).view(2, -1, OUT), product.chunk(2), strict=True):
        assert snr_db(half, exact) > E4M3_E4M3_DB - 1.0 * (not fp16_weight)
    assert p.x.grad is not None and p.bias.grad is not None
    assert snr_db(p.x.grad.view(-1, IN), g @ p.value.double()) > E4M3_E4M3_DB - 1.0 * (not fp16_weight)
    (grad_weight,) = p.main_grad.grads
    for half, exact in zip(grad_weight.chunk(2), (g.t() @ x).chunk(2), strict=True):
        for part, exact_part in zip(half.split(GEMM_BLOCK, dim=1), exact.split(GEMM_BLOCK, dim=1), strict=True):
            assert snr_db(part, exact_part) > E4M3_E4M3_DB
    assert snr_db(p.bias.grad, g.sum(dim=0)) > BF16_DB


def _decoded(operand: Quantized) -> Tensor:
    return ops.dequantize_blocks(operand.payload, operand.scale).double()


def test_each_gemm_is_its_rounded_operands_product() -> None:
    """No noise but the operands' rounding and one to BF16: each role has its blocks along its own sum."""
    p = Problem()
    y = p.linear()
    y.backward(p.cotangent)
    x, g = (BLOCKS.cast(value.detach().view(SEQ * BATCH, -1), transposed=True) for value in (p.x, p.cotangent))
    weight = p.weight.dequantize().double()
    assert p.x.grad is not None
    assert snr_db(y.view(-1, OUT), _decoded(x) @ weight.t()) > BF16_DB
    assert snr_db(p.x.grad.view(-1, IN), _decoded(g) @ weight) > BF16_DB
    assert snr_db(p.main_grad.grads[0], _decoded(g.t) @ _decoded(x.t).t()) > BF16_DB


@pytest.mark.parametrize("shape", [(OUT, IN), (512, 256)], ids=["padded_scales", "whole_scales"])
def test_a_weight_with_one_scale_is_tiles_exactly(shape: tuple[int, int]) -> None:
    """FP8 at rest is not rounded again: every tile has the tensor's scale, in both layouts."""
    weight = ScaledTensor.quantize(torch.randn(shape))
    operand = weight.gemm_operand(TILES)
    assert operand.payload is weight.payload
    assert torch.equal(ops.dequantize_blocks(operand.payload, operand.scale), weight.dequantize())
    transposed = operand.transposed()
    assert torch.equal(ops.dequantize_blocks(transposed.payload, transposed.scale), weight.dequantize().t())


def test_blocks_have_no_transpose_to_make() -> None:
    with pytest.raises(ValueError, match="E4M3 per 1×128 has scales of its own for the transpose"):
        BLOCKS.cast(torch.randn(128, 128)).transposed()


def test_saves_the_input_once_in_fp8() -> None:
    p, sizes = Problem(), []

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        p.linear(bias=p.bias)
    assert sorted(sizes) == [4 * p.x.numel() // GEMM_BLOCK, p.x.numel()]


@pytest.mark.parametrize("keeps_input", [False, True])
def test_recomputed_forward_gives_the_same_gradients(keeps_input: bool) -> None:
    grads = []
    for recompute in (False, True):
        p = Problem()
        if recompute:
            checkpoint(p.linear, p.x, keeps_input=keeps_input, use_reentrant=False).backward(p.cotangent)
        else:
            p.linear(keeps_input=keeps_input).backward(p.cotangent)
        grads.append((p.x.grad, p.main_grad.grads[0]))
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_bad_values_reach_the_gradient(bad: float) -> None:
    p = Problem()
    p.cotangent[0, 0, 0] = bad
    p.linear().backward(p.cotangent)
    assert not p.main_grad.grads[0].isfinite().all()
