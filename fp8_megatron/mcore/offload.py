"""megatron-core's transformer block with its layers' activations on the host (`nn.offload`)."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor

from ..nn.offload import ActivationOffload


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
