"""MNIST's shape with data made on the spot: a class is a bright square in its own place, under noise."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch


class MNIST(torch.utils.data.Dataset):
    """Images [28, 28] as floats in [0, 1] and their classes; MNIST_IMAGES says how many (512)."""

    def __init__(
        self, root: str, train: bool = True, download: bool = False, transform: Callable | None = None
    ) -> None:
        count = int(os.environ.get("MNIST_IMAGES", "512"))
        count = count if train else count // 4
        generator = torch.Generator().manual_seed(1 if train else 2)
        self.classes = torch.randint(10, (count,), generator=generator)
        self.images = torch.rand(count, 28, 28, generator=generator) * 0.3
        for image, label in zip(self.images, self.classes.tolist(), strict=True):
            row, column = 4 + 12 * (label // 5), 2 + 5 * (label % 5)
            image[row : row + 5, column : column + 5] += 0.7
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = self.images[index]
        return (self.transform(image) if self.transform else image), int(self.classes[index])
