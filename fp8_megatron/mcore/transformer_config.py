"""megatron-core's view of a configuration: its `TransformerConfig`, and the table of RoPE's angles with its scaling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from megatron.core.transformer.enums import AttnBackend, LayerType
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ..activation_functions import Activation
from ..config.model import YARN_SETTINGS, layer_pattern, window_sizes
from ..config.pipeline_layout import PipelineLayout
from ..config.schema import Config, ModelConfig
from ..data.document_bounds import SequencePart
from ..nn.rope import Yarn, cos_sin_table, rope_frequencies
from ..quantization.unfused import function_of
from .seams import without_cuda_graphs

#: megatron-core's names of the kernels of attention in Transformer Engine.
_TE_ATTENTION = {
    "auto": AttnBackend.auto,
    "cudnn": AttnBackend.fused,
    "flash": AttnBackend.flash,
    "math": AttnBackend.unfused,
}


class RotaryTable(torch.nn.Module):
    """Cosine and sine of every pair at every sequence index. All layers of a model read one table.

    megatron-core's GPTModel calls it once a forward and passes the result to its layers as ``rotary_pos_emb``. The
    table keeps its address, so that recorded steps may read it.

    Args:
        frequencies: float64 [R / 2], in radians a position.
        num_positions: of a sequence. A longer one makes a longer table.
        part: the tokens of each sequence that this rank has. The table has their rows alone, in their order.
        magnitude: multiplies cosines and sines.
    """

    def __init__(
        self,
        frequencies: Tensor,
        num_positions: int,
        device: torch.device,
        part: SequencePart | None = None,
        *,
        magnitude: float = 1.0,
    ) -> None:
        super().__init__()
        self._frequencies, self._magnitude = frequencies, magnitude
        self._part = part or SequencePart()
        self._table = self._rows(num_positions).to(device)

    def forward(self, length: int, **unused: Any) -> Tensor:
        """FP32 [length, 2, R / 2]: `Rotation.cos_sin` of this rank's `length` tokens of a sequence."""
        num_rows = self._table.shape[0]
        # A part of a shorter sequence is no run of these rows.
        if length > num_rows or (length < num_rows and not self._part.is_whole):
            self._table = self._rows(length * self._part.size).to(self._table.device)
        return self._table[:length]

    def _rows(self, num_positions: int) -> Tensor:
        return self._part.of(cos_sin_table(self._frequencies, num_positions, self._magnitude), dim=0)

    def get_rotary_seq_len(
        self,
        inference_context: object,
        transformer: TransformerBlock,
        transformer_input: Tensor | None,
        transformer_config: TransformerConfig,
        packed_seq_params: object = None,
    ) -> int:
        """Tokens of a sequence that this rank has, or its tensor-parallel ranks together. megatron-core asks before
        each forward."""
        states = transformer_input if transformer.input_tensor is None else transformer.input_tensor
        assert states is not None
        parts = transformer_config.tensor_model_parallel_size if transformer_config.sequence_parallel else 1
        return int(states.shape[0] * parts)


def rotary_table(model: ModelConfig, device: torch.device, part: SequencePart | None = None) -> RotaryTable | None:
    """The angles of a model's RoPE, for all its chunks; None without RoPE.

    Args:
        part: see `RotaryTable`.
    """
    if not model.uses_rope:
        return None
    yarn = None
    if model.position_embedding_type == "yarn":
        yarn = Yarn(
            factor=model.rotary_scaling_factor,
            original_context=model.yarn_original_max_position_embeddings,
            beta_fast=model.yarn_beta_fast,
            beta_slow=model.yarn_beta_slow,
            rounds_range=model.yarn_correction_range_round_to_int,
        )
    frequencies = rope_frequencies(
        int(model.head_dim * model.rotary_percent),
        model.rotary_base,
        interpolation=model.rotary_seq_len_interpolation_factor,
        llama3_factor=model.rope_scaling_factor if model.use_rope_scaling else None,
        yarn=yarn,
    )
    return RotaryTable(frequencies, model.seq_length, device, part, magnitude=model.rope_magnitude)


def replaced_position_embedding(model: ModelConfig) -> str:
    """megatron-core's kind of position embedding for a model whose rotary embedding a `RotaryTable` replaces.

    megatron-core passes the table on under ``rope``. Under ``yarn`` it would expect its own factor beside the angles.
    """
    return "rope" if model.uses_rope else model.position_embedding_type


def tell_yarn(settings: TransformerConfig, model: ModelConfig) -> None:
    """Set what megatron-core's own YaRN reads of its configuration and no field of it declares."""
    if model.position_embedding_type != "yarn":
        return
    for name in YARN_SETTINGS:
        setattr(settings, name if name.startswith("yarn_") else f"yarn_{name}", getattr(model, name))


def transformer_config(
    config: Config, device: torch.device, further: Mapping[str, Any] = MappingProxyType({})
) -> TransformerConfig:
    """megatron-core's view of the configuration.

    Args:
        further: settings of the model's kind (`parts.Parts.settings`).
    """
    model, training = config.model, config.training
    # The meta device stands for a GPU whose memory is counted (`training.rank_build`).
    on_gpu = device.type != "cpu"
    # megatron-core fuses these with torch.compile, which needs a C++ toolchain on a CPU.
    fused = ("all",) if model.disable_bias_linear else ("all", "biased")
    fuses_activation = on_gpu and model.activation.row.core_fusion in fused
    settings = TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.padded_ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.query_groups,
        kv_channels=model.head_dim,
        **_windows(model),
        softmax_type=model.softmax_type,
        softmax_scale=model.softmax_scale,
        normalization=model.normalization,
        layernorm_epsilon=model.norm_epsilon,
        gated_linear_unit=model.is_gated,
        activation_func_clamp_value=model.activation_func_clamp_value,
        glu_linear_offset=model.glu_linear_offset,
        activation_func=_activation_function(model.activation, is_fused=fuses_activation),
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
        **without_cuda_graphs(),
        recompute_granularity=training.recompute_granularity,
        recompute_method=training.recompute_method,
        recompute_num_layers=training.recompute_num_layers,
        recompute_modules=_recomputed_modules(config),
        **_te_settings(config),
        **further,
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


def _activation_function(activation: Activation, *, is_fused: bool) -> Callable[[Tensor], Tensor]:
    """megatron-core's function of the activation, the same on every device.

    megatron-core's fused kernel computes GELU's tanh form for `gelu` and accepts no other name for it. Its own squared
    ReLU and quick GELU are compiled where they are imported, on a CPU too.
    """
    if is_fused:
        function: Callable[[Tensor], Tensor] = getattr(torch.nn.functional, str(activation.row.torch_name))
        return function
    return function_of(activation)


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
