"""ScaledTensor: a weight that is stored only as a low-precision payload and FP32 scales.

It is a ``torch.Tensor`` wrapper subclass. It can be an ``nn.Parameter`` with ``requires_grad=True``, and it passes
through megatron-core's attribute tagging and ``state_dict``. It advertises BF16, so that ``.bfloat16()``,
``Float16Module`` and other casts leave the payload alone. There is no hidden high-precision copy. Arithmetic on it
raises an error: layers call `gemm_operand` for the FP8 operand of a GEMM, and other code calls `dequantize`, which
makes the cost of the copy visible.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..formats import E4M3, FP8_DTYPES
from ..kernels import ops
from .operand import Format, Quantized, quantize, with_one_scale

_aten = torch.ops.aten


class WeightOwner(Protocol):
    """Holds the value that a `ScaledTensor` is derived from: an optimizer with its master weight."""

    def write(self, value: Tensor) -> None:
        """Make `value` (any float dtype, the tensor's shape) the tensor's value, and derive payload and scale from it.

        Every replica calls it with the same value.
        """

    def value(self) -> Tensor:
        """The tensor's value in FP32, in its shape. Every replica calls it."""


class ScaledTensor(torch.Tensor):
    """x ≈ payload · scale.

    Args:
        payload: E4M3 or FP16 (with --params-dtype any 16- or 32-bit dtype), of the tensor's shape, contiguous.
        scale: FP32, [1] for the whole tensor (its value is 1 if the tensor is unscaled), or [numel / block] for blocks
            of the flattened tensor (FP16).
        dtype: the dtype it advertises.
    """

    _payload: Tensor
    _scale: Tensor
    #: Who derives payload and scale. Views (`detach`) have the same one, copies have none.
    owner: WeightOwner | None = None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, payload: Tensor, scale: Tensor, *, dtype: torch.dtype = torch.bfloat16, requires_grad: bool = False
    ) -> ScaledTensor:
        assert payload.is_contiguous() and scale.dtype == torch.float32, (payload.stride(), scale.dtype)
        self = torch.Tensor._make_wrapper_subclass(
            cls, payload.shape, dtype=dtype, device=payload.device, requires_grad=requires_grad
        )
        self._payload = payload
        self._scale = scale
        return self

    @classmethod
    def quantize(cls, value: Tensor, *, dtype: torch.dtype = torch.bfloat16) -> ScaledTensor:
        """E4M3 with one scale from the amax of `value` (any float dtype, 2-D)."""
        payload, _, scale = ops.quantize_current(value.detach(), E4M3)
        return cls(payload, scale, dtype=dtype)

    @property
    def payload(self) -> Tensor:
        """The stored bits."""
        return self._payload

    @property
    def scale(self) -> Tensor:
        """The stored FP32 scales."""
        return self._scale

    def set_storage(self, payload: Tensor, scale: Tensor) -> None:
        """Re-point the tensor at other storage of the same shape (a view into a flat buffer)."""
        assert payload.shape == self.shape and payload.is_contiguous(), (payload.shape, self.shape)
        self._payload = payload
        self._scale = scale

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """payload · scale as a plain tensor; a new high-precision copy."""
        if self._scale.numel() == 1:
            return ops.decode(self._payload, self._scale).to(dtype)
        return ops.dequantize_blockwise(self._payload.view(-1), self._scale).view(self.shape).to(dtype)

    def master_value(self) -> Tensor:
        """The tensor's value in FP32: its owner's, which may be more precise than the payload, or the payload's."""
        return self.dequantize() if self.owner is None else self.owner.value()

    def gemm_operand(self, format: Format) -> Quantized:
        """The weight [N, K] in `format`, for an FP8 GEMM.

        An FP8 weight is used as it is: in a format with tiles, every tile has its one scale. Other weights (FP16 at
        levels O1 and O2) are cast here at each use; the cast is not kept.
        """
        if self._payload.dtype in FP8_DTYPES:
            return with_one_scale(self._payload, self._scale, format)
        return quantize(self.dequantize(), format)

    def _assign(self, value: Tensor) -> None:
        """Take on new values in place, quantised in the tensor's own storage format; an owner does so itself."""
        if self.owner is not None:
            self.owner.write(value.master_value() if isinstance(value, ScaledTensor) else value)
            return
        if isinstance(value, ScaledTensor) and value._payload.dtype == self._payload.dtype:
            self._payload.copy_(value._payload)
            self._scale.copy_(value._scale)
            return
        plain = value.dequantize() if isinstance(value, ScaledTensor) else value
        if self._scale.numel() > 1:
            ops.quantize_blockwise_(plain.reshape(-1).to(self._payload.device), self._payload.view(-1), self._scale)
            return
        if self._payload.dtype not in FP8_DTYPES:
            self._payload.copy_(plain)
            self._scale.fill_(1.0)
            return
        payload, _, scale = ops.quantize_current(plain.to(self._payload.device), self._payload.dtype)
        self._payload.copy_(payload)
        self._scale.copy_(scale)

    def __repr__(self) -> str:  # type: ignore[override]
        return (
            f"ScaledTensor(shape={tuple(self.shape)}, payload={self._payload.dtype}, scales={self._scale.numel()}, "
            f"advertises={self.dtype}, device={self.device})"
        )

    def _like(self, payload: Tensor, scale: Tensor) -> ScaledTensor:
        return ScaledTensor(payload, scale, dtype=self.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def,override]
        self = args[0]
        if func in (_aten.detach.default, _aten.alias.default):
            view = self._like(self._payload, self._scale)
            view.owner = self.owner
            return view
        if func is _aten.clone.default:
            return self._like(self._payload.clone(), self._scale.clone())
        if func is _aten.empty_like.default:
            return self._like(torch.empty_like(self._payload), torch.empty_like(self._scale))
        if func is _aten._to_copy.default:
            device = (kwargs or {}).get("device") or self._payload.device
            return self._like(self._payload.to(device, copy=True), self._scale.to(device, copy=True))
        if func is _aten.copy_.default:
            destination, source = args[:2]
            if isinstance(destination, ScaledTensor):
                destination._assign(source)
                return destination
            return destination.copy_(source.dequantize())
        # The first argument of some functions (cat) is a list of tensors.
        scaled = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, ScaledTensor))
        raise NotImplementedError(
            f"{func} is not defined on a ScaledTensor of shape {tuple(scaled.shape)}: call .dequantize() for values or "
            ".gemm_operand() for a GEMM, so that the high-precision copy is visible where it is made"
        )
