"""megatron-core's column- and row-parallel linear layers with FP8 weights at rest and FP8 GEMMs.

They change the weight's storage, the GEMMs and what crosses the network in FP8; sharding, bias handling, state-dict
names and the all-reduce after a GEMM stay megatron-core's.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ..nn.linear import GradReceiver, TensorParallelism, fp8_linear
from ..quantization.recipe import WEIGHT_DTYPE, LinearQuantizers, Recipe
from ..quantization.scaled_tensor import ScaledTensor


def _quantize_weight(weight: torch.nn.Parameter, *, is_initialized: bool) -> torch.nn.Parameter:
    """An FP8 parameter with the attributes that megatron-core put on the BF16 one."""
    if is_initialized:
        scaled = ScaledTensor.quantize(weight)
    else:
        scaled = ScaledTensor(torch.zeros_like(weight, dtype=WEIGHT_DTYPE), torch.ones(1, device=weight.device))
    quantized = torch.nn.Parameter(scaled, requires_grad=weight.requires_grad)
    quantized.__dict__.update({name: value for name, value in vars(weight).items() if not name.startswith("_")})
    return quantized


class _FP8Weight(torch.nn.Module):
    """Puts an FP8 weight and the layer's quantisers on a linear layer of megatron-core that follows in the bases."""

    config: TransformerConfig
    tp_group: torch.distributed.ProcessGroup
    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None
    quantizers: LinearQuantizers

    def __init__(self, *args: Any, recipe: Recipe, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weight = _quantize_weight(self.weight, is_initialized=self.config.perform_initialization)
        self.quantizers = recipe.linear_quantizers()

    def __repr__(self) -> str:
        # megatron-core's own, which leaves no room for extra_repr, with the active casts.
        scaling = "delayed" if self.quantizers.input.history is not None else "current"
        casts = f"input={self.quantizers.input.dtype}, grad_output={self.quantizers.grad_output.dtype}"
        return f"{super().__repr__()[:-1]}, {casts}, scaling={scaling})"


class ResidualBranch:
    """A residual branch on its way from the function in front of a layer to what adds it: put in once, taken once.

    (An attribute of a module takes the host 2 µs each way.)
    """

    __slots__ = ("_value",)

    def __init__(self) -> None:
        self._value: Tensor | None = None

    def put(self, value: Tensor) -> None:
        """For the next `take`."""
        self._value = value

    def take(self) -> Tensor | None:
        """What was put in since the last one."""
        value, self._value = self._value, None
        return value


class FP8ColumnParallelLinear(_FP8Weight, ColumnParallelLinear):
    """Y = XAᵀ with A split over output rows. Under sequence parallelism X is gathered in FP8, with one scale.

    Args:
        recipe: scaling of activations and output gradients; the rest is megatron-core's.
    """

    def _forward_impl(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        **unused: Any,
    ) -> Tensor:
        parallelism = TensorParallelism(
            group=self.tp_group, gathers_input=sequence_parallel, reduces_grad_input=allreduce_dgrad
        )
        return fp8_linear(input, as_scaled(weight), bias, self.quantizers, parallelism)


class FP8RowParallelLinear(_FP8Weight, RowParallelLinear):
    """Y = XAᵀ with A split over input columns; the sum over ranks is taken in BF16. Under sequence parallelism its
    gradient is gathered in FP8, with one scale.

    What the caller would add to the output, bias and residual branch, the GEMM or the sum over ranks adds where each
    rank has its own rows of the output, or all of it (`output_is_whole`).

    Args:
        recipe: scaling of activations and output gradients; the rest is megatron-core's.
    """

    #: Set where backward of what made the input keeps it anyway (attention): see `fp8_linear`.
    keeps_input = False

    def __init__(self, *args: Any, recipe: Recipe, **kwargs: Any) -> None:
        super().__init__(*args, recipe=recipe, **kwargs)
        #: What the next forward adds to its output.
        self.addend = ResidualBranch()

    def bias_in_gemm(self) -> tuple[Tensor | None, Tensor | None]:
        """(bias that the GEMM adds, bias left to add after the sum over ranks)."""
        return (self.bias, None) if self.output_is_whole else (None, self.bias)

    @property
    def output_is_whole(self) -> bool:
        """Whether what this layer's function gives is no summand any more."""
        return self.tp_group.size() == 1 or self._scatters_output

    @property
    def adds_residual(self) -> bool:
        """Whether the residual branch is added on the way: nothing stands between it and the output."""
        drops_out = self.training and self.config.hidden_dropout > 0.0
        return self.output_is_whole and not drops_out

    def grad_receiver(self) -> GradReceiver | None:
        """This layer, for the norm that reads its output, where it has added all of the norm's input."""
        return GradReceiver(self.quantizers, not self._scatters_output) if self.adds_residual else None

    @property
    def _scatters_output(self) -> bool:
        return bool(self.sequence_parallel) and self.tp_group.size() > 1 and not self.explicit_expert_comm

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Input [..., K/tp] → output [..., N], and the bias left to add."""
        if not self.output_is_whole:
            assert self.addend.take() is None, "the sum over ranks comes first"
            return super().forward(input_)
        return self._forward_impl(input_, self.weight, self.bias), None

    def _forward_impl(self, input: Tensor, weight: Tensor, bias: Tensor | None, **unused: Any) -> Tensor:
        addend = self.addend.take()
        parallelism = TensorParallelism()
        if self._scatters_output:
            parallelism = TensorParallelism(group=self.tp_group, scatters_output=True)
        weight, keeps_input = as_scaled(weight), self.keeps_input
        return fp8_linear(input, weight, bias, self.quantizers, parallelism, keeps_input=keeps_input, addend=addend)


def column_parallelism(config: TransformerConfig, group: torch.distributed.ProcessGroup) -> TensorParallelism:
    """What a column-parallel layer does around its GEMMs in `group`."""
    is_shared = group.size() > 1
    return TensorParallelism(
        group=group,
        gathers_input=is_shared and config.sequence_parallel,
        reduces_grad_input=is_shared and not config.sequence_parallel,
    )


def as_scaled(weight: Tensor) -> ScaledTensor:
    """`weight`, which must still be the FP8 parameter that the layer was made with."""
    assert isinstance(weight, ScaledTensor), f"weight became a {type(weight).__name__}: something replaced its storage"
    return weight
