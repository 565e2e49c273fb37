"""megatron-core's view of a configuration: its `TransformerConfig`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.enums import AttnBackend, LayerType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ..config.pipeline_layout import PipelineLayout
from ..config.schema import Config, ModelConfig
from ..config.windows import layer_pattern, window_sizes
from .rope import tell_yarn

#: megatron-core's names of the kernels of attention in Transformer Engine.
_TE_ATTENTION = {
    "auto": AttnBackend.auto,
    "cudnn": AttnBackend.fused,
    "flash": AttnBackend.flash,
    "math": AttnBackend.unfused,
}


def transformer_config(config: Config, device: torch.device) -> TransformerConfig:
    """megatron-core's view of the configuration."""
    model, training = config.model, config.training
    # The meta device stands for a GPU whose memory is counted (`training.rank_build`).
    on_gpu = device.type != "cpu"
    # megatron-core fuses these with torch.compile, which needs a C++ toolchain on a CPU.
    fuses_activation = on_gpu and (model.swiglu or (model.activation == "gelu" and not model.disable_bias_linear))
    settings = TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.padded_ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.query_groups,
        kv_channels=model.head_dim,
        **_windows(model),
        normalization=model.normalization,
        layernorm_epsilon=model.norm_epsilon,
        gated_linear_unit=model.is_gated,
        activation_func=_activation(model, is_fused=fuses_activation),
        add_bias_linear=not model.disable_bias_linear,
        add_qkv_bias=model.add_qkv_bias,
        qk_layernorm=model.qk_layernorm,
        rotary_interleaved=model.rotary_interleaved,
        attention_dropout=model.attention_dropout,
        hidden_dropout=model.hidden_dropout,
        init_method_std=model.init_method_std,
        **_parallel_settings(config),
        **_dtypes(config),
        use_cpu_initialization=not on_gpu,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        bias_activation_fusion=fuses_activation,
        bias_dropout_fusion=on_gpu,
        cross_entropy_loss_fusion=on_gpu,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        deterministic_mode=training.deterministic_mode,
        cuda_graph_scope=[],  # what its default means, without a warning that the default is deprecated
        recompute_granularity=training.recompute_granularity,
        recompute_method=training.recompute_method,
        recompute_num_layers=training.recompute_num_layers,
        recompute_modules=_recomputed_modules(config),
        **_te_settings(config),
    )
    tell_yarn(settings, model)
    return settings


def _parallel_settings(config: Config) -> dict[str, Any]:
    """megatron-core's settings of parallel layouts, and of what pipeline stages send each other."""
    parallel, layout = config.parallel, config.pipeline_layout
    return {
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "context_parallel_size": parallel.context_parallel_size,
        "cp_comm_type": parallel.cp_comm_type,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": layout.virtual_size,
        "microbatch_group_size_per_vp_stage": parallel.microbatch_group_size_per_virtual_pipeline_stage,
        "pipeline_model_parallel_layout": None if layout.is_even else _layer_types(layout),
        "sequence_parallel": parallel.sequence_parallel,
        # With batched sends, PP=2 and two virtual stages, gradients are silently exchanged in the wrong order.
        "batch_p2p_comm": not layout.is_interleaved,
        "batch_p2p_sync": False,
        "overlap_p2p_comm": False,
        # A stage's backward needs the graph of what it sent, not the values.
        "deallocate_pipeline_outputs": parallel.pipeline_model_parallel_size > 1,
    }


def _dtypes(config: Config) -> dict[str, Any]:
    """megatron-core's settings of the 16-bit dtype."""
    dtype = torch.float16 if config.precision.precision == "fp16" else torch.bfloat16
    return {
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "autocast_dtype": dtype,
    }


def _recomputed_modules(config: Config) -> list[str]:
    """megatron-core's parts to recompute. It recomputes norms only of Transformer Engine's layers, and no MLPs in
    chunks, which do so themselves."""
    ours = set() if config.precision.precision == "te" else {"layernorm"}
    if config.training.mlp_chunks_for_training > 1:
        ours.add("mlp")
    return [module for module in config.training.recomputed_modules if module not in ours]


def _windows(model: ModelConfig) -> dict[str, Any]:
    """megatron-core's settings of sliding windows."""
    if model.window_size is None:
        return {}
    pattern = None if model.window_attn_skip_freq is None else layer_pattern(model.window_attn_skip_freq)
    return {"window_size": window_sizes(model.window_size), "window_attn_skip_freq": pattern}


def _layer_types(layout: PipelineLayout) -> list[list[LayerType]]:
    """The layers of every model chunk in the order of the model, as megatron-core names them."""
    rows = [[LayerType.decoder] * len(layers) for layers in layout.rows()]
    rows[0].insert(0, LayerType.embedding)
    rows[-1].append(LayerType.loss)
    return rows


def _activation(model: ModelConfig, *, is_fused: bool) -> Callable[[Tensor], Tensor]:
    """megatron-core's function of the activation, the same on every device.

    megatron-core's fused kernel computes GELU's tanh form for `gelu` and accepts no other name for it. Its own squared
    ReLU and quick GELU are compiled where they are imported, on a CPU too.
    """
    if model.swiglu:
        return torch.nn.functional.silu
    if model.squared_relu:
        return _squared_relu
    if model.quick_geglu:
        return _quick_gelu
    return torch.nn.functional.gelu if is_fused or model.activation == "gelu_erf" else _tanh_gelu


def _squared_relu(x: Tensor) -> Tensor:
    return torch.nn.functional.relu(x).square()


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _tanh_gelu(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def _te_settings(config: Config) -> dict[str, Any]:
    """megatron-core's FP8 settings and its kernel of attention. Only Transformer Engine's layers read them."""
    precision = config.precision
    if precision.precision != "te":
        return {}
    return {
        "attention_backend": _TE_ATTENTION[config.model.attention_backend],
        "fp8": "hybrid",
        "fp8_recipe": precision.fp8_recipe,
        "fp8_amax_history_len": precision.fp8_amax_history_len,
        "fp8_amax_compute_algo": precision.fp8_amax_compute_algo,
        "fp8_margin": precision.fp8_margin,
        "first_last_layers_bf16": precision.first_last_layers_bf16,
        "num_layers_at_start_in_bf16": precision.num_layers_at_start_in_bf16,
        "num_layers_at_end_in_bf16": precision.num_layers_at_end_in_bf16,
    }
