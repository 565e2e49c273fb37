"""Which tokens of a sequence a rank has that shares the sequence with others (context parallelism).

A sequence is cut into 2n chunks for n ranks, and rank r has chunks r and 2n - 1 - r. Under a causal mask every rank
then has the same work, because an early chunk attends to few tokens and its partner to many.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: A batch's unmasked tokens over all ranks that share its sequences, FP32 [1].
NUM_TOKENS = "num_tokens"


@dataclass(frozen=True)
class SequencePart:
    """The part of each sequence that rank `rank` of `size` ranks has."""

    rank: int = 0
    size: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether no other rank has tokens of the same sequence."""
        return self.size == 1

    def of(self, x: Tensor, *, dim: int) -> Tensor:
        """This rank's tokens of `x`, whose dimension `dim` is the whole sequence; contiguous.

        Raises:
            ValueError: 2 · size does not divide the sequence.
        """
        if self.is_whole:
            return x
        length = x.shape[dim]
        chunk, rest = divmod(length, 2 * self.size)
        if rest:
            raise ValueError(f"a sequence of {length} tokens has no 2 × {self.size} even chunks")
        places = (self.rank, 2 * self.size - 1 - self.rank)
        return torch.cat([x.narrow(dim, place * chunk, chunk) for place in places], dim=dim)
