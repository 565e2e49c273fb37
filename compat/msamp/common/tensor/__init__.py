"""Tensors with a scale, for explicit casts. A model's weights are fp8_megatron's `ScaledTensor`, a torch.Tensor."""

from ...refusals import refuse
from .cast import TypeCast
from .meta import ScalingMeta
from .tensor import ScalingTensor, cast

__all__ = ["ScalingMeta", "ScalingTensor", "TypeCast", "cast"]

__getattr__ = refuse(
    __name__,
    {
        "HookManager": "weights are torch.nn.Parameters; use torch.Tensor.register_post_accumulate_grad_hook",
        "TensorDist": "the optimizer reduces gradients in FP8 and sends weights; torch.distributed sends other tensors",
    },
)
