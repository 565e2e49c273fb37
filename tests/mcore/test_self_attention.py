"""This project's self-attention in 16 bits against megatron-core's own, in FP32: outputs and every gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings import YarnRotaryEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from fp8_megatron.config.schema import ModelConfig, PrecisionConfig, TrainingConfig
from fp8_megatron.mcore.attention import CoreAttention
from fp8_megatron.mcore.runtime import runtime, seed_everything
from fp8_megatron.mcore.self_attention import RotarySelfAttention
from fp8_megatron.mcore.topology import initialized
from fp8_megatron.mcore.transformer_config import rotary_table, tell_yarn, transformer_config
from tests.harness.ranks import RankPool
from tests.harness.tiny_gpt import LLAMA_STYLE, tiny_config

CPU = torch.device("cpu")
BATCH = 2
#: YaRN's factor 64 multiplies query and key by 1.42; 5 of 16 pairs turn within the original context.
ROPES: dict[str, dict[str, Any]] = {
    "whole": {},
    "half": {"rotary_percent": 0.5},
    "yarn": {
        "position_embedding_type": "yarn",
        "rotary_scaling_factor": 64.0,
        "yarn_original_max_position_embeddings": 100,
    },
}


def _build(kind: type[SelfAttention], model: ModelConfig, *, recomputes: bool) -> SelfAttention:
    config = replace(
        tiny_config(model, precision=PrecisionConfig(precision="bf16")),
        training=TrainingConfig(recompute_granularity="selective" if recomputes else None),
    )
    settings = replace(
        transformer_config(config, CPU),
        bf16=False,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        autocast_dtype=torch.float32,
    )
    tell_yarn(settings, model)
    layer = kind(
        settings,
        SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=CoreAttention,
            linear_proj=ModuleSpec(module=RowParallelLinear),
            q_layernorm=IdentityOp,
            k_layernorm=IdentityOp,
        ),
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
    )
    generator = torch.Generator().manual_seed(0)
    for param in layer.parameters():
        param.data = torch.randn(param.shape, generator=generator) * 0.2
    return layer


def _outputs(layer: SelfAttention, rotary_pos_emb: Tensor, seq: int) -> list[Tensor]:
    """The output, the input's gradient and every parameter's."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(seq, BATCH, layer.config.hidden_size, generator=generator).requires_grad_()
    output, _ = layer(x, None, rotary_pos_emb=rotary_pos_emb)
    output.backward(torch.randn(output.shape, generator=generator))
    return [output.detach(), x.grad, *(param.grad for param in layer.parameters())]  # type: ignore[list-item]


def _both(model: ModelConfig, recomputes: bool) -> tuple[list[Tensor], list[Tensor]]:
    with runtime(CPU), initialized(tiny_config(model).parallel, 1, CPU):
        seed_everything(0, CPU, tensor_parallel_rank=0, pipeline_rank=0)
        table = rotary_table(model, CPU)
        assert table is not None
        ours = _outputs(_build(RotarySelfAttention, model, recomputes=recomputes), table(model.seq_length), 32)
        stock = _outputs(_build(SelfAttention, model, recomputes=recomputes), _megatrons_angles(model), 32)
        return ours, stock


def _megatrons_angles(model: ModelConfig) -> Tensor:
    if model.position_embedding_type == "rope":
        return RotaryEmbedding(model.head_dim, model.rotary_percent, rotary_base=model.rotary_base)(model.seq_length)
    angles, _ = YarnRotaryEmbedding(
        model.head_dim,
        rotary_base=model.rotary_base,
        scaling_factor=model.rotary_scaling_factor,
        original_max_position_embeddings=model.yarn_original_max_position_embeddings,
    )(model.seq_length)
    return angles


@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("rope", ROPES)
def test_is_megatrons_attention(ranks: RankPool, recomputes: bool, rope: str) -> None:
    """FP32 sums of 128 products are off by 10⁻⁶ of their size; without the rotation, outputs differ by tenths."""
    model = replace(LLAMA_STYLE, **ROPES[rope])
    ((ours, stock),) = ranks.run(_both, model, recomputes, num_ranks=1)
    assert len(ours) == len(stock) == 4
    for measured, expected in zip(ours, stock, strict=True):
        torch.testing.assert_close(measured, expected, rtol=0, atol=1e-5 * expected.abs().max().item())
