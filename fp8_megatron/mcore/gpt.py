"""Builds the GPT that a configuration describes: megatron-core's GPTModel with this project's layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel.utils import is_vp_first_stage, is_vp_last_stage
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.enums import AttnBackend, LayerType
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from ..config.pipeline_layout import PipelineLayout
from ..config.schema import Config, ModelConfig
from ..config.windows import layer_pattern, window_sizes
from ..formats import E4M3
from ..nn.chunked_loss import TokenLoss, loss_in_chunks
from ..nn.cross_entropy import fill_padding, vocab_parallel_cross_entropy
from ..nn.links import KeptTranspose, LayerLinks, model_links
from ..nn.offload import ActivationOffload
from ..quantization.recipe import Recipe
from .initialization import named_quantizers_of_model
from .layer_spec import Attention, block_submodules, te_block_submodules
from .lm_head import FP8OutputLayer
from .offload import offload_layers
from .rope import RotaryTable, replaced_position_embedding, rotary_table, tell_yarn
from .topology import Topology

#: megatron-core's names of the kernels of attention in Transformer Engine.
_TE_ATTENTION = {
    "auto": AttnBackend.auto,
    "cudnn": AttnBackend.fused,
    "flash": AttnBackend.flash,
    "math": AttnBackend.unfused,
}


class MegatronGPT(GPTModel):
    """megatron-core's GPTModel with its own loss, over the vocabulary without padding.

    Attributes:
        unpadded_vocab_size: tokens of the vocabulary; later columns of the logits are padding. None: no padding.
    """

    unpadded_vocab_size: int | None = None

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """labels int64 [b, s], logits BF16 [s, b, V / tp] (their padding is overwritten) → FP32 [b, s]."""
        if self.unpadded_vocab_size is not None:
            logits = fill_padding(logits, self.unpadded_vocab_size, self.pg_collection.tp)
        return super().compute_language_model_loss(labels, logits)


class GPT(MegatronGPT):
    """megatron-core's GPTModel with this project's loss, and its RoPE if `use_rotary_table` is called.

    Attributes:
        loss_chunk_size: positions of each sequence whose logits exist at a time; None: all.
    """

    output_layer: ColumnParallelLinear
    loss_chunk_size: int | None = None

    def use_fp8_head(self, recipe: Recipe) -> None:
        """Compute the final norm, the LM head and the loss as one FP8 function. The decoder defers its norm."""
        self.output_layer = FP8OutputLayer(
            self.output_layer, self.decoder.final_layernorm, recipe, self.unpadded_vocab_size
        )

    def use_rotary_table(self, table: RotaryTable) -> None:
        """Give the layers this table's angles in the place of megatron-core's rotary embedding."""
        self.rotary_pos_emb = table

    def _postprocess(self, hidden_states: Tensor, *, labels: Tensor | None, **others: Any) -> Tensor:
        if not self.post_process:
            # megatron-core's schedules free what was sent, but no view.
            return make_viewless_tensor(hidden_states, requires_grad=hidden_states.requires_grad, keep_graph=True)
        if labels is None:
            return super()._postprocess(hidden_states=hidden_states, labels=labels, **others)
        head = self.output_layer
        if self.loss_chunk_size is None and not isinstance(head, FP8OutputLayer):
            return super()._postprocess(hidden_states=hidden_states, labels=labels, **others)
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        if self.loss_chunk_size is None:
            loss, _ = head(hidden_states, weight, labels=labels.transpose(0, 1))
        else:
            is_fp8 = isinstance(head, FP8OutputLayer)
            token_loss: TokenLoss = head.token_loss if is_fp8 else self._token_loss
            loss = loss_in_chunks(
                token_loss,
                hidden_states,
                labels.transpose(0, 1).contiguous(),
                head.loss_params(weight) if is_fp8 else (head.weight if weight is None else weight,),
                chunk=self.loss_chunk_size,
                ranks=self.pg_collection.tp.size() if self.config.sequence_parallel else 1,
            )
        return loss.transpose(0, 1).contiguous()

    def _token_loss(self, x: Tensor, labels: Tensor, *params: Tensor | None) -> Tensor:
        """The loss FP32 [s, b] of some tokens with a 16-bit head: x [s, b, h] after the norm, labels [s, b]."""
        logits, _ = self.output_layer(x, weight=params[0])
        return vocab_parallel_cross_entropy(logits, labels, self.pg_collection.tp, self.unpadded_vocab_size)

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """labels int64 [b, s], logits BF16 [s, b, V / tp] (backward overwrites them) → FP32 [b, s]."""
        loss = vocab_parallel_cross_entropy(
            logits, labels.transpose(0, 1), self.pg_collection.tp, self.unpadded_vocab_size
        )
        return loss.transpose(0, 1).contiguous()


@dataclass(frozen=True)
class ModelChunk:
    """One (virtual) pipeline stage on this rank."""

    module: GPTModel
    recipe: Recipe
    links: Sequence[LayerLinks | None]

    def kept_transposes(self) -> list[KeptTranspose]:
        """The kept transposes of its weights. Code that writes the weights calls their `forget`."""
        return [kept for layer in self.links if layer is not None for kept in layer.kept_transposes()]


def transformer_config(config: Config, device: torch.device) -> TransformerConfig:
    """megatron-core's view of the configuration."""
    model, parallel, training = config.model, config.parallel, config.training
    layout = config.pipeline_layout
    # The meta device stands for a GPU whose memory is counted (`training.rank_build`).
    on_gpu = device.type != "cpu"
    dtype = torch.float16 if config.precision.precision == "fp16" else torch.bfloat16
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
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        cp_comm_type=parallel.cp_comm_type,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=layout.virtual_size,
        microbatch_group_size_per_vp_stage=parallel.microbatch_group_size_per_virtual_pipeline_stage,
        pipeline_model_parallel_layout=None if layout.is_even else _layer_types(layout),
        sequence_parallel=parallel.sequence_parallel,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        autocast_dtype=dtype,
        use_cpu_initialization=not on_gpu,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        bias_activation_fusion=fuses_activation,
        bias_dropout_fusion=on_gpu,
        cross_entropy_loss_fusion=on_gpu,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        # With batched sends, PP=2 and two virtual stages, gradients are silently exchanged in the wrong order.
        batch_p2p_comm=not layout.is_interleaved,
        batch_p2p_sync=False,
        overlap_p2p_comm=False,
        # A stage's backward needs the graph of what it sent, not the values.
        deallocate_pipeline_outputs=parallel.pipeline_model_parallel_size > 1,
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
    """megatron-core's function of the activation. GELU is its tanh approximation on every device.

    megatron-core's fused kernel computes the approximation for `gelu` and accepts no other name for it. Its own squared
    ReLU and quick GELU are compiled where they are imported, on a CPU too.
    """
    if model.swiglu:
        return torch.nn.functional.silu
    if model.squared_relu:
        return _squared_relu
    if model.quick_geglu:
        return _quick_gelu
    return torch.nn.functional.gelu if is_fused else _tanh_gelu


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


