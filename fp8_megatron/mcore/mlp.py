"""megatron-core's MLP with the norm in front of it inside, as one FP8 function (`nn.mlp`)."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.mlp import MLP
from torch import Tensor

from ..nn.mlp import fp8_norm_mlp
from .norm import Norm
from .tensor_parallel import FP8ColumnParallelLinear, FP8RowParallelLinear


class FP8MLP(MLP):
    """megatron-core's MLP with `fp8_norm_mlp` inside; `linear_fc1` and `linear_fc2` hold the weights.

    Call `fuse_norm` before the first forward.

    Args:
        activation: its name in `kernels.activation`. The rest is megatron-core's.
    """

    linear_fc1: FP8ColumnParallelLinear
    linear_fc2: FP8RowParallelLinear

    def __init__(self, *args: Any, activation: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.activation = activation
        self.recomputes = self.config.recompute_granularity == "selective" and "mlp" in (
            self.config.recompute_modules or ()
        )

    def fuse_norm(self, norm: Norm) -> None:
        """Compute the norm in front of this MLP here. It is not registered here: its parameters stay where they are."""
        #: Modules whose parameters the forward reads without calling them.
        self.reads_weights_of = (norm, self.linear_fc1, self.linear_fc2)

    def forward(self, hidden_states: Tensor, **unused: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """hidden_states [s, b, h] (before the norm) → output [s, b, h], the bias still to add, the residual branch.

        If `linear_fc2.adds_residual`, the output includes both, and they are None.
        """
        norm, fc1, fc2 = self.reads_weights_of
        output, residual = fp8_norm_mlp(
            hidden_states,
            norm.norm_params(),
            fc1.linear_params(),
            fc2.linear_params(),
            self.activation,
            adds_input=fc2.adds_residual,
            recomputes=self.recomputes,
        )
        if fc2.output_is_whole:
            return output, None, residual
        return reduce_from_tensor_model_parallel_region(output, group=self.tp_group), fc2.bias, residual
