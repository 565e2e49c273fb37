"""`recompute_activations` of a model's layers, and a word where it does nothing."""

from __future__ import annotations

import logging
from functools import partial

import torch

from ..nn.module import FP8Linear
from ..nn.recomputed import Recomputations
from .torch_optimizers import look_before_steps

logger = logging.getLogger(__name__)


def recompute_inputs(model: torch.nn.Module) -> None:
    """Let the FP8 layers of `model` compute their inputs again in backward, where they can."""
    recomputations = Recomputations()
    layers = [module for module in model.modules() if isinstance(module, FP8Linear)]
    for layer in layers:
        layer.recomputations = recomputations
    if not layers:
        logger.warning("recompute_activations does nothing: the model has no FP8Linear; leave it out")


def warn_of_vain_search(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Warn at the first step with a gradient if the layers that should compute inputs again have found none."""
    layers = [module for module in model.modules() if isinstance(module, FP8Linear)]
    for recomputations in {layer.recomputations for layer in layers}:
        if recomputations is not None:
            look_before_steps(optimizer, partial(_look, recomputations))


def _look(recomputations: Recomputations, optimizer: torch.optim.Optimizer) -> bool:
    """Warn if a step has a gradient and nothing was found; whether the step has one."""
    if all(param.grad is None for group in optimizer.param_groups for param in group["params"]):
        return False
    if not recomputations.were_found:
        logger.warning(
            "recompute_activations does nothing: before the first step no trained FP8 layer took the output of "
            "GELU, SiLU or a product of two tensors of one shape, outside of hooks of saved tensors "
            "(torch.utils.checkpoint); leave it out"
        )
    return True
