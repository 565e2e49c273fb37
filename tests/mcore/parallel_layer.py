"""megatron-core's configuration of one linear layer that tensor-parallel ranks share."""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


def layer_config(hidden_size: int, tp: int, *, sequence_parallel: bool) -> TransformerConfig:
    """The settings that a linear layer reads, in BF16 and without initial values."""
    return TransformerConfig(
        num_layers=1,
        hidden_size=hidden_size,
        num_attention_heads=4,
        tensor_model_parallel_size=tp,
        sequence_parallel=sequence_parallel,
        params_dtype=torch.bfloat16,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
    )
