"""What megatron-core runs on where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core import tensor_parallel
from torch import Tensor

from fp8_megatron.mcore.runtime import runtime
from fp8_megatron.nn.chunk_grads import in_chunks


class _Product(torch.autograd.Function):
    """x·Wᵀ, multiplied in forward and in backward by `Tensor.matmul`, as megatron-core's linear layers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.matmul(x, weight.t())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grads[0].matmul(weight), grads[0].t().matmul(x)


def _again(x: Tensor, weight: Tensor) -> Tensor:
    return tensor_parallel.checkpoint(_Product.apply, False, x, weight)


def _one_chunk(x: Tensor, weight: Tensor) -> Tensor:
    return in_chunks(_Product.apply, x, (weight,), rows=len(x))


@pytest.mark.parametrize(
    ("product", "num_products", "gives_gradient"),
    [(_Product.apply, 3, True), (_Product.apply, 3, False), (_again, 4, True), (_one_chunk, 4, True)],
    ids=["gradient", "scalar", "again", "chunk"],
)
def test_products_of_16_bits_are_taken_in_fp32(
    product: Callable[[Tensor, Tensor], Tensor], num_products: int, gives_gradient: bool
) -> None:
    """In backward, too, and in the backward inside that of a checkpoint or a chunk: the values are those of FP32
    products, rounded once, and no product of 16 bits runs."""
    torch.manual_seed(0)
    x, weight = torch.randn(48, 64).bfloat16().requires_grad_(), torch.randn(32, 64).bfloat16().requires_grad_()
    cotangent = torch.randn(48, 32).bfloat16()
    dtypes: list[torch.dtype] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.mm.default:
                dtypes.append(args[0].dtype)
            return func(*args, **(kwargs or {}))

    with runtime(torch.device("cpu")), Watch():
        y = product(x, weight)
        if gives_gradient:
            torch.autograd.backward(y, grad_tensors=cotangent)
        else:
            torch.autograd.backward((y * cotangent).sum())
    assert dtypes == [torch.float32] * num_products
    assert x.grad is not None and weight.grad is not None
    g = cotangent.float()
    assert torch.equal(x.grad, (g @ weight.detach().float()).bfloat16())
    assert torch.equal(weight.grad, (g.t() @ x.detach().float()).bfloat16())


def test_grouped_products_of_16_bits_are_taken_in_fp32() -> None:
    x, weights = torch.randn(48, 64).bfloat16().requires_grad_(), torch.randn(3, 64, 32).bfloat16().requires_grad_()
    ends, cotangent = torch.tensor([16, 16, 48], dtype=torch.int32), torch.randn(48, 32).bfloat16()
    with runtime(torch.device("cpu")):
        y = torch.nn.functional.grouped_mm(x, weights, offs=ends)
        torch.autograd.backward(y, grad_tensors=cotangent)
    wide = [value.detach().float().requires_grad_() for value in (x, weights)]
    expected = torch.cat([wide[0][:16] @ wide[1][0], wide[0][16:] @ wide[1][2]])
    expected.backward(cotangent.float())
    for found, value in ((y, expected), (x.grad, wide[0].grad), (weights.grad, wide[1].grad)):
        assert found is not None and value is not None and torch.equal(found, value.bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_with_products_of_16_bits_are_taken_in_fp32(dtype: torch.dtype) -> None:
    """Rounded once. What is written to a given tensor, and products of other dtypes, are torch's own."""
    c, a, b = (torch.randn(2, 24, 24).to(dtype) for _ in range(3))
    wide, wide_result = [c.float(), a.float(), b.float()], _dtype_of_wide_result(a, b)
    with runtime(torch.device("cpu")):
        assert torch.equal(torch.bmm(a, b), torch.bmm(*wide[1:]).to(dtype))
        assert torch.equal(torch.baddbmm(c, a, b, beta=0.5), torch.baddbmm(*wide, beta=0.5).to(dtype))
        assert torch.equal(
            torch.addmm(c[0], a[0], b[0], alpha=2), torch.addmm(*(x[0] for x in wide), alpha=2).to(dtype)
        )
        written = torch.empty_like(c)
        assert torch.bmm(a, b, out=written) is written
        assert torch.bmm(a.double(), b.double()).dtype is torch.float64
        assert _dtype_of_wide_result(a, b) is wide_result


def _dtype_of_wide_result(a: Tensor, b: Tensor) -> Any:
    """Of the product in FP32, which not every torch has on a CPU: the error's type then."""
    try:
        return torch.bmm(a, b, torch.float32).dtype
    except NotImplementedError as error:
        return type(error)


def test_other_backward_calls_are_torch_s_own() -> None:
    """Several tensors, kept graphs, chosen inputs, an input that is not used, and a vector without a gradient."""
    x = torch.randn(4, requires_grad=True)
    with runtime(torch.device("cpu")):
        y = x * 2
        torch.autograd.backward([y.sum(), (x * 3).sum()], retain_graph=True)
        assert x.grad is not None and torch.equal(x.grad, torch.full((4,), 5.0))
        torch.autograd.backward(y.sum(), inputs=[x])
        assert torch.equal(x.grad, torch.full((4,), 7.0))
        with pytest.raises(RuntimeError, match="scalar"):
            torch.autograd.backward(x * 2)
        other = torch.randn(4, requires_grad=True)
        grads: list[Any] = list(torch.autograd.grad((x * x).sum(), [x, other], allow_unused=True))
        assert torch.equal(grads[0], 2 * x.detach()) and grads[1] is None
        with pytest.raises(RuntimeError, match="allow_unused=True"):
            torch.autograd.grad((x * x).sum(), [x, other])
        (first,) = torch.autograd.grad((x * x * x).sum(), x, create_graph=True)
        assert torch.allclose(torch.autograd.grad(first.sum(), x)[0], 6 * x.detach())
