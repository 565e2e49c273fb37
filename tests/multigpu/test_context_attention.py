"""Attention over sequences that two GPUs share, over NCCL."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fp8_megatron.data.document_bounds import SequencePart
from fp8_megatron.device.group import Group
from fp8_megatron.kernels.ops import BlockKernel
from fp8_megatron.nn.context_attention import CommType, ContextParallel, context_attention
from fp8_megatron.nn.head_exchange import heads_of_sequence, sequences_of_heads
from tests.harness.ranks import RankPool, on_default_group

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

SCALE, WIDTH, HEADS = 0.1, 128, 8
#: Largest number of GPUs that are tried.
MOST = min(4, max(2, torch.cuda.device_count()))


def operands(length: int, batch: int, groups: int, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    shapes = [(length, batch, n, WIDTH) for n in (HEADS, groups, groups)]
    shapes.append((length, batch, HEADS * WIDTH))
    return [torch.randn(shape, generator=generator).to(device, torch.bfloat16) for shape in shapes]


def _attend(leaves: list[Tensor], group: Group, comm_type: CommType | Literal["a2a"], kernel: BlockKernel) -> Tensor:
    if comm_type != "a2a":
        return context_attention(*leaves, ContextParallel(group, comm_type, SCALE, kernel))
    q, k, v = (x.permute(1, 2, 0, 3) for x in sequences_of_heads(leaves[0], leaves[1], leaves[2], group))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION if kernel == "cudnn" else SDPBackend.FLASH_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE, enable_gqa=True)
    return heads_of_sequence(out.permute(2, 0, 1, 3), group).flatten(2)


def _on_a_gpu(
    group: Group,
    comm_type: CommType | Literal["a2a"],
    kernel: BlockKernel,
    length: int,
    batch: int,
    groups: int,
    calls: int,
) -> list[float]:
    """dB of the output and of the gradients of query, key and value against float64, of the worst of `calls`."""
    device = torch.device("cuda", group.rank())
    torch.cuda.set_device(device)
    part = SequencePart(group.rank(), group.size())
    whole = operands(length, batch, groups, device)
    expected = [part.of(x, dim=0) for x in _whole(*whole)]
    worst = [float("inf")] * 4
    busy = torch.randn(2048, 2048, device=device)
    for _ in range(calls):
        *inputs, grad = (part.of(x, dim=0) for x in whole)
        leaves = [x.requires_grad_() for x in inputs]
        # Another collective in flight on the same GPUs, as gradients are during backward.
        work = torch.distributed.all_reduce(busy, group=group, async_op=True)
        result = _attend(leaves, group, comm_type, kernel)
        result.backward(grad)
        work.wait()
        found = [result, *(leaf.grad for leaf in leaves if leaf.grad is not None)]
        worst = [min(old, _snr_db(x, y)) for old, x, y in zip(worst, found, expected, strict=True)]
    return worst


def _whole(query: Tensor, key: Tensor, value: Tensor, grad: Tensor) -> list[Tensor]:
    leaves = [x.double().requires_grad_() for x in (query, key, value)]
    q, k, v = (x.permute(1, 2, 0, 3) for x in leaves)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE, enable_gqa=True)
    result = out.permute(2, 0, 1, 3).flatten(2)
    result.backward(grad.double())
    return [result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def _snr_db(value: Tensor, exact: Tensor) -> float:
    return float(10 * torch.log10(exact.square().sum() / (value.double() - exact).square().sum()))


@pytest.mark.parametrize("comm_type", ["all_gather", "p2p", "a2a"])
@pytest.mark.parametrize(
    ("num_gpus", "kernel", "length", "batch", "groups"),
    [
        (2, "cudnn", 1024, 1, 2),
        (2, "cudnn", 1024, 2, 8),
        (2, "flash", 1024, 1, 2),
        (2, "flash", 512, 2, 8),
        pytest.param(4, "cudnn", 2048, 1, 4, marks=pytest.mark.skipif(MOST < 4, reason="needs four GPUs")),
    ],
)
def test_it_is_attention_over_the_whole_sequence(
    gpus: RankPool,
    num_gpus: int,
    comm_type: CommType | Literal["a2a"],
    kernel: BlockKernel,
    length: int,
    batch: int,
    groups: int,
) -> None:
    """By rms against float64. Probabilities are rounded to BF16 in the kernels, 50 dB, and so are blocks' outputs; a
    gradient takes some four roundings, and sums of the blocks'."""
    everyones = gpus.run(
        _on_gpus, comm_type, kernel, length, batch, groups, 20, num_ranks=num_gpus, timeout_seconds=300.0
    )
    for output, *grads in everyones:
        assert output > 44.0 and min(grads) > 38.0, everyones


def _on_gpus(*arguments: object) -> list[float]:
    return on_default_group(_on_a_gpu, *arguments, backend="nccl")
