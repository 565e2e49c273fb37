"""The trainer end to end on one CPU rank, with a model of a few thousand parameters."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8_megatron.checkpoint import saving
from fp8_megatron.checkpoint.files import CheckpointError, saved_iterations
from fp8_megatron.config.io import parse_config
from fp8_megatron.device.device import UnsupportedDeviceError
from fp8_megatron.reporting.metrics_file import METRICS_FILE, read_rows
from fp8_megatron.reporting.run_log import EVENTS_FILE, read_events
from fp8_megatron.reporting.step_figures import StepFigures
from fp8_megatron.training import train_step as train_step_module
from fp8_megatron.training import trainer as trainer_module
from fp8_megatron.training import training_run
from fp8_megatron.training.run_report import log_settings
from fp8_megatron.training.stopping import TrainingDiverged
from fp8_megatron.training.trainer import Trainer
from tests.harness.runs import LLAMA_STYLE_FLAGS, tiny_flags
from tests.harness.token_files import write_token_files


def fit(output_dir: Path, **overrides: object) -> list[dict]:
    """Train the tiny run; the records of its metrics.jsonl."""
    Trainer(parse_config(tiny_flags(output_dir, **overrides))).fit()
    return read_rows(output_dir / METRICS_FILE)


def steps(records: list[dict]) -> list[tuple[int, float, float]]:
    """(iteration, loss, gradient norm) of every training step."""
    return [(r["iteration"], r["loss"], r["grad_norm"]) for r in records if r["kind"] == "train"]


MXFP8: tuple[str, str, dict[str, Any]] = ("fp8", "O3", {"fp8_recipe": "mxfp8"})
#: Its heads are wider than the model; they take more steps to learn.
FP8_ATTENTION = {"fp8_recipe": "delayed", "fp8_dot_product_attention": True, "kv_channels": 128, "train_iters": 100}


@pytest.mark.parametrize(
    ("precision", "level", "others"),
    [("bf16", "O3", {}), ("fp16", "O3", {}), ("fp8", "O1", {}), ("fp8", "O3", {}), ("fp8", "O3", FP8_ATTENTION), MXFP8],
    ids=["bf16", "fp16", "fp8-O1", "fp8-O3", "fp8-attention", "mxfp8"],
)
@pytest.mark.parametrize("style", ["gpt", "llama"])
def test_every_level_and_style_learns(
    tmp_path: Path, precision: str, level: str, others: dict[str, Any], style: str
) -> None:
    """Documents that count upwards: the next token follows from the last, and 30 or 100 steps learn most of it.

    Without an update the loss stays at ln(64) = 4.16.
    """
    write_token_files(tmp_path / "tokens", [list(range(start, 60)) for start in range(20)])
    llama = {**LLAMA_STYLE_FLAGS, "ffn_hidden_size": 64, "num_query_groups": 1}
    records = fit(
        tmp_path,
        precision=precision,
        opt_level=level,
        mock_data=None,
        data_path=[tmp_path / "tokens"],
        tokenizer_type="NullTokenizer",
        split="100,0,0",
        **(llama if style == "llama" else {}),
        **{"train_iters": 30, **others},
    )
    losses = [loss for _, loss, _ in steps(records)]
    assert len(losses) == others.get("train_iters", 30)
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[0] > 4.0
    assert sum(losses[-5:]) / 5 < 3.0


def test_an_overflowing_loss_scale_falls_until_it_fits(tmp_path: Path) -> None:
    """2^40 overflows FP16: it halves at each step but the first, which hysteresis forgives; then training starts. A
    resumed run goes on with the same scale."""
    settings = {"precision": "fp16", "initial_loss_scale": 2.0**40, "max_skipped_steps": 40}
    records = [r for r in fit(tmp_path, train_iters=40, save=tmp_path / "saved", **settings) if r["kind"] == "train"]
    scales = [r["loss_scale"] for r in records]
    assert scales[:3] == [2.0**40, 2.0**39, 2.0**38]
    skipped = records[-1]["skipped_steps"]
    assert 10 < skipped < 39 and scales[-1] == 2.0 ** (41 - skipped)
    assert all(math.isfinite(r["grad_norm"]) for r in records[skipped:])
    more = [r for r in fit(tmp_path, train_iters=41, load=tmp_path / "saved", **settings) if r["kind"] == "train"]
    assert more[-1]["loss_scale"] == scales[-1] and more[-1]["skipped_steps"] == skipped


@pytest.mark.parametrize(
    ("recipe", "num_micro_batches"),
    [
        ("tensorwise", 3),
        ("delayed", 1),
        pytest.param("tensorwise", 1, marks=pytest.mark.slow),
        pytest.param("delayed", 3, marks=pytest.mark.slow),
    ],
)
def test_resume_is_bitwise(tmp_path: Path, recipe: str, num_micro_batches: int) -> None:
    """12 steps straight equal 7 and 5 resumed, with dropout, validation and a schedule: exactly."""
    settings = {
        "fp8_recipe": recipe,
        "global_batch_size": 2 * num_micro_batches,
        "train_iters": 12,
        "hidden_dropout": 0.1,
        "lr_warmup_iters": 3,
        "eval_interval": 4,
        "eval_iters": 1,
    }
    straight = fit(tmp_path / "straight", **settings)
    checkpoints = tmp_path / "checkpoints"
    fit(tmp_path / "halves", save=checkpoints, exit_interval=7, **settings)
    resumed = fit(tmp_path / "halves", save=checkpoints, load=checkpoints, **settings)
    assert steps(resumed) == steps(straight)
    evals = [(r["iteration"], r["loss"]) for r in straight if r["kind"] == "eval"]
    assert evals == [(r["iteration"], r["loss"]) for r in resumed if r["kind"] == "eval"]
    assert len(evals) == 3


def test_another_order_of_samples_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of a run that goes on; one with the same settings, or that takes the weights alone, says nothing."""
    saved = tmp_path / "saved"
    fit(tmp_path, train_iters=2, save=saved)
    lines = []
    for settings in ({}, {"seed": 7}, {"seed": 7, "finetune": True}):
        caplog.clear()
        fit(tmp_path, train_iters=3, load=saved, **settings)
        lines.append([message for message in caplog.messages if "order of samples" in message])
    assert lines[0] == lines[2] == []
    assert lines[1] == [
        "the order of samples is not the checkpoint's (seed 1234 → 7): some of its 4 samples may come again; give its "
        "values, or --finetune to begin anew"
    ]


