"""Linear layers whose FP8 weights are to be sharded."""

from __future__ import annotations

import torch

from ..common.dtype import Dtypes
from ..nn.linear import LinearReplacer


class FsdpReplacer:
    """MS-AMP's `FsdpReplacer`: linear layers with FP8 weights, ready to be sharded."""

    @classmethod
    def replace(cls, model: torch.nn.Module) -> torch.nn.Module:
        """Turn the model's linear layers into `FP8Linear` with weights in E4M3, and return the model."""
        return LinearReplacer.replace(model, Dtypes.kfloat8_e4m3)
