"""What a `ScaledTensor` has in common with its views: its owner, the layer it belongs to, the scale of its cast.

A view of a weight reads and writes the same memory, so a write through any of them concerns all.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import torch
from torch import Tensor

from .untraced import enters_no_graph

if TYPE_CHECKING:
    from .scaled_tensor import ScaledTensor

#: Writes to a frozen FP8 weight after which `Home` warns. Loading a state takes one.
MANY_WRITES = 8
#: How much of a change to an FP8 weight may be lost, as a ratio of norms. New values lose 3%, rounded to FP8.
MOST_LOST = 0.1
#: What an average in FP32 of equal values may differ from them, as a ratio of norms.
FP32_NOISE = 1e-6


class WeightOwner(Protocol):
    """Holds the value that a `ScaledTensor` is derived from: an optimizer with its master weight."""

    @property
    def is_consolidated(self) -> bool:
        """Whether a replica keeps the whole value for state dicts. Theirs is then `value_here`."""

    def write(self, value: Tensor) -> None:
        """Make `value` (any float dtype, the tensor's shape) the tensor's value, and derive payload and scale from it.

        Every replica calls it with the same value.
        """

    def value(self) -> Tensor:
        """The tensor's value in FP32, in its shape. Every replica calls it."""

    def value_here(self) -> Tensor:
        """`value` where this rank has all of it, otherwise the value of payload and scale. No other rank is asked."""


class WeightLayer(Protocol):
    """A module with a `ScaledTensor` as its parameter ``weight``."""

    _parameters: dict[str, Any]

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x·Wᵀ + bias, as the layer computes it."""


class OwnerOfView:
    """Writes to a view of an owned tensor go to the owner, with the other values as they are.

    Args:
        owner: of the tensor.
        base, view: payloads of the tensor and of the view.
    """

    def __init__(self, owner: WeightOwner, base: Tensor, view: Tensor) -> None:
        assert base.is_contiguous(), "a view of a view of columns"
        self._owner = owner
        self._place = (view.shape, view.stride(), view.storage_offset() - base.storage_offset())

    @property
    def is_consolidated(self) -> bool:
        """See `WeightOwner`."""
        return self._owner.is_consolidated

    def write(self, value: Tensor) -> None:
        """See `WeightOwner.write`; `value` has the view's shape."""
        whole = self._owner.value().contiguous()
        whole.as_strided(*self._place).copy_(value)
        self._owner.write(whole)

    def value(self) -> Tensor:
        """See `WeightOwner.value`; in the view's shape."""
        return self._owner.value().contiguous().as_strided(*self._place)

    def value_here(self) -> Tensor:
        """See `WeightOwner.value_here`; in the view's shape."""
        return self._owner.value_here().contiguous().as_strided(*self._place)


class Part:
    """What the views of one tensor's rows know together.

    Attributes:
        root: the payload that they are views of.
        is_zero: nothing was written to it yet.
        scales_alone: its scale fits it alone, because plain values were written; other ranks' rows may have another.
    """

    __slots__ = ("is_zero", "root", "scales_alone")

    def __init__(self, root: Tensor, *, is_zero: bool = False, scales_alone: bool = False) -> None:
        self.root, self.is_zero, self.scales_alone = root, is_zero, scales_alone


class CastScale:
    """The scale with which a weight of 16 or 32 bits is cast to E4M3: that of its amax, kept by who writes the weight.

    A weight and its views share it, so that a write through any of them is seen.

    Attributes:
        scale: FP32, one a matrix, each 16-byte aligned, as cuBLASLt requires.
        numel: elements of the weight. A view of some of them has another amax.
        is_current: whether `scale` is that of the present values. A write through a tensor makes it False.
    """

    __slots__ = ("is_current", "numel", "scale")

    def __init__(self, scale: Tensor, numel: int) -> None:
        self.scale = scale
        self.numel = numel
        self.is_current = False


class Home:
    """Mark of the layer that a weight belongs to, shared by the layer, its weight and views of that.

    It sees the values that are written to a weight that only FP8 holds: a small change, such as a merged adapter or a
    step of an average, would be rounded away. Loading a state is none; it counts loads, and warns of many.

    Args:
        name: the layer's, for errors.

    Attributes:
        is_loading: the layer takes on a state dict.
    """

    __slots__ = ("_layers", "is_loading", "name", "num_writes")

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.num_writes = 0
        self.is_loading = False
        self._layers: list[weakref.ref[WeightLayer]] = []

    def add(self, layer: WeightLayer) -> None:
        """`layer` has the weight, perhaps beside others. torch's products with it are the layer's."""
        self._layers = [known for known in self._layers if known() not in (None, layer)] + [weakref.ref(layer)]

    @enters_no_graph
    def layer_of(self, weight: ScaledTensor) -> WeightLayer | None:
        """The first layer whose parameter `weight` is, and not a view or a copy of it."""
        for known in self._layers:
            layer = known()
            if layer is not None and layer._parameters.get("weight") is weight:
                return layer
        return None

    def __getstate__(self) -> tuple[str, int]:
        """Copied and pickled layers add themselves."""
        return self.name, self.num_writes

    def __setstate__(self, state: tuple[str, int]) -> None:
        self.name, self.num_writes = state
        self.is_loading = False
        self._layers = []

    @contextmanager
    def loading(self) -> Iterator[None]:
        """The layer takes on a state dict inside of the block. The values are copied, also where torch is set to swap
        parameters."""
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(False)
        self.is_loading = True
        try:
            yield
        finally:
            self.is_loading = False
            torch.__future__.set_swap_module_params_on_conversion(swaps)

    def check_change(self, before: Tensor, value: Tensor, rounded: Tensor) -> None:
        """Check values that are about to be rounded to the weight's FP8. It waits for the device.

        Args:
            before: the weight, in FP32.
            value: the new values, in FP32.
            rounded: what FP8 makes of them, in FP32.

        Raises:
            NotImplementedError: they are a change of the weight, of which too much would be lost.
        """
        norms = [(rounded - value).norm(), (value - before).norm(), before.norm()]
        lost, change, size = torch.stack(norms).tolist()
        if lost > MOST_LOST * change + FP32_NOISE * size:
            raise NotImplementedError(
                f"layer {self.name}: its FP8 weight has no master, and would round a change of {change:.2g} by "
                f"{lost:.2g} (norms). An adapter that is merged, or an average (a momentum encoder, a mean teacher), "
                f"would be lost: merge in a copy, fp8_megatron.any_model.plain_model(model), keep the layer out of FP8 "
                f"with filter=…, or write whole new values with load_state_dict"
            )

    def note_write(self) -> None:
        """Values were rounded to the weight's FP8."""
        self.num_writes += 1
        if self.num_writes == MANY_WRITES:
            warnings.warn(
                f"values were written {MANY_WRITES} times to an FP8 weight without a master, as a frozen one is. Each "
                f"was rounded to FP8, so an average (a momentum encoder, a mean teacher) may not move at all: keep its "
                f"layers out of FP8 with filter=…",
                stacklevel=2,
            )


def is_scaled(value: Any) -> TypeGuard[ScaledTensor]:
    """Whether `value` is a `ScaledTensor`. For modules that its own imports."""
    return hasattr(value, "gemm_operand")