def test_a_run_ends_at_multiples_of_the_exit_interval(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    ends = []
    for interval in (3, 2, 5):  # from 0, 3 and 4
        fit(tmp_path, train_iters=9, save=saved, load=saved, exit_interval=interval)
        ends.append(int((saved / "latest_checkpointed_iteration.txt").read_text()))
    assert ends == [3, 4, 5]


def test_a_run_goes_on_however_its_steps_are_launched(tmp_path: Path) -> None:
    """Who saved launched every step, or left it open, as who resumes; what needs a GPU is refused without one."""
    straight = fit(tmp_path / "straight", train_iters=4)
    for saves, resumes in (("none", "auto"), ("auto", "none")):
        folder = tmp_path / saves
        fit(folder, train_iters=4, exit_interval=2, save=folder / "saved", cuda_graph_impl=saves)
        resumed = fit(folder / "resumed", train_iters=4, load=folder / "saved", cuda_graph_impl=resumes)
        assert steps(resumed) == steps(straight)[2:]
    with pytest.raises(UnsupportedDeviceError, match="--cuda-graph-impl local needs a GPU"):
        fit(tmp_path / "local", cuda_graph_impl="local")


def test_sigterm_waits_for_a_pending_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save in the background is as slow as ten steps; SIGTERM in the next one ends with both checkpoints whole."""
    write_chunks, train_step, calls = saving.write_chunks, training_run.train_step, 0

    def slowly(*args: object, **kwargs: object) -> object:
        time.sleep(1.0)
        return write_chunks(*args, **kwargs)  # type: ignore[arg-type]

    def interrupted(*args: object, **kwargs: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_step(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(saving, "write_chunks", slowly)
    monkeypatch.setattr(training_run, "train_step", interrupted)
    checkpoints = tmp_path / "checkpoints"
    stopped = steps(fit(tmp_path, train_iters=40, save=checkpoints, save_interval=3, async_save=True))
    assert saved_iterations(checkpoints) == [3, len(stopped)]
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == str(len(stopped))


def test_a_checkpoint_that_is_not_saved_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on after a failure in between; one of the last checkpoint is the run's error, after its curve."""
    write_chunks, failing = saving.write_chunks, [2]

    def fail(folder: Path, *args: object, **kwargs: object) -> object:
        if any(f"iter_{iteration:07d}" in folder.name for iteration in failing):
            raise OSError("No space left on device")
        return write_chunks(folder, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(saving, "write_chunks", fail)
    settings = {"train_iters": 4, "save_interval": 2, "save": tmp_path / "saved", "async_save": True}
    assert len(steps(fit(tmp_path / "a", **settings))) == 4
    assert saved_iterations(tmp_path / "saved") == [4]
    failing.append(6)
    with pytest.raises(CheckpointError, match=r"iter_0000006 was not saved: .*No space left on device"):
        fit(tmp_path / "b", load=tmp_path / "saved", **{**settings, "train_iters": 6})
    assert (tmp_path / "b" / "loss.png").exists()
    assert saved_iterations(tmp_path / "saved") == [4]


def test_steps_that_are_past_cannot_be_profiled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = tmp_path / "checkpoints"
    fit(tmp_path / "first", train_iters=2, save=checkpoints)
    settings = {"train_iters": 4, "load": checkpoints, "profile": True, "profile_step_end": 4}
    fit(tmp_path / "second", profile_step_start=2, **settings)
    assert "profile_step_start(2) was before this session; choose 3 or more" in caplog.text
    caplog.clear()
    fit(tmp_path / "third", profile_step_start=3, **settings)
    assert "profile_step_start" not in caplog.text and (tmp_path / "third" / "profile_rank0.json").exists()


def test_a_finished_run_that_starts_again_has_one_validation(tmp_path: Path) -> None:
    """It validates and tests again, for the settings may be other ones."""
    saved = tmp_path / "saved"
    settings = {"train_iters": 3, "eval_interval": 2, "eval_iters": 1, "save": saved}

    def evaluations() -> list[tuple[int, str, float]]:
        records = read_rows(tmp_path / METRICS_FILE)
        return [(record["iteration"], record["split"], record["loss"]) for record in records if "split" in record]

    first = steps(fit(tmp_path, **settings))
    before = evaluations()
    assert [split for _, split, _ in before].count("valid") == 2 and before[-1][0] == 3
    again = steps(fit(tmp_path, load=saved, **settings))
    assert again == first and evaluations() == before
    fit(tmp_path, load=saved, **{**settings, "eval_iters": 2})
    after = evaluations()
    assert [one[:2] for one in after] == [one[:2] for one in before]
    assert after[0] == before[0] and after[1][2] != before[1][2]


def test_sigterm_saves_and_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A SIGTERM in step 5 ends the run within two steps with a checkpoint that resumes to the end."""
    train_step = training_run.train_step
    calls = 0

    def interrupted(*args: object, **kwargs: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_step(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(training_run, "train_step", interrupted)
    checkpoints = tmp_path / "checkpoints"
    stopped = steps(fit(tmp_path, train_iters=40, save=checkpoints))
    assert 5 <= len(stopped) <= 7
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == str(len(stopped))
    monkeypatch.undo()
    assert len(steps(fit(tmp_path, train_iters=12, save=checkpoints, load=checkpoints))) == 12


class Clock:
    """In place of the module `time`, with a clock that stands still."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def test_the_time_limit_counts_the_set_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data that take two minutes to open leave a limit of one no time: the first step is the last."""
    clock, open_run_data = Clock(), training_run.open_run_data

    def slowly(*args: Any) -> Any:
        clock.seconds += 120
        return open_run_data(*args)

    for module in (trainer_module, training_run):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(training_run, "open_run_data", slowly)
    records = fit(tmp_path, train_iters=9, exit_duration_in_mins=1, save=tmp_path / "saved")
    assert len(steps(records)) <= 2
    assert saved_iterations(tmp_path / "saved") == [len(steps(records))]


@pytest.mark.parametrize("interval", [2, 100], ids=["between steps", "at the end"])
def test_sigterm_ends_a_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interval: int) -> None:
    """The state is saved within two of its thousand batches, and no loss of a part of them is reported."""
    take_step, num_batches = train_step_module.take_step, 0

    def interrupted(*args: Any) -> Any:
        nonlocal num_batches
        num_batches += 1
        if num_batches == 8:  # the training steps before it are fewer
            os.kill(os.getpid(), signal.SIGTERM)
        return take_step(*args)

    monkeypatch.setattr(train_step_module, "take_step", interrupted)
    settings = {"save": tmp_path / "saved", "train_iters": 4, "eval_interval": interval, "eval_iters": 1000}
    records = fit(tmp_path, **settings)
    assert num_batches <= 9 and [record["kind"] for record in records] == ["train"] * min(interval, 4)
    assert saved_iterations(tmp_path / "saved") == [min(interval, 4)]


def test_non_finite_steps_are_skipped_and_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A NaN in a weight makes every loss NaN: each step is skipped and counted, and the limit ends the run."""
    build = training_run.build_training_state

    def poisoned(*args: object, **kwargs: object):  # type: ignore[no-untyped-def]
        state = build(*args, **kwargs)  # type: ignore[arg-type]
        space = next(s for s in state.optimizer.states if s.weight.payload.dtype == torch.bfloat16)
        space.weight.payload[0] = math.nan
        return state

    monkeypatch.setattr(training_run, "build_training_state", poisoned)
    with pytest.raises(TrainingDiverged, match="4") as error:
        fit(tmp_path, train_iters=20, max_skipped_steps=4)
    assert "gradients with a NaN or inf on rank 0: " in str(error.value)  # and where to look
    records = read_rows(tmp_path / METRICS_FILE)
    assert len(steps(records)) <= 4


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_run_that_ends_by_its_loss_blames_no_other_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    """A loss of inf with finite gradients, on the only rank."""
    build = training_run.build_training_state

    def with_a_bad_loss(*args: Any, **kwargs: Any) -> Any:
        state = build(*args, **kwargs)
        state.model[0].module.register_forward_hook(lambda module, inputs, loss: loss + math.inf)
        return state

    monkeypatch.setattr(training_run, "build_training_state", with_a_bad_loss)
    with pytest.raises(TrainingDiverged) as error:
        fit(tmp_path, precision=precision, train_iters=20, max_skipped_steps=3)
    assert "another rank" not in str(error.value)
    assert "no gradient on rank 0 holds a NaN or inf, so the loss or a cast does" in str(error.value)


def test_a_checkpoint_waits_for_the_end_of_skipped_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Due at 2, 4, 6 and 8; steps 4, 5, 8 and 9 are skipped, and the limit ends the run at 9."""
    step, taken = training_run.train_step, itertools.count(1)

    def skipping(*args: Any, **kwargs: Any) -> torch.Tensor:
        packed = step(*args, **kwargs)
        if next(taken) in (4, 5, 8, 9):
            packed[[field.name for field in dataclasses.fields(StepFigures)].index("grad_norm")] = math.nan
        return packed

    monkeypatch.setattr(training_run, "train_step", skipping)
    skips: dict[str, Any] = {"max_skipped_steps": 2, "save": tmp_path / "saved", "save_interval": 2}
    with caplog.at_level(logging.INFO), pytest.raises(TrainingDiverged):
        fit(tmp_path, train_iters=20, **{**skips, "max_skipped_steps": 3}, exit_interval=7)
        assert saved_iterations(tmp_path / "saved") == [2, 6, 7]
        fit(tmp_path, train_iters=20, **skips, load=tmp_path / "saved")
    assert saved_iterations(tmp_path / "saved") == [2, 6, 7]
    events = [(found["kind"], found["iteration"]) for found in read_events(tmp_path / EVENTS_FILE)]
    told = [found for found in events if found[0] != "save"]
    assert told == [
        ("start", 0),
        ("skip", 4),
        ("skip", 5),
        ("stop", 7),
        ("resume", 7),
        ("skip", 8),
        ("skip", 9),
        ("fault", 9),
    ]


def test_schedules_reach_their_ends(tmp_path: Path) -> None:
    """Warm-up starts at lr_warmup_init, the decay ends at min_lr, and WSD keeps lr until its last steps."""
    flags = {"train_iters": 10, "lr": 1e-2, "min_lr": 1e-3, "lr_warmup_iters": 4}
    cosine = [r["learning_rate"] for r in fit(tmp_path / "cosine", **flags) if r["kind"] == "train"]
    assert cosine[0] == 0.0 and max(cosine) == pytest.approx(1e-2) and cosine[4] == pytest.approx(1e-2)
    assert 1e-3 < cosine[-1] < 2e-3
    wsd = fit(tmp_path / "wsd", lr_decay_style="WSD", lr_wsd_decay_iters=3, lr_wsd_decay_style="linear", **flags)
    rates = [r["learning_rate"] for r in wsd if r["kind"] == "train"]
    assert rates[4:8] == pytest.approx([1e-2] * 4) and rates[-1] == pytest.approx(1e-2 - 2 / 3 * 9e-3)
    flat = fit(tmp_path / "flat", lr_decay_style="WSD", lr_wsd_decay_iters=0, **flags)
    assert [r["learning_rate"] for r in flat if r["kind"] == "train"][4:] == pytest.approx([1e-2] * 6)


def test_writes_what_a_user_looks_for(tmp_path: Path) -> None:
    """config.yaml reads back as the run's configuration; the curve, TensorBoard and the metrics are there."""
    flags = tiny_flags(tmp_path, train_iters=4, eval_interval=2, eval_iters=1, tensorboard=True)
    config = parse_config(flags)
    Trainer(config).fit()
    assert parse_config(["--config", str(tmp_path / "config.yaml")]) == config
    assert (tmp_path / "loss.png").stat().st_size > 5_000
    assert any((tmp_path / "tensorboard").iterdir())
    kinds = [record["kind"] for record in read_rows(tmp_path / METRICS_FILE)]
    assert kinds.count("train") == 4 and kinds.count("eval") == 2


def test_a_run_ends_with_a_validation(tmp_path: Path) -> None:
    """Once, whether or not the interval divides the run, after a left-out step, and with the resumed run's loss."""

    def evaluated(name: str, **flags: Any) -> list[tuple[int, float]]:
        records = fit(tmp_path / name, **{"eval_interval": 3, "eval_iters": 1, "train_iters": 4, **flags})
        return [(record["iteration"], record["loss"]) for record in records if record["kind"] == "eval"]

    every = evaluated("every", eval_interval=2)
    uneven = evaluated("uneven", save=tmp_path / "saved", exit_interval=3)
    assert [iteration for iteration, _ in uneven] == [3]
    resumed = evaluated("uneven", save=tmp_path / "saved", load=tmp_path / "saved")
    assert [iteration for iteration, _ in every] == [2, 4] and [iteration for iteration, _ in resumed] == [3, 4]
    assert resumed[-1] == every[-1] and resumed[0] == uneven[0]
    assert [iteration for iteration, _ in evaluated("long", eval_interval=100)] == [4]
    assert [iteration for iteration, _ in evaluated("left_out", eval_interval=2, iterations_to_skip=[4])] == [2, 4]


def test_finetune_takes_weights_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """--finetune starts at iteration 1 with the trained weights: its first loss is the next step's, not the first."""
    caplog.set_level(logging.INFO)  # events are lines of the log
    checkpoints = tmp_path / "checkpoints"
    first = steps(fit(tmp_path / "first", train_iters=8, save=checkpoints))
    tuned = steps(fit(tmp_path / "tuned", train_iters=2, load=checkpoints, finetune=True))
    assert [iteration for iteration, _, _ in tuned] == [1, 2]
    assert tuned[0][1] != first[0][1]
    events = [e for name in ("first", "tuned") for e in read_events(tmp_path / name / EVENTS_FILE)]
    begins = [e["text"].split(" on ")[0] for e in events if e["kind"] == "start"]
    assert begins == ["training starts from scratch", f"training starts with the weights of {checkpoints}"]


@pytest.fixture(scope="module")
def o3_losses(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int | None], list[float]]:
    """Losses of 10 steps with the default settings, by global batch size; each is trained once."""

    @functools.cache
    def losses(global_batch_size: int | None) -> list[float]:
        folder = tmp_path_factory.mktemp("default")
        torch.manual_seed(0)
        return [loss for _, loss, _ in steps(fit(folder, train_iters=10, lr=1e-3, global_batch_size=global_batch_size))]

    return losses


