"""Where documents start in a micro-batch, for attention that stays within them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..errors import UserError

#: Key of a batch that has documents.
CU_SEQLENS = "cu_seqlens"


@dataclass(frozen=True)
class DocumentBounds:
    """Finds the documents of a micro-batch. The token that ends a document belongs to it, as in Megatron.

    Attributes:
        eod: the token that ends a document.
        room: documents of a micro-batch, where all results have one shape; None: as many as there are.
    """

    eod: int
    room: int | None = None

    def of(self, tokens: Tensor) -> Tensor:
        """Cumulative lengths of the documents in `tokens` int64 [b, s], as `nn.masked_attention` takes them.

        A document ends with its sequence. Free room is filled with documents without tokens.

        Returns:
            int32 [n + 1], n the number of documents, or [room + 1].

        Raises:
            UserError: there are more documents than room. The text has its end token inside of documents.
        """
        batch, seq = tokens.shape
        starts = torch.zeros(batch, seq, dtype=torch.bool)
        starts[:, 0] = True
        starts[:, 1:] = tokens[:, :-1] == self.eod
        found = starts.view(-1).nonzero().view(-1)
        if self.room is not None and len(found) > self.room:
            raise UserError(
                f"a micro-batch has {len(found)} documents, and its recorded step has room for {self.room}, as the "
                f"token files have no more in a sequence: token {self.eod} ends a document and is in its text too; "
                f"prepare the files anew, or give --cuda-graph-impl none"
            )
        bounds = torch.full(((self.room or len(found)) + 1,), batch * seq, dtype=torch.int32)
        bounds[: len(found)] = found
        return bounds


def most_documents(dataset: Dataset) -> int:
    """How many documents the sample of a GPTDataset, or of a blend of them, has that has the most.

    It reads the whole index of samples, 8 bytes a sample.
    """
    parts = getattr(dataset, "datasets", [dataset])
    # An entry is a document and a token in it; a sample ends with the next sample's first token.
    return max(int(np.diff(part.sample_index[:, 0]).max()) + 1 for part in parts)
