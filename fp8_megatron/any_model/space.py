"""A space of the user's parameters: gradients, state, and the param group whose numbers a step reads."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..optimizer.space_optimizer import OptimizedSpace
from ..optimizer.state import SpaceState
from ..quantization.scaled_tensor import ScaledTensor
from .gradients import SpaceGrads


@dataclass
class ModelSpace(OptimizedSpace):
    """One space of a param group of the user.

    Attributes:
        seen: by slot, the memory and the version of a plain parameter when its value was last the master's.
        shapes: by slot, of the parameter when the space was built.
    """

    grads: SpaceGrads
    seen: list[tuple[int, int]] = field(default_factory=list)
    shapes: list[torch.Size] = field(init=False)

    def __post_init__(self) -> None:
        self.shapes = [slot.param.shape for slot in self.space.slots]


def publish(state: SpaceState) -> None:
    """Derive the weights from new masters, on all replicas."""
    state.derive_weights()
    if state.gather is not None:
        state.gather.wait()


def value_of(param: torch.nn.Parameter) -> Tensor:
    """The parameter's value as it is stored, in its shape: FP32 of a `ScaledTensor`, otherwise its own dtype."""
    return param.dequantize() if isinstance(param, ScaledTensor) else param.detach()
