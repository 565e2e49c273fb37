"""`FP8Linear`: the FP8 linear layer as a plain module, for any PyTorch model on one tensor-parallel rank."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..formats import FP8_GEMM_MULTIPLE
from ..quantization.recipe import LinearQuantizers, Recipe
from ..quantization.scaled_tensor import ScaledTensor
from .gemms import LinearParams
from .linear import fp8_linear


class FP8Linear(torch.nn.Module):
    """y = x·Wᵀ + b with W at rest in FP8 and all three GEMMs in FP8.

    The weight has no 16-bit copy. Its gradient goes to ``weight.main_grad`` if that exists (`sharding` sets it and
    `optimizer` reads it), otherwise to ``weight.grad`` in the output's dtype. torch's own optimizers cannot update an
    FP8 weight: `ScaledTensor` raises an error if they compute with it.

    Example:
        >>> recipe = Recipe("tensorwise", power_of_two=False)
        >>> model = torch.nn.Sequential(FP8Linear(512, 2048, recipe=recipe), torch.nn.GELU(), FP8Linear(2048, 512))
        >>> y = model(torch.randn(32, 512, dtype=torch.bfloat16))

    Args:
        in_features, out_features: multiples of 16; multiples of 128 under the blockwise recipe.
        bias: whether the layer has a bias, in BF16.
        recipe: formats and scaling of the operands; the default is tensorwise current scaling. For delayed scaling
            give all layers one recipe with a history. Build the layers, then call
            ``recipe.history.allocate(device)`` once and ``recipe.history.update(group)`` after each step.
        device: where the parameters are.

    Raises:
        ValueError: an FP8 GEMM does not take this size.
    """

    weight: ScaledTensor
    bias: torch.nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        recipe: Recipe | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        multiple = FP8_GEMM_MULTIPLE if recipe is None else recipe.size_multiple
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            if size % multiple:
                raise ValueError(f"FP8Linear: {name}({size}) is not a multiple of {multiple}; choose one")
        self.in_features, self.out_features = in_features, out_features
        bound = 1.0 / math.sqrt(in_features)  # the same distribution as torch.nn.Linear
        value = torch.empty(out_features, in_features, device=device).uniform_(-bound, bound)
        self.weight = torch.nn.Parameter(ScaledTensor.quantize(value))  # type: ignore[assignment]
        if bias:
            drawn = torch.empty(out_features, device=device).uniform_(-bound, bound)
            self.bias = torch.nn.Parameter(drawn.bfloat16())
        else:
            self.register_parameter("bias", None)
        recipe = Recipe("tensorwise", power_of_two=False) if recipe is None else recipe
        self.quantizers: LinearQuantizers = recipe.linear_quantizers()

    @classmethod
    def from_linear(cls, linear: torch.nn.Linear, *, recipe: Recipe | None = None) -> FP8Linear:
        """A layer with the values of `linear`; the weight is rounded to FP8."""
        layer = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            recipe=recipe,
            device=linear.weight.device,
        )
        with torch.no_grad():
            layer.weight.copy_(linear.weight)
            if layer.bias is not None:
                layer.bias.copy_(linear.bias)
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """BF16 [..., in_features] → BF16 [..., out_features]. The leading sizes' product is a multiple of 16."""
        return fp8_linear(x, LinearParams(self.weight, self.bias, self.quantizers))

    def extra_repr(self) -> str:
        """Sizes and casts."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{sizes}, {self.quantizers}"
