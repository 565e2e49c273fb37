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
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ..formats.format import Quantized
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


class SharingLayer(Protocol):
    """What is read of a layer."""

    @property
    def sharing(self) -> InputSharing | None:
        """None: it shares nothing."""

    @property
    def quantizers(self) -> LinearQuantizers:
        """Its casts."""


class _Offer:
    """An input that a layer has cast. `operand` is the cast; None if it is not kept, and takers are only counted."""

    def __init__(self, x: Tensor, sharing: InputSharing, layer: SharingLayer) -> None:
        self.x, self.version, self.stream = weakref.ref(x), x._version, _stream(x)
        self.sharing, self.quantizer = sharing, layer.quantizers.input
        self.operand: Quantized | None = None
        self.num_takers = 0

    def suits(self, x: Tensor, layer: SharingLayer) -> bool:
        """Whether it is of this tensor, as it is now, and `layer`, another one, casts alike."""
        own, other = self.quantizer, layer.quantizers.input
        return (
            self.x() is x
            and self.version == x._version
            and self.stream == _stream(x)
            and self.sharing is not layer.sharing
            and own.format == other.format
            and own.history is other.history
            and other.probe is None
        )

    def take(self, layer: SharingLayer, *, needs_columns: bool) -> Quantized | None:
        """The cast, for `layer`; None if it was not kept, or has no columns."""
        self.num_takers += 1
        operand, own = self.operand, self.quantizer
        if operand is None or (needs_columns and not operand.has_transpose):
            return None
        if self.num_takers == self.sharing.num_followers:
            self.operand = None  # nobody else is expected; backward needs the columns alone
        if own.history is not None:
            own.history.follow(layer.quantizers.input.slot, own.slot)
        return operand


#: Of the layer that ran last. What another thread does to it costs a cast at most.
_offer: _Offer | None = None


def taken_or_made(x: Tensor, layer: SharingLayer, cast: Callable[[], Quantized], *, needs_columns: bool) -> Quantized:
    """The input `x` of `layer` in FP8: what a layer before it offers, or what `cast` makes, which is offered then."""
    global _offer
    offered = _offer if _offer is not None and _offer.suits(x, layer) else None
    operand = None if offered is None else offered.take(layer, needs_columns=needs_columns)
    if operand is not None:
        return operand
    operand, sharing, quantizer = cast(), layer.sharing, layer.quantizers.input
    if quantizer.history is not None:
        quantizer.history.stop_following(quantizer.slot)
    if offered is None and sharing is not None and sharing.offers and not x.is_leaf and quantizer.probe is None:
        withdraw()
        _offer = _Offer(x, sharing, layer)
        if sharing.num_followers:
            _offer.operand = operand
    return operand


def has_followers(layer: SharingLayer) -> bool:
    """Whether layers are expected that take the input of `layer` after it."""
    return layer.sharing is not None and layer.sharing.num_followers > 0


def withdraw() -> None:
    """Withdraw what is offered: nobody takes it from now on, and its layer learns how many did."""
    global _offer
    offered, _offer = _offer, None
    if offered is not None:
        sharing, offered.operand = offered.sharing, None
        sharing.num_followers = offered.num_takers
        sharing.num_alone = 0 if offered.num_takers else sharing.num_alone + 1


def _stream(x: Tensor) -> int:
    return torch._C._cuda_getCurrentRawStream(x.get_device()) if x.is_cuda else 0
