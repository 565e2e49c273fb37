"""megatron-core's MLP: fused with the norm in front of it as one FP8 function (`nn.mlp`), or over chunks of tokens."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ..activation_functions import Activation
from ..nn.chunk_grads import in_chunks, rows_of_chunk
from ..nn.chunked_mlp import fp8_norm_mlp_in_chunks
from ..nn.links import LayerLinks
from ..nn.mlp import fp8_norm_mlp
from ..quantization.recipe import Recipe
from .norm import Norm
from .tensor_parallel import FP8ColumnParallelLinear, FP8RowParallelLinear, column_spec, row_spec


def mlp_spec(recipe: Recipe | None, links: LayerLinks, *, activation: Activation, num_chunks: int = 1) -> ModuleSpec:
    """The MLP of a layer, a `parts.MLPPart`.

    Args:
        num_chunks: of a sequence, that are computed one after another; 1 computes it whole.
    """
    submodules = MLPSubmodules(linear_fc1=column_spec(recipe, links.fc1), linear_fc2=row_spec(recipe, links.fc2))
    if recipe is not None:
        params = {"activation": activation, "num_chunks": num_chunks}
        return ModuleSpec(module=FP8MLP, params=params, submodules=submodules)
    if num_chunks == 1:
        return ModuleSpec(module=HalfMLP, submodules=submodules)
    return ModuleSpec(module=ChunkedMLP, params={"num_chunks": num_chunks}, submodules=submodules)


class _LayerMLP(MLP):
    """megatron-core's MLP, built as `parts.MLPPart` says."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        *,
        pg_collection: ProcessGroupCollection,
        layer_number: int,
    ) -> None:
        super().__init__(config, submodules, tp_group=pg_collection.tp)


class FP8MLP(_LayerMLP):
    """megatron-core's MLP with `fp8_norm_mlp` inside; `linear_fc1` and `linear_fc2` hold the weights.

    Call `fuse_norm` before the first forward.

    Args:
        activation: between both GEMMs.
        num_chunks: of a sequence, that are computed one after another; 1 computes it whole. The rest is
            megatron-core's.
    """

    linear_fc1: FP8ColumnParallelLinear
    linear_fc2: FP8RowParallelLinear

    def __init__(self, *args: Any, activation: Activation, num_chunks: int = 1, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.activation, self.num_chunks = activation, num_chunks
        early_cast = self.linear_fc2.links.early_cast
        if num_chunks > 1 and early_cast.quantizer is not None:  # each chunk transposes its rows
            early_cast.expect(early_cast.quantizer, transposed=False)
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
        operands = (hidden_states, norm.norm_params(), fc1.linear_params(), fc2.linear_params(), self.activation)
        if self.num_chunks > 1:
            multiple = fc1.quantizers.input.format.size_multiple
            rows = rows_of_chunk(hidden_states.shape[0], self.num_chunks, multiple)
            output, residual = fp8_norm_mlp_in_chunks(*operands, rows=rows, adds_input=fc2.adds_residual)
        else:
            output, residual = fp8_norm_mlp(*operands, adds_input=fc2.adds_residual, recomputes=self.recomputes)
        if fc2.output_is_whole:
            return output, None, residual
        return reduce_from_tensor_model_parallel_region(output, group=self.tp_group), fc2.bias, residual


class HalfMLP(_LayerMLP):
    """megatron-core's 16-bit MLP. It may be recomputed with a bias.

    An autograd function owns the tensors that it returns. If megatron-core's checkpoint returned the bias itself, the
    bias would no longer be a leaf, and backward would run the checkpoint again without end.
    """

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """megatron-core's, with a view of the bias."""
        output, bias = super().forward(*args, **kwargs)
        return output, None if bias is None else bias.view_as(bias)


class ChunkedMLP(_LayerMLP):
    """megatron-core's 16-bit MLP over chunks of tokens. Backward computes each chunk again.

    Args:
        num_chunks: of a sequence, that are computed one after another. The rest is megatron-core's.
    """

    def __init__(self, *args: Any, num_chunks: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_chunks = num_chunks
        self._is_in_chunk = False

    def forward(self, hidden_states: Tensor, **unused: Any) -> tuple[Tensor, Tensor | None]:
        """hidden_states [s, b, h] (behind the norm) → output [s, b, h], the bias still to add."""
        if self._is_in_chunk:
            return super().forward(hidden_states)
        rows = rows_of_chunk(hidden_states.shape[0], self.num_chunks)
        # fc2's bias is added by the caller.
        params = {name: param for name, param in self.named_parameters() if param is not self.linear_fc2.bias}

        def of_chunk(x: Tensor, *values: Tensor) -> Tensor:
            self._is_in_chunk = True
            try:
                output, _ = torch.func.functional_call(self, dict(zip(params, values, strict=True)), (x,))
            finally:
                self._is_in_chunk = False
            return output

        return in_chunks(of_chunk, hidden_states, tuple(params.values()), rows=rows), self.linear_fc2.bias
