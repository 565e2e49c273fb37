"""`plain_model`: a copy of a model without FP8, for an average of its weights (EMA) or for export."""

from __future__ import annotations

import copy
import warnings
from importlib import import_module
from typing import TypeVar

import torch

from ..nn.conv1d import FP8Conv1D
from ..nn.module import FP8Linear
from .attention import FP8MultiheadAttention, become_plain_attention
from .te_layers import FP8TELinear

Model = TypeVar("Model", bound=torch.nn.Module)

#: Attributes of an `FP8Linear` that a plain layer does not have.
_FP8_ATTRIBUTES = "quantizers weight_dtype name token sharing recomputations home _row_multiple".split()


@torch.no_grad()
def plain_model(model: Model) -> Model:
    """A copy of `model` whose FP8 layers are plain again, with the master weights' values.

    So is a `torch.nn.MultiheadAttention`. Layers that were Transformer Engine's keep their class, with plain weights.
    Weights have the dtype that they had before FP8. An average of weights needs such a copy, because a small step of it
    is lost in FP8:

        >>> average = plain_model(model)
        >>> for ours, new in zip(average.state_dict().values(), model.state_dict().values()):  # after each step
        ...     ours.lerp_(new, 1 - decay)

    Over several ranks every rank calls it.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="a copy of an FP8 weight")
        copied = copy.deepcopy(model)
    # The FP8 optimizer of several ranks tells torch's DDP what it reduces itself; nobody does so for the copy.
    copied.__dict__.pop("_ddp_params_and_buffers_to_ignore", None)
    weights: dict[torch.Tensor, torch.nn.Parameter] = {}
    for ours, plain in zip(model.modules(), copied.modules(), strict=True):
        if isinstance(ours, FP8Linear):
            if ours.weight not in weights:
                weights[ours.weight] = torch.nn.Parameter(ours.plain_weight(), ours.weight.requires_grad)
            _become_plain(plain, weights[ours.weight])
    for module in list(copied.modules()):
        if isinstance(module, FP8MultiheadAttention):
            become_plain_attention(module)
    return copied


def _become_plain(layer: torch.nn.Module, weight: torch.nn.Parameter) -> None:
    if isinstance(layer, FP8TELinear):  # it computes with a plain weight as well
        layer._parameters["weight"] = weight
        return
    is_conv1d = isinstance(layer, FP8Conv1D)
    layer.__class__ = import_module("transformers.pytorch_utils").Conv1D if is_conv1d else torch.nn.Linear
    for name in _FP8_ATTRIBUTES:
        vars(layer).pop(name, None)
    layer._parameters["weight"] = weight
