"""FP8 layers and gradients of any model."""

from torch.nn.parallel import DistributedDataParallel as FP8DistributedDataParallel

from fp8_megatron import FP8Linear

from ..refusals import refuse
from .clip_grad import clip_grad_norm_
from .linear import LinearReplacer

__all__ = ["FP8DistributedDataParallel", "FP8Linear", "LinearReplacer", "clip_grad_norm_"]

_WEIGHTS = "FP8 weights are torch.nn.Parameters of FP8Linear, which is a torch.nn.Linear"

__getattr__ = refuse(
    __name__,
    {
        "ScalingModule": _WEIGHTS,
        "ScalingParameter": _WEIGHTS,
        "model_state": "a model's scales belong to its layers; fp8_megatron.any_model.report says which are in FP8",
    },
)