@pytest.mark.parametrize(
    "dtypes",
    [
        {"main_params_dtype": "fp32"},
        {"main_params_dtype": "bf16"},
        {"main_params_dtype": "fp8"},
        {"main_grads_dtype": "fp32", "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp8"},
        {"opt_level": "O2", "params_dtype": "bf16"},
        {"opt_level": "O1", "params_dtype": "fp32", "main_grads_dtype": "bf16"},
        {"first_last_layers_bf16": True},
        {"fp8_power_of_two_scales": True, "fp8_recipe": "delayed", "fp8_amax_compute_algo": "most_recent"},
        {"decoupled_weight_decay": False, "grad_accumulation_dtype": "fp32", "global_batch_size": 4},
    ],
    ids=lambda dtypes: "-".join(map(str, dtypes.values())),
)
def test_every_setting_of_its_own_trains(
    tmp_path: Path, o3_losses: Callable[[int | None], list[float]], dtypes: dict
) -> None:
    """10 steps stay within 3% of O3's losses (FP8 masters, the coarsest, drift by up to 1% here)."""
    expected = o3_losses(dtypes.get("global_batch_size"))
    measured = [loss for _, loss, _ in steps(fit(tmp_path / "set", train_iters=10, lr=1e-3, **dtypes))]
    assert measured == pytest.approx(expected, rel=0.03)
    assert measured != expected


