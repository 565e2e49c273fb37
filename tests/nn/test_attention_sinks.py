"""Attention with sinks against a softmax in float64 with one more column, whose value is 0."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8_megatron.data.document_bounds import SequencePart
from fp8_megatron.device.group import Group
from fp8_megatron.nn.attention_sinks import SinkAttention, sink_attention
from fp8_megatron.nn.context_attention import CommType, ContextParallel, context_attention
from fp8_megatron.nn.masked_attention import allowed_keys
from fp8_megatron.quantization.stats import snr_db
from tests.harness.ranks import RankPool, on_default_group
from tests.harness.sequence_parts import whole_of

SEQ, BATCH, HEADS, WIDTH = 48, 2, 4, 32
SCALE = 1 / math.sqrt(WIDTH)
#: Documents of 7, 30 and 11 tokens, and of 48; two without tokens fill the room.
BOUNDS = torch.tensor([0, 7, 37, 48, 96, 96, 96], dtype=torch.int32)
#: Far below the scores, among them, and far above them.
SINKS = torch.tensor([-9.0, 0.0, 1.5, 6.0], dtype=torch.float64)


def operands(dtype: torch.dtype, groups: int) -> list[Tensor]:
    """Query, key, value, sinks, and the output's gradient."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    inputs = [normal(SEQ, BATCH, heads, WIDTH) for heads in (HEADS, groups, groups)]
    return [*inputs, SINKS.to(dtype, copy=True), normal(SEQ, BATCH, HEADS * WIDTH)]


def exact(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, grad: Tensor, allowed: Tensor) -> list[Tensor]:
    """The output and the gradients of query, key, value and sinks."""
    leaves = [x.to(torch.float64, copy=True).requires_grad_() for x in (query, key, value, sinks)]
    q, k, v = (x.permute(1, 2, 0, 3).repeat_interleave(HEADS // x.shape[2], dim=1) for x in leaves[:3])
    scores = (q @ k.mT * SCALE).masked_fill(~allowed, -math.inf)
    column = leaves[3][:, None, None].expand(len(q), HEADS, SEQ, 1)
    probabilities = torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]
    out = (probabilities @ v).permute(2, 0, 1, 3).flatten(2)
    out.backward(grad.double())
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def computed(inputs: list[Tensor], attention: SinkAttention, device: str = "cpu") -> list[Tensor]:
    leaves = [x.clone().to(device).requires_grad_() for x in inputs[:4]]
    out = sink_attention(*leaves, attention)
    assert out.is_contiguous() and out.dtype == inputs[0].dtype
    out.backward(inputs[4].to(device))
    return [x.cpu() for x in (out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None))]


def limits(has_documents: bool, window: int | None, device: str = "cpu") -> tuple[dict[str, Any], Tensor]:
    given = {"cu_seqlens": BOUNDS.to(device) if has_documents else None, "window": window}
    on_cpu = {**given, "cu_seqlens": BOUNDS if has_documents else None}
    return given, allowed_keys(SEQ, BATCH, **on_cpu, device=torch.device("cpu"))


@pytest.mark.parametrize("window", [None, 9, 0])
@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("groups", [HEADS, 2, 1])
def test_it_is_a_softmax_with_one_more_column(groups: int, has_documents: bool, window: int | None) -> None:
    """In float64, whose sums in another order differ by some 10⁻¹⁵ of numbers around 1."""
    given, allowed = limits(has_documents, window)
    inputs = operands(torch.float64, groups)
    results = computed(inputs, SinkAttention(SCALE, "dense", **given))
    for measured, wanted in zip(results, exact(*inputs, allowed), strict=True):
        torch.testing.assert_close(measured, wanted, rtol=0.0, atol=1e-12)


def test_its_rounding_is_that_of_16_bits() -> None:
    """The output is rounded to BF16 twice, 55.6 dB each. A gradient passes through four such roundings, and the
    softmax's backward subtracts, which costs a few dB more, as in `tests.mcore.test_attention`."""
    given, allowed = limits(has_documents=False, window=None)
    inputs = operands(torch.bfloat16, 2)
    results = computed(inputs, SinkAttention(SCALE, "dense", **given))
    for measured, wanted, bound in zip(results, exact(*inputs, allowed), (50.0, 44.0, 44.0, 44.0, 44.0), strict=True):
        assert measured.dtype == torch.bfloat16 and snr_db(measured, wanted) > bound


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "has_documents", "window"),
    [
        ("flash", False, None),
        ("flash", False, 9),
        ("flash", True, None),
        ("flash", True, 9),
        ("cudnn", False, None),
    ],
)
@pytest.mark.parametrize("groups", [HEADS, 2])
def test_kernels_of_a_gpu(groups: int, kernel: Any, has_documents: bool, window: int | None) -> None:
    given, allowed = limits(has_documents, window, "cuda")
    inputs = operands(torch.bfloat16, groups)
    results = computed(inputs, SinkAttention(SCALE, kernel, **given), "cuda")
    for measured, wanted, bound in zip(results, exact(*inputs, allowed), (48.0, 42.0, 42.0, 42.0, 42.0), strict=True):
        assert snr_db(measured, wanted) > bound


def on_a_rank(group: Group, comm_type: CommType) -> list[Tensor]:
    part = SequencePart(group.rank(), group.size())
    *inputs, sinks, grad = operands(torch.float64, 2)
    leaves = [part.of(x, dim=0).requires_grad_() for x in inputs]
    sinks.requires_grad_()
    out = context_attention(*leaves, ContextParallel(group, comm_type, SCALE, "dense"), sinks)
    out.backward(part.of(grad, dim=0))
    return [x for x in (out.detach(), *(leaf.grad for leaf in leaves), sinks.grad) if x is not None]


@pytest.mark.parametrize("comm_type", ["all_gather", "p2p"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_that_share_sequences(ranks: RankPool, num_ranks: int, comm_type: CommType) -> None:
    """Each has the sinks' gradient of its own queries."""
    everyones = ranks.run(on_default_group, on_a_rank, comm_type, num_ranks=num_ranks)
    *parts, of_sinks = zip(*everyones, strict=True)
    measured = [*map(whole_of, parts), sum(of_sinks)]
    inputs = operands(torch.float64, 2)
    _, allowed = limits(has_documents=False, window=None)
    for value, wanted in zip(measured, exact(*inputs, allowed), strict=True):
        torch.testing.assert_close(value, wanted, rtol=0.0, atol=1e-12)
