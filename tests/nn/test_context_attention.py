"""Attention over sequences that ranks share is attention over the whole sequence."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

from fp8_megatron.data.document_bounds import SequencePart
from fp8_megatron.device.group import Group
from fp8_megatron.dtypes import E4M3
from fp8_megatron.kernels import ops
from fp8_megatron.nn.context_attention import CommType, ContextParallel, context_attention
from fp8_megatron.nn.head_exchange import heads_of_sequence, sequences_of_heads
from fp8_megatron.quantization.stats import snr_db
from tests.harness.ranks import RankPool, on_default_group
from tests.harness.sequence_parts import whole_of

COMM_TYPES: list[CommType | Literal["a2a"]] = ["all_gather", "p2p", "a2a"]
WIDTH = 16
SCALE = 0.3


def operands(dtype: torch.dtype, *, length: int = 48, batch: int = 2, heads: int = 4, groups: int = 2) -> list[Tensor]:
    """Query, key, value and the output's gradient of whole sequences, the same on every rank."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(length, batch, n, WIDTH) for n in (heads, groups, groups)]
    shapes.append((length, batch, heads * WIDTH))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def whole(query: Tensor, key: Tensor, value: Tensor, grad: Tensor) -> list[Tensor]:
    """The output and the gradients by PyTorch's attention over the whole sequence, in float64."""
    leaves = [x.double().requires_grad_() for x in (query, key, value)]
    q, k, v = (x.permute(1, 2, 0, 3) for x in leaves)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE, enable_gqa=True)
    result = out.permute(2, 0, 1, 3).flatten(2)
    result.backward(grad.double())
    return [result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def attention_in_sequences(query: Tensor, key: Tensor, value: Tensor, group: Group) -> Tensor:
    """Attention of each rank's heads over whole sequences, in FP32 at least."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    q, k, v = (x.permute(1, 2, 0, 3).to(dtype) for x in sequences_of_heads(query, key, value, group))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE, enable_gqa=True)
    return heads_of_sequence(out.permute(2, 0, 1, 3).to(query.dtype), group).flatten(2)


def on_a_rank(
    group: Group,
    comm_type: CommType | Literal["a2a"],
    dtype: torch.dtype,
    sizes: dict[str, int],
    wire: torch.dtype | None = None,
) -> list[Tensor]:
    part = SequencePart(group.rank(), group.size())
    *inputs, grad = (part.of(x, dim=0) for x in operands(dtype, **sizes))
    leaves = [x.requires_grad_() for x in inputs]
    if comm_type == "a2a":
        result = attention_in_sequences(*leaves, group)
    else:
        result = context_attention(*leaves, ContextParallel(group, comm_type, SCALE, "dense", wire))
    result.backward(grad)
    return [result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def computed(
    ranks: RankPool, num_ranks: int, comm_type: CommType | Literal["a2a"], dtype: torch.dtype, **sizes: int
) -> list[Tensor]:
    everyones = ranks.run(on_default_group, on_a_rank, comm_type, dtype, sizes, num_ranks=num_ranks)
    return [whole_of(parts) for parts in zip(*everyones, strict=True)]


@pytest.mark.parametrize("comm_type", COMM_TYPES)
@pytest.mark.parametrize(("num_ranks", "heads", "groups"), [(2, 4, 2), (3, 6, 3), (4, 8, 4)])
def test_it_is_attention_over_the_whole_sequence(
    ranks: RankPool, num_ranks: int, heads: int, groups: int, comm_type: CommType | Literal["a2a"]
) -> None:
    """In float64, whose sums in another order differ by some 10⁻¹⁵ of numbers around 1."""
    sizes = {"heads": heads, "groups": groups}
    expected = whole(*operands(torch.float64, **sizes))
    for measured, wanted in zip(computed(ranks, num_ranks, comm_type, torch.float64, **sizes), expected, strict=True):
        torch.testing.assert_close(measured, wanted, rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("comm_type", COMM_TYPES)
def test_its_rounding_is_that_of_16_bits(ranks: RankPool, comm_type: CommType | Literal["a2a"]) -> None:
    """Of each result, the largest error over its rms.

    A block's output is rounded to BF16, by up to 2⁻⁹ of itself, and the merged one again: 2⁻⁸ of an element, which is
    at most some four times the rms. A gradient is a sum of up to four rounded summands of the result's own size,
    rounded once more: 5 · 2⁻⁹ of it. The output that backward takes is rounded too.
    """
    expected = whole(*operands(torch.bfloat16, groups=4))
    for measured, wanted in zip(computed(ranks, 4, comm_type, torch.bfloat16, groups=4), expected, strict=True):
        assert measured.dtype == torch.bfloat16
        worst = (measured.double() - wanted).abs().max() / wanted.square().mean().sqrt()
        assert worst < 4 * 5 * 2**-9, float(worst)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_keys_and_values_in_fp8(ranks: RankPool, num_ranks: int) -> None:
    """Those of other ranks, and gradients from other ranks, have E4M3's noise (31.5 dB), and nothing else has.

    A key's noise moves a score by 0.3 · √16 · 10^(-31.5 / 20) = 0.03, and a probability by 3%, which is 30.5 dB. With
    the value's noise an output keeps 28 dB. A gradient of a query or a key has the noise of a key, a value and a
    probability: 26.4 dB. That of a value has a probability's and its own cast's: 28 dB. Less 1 dB for the sample.
    """
    expected = whole(*operands(torch.bfloat16, groups=4))
    everyones = ranks.run(
        on_default_group, on_a_rank, "all_gather", torch.bfloat16, {"groups": 4}, E4M3, num_ranks=num_ranks
    )
    measured = [whole_of(parts) for parts in zip(*everyones, strict=True)]
    for value, wanted, bound in zip(measured, expected, (27.0, 25.4, 25.4, 27.0), strict=True):
        assert bound < snr_db(value.double(), wanted) < 45.0


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_are_attention_to_their_keys(causal: bool) -> None:
    """Also with more keys than queries, and their log-sum-exp; float64."""
    query, key, value, _ = operands(torch.float64, length=24)
    key, value = (key, value) if causal else (torch.cat([key, 2 * key]), torch.cat([value, 3 * value]))
    out, log_sum_exp = ops.attention_block(query, key, value, causal=causal, scale=SCALE, kernel="dense")
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=SCALE, enable_gqa=True)
    torch.testing.assert_close(out.permute(1, 2, 0, 3), wanted, rtol=0.0, atol=1e-12)
    scores = SCALE * q @ k.repeat_interleave(2, dim=1).transpose(-1, -2)
    if causal:
        scores = scores.masked_fill(torch.ones(24, 24, dtype=torch.bool).triu(1), -torch.inf)
    torch.testing.assert_close(log_sum_exp, scores.exp().sum(dim=-1).log(), rtol=0.0, atol=1e-12)
