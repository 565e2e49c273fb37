"""--reset-attention-mask: documents of a sample are what they are alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8_megatron.config.io import parse_config
from fp8_megatron.config.schema import Config
from fp8_megatron.reporting.metrics_file import METRICS_FILE, read_records
from fp8_megatron.training.graph_choice import choose_graph
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
    (record,) = (record for record in read_records(folder / METRICS_FILE) if record["kind"] == "eval")
    return record["loss"]


@pytest.mark.parametrize("window", [None, "3,0"])
def test_two_documents_of_a_sample_are_two_samples(tmp_path: Path, window: str | None) -> None:
    """The same tokens at the same positions: only BF16 GEMMs of other shapes could round a logit otherwise."""
    packed = {"seq_length": 2 * LENGTH, "window_size": window, "init_method_std": 0.3}
    alone = loss(tmp_path / "alone", **{**packed, "seq_length": LENGTH})
    assert loss(tmp_path / "packed", reset_attention_mask=True, **packed) == pytest.approx(alone, rel=1e-4)
    assert abs(loss(tmp_path / "crossed", **packed) / alone - 1) > 1e-2


def recorded(*flags: str) -> Config:
    words = (
        "--train-data-path a --valid-data-path b --tokenizer-type NullTokenizer --vocab-size 64 --reset-attention-mask"
    )
    return parse_config([*words.split(), *flags])


def test_documents_are_recorded_only_on_demand() -> None:
    """A recorded step has limited room for them."""
    settings = {"has_gpu": True, "world_size": 1, "node_size": 1}
    choice = choose_graph(recorded(), **settings)
    assert not choice.records and "limited room" in choice.reason
    assert choose_graph(recorded("--cuda-graph-impl", "local"), **settings).records