def build_model(
    config: Config,
    vocab_size: int,
    topology: Topology,
    device: torch.device,
    new_recipe: Callable[[], Recipe],
    *,
    unpadded_vocab_size: int | None = None,
) -> list[ModelChunk]:
    """This rank's model chunks, uninitialised (see `initialization`).

    Args:
        vocab_size: padded to a multiple of the tensor-parallel size.
        new_recipe: called once per chunk.
        unpadded_vocab_size: tokens of the vocabulary. The loss leaves later columns out. None: no padding.
    """
    mcore_config = transformer_config(config, device)
    table = rotary_table(config.model, device, topology.sequence_part)
    chunks, kept = [], config.precision.keep_fp8_transpose_cache
    num_offloaded = config.training.cpu_offloading_num_layers
    offload = ActivationOffload(device) if num_offloaded else None
    for virtual, layers in enumerate(topology.layout.chunks[topology.pp.rank()]):
        own = _build_chunk(
            config, mcore_config, vocab_size, topology, device, virtual, new_recipe(), unpadded_vocab_size, kept, table
        )
        if offload is not None:
            offload_layers(own.module.decoder, num_offloaded, offload)
        chunks.append(own)
        kept = max(0, kept - len(layers))
    return chunks


def _build_chunk(
    config: Config,
    mcore_config: TransformerConfig,
    vocab_size: int,
    topology: Topology,
    device: torch.device,
    index: int,
    recipe: Recipe,
    unpadded_vocab_size: int | None,
    num_kept_transposes: int,
    table: RotaryTable | None,
) -> ModelChunk:
    model, virtual = config.model, topology.virtual_pipeline_size
    vp_stage = None if virtual is None else index
    layers = topology.layout.chunks[topology.pp.rank()][index]
    place = (mcore_config, vp_stage, topology.pp.rank())
    assert get_num_layers_to_build(*place) == len(layers), (layers, mcore_config.pipeline_model_parallel_layout)
    assert not layers or get_transformer_layer_offset(*place) == layers[0], (layers, place)
    links: list[LayerLinks | None] = []
    if config.precision.precision == "te":
        submodules = te_block_submodules(len(layers), qk_layernorm=model.qk_layernorm)
    else:
        recipes = [recipe if config.is_fp8_layer(layer) else None for layer in layers]
        links = model_links([own is not None for own in recipes], num_kept_transposes=num_kept_transposes)
        submodules = block_submodules(
            recipes,
            links,
            _attention(config),
            model.activation,
            defers_final_norm=config.has_fp8_lm_head,
            mlp_chunks=config.training.mlp_chunks_for_training,
        )
    model_class = MegatronGPT if config.precision.precision == "te" else GPT
    module = model_class(
        mcore_config,
        submodules,
        vocab_size=vocab_size,
        max_sequence_length=model.max_position_embeddings or model.seq_length,
        pre_process=is_vp_first_stage(vp_stage, virtual) and topology.is_first_stage,
        post_process=is_vp_last_stage(vp_stage, virtual) and topology.is_last_stage,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type=(
            replaced_position_embedding(model) if model_class is GPT else model.position_embedding_type
        ),
        rotary_percent=model.rotary_percent,
        rotary_base=model.rotary_base,
        rope_scaling=model.use_rope_scaling,
        rope_scaling_factor=model.rope_scaling_factor,
        seq_len_interpolation_factor=model.rotary_seq_len_interpolation_factor,
        pg_collection=topology.groups,
        vp_stage=vp_stage,
    )
    module.unpadded_vocab_size = unpadded_vocab_size
    if isinstance(module, GPT) and table is not None:
        module.use_rotary_table(table)
    if isinstance(module, GPT):
        module.loss_chunk_size = config.training.loss_chunk_size
    if config.has_fp8_lm_head and module.post_process:
        module.use_fp8_head(recipe)
    _tag_vocab_parallel(module)
    if module.pre_process and module.embedding.add_position_embedding:
        # The only parameter that megatron-core leaves in FP32 on the CPU.
        module.embedding.position_embeddings.to(device=device, dtype=module.config.params_dtype)
    if recipe.history is not None:
        casts = named_quantizers_of_model(module)
        recipe.history.name_layers({layer: list(quantizers.slots()) for layer, quantizers in casts.items()})
        recipe.history.allocate(device)
    return ModelChunk(module, recipe, links)


