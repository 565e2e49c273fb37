"""Early casts: the function that computes a gradient also casts it, for the layer whose backward takes it."""

from __future__ import annotations

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .recipe import Quantizer
from .sources import CastGrad


class EarlyCast:
    """Carries the cast of one gradient from the function that makes it to the layer's next backward.

    The cast is valid for that gradient only. A different gradient (summed with another branch's, or changed in value)
    has no early cast. The gradient itself is not kept alive, because autograd would then copy it instead of reusing it.

    Attributes:
        quantizer: the layer's. The layer sets it if the maker of the gradient read the layer's whole output; None if
            something comes between.
        transposed: whether the layer takes both layouts.
    """

    __slots__ = ("_cast", "_of", "_version", "quantizer", "transposed")

    def __init__(self) -> None:
        self.quantizer: Quantizer | None = None
        self.transposed = False
        self._cast: CastGrad | None = None
        self._of: StorageWeakRef | None = None
        self._version = 0

    def expect(self, quantizer: Quantizer, *, transposed: bool) -> None:
        """Called by the layer: it takes early casts."""
        self.quantizer, self.transposed = quantizer, transposed

    def known_scale(self) -> tuple[Tensor, Tensor] | None:
        """The scale of an early cast FP32 [1], and where to record what it saw; None if none is to be made."""
        return None if self.quantizer is None else self.quantizer.known_scale()

    def put(self, grad: Tensor, cast: CastGrad) -> None:
        """Keep `cast`, made from the whole of `grad`, for the next `take`."""
        self._of, self._version = StorageWeakRef(grad.untyped_storage()), grad._version
        self._cast = cast

    def take(self, grad: Tensor) -> CastGrad | None:
        """The cast that was put in for `grad`; None if that was another tensor or has been written to."""
        cast, of = self._cast, self._of
        self._cast = self._of = None
        if cast is None or of is None:
            return None
        is_same = of.cdata == grad.untyped_storage()._cdata and grad._version == self._version
        whole = grad.is_contiguous() and grad.numel() == cast.operand.payload.numel()
        return cast if is_same and whole else None
