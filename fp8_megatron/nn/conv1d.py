"""`FP8Conv1D`: transformers' ``Conv1D`` (GPT-2's linear layer) in FP8."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .module import FP8Linear


class FP8Conv1D(FP8Linear):
    """An `FP8Linear` whose weight is [in_features, out_features] in a state dict, as GPT-2's checkpoints have it.

    The parameter itself is [out_features, in_features], as the GEMM takes it.
    """

    def _offer_products(self) -> None:
        """Offer none: code that reads the weight expects GPT-2's, which is transposed."""

    def plain_weight(self, name: str = "weight", *, here: bool = False) -> Tensor:
        """The weight [in_features, out_features] (`ScaledModule.plain_weight`)."""
        return super().plain_weight(name, here=here).t().contiguous()

    def plain_class(self) -> type[torch.nn.Module]:
        """See `FP8Linear.plain_class`."""
        kind: type[torch.nn.Module] = import_module("transformers.pytorch_utils").Conv1D
        return kind

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *others: Any
    ) -> None:
        key = prefix + "weight"
        if key in state_dict:
            state_dict = {**state_dict, key: state_dict[key].t()}
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)
