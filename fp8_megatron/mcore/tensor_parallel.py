"""megatron-core's column- and row-parallel linear layers with FP8 weights at rest and FP8 GEMMs.

They change the weight's storage, the GEMMs, and the collectives that run in FP8. Sharding, bias handling, state-dict
names and the all-reduce after a GEMM are megatron-core's.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ..device.group import Group
from ..dtypes import E4M3
from ..nn.gemms import LinearParams
from ..nn.linear import fp8_linear
from ..nn.links import LinearLinks
from ..nn.parallelism import LOCAL, Column, Local, SequenceColumn, SequenceRow
from ..quantization.recipe import LinearQuantizers, Recipe
from ..quantization.scaled_tensor import ScaledTensor
from ..storage import RecipeName


def _quantize_weight(weight: torch.nn.Parameter, *, is_initialized: bool) -> torch.nn.Parameter:
    """An FP8 parameter with the attributes that megatron-core put on the BF16 one."""
    if is_initialized:
        scaled = ScaledTensor.quantize(weight)
    else:
        scaled = ScaledTensor(torch.zeros_like(weight, dtype=E4M3), torch.ones(1, device=weight.device))
    quantized = torch.nn.Parameter(scaled, requires_grad=weight.requires_grad)
    quantized.__dict__.update({name: value for name, value in vars(weight).items() if not name.startswith("_")})
    return quantized


class FallsBack:
    """A linear layer that may leave delayed scaling for another recipe. One in 16 bits has no quantisers."""

    weight: torch.nn.Parameter
    quantizers: LinearQuantizers
    links: LinearLinks

    def fall_back(self, name: RecipeName) -> None:
        """Leave delayed scaling, between two steps."""
        self.quantizers = self.quantizers.fallen_back(name)
        if self.links.early_cast.quantizer is not None:
            self.links.early_cast.expect(self.quantizers.grad_output, transposed=self.links.early_cast.transposed)
        if self.links.kept_transpose is not None:
            self.links.kept_transpose.forget()


class _FP8Weight(FallsBack, torch.nn.Module):
    """Gives the linear layer of megatron-core that follows in the bases an FP8 weight and quantisers."""

    config: TransformerConfig
    tp_group: Group
    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None
    #: The collectives around its GEMMs.
    parallelism: Local

    def __init__(self, *args: Any, recipe: Recipe, links: LinearLinks | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weight = _quantize_weight(self.weight, is_initialized=self.config.perform_initialization)
        self.quantizers = recipe.linear_quantizers()
        self.links = LinearLinks() if links is None else links

    def linear_params(self) -> LinearParams:
        """The layer, for a function that computes it."""
        return self._params(self.weight, self.bias)

    def _params(self, weight: Tensor, bias: Tensor | None) -> LinearParams:
        return LinearParams(as_scaled(weight), bias, self.quantizers, self.parallelism, self.links)

    def __repr__(self) -> str:
        # megatron-core defines __repr__ itself and does not call extra_repr.
        return f"{super().__repr__()[:-1]}, {self.quantizers})"


class FP8ColumnParallelLinear(_FP8Weight, ColumnParallelLinear):
    """Y = XAᵀ with A split over output rows. Under sequence parallelism X is gathered in FP8.

    Args:
        recipe: formats and scaling of the operands.
        links: the layer's links. The rest is megatron-core's.
    """

    def __init__(self, *args: Any, recipe: Recipe, links: LinearLinks | None = None, **kwargs: Any) -> None:
        super().__init__(*args, recipe=recipe, links=links, **kwargs)
        self.parallelism = column_parallelism(self)

    def _forward_impl(self, input: Tensor, weight: Tensor, bias: Tensor | None, **unused: Any) -> Tensor:
        return fp8_linear(input, self._params(weight, bias))


class FP8RowParallelLinear(_FP8Weight, RowParallelLinear):
    """Y = XAᵀ with A split over input columns. The sum over ranks is taken in BF16. Under sequence parallelism the
    output's gradient is gathered in FP8.

    If each rank has its own rows of the output, or the whole output (`output_is_whole`), the GEMM or the sum over ranks
    adds the bias and the residual branch. Otherwise the caller adds them.

    Args:
        recipe: formats and scaling of the operands.
        links: the layer's links.
        keeps_input: the input is kept for backward anyway, by attention, which makes it; see `fp8_linear`. The rest is
            megatron-core's.
    """

    def __init__(
        self, *args: Any, recipe: Recipe, links: LinearLinks | None = None, keeps_input: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, recipe=recipe, links=links, **kwargs)
        self.keeps_input = keeps_input
        is_shared = self.tp_group.size() > 1
        scatters = bool(self.sequence_parallel) and is_shared
        self.parallelism = SequenceRow(self.tp_group) if scatters else LOCAL
        #: Whether the output of this layer's function is final, not a summand.
        self.output_is_whole = scatters or not is_shared
        if self.output_is_whole and self.config.hidden_dropout == 0.0:
            quantizer = self.quantizers.grad_output
            transposed = self.parallelism.casts_grad_columns(quantizer.format)
            self.links.early_cast.expect(quantizer, transposed=transposed)

    def linear_params(self) -> LinearParams:
        """The layer, for a function that computes it; with the bias only if the GEMM adds it."""
        return self._params(self.weight, self.bias if self.output_is_whole else None)

    @property
    def adds_residual(self) -> bool:
        """Whether this layer adds the residual branch, because nothing comes between the branch and the output."""
        drops_out = self.training and self.config.hidden_dropout > 0.0
        return self.output_is_whole and not drops_out

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Input [..., K/tp] → output [..., N], and the bias still to add."""
        if not self.output_is_whole:
            return super().forward(input_)
        return self._forward_impl(input_, self.weight, self.bias), None

    def _forward_impl(self, input: Tensor, weight: Tensor, bias: Tensor | None, **unused: Any) -> Tensor:
        branch = self.links.residual
        addend = branch.take() if branch is not None and self.adds_residual else None
        return fp8_linear(input, self._params(weight, bias), keeps_input=self.keeps_input, addend=addend)


def column_spec(recipe: Recipe | None, links: LinearLinks) -> ModuleSpec:
    """A column-parallel layer with FP8 weights, or with `recipe` None megatron-core's in 16 bits."""
    if recipe is None:
        return ModuleSpec(module=ColumnParallelLinear)
    return ModuleSpec(module=FP8ColumnParallelLinear, params={"recipe": recipe, "links": links})


def row_spec(recipe: Recipe | None, links: LinearLinks, *, keeps_input: bool = False) -> ModuleSpec:
    """As `column_spec`, of a row-parallel layer; `keeps_input` as `FP8RowParallelLinear` takes it."""
    if recipe is None:
        return ModuleSpec(module=RowParallelLinear)
    params = {"recipe": recipe, "links": links, "keeps_input": keeps_input}
    return ModuleSpec(module=FP8RowParallelLinear, params=params)


def column_parallelism(layer: ColumnParallelLinear) -> Local:
    """The collectives around the GEMMs of a column-parallel layer."""
    if layer.sequence_parallel:
        return SequenceColumn(layer.tp_group)
    return Column(layer.tp_group) if layer.allreduce_dgrad else LOCAL


def as_scaled(weight: Tensor) -> ScaledTensor:
    """`weight` as a `ScaledTensor`; it must be the FP8 parameter that the layer was built with."""
    assert isinstance(weight, ScaledTensor), f"weight became a {type(weight).__name__}: something replaced its storage"
    return weight
