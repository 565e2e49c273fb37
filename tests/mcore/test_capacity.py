"""Tokens beyond the capacity of an expert: which ones are dropped."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping, topk_routing_with_score_function

from fp8_megatron.config.moe import expert_capacity
from fp8_megatron.moe.megatron.router import within_capacity

TOKENS, EXPERTS, TOP_K = 96, 8, 2


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("factor", [0.1, 0.75, 1.25, 9.0])
def test_an_expert_keeps_what_megatron_core_s_keeps(score_function: str, factor: float) -> None:
    logits = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(0))
    probs, chosen = topk_routing_with_score_function(logits, TOP_K, score_function=score_function)
    capacity = expert_capacity(TOKENS, TOP_K, EXPERTS, factor)
    _, expected = apply_router_token_dropping(probs, chosen, TOP_K, factor, "probs")
    kept = within_capacity(probs, chosen, capacity, "probs")
    assert torch.equal(kept, expected)
    assert torch.equal(kept.sum(dim=0), chosen.sum(dim=0).clamp(max=capacity))
    first = within_capacity(probs, chosen, capacity, "position")
    for expert in range(EXPERTS):
        tokens = chosen[:, expert].nonzero().flatten()
        assert torch.equal(first[:, expert].nonzero().flatten(), tokens[:capacity])


def test_every_expert_takes_all_tokens_without_a_factor() -> None:
    assert expert_capacity(TOKENS, TOP_K, EXPERTS, None) == TOKENS
