"""The bias of experts moves after each step, by the loads of their routers."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fp8_megatron.moe.megatron.router import Router
from tests.harness.tiny_gpt import LLAMA_STYLE, TinyGPT, random_batches, tiny_config, train_tiny_gpt

MODEL = replace(
    LLAMA_STYLE,
    num_experts=8,
    moe_ffn_hidden_size=64,
    moe_router_score_function="sigmoid",
    moe_router_dtype="fp32",
    moe_router_enable_expert_bias=True,
    moe_router_bias_update_rate=0.25,
)


def test_experts_with_fewer_tokens_than_the_mean_gain_bias() -> None:
    """One step from a bias of 0, in every layer (arXiv 2408.15664)."""
    routers: list[Router] = []

    def keep(gpt: TinyGPT) -> None:
        routers.extend(part for part in gpt.model[0].reporting if isinstance(part, Router))

    train_tiny_gpt(tiny_config(MODEL), random_batches(1, 2)[None, 0], before_training=keep)
    assert len(routers) == MODEL.num_layers
    for router in routers:
        load, bias = router.load, router.expert_bias
        assert isinstance(bias, Tensor) and bias.any()
        assert torch.equal(bias, 0.25 * torch.sign(load.mean() - load))
