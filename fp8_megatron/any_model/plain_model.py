"""`plain_model`: a copy of a model without FP8, for an average of its weights (EMA) or for export."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch

from ..nn.scaled_module import ScaledModule
from .replica_hooks import MeetsForState

Model = TypeVar("Model", bound=torch.nn.Module)


@torch.no_grad()
def plain_model(model: Model) -> Model:
    """A copy of `model` whose FP8 layers are plain again, with the master weights' values.

    So is a `torch.nn.MultiheadAttention`. Layers that were Transformer Engine's keep their class, with plain weights.
    Weights have the dtype that they had before FP8.

    `copy.deepcopy` differs in two points: it leaves frozen FP8 layers in FP8, and over several ranks each rank may call
    it alone. At O3 it then has the FP8 weights' values. Over several ranks every rank calls `plain_model`.
    """
    for hook in model._state_dict_pre_hooks.values():
        if isinstance(hook, MeetsForState):
            hook.meet("plain_model(model)")
    memo: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, ScaledModule):
            module.copy_as_plain(memo, here=False)
    copied = copy.deepcopy(model, memo)
    # The FP8 optimizer of several ranks tells torch's DDP what it reduces itself; nobody does so for the copy.
    copied.__dict__.pop("_ddp_params_and_buffers_to_ignore", None)
    return copied
