"""The router's product: exact in 16 bits on a GPU, and its gradient in three BF16 parts."""

from __future__ import annotations

import pytest
import torch

from fp8_megatron.moe.megatron.router import _Gating, _in_three
from fp8_megatron.quantization.stats import snr_db


def test_three_parts_are_the_whole() -> None:
    x = torch.randn(50, 12) * torch.logspace(-20, 20, 12)
    assert torch.equal(_in_three(x).double().unflatten(1, (3, 12)).sum(dim=1), x.double())


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=pytest.mark.gpu,
        ),
    ],
)
def test_products_are_those_of_fp32(device: str) -> None:
    x = torch.randn(24, 8, 512, device=device).bfloat16().requires_grad_()
    weight = torch.randn(16, 512, device=device).bfloat16().requires_grad_()
    cotangent = torch.randn(24, 8, 16, device=device)
    logits = _Gating.apply(x, weight, torch.float32)
    assert logits.dtype == torch.float32
    expected = x.detach().double() @ weight.detach().double().t()
    assert snr_db(logits.detach(), expected) > 120.0  # a sum of 512 in FP32
    grads = torch.autograd.grad(logits, (x, weight), cotangent)
    rows = cotangent.double().view(-1, 16)
    for grad, exact in zip(
        grads,
        (cotangent.double() @ weight.detach().double(), rows.t() @ x.detach().double().view(-1, 512)),
        strict=True,
    ):
        # Rounded once, to BF16: but for values within FP32's error of a tie, the nearest one.
        assert grad.dtype == torch.bfloat16 and (grad == exact.bfloat16()).double().mean() > 0.999
