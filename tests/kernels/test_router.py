"""The choice of experts: the specification against megatron-core's router, and a GPU's kernels against it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from torch import Tensor

from fp8_megatron.kernels import ops
from fp8_megatron.kernels.router import reference
from fp8_megatron.quantization.stats import snr_db

#: Tokens, experts, experts of a token, groups, groups of a token.
SIZES = [(40, 8, 2, 0, 0), (33, 128, 8, 0, 0), (16, 5, 3, 0, 0), (20, 4, 1, 0, 0)]
SIZES += [(24, 64, 8, 8, 4), (24, 60, 6, 6, 3), (24, 64, 7, 8, 3)]
#: Is a sigmoid, is over all, has a bias.
SCORES = [(False, False, False), (False, True, False), (True, False, False), (True, False, True)]
CASES = list(itertools.product(SIZES, SCORES, [1.0, 2.5]))

on_gpu = pytest.mark.parametrize(
    "device",
    [
        pytest.param(
            "cuda",
            marks=pytest.mark.gpu,
        )
    ],
)


def case(sizes: tuple[int, ...], scores: tuple[bool, ...], factor: float) -> tuple[Tensor, Tensor | None, ops.Choice]:
    """Logits, bias, and how."""
    generator = torch.Generator().manual_seed(sizes[1])
    logits = 2.0 * torch.randn(sizes[:2], generator=generator)
    bias = 0.1 * torch.randn(sizes[1], generator=generator) if scores[2] else None
    return logits, bias, ops.Choice(sizes[2], scores[0], scores[1], sizes[3], sizes[4], factor)


@pytest.mark.parametrize(("sizes", "scores", "factor"), CASES, ids=str)
def test_specification_is_megatrons_router(sizes: Any, scores: Any, factor: float) -> None:
    logits, bias, how = case(sizes, scores, factor)
    x = logits.double().requires_grad_()
    expected, chosen = topk_routing_with_score_function(
        x,
        how.top_k,
        use_pre_softmax=how.over_all,
        num_groups=how.num_groups or None,
        group_topk=how.group_top_k or None,
        scaling_factor=factor,
        score_function="sigmoid" if how.is_sigmoid else "softmax",
        expert_bias=bias,
    )
    probs, own = ops.choose_experts(logits, bias, how)
    assert torch.equal(own, chosen) and int(own.sum()) == how.top_k * len(logits)
    torch.testing.assert_close(probs, expected.float())  # megatron-core's softmax is FP32
    cotangent = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
    (grad,) = torch.autograd.grad(expected, x, cotangent.double())
    measured = ops.choose_experts_backward(logits, own, cotangent, how)
    assert snr_db(measured, grad) > 110.0  # FP32's 24 bits, of sums of up to eight terms that cancel


@pytest.mark.parametrize("top_k", [1, 3])
def test_the_first_of_equal_experts_is_chosen(top_k: int) -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 1.0, 2.0]])
    _, chosen = ops.choose_experts(logits, None, ops.Choice(top_k, False, False, 0, 0, 1.0))
    assert chosen.nonzero()[:, 1].tolist() == [1, 2, 3][:top_k]


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("sizes", "scores", "factor"), CASES, ids=str)
def test_a_gpu_chooses_as_the_specification(
    sizes: Any, scores: Any, factor: float, dtype: torch.dtype, device: str
) -> None:
    logits, bias, how = case(sizes, scores, factor)
    logits = logits.to(dtype)
    if dtype == torch.bfloat16:
        assert len(logits[0].unique()) < sizes[1] or sizes[1] < 60  # ties
    expected, chosen = reference.choose_experts(logits, bias, how)
    probs, own = ops.choose_experts(logits.to(device), None if bias is None else bias.to(device), how)
    assert torch.equal(own.cpu(), chosen)
    torch.testing.assert_close(probs.cpu(), expected)
    cotangent = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
    wanted = reference.choose_experts_backward(logits, chosen, cotangent, how)
    measured = ops.choose_experts_backward(logits.to(device), own, cotangent.to(device), how)
    assert snr_db(measured.cpu(), wanted) > 110.0


@on_gpu
def test_logits_that_are_nan_do_no_harm(device: str) -> None:
    logits = torch.randn(40, 20, device=device)
    logits[3, 4] = torch.nan
    logits[5] = torch.nan
    probs, chosen = ops.choose_experts(logits, None, ops.Choice(2, False, False, 0, 0, 1.0))
    assert (chosen.sum(dim=1) <= 2).all()
    rest = torch.ones(40, dtype=torch.bool)
    rest[[3, 5]] = False
    assert (chosen[rest].sum(dim=1) == 2).all() and probs[rest].isfinite().all()