def test_underflow_is_measured_where_gradients_are_fp8(tmp_path: Path) -> None:
    """Every log_interval steps, with one micro-batch; a fraction of a per cent, as a Gaussian's tail below 2⁻¹⁹."""
    records = [r for r in fit(tmp_path / "fp8", train_iters=6, log_interval=3) if r["kind"] == "train"]
    fractions = [r["grad_underflow_fraction"] for r in records]
    assert [fraction is not None for fraction in fractions] == [False, False, True, False, False, True]
    assert all(0.0 <= fraction < 0.05 for fraction in fractions if fraction is not None)
    for name, overrides in {"bf16": {"precision": "bf16"}, "accumulated": {"global_batch_size": 4}}.items():
        records = fit(tmp_path / name, train_iters=3, log_interval=1, **overrides)
        assert all(r["grad_underflow_fraction"] is None for r in records if r["kind"] == "train")


def test_updates_of_matrices_are_measured_on_logged_steps(tmp_path: Path) -> None:
    """Under the spectral scale the RMS is that of the singular values: 0.68 to 1.14 of those of full rank."""
    names = ("update_rms_qkv", "update_rms_proj", "update_rms_fc1", "update_rms_fc2", "orthogonality_error")
    found = []
    for factor in (1.0, 0.25):
        flags = {"optimizer": "muon", "muon_extra_scale_factor": factor}
        records = fit(tmp_path / str(factor), train_iters=4, log_interval=2, **flags)
        rows = [[record[name] for name in names] for record in records if record["kind"] == "train"]
        assert [None in row for row in rows] == [True, False, True, False] and not any(rows[0])
        found.append(rows[1])
        *roles, error = rows[1]
        assert all(0.3 * factor < rms < 1.2 * factor for rms in roles) and 0.0 < error < 0.6
    assert found[0][-1] == pytest.approx(found[1][-1], rel=0.1)  # other weights after the first step
    records = fit(tmp_path / "adamw", train_iters=2, log_interval=1)
    assert all(record[name] is None for record in records if record["kind"] == "train" for name in names)


