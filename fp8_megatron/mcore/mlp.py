"""megatron-core's MLP with the norm in front of it inside, as one FP8 function (`nn.mlp`)."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.mlp import MLP
from torch import Tensor

from ..nn.linear import LinearParams
from ..nn.mlp import fp8_norm_mlp
from .norm import Norm
from .tensor_parallel import FP8ColumnParallelLinear, FP8RowParallelLinear, as_scaled, column_parallelism


class FP8MLP(MLP):
    """megatron-core's MLP with `fp8_norm_mlp` inside; `linear_fc1` and `linear_fc2` hold the weights.

    `fuse_norm` must be called before the first forward.
    """

    linear_fc1: FP8ColumnParallelLinear
    linear_fc2: FP8RowParallelLinear

    def fuse_norm(self, norm: Norm) -> None:
        """Take over the norm in front of this MLP (not registered here: its parameters stay where they are)."""
        #: Modules whose parameters the forward reads without calling them.
        self.reads_weights_of = (norm, self.linear_fc1, self.linear_fc2)

    def forward(self, hidden_states: Tensor, **unused: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """hidden_states [s, b, h] (before the norm) → output [s, b, h], the bias left to add, the residual branch.

        Where `linear_fc2.adds_residual` the output has them already (None, None).
        """
        norm, fc1, fc2 = self.reads_weights_of
        parallelism = column_parallelism(self.config, self.tp_group)
        added, left = fc2.bias_in_gemm()
        output, residual = fp8_norm_mlp(
            hidden_states,
            norm.norm_params(),
            LinearParams(as_scaled(fc1.weight), fc1.bias, fc1.quantizers),
            LinearParams(as_scaled(fc2.weight), added, fc2.quantizers),
            "swiglu" if self.config.gated_linear_unit else "gelu",
            parallelism,
            adds_input=fc2.adds_residual,
        )
        if parallelism.reduces_grad_input:
            output = reduce_from_tensor_model_parallel_region(output, group=self.tp_group)
        return output, left, residual
