"""A gradient's cast that the function which makes the gradient makes too, for the layer whose backward takes it."""

from __future__ import annotations

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .recipe import Quantizer
from .sources import CastGrad


class EarlyCast:
    """The cast of one gradient, from where it is made to the next backward of the layer that it is for.

    It is for that gradient alone: whatever else arrives (a sum with another branch's, a changed value) has none. The
    gradient itself is not kept alive, or autograd would copy it where it may give it away.

    Attributes:
        quantizer: of the layer, which sets it where all of its output is what the maker of the gradient has read; None
            where something comes between.
        transposed: whether the layer wants both layouts.
    """

    __slots__ = ("_cast", "_of", "_version", "quantizer", "transposed")

    def __init__(self) -> None:
        self.quantizer: Quantizer | None = None
        self.transposed = False
        self._cast: CastGrad | None = None
        self._of: StorageWeakRef | None = None
        self._version = 0

    def expect(self, quantizer: Quantizer, *, transposed: bool) -> None:
        """The layer takes casts from now on."""
        self.quantizer, self.transposed = quantizer, transposed

    def known_scale(self) -> tuple[Tensor, Tensor] | None:
        """The scale to cast with and where the amax is to be recorded, FP32 [1] each; None where nobody is to cast."""
        return None if self.quantizer is None else self.quantizer.known_scale()

    def put(self, grad: Tensor, cast: CastGrad) -> None:
        """Keep `cast`, made of all of `grad`, for the next `take`."""
        self._of, self._version = StorageWeakRef(grad.untyped_storage()), grad._version
        self._cast = cast

    def take(self, grad: Tensor) -> CastGrad | None:
        """What was put in for `grad`; None if that is another tensor, or was written to since."""
        cast, of = self._cast, self._of
        self._cast = self._of = None
        if cast is None or of is None:
            return None
        is_same = of.cdata == grad.untyped_storage()._cdata and grad._version == self._version
        whole = grad.is_contiguous() and grad.numel() == cast.operand.payload.numel()
        return cast if is_same and whole else None
