"""fp8_linear against float64: values, gradients, what it stores and when it writes.

Rounding noise of one operand, as a signal-to-noise ratio: a mantissa of m bits has steps of 2⁻ᵐ and noise 2⁻²ᵐ/12,
which for values spread over several binades averages to 31.5 dB in E4M3 (m = 3) and 25.5 dB in E5M2 (m = 2). The noise
powers of a GEMM's two operands add: E4M3 × E4M3 keeps 28.5 dB, E5M2 × E4M3 24.5 dB. Tests allow 0.5 dB for the sample.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fp8_megatron.dtypes import E4M3, E5M2, STATE_BLOCK
from fp8_megatron.errors import UserError
from fp8_megatron.kernels import ops, reference
from fp8_megatron.nn.gemms import LinearParams
from fp8_megatron.nn.linear import fp8_linear
from fp8_megatron.quantization.amax_history import AmaxHistory
from fp8_megatron.quantization.recipe import LinearQuantizers, Recipe
from fp8_megatron.quantization.scaled_tensor import ScaledTensor
from fp8_megatron.quantization.stats import snr_db
from tests.harness.main_grad import KeptGrads

E4M3_E4M3_DB = 28.5 - 0.5
E5M2_E4M3_DB = 24.5 - 0.5
#: One rounding to BF16 (7 mantissa bits, 4 more than E4M3: 31.5 + 24.1 dB) less 1 dB.
BF16_DB = 54.5
SEQ, BATCH, IN, OUT = 24, 4, 160, 96
#: Sizes that every recipe takes.
SIZE_M, SIZE_K = 128, 256


@dataclass
class Problem:
    """A layer's tensors and a random cotangent, all with different magnitudes."""

    x: Tensor
    value: Tensor
    weight: ScaledTensor
    bias: Tensor
    cotangent: Tensor
    main_grad: KeptGrads

    def linear(self, quantizers: LinearQuantizers, x: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return fp8_linear(self.x if x is None else x, LinearParams(self.weight, bias, quantizers))


def make_problem(seed: int = 0, fp16_weight: bool = False) -> Problem:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, size: float) -> Tensor:
        return torch.randn(*shape, generator=generator) * size

    value = normal(OUT, IN, size=0.02)
    weight = ScaledTensor.quantize(value)
    if fp16_weight:
        payload, scales = torch.empty(value.numel(), dtype=torch.float16), torch.empty(value.numel() // STATE_BLOCK)
        ops.quantize_blockwise_(value.view(-1), payload, scales)
        weight = ScaledTensor(payload.view(OUT, IN), scales)
    weight.requires_grad_()
    main_grad = KeptGrads()
    weight.main_grad = main_grad  # type: ignore[attr-defined]
    return Problem(
        x=normal(SEQ, BATCH, IN, size=3.0).bfloat16().requires_grad_(),
        value=value,
        weight=weight,
        bias=normal(OUT, size=0.5).bfloat16().requires_grad_(),
        cotangent=normal(SEQ, BATCH, OUT, size=1e-4).bfloat16(),
        main_grad=main_grad,
    )


def current() -> LinearQuantizers:
    return Recipe("tensorwise", power_of_two=False).linear_quantizers()


@pytest.mark.parametrize("fp16_weight", [False, True], ids=["fp8_weight", "fp16_weight"])
def test_forward_and_gradients_against_float64(fp16_weight: bool) -> None:
    p = make_problem(fp16_weight=fp16_weight)
    y = p.linear(current(), bias=p.bias)
    y.backward(p.cotangent)
    assert y.shape == (SEQ, BATCH, OUT) and y.dtype == torch.bfloat16
    x, g = p.x.detach().double(), p.cotangent.double()
    # The bias is exact: without it the ratio speaks of the GEMM alone.
    assert snr_db(y.double() - p.bias.double(), x @ p.value.double().t()) > E4M3_E4M3_DB
    assert p.x.grad is not None and p.bias.grad is not None
    assert p.x.grad.shape == p.x.shape and p.x.grad.dtype == torch.bfloat16
    assert snr_db(p.x.grad, g @ p.value.double()) > E5M2_E4M3_DB
    (grad_weight,) = p.main_grad.grads
    assert snr_db(grad_weight, g.view(-1, OUT).t() @ x.view(-1, IN)) > E5M2_E4M3_DB
    assert snr_db(p.bias.grad, g.view(-1, OUT).sum(dim=0)) > BF16_DB
    assert p.weight.grad is None


def test_a_second_derivative_is_an_error() -> None:
    p = make_problem()
    (grad,) = torch.autograd.grad(p.linear(current()), p.x, p.cotangent.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match=r"no second derivative.*filter"):
        grad.sum().backward()


def test_a_second_derivative_of_an_input_alone_is_an_error() -> None:
    """Not the zero that torch.autograd.functional has for what the graph does not reach."""
    p = make_problem()

    def loss(x: Tensor) -> Tensor:
        return fp8_linear(x, LinearParams(p.weight, None, current())).square().sum()

    for derivative in (torch.autograd.functional.hvp, torch.autograd.functional.vhp):
        with pytest.raises(RuntimeError, match=r"no second derivative.*filter"):
            derivative(loss, p.x.detach(), torch.ones_like(p.x))


def test_a_penalty_on_the_gradient_of_a_sum_is_an_error() -> None:
    """The output's gradient is a constant; the input's is not, because it is the weight's."""
    p = make_problem()
    (grad,) = torch.autograd.grad(p.linear(current()).sum(), p.x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"no second derivative.*filter"):
        grad.square().sum().backward()


def test_a_batch_of_gradients_is_an_error_with_the_fix() -> None:
    p = make_problem()
    y = p.linear(current())
    with pytest.raises(UserError, match=r"is_grads_batched=True.*leave it out"):
        torch.autograd.grad(y, p.x, torch.ones(2, *y.shape, dtype=y.dtype), is_grads_batched=True)


def test_each_gemm_is_its_rounded_operands_product() -> None:
    """No noise but the operands' rounding and one to BF16: the roles have the formats that they should."""
    p = make_problem()
    y = p.linear(current())
    y.backward(p.cotangent)

    def rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
        scale = reference.scale_from_amax(reference.amax(value), dtype, power_of_two=False)
        return reference.decode(reference.encode(value, scale, dtype), scale).double()

    x, g = rounded(p.x.detach(), E4M3).view(-1, IN), rounded(p.cotangent, E5M2).view(-1, OUT)
    weight = p.weight.dequantize().double()
    assert p.x.grad is not None
    assert snr_db(y.view(-1, OUT), x @ weight.t()) > BF16_DB
    assert snr_db(p.x.grad.view(-1, IN), g @ weight) > BF16_DB
    assert snr_db(p.main_grad.grads[0], g.t() @ x) > BF16_DB


def test_main_grad_is_written_once_per_micro_batch() -> None:
    p, quantizers = make_problem(), current()
    for micro_batch in range(3):
        assert len(p.main_grad.grads) == micro_batch
        y = p.linear(quantizers)
        assert len(p.main_grad.grads) == micro_batch
        y.backward(p.cotangent * (1 + micro_batch))
    assert len(p.main_grad.grads) == 3
    torch.testing.assert_close(p.main_grad.grads[1], 2 * p.main_grad.grads[0])  # scales follow the tensor


def saved_bytes(p: Problem, x: Tensor) -> list[int]:
    sizes: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        p.linear(current(), x, p.bias)
    return sizes


def test_saves_one_byte_per_input_element() -> None:
    p = make_problem()
    assert sorted(saved_bytes(p, p.x)) == [4, p.x.numel()]  # a scale and the payload
    # The first layer's input needs no gradient, the weight does.
    assert sorted(saved_bytes(p, p.x.detach())) == [4, p.x.numel()]


def test_lets_go_of_its_input() -> None:
    p = make_problem()
    x = p.x * 2.0
    reference_to_x = weakref.ref(x)
    y = p.linear(current(), x)
    del x
    assert reference_to_x() is None
    y.backward(p.cotangent)
    assert p.x.grad is not None


def test_evaluation_saves_and_transposes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    p = make_problem()
    expected = p.linear(current(), bias=p.bias)
    layouts = []
    quantize = ops.quantize_current

    def spy(x: Tensor, dtype: torch.dtype, **layout: bool) -> tuple[Tensor, Tensor, Tensor]:
        layouts.append(layout)
        return quantize(x, dtype, **layout)

    monkeypatch.setattr(ops, "quantize_current", spy)
    with torch.no_grad():
        assert saved_bytes(p, p.x) == []
        assert torch.equal(p.linear(current(), bias=p.bias), expected)
    assert len(layouts) == 2 and not any(layout["transposed"] for layout in layouts)


@pytest.mark.parametrize("recipe_name", ["tensorwise", "delayed"])
def test_recomputed_forward_gives_the_same_gradients(recipe_name: str) -> None:
    """Under full recomputation the second forward must see the first one's scales: bitwise equal gradients."""

    def gradients(recompute: bool) -> list[Tensor]:
        history = AmaxHistory(4, "max", power_of_two=False) if recipe_name == "delayed" else None
        recipe = Recipe("delayed" if history else "tensorwise", False, history)
        p, quantizers = make_problem(), recipe.linear_quantizers()
        if history is not None:
            history.allocate(torch.device("cpu"))
        results = []
        for step in range(3):
            x = (p.x.detach() * (1 + step)).requires_grad_()
            if recompute:
                y = checkpoint(p.linear, quantizers, x, use_reentrant=False)
            else:
                y = p.linear(quantizers, x)
            y.backward(p.cotangent)
            if history is not None:
                history.update(None)
            assert x.grad is not None
            results += [y.detach(), x.grad, p.main_grad.grads[-1]]
        assert len(p.main_grad.grads) == 3
        return results

    for plain, recomputed in zip(gradients(False), gradients(True), strict=True):
        assert torch.equal(plain, recomputed)


def test_bad_values_reach_the_gradient() -> None:
    """A NaN or infinite output gradient must not be clamped into a number."""
    for bad in (torch.nan, torch.inf):
        p = make_problem()
        cotangent = p.cotangent.clone()
        cotangent[0, 0, 0] = bad
        p.linear(current()).backward(cotangent)
        assert not p.main_grad.grads[0].isfinite().all()


def test_any_number_of_rows() -> None:
    """Rows of zeros are added up to what the GEMMs take, and change nothing."""
    p, padded = make_problem(), make_problem()
    x = p.x[:1].detach().requires_grad_()  # 4 rows
    zeros = torch.zeros_like(p.x[:4])
    zeros[:1] = p.x[:1].detach()
    y, expected = p.linear(current(), x), padded.linear(current(), zeros)
    assert torch.equal(y, expected[:1])
    cotangent = torch.zeros_like(expected)
    cotangent[:1] = p.cotangent[:1]
    y.backward(cotangent[:1])
    expected.backward(cotangent)
    assert torch.equal(p.main_grad.grads[0], padded.main_grad.grads[0])
