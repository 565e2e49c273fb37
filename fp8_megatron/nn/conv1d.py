"""`FP8Conv1D`: transformers' ``Conv1D`` (GPT-2's linear layer) in FP8."""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor

from .module import FP8Linear
from .scaled_module import Layout


class FP8Conv1D(FP8Linear):
    """An `FP8Linear` whose weight is [in_features, out_features] in a state dict, as GPT-2's checkpoints have it.

    The parameter itself is [out_features, in_features], as the GEMM takes it.
    """

    def _offer_products(self) -> None:
        """Offer none: code that reads the weight expects GPT-2's, which is transposed."""

    def layout(self, name: str) -> Layout:
        """See `ScaledModule.layout`."""
        return Layout(Tensor.t, Tensor.t)

    def plain_class(self) -> type[torch.nn.Module]:
        """See `FP8Linear.plain_class`."""
        kind: type[torch.nn.Module] = import_module("transformers.pytorch_utils").Conv1D
        return kind
