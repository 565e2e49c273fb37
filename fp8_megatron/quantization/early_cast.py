"""A gradient's cast that the function which made the gradient has made too, for the layer whose backward wants it."""

from __future__ import annotations

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..quantization.sources import Grads


class EarlyCast:
    """Holds the cast of one gradient from where it is made to the next backward of the layer it is for.

    It is for that gradient alone: whatever else arrives (a sum with another branch's, a changed value) has none. The
    gradient itself is not kept alive, or autograd would copy it where it may give it away.
    """

    __slots__ = ("_cast", "_of", "_scale", "_version")

    def __init__(self) -> None:
        self._cast: Grads | None = None
        self._scale: Tensor | None = None
        self._of: StorageWeakRef | None = None
        self._version = 0

    def put(self, grad: Tensor, cast: Grads, scale: Tensor) -> None:
        """Keep `cast`, made of all of `grad` with `scale`, for the next `take`."""
        self._of, self._version = StorageWeakRef(grad.untyped_storage()), grad._version
        self._cast, self._scale = cast, scale

    def take(self, grad: Tensor) -> tuple[Grads, Tensor] | None:
        """What was put in for `grad`, and its scale; None if that is another tensor, or was written to since."""
        cast, scale, of = self._cast, self._scale, self._of
        self._cast = self._scale = self._of = None
        if cast is None or scale is None or of is None:
            return None
        is_same = of.cdata == grad.untyped_storage()._cdata and grad._version == self._version
        whole = grad.is_contiguous() and grad.numel() == cast.payload.numel()
        return (cast, scale) if is_same and whole else None
