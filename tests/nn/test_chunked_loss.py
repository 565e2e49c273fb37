"""The loss over chunks of tokens has the values and gradients of the loss of all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8_megatron.nn.chunked_loss import loss_in_chunks
from tests.harness.main_grad import KeptGrads

S, B, H, V = 40, 3, 16, 50


def token_loss(x: Tensor, labels: Tensor, weight: Tensor, norm: Tensor, missing: None) -> Tensor:
    assert missing is None
    logits = (x * norm) @ weight.t()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(
        labels.shape
    )


def operands() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight, norm, cotangent = (
        torch.randn(shape, generator=generator) for shape in ((S, B, H), (V, H), (H,), (S, B))
    )
    labels = torch.randint(V, (S, B), generator=generator)
    return x.requires_grad_(), labels, weight.requires_grad_(), norm.requires_grad_(), cotangent


@pytest.mark.parametrize("chunk", [1, 16, 20, 40])
def test_values_and_gradients(chunk: int) -> None:
    x, labels, weight, norm, cotangent = operands()
    whole = token_loss(x, labels, weight, norm, None)
    expected = torch.autograd.grad(whole, [x, weight, norm], cotangent)
    losses = loss_in_chunks(token_loss, x, labels, (weight, norm, None), chunk=chunk)
    grads = torch.autograd.grad(losses, [x, weight, norm], cotangent)
    # FP32 sums in another order: 2⁻²⁴ of each of up to 120 summands.
    torch.testing.assert_close(losses, whole, rtol=1e-5, atol=1e-5)
    for grad, own in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, own, rtol=1e-5, atol=1e-4)


def test_a_vector_reaches_its_main_gradient_in_fp32() -> None:
    """A matrix goes through autograd, in its own dtype."""

    x, labels, weight, norm, cotangent = operands()
    half_weight = weight.detach().bfloat16().requires_grad_()
    norm.main_grad = KeptGrads()  # type: ignore[attr-defined]
    half_loss = lambda x, labels, w, n, _: token_loss(x, labels, w.float(), n, None)  # noqa: E731
    losses = loss_in_chunks(half_loss, x, labels, (half_weight, norm, None), chunk=16)
    losses.backward(cotangent)
    (grad,) = norm.main_grad.grads  # type: ignore[attr-defined]
    expected = torch.autograd.grad(half_loss(x, labels, half_weight, norm, None), [half_weight, norm], cotangent)
    torch.testing.assert_close(grad, expected[1], rtol=1e-5, atol=1e-4)
    assert norm.grad is None and half_weight.grad is not None and half_weight.grad.dtype is torch.bfloat16
    # Three chunks, each rounded to BF16's 2⁻⁹ by autograd, and their sum once more.
    error = (half_weight.grad.float() - expected[0].float()).norm() / expected[0].float().norm()
    assert error < 3 * 2**-9


def test_one_chunk_of_logits_at_a_time() -> None:
    sizes = []

    def counting(x: Tensor, *others: Tensor) -> Tensor:
        sizes.append(len(x))
        return token_loss(x, *others)  # type: ignore[arg-type]

    x, labels, weight, norm, cotangent = operands()
    losses = loss_in_chunks(counting, x, labels, (weight, norm, None), chunk=16)
    assert sizes == [16, 16, 8]
    losses.backward(cotangent)
    assert sizes == [16, 16, 8] * 2
    with torch.no_grad():
        assert torch.equal(loss_in_chunks(counting, x, labels, (weight, norm, None), chunk=16), losses)
