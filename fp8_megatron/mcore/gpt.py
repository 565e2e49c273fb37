"""Builds the GPT that a configuration describes: megatron-core's GPTModel with this project's layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel.utils import is_vp_first_stage, is_vp_last_stage
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from ..config.schema import Config, ModelConfig
from ..dtypes import E4M3
from ..nn.chunked_loss import TokenLoss, loss_in_chunks
from ..nn.cross_entropy import fill_padding, vocab_parallel_cross_entropy
from ..nn.links import KeptTranspose, LinearLinks, model_links
from ..nn.offload import ActivationOffload
from ..quantization.recipe import Recipe
from ..sharding.partition import RowSplit
from .initialization import named_quantizers_of_model
from .layer_spec import Attention, block_submodules, te_block_submodules
from .lm_head import FP8OutputLayer
from .mlp import mlp_spec
from .parts import Parts
from .topology import Topology
from .transformer_config import RotaryTable, replaced_position_embedding, rotary_table, transformer_config


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

    def use_fp8_head(self, recipe: Recipe, output_mult: float = 1.0) -> None:
        """Compute the final norm, the LM head and the loss as one FP8 function. The decoder defers its norm.

        Args:
            output_mult: multiplies the logits.
        """
        self.output_layer = FP8OutputLayer(
            self.output_layer, self.decoder.final_layernorm, recipe, self.unpadded_vocab_size, output_mult
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

    def kept_transposes(self) -> list[KeptTranspose]:
        """The kept transposes of its weights. Code that writes the weights calls their `forget`."""
        links = [getattr(child, "links", None) for child in self.module.modules()]
        kept = [own.kept_transpose for own in links if isinstance(own, LinearLinks)]
        return [own for own in kept if own is not None]


def build_model(
    config: Config,
    padded_vocab_size: int,
    topology: Topology,
    device: torch.device,
    new_recipe: Callable[[], Recipe],
    parts: Parts,
    *,
    unpadded_vocab_size: int | None = None,
) -> list[ModelChunk]:
    """This rank's model chunks, uninitialised (see `initialization`).

    Args:
        padded_vocab_size: a multiple of the tensor-parallel size.
        new_recipe: called once per chunk.
        parts: what the model has beside a decoder's parts.
        unpadded_vocab_size: tokens of the vocabulary. The loss leaves later columns out. None: no padding.
    """
    builder = _ChunkBuilder(
        config,
        transformer_config(config, device, parts.settings),
        parts,
        topology,
        device,
        padded_vocab_size,
        unpadded_vocab_size,
        rotary_table(config.model, device, topology.sequence_part),
    )
    chunks, kept = [], config.precision.keep_fp8_transpose_cache
    num_offloaded = config.training.cpu_offloading_num_layers
    offload = ActivationOffload(device) if num_offloaded else None
    for virtual, layers in enumerate(topology.layout.chunks[topology.pp.rank()]):
        own = builder.build(virtual, new_recipe(), num_kept_transposes=kept)
        if offload is not None:
            offload_layers(own.module.decoder, num_offloaded, offload)
        chunks.append(own)
        kept = max(0, kept - len(layers))
    return chunks


@dataclass(frozen=True)
class _ChunkBuilder:
    """Builds the model chunks of one rank.

    Attributes:
        settings: megatron-core's view of `config`.
        parts, padded_vocab_size, unpadded_vocab_size: see `build_model`.
        table: RoPE's angles, for all chunks; None: there is no such table.
    """

    config: Config
    settings: TransformerConfig
    parts: Parts
    topology: Topology
    device: torch.device
    padded_vocab_size: int
    unpadded_vocab_size: int | None
    table: RotaryTable | None

    @property
    def is_te(self) -> bool:
        """Whether the layers are Transformer Engine's."""
        return self.config.precision.precision == "te"

    def build(self, index: int, recipe: Recipe, *, num_kept_transposes: int) -> ModelChunk:
        """The rank's chunk number `index`.

        Args:
            num_kept_transposes: layers whose transposed weights are kept within a step.
        """
        vp_stage = None if self.topology.virtual_pipeline_size is None else index
        layers = self.topology.layout.chunks[self.topology.pp.rank()][index]
        self._check_place(layers, vp_stage)
        module = self._module(self._layers(layers, recipe, num_kept_transposes), vp_stage)
        self._finish(module, recipe)
        return ModelChunk(module, recipe)

    def _check_place(self, layers: Sequence[int], vp_stage: int | None) -> None:
        """megatron-core gives the chunk the same layers."""
        place = (self.settings, vp_stage, self.topology.pp.rank())
        assert get_num_layers_to_build(*place) == len(layers), (layers, self.settings.pipeline_model_parallel_layout)
        assert not layers or get_transformer_layer_offset(*place) == layers[0], (layers, place)

    def _layers(self, layers: Sequence[int], recipe: Recipe, num_kept_transposes: int) -> TransformerBlockSubmodules:
        """What the chunk's layers are."""
        config, model = self.config, self.config.model
        if self.is_te:
            return te_block_submodules(len(layers), qk_layernorm=model.qk_layernorm)
        mlp = partial(mlp_spec, activation=model.activation, num_chunks=config.training.mlp_chunks_for_training)
        recipes = [recipe if config.is_fp8_layer(layer) else None for layer in layers]
        links = model_links([own is not None for own in recipes], num_kept_transposes=num_kept_transposes)
        return block_submodules(
            recipes,
            links,
            _attention(config),
            [self.parts.mlps.get(layer, mlp) for layer in layers],
            defers_final_norm=config.has_fp8_lm_head,
        )

    def _module(self, submodules: TransformerBlockSubmodules, vp_stage: int | None) -> MegatronGPT:
        model, topology, virtual = self.config.model, self.topology, self.topology.virtual_pipeline_size
        model_class = MegatronGPT if self.is_te else GPT
        return model_class(
            self.settings,
            submodules,
            vocab_size=self.padded_vocab_size,
            pre_process=is_vp_first_stage(vp_stage, virtual) and topology.is_first_stage,
            post_process=is_vp_last_stage(vp_stage, virtual) and topology.is_last_stage,
            **gpt_arguments(model, is_te=self.is_te),
            rope_scaling=model.use_rope_scaling,
            rope_scaling_factor=model.rope_scaling_factor,
            seq_len_interpolation_factor=model.rotary_seq_len_interpolation_factor,
            pg_collection=topology.groups,
            vp_stage=vp_stage,
        )

    def _finish(self, module: MegatronGPT, recipe: Recipe) -> None:
        """Give a module this project's RoPE, head and delayed scales."""
        module.unpadded_vocab_size = self.unpadded_vocab_size
        if isinstance(module, GPT) and self.table is not None:
            module.use_rotary_table(self.table)
        if isinstance(module, GPT):
            module.loss_chunk_size = self.config.training.loss_chunk_size
        has_fp8_head = self.config.has_fp8_lm_head and module.post_process
        if has_fp8_head:
            module.use_fp8_head(recipe, self.config.model.output_mult)
        multiply_ends(module, self.config.model, has_fp8_head=has_fp8_head)
        _tag_vocab_parallel(module)
        if module.pre_process and module.embedding.add_position_embedding:
            # The only parameter that megatron-core leaves in FP32 on the CPU.
            module.embedding.position_embeddings.to(device=self.device, dtype=module.config.params_dtype)
        if recipe.history is not None:
            casts = named_quantizers_of_model(module)
            recipe.history.name_layers({layer: list(quantizers.slots()) for layer, quantizers in casts.items()})
            recipe.history.allocate(self.device)


