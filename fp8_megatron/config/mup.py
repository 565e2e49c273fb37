"""The settings of muP, a part of the section ``model`` (`schema` says how fields become flags).

What follows from them for one model, `ModelConfig` says: its initial weights, learning rates, softmax and multipliers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from .fields import Positive, Size

_Power = Annotated[float, Ge(0), Le(4)]


@dataclass(frozen=True)
class MupConfig:
    """Maximal update parametrization (arXiv 2203.03466), as in Megatron-LM."""

    use_mup: bool = False
    """Maximal update parametrization (muP, arXiv 2203.03466): with m = hidden-size / mup-base-hidden-size, the best
    learning rate of the base model is about that of wider ones."""
    mup_base_hidden_size: Size | None = None
    """Width of the model whose initial weights and learning rates muP leaves as they are. Default: hidden-size."""
    mup_width_mult: Positive = 1.0
    """Megatron computes m, and so does this project. Another number is an error."""
    mup_embedding_mult: Positive = 1.0
    """Multiplies the sum of word and position embedding."""
    mup_output_mult: Positive = 1.0
    """Multiplies the logits. 1: 1 / m, as in Megatron."""
    mup_base_head_dim: Positive | None = None
    """Attention's scores are multiplied by √this / kv-channels ^ --mup-attn-scale-power. Default: 1."""
    mup_attn_scale_power: _Power = 1.0
    """See --mup-base-head-dim. 0.5 with the default above is attention as without muP."""
