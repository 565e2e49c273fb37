"""The table of RoPE's angles in the place of megatron-core's rotary embedding."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ..data.sequence_parts import SequencePart
from ..nn.rope import cos_sin_table


class RotaryTable(torch.nn.Module):
    """Cosine and sine of every pair at every sequence index. All layers of a model read one table.

    megatron-core's GPTModel calls it once a forward and passes the result to its layers as ``rotary_pos_emb``. The
    table keeps its address, so that recorded steps may read it.

    Args:
        frequencies: float64 [R / 2], in radians a position.
        num_positions: of a sequence. A longer one makes a longer table.
        part: the tokens of each sequence that this rank has. The table has their rows alone, in their order.
    """

    def __init__(
        self, frequencies: Tensor, num_positions: int, device: torch.device, part: SequencePart | None = None
    ) -> None:
        super().__init__()
        self._frequencies = frequencies
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
        return self._part.of(cos_sin_table(self._frequencies, num_positions), dim=0)

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
