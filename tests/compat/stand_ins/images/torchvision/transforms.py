"""The transforms that MNIST's scripts name, for the stand-in's tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor


class Compose:
    """Several transforms, one after the other."""

    def __init__(self, transforms: Sequence[Callable[[Tensor], Tensor]]) -> None:
        self.transforms = transforms

    def __call__(self, image: Tensor) -> Tensor:
        for transform in self.transforms:
            image = transform(image)
        return image


class ToTensor:
    """[28, 28] → [1, 28, 28]."""

    def __call__(self, image: Tensor) -> Tensor:
        return image[None]


class Normalize:
    """(x - mean) / std."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean, self.std = mean[0], std[0]

    def __call__(self, image: Tensor) -> Tensor:
        return (image - self.mean) / self.std
