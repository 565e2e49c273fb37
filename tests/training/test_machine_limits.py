"""A run that does not fit into its machine is refused before its model is built: disk and memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fp8_megatron import outputs
from fp8_megatron.checkpoint.files import CheckpointError
from fp8_megatron.config.io import parse_config
from fp8_megatron.config.schema import CheckpointConfig, Config, ModelConfig, ParallelConfig, TrainingConfig
from fp8_megatron.device.memory import memory_bytes
from fp8_megatron.errors import UserError
from fp8_megatron.planning.memory import predict_memory
from fp8_megatron.training import run_start, training_run
from fp8_megatron.training.run_start import check_disk, check_memory, starting_run
from fp8_megatron.training.trainer import Trainer
from tests.harness.run_starts import OneRank, add_checkpoint
from tests.harness.runs import tiny_flags

CPU = torch.device("cpu")

GB = 10**9


@pytest.mark.parametrize(
    ("free", "settings", "expected"),
    [
        (0.9 * GB, {}, "error"),
        (1.1 * GB, {}, None),
        (5.1 * GB, {"save_interval": 20}, None),
        (4.9 * GB, {"save_interval": 20}, "5 checkpoints"),
        (3.1 * GB, {"save_interval": 20, "keep_last": 2}, None),
        (2.9 * GB, {"save_interval": 20, "keep_last": 2}, "3 checkpoints"),
        (3.9 * GB, {"save_interval": 20, "save_retain_interval": 50}, "4 checkpoints"),
        (4.1 * GB, {"save_interval": 20, "save_retain_interval": 50}, None),
        (4.9 * GB, {"save_interval": 20, "keep_last": 50}, "5 checkpoints"),
        (2.1 * GB, {"save_interval": 20, "keep_last": 2, "load": "save"}, None),
        (1.9 * GB, {"save_interval": 20, "keep_last": 2, "load": "save"}, "2 checkpoints"),
    ],
)
def test_a_disk_without_room_is_found_at_the_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    free: float,
    settings: dict,
    expected: str | None,
) -> None:
    """Checkpoints of 1 GB and 100 steps; the resumed run has one of them, and 90 steps to go."""
    monkeypatch.setattr(run_start, "predict_checkpoint_bytes", lambda *_: GB)
    for module in (run_start, outputs):
        monkeypatch.setattr(module, "free_bytes", lambda _: int(free))
    if "load" in settings:
        add_checkpoint(tmp_path, 10)
        settings = {**settings, "load": str(tmp_path)}
    checkpoint = CheckpointConfig(save=str(tmp_path), **settings)
    config = Config(checkpoint=checkpoint, training=TrainingConfig(train_iters=100))
    with starting_run(checkpoint, OneRank()) as started:  # type: ignore[arg-type]
        if expected == "error":
            with pytest.raises(
                CheckpointError, match=rf"--save {tmp_path}: one checkpoint takes 1.000 GB, .* 0.900 GB"
            ):
                check_disk(config, started, OneRank(), 64)  # type: ignore[arg-type]
            return
        check_disk(config, started, OneRank(), 64)  # type: ignore[arg-type]
    warned = [line for line in caplog.messages if "are to come" in line]
    assert len(warned) == (expected is not None)
    assert not warned or f"{expected} of 1.000 GB are to come" in warned[0]


@pytest.mark.parametrize(("num_ranks", "num_stages"), [(1, 1), (4, 2)])
def test_memory_is_compared_with_what_the_state_takes(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int, num_stages: int
) -> None:
    """The ranks of a machine without a GPU share its memory; one byte less than they need is too little."""
    model = ModelConfig(num_layers=4, hidden_size=64, num_attention_heads=4, seq_length=32)
    config = Config(model=model, parallel=ParallelConfig(pipeline_model_parallel_size=num_stages))
    config = replace(config, training=TrainingConfig(micro_batch_size=1, global_batch_size=num_ranks))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_ranks))
    topology = OneRank()
    topology.world_size = num_ranks
    monkeypatch.setattr(run_start.Ranks, "everyones", lambda self, value: [None, value])
    held = [predict_memory(config, 512, world_size=num_ranks, stage=stage) for stage in range(num_stages)]
    needed = sum(part.linear.total + part.rest.total for part in held) * (num_ranks // num_stages)
    monkeypatch.setattr(run_start, "memory_bytes", lambda device: needed)
    check_memory(config, topology, CPU, 512)  # type: ignore[arg-type]
    monkeypatch.setattr(run_start, "memory_bytes", lambda device: needed - 1)
    with pytest.raises(
        UserError, match=r"take 0\.\d+ GB on .*; lower num_layers\(4\).* or use a machine with more memory$"
    ):
        check_memory(config, topology, CPU, 512)  # type: ignore[arg-type]


def test_a_model_beyond_the_machine_is_refused_before_it_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor is the configuration printed."""
    monkeypatch.setattr(training_run, "build_training_state", None)
    caplog.set_level("INFO")
    flags = tiny_flags(tmp_path, num_layers=100_000, hidden_size=8192, num_attention_heads=64)
    with pytest.raises(UserError, match=r"GB on this machine, which has .*; lower num_layers\(100000\), hidden_size"):
        Trainer(parse_config(flags)).fit()
    assert not any("configuration" in line for line in caplog.messages)


def test_the_memory_of_a_machine_ends_at_the_limit_of_its_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fp8_megatron.device.memory._CONTROL_GROUP_LIMITS", (str(tmp_path / "max"),))
    whole = memory_bytes(CPU)
    for text, expected in (("max\n", whole), (f"{10**8}\n", 10**8), (f"{2**63}\n", whole)):
        (tmp_path / "max").write_text(text)
        assert memory_bytes(CPU) == expected
    with Path("/proc/meminfo").open() as file:
        assert whole // 1024 == int(file.readline().split()[1])
