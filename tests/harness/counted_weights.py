"""Random weights of a model that need no files, and what is alive of them."""

from __future__ import annotations

import weakref
import zlib

import torch
from torch import Tensor

from fp8_megatron.checkpoint.weights import Place


class CountedWeights:
    """Weights of given shapes, each drawn from its place.

    Attributes:
        most_bytes_alive: of all that were read, as many bytes at most had a reference at the same time.
    """

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.shapes = shapes
        self._bytes_alive = self.most_bytes_alive = 0

    def read(self, key: str, layer: int | None, expert: int | None = None) -> Tensor:
        """As `WeightReader.read`."""
        place = Place(key, layer, expert)
        shape = self.shapes[key][sum(index is not None for index in place[1:]) :]
        generator = torch.Generator().manual_seed(zlib.crc32(repr(place).encode()))
        value = torch.randn(shape, generator=generator).mul_(0.1 if len(shape) > 1 else 1.0)
        self._bytes_alive += value.nbytes
        self.most_bytes_alive = max(self.most_bytes_alive, self._bytes_alive)
        weakref.finalize(value.untyped_storage(), self._freed, value.nbytes)
        return value

    def _freed(self, nbytes: int) -> None:
        self._bytes_alive -= nbytes
