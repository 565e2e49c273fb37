"""Views of tensors whose values are decoded, and what torch implements for plain tensors alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import scaled_functions, weight_products
from .untraced import enters_no_graph


class Decoded(torch.Tensor):
    """A tensor whose memory does not hold its values as they are, such as a `ScaledTensor`.

    torch refuses some methods to all tensors of this kind. They give what a plain tensor with these values would: an
    array, or torch's own error if autograd is on. The array cannot be written to, because nobody would see it.
    """

    @classmethod
    @enters_no_graph
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return weight_products.call(func, types, args, kwargs or {})

    @property
    def takes_arithmetic(self) -> bool:
        """Whether somebody keeps what arithmetic in place writes, and does not round small changes away."""
        return True

    @property
    def layer_name(self) -> str:
        """The layer that it is the weight of; empty: not known."""
        return ""

    def master_value(self) -> Tensor:
        """The values, those of several ranks together."""
        raise NotImplementedError

    def value_here(self) -> Tensor:
        """As much of `master_value` as is known without other ranks."""
        raise NotImplementedError

    def assign(self, value: Tensor) -> None:
        """Take on new values, of any float dtype."""
        raise NotImplementedError

    def _use_count(self) -> int:
        """What ``torch.utils.swap_tensors`` asks first.

        Raises:
            NotImplementedError: somebody keeps the values, and would not see that the tensor has others.
        """
        if self.takes_arithmetic:
            name = f" (layer {self.layer_name})" if self.layer_name else ""
            raise NotImplementedError(
                f"torch.utils.swap_tensors would put another tensor in the place of an FP8 weight or gradient of shape "
                f"{tuple(self.shape)}{name}, which its optimizer would not see: write the values, p.copy_(…)"
            )
        count: int = super()._use_count()  # type: ignore[misc]
        return count

    def view_values(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `func`, which makes a view of its first argument or several, makes of this one."""

        def take(value: Tensor) -> Any:
            return func(value, *args, **kwargs)

        made = take(torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta"))
        if isinstance(made, Tensor):
            return ValueView(self, take, made)

        def take_one(index: int) -> Callable[[Tensor], Tensor]:
            return lambda value: take(value)[index]

        return [ValueView(self, take_one(index), one) for index, one in enumerate(made)]

    def _plain(self) -> Tensor:
        return self.value_here().detach().to(self.dtype).requires_grad_(self.requires_grad)

    def numpy(self, *, force: bool = False) -> Any:
        """The values as an array; see `torch.Tensor.numpy`."""
        array = self._plain().numpy(force=force)
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        """The values as numbers; see `torch.Tensor.tolist`."""
        return self._plain().tolist()

    def __dlpack__(self, **options: Any) -> Any:
        return self._plain().__dlpack__(**options)

    def share_memory_(self) -> Tensor:
        """torch would follow a null pointer.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "a tensor that is decoded has no memory for other processes: send model.state_dict(), or share a copy, "
            "plain_model(model)"
        )


class ValueView(Decoded):
    """A view that shares no memory with its base, such as a row or the transpose of a `ScaledTensor`.

    Whatever reads it decodes the base, for this call alone. What is written into it goes to the base.

    Args:
        base: a tensor of which it is a view.
        take: the view of plain values of the base's shape.
        example: what `take` makes, on the meta device.

    Attributes:
        transpose_of: the layer's weight that it is the transpose of, for products (`weight_products`); None: it is not.
    """

    transpose_of: Decoded | None = None
    _base_tensor: Decoded
    _take: Callable[[Tensor], Tensor]

    @staticmethod
    def __new__(cls, base: Decoded, take: Callable[[Tensor], Tensor], example: Tensor) -> ValueView:
        with torch.inference_mode(base.is_inference()):  # torch gives a view the version counter of its base
            self = torch.Tensor._make_wrapper_subclass(
                cls,
                example.shape,
                strides=example.stride(),
                storage_offset=example.storage_offset(),
                dtype=base.dtype,
                device=base.device,
            )
        self._base_tensor, self._take = base, take
        return self

    @property
    def takes_arithmetic(self) -> bool:
        """As of the base."""
        return self._base_tensor.takes_arithmetic

    @property
    def layer_name(self) -> str:
        """Of the base."""
        return self._base_tensor.layer_name

    def master_value(self) -> Tensor:
        """See `Decoded.master_value`."""
        return self._take(self._base_tensor.master_value().contiguous())

    def value_here(self) -> Tensor:
        """See `Decoded.value_here`."""
        return self._take(self._base_tensor.value_here().contiguous())

    def assign(self, value: Tensor) -> None:
        """Write into the base, whose other values stay."""
        whole = self._base_tensor.master_value().contiguous()
        self._take(whole).copy_(value)
        self._base_tensor.assign(whole)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self._plain().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().clone().__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self._plain())

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def,override]
        return scaled_functions.call(func, args, kwargs or {})
