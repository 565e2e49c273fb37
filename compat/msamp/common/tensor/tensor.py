"""ScalingTensor: a payload and its scale, as MS-AMP's code for casts handles them.

It is no torch.Tensor, and nothing of torch is replaced for it: torch hands it the few functions that it knows through
``__torch_function__``, and other functions are a TypeError. Models do not use it. Their weights are fp8_megatron's
`ScaledTensor`, a torch.Tensor that optimizers, ``state_dict`` and distributed packages know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...refusals import refuse
from ..dtype import Dtypes, QType
from .cast import TypeCast
from .meta import ScalingMeta

__getattr__ = refuse(__name__, {"TorchOverider": "torch stays as it is; msamp.tensor_methods.install() adds methods"})

_FLOATS = {torch.float32: Dtypes.kfloat32, torch.float16: Dtypes.kfloat16, torch.bfloat16: Dtypes.kbfloat16}


def cast(tensor: Tensor, qtype: QType, meta: ScalingMeta | None = None, sync: bool = False) -> ScalingTensor:
    """Cast a tensor (any float dtype and shape) to `qtype`.

    Args:
        meta: gives the scale; without one, the scale is that of the values.
        sync: take the amax over the ranks of ``meta.group``.
    """
    meta = ScalingMeta(qtype, device=tensor.device) if meta is None else meta
    if Dtypes.is_fp8_qtype(qtype):
        payload = TypeCast.cast_to_fp8(tensor, meta, sync=sync)
        assert isinstance(payload, Tensor)
        return ScalingTensor(payload, meta)
    return ScalingTensor(TypeCast.cast_to_fp16(tensor.contiguous(), meta, sync=sync), meta)


def fused_cast_transpose(
    tensor: Tensor, qtype: QType, meta: ScalingMeta | None = None, sync: bool = False
) -> tuple[ScalingTensor, ScalingTensor]:
    """Cast a matrix to FP8 in both layouts: itself and its transpose, with one scale.

    Raises:
        TypeError: `qtype` is not FP8.
    """
    if not Dtypes.is_fp8_qtype(qtype):
        raise TypeError(f"fused_cast_transpose casts to FP8, not to {qtype.name}: use cast(...).t()")
    meta = ScalingMeta(qtype, device=tensor.device) if meta is None else meta
    payload, payload_t = TypeCast.cast_to_fp8(tensor, meta, sync=sync, fuse_transpose=True)
    return ScalingTensor(payload, meta), ScalingTensor(payload_t, meta)


class ScalingTensor:
    """value · meta.scale_inv.

    Args:
        value: the payload: torch.uint8 for FP8, or a float dtype. Any shape.
        meta: its qtype and scale.

    Raises:
        TypeError: `value` is not of the qtype's dtype.
    """

    def __init__(self, value: Tensor, meta: ScalingMeta) -> None:
        expected = Dtypes.get_dtype_from_qtype(meta.qtype)
        if value.dtype != expected:
            raise TypeError(f"value is {value.dtype}, but {meta.qtype.name} is stored as {expected}")
        self.value, self.meta = value, meta
        self.grad: Tensor | ScalingTensor | None = None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = _TORCH_FUNCTIONS.get(func)
        if handler is None:
            raise TypeError(f"torch.{func.__name__} does not take a ScalingTensor: call .float() for its values")
        return handler(*args, **(kwargs or {}))

    # What describes the tensor.

    @property
    def qtype(self) -> QType:
        """The payload's format."""
        return self.meta.qtype

    @property
    def dtype(self) -> torch.dtype:
        """The payload's dtype."""
        return self.value.dtype

    @property
    def shape(self) -> torch.Size:
        """The tensor's shape."""
        return self.value.shape

    @property
    def device(self) -> torch.device:
        """Where the payload is."""
        return self.value.device

    @property
    def is_cuda(self) -> bool:
        """Whether the payload is on a GPU."""
        return self.value.is_cuda

    @property
    def is_sparse(self) -> bool:
        """False."""
        return False

    @property
    def is_leaf(self) -> bool:
        """True: autograd does not know a ScalingTensor."""
        return True

    def size(self, *dim: int) -> Any:
        """As torch.Tensor.size."""
        return self.value.size(*dim)

    def numel(self) -> int:
        """How many elements it has."""
        return self.value.numel()

    nelement = numel

    def type(self) -> str:
        """The class's full name."""
        return f"{type(self).__module__}.{type(self).__qualname__}"

    def is_contiguous(self) -> bool:
        """Whether the payload is contiguous."""
        return self.value.is_contiguous()

    def is_floating_point(self) -> bool:
        """False: the payload keeps its format in ``module.half()`` and the like."""
        return False

    def is_complex(self) -> bool:
        """False."""
        return False

    def data_ptr(self) -> int:
        """The payload's address."""
        return self.value.data_ptr()

    def __len__(self) -> int:
        return len(self.value)

    def __repr__(self) -> str:
        return f"ScalingTensor({self.float()}, meta={self.meta})"

    # Values.

    def _values(self, qtype: QType) -> Tensor:
        if Dtypes.is_fp8_qtype(self.qtype):
            return TypeCast.cast_from_fp8(self.value, self.meta, qtype)
        return TypeCast.cast_from_fp16(self.value, self.meta, qtype)

    def float(self) -> Tensor:
        """Values in FP32."""
        return self._values(Dtypes.kfloat32)

    def half(self) -> Tensor:
        """Values in FP16."""
        return self._values(Dtypes.kfloat16)

    def bfloat16(self) -> Tensor:
        """Values in BF16."""
        return self._values(Dtypes.kbfloat16)

    def to(self, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor | ScalingTensor:
        """Values in a float dtype as a plain tensor, or this tensor on another device.

        Raises:
            TypeError: two dtypes, or a dtype that is no float of 16 or 32 bits.
        """
        dtypes = [arg for arg in (*args, dtype) if isinstance(arg, torch.dtype)]
        places = [arg for arg in args if not isinstance(arg, torch.dtype)]
        if len(dtypes) > 1 or (dtypes and dtypes[0] not in _FLOATS):
            raise TypeError(f"ScalingTensor.to takes one of {[str(d) for d in _FLOATS]}, not {dtypes}")
        if dtypes:
            values = self._values(_FLOATS[dtypes[0]])
            return values.to(*places, **kwargs) if places or kwargs else values
        value = self.value.to(*places, **kwargs)
        return ScalingTensor(value, self.meta.clone().to(value.device))

    def cpu(self) -> ScalingTensor:
        """A copy in host memory."""
        return ScalingTensor(self.value.cpu(), self.meta.clone().to("cpu"))

    def cuda(self) -> ScalingTensor:
        """A copy on the GPU."""
        return ScalingTensor(self.value.cuda(), self.meta.clone().to("cuda"))

    def cast(self, qtype: QType) -> ScalingTensor:
        """The same values in another format, with the scale of their amax."""
        return self if qtype == self.qtype else cast(self.float(), qtype)

    def cast_(self, qtype: QType) -> ScalingTensor:
        """`cast` in place."""
        if qtype != self.qtype:
            other = self.cast(qtype)
            self.value = other.value
            self.meta.copy_(other.meta)
        return self

    def min(self) -> Tensor:
        """The least value, an FP32 scalar."""
        return self.float().min()

    def max(self) -> Tensor:
        """The largest value, an FP32 scalar."""
        return self.float().max()

    def abs(self) -> ScalingTensor:
        """Magnitudes in the same format."""
        if self.value.dtype == torch.uint8:  # the sign is the highest bit of both FP8 formats
            return ScalingTensor(self.value & 0x7F, self.meta.clone())
        return ScalingTensor(self.value.abs(), self.meta.clone())

    def isnan(self) -> Tensor:
        """Which elements are NaN, bool of the tensor's shape."""
        return self.float().isnan()

    def has_inf_or_nan(self) -> bool:
        """Whether the values that were cast held an inf or a NaN. Waits for the device."""
        return not bool(torch.isfinite(self.meta.amax[0]))

    # Other views and copies.

    def detach(self) -> ScalingTensor:
        """A tensor that shares payload and scale."""
        return ScalingTensor(self.value, self.meta)

    def clone(self) -> ScalingTensor:
        """A copy of payload and scale."""
        return ScalingTensor(self.value.clone(), self.meta.clone())

    def t(self) -> ScalingTensor:
        """The transpose of a matrix, a view."""
        return ScalingTensor(self.value.t(), self.meta)

    def fp8_transpose(self) -> ScalingTensor:
        """The transpose of an FP8 matrix, contiguous.

        Raises:
            TypeError: the format is not FP8.
        """
        if not Dtypes.is_fp8_qtype(self.qtype):
            raise TypeError(f"fp8_transpose transposes FP8, not {self.qtype.name}: use .t().contiguous()")
        return self.t().contiguous()

    def contiguous(self) -> ScalingTensor:
        """The tensor with a contiguous payload."""
        return self if self.value.is_contiguous() else ScalingTensor(self.value.contiguous(), self.meta.clone())

    def flatten(self) -> ScalingTensor:
        """One dimension."""
        return ScalingTensor(self.value.flatten(), self.meta)

    def pad(self, pad: Sequence[int]) -> ScalingTensor:
        """As torch.nn.functional.pad with zeros."""
        return ScalingTensor(F.pad(self.value, list(pad)), self.meta)

    def __getitem__(self, index: Any) -> ScalingTensor:
        return ScalingTensor(self.value[index], self.meta)

    # In place.

    @torch.no_grad()
    def mul_(self, other: Tensor | float) -> ScalingTensor:
        """Multiply by one number (a float or a tensor of one element), through the scale."""
        self.meta.scale_inv *= self._number(other)
        return self

    @torch.no_grad()
    def div_(self, other: Tensor | float) -> ScalingTensor:
        """Divide by one number, as `mul_`."""
        self.meta.scale_inv /= self._number(other)
        return self

    def _number(self, other: Tensor | float) -> Tensor | float:
        if not isinstance(other, Tensor):
            return other
        if other.numel() != 1:
            raise ValueError(f"a ScalingTensor is scaled by one number, not by {other.numel()}: scale .float()")
        return other.view_as(self.meta.scale_inv)

    def zero_(self) -> ScalingTensor:
        """Set all values to zero."""
        self.value.zero_()
        return self

    @torch.no_grad()
    def copy_(self, src: ScalingTensor) -> ScalingTensor:
        """Take on the payload and scale of `src`.

        Raises:
            TypeError: `src` is no ScalingTensor of this dtype.
        """
        if not isinstance(src, ScalingTensor) or src.dtype != self.dtype:
            raise TypeError(
                f"copy_ takes a ScalingTensor of {self.dtype}, not {getattr(src, 'dtype', type(src))}: cast it"
            )
        self.value.copy_(src.value)
        self.meta.copy_(src.meta)
        return self


def _check_and_unscale(grads: Sequence[Any], found_inf: Tensor, inv_scale: Tensor) -> None:
    """``torch._amp_foreach_non_finite_check_and_unscale_`` over tensors of both kinds."""
    plain = [grad for grad in grads if not isinstance(grad, ScalingTensor)]
    if plain:
        torch._amp_foreach_non_finite_check_and_unscale_(plain, found_inf, inv_scale)
    for grad in grads:
        if isinstance(grad, ScalingTensor):
            grad.mul_(inv_scale)
            found_inf.logical_or_(~torch.isfinite(grad.meta.amax[0]))


_TORCH_FUNCTIONS = {
    torch.zeros_like: lambda tensor, **kwargs: torch.zeros_like(tensor.value, **kwargs),
    torch.ones_like: lambda tensor, **kwargs: torch.ones_like(tensor.value, **kwargs),
    torch.is_floating_point: lambda tensor: False,
    torch._amp_foreach_non_finite_check_and_unscale_: _check_and_unscale,
}
