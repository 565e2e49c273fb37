"""Transformer Engine's linear modules as FP8 layers, in place of a model's own."""

from __future__ import annotations

from typing import ClassVar

import torch

import fp8_megatron
from fp8_megatron.any_model.te_layers import FP8LayerNormLinear, FP8LayerNormMLP, FP8TELinear
from fp8_megatron.any_model.te_modules import te_kind

from ..common.dtype import Dtypes, QType
from ..common.dtype.dtypes import WEIGHT_STORAGE
from ..nn.linear import remember


def takes_te(name: str, module: torch.nn.Module) -> bool:
    """Whether a linear layer is Transformer Engine's."""
    return te_kind(module) is not None


class TeReplacer:
    """MS-AMP's `TeReplacer` over `fp8_megatron.replace_linears`."""

    #: The FP8 layers and the names of their weights.
    module_weight_names: ClassVar[dict[type[torch.nn.Module], list[str]]] = {
        FP8TELinear: ["weight"],
        FP8LayerNormLinear: ["weight"],
        FP8LayerNormMLP: ["fc1_weight", "fc2_weight"],
    }

    @classmethod
    def replace(cls, model: torch.nn.Module, qtype: QType = Dtypes.kfloat16) -> torch.nn.Module:
        """Turn ``te.Linear``, ``te.LayerNormLinear`` and ``te.LayerNormMLP`` into FP8 layers, in place, and return the
        model. Build an optimizer from ``model.parameters()`` afterwards.

        Args:
            qtype: how trained weights are stored: kfloat16 with block scales, or kfloat8_e4m3.

        Raises:
            ValueError: another `qtype`, a setting of a module that FP8 layers do not have, or no such module.
        """
        if qtype not in (Dtypes.kfloat16, Dtypes.kfloat8_e4m3):
            raise ValueError(f"qtype({qtype.name}) is not kfloat16 or kfloat8_e4m3: choose one of them")
        check_has_te(model)
        fp8_megatron.replace_linears(model, weight=WEIGHT_STORAGE[qtype], filter=takes_te)
        remember(model)
        return model


def check_has_te(model: torch.nn.Module) -> None:
    """Check that a model has linear modules of Transformer Engine.

    Raises:
        ValueError: it has none.
    """
    if not any(te_kind(module) is not None for module in model.modules()):
        raise ValueError(
            "the model has no te.Linear, te.LayerNormLinear or te.LayerNormMLP: leave out use_te, and use "
            "LinearReplacer for torch.nn.Linear"
        )
