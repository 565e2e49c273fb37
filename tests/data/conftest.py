"""A tiny tokenizer, and token files made of given documents."""

import argparse
import inspect
import json.decoder
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from fp8_megatron.commands.train_tokenizer import train


@pytest.fixture(scope="session")
def python_source() -> str:
    return inspect.getsource(json.decoder)


@pytest.fixture(scope="session")
def tokenizer_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A BPE model of 600 tokens, of Python source."""
    path = tmp_path_factory.mktemp("tokenizer") / "tiny.model"
    path.write_bytes(train([inspect.getsource(argparse)], vocab_size=600, model_type="bpe", num_threads=1))
    return str(path)


@pytest.fixture
def write_tokens(tmp_path: Path) -> Callable[..., str]:
    """Write documents (lists of token ids) as a .bin/.idx pair with megatron-core's builder; the prefix."""

    def write(name: str, documents: Sequence[Sequence[int]], dtype: type[np.number] = np.uint16) -> str:
        prefix = str(tmp_path / name)
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
        for document in documents:
            builder.add_document(np.array(document, dtype=np.int64), [len(document)])
        builder.finalize(f"{prefix}.idx")
        return prefix

    return write
