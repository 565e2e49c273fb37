"""Small token files for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from fp8_megatron.data.tokenizer import NullTokenizer


def write_token_files(prefix: Path, documents: Sequence[Sequence[int]], dtype: type[np.number] = np.uint16) -> None:
    """Write documents (lists of token ids) as ``prefix.bin`` and ``prefix.idx`` with megatron-core's builder."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        builder.add_document(torch.tensor(document, dtype=torch.int64), [len(document)])
    builder.finalize(f"{prefix}.idx")


def blend_config(words: Sequence[str], cache: Path, *, seq_length: int, split: str) -> GPTDatasetConfig:
    """megatron-core's own configuration of a blend, ``weight prefix weight prefix …``, over 64 token ids."""
    return GPTDatasetConfig(
        random_seed=1234,
        sequence_length=seq_length,
        blend=([*words[1::2]], [float(weight) for weight in words[::2]]),
        split=split,
        path_to_cache=str(cache),
        tokenizer=NullTokenizer(64),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
