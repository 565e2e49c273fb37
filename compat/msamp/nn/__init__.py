"""FP8 layers and gradients of any model."""

from ..refusals import MODEL_STATE, WEIGHTS, refuse
from .clip_grad import clip_grad_norm_
from .distributed import FP8DistributedDataParallel
from .linear import FP8Linear, LinearReplacer

__all__ = ["FP8DistributedDataParallel", "FP8Linear", "LinearReplacer", "clip_grad_norm_"]

__getattr__ = refuse(__name__, {"ScalingModule": WEIGHTS, "ScalingParameter": WEIGHTS, "model_state": MODEL_STATE})
