"""What the layers of a model hand each other beside the values that autograd carries: every such link, in one place.

`model_links` makes them before the layers are built, and each layer's constructor is given its own. A link is an object
with slots, because an attribute of a module costs the host 2 µs each way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from ..quantization.early_cast import EarlyCast
from ..quantization.operand import Quantized


class KeptTranspose:
    """The transpose of one weight from the first backward of a step to its last; `forget` when the weight changes."""

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept: Quantized | None = None

    def of(self, weight: Quantized) -> Quantized:
        """[K, N] of the weight [N, K]."""
        if self._kept is None:
            self._kept = weight.transposed()
        return self._kept

    def forget(self) -> None:
        """The next backward makes it anew."""
        self._kept = None


class ResidualBranch:
    """A residual branch on its way from the function in front of a layer to what adds it: put in once, taken once."""

    __slots__ = ("_value",)

    def __init__(self) -> None:
        self._value: Tensor | None = None

    def put(self, value: Tensor) -> None:
        """For the next `take`."""
        self._value = value

    def take(self) -> Tensor | None:
        """What was put in since the last one."""
        value, self._value = self._value, None
        return value


class LinearLinks:
    """The links of one linear layer.

    Attributes:
        early_cast: of its output's gradient; the norm that reads the output makes it.
        kept_transpose: of its weight, or None if every backward makes it.
        residual: what the layer adds to its output, if the function in front of it left a branch there.
    """

    __slots__ = ("early_cast", "kept_transpose", "residual")

    def __init__(self, *, keeps_transpose: bool = False, residual: ResidualBranch | None = None) -> None:
        self.early_cast = EarlyCast()
        self.kept_transpose = KeptTranspose() if keeps_transpose else None
        self.residual = residual


class LayerLinks:
    """The links of one transformer layer.

    Attributes:
        residual: attention's input; the output projection adds it, or else the layer.
        qkv, proj, fc1, fc2: its linear layers.
        front: the linear layer whose output is this layer's input, nothing between, in the same model chunk; or None.
    """

    __slots__ = ("fc1", "fc2", "front", "proj", "qkv", "residual")

    def __init__(self, front: LinearLinks | None = None, *, keeps_transposes: bool = False) -> None:
        self.residual = ResidualBranch()
        self.qkv = LinearLinks(keeps_transpose=keeps_transposes)
        self.proj = LinearLinks(keeps_transpose=keeps_transposes, residual=self.residual)
        self.fc1 = LinearLinks(keeps_transpose=keeps_transposes)
        self.fc2 = LinearLinks(keeps_transpose=keeps_transposes)
        self.front = front

    def kept_transposes(self) -> Iterator[KeptTranspose]:
        """Those of its weights."""
        for linear in (self.qkv, self.proj, self.fc1, self.fc2):
            if linear.kept_transpose is not None:
                yield linear.kept_transpose


def model_links(are_fp8: Sequence[bool], *, num_kept_transposes: int = 0) -> list[LayerLinks | None]:
    """The links of a model chunk's layers, in their order; None for a layer in 16 bits.

    Args:
        are_fp8: of each layer.
        num_kept_transposes: layers, from the first on, that keep the transposes of their weights within a step.
    """
    links: list[LayerLinks | None] = []
    front: LinearLinks | None = None
    for index, is_fp8 in enumerate(are_fp8):
        links.append(LayerLinks(front, keeps_transposes=index < num_kept_transposes) if is_fp8 else None)
        front = None if links[-1] is None else links[-1].fc2
    return links