def _attention(config: Config) -> Attention:
    precision = config.precision
    return Attention(
        config.model.attention_backend,
        has_norms=config.model.qk_layernorm,
        is_fp8=precision.fp8_dot_product_attention,
        exchanges_heads=config.parallel.exchanges_heads,
        context_wire=E4M3 if precision.fp8_context_communication else None,
    )


def _tag_vocab_parallel(module: GPTModel) -> None:
    """Mark embedding and head weights as split over the vocabulary. megatron-core leaves the sharding attributes unset
    (on linear weights too) if it does not initialise the weights itself."""
    from megatron.core.tensor_parallel.layers import (
        ColumnParallelLinear,
        RowParallelLinear,
        VocabParallelEmbedding,
        set_defaults_if_not_set_tensor_model_parallel_attributes,
    )

    for child in module.modules():
        if isinstance(child, ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding):
            weight = child.weight
            if weight is None:
                continue
            weight.tensor_model_parallel = True
            weight.partition_dim = 1 if isinstance(child, RowParallelLinear) else 0
            weight.partition_stride = getattr(weight, "partition_stride", 1)
    for layer in module.decoder.layers:
        if module.config.gated_linear_unit:
            layer.mlp.linear_fc1.weight.partition_stride = 2
            if layer.mlp.linear_fc1.bias is not None:
                layer.mlp.linear_fc1.bias.partition_stride = 2
    for param in module.parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(param)
