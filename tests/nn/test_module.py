"""FP8Linear against torch.nn.Linear, and where its weight's gradient goes."""

from __future__ import annotations

import pytest
import torch

from fp8_megatron.nn.module import FP8Linear
from fp8_megatron.quantization.recipe import Recipe

#: Noise of an E4M3 operand times another, and of E5M2 times E4M3 (test_linear.py), less 1 dB for the sample.
E4M3_E4M3_DB, E5M2_E4M3_DB = 27.5, 23.5


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