def multiply_ends(module: GPTModel, model: ModelConfig, *, has_fp8_head: bool = False) -> None:
    """Multiply a model chunk's embedding and logits as muP asks for.

    The embedding is multiplied behind its dropout, which gives what a factor in front of it would. In the place of the
    logits it is the head's input, which has fewer elements.

    Args:
        has_fp8_head: the chunk has an `FP8OutputLayer`, which multiplies logits itself.
    """
    ends: list[tuple[torch.nn.Module, float]] = []
    if module.pre_process:
        ends.append((module.embedding, model.embedding_mult))
    if module.post_process and not has_fp8_head:
        ends.append((module.decoder.final_layernorm, model.output_mult))
    for end, factor in ends:
        if factor != 1.0:
            end.register_forward_hook(lambda _, args, output, factor=factor: output * factor)


def gpt_arguments(model: ModelConfig, *, is_te: bool = False) -> dict[str, Any]:
    """What megatron-core's GPT takes of a model beside its configuration.

    Args:
        is_te: the layers are Transformer Engine's.
    """
    return {
        "max_sequence_length": model.num_positions,
        "share_embeddings_and_output_weights": not model.untie_embeddings_and_output_weights,
        "position_embedding_type": model.position_embedding_type if is_te else replaced_position_embedding(model),
        "rotary_percent": model.rotary_percent,
        "rotary_base": model.rotary_base,
    }


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
    for mlp in module.modules():
        if isinstance(mlp, MLP) and module.config.gated_linear_unit:
            mlp.linear_fc1.weight.partition_stride = 2
            if mlp.linear_fc1.bias is not None:
                mlp.linear_fc1.bias.partition_stride = 2
    for attention in module.modules():
        if isinstance(attention, SelfAttention):
            attention.linear_qkv.weight.row_split = _query_key_value(attention)
    for param in module.parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(param)


def _query_key_value(attention: SelfAttention) -> RowSplit:
    """How the rows of a rank's QKV weight lie: group by group its queries, a key and a value."""
    groups, width = attention.num_query_groups_per_partition, attention.hidden_size_per_attention_head
    return RowSplit(groups, (attention.num_attention_heads_per_partition // groups * width, width, width))


def offload_layers(block: TransformerBlock, num_layers: int, offload: ActivationOffload) -> None:
    """Keep the activations of the block's first `num_layers` layers on the host between forward and backward.

    With full recomputation these are the layers' inputs. A forward without gradients keeps nothing and moves nothing.
    """
    forward = ExitStack()
    layers_run = [False]  # backward runs layers again under recomputation, and keeps nothing of them

    def enter(block: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        shared = [value for name, value in kwargs.items() if name != "hidden_states" and isinstance(value, Tensor)]
        forward.enter_context(offload.running([*block.parameters(), *shared]))
        layers_run[0] = True

    def leave(*_: Any) -> None:
        layers_run[0] = False
        forward.close()

    def enter_layer(index: int) -> None:
        if layers_run[0]:
            offload.enter_layer(leaves=index < num_layers)

    block.register_forward_pre_hook(enter, with_kwargs=True)
    block.register_forward_hook(leave, always_call=True)
    for index, layer in enumerate(block.layers):
        layer.register_forward_pre_hook(lambda *_, index=index: enter_layer(index))
