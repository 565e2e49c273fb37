"""Cumulative lengths of a micro-batch's documents."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fp8_megatron.config.schema import DataConfig
from fp8_megatron.data.datasets import build_datasets
from fp8_megatron.data.document_bounds import CU_SEQLENS, DocumentBounds, SequencePart, most_documents
from fp8_megatron.data.loader import build_loader
from fp8_megatron.data.tokenizer import NullTokenizer
from fp8_megatron.errors import UserError
from tests.harness.token_files import write_token_files

EOD = 9
#: Ends inside, two in a row, at the start; none; at the end of a sequence, which ends the document anyway.
TOKENS = torch.tensor([[9, 1, 2, 9, 9, 3], [1, 2, 3, 4, 5, 6], [1, 9, 2, 3, 4, 9]])


def test_a_document_ends_with_its_token_and_with_its_sequence() -> None:
    assert DocumentBounds(EOD).of(TOKENS).tolist() == [0, 1, 4, 5, 6, 12, 14, 18]
    padded = DocumentBounds(EOD, capacity=9).of(TOKENS)
    assert padded.tolist() == [0, 1, 4, 5, 6, 12, 14, 18, 18, 18] and padded.dtype == torch.int32


def test_more_documents_than_room_are_an_error() -> None:
    assert DocumentBounds(EOD, capacity=7).of(TOKENS).tolist() == [0, 1, 4, 5, 6, 12, 14, 18]
    with pytest.raises(UserError, match=r"has 7 documents, .* has room for 6, .*token 9 ends .*--cuda-graph-impl none"):
        DocumentBounds(EOD, capacity=6).of(TOKENS)


def test_no_sample_has_more_documents_than_its_index_says(tmp_path: Path) -> None:
    """One file, and a blend; documents of 1 to 9 tokens with their ends."""
    rng = np.random.default_rng(1)
    for name in ("a", "b"):
        lengths = rng.integers(1, 10 if name == "a" else 4, size=200)
        write_token_files(tmp_path / name, [[*rng.integers(EOD, size=length - 1).tolist(), EOD] for length in lengths])
    found = {}
    for words in (("a",), ("b",), ("0.5", "a", "0.5", "b")):
        data = DataConfig(
            data_path=tuple(str(tmp_path / word) if word in "ab" else word for word in words), split="1,0,0"
        )
        tokenizer = NullTokenizer(EOD + 1)
        sizes = {"num_train_samples": 60, "num_valid_samples": 0, "num_test_samples": 0}
        dataset = build_datasets(data, seq_length=16, seed=3, tokenizer=tokenizer, **sizes).train
        assert dataset is not None
        samples = torch.stack([dataset[index]["tokens"] for index in range(60)])
        most = max(len(DocumentBounds(EOD).of(sample[None])) - 1 for sample in samples)
        found[words] = most_documents(dataset)
        assert most <= found[words] <= most + 2
        DocumentBounds(EOD, capacity=60 * found[words]).of(samples)
    assert found["a",] < found["b",] == max(found.values())


@pytest.mark.parametrize("part", [None, SequencePart(1, 3)])
@pytest.mark.parametrize("documents", [None, DocumentBounds(EOD, capacity=8)])
def test_batches_have_their_documents(documents: DocumentBounds | None, part: SequencePart | None) -> None:
    """Of whole sequences, where ranks share them too."""
    zeros = torch.zeros(6)
    samples = [{"tokens": row, "labels": row, "loss_mask": zeros, "position_ids": row} for row in TOKENS]
    loader = build_loader(
        samples,  # type: ignore[arg-type]
        micro_batch_size=3,
        data_parallel_rank=0,
        data_parallel_size=1,
        documents=documents,
        part=part,
    )
    batch = next(loader)
    assert batch["tokens"].shape == (3, 6 if part is None else 2)
    assert (batch.get(CU_SEQLENS) is None) == (documents is None)
    if documents is not None:
        assert torch.equal(batch[CU_SEQLENS], documents.of(TOKENS))
