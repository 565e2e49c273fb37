"""--reset-attention-mask: documents of a sample are what they are alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fp8_megatron.config.io import parse_config
from fp8_megatron.data.document_bounds import CU_SEQLENS
from fp8_megatron.mcore.runtime import runtime
from fp8_megatron.mcore.topology import initialized
from fp8_megatron.reporting.metrics_file import METRICS_FILE, read_rows
from fp8_megatron.training.graph_choice import choose_graph, documents_fit
from fp8_megatron.training.run_data import open_run_data
from fp8_megatron.training.trainer import Trainer
from tests.harness.runs import tiny_flags
from tests.harness.token_files import write_token_files

EOD = 63
#: Tokens of a document with its end.
LENGTH = 8


def loss(folder: Path, **settings: Any) -> float:
    """The mean loss of a validation in BF16. The text is one document, over and over; training moves nothing."""
    folder.mkdir()
    document = [*np.random.default_rng(1).integers(EOD, size=LENGTH - 1).tolist(), EOD]
    write_token_files(folder / "text", [document] * 60)
    fixed = {"mock_data": None, "tokenizer_type": "NullTokenizer", "precision": "bf16", "lr": 1e-9, "train_iters": 1}
    text = {"train_data_path": [str(folder / "text")], "valid_data_path": [str(folder / "text")]}
    both = {"eod_mask_loss": True, "reset_position_ids": True, "max_position_embeddings": 2 * LENGTH}
    flags = tiny_flags(folder, **{**fixed, **text, **both, "eval_interval": 1, "eval_iters": 2, **settings})
    Trainer(parse_config(flags)).fit()
    (record,) = (record for record in read_rows(folder / METRICS_FILE) if record["kind"] == "eval")
    return record["loss"]


@pytest.mark.parametrize("window", [None, "3,0"])
def test_two_documents_of_a_sample_are_two_samples(tmp_path: Path, window: str | None) -> None:
    """The same tokens at the same positions: only BF16 GEMMs of other shapes could round a logit otherwise."""
    packed = {"seq_length": 2 * LENGTH, "window_size": window, "init_method_std": 0.3}
    alone = loss(tmp_path / "alone", **{**packed, "seq_length": LENGTH})
    assert loss(tmp_path / "packed", reset_attention_mask=True, **packed) == pytest.approx(alone, rel=1e-4)
    assert abs(loss(tmp_path / "crossed", **packed) / alone - 1) > 1e-2


def test_few_documents_are_recorded_by_default(caplog: pytest.LogCaptureFixture) -> None:
    """Up to one in 128 tokens, and one more a sequence."""
    words = "--train-data-path a --valid-data-path b --tokenizer-type NullTokenizer --vocab-size 64 --seq-length 2048"
    config = parse_config([*words.split(), "--reset-attention-mask", "--micro-batch-size", "4"])
    assert choose_graph(config, has_gpu=True, world_size=1, node_size=1).records
    assert documents_fit(config, None) and documents_fit(config, 68)
    with caplog.at_level("INFO"):
        assert not documents_fit(config, 69)
    assert "may have 69 documents" in caplog.text and "up to 68; --cuda-graph-impl local" in caplog.text
    local = replace(config, training=replace(config.training, cuda_graph_impl="local"))
    assert documents_fit(local, 5000)


def test_a_recorded_runs_batches_have_one_shape(tmp_path: Path) -> None:
    lengths = np.random.default_rng(1).integers(2, 12, size=60)
    write_token_files(tmp_path / "text", [[1] * (length - 1) + [EOD] for length in lengths.tolist()])
    text = {"mock_data": None, "tokenizer_type": "NullTokenizer", "data_path": [str(tmp_path / "text")]}
    flags = tiny_flags(tmp_path, **{**text, "split": "1,0,0", "reset_attention_mask": True, "train_iters": 10})
    config = parse_config(flags)
    with runtime(torch.device("cpu")), initialized(config.parallel, 2, torch.device("cpu")) as topology:
        data = open_run_data(config, topology)
        shapes = [
            {len(batch[CU_SEQLENS]) for batch in data.train_loader(0, records=records)} for records in (True, False)
        ]
        most = data.most_documents()
    assert most is not None and shapes[0] == {most + 1} and len(shapes[1]) > 1 and max(shapes[1]) <= most + 1
