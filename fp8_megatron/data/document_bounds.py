"""Where documents start in a micro-batch, and which part of a sequence a rank has.

Attention under --reset-attention-mask stays within documents. Under context parallelism n ranks share a sequence. It is
cut into 2n chunks, and rank r has chunks r and 2n - 1 - r. Under a causal mask every rank then has the same work: an
early chunk attends to few tokens and its partner to many.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..errors import UserError

#: A batch's unmasked tokens over all ranks that share its sequences, FP32 [1].
NUM_TOKENS = "num_tokens"


#: Key of a batch that has documents.
CU_SEQLENS = "cu_seqlens"


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


class Bounds(ABC):
    """Finds the documents of a micro-batch.

    Attributes:
        key: the tensor of a batch that tells where they start.
        capacity: documents of a micro-batch, where all results have one shape; None: as many as there are.
    """

    key: ClassVar[str]
    capacity: int | None

    def of(self, values: Tensor) -> Tensor:
        """Cumulative lengths of the documents in `values` int64 [b, s], as `nn.masked_attention` takes them.

        A document ends with its sequence. The rest is filled with documents without tokens.

        Returns:
            int32 [n + 1], n the number of documents, or [capacity + 1].

        Raises:
            UserError: there are more documents than capacity.
        """
        starts = self._starts(values)
        starts[:, 0] = True
        found = starts.view(-1).nonzero().view(-1)
        if self.capacity is not None and len(found) > self.capacity:
            raise UserError(self._too_many(len(found)))
        bounds = torch.full(((self.capacity or len(found)) + 1,), values.numel(), dtype=torch.int32)
        bounds[: len(found)] = found
        return bounds

    @abstractmethod
    def _starts(self, values: Tensor) -> Tensor:
        """Bool [b, s]: where a document starts, but for the first of each sequence."""

    @abstractmethod
    def _too_many(self, number: int) -> str:
        """The error of more documents than capacity."""


@dataclass(frozen=True)
class DocumentBounds(Bounds):
    """Finds documents by their end token, which belongs to them, as in Megatron.

    Attributes:
        eod: the token that ends a document.
        capacity: see `Bounds`.
    """

    key: ClassVar[str] = "tokens"
    eod: int
    capacity: int | None = None

    def _starts(self, values: Tensor) -> Tensor:
        starts = torch.zeros(values.shape, dtype=torch.bool)
        starts[:, 1:] = values[:, :-1] == self.eod
        return starts

    def _too_many(self, number: int) -> str:
        return (
            f"a micro-batch has {number} documents, and its recorded step has room for {self.capacity}, as the "
            f"token files have no more in a sequence: token {self.eod} ends a document and is in its text too; "
            f"prepare the files anew, or give --cuda-graph-impl none"
        )


@dataclass(frozen=True)
class PositionBounds(Bounds):
    """Finds documents by their first position, 0.

    Attributes:
        capacity: see `Bounds`.
    """

    key: ClassVar[str] = "position_ids"
    capacity: int | None = None

    def _starts(self, values: Tensor) -> Tensor:
        return values == 0

    def _too_many(self, number: int) -> str:
        return (
            f"a micro-batch has {number} conversations, and its recorded step has room for {self.capacity}; give "
            f"--cuda-graph-impl none"
        )


def most_documents(dataset: Dataset) -> int:
    """How many documents the sample of a GPTDataset, or of a blend of them, has that has the most.

    It reads the whole index of samples, 8 bytes a sample.
    """
    parts = getattr(dataset, "datasets", [dataset])
    # An entry is a document and a token in it; a sample ends with the next sample's first token.
    return max(int(np.diff(part.sample_index[:, 0]).max()) + 1 for part in parts)
