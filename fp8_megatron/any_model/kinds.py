"""The kinds of modules that become FP8."""

from __future__ import annotations

import torch

from ..moe.any_model.experts import Experts
from ..nn.scaled_module import ScaledModule
from .attention import FP8MultiheadAttention, TorchAttention
from .module_swap import Kind
from .te_layers import FP8LayerNormMLP
from .te_modules import TransformerEngine
from .torch_linears import TorchLinear, TransformersConv1D, is_plain_again

#: The first that finds a module is its own.
KINDS: tuple[Kind, ...] = (Experts(), TransformerEngine(), TorchAttention(), TransformersConv1D(), TorchLinear())


def kind_of(module: torch.nn.Module) -> Kind | None:
    """The kind of a module that may become FP8. None: it is of none, or it is in FP8."""
    return None if is_fp8(module) else next((kind for kind in KINDS if kind.finds(module)), None)


def is_fp8(module: torch.nn.Module) -> bool:
    """Whether `module` is a layer with FP8 weights, or a module that holds such layers as its own parts."""
    if isinstance(module, (FP8LayerNormMLP, FP8MultiheadAttention)):
        return any(is_fp8(child) for child in module.children())
    return isinstance(module, ScaledModule) and not is_plain_again(module)
