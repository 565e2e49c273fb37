"""Tensors with a scale, for explicit casts. A model's weights are fp8_megatron's `ScaledTensor`, a torch.Tensor."""

from ...refusals import HOOKS, TENSOR_DIST, refuse
from .cast import TypeCast
from .meta import ScalingMeta
from .tensor import ScalingTensor, cast

__all__ = ["ScalingMeta", "ScalingTensor", "TypeCast", "cast"]

__getattr__ = refuse(__name__, {"HookManager": HOOKS, "TensorDist": TENSOR_DIST})
