"""FP8Linear against torch.nn.Linear, and where its weight's gradient goes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8_megatron.nn.module import FP8Linear
from fp8_megatron.quantization.recipe import Recipe
from fp8_megatron.quantization.scaled_tensor import ScaledTensor
from fp8_megatron.quantization.stats import snr_db
from fp8_megatron.quantization.weight_grad import WeightGrad

#: Noise of an E4M3 operand times another, and of E5M2 times E4M3 (test_linear.py), less 1 dB for the sample.
E4M3_E4M3_DB, E5M2_E4M3_DB = 27.5, 23.5


class _KeepsGrad:
    def __init__(self) -> None:
        self.grads: list[Tensor] = []

    def accumulate_(self, grad: Tensor | WeightGrad) -> None:
        self.grads.append(grad.wide() if isinstance(grad, WeightGrad) else grad)


def _pair() -> tuple[torch.nn.Linear, FP8Linear]:
    torch.manual_seed(0)
    exact = torch.nn.Linear(160, 96).double()
    return exact, FP8Linear.from_linear(exact.float())


def test_values_and_gradients_against_float64() -> None:
    exact, layer = _pair()
    exact = exact.double()
    x, cotangent = torch.randn(4, 16, 160).bfloat16(), (1e-3 * torch.randn(4, 16, 96)).bfloat16()
    ours, theirs = x.clone().requires_grad_(), x.double().requires_grad_()
    y, expected = layer(ours), exact(theirs)
    y.backward(cotangent)
    expected.backward(cotangent.double())
    assert isinstance(layer.weight, ScaledTensor) and layer.weight.payload.dtype == torch.float8_e4m3fn
    assert snr_db(y.double() - exact.bias, (expected - exact.bias).detach()) > E4M3_E4M3_DB
    assert ours.grad is not None and layer.weight.grad is not None and layer.bias is not None
    assert snr_db(ours.grad, theirs.grad) > E5M2_E4M3_DB  # type: ignore[arg-type]
    assert snr_db(layer.weight.grad, exact.weight.grad) > E5M2_E4M3_DB  # type: ignore[arg-type]
    # One rounding to BF16 (test_linear.py).
    assert snr_db(layer.bias.grad, exact.bias.grad) > 54.5  # type: ignore[arg-type]


def test_micro_batches_add_up_in_grad() -> None:
    _, layer = _pair()
    cotangent = torch.randn(16, 96).bfloat16()
    grads = []
    for _ in range(2):
        layer(torch.randn(16, 160).bfloat16()).backward(cotangent)
        assert layer.weight.grad is not None
        grads.append(layer.weight.grad.clone())
    assert layer.weight.grad.shape == (96, 160) and not torch.equal(*grads)


def test_main_grad_takes_the_gradient_where_there_is_one() -> None:
    _, layer = _pair()
    main_grad = _KeepsGrad()
    layer.weight.main_grad = main_grad  # type: ignore[attr-defined]
    layer(torch.randn(16, 160).bfloat16()).backward(torch.randn(16, 96).bfloat16())
    assert len(main_grad.grads) == 1 and layer.weight.grad is None


def test_it_says_what_it_casts() -> None:
    layer = FP8Linear(32, 16, bias=False)
    assert repr(layer).startswith("FP8Linear(in_features=32, out_features=16, bias=False, input=(E4M3 per tensor")
    assert [name for name, _ in layer.named_parameters()] == ["weight"]


@pytest.mark.parametrize(
    ("recipe", "message"), [(None, r"in_features\(40\) is not a multiple of 16"), ("blockwise", "multiple of 128")]
)
def test_sizes_that_the_tensor_cores_refuse_raise(recipe: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FP8Linear(40, 64, recipe=None if recipe is None else Recipe("blockwise", power_of_two=False))


@pytest.mark.parametrize("shape", [(32,), (2, 16), (17,), (1, 17), (), (0,)])
def test_outputs_may_be_written_to(shape: tuple[int, ...]) -> None:
    """``hidden += residual`` and ``ReLU(inplace=True)`` behind a layer, as behind `torch.nn.Linear`."""
    layer = FP8Linear(64, 32)
    x = torch.randn(*shape, 64, dtype=torch.bfloat16, requires_grad=True)
    expected = layer(x).relu()
    written = layer(x).relu_()
    assert torch.equal(written, expected) and written.shape == (*shape, 32)
    cotangent = torch.randn_like(written)
    grads = [torch.autograd.grad(y, x, cotangent)[0] for y in (written, expected)]
    assert torch.equal(*grads)
