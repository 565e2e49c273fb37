"""FP8 layers with the interface of Transformer Engine's ``te.Linear``, ``te.LayerNormLinear`` and ``te.LayerNormMLP``.

They take the same arguments of ``forward``, return the same tuples and have the same state dict. Weights are FP8 at
rest, so ``is_first_microbatch`` has nothing to cache. `te_modules` makes them of Transformer Engine's modules.

A norm and the activation run inside FP8 kernels if nothing else needs their output and all weights are trained. They
run in torch otherwise, also under `torch.compile`. Both round to FP8 in front of the same GEMMs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..activation_functions import KINDS, Activation
from ..nn.gemms import LinearParams
from ..nn.mlp import fp8_norm_mlp
from ..nn.module import FP8Linear, compute_dtype
from ..nn.normed import NormParams
from ..nn.normed_linear import fp8_norm_linear
from ..quantization.scaled_tensor import ScaledTensor
from ..quantization.unfused import activated, function_of
from .module_swap import ChildNames

_EXTRA_STATE = "_extra_state"


def _gated(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def gated(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return activation(gate) * up

    return gated


def _clamped_swiglu(x: Tensor, **parameters: float) -> Tensor:
    return activated(x, Activation("clamped_swiglu").with_parameters(parameters))


_GELU, _QUICK_GELU = function_of(Activation("gelu")), function_of(Activation("quick_geglu"))
_SQUARED_RELU = function_of(Activation("squared_relu"))
#: The activations of ``te.LayerNormMLP`` by Transformer Engine's names, in torch: [..., F], or [..., 2F] of a gated one
#: (the activation of the first half multiplies the second), → [..., F].
ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "gelu": _GELU,
    "qgelu": _QUICK_GELU,
    "relu": F.relu,
    "srelu": _SQUARED_RELU,
    "silu": F.silu,
    "geglu": _gated(_GELU),
    "qgeglu": _gated(_QUICK_GELU),
    "reglu": _gated(F.relu),
    "sreglu": _gated(_SQUARED_RELU),
    "swiglu": _gated(F.silu),
    "clamped_swiglu": _clamped_swiglu,
}
#: By Transformer Engine's name: those that run inside FP8 kernels.
FUSED = {row.te_name: Activation(kind) for kind, row in KINDS.items() if row.te_name is not None}


class NormSettings(NamedTuple):
    """What a norm is beside its parameters: epsilon, whether it is RMSNorm, whether its weight is stored less 1."""

    eps: float
    rms: bool
    zero_centered: bool

    def params(self, weight: Tensor, bias: Tensor | None) -> NormParams:
        """The norm with its stored parameters."""
        return NormParams(weight.float() + 1.0 if self.zero_centered else weight, bias, self.eps, self.rms)

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The norm of x [..., K] in torch: FP32 inside, rounded to x's dtype."""
        norm = self.params(weight, bias)
        wide, shape = x.float(), (x.shape[-1],)
        if self.rms:
            normed = F.rms_norm(wide, shape, norm.weight.float(), self.eps)
        else:
            normed = F.layer_norm(
                wide, shape, norm.weight.float(), None if norm.bias is None else norm.bias.float(), self.eps
            )
        return normed.to(x.dtype)


