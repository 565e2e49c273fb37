"""Layers that take the same input, as query, key and value do: the first one casts it, and the others take its cast.

The others then cast nothing, and all keep the same columns for backward: one byte an element for all of them. The bits
are those of casts of their own, because equal values have equal scales. Under delayed scaling the others' slots of the
amax history follow the first one's (`AmaxHistory.follow`).

Nobody says which layers these are. A layer offers its cast to those that follow. In its first forward it keeps none,
and counts the layers that come with the very same tensor. From the next forward on it keeps its cast for as many as
came last time.

An input is the same if it is the same tensor object, not written to since, on the same stream. Autograd must have made
it: a tensor that outlives a forward would bring its cast into the next one. Backward withdraws what is still offered. A
kernel that writes into a tensor behind torch's back, between two such layers, is not seen.
"""

from __future__ import annotations

import weakref
from typing import Protocol

import torch
from torch import Tensor

from ..quantization.operand import Quantized
from ..quantization.recipe import LinearQuantizers

#: Forwards in a row without a follower after which a layer offers its casts no more: an offer costs the host 4 µs.
_MOST_ALONE = 8


class InputSharing:
    """What a layer knows of those that take the same input.

    Attributes:
        num_followers: layers that came with its input after it, in the last forward.
        num_alone: forwards since then that nobody came after.
    """

    __slots__ = ("num_alone", "num_followers")

    def __init__(self) -> None:
        self.num_followers = self.num_alone = 0

    @property
    def offers(self) -> bool:
        """Whether followers may come."""
        return self.num_alone < _MOST_ALONE


class Sibling(Protocol):
    """What is read of a layer."""

    @property
    def sharing(self) -> InputSharing | None:
        """None: it shares nothing."""

    @property
    def quantizers(self) -> LinearQuantizers:
        """Its casts."""


class Offer:
    """An input that a layer has cast, with the cast if it is kept."""

    __slots__ = ("_num_takers", "_operand", "_quantizer", "_sharing", "_stream", "_version", "_x")

    def __init__(self, x: Tensor, layer: Sibling, operand: Quantized | None) -> None:
        assert layer.sharing is not None
        self._x, self._version, self._stream = weakref.ref(x), x._version, _stream(x)
        self._sharing, self._quantizer = layer.sharing, layer.quantizers.input
        self._operand = operand
        self._num_takers = 0

    def is_of(self, x: Tensor) -> bool:
        """Whether the cast is of this tensor, as it is now."""
        return self._x() is x and self._version == x._version and self._stream == _stream(x)

    def suits(self, layer: Sibling) -> bool:
        """Whether `layer`, another one, casts alike."""
        own, other = self._quantizer, layer.quantizers.input
        return (
            self._sharing is not layer.sharing
            and own.format == other.format
            and own.history is other.history
            and other.probe is None
        )

    def take(self, layer: Sibling, *, needs_columns: bool) -> Quantized | None:
        """The cast, for `layer`; None if it was not kept, or has no columns."""
        self._num_takers += 1
        operand, own, other = self._operand, self._quantizer, layer.quantizers.input
        if operand is None or (needs_columns and not operand.has_transpose):
            return None
        if self._num_takers == self._sharing.num_followers:
            self._operand = None  # nobody else is expected; backward needs the columns alone
        if own.history is not None:
            own.history.follow(other.slot, own.slot)
        return operand

    def withdraw(self) -> None:
        """Nobody takes it from now on: its layer learns how many did."""
        sharing, self._operand = self._sharing, None
        sharing.num_followers = self._num_takers
        sharing.num_alone = 0 if self._num_takers else sharing.num_alone + 1


#: Of the layer that ran last. What another thread does to it costs a cast at most.
_offer: Offer | None = None


def found(x: Tensor, layer: Sibling) -> Offer | None:
    """What a layer before this one offers of the same input."""
    offered = _offer
    return offered if offered is not None and offered.is_of(x) and offered.suits(layer) else None


def can_offer(x: Tensor, layer: Sibling) -> bool:
    """Whether `layer` may offer the cast of its input `x`."""
    sharing = layer.sharing
    return sharing is not None and sharing.offers and not x.is_leaf and layer.quantizers.input.probe is None


def has_followers(layer: Sibling) -> bool:
    """Whether layers are expected that take the input of `layer` after it."""
    return layer.sharing is not None and layer.sharing.num_followers > 0


def offer(x: Tensor, layer: Sibling, operand: Quantized | None) -> None:
    """Offer the cast of `x` to the layers that follow. None: it is not kept, and they are counted."""
    global _offer
    withdraw()
    _offer = Offer(x, layer, operand)


def withdraw() -> None:
    """Withdraw what is offered."""
    global _offer
    offered, _offer = _offer, None
    if offered is not None:
        offered.withdraw()


def has_cast(layer: Sibling) -> None:
    """`layer` has cast its input itself: its slot of the amax history follows no other one."""
    quantizer = layer.quantizers.input
    if quantizer.history is not None:
        quantizer.history.stop_following(quantizer.slot)


def _stream(x: Tensor) -> int:
    return torch._C._cuda_getCurrentRawStream(x.get_device()) if x.is_cuda else 0
