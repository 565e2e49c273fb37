"""RoPE of a model: the table of its angles in the place of megatron-core's rotary embedding, and its scaling."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ..config.model import ModelConfig
from ..data.document_bounds import SequencePart
from ..nn.rope import Yarn, cos_sin_table, rope_frequencies


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
    yarn = yarn_of(model) if model.position_embedding_type == "yarn" else None
    frequencies = rope_frequencies(
        int(model.head_dim * model.rotary_percent),
        model.rotary_base,
        interpolation=model.rotary_seq_len_interpolation_factor,
        llama3_factor=model.rope_scaling_factor if model.use_rope_scaling else None,
        yarn=yarn,
    )
    magnitude = 1.0 if yarn is None else yarn.magnitude
    return RotaryTable(frequencies, model.seq_length, device, part, magnitude=magnitude)


def yarn_of(model: ModelConfig) -> Yarn:
    """YaRN as a model's settings describe it."""
    return Yarn(
        factor=model.rotary_scaling_factor,
        original_context=model.yarn_original_max_position_embeddings,
        beta_fast=model.yarn_beta_fast,
        beta_slow=model.yarn_beta_slow,
        rounds_range=model.yarn_correction_range_round_to_int,
        mscale=model.mscale,
        mscale_all_dim=model.mscale_all_dim,
    )


def replaced_position_embedding(model: ModelConfig) -> str:
    """megatron-core's kind of position embedding for a model whose rotary embedding a `RotaryTable` replaces.

    megatron-core passes the table on under ``rope``. Under ``yarn`` it would expect its own factor beside the angles.
    """
    return "rope" if model.uses_rope else model.position_embedding_type


def tell_yarn(settings: TransformerConfig, model: ModelConfig) -> None:
    """Set what megatron-core's own YaRN reads of its configuration and no field of it declares."""
    if model.position_embedding_type != "yarn":
        return
    yarn = yarn_of(model)
    for name, value in {
        "yarn_rotary_scaling_factor": yarn.factor,
        "yarn_original_max_position_embeddings": yarn.original_context,
        "yarn_beta_fast": yarn.beta_fast,
        "yarn_beta_slow": yarn.beta_slow,
        "yarn_mscale": yarn.mscale,
        "yarn_mscale_all_dim": yarn.mscale_all_dim,
        "yarn_correction_range_round_to_int": yarn.rounds_range,
    }.items():
        setattr(settings, name, value)
