"""megatron-core's column- and row-parallel linear layers with FP8 weights at rest and FP8 GEMMs.

They change `_forward_impl` and the weight's storage, nothing else: sharding, bias handling, state-dict names and the
collectives after the GEMM stay megatron-core's.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from ..quantization.recipe import WEIGHT_DTYPE, LinearQuantizers, Recipe
from ..quantization.scaled_tensor import ScaledTensor
from .linear import TensorParallelism, fp8_linear


def _quantize_weight(weight: torch.nn.Parameter, *, is_initialized: bool) -> torch.nn.Parameter:
    """An FP8 parameter with the attributes that megatron-core put on the BF16 one."""
    if is_initialized:
        scaled = ScaledTensor.quantize(weight)
    else:
        scaled = ScaledTensor(torch.zeros_like(weight, dtype=WEIGHT_DTYPE), torch.ones(1, device=weight.device))
    quantized = torch.nn.Parameter(scaled, requires_grad=weight.requires_grad)
    quantized.__dict__.update({name: value for name, value in vars(weight).items() if not name.startswith("_")})
    return quantized


class FP8ColumnParallelLinear(ColumnParallelLinear):
    """Y = XAᵀ with A split over output rows. Under sequence parallelism X is gathered in FP8, with one scale.

    Args:
        recipe: scaling of activations and output gradients; the rest is megatron-core's.
    """

    weight: torch.nn.Parameter
    quantizers: LinearQuantizers

    def __init__(self, *args: Any, recipe: Recipe, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weight = _quantize_weight(self.weight, is_initialized=self.config.perform_initialization)
        self.quantizers = recipe.linear_quantizers()

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
        return fp8_linear(input, _as_scaled(weight), bias, self.quantizers, parallelism)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, {_casts(self.quantizers)})"


class FP8RowParallelLinear(RowParallelLinear):
    """Y = XAᵀ with A split over input columns; the sum over ranks stays in BF16.

    Args:
        recipe: scaling of activations and output gradients; the rest is megatron-core's.
    """

    weight: torch.nn.Parameter
    quantizers: LinearQuantizers

    def __init__(self, *args: Any, recipe: Recipe, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weight = _quantize_weight(self.weight, is_initialized=self.config.perform_initialization)
        self.quantizers = recipe.linear_quantizers()

    def _forward_impl(self, input: Tensor, weight: Tensor, bias: Tensor | None, **unused: Any) -> Tensor:
        return fp8_linear(input, _as_scaled(weight), bias, self.quantizers, TensorParallelism())

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, {_casts(self.quantizers)})"


def _as_scaled(weight: Tensor) -> ScaledTensor:
    assert isinstance(weight, ScaledTensor), f"weight became a {type(weight).__name__}: something replaced its storage"
    return weight


def _casts(quantizers: LinearQuantizers) -> str:
    """The active casts, for a layer's repr (megatron-core's own leaves no room for `extra_repr`)."""
    scaling = "delayed" if quantizers.input.history is not None else "current"
    return f"input={quantizers.input.dtype}, grad_output={quantizers.grad_output.dtype}, scaling={scaling}"
