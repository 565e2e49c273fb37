"""A layer whose output's gradient has a scale for each row, on the gradient of a softmax's logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fp8_megatron.nn.module import FP8Linear
from fp8_megatron.quantization.stats import snr_db

TOKENS, WIDTH, CLASSES = 512, 128, 2048


def _head(*, rows: bool, bias: bool = True, dtype: torch.dtype = torch.bfloat16) -> FP8Linear:
    torch.manual_seed(0)
    head = FP8Linear(WIDTH, CLASSES, bias=bias, dtype=dtype)
    head.scales_grad_rows = rows
    return head


def _likely(head: FP8Linear, tokens: int = TOKENS, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """An input [T, WIDTH] and labels that the layer finds likely, as a trained model does."""
    labels = torch.randint(0, CLASSES, (tokens,))
    x = 12 * head.weight.dequantize().float()[labels] + torch.randn(tokens, WIDTH) / 4
    return x.to(dtype).requires_grad_(), labels


def _exact(head: FP8Linear, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of input and weight in float64."""
    grad = grad.double().view(-1, CLASSES)
    return grad @ head.weight.dequantize().double(), grad.t() @ x.detach().double().view(-1, WIDTH)


def _gradients(head: FP8Linear, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of the output, and of the loss of the input; that of the weight is in ``weight.grad``."""
    y = head(x)
    loss = cross_entropy(y.float().view(-1, CLASSES), labels.view(-1))
    (grad,) = torch.autograd.grad(loss, y, retain_graph=True)
    (grad_input,) = torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()
    return grad, grad_input


def _bias_percent(head: FP8Linear, x: Tensor, grad: Tensor, exact: Tensor) -> float:
    """The error of the sum of all rows of the weight's gradient along the mean input, in % of what the labels give."""
    mean = x.detach().double().mean(dim=0)
    labels = grad.double().view(-1, CLASSES).amin(dim=1).sum().abs() * mean.norm()
    assert head.weight.grad is not None
    return (100 * (head.weight.grad.double() - exact).sum(dim=0) @ (mean / mean.norm()) / labels).item()


def test_the_gradient_of_logits_has_no_bias() -> None:
    biases, ratios = {}, {}
    for rows in (False, True):
        head = _head(rows=rows)
        x, labels = _likely(head)
        grad, grad_input = _gradients(head, x, labels)
        of_input, of_weight = _exact(head, x, grad)
        biases[rows] = abs(_bias_percent(head, x, grad, of_weight))
        ratios[rows] = snr_db(grad_input, of_input), snr_db(head.weight.grad, of_weight)
    assert biases[False] > 1 and biases[True] < 0.1
    # The label's element is exact: 45 dB where it has nearly all of the power. wgrad has the rounding of E4M3's input.
    assert ratios[True][0] > 45 and ratios[True][1] > 31
    assert ratios[True][0] > ratios[False][0] + 12 and ratios[True][1] > ratios[False][1] + 2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_gradient_of_logits_on_a_gpu(dtype: torch.dtype) -> None:
    head = _head(rows=True, dtype=dtype).cuda()
    x, labels = (value.detach().cuda() for value in _likely(_head(rows=True), dtype=dtype))
    x.requires_grad_()
    results = []
    for call in (head, torch.compile(head, fullgraph=True)):
        x.grad = head.weight.grad = head.bias.grad = None
        y = call(x)
        loss = 2.0**12 * cross_entropy(y.float(), labels)
        (grad,) = torch.autograd.grad(loss, y, retain_graph=True)
        loss.backward()
        of_input, of_weight = _exact(head, x, grad)
        assert abs(_bias_percent(head, x, grad, of_weight)) < 0.3  # tensor cores' sums have one of their own
        assert snr_db(x.grad, of_input) > 40 and snr_db(head.weight.grad, of_weight) > 30
        results.append((x.grad, head.weight.grad, head.bias.grad))
    for launched, compiled in zip(*results, strict=True):
        assert torch.equal(launched, compiled)


@pytest.mark.parametrize(("shape", "bias"), [((512,), True), ((3, 37), False), ((5, 1, 7), True)])
def test_any_number_of_rows_and_a_bias(shape: tuple[int, ...], bias: bool) -> None:
    head = _head(rows=True, bias=bias)
    x, labels = _likely(head, torch.Size(shape).numel())
    x = x.detach().view(*shape, WIDTH).requires_grad_()
    grad, grad_input = _gradients(head, x, labels)
    of_input, of_weight = _exact(head, x, grad)
    assert grad_input.shape == x.shape and snr_db(grad_input.view(-1, WIDTH), of_input) > 40
    assert snr_db(head.weight.grad, of_weight) > 30
    if bias:
        assert snr_db(head.bias.grad, grad.double().view(-1, CLASSES).sum(dim=0)) > 45  # BF16
    else:
        assert head.bias is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype(dtype: torch.dtype) -> None:
    head = _head(rows=True, dtype=torch.bfloat16 if dtype is torch.float32 else dtype)
    x, labels = _likely(head, dtype=dtype)
    y = head(x)
    loss_scale = 2.0**12 if dtype is torch.float16 else 1.0  # as a GradScaler's
    loss = loss_scale * cross_entropy(y.float(), labels)
    (grad,) = torch.autograd.grad(loss, y, retain_graph=True)
    loss.backward()
    of_input, of_weight = _exact(head, x, grad)
    assert y.dtype is dtype and x.grad.dtype is dtype
    assert snr_db(x.grad, of_input) > 45 and snr_db(head.weight.grad, of_weight) > 31


def test_rows_without_a_gradient_do_not_matter() -> None:
    """Ignored labels, with an input that is far larger than the others."""
    head = _head(rows=True)
    x, labels = _likely(head)
    with torch.no_grad():
        x[::4] *= 1000
    labels[::4] = -100
    grad, grad_input = _gradients(head, x, labels)
    of_input, of_weight = _exact(head, x, grad)
    assert torch.count_nonzero(grad[::4]) == 0 and torch.count_nonzero(grad_input[::4]) == 0
    assert snr_db(grad_input, of_input) > 45 and snr_db(head.weight.grad, of_weight) > 31


def test_a_gradient_of_zeros() -> None:
    head = _head(rows=True)
    x, _ = _likely(head)
    head(x).backward(torch.zeros(TOKENS, CLASSES, dtype=torch.bfloat16))
    for grad in (x.grad, head.weight.grad, head.bias.grad):
        assert grad is not None and torch.count_nonzero(grad) == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_both_gradients(value: float) -> None:
    head = _head(rows=True)
    x, _ = _likely(head)
    grad = torch.randn(TOKENS, CLASSES).bfloat16()
    grad[3, 5] = value
    head(x).backward(grad)
    assert not x.grad[3].isfinite().any() and x.grad[4:].isfinite().all()
    assert not head.weight.grad.isfinite().all()


def test_a_frozen_weight_and_an_input_without_gradient() -> None:
    head = _head(rows=True, bias=False)
    x, labels = _likely(head)
    _, grad_input = _gradients(head, x, labels)
    own = head.weight.grad.clone()
    head.weight.grad = None
    cross_entropy(head(x.detach()).float(), labels).backward()
    assert torch.equal(head.weight.grad, own)
    head.weight.requires_grad_(False)
    head.weight.grad = None
    (again,) = torch.autograd.grad(cross_entropy(head(x).float(), labels), x)
    assert torch.equal(again, grad_input) and head.weight.grad is None


@pytest.mark.parametrize("tokens", [TOKENS, 100])
def test_compiled_it_has_the_same_bits(tokens: int) -> None:
    head = _head(rows=True)
    x, labels = _likely(head, tokens)
    results = []
    for call in (head, torch.compile(head, fullgraph=True, backend="aot_eager")):
        x.grad = head.weight.grad = head.bias.grad = None
        y = call(x)
        cross_entropy(y.float(), labels).backward()
        results.append((y.detach(), x.grad, head.weight.grad, head.bias.grad))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)
    with torch.no_grad():
        assert torch.equal(torch.compile(head, fullgraph=True, backend="aot_eager")(x), results[0][0])
