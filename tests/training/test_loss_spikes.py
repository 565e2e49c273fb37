"""The loss-spike guard: what is a spike, which casts it names, and how a run rolls back."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8_megatron.checkpoint.run_state import Progress
from fp8_megatron.config.io import parse_config
from fp8_megatron.reporting.cast_statistics import CastName, CastStatistics, HealthSample
from fp8_megatron.reporting.metrics_file import HEALTH_FILE, METRICS_FILE
from fp8_megatron.reporting.run_log import EVENTS_FILE, read_events
from fp8_megatron.training import train_step as train_step_module
from fp8_megatron.training import training_run
from fp8_megatron.training.batches import Batch
from fp8_megatron.training.loss_spikes import LossSpike, SpikeGuard, after_rollbacks, changed_casts
from fp8_megatron.training.run_data import RunData
from fp8_megatron.training.step_results import PendingStep, StepResult
from fp8_megatron.training.trainer import Trainer
from tests.harness.run_starts import A_RUN
from tests.harness.runs import tiny_flags
from tests.harness.token_files import write_token_files


def losses(count: int, seed: int, *, start: float = 4.0, slope: float = -0.002, noise: float = 0.03) -> list[float]:
    generator = random.Random(seed)
    return [start + slope * step + generator.gauss(0.0, noise) for step in range(count)]


@pytest.mark.parametrize("seed", range(5))
def test_noise_and_progress_are_no_spikes(seed: int) -> None:
    """Normal noise of 5,000 steps, a loss that falls fast at first, and steps that were skipped."""
    guard = SpikeGuard(10.0)
    falling = [11.0 * math.exp(-step / 20) + 3.0 for step in range(100)]
    values = falling + losses(5000, seed, start=3.0, slope=-1e-4)
    values[200] = math.nan
    assert [step for step, value in enumerate(values) if guard.update(value, 1.0)] == []


@pytest.mark.parametrize("size", [0.8, 5.0])
def test_a_jump_is_a_spike_with_its_size(size: float) -> None:
    """0.8 are 27 standard deviations of the noise. The estimate from 64 steps is within 40% of that."""
    guard = SpikeGuard(10.0)
    values = losses(200, 1, slope=0.0)
    values[150] += size
    spikes = {step: spike for step, value in enumerate(values) if (spike := guard.update(value, 1.0))}
    assert list(spikes) == [150]
    assert spikes[150].deviations == pytest.approx(size / 0.03, rel=0.4)
    assert spikes[150].usual == pytest.approx(4.0, abs=0.02)


def test_an_unusual_norm_asks_for_a_sample() -> None:
    guard = SpikeGuard(10.0)
    generator = random.Random(4)
    for value in losses(100, 4):
        guard.update(value, math.exp(generator.gauss(0.0, 0.2)))
    assert not guard.wants_sample
    assert guard.update(3.8, 50.0) is None and guard.wants_sample
    guard.sampled(HealthSample(101, ()))
    assert not guard.wants_sample


def cast(layer: int, **changed: Any) -> CastStatistics:
    healthy = CastStatistics(
        CastName(f"layers.{layer}.fc1", "input", "E4M3"), 0.0, 0.001, 31.5, 4.0, 0.9, 3.0, None, 0, 0, ()
    )
    return replace(healthy, **changed)


def test_the_casts_that_changed_most_are_named_first() -> None:
    before = [HealthSample(step, tuple(cast(layer) for layer in range(5))) for step in (1, 2, 3)]
    last = HealthSample(
        4,
        (
            cast(0, kurtosis=200.0),
            cast(1, snr_db=30.5),
            cast(2, snr_db=11.5, saturated=0.002),
            cast(3, saturated=0.25, amax_over_scale=40.0),
            cast(4, snr_db=None, kurtosis=None),
        ),
    )
    assert changed_casts(before, last) == [
        "layers.3.fc1 input (saturated 0 → 0.25)",
        "layers.2.fc1 input (SNR, dB 31.5 → 11.5)",
        "layers.0.fc1 input (kurtosis 3 → 200)",
    ]
    assert changed_casts(before, before[0]) == []


def write_events(folder: Path, *events: dict[str, Any]) -> None:
    lines = [json.dumps({"time": "2026-01-01", "text": "", **event}) + "\n" for event in events]
    (folder / EVENTS_FILE).write_text("".join(lines))


def test_where_a_resumed_run_goes_on(tmp_path: Path) -> None:
    at_20 = Progress(20, 200, 0)
    assert after_rollbacks(at_20, tmp_path, A_RUN) == at_20
    spike = {"kind": "spike", "iteration": 27, "consumed_samples": 270}
    write_events(tmp_path, {**spike, "rollback": False})
    assert after_rollbacks(at_20, tmp_path, A_RUN) == at_20
    write_events(tmp_path, {**spike, "rollback": True})
    assert after_rollbacks(at_20, tmp_path, A_RUN) == Progress(20, 270, left_out_samples=70)
    # Of a checkpoint after the rollback: its data begin behind the spike's.
    assert after_rollbacks(Progress(25, 320, 0), tmp_path, A_RUN) == Progress(25, 320, 0)
    assert after_rollbacks(Progress(30, 300, 0), tmp_path, A_RUN) == Progress(30, 300, 0)


def test_spikes_of_other_runs_move_no_data(tmp_path: Path) -> None:
    """A run whose spike was rolled back, and a fine-tuning of it that logs into the same folder."""
    spike = {"kind": "spike", "iteration": 27, "consumed_samples": 270, "rollback": True}
    write_events(tmp_path, {**spike, "run": "b" * 16}, {"kind": "start", "iteration": 0, "run": A_RUN})
    at_20 = Progress(20, 40, 0)
    assert after_rollbacks(at_20, tmp_path, A_RUN) == at_20
    assert after_rollbacks(at_20, tmp_path, "b" * 16) == Progress(20, 270, left_out_samples=230)


@pytest.fixture
def started_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Consumed samples at each start. Step 25 after the first of them reports a loss of 50."""
    starts: list[int] = []
    plain_loader, plain_result = RunData.train_loader, PendingStep.result

    def loader(data: RunData, consumed_samples: int, **settings: Any) -> Any:
        starts.append(consumed_samples)
        return plain_loader(data, consumed_samples, **settings)

    def result(step: PendingStep) -> StepResult:
        found = plain_result(step)
        if found.iteration == 25 and len(starts) == 1:
            found = replace(found, figures=replace(found.figures, loss=50.0))
        return found

    monkeypatch.setattr(RunData, "train_loader", loader)
    monkeypatch.setattr(training_run.PendingStep, "result", result)
    return starts


