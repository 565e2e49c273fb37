"""Small token files for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder


def write_token_files(prefix: Path, documents: Sequence[Sequence[int]], dtype: type[np.number] = np.uint16) -> None:
    """Write documents (lists of token ids) as ``prefix.bin`` and ``prefix.idx`` with megatron-core's builder."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        builder.add_document(torch.tensor(document, dtype=torch.int64), [len(document)])
    builder.finalize(f"{prefix}.idx")
