"""Where documents start in a micro-batch, for attention that stays within them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import UserError

#: Key of a batch that has documents.
CU_SEQLENS = "cu_seqlens"
#: Tokens of a micro-batch for each document that a recorded step has room for.
TOKENS_PER_RECORDED_DOCUMENT = 128


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
            UserError: there are more documents than room.
        """
        batch, seq = tokens.shape
        starts = torch.zeros(batch, seq, dtype=torch.bool)
        starts[:, 0] = True
        starts[:, 1:] = tokens[:, :-1] == self.eod
        found = starts.view(-1).nonzero().view(-1)
        if self.room is not None and len(found) > self.room:
            raise UserError(
                f"a micro-batch has {len(found)} documents, and a recorded step has room for {self.room} (one for "
                f"{TOKENS_PER_RECORDED_DOCUMENT} tokens and one a sequence); give --cuda-graph-impl none"
            )
        bounds = torch.full(((self.room or len(found)) + 1,), batch * seq, dtype=torch.int32)
        bounds[: len(found)] = found
        return bounds


def recorded_room(micro_batch_size: int, seq_length: int) -> int:
    """Documents of a micro-batch that a recorded step has room for: one for each 128 tokens, and one more a sequence.

    FlashAttention's backward adds 128 rows of FP32 gradients for each document, so this room doubles them.
    """
    return micro_batch_size * (seq_length // TOKENS_PER_RECORDED_DOCUMENT + 1)
