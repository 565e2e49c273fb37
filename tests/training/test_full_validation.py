"""--full-validation: every sample of the validation split once, whatever the batch, and a loss for each set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8_megatron.config.checks import ConfigError, check_config
from fp8_megatron.config.io import parse_config
from fp8_megatron.config.schema import DataConfig
from fp8_megatron.data.datasets import MaskedTail, build_validation_sets
from fp8_megatron.data.tokenizer import NullTokenizer
from fp8_megatron.reporting.metrics_file import METRICS_FILE, read_rows
from fp8_megatron.training.trainer import Trainer
from tests.harness.runs import tiny_flags
from tests.harness.token_files import write_token_files

#: Tokens of each sample.
SEQ = 16


def token_files(folder: Path, name: str, num_documents: int, seed: int) -> str:
    """Documents of 40 tokens, the last of which is their end token, 63."""
    rng = np.random.default_rng(seed)
    write_token_files(folder / name, [[*rng.integers(63, size=39).tolist(), 63] for _ in range(num_documents)])
    return str(folder / name)


def validations(folder: Path, **settings: Any) -> list[dict[str, Any]]:
    """The records of the validations of one step, in BF16."""
    common = {"mock_data": None, "tokenizer_type": "NullTokenizer", "precision": "bf16", "train_iters": 1}
    flags = tiny_flags(folder, **{**common, "eval_interval": 1, "full_validation": True, **settings})
    Trainer(parse_config(flags)).fit()
    return [record for record in read_rows(folder / METRICS_FILE) if record["kind"] == "eval"]


def test_every_sample_is_read_once(tmp_path: Path) -> None:
    """Of a blend too: 12 documents of 40 tokens are 480, so 479 // 16 samples, each other's continuation."""
    data = DataConfig(
        valid_data_path=(token_files(tmp_path, "a", 12, 1), token_files(tmp_path, "b", 7, 2)), train_data_path=("a",)
    )
    sets = build_validation_sets(data, seq_length=SEQ, seed=3, tokenizer=NullTokenizer(64))
    assert [len(one) for one in sets] == [479 // SEQ, 279 // SEQ]
    rows = [tuple(one[index]["tokens"].tolist()) for one in sets for index in range(len(one))]
    assert len(set(rows)) == len(rows)


def test_a_tail_counts_for_nothing(tmp_path: Path) -> None:
    data = DataConfig(valid_data_path=(token_files(tmp_path, "a", 12, 1),), train_data_path=("a",))
    (dataset,) = build_validation_sets(data, seq_length=SEQ, seed=3, tokenizer=NullTokenizer(64))
    tail = MaskedTail(dataset, len(dataset) + 3)
    assert len(tail) == len(dataset) + 3
    assert sum(tail[index]["loss_mask"].sum().item() for index in range(len(tail))) == SEQ * len(dataset)


def test_the_loss_does_not_depend_on_the_batch(tmp_path: Path) -> None:
    """29 samples by ones, in micro-batches of 3, and in steps of 4 × 2; masked ends of documents count nowhere.

    Without it the loss is that of the batches that are read. BF16 logits of one sample do not depend on its neighbours;
    sums of 464 losses in FP32 differ by 2^-24 √464 of them.
    """
    files = {"train_data_path": [token_files(tmp_path, "train", 20, 4)], "lr": 1e-9, "eod_mask_loss": True}
    files["valid_data_path"] = [token_files(tmp_path, "valid", 12, 5)]
    losses = []
    for name, micro, batch in (("ones", 1, 1), ("threes", 3, 3), ("steps", 2, 8)):
        settings = {"micro_batch_size": micro, "global_batch_size": batch, **files}
        (record,) = validations(tmp_path / name, **settings)
        assert record["split"] == "valid"
        losses.append(record["loss"])
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
    (part,) = validations(tmp_path / "part", full_validation=False, eval_iters=1, **{**files, "micro_batch_size": 2})
    assert abs(part["loss"] - losses[0]) > 1e-3


def test_each_set_has_a_loss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By its name, in the order of the files; together they are the whole split."""
    paths = [token_files(tmp_path, "a", 12, 5), token_files(tmp_path, "b", 30, 6)]
    files = {"train_data_path": [token_files(tmp_path, "train", 20, 4)], "valid_data_path": paths}
    sets = {"multiple_validation_sets": True, "validation_set_names": ["wiki", "code"]}
    records = validations(tmp_path / "sets", **files, **sets)
    assert [record["split"] for record in records] == ["valid-wiki", "valid-code"]
    caplog.clear()
    records += validations(tmp_path / "whole", **files)
    counts = [479 // SEQ, 1199 // SEQ]
    mean = sum(count * record["loss"] for count, record in zip(counts, records[:2], strict=True)) / sum(counts)
    assert records[2]["loss"] == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--mock-data --full-validation",
            "full_validation reads a validation split once, but random",
        ),
        (
            "--data-path a --full-validation --eval-interval 0",
            "full_validation(True) has no effect with eval_interval(0)",
        ),
        ("--data-path a --multiple-validation-sets", "multiple_validation_sets needs full_validation"),
        ("--data-path a --full-validation --multiple-validation-sets", "needs valid_data_path; give --valid-data-path"),
        (
            "--train-data-path a --valid-data-path 0.5 b 0.5 c --full-validation",
            "valid_data_path(0.5 b 0.5 c) has weights, but full_validation reads each file once",
        ),
        (
            "--train-data-path a --valid-data-path b c --full-validation --multiple-validation-sets "
            "--validation-set-names wiki",
            "validation_set_names(wiki) names 1, but valid_data_path has 2 files; give one name for each",
        ),
        (
            "--train-data-path a --valid-data-path b c --full-validation --multiple-validation-sets "
            "--validation-set-names wiki wiki",
            "validation_set_names(wiki wiki) has wiki twice; give each file a name of its own",
        ),
        ("--data-path a --validation-set-names wiki", "have no effect without multiple_validation_sets"),
    ],
)
def test_what_cannot_work_is_one_line(flags: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_config(parse_config(["--vocab-size", "64", "--tokenizer-type", "NullTokenizer", *flags.split()]), 1)
    assert message in str(error.value) and len(str(error.value).splitlines()) == 1