class FP8TELinear(FP8Linear):
    """An `FP8Linear` that is called as ``te.Linear``.

    Attributes:
        returns_bias: return (x·Wᵀ, bias) in place of the sum.
        parts: names and rows of the parameters that the weight is split into in a state dict; empty: it is not.
    """

    returns_bias: bool = False
    parts: tuple[tuple[str, int], ...] = ()

    @property
    def added_bias(self) -> Tensor | None:
        """See `FP8Linear.added_bias`."""
        return None if self.returns_bias else self.bias

    def plain_class(self) -> type[torch.nn.Module]:
        """Its own: Transformer Engine's layers have FP32 weights on CUDA alone."""
        return type(self)

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Any:
        """[..., in_features] → [..., out_features], with the bias behind it if `returns_bias`.

        Raises:
            ValueError: `fp8_output` or `fp8_grad`, which ask for a tensor of Transformer Engine's own.
        """
        del is_first_microbatch
        if fp8_output or fp8_grad:
            asked = "fp8_output" if fp8_output else "fp8_grad"
            raise ValueError(
                f"{self.name}: {asked}=True asks for Transformer Engine's own FP8 tensors, and FP8 layers write 16 "
                f"bits: use a recipe without fp8_dpa and fp8_mha"
            )
        return self._with_bias(super().forward(inp))

    def _with_bias(self, y: Tensor, *others: Tensor) -> Any:
        outputs = (y, *self._returned_bias(y.dtype), *others)
        return outputs if len(outputs) > 1 else y

    def _returned_bias(self, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        if not self.returns_bias:
            return ()
        return (None if self.bias is None else self.bias.to(dtype),)

    def get_extra_state(self) -> Tensor:
        """Nothing, in the form in which Transformer Engine's modules say so."""
        return torch.empty(0)

    def set_extra_state(self, state: Any) -> None:
        """Leave out the scales of Transformer Engine's modules."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not self.parts or keep_vars or hasattr(self.weight, "_local_tensor"):  # a DTensor is not cut
            return
        for kind in ("weight", "bias"):
            whole = destination.pop(prefix + kind, None)
            if whole is not None:
                rows = whole.split([size for _, size in self.parts])
                destination.update(
                    {f"{prefix}{name}_{kind}": row for (name, _), row in zip(self.parts, rows, strict=True)}
                )

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *others: Any
    ) -> None:
        state_dict = dict(state_dict)
        for kind in ("weight", "bias"):
            keys = [f"{prefix}{name}_{kind}" for name, _ in self.parts]
            if keys and all(key in state_dict for key in keys):
                state_dict[prefix + kind] = torch.cat([state_dict.pop(key) for key in keys])
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)


class FP8LayerNormLinear(FP8TELinear):
    """A norm in front of an `FP8Linear`, called as ``te.LayerNormLinear``.

    Attributes:
        norm: the norm's settings.
        returns_norm: return the norm's output, too.
    """

    layer_norm_weight: Tensor
    layer_norm_bias: Tensor | None
    norm: NormSettings
    returns_norm: bool = False

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Any:
        """See `FP8TELinear.forward`. With `returns_norm` the norm's output is the last of the outputs."""
        if not self.returns_norm:
            return super().forward(inp, is_first_microbatch, fp8_output, fp8_grad)
        dtype = compute_dtype(inp)
        normed = self._normed(inp.to(dtype))
        if isinstance(self._parameters.get("weight"), ScaledTensor):
            y = super()._multiply(normed, torch.bfloat16 if dtype is torch.float32 else dtype).to(dtype)
        else:
            y = super()._multiply_plain(normed, dtype)
        return self._with_bias(y, normed)

    def _multiply(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        x = x.to(dtype)
        is_compiling = torch.compiler.is_compiling()
        if is_compiling or self.scales_grad_rows or not self.weight.requires_grad or not x.numel():
            return super()._multiply(self._normed(x), dtype)
        norm = self.norm.params(self.layer_norm_weight, self.layer_norm_bias)
        linear = LinearParams(self.weight, self.added_bias, self.quantizers_now)
        return on_rows(lambda rows: fp8_norm_linear(rows, norm, linear), x, self._row_multiple)

    def _multiply_plain(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return super()._multiply_plain(self._normed(x.to(dtype)), dtype)

    def _normed(self, x: Tensor) -> Tensor:
        return self.norm.apply(x, self.layer_norm_weight, self.layer_norm_bias)


class FP8LayerNormMLP(ChildNames):
    """Norm, fc1, activation and fc2, called as ``te.LayerNormMLP``. A state dict has its names: ``fc1_weight``, ….

    Attributes:
        fc1, fc2: the linear layers. What is returned beside the output follows fc2's `returns_bias`.
        norm: the norm's settings.
        activation: Transformer Engine's name.
        activation_params: arguments of ``clamped_swiglu``.
        returns_norm: return the norm's output, too.
        recomputes: compute fc1's output again in backward instead of keeping it.
    """

    original_names: ClassVar = {f"{fc}_{kind}": f"{fc}.{kind}" for fc in ("fc1", "fc2") for kind in ("weight", "bias")}
    layer_norm_weight: Tensor
    layer_norm_bias: Tensor | None
    fc1: FP8TELinear
    fc2: FP8TELinear
    norm: NormSettings
    activation: str
    activation_params: dict[str, float]
    returns_norm: bool = False
    recomputes: bool = False

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """[..., hidden] → [..., hidden], with fc2's bias and the norm's output behind it if they are asked for."""
        del is_first_microbatch
        dtype = compute_dtype(inp)
        if self._is_fused(inp):
            narrow = torch.bfloat16 if dtype is torch.float32 else dtype
            return self.fc2._with_bias(self._fused(inp.to(narrow)).to(dtype))
        x = inp.to(dtype)
        normed = self.norm.apply(x, self.layer_norm_weight, self.layer_norm_bias)
        if self.recomputes and torch.is_grad_enabled():
            y = checkpoint(self._unfused, normed, use_reentrant=False)
        else:
            y = self._unfused(normed)
        return self.fc2._with_bias(y, *([normed] if self.returns_norm else []))

    def _is_fused(self, x: Tensor) -> bool:
        if self.returns_norm or self.activation not in FUSED or not x.numel() or torch.compiler.is_compiling():
            return False
        weights = (self.fc1.weight, self.fc2.weight)
        return all(isinstance(weight, ScaledTensor) and weight.requires_grad for weight in weights)

    def _fused(self, x: Tensor) -> Tensor:
        fc1, fc2 = (LinearParams(fc.weight, fc.added_bias, fc.quantizers_now) for fc in (self.fc1, self.fc2))
        norm = self.norm.params(self.layer_norm_weight, self.layer_norm_bias)
        activation = FUSED[self.activation].with_parameters(self.activation_params)

        def mlp(rows: Tensor) -> Tensor:
            return fp8_norm_mlp(rows, norm, fc1, fc2, activation, recomputes=self.recomputes)[0]

        return on_rows(mlp, x, self.fc1._row_multiple)

    def _unfused(self, normed: Tensor) -> Tensor:
        z = FP8Linear.forward(self.fc1, normed)
        hidden = ACTIVATIONS[self.activation](z.float(), **self.activation_params).to(z.dtype)
        return FP8Linear.forward(self.fc2, hidden)

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> Any:
        """torch's, with Transformer Engine's names."""
        destination = super().state_dict(*args, prefix=prefix, **kwargs)
        for fc in ("fc1", "fc2"):
            destination.pop(f"{prefix}{fc}.{_EXTRA_STATE}", None)
        return destination

    def get_extra_state(self) -> Tensor:
        """See `FP8TELinear.get_extra_state`."""
        return torch.empty(0)

    def set_extra_state(self, state: Any) -> None:
        """See `FP8TELinear.set_extra_state`."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        for fc in ("fc1", "fc2"):
            state_dict.setdefault(f"{prefix}{fc}.{_EXTRA_STATE}", None)
        super()._load_from_state_dict(state_dict, prefix, *others)


def on_rows(function: Callable[[Tensor], Tensor], x: Tensor, multiple: int) -> Tensor:
    """`function` of x [..., K] → [..., N], called with rows [T, K] whose number is a multiple of `multiple`.

    The last row is repeated up to it, which changes no amax.
    """
    rows = x.reshape(-1, x.shape[-1])
    num_rows, padding = rows.shape[0], -rows.shape[0] % multiple
    if padding:
        rows = torch.cat([rows, rows[-1:].expand(padding, -1)])
    y = function(rows)
    return y[:num_rows].view(*x.shape[:-1], y.shape[-1])