@pytest.fixture
def train_samples_read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The tokens of every sample that training takes."""
    samples: list[tuple[int, ...]] = []
    take_step = train_step_module.take_step

    def taken(*args: Any) -> list[Batch]:
        batches = take_step(*args)
        samples.extend(tuple(tokens.tolist()) for batch in batches for tokens in batch["tokens"])
        return batches

    monkeypatch.setattr(train_step_module, "take_step", taken)
    return samples


def rolling_back(folder: Path) -> dict[str, Any]:
    return {
        "train_iters": 30,
        "lr": 1e-3,
        "save": str(folder / "saved"),
        "load": str(folder / "saved"),
        "save_interval": 10,
        "fp8_health_interval": 5,
        "rollback_on_loss_spike": True,
    }


def test_a_run_rolls_back_and_leaves_the_data_out(tmp_path: Path, started_at: list[int]) -> None:
    """Step 25 reports a loss of 50. The run ends; its next start resumes at 20, after the samples of step 25."""
    flags = rolling_back(tmp_path)
    with pytest.raises(LossSpike, match=r"^iteration 25: loss 50.0000 is a spike, .* goes back to the last checkpoint"):
        Trainer(parse_config(tiny_flags(tmp_path, **flags))).fit()
    Trainer(parse_config(tiny_flags(tmp_path, **flags))).fit()
    assert started_at == [0, 50]
    steps = [json.loads(line) for line in (tmp_path / METRICS_FILE).read_text().splitlines()]
    assert [step["iteration"] for step in steps] == list(range(1, 31))
    assert [step["consumed_samples"] for step in steps[18:22]] == [38, 40, 52, 54]
    (spike,) = [event for event in read_events(tmp_path / EVENTS_FILE) if event["kind"] == "spike"]
    assert spike["iteration"] == 25 and spike["consumed_samples"] == 50 and spike["rollback"]
    samples = [json.loads(line)["iteration"] for line in (tmp_path / HEALTH_FILE).read_text().splitlines()]
    assert samples == [5, 10, 15, 20, 25, 30]


def test_a_spike_before_the_first_checkpoint_does_not_end_the_run(tmp_path: Path, started_at: list[int]) -> None:
    """A start from scratch would read the same data again, and end there again."""
    Trainer(parse_config(tiny_flags(tmp_path, **{**rolling_back(tmp_path), "save_interval": 28}))).fit()
    assert started_at == [0]
    (spike,) = [event for event in read_events(tmp_path / EVENTS_FILE) if event["kind"] == "spike"]
    assert spike["iteration"] == 25 and not spike["rollback"] and "no checkpoint of this run" in spike["text"]


@pytest.mark.parametrize("order", ["single", "cyclic"])
def test_a_rollback_leaves_out_its_own_data_alone(
    tmp_path: Path, started_at: list[int], train_samples_read: list[tuple[int, ...]], order: str
) -> None:
    """The order of 60 samples of two files is another than that of the 70 that are read, with those of the spike.

    Both files are read more than once.
    """
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        write_token_files(tmp_path / name, rng.integers(64, size=(20, 22)).tolist())
    own = {"mock_data": None, "vocab_size": 64, "tokenizer_type": "NullTokenizer", "split": "1,0,0"}
    blend = ["0.5", str(tmp_path / "a"), "0.5", str(tmp_path / "b")]
    data = {**own, "data_path": blend, "dataloader_type": order}
    flags = tiny_flags(tmp_path, **rolling_back(tmp_path), **data)
    with pytest.raises(LossSpike):
        Trainer(parse_config(flags)).fit()
    Trainer(parse_config(flags)).fit()
    assert started_at == [0, 50]
    trained = train_samples_read[:40] + train_samples_read[-20:]
    train_samples_read.clear()
    Trainer(parse_config(tiny_flags(tmp_path / "straight", train_iters=30, lr=1e-3, **data))).fit()
    assert len(set(train_samples_read)) == 60
    assert trained[:50] == train_samples_read[:40] + train_samples_read[50:]
    behind = trained[50:]
    assert behind == train_samples_read[:10] if order == "single" else set(behind) < set(train_samples_read)
