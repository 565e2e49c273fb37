"""Links: what the layers of a model pass to each other outside autograd.

`model_links` makes them before the layers are built; each layer's constructor gets its own. A link is an object with
slots, because reading or writing an attribute of a module costs the host 2 µs.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..formats.format import Format, Quantized
from ..quantization.early_cast import EarlyCast
from ..quantization.scaled_tensor import ScaledTensor


class KeptTranspose:
    """The transpose of one weight, kept from the first backward of a step to its last.

    Call `forget` when the weight changes.
    """

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept: Quantized | None = None

    def of(self, weight: ScaledTensor, format: Format) -> Quantized:
        """The transpose [K, N] of the weight [N, K] in `format`."""
        if self._kept is None:
            self._kept = weight.gemm_operand(format, transposed=True)
        return self._kept

    def forget(self) -> None:
        """Drop the transpose; the next backward makes it again."""
        self._kept = None


class ResidualBranch:
    """Carries a residual branch from the function in front of a layer to the layer that adds it.

    It is put in once and taken once.
    """

    __slots__ = ("_value",)

    def __init__(self) -> None:
        self._value: Tensor | None = None

    def put(self, value: Tensor) -> None:
        """Store `value` for the next `take`."""
        self._value = value

    def take(self) -> Tensor | None:
        """Return and drop the stored value; None if there is none."""
        value, self._value = self._value, None
        return value


class LinearLinks:
    """The links of one linear layer.

    Attributes:
        early_cast: the cast of its output's gradient; the norm that reads the output makes it.
        kept_transpose: the transpose of its weight; None if every backward makes it.
        residual: the layer adds this branch to its output, if the function in front put one there.
    """

    __slots__ = ("early_cast", "kept_transpose", "residual")

    def __init__(self, *, keeps_transpose: bool = False, residual: ResidualBranch | None = None) -> None:
        self.early_cast = EarlyCast()
        self.kept_transpose = KeptTranspose() if keeps_transpose else None
        self.residual = residual


class LayerLinks:
    """The links of one transformer layer.

    Attributes:
        residual: attention's input; the output projection adds it, otherwise the layer does.
        qkv, proj, fc1, fc2: the links of its linear layers.
        front: the links of the linear layer, in the same model chunk, whose output is directly this layer's input; or
            None.
    """

    __slots__ = ("fc1", "fc2", "front", "proj", "qkv", "residual")

    def __init__(self, front: LinearLinks | None = None, *, keeps_transposes: bool = False) -> None:
        self.residual = ResidualBranch()
        self.qkv = LinearLinks(keeps_transpose=keeps_transposes)
        self.proj = LinearLinks(keeps_transpose=keeps_transposes, residual=self.residual)
        self.fc1 = LinearLinks(keeps_transpose=keeps_transposes)
        self.fc2 = LinearLinks(keeps_transpose=keeps_transposes)
        self.front = front


def model_links(are_fp8: Sequence[bool], *, num_kept_transposes: int = 0) -> list[LayerLinks | None]:
    """The links of a model chunk's layers, in order; None for a 16-bit layer.

    Args:
        are_fp8: whether each layer is in FP8.
        num_kept_transposes: how many layers, counted from the first, keep their weights' transposes within a step.
    """
    links: list[LayerLinks | None] = []
    front: LinearLinks | None = None
    for index, is_fp8 in enumerate(are_fp8):
        links.append(LayerLinks(front, keeps_transposes=index < num_kept_transposes) if is_fp8 else None)
        front = None if links[-1] is None else links[-1].fc2
    return links
