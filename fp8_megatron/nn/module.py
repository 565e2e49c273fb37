"""`FP8Linear`: the FP8 linear layer as a `torch.nn.Linear`, for any PyTorch model on one tensor-parallel rank."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..dtypes import StorageDtype
from ..errors import UserError
from ..quantization.recipe import LinearQuantizers, Recipe
from ..quantization.scaled_tensor import ScaledTensor
from ..quantization.weight_shards import stored_part
from ..quantization.weight_views import Home
from .compiled import compiled_linear, new_token
from .gemms import LinearParams
from .linear import fp8_linear
from .operands import as_rows
from .recomputed import Recomputations
from .scaled_module import ScaledModule, stored
from .shared_cast import InputSharing

#: What to do instead of torch's tensor parallelism.
NO_TENSOR_PARALLELISM = (
    "FP8 layers take no tensor parallelism of torch: leave parallelize_module (distribute_tensor) out, and share the "
    "model over ranks with initialize alone, or with fully_shard (docs/fsdp2.md)"
)
#: Tensorwise current scaling.
DEFAULT_RECIPE = Recipe("tensorwise", power_of_two=False)


class FP8Linear(ScaledModule, torch.nn.Linear):
    """y = x·Wᵀ + b with all three GEMMs in FP8 and W at rest in FP8, or in FP16 with block scales.

    The weight has no other copy. Its gradient goes to ``weight.main_grad`` if that exists (`sharding` sets it and
    `optimizer` reads it), otherwise to ``weight.grad`` in the output's dtype. torch's own optimizers cannot update an
    FP8 weight: `ScaledTensor` raises an error if they compute with it.

    Example:
        >>> recipe = Recipe("tensorwise", power_of_two=False)
        >>> model = torch.nn.Sequential(FP8Linear(512, 2048, recipe=recipe), torch.nn.GELU(), FP8Linear(2048, 512))
        >>> y = model(torch.randn(32, 512, dtype=torch.bfloat16))

    Args:
        in_features, out_features: multiples of the recipe's `size_multiple`.
        bias: whether the layer has a bias.
        recipe: formats and scaling of the operands; the default is tensorwise current scaling. For delayed scaling
            give all layers one recipe with a history. Build the layers, then call
            ``recipe.history.allocate(device)`` once and ``recipe.history.update(group)`` after each step.
        device: where the parameters are.
        dtype: of the bias; the weight advertises it.
        weight: how the weight is stored, fp8 or fp16.

    Attributes:
        recomputations: finds inputs made by GELU, SiLU or a product, which backward computes again (`recomputed`);
            None: inputs are kept.
        scales_grad_rows: whether each row of the output's gradient has a scale of its own (`row_scaled`). The head of
            a language model needs it. Not for recipes whose blocks have scales within a row.

    Raises:
        ValueError: an FP8 GEMM does not take this size.
    """

    fp8_attributes: ClassVar = ScaledModule.fp8_attributes | {
        "token",
        "sharing",
        "recomputations",
        "scales_grad_rows",
        "input_format",
        "_row_multiple",
    }
    weight: ScaledTensor
    quantizers: LinearQuantizers
    token: Tensor
    sharing: InputSharing
    input_format: str
    recomputations: Recomputations | None = None
    scales_grad_rows: bool = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        recipe: Recipe | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
        weight: StorageDtype = StorageDtype.FP8,
    ) -> None:
        torch.nn.Module.__init__(self)
        recipe = recipe or DEFAULT_RECIPE
        for size_name, size in (("in_features", in_features), ("out_features", out_features)):
            if size % recipe.size_multiple:
                raise ValueError(
                    f"FP8Linear: {size_name}({size}) is not a multiple of {recipe.size_multiple}; choose one"
                )
        bound = 1.0 / math.sqrt(in_features)  # the same distribution as torch.nn.Linear
        value = torch.empty(out_features, in_features, device=device).uniform_(-bound, bound)
        drawn = torch.empty(out_features, device=device).uniform_(-bound, bound).to(dtype) if bias else None
        value = value.to(dtype).requires_grad_()
        self.take(value, None if drawn is None else torch.nn.Parameter(drawn), recipe=recipe, weight=weight)

    def take(
        self,
        value: Tensor,
        bias: torch.nn.Parameter | None,
        *,
        recipe: Recipe,
        weight: StorageDtype,
        name: str = "",
        dtype: torch.dtype | None = None,
    ) -> None:
        """Become the layer with the weight `value` [out_features, in_features], rounded, and this very bias.

        The weight requires a gradient if `value` does. It shows `dtype`; None: that of `value`.
        """
        self.out_features, self.in_features = value.shape
        self.weight_dtype = dtype or value.dtype
        self.name = name or type(self).__name__
        self.hold(torch.nn.Parameter(stored(value, weight, self.weight_dtype), value.requires_grad))
        self.register_parameter("bias", bias)
        self.quantizers = recipe.linear_quantizers()
        self.input_format = str(self.quantizers.input.format)
        self._row_multiple = recipe.size_multiple
        self.token = new_token(self)
        self.sharing = InputSharing()

    def hold(self, weight: torch.nn.Parameter) -> None:
        """Make `weight`, a `ScaledTensor`, the layer's own; it may be another layer's too."""
        self.weight = weight  # type: ignore[assignment]
        if self.weight.home is None:
            self.weight.home = Home(self.name)
        self.home = self.weight.home
        self._offer_products()

    def _offer_products(self) -> None:
        """Let torch's products with the layer's weight be `multiply`."""
        if self.home is not None:
            self.home.add(self)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] → [..., out_features], of any leading shape.

        Under `torch.autocast` the output has autocast's dtype, otherwise x's. The GEMMs of an FP32 input write BF16.

        Raises:
            TypeError: x is not FP32, BF16 or FP16, or not dense.
            ValueError: the last size of x is not `in_features`.
        """
        self._check(x)
        dtype = compute_dtype(x)
        weight: Tensor | None = self._parameters.get("weight")  # `self.weight` costs the host ten times as much
        if not isinstance(weight, ScaledTensor):
            return self._multiply_plain(x, dtype)
        y = self._multiply(x, torch.bfloat16 if dtype is torch.float32 else dtype)
        return y.float() if dtype is torch.float32 else y

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x·Wᵀ + bias [out_features], whatever else `forward` does: what `torch.nn.functional.linear` computes with the
        layer's weight (`quantization.weight_products`).

        Raises:
            TypeError, ValueError: see `forward`; the bias has another shape.
        """
        self._check(x)
        if bias is not None and bias.shape != (self.out_features,):
            raise ValueError(f"{self.name}: the bias is {tuple(bias.shape)}, not {(self.out_features,)}")
        dtype = compute_dtype(x)
        return self._gemms(x, torch.bfloat16 if dtype is torch.float32 else dtype, bias).to(dtype)

    def _check(self, x: Tensor) -> None:
        if x.dtype not in _DTYPES:
            raise TypeError(f"{self.name}: an FP8 layer takes FP32, BF16 or FP16, not {x.dtype}; cast the input")
        if x.layout is not torch.strided:
            raise TypeError(
                f"{self.name}: an FP8 layer takes a dense tensor, not {x.layout}; give it x.to_dense(), or "
                f"x.to_padded_tensor(0.0) of a nested one"
            )
        if not x.ndim or x.shape[-1] != self.in_features:
            raise ValueError(f"{self.name}: the input's last size is not {self.in_features}: {tuple(x.shape)}")

    @property
    def quantizers_now(self) -> LinearQuantizers:
        """The quantisers of a forward now."""
        return self.quantizers if self.training or not self.evaluates else self.quantizers.evaluating()

    @property
    def added_bias(self) -> Tensor | None:
        """The bias [out_features] that the GEMM adds."""
        try:
            return self._parameters["bias"]  # `self.bias` costs the host ten times as much
        except KeyError:  # a hook computes it
            return self.bias

    def _multiply_plain(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The output in `dtype` with a plain weight, which `torch.func.functional_call` has put in the place of the
        layer's own, or that a plain copy has. Nothing is in FP8.

        Raises:
            UserError: inside of ``torch.export``, which shows an FP8 weight as if it were plain; or the weight is no
                parameter any more, because pruning, a parametrisation or torch's older FSDP computes it.
        """
        if self.home is not None:
            self._check_not_exported()
            if "weight" not in self._parameters:
                raise UserError(
                    f"{self.name}: its weight is no parameter since initialize, and would be multiplied in 16 bits: "
                    f"prune or parametrise (weight_norm) before initialize, and the layer stays as it is, or make "
                    f"pruning permanent (prune.remove); in place of torch's FullyShardedDataParallel use fully_shard "
                    f"(docs/fsdp2.md)"
                )
        return _linear_in_torch(x, self.weight, self.added_bias, dtype)

    def _multiply_exchanged(self, x: Tensor, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
        """The output in `dtype` with another FP8 weight than the layer's own, inside a graph, whose operators know the
        layer's own alone. The weight is decoded, and nothing else is in FP8.
        """
        weight = self.weight
        if torch.is_grad_enabled() and weight.requires_grad:
            raise UserError(
                f"{self.name}: torch.compile gives no gradient to an FP8 weight that functional_call put here: give "
                f"it weights without requires_grad, plain weights, or call it without torch.compile"
            )
        payload, scale = weight._payload, weight._scale
        value = (payload.to(torch.float32).reshape(scale.numel(), -1) * scale[:, None]).reshape(payload.shape)
        return _linear_in_torch(x, value, bias, dtype)

    def _multiply(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The output in `dtype`."""
        return self._gemms(x, dtype, self.added_bias)

    def _gemms(self, x: Tensor, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
        """x·Wᵀ + bias in `dtype`."""
        if self.scales_grad_rows and not self.quantizers.grad_output.format.takes_row_scales:
            raise UserError(
                f"{self.name}: scales_grad_rows(True) is not for {self.quantizers.grad_output.format}, which has "
                f"scales within each row: leave it False"
            )
        if not torch.compiler.is_compiling():
            if torch._C._are_functorch_transforms_active():
                raise UserError(
                    f"{self.name}: an FP8 layer takes no transform of torch.func (grad, jacrev, vmap, jvp): keep it "
                    f"out of FP8 with filter, or give functional_call plain weights"
                )
            weight: Any = self._parameters["weight"]
            linear = LinearParams(
                weight,
                bias,
                self.quantizers_now,
                sharing=self.sharing,
                recomputations=self.recomputations,
                scales_grad_rows=self.scales_grad_rows,
            )
            return fp8_linear(x, linear, dtype=dtype)
        self._check_not_exported()
        if self.recomputations is not None:
            raise UserError(
                f"{self.name}: recompute_activations does nothing under torch.compile, which decides itself what "
                f"backward computes again: leave it out"
            )
        if self.weight.home is not self.home:
            return self._multiply_exchanged(x, dtype, bias)
        y = compiled_linear(as_rows(x, self._row_multiple), self, bias, dtype)
        return y[: x.numel() // self.in_features].view(*x.shape[:-1], self.out_features)

    def _check_not_exported(self) -> None:
        if torch.compiler._is_exporting_flag:  # torch 2.11's is_exporting() is true under torch.compile too
            raise UserError(
                f"{self.name}: torch.export takes no FP8 layer: export fp8_megatron.any_model.plain_model(model)"
            )

    def all_quantizers(self) -> tuple[LinearQuantizers, ...]:
        """See `ScaledModule.all_quantizers`."""
        return (self.quantizers,)

    def plain_class(self) -> type[torch.nn.Module]:
        """The class that a copy has whose weight is plain. One of this class multiplies in 16 bits then."""
        return torch.nn.Linear

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.token, self.sharing = new_token(self), InputSharing()  # a copy is a layer of its own
        self._offer_products()

    @property
    def _distribute_module_applied(self) -> bool:
        """What torch's ``distribute_module``, and so ``parallelize_module``, asks before it cuts the weight.
        ``torch.jit.trace`` reads all properties.

        Raises:
            UserError: always, while the weight is in FP8.
        """
        weight = self._parameters.get("weight")
        if weight is None or stored_part(weight) is None:
            raise AttributeError("_distribute_module_applied")
        raise UserError(
            f"{self.name}: {NO_TENSOR_PARALLELISM}. torch.jit.trace takes none either: trace "
            f"fp8_megatron.any_model.plain_model(model)"
        )

    def extra_repr(self) -> str:
        """Sizes and casts."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        rows = ", a scale for each row of grad_output" if self.scales_grad_rows else ""
        return f"{sizes}, {self.quantizers}{rows}"


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a layer's output: autocast's if it is on, otherwise x's."""
    device_type = "cuda" if x.is_cuda else x.device.type  # torch makes a new string at each call
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else x.dtype


def _linear_in_torch(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return torch.nn.functional.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
