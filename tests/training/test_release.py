"""A run whose linear weights are updated during backward: it trains, resumes bit for bit and ends when it diverges."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from fp8_megatron.config.io import parse_config
from fp8_megatron.reporting.metrics_file import METRICS_FILE, read_rows
from fp8_megatron.training import training_run
from fp8_megatron.training.stopping import TrainingDiverged
from fp8_megatron.training.trainer import Trainer
from tests.harness.runs import tiny_flags

RELEASE = {"release_gradients": True, "clip_grad": 0}
STRETCH = {"main_params_dtype": "split", "exp_avg_dtype": "int8", "exp_avg_sq_dtype": "uint8"}


def fit(output_dir: Path, **overrides: object) -> list[tuple[float, float]]:
    """(loss, gradient norm) of every step of the tiny run."""
    Trainer(parse_config(tiny_flags(output_dir, **overrides))).fit()
    return [(r["loss"], r["grad_norm"]) for r in read_rows(output_dir / METRICS_FILE) if r["kind"] == "train"]


def test_a_run_is_the_run_without_release(tmp_path: Path) -> None:
    """O3 rounds to nearest: the same losses, through warm-up, underflow counts and validation."""
    settings = {"train_iters": 8, "lr_warmup_iters": 3, "log_interval": 2, "eval_interval": 4, "eval_iters": 1}
    expected = fit(tmp_path / "stored", clip_grad=0, **settings)
    found = fit(tmp_path / "released", **RELEASE, **settings)
    assert [loss for loss, _ in found] == [loss for loss, _ in expected]
    assert [norm for _, norm in found] == pytest.approx([norm for _, norm in expected], rel=1e-5)


def test_resume_is_bitwise(tmp_path: Path) -> None:
    """12 steps straight equal 7 and 5 resumed, in the stretch form."""
    settings = {"train_iters": 12, "lr": 1e-3, **RELEASE, **STRETCH}
    straight = fit(tmp_path / "straight", **settings)
    checkpoints = tmp_path / "checkpoints"
    fit(tmp_path / "halves", save=checkpoints, exit_interval=7, **settings)
    assert fit(tmp_path / "halves", load=checkpoints, **settings) == straight
    table = (tmp_path / "halves" / "memory.txt").read_text()
    assert "│ released  │   0.000 │" in table


def test_non_finite_steps_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A NaN in the embedding makes every gradient NaN: nothing moves, and the limit ends the run and says where."""
    build = training_run.build_training_state
    states = []

    def poisoned(*args: object, **kwargs: object):  # type: ignore[no-untyped-def]
        state = build(*args, **kwargs)  # type: ignore[arg-type]
        space = next(s for s in state.optimizer.states if s.weight.payload.dtype == torch.bfloat16)
        space.weight.payload[:] = math.nan
        states.append(state)
        return state

    monkeypatch.setattr(training_run, "build_training_state", poisoned)
    with pytest.raises(TrainingDiverged, match="gradients with a NaN or inf on rank 0: "):
        fit(tmp_path, train_iters=20, max_skipped_steps=3, **RELEASE, **STRETCH)
    (state,) = states
    assert state.optimizer.step_count.item() == 0.0
