"""Sinkhorn's plan without waiting for the host: megatron-core's, where that ends."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.moe import moe_utils

from fp8_megatron.moe.megatron.router import sinkhorn


@pytest.mark.parametrize("std", [0.02, 1.0, 4.0])
@pytest.mark.parametrize(("num_tokens", "num_experts"), [(512, 8), (256, 64)])
def test_the_plan_is_megatron_cores(num_tokens: int, num_experts: int, std: float) -> None:
    logits = std * torch.randn(num_tokens, num_experts, generator=torch.Generator().manual_seed(0))
    plan = sinkhorn(logits)
    # Constants are multiplied in another order: some roundings of FP32.
    torch.testing.assert_close(plan, moe_utils.sinkhorn(logits), rtol=1e-5, atol=0.0)
    assert torch.equal(plan.argmax(dim=1), moe_utils.sinkhorn(logits).argmax(dim=1))


def test_a_plan_that_does_not_settle_ends() -> None:
    """Some experts are far ahead of others, and megatron-core's loop does not end. Columns' sums are near 1 / 8."""
    generator = torch.Generator().manual_seed(0)
    plan = sinkhorn(8 * torch.randn(256, 8, generator=generator) + 8 * torch.randn(8, generator=generator))
    assert ((8 * plan.sum(dim=0) - 1).abs() < 0.5).all()