@pytest.mark.parametrize(
    ("warmup_iters", "expected"), [(3, None), (4, "is cut to 3 steps"), (2000, "is cut to 3 steps")]
)
def test_a_warm_up_that_does_not_fit_is_cut_with_a_line_in_the_log(
    warmup_iters: int, expected: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Of 4 steps; a short try of a model's configuration needs no other flag."""
    log_settings(parse_config(["--train-iters", "4", "--lr-warmup-iters", str(warmup_iters)]), 1)
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert ([expected] if expected else []) == [text[-17:] for text in warned]
    assert all(f"lr_warmup_iters({warmup_iters}) does not fit into train_iters(4)" in text for text in warned)


def test_a_program_of_ones_own_shows_no_warnings(tmp_path: Path) -> None:
    """megatron-core warns on import of every optional package that is not there, and of one of its own defaults. The
    trainer's program imports modules of checkpoints first."""
    code = (
        "import fp8_megatron.checkpoint.run_state; "
        "from fp8_megatron.training.trainer import Trainer; from fp8_megatron.config.io import parse_config; "
        f"Trainer(parse_config({tiny_flags(tmp_path, train_iters=2)!r})).fit()"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_resumed_run_leaves_the_metrics_of_another_run_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It logs into a folder where another run has logged more steps."""
    caplog.set_level(logging.INFO)  # events are lines of the log
    saved, logs = tmp_path / "saved", tmp_path / "logs"
    Trainer(parse_config(tiny_flags(tmp_path / "first", train_iters=2, save=str(saved)))).fit()
    Trainer(parse_config(tiny_flags(logs, train_iters=5))).fit()
    for end in (3, 4):  # the second one goes on from its own metrics
        flags = {"train_iters": end, "lr_decay_iters": 2, "save": str(saved), "load": str(saved)}
        Trainer(parse_config(tiny_flags(logs, **flags))).fit()
    assert [record["iteration"] for record in read_rows(logs / "metrics.1.jsonl")] == [1, 2, 3, 4, 5]
    assert [record["iteration"] for record in read_rows(logs / "metrics.jsonl")] == [3, 4]


_BY_LAYERS = {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 0}


@pytest.mark.parametrize(
    ("first", "last"),
    [
        ({"global_batch_size": 16}, {"global_batch_size": 2}),
        ({"global_batch_size": 16}, {"step_batch_size_schedule": ["0:2", "64K:16"]}),
        ({"seq_length": 128}, {"seq_length": 16}),
        (
            {"global_batch_size": 16, **_BY_LAYERS},
            {
                "global_batch_size": 2,
                **_BY_LAYERS,
                "num_layers_at_start_in_bf16": 0,
                "num_layers_at_end_in_bf16": 1,
            },
        ),
    ],
    ids=["batch", "schedule", "sequences", "layers"],
)
def test_delayed_scales_of_a_checkpoint_fit_the_run(
    tmp_path: Path, first: dict[str, Any], last: dict[str, Any]
) -> None:
    """A resumed run with an eighth of the tokens has gradients eight times as large, and they are not clamped. A layer
    takes no scales of another one: with one layer in BF16, at first the first and then the last, scales start anew.

    Current scaling, from the same checkpoint, has the gradient norm within E4M3's and E5M2's rounding errors.
    """
    shared = {
        **{"micro_batch_size": 1, "hidden_size": 64, "num_attention_heads": 4, "lr": 1e-3, "lr_decay_iters": 9},
        "position_embedding_type": "rope",
    }
    saved = tmp_path / "saved"
    flags = {**shared, **first, "train_iters": 4, "save": str(saved)}
    Trainer(parse_config(tiny_flags(tmp_path / "first", **flags))).fit()
    norms = []
    for recipe in ("delayed", "tensorwise"):
        flags = {**shared, **last, "train_iters": 5, "fp8_recipe": recipe, "load": str(saved)}
        Trainer(parse_config(tiny_flags(tmp_path / recipe, **flags))).fit()
        (record,) = read_rows(tmp_path / recipe / METRICS_FILE)
        norms.append(record["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=0.02)
