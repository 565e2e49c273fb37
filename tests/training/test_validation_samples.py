"""Which samples a validation reads: Megatron's, or with --eval-fixed-samples always the first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset

from fp8_megatron.checkpoint.run_state import Progress
from fp8_megatron.config.io import parse_config
from fp8_megatron.data.splits import process_group
from fp8_megatron.mcore.runtime import runtime
from fp8_megatron.mcore.topology import initialized
from fp8_megatron.training import evaluation
from fp8_megatron.training.run_data import open_run_data
from fp8_megatron.training.stopping import StopReason
from fp8_megatron.training.trainer import Trainer
from tests.harness.runs import tiny_flags
from tests.harness.token_files import blend_config, write_token_files

BATCH, EVAL_ITERS, SEQ_LENGTH = 4, 2, 16
SCRIPT = {
    "mock_data": None,
    "tokenizer_type": "NullTokenizer",
    "split": "60,40,0",
    "global_batch_size": BATCH,
    "train_iters": 8,
    "eval_interval": 3,
    "eval_iters": EVAL_ITERS,
}
Rows = list[list[int]]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Rows]:
    """Fills with the tokens of each evaluation from here on."""
    evaluated: list[Rows] = []

    def evaluate(state: Any, loader: Iterator[Any], num_batches: int, **settings: Any) -> Any:
        num_micro_batches = state.config.eval_global_batch_size(1) // state.samples_per_micro_batch
        taken = [next(loader) for _ in range(num_batches * num_micro_batches)]
        evaluated.append([row for batch in taken for row in batch["tokens"].tolist()])
        return plain(state, iter(taken), num_batches, **settings)

    plain = evaluation.evaluate
    monkeypatch.setattr(evaluation, "evaluate", evaluate)
    return evaluated


def blend(folder: Path) -> list[str]:
    """Two token files, as words of --data-path."""
    rng = np.random.default_rng(5)
    for name in ("a", "b"):
        documents = [rng.integers(63, size=rng.integers(5, 90)).tolist() for _ in range(60)]
        write_token_files(folder / name, documents)
    return ["0.3", str(folder / "a"), "0.7", str(folder / "b")]


def megatrons(words: list[str], cache: Path, *, num_evaluations: int, batch: int = BATCH) -> list[Rows]:
    """Validation samples of each evaluation in Megatron: its `get_train_valid_test_num_samples`, one iterator."""
    config = blend_config(words, cache, seq_length=SEQ_LENGTH, split="60,40,0")
    each = EVAL_ITERS * batch
    sizes = [8 * BATCH, (8 // 3 + 1) * each, 0]
    with process_group():
        valid = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[1]
    rows = [valid[index]["tokens"].tolist() for index in range(num_evaluations * each)]
    return [rows[start : start + each] for start in range(0, len(rows), each)]


def fit(folder: Path, **settings: Any) -> None:
    Trainer(parse_config(tiny_flags(folder, **{**SCRIPT, **settings}))).fit()


def test_each_validation_reads_megatrons_next_samples(tmp_path: Path, seen: list[Rows]) -> None:
    """After steps 3, 6 and 8 of a blend, straight and resumed between them and at one."""
    words = blend(tmp_path)
    expected = megatrons(words, tmp_path / "megatrons", num_evaluations=3)
    fit(tmp_path / "straight", data_path=words)
    assert seen == expected
    for halt in (3, 4):
        folder = tmp_path / str(halt)
        seen.clear()
        fit(folder, data_path=words, save=folder / "saved", exit_interval=halt)
        fit(folder, data_path=words, save=folder / "saved", load=folder / "saved")
        assert seen == expected, halt


def test_a_validation_may_have_a_batch_of_its_own(tmp_path: Path, seen: list[Rows]) -> None:
    words = blend(tmp_path)
    fit(tmp_path / "run", data_path=words, eval_global_batch_size=2 * BATCH)
    assert seen == megatrons(words, tmp_path / "megatrons", num_evaluations=3, batch=2 * BATCH)


def test_fixed_samples_are_the_first_of_their_own(tmp_path: Path, seen: list[Rows]) -> None:
    """Those that --skip-train reads."""
    words = blend(tmp_path)
    fit(tmp_path / "run", data_path=words, eval_fixed_samples=True, save=tmp_path / "saved")
    assert seen[0] == seen[1] == seen[2]
    first, seen[:] = seen[0], []
    fit(tmp_path / "run", data_path=words, load=tmp_path / "saved", skip_train=True)
    assert seen == [first]


def test_a_validation_that_is_given_up_moves_on(
    tmp_path: Path, seen: list[Rows], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the resumed run's losses are those of one that nobody interrupted."""
    data = {"data_path": blend(tmp_path), "train_iters": 6}
    fit(tmp_path / "straight", **data)
    straight, seen[:] = list(seen), []
    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "evaluate", lambda *_words, **_names: (0.0, StopReason.SIGNAL))
        fit(tmp_path / "run", save=tmp_path / "saved", **data)
    fit(tmp_path / "run", save=tmp_path / "saved", load=tmp_path / "saved", **data)
    assert seen == straight[1:]


@pytest.mark.parametrize(
    ("settings", "progress", "expected"),
    [
        ({}, Progress(7, 28), 2 * EVAL_ITERS * BATCH),  # nothing saved: those of steps 3 and 6
        ({}, Progress(7, 28, consumed_valid_samples=40), 40),
        ({"train_iters": None, "train_samples": 40}, Progress(7, 28), 0),
        ({"eval_interval": 0}, Progress(7, 28), 0),
        ({"eval_fixed_samples": True}, Progress(7, 28), 0),
    ],
)
def test_where_a_resumed_run_goes_on(settings: dict[str, Any], progress: Progress, expected: int) -> None:
    """Megatron's rule for checkpoints that do not say it (`build_train_valid_test_data_loaders`)."""
    mock = {"mock_data": True, "tokenizer_type": None, "split": None}
    config = parse_config(tiny_flags(Path("unused"), **{**SCRIPT, **mock, **settings}))
    device = torch.device("cpu")
    with runtime(device), initialized(config.parallel, config.model.num_layers, device) as topology:
        data = open_run_data(config, topology)
        assert data.validated_samples(progress) == expected
        for one in data.evaluations("valid", consumed_samples=10**6):  # more than there are: it starts over
            assert len([next(one.loader) for _ in range(one.num_batches * 2)]) == 2 * EVAL_ITERS
