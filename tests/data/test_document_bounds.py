"""Cumulative lengths of a micro-batch's documents."""

from __future__ import annotations

import pytest
import torch

from fp8_megatron.data.document_bounds import CU_SEQLENS, DocumentBounds, recorded_room
from fp8_megatron.data.loader import build_loader
from fp8_megatron.errors import UserError

EOD = 9
#: Ends inside, two in a row, at the start; none; at the end of a sequence, which ends the document anyway.
TOKENS = torch.tensor([[9, 1, 2, 9, 9, 3], [1, 2, 3, 4, 5, 6], [1, 9, 2, 3, 4, 9]])


def test_a_document_ends_with_its_token_and_with_its_sequence() -> None:
    assert DocumentBounds(EOD).of(TOKENS).tolist() == [0, 1, 4, 5, 6, 12, 14, 18]
    padded = DocumentBounds(EOD, room=9).of(TOKENS)
    assert padded.tolist() == [0, 1, 4, 5, 6, 12, 14, 18, 18, 18] and padded.dtype == torch.int32


def test_more_documents_than_room_are_an_error() -> None:
    assert DocumentBounds(EOD, room=7).of(TOKENS).tolist() == [0, 1, 4, 5, 6, 12, 14, 18]
    with pytest.raises(UserError, match=r"has 7 documents, .* has room for 6 .*; give --cuda-graph-impl none"):
        DocumentBounds(EOD, room=6).of(TOKENS)


def test_every_sequence_has_room() -> None:
    """Also for documents of 128 tokens that it cuts at both ends."""
    assert recorded_room(4, 2048) == 68 and recorded_room(4, 16) == 4 and recorded_room(1, 100) == 1


@pytest.mark.parametrize("documents", [None, DocumentBounds(EOD, room=8)])
def test_batches_have_their_documents(documents: DocumentBounds | None) -> None:
    zeros = torch.zeros(6)
    samples = [{"tokens": row, "labels": row, "loss_mask": zeros, "position_ids": row} for row in TOKENS]
    loader = build_loader(
        samples,  # type: ignore[arg-type]
        micro_batch_size=3,
        data_parallel_rank=0,
        data_parallel_size=1,
        documents=documents,
    )
    batch = next(loader)
    assert (batch.get(CU_SEQLENS) is None) == (documents is None)
    if documents is not None:
        assert torch.equal(batch[CU_SEQLENS], documents.of(TOKENS))
