"""The metrics logger: one valid history in metrics.jsonl, a readable console, sinks that cannot kill a run."""

from __future__ import annotations

import io
import json
import logging
import math
import re
import sys
import time
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fp8_megatron.config.batch_schedule import BatchSchedule
from fp8_megatron.config.schema import LoggingConfig
from fp8_megatron.reporting.metrics import EvalMetrics, MetricsLogger, StepMetrics, step_line
from fp8_megatron.reporting.metrics_file import read_rows
from tests.harness.limits import files_limited_to

QUIET = LoggingConfig(log_interval=10, tensorboard=False, progress="off")


def step(iteration: int, **changes: Any) -> StepMetrics:
    metrics = StepMetrics(
        iteration=iteration,
        loss=6.0 - 0.01 * iteration,
        grad_norm=0.812,
        learning_rate=2e-3,
        tokens_per_second_per_gpu=12345.0,
        tflops_per_gpu=34.5,
        mfu=0.412,
        peak_memory_gib=45.6,
        step_seconds=1.5,
        skipped_steps=0,
        global_batch_size=8,
        consumed_samples=8 * iteration,
        consumed_tokens=8192 * iteration,
    )
    return replace(metrics, **changes)


def open_logger(folder: Path, config: LoggingConfig = QUIET, **settings: Any) -> MetricsLogger:
    return MetricsLogger(config, folder, **{"is_writer": True, "total_iterations": 300, **settings})


def strict_lines(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_every_step_is_a_line_at_once(tmp_path: Path) -> None:
    with open_logger(tmp_path) as metrics_logger:
        for iteration in (1, 2, 3):
            metrics_logger.log_step(step(iteration))
            # Read before the file is closed: a crash loses nothing.
            assert strict_lines(tmp_path / "metrics.jsonl")[-1]["iteration"] == iteration
        metrics_logger.log_eval(EvalMetrics.from_loss(3, "valid", 2.0))
    *_, third, evaluation = strict_lines(tmp_path / "metrics.jsonl")
    assert third["kind"] == "train"
    assert third["consumed_tokens"] == 3 * 8192
    assert third["grad_saturation_fraction"] is None
    assert "non_finite" not in third
    assert evaluation == {
        "kind": "eval",
        "iteration": 3,
        "split": "valid",
        "loss": 2.0,
        "perplexity": pytest.approx(math.e**2),
    }


def test_a_line_has_the_median_speed_of_its_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The logged step itself is slower, since it measures more. metrics.jsonl has every step's own speed."""
    caplog.set_level("INFO")
    with open_logger(tmp_path, peak_flops=100e12) as metrics_logger:
        for iteration in range(1, 21):
            speed = {1: 1000.0, 10: 2000.0, 20: 3000.0}.get(iteration, 5000.0 if iteration < 10 else 8000.0)
            changes = {"tokens_per_second_per_gpu": speed, "tflops_per_gpu": speed / 100, "mfu": speed / 10_000}
            metrics_logger.log_step(step(iteration, **changes))
    lines = [message for message in caplog.messages if message.startswith("iter")]
    speeds = [re.findall(r"([\d,]+) tok/s/GPU \| ([\d.]+) TFLOP/s.* MFU ([\d.]+)%", line) for line in lines]
    assert speeds == [[("1,000", "10.0", "10.0")], [("5,000", "50.0", "50.0")], [("8,000", "80.0", "80.0")]]
    written = [record["tokens_per_second_per_gpu"] for record in strict_lines(tmp_path / "metrics.jsonl")]
    assert (written[0], written[9], written[19]) == (1000.0, 2000.0, 3000.0)


def test_non_finite_values_are_valid_json(tmp_path: Path) -> None:
    with open_logger(tmp_path) as metrics_logger:
        metrics_logger.log_step(step(1, loss=math.nan, grad_norm=math.inf, skipped_steps=1))
        metrics_logger.log_eval(EvalMetrics.from_loss(1, "valid", 1000.0))
    train, evaluation = strict_lines(tmp_path / "metrics.jsonl")
    assert (train["loss"], train["grad_norm"], train["non_finite"]) == (None, None, True)
    assert train["skipped_steps"] == 1
    assert (evaluation["loss"], evaluation["perplexity"], evaluation["non_finite"]) == (1000.0, None, True)


def test_resume_drops_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with open_logger(tmp_path) as metrics_logger:
        for iteration in range(1, 8):
            metrics_logger.log_step(step(iteration, loss=1.0))
        metrics_logger.log_eval(EvalMetrics.from_loss(4, "valid", 3.0))
        metrics_logger.log_eval(EvalMetrics.from_loss(6, "valid", 0.5))
    with path.open("a") as stream:
        stream.write('{"kind": "train", "iteration": 8, "lo')  # killed within a write
    with open_logger(tmp_path, resume_iteration=4) as metrics_logger:
        assert [(r["kind"], r["iteration"]) for r in strict_lines(path)] == [
            *(("train", iteration) for iteration in (1, 2, 3, 4)),
            ("eval", 4),
        ]
        for iteration in (5, 6):
            metrics_logger.log_step(step(iteration, loss=2.0))
        summary = metrics_logger.summary()
    assert [r["loss"] for r in read_rows(path) if r["kind"] == "train"] == [1.0, 1.0, 1.0, 1.0, 2.0, 2.0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl"]
    assert "6 of 300 (2 in this session, resumed at 4)" in summary
    assert "1.3333 (mean of the last 6 steps)" in summary
    # The dropped validation of iteration 6 is not the best one.
    assert "best validation loss   3.0000 (perplexity 20.09, iteration 4)" in summary


def test_a_run_from_scratch_sets_the_older_file_aside(tmp_path: Path) -> None:
    for loss in (1.0, 2.0, 3.0):
        with open_logger(tmp_path) as metrics_logger:
            metrics_logger.log_step(step(1, loss=loss))
    losses = {p.name: read_rows(p)[0]["loss"] for p in tmp_path.iterdir()}
    assert losses == {"metrics.1.jsonl": 1.0, "metrics.2.jsonl": 2.0, "metrics.jsonl": 3.0}


@pytest.mark.parametrize("has_room_again", [True, False])
def test_a_full_disk_leaves_whole_lines(has_room_again: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Lines that do not fit are left out, the one that fits in part too, and with room lines come again. One line says
    so at once, a last one says how many are missing."""
    path = tmp_path / "metrics.jsonl"
    with open_logger(tmp_path) as metrics_logger:
        metrics_logger.log_step(step(1))
        with files_limited_to(path.stat().st_size + 100):
            for iteration in (2, 3):
                metrics_logger.log_step(step(iteration))
            metrics_logger.log_eval(EvalMetrics.from_loss(3, "valid", 2.0))
            assert [record["iteration"] for record in read_rows(path)] == [1, 3]
            if not has_room_again:
                metrics_logger.log_step(step(4))
        if has_room_again:
            metrics_logger.log_step(step(4))
        summary = metrics_logger.summary()
    assert [record["iteration"] for record in strict_lines(path)] == [1, 3, 4][: 2 + has_room_again]
    first, *last = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert re.fullmatch(
        rf"{re.escape(str(path))} is not written \(File too large; .* free on its disk\); the run goes on", first
    )
    assert last == [f"{path} is not complete: {2 if has_room_again else 3} writes failed"]
    assert "4 of 300" in summary  # what is shown does not come from the file


def test_console_line() -> None:
    line = step_line(step(120, loss=5.4321), 300, peak_flops=1979e12, eta_seconds=201.4)
    assert line == (
        "iter 120/300 | loss 5.4321 | grad norm 0.812 | lr 2.0e-03 |  12,345 tok/s/GPU | "
        "34.5 TFLOP/s/GPU (full attention) | MFU 41.2% of 1979 | 45.6 GiB peak | skipped 0 | ETA 0:03:21"
    )
    fp8 = step(7, mfu=None, grad_saturation_fraction=1e-5, grad_underflow_fraction=0.0312)
    line = step_line(fp8, 300, peak_flops=None, eta_seconds=None)
    assert line.startswith("iter   7/300 | ")
    assert line.endswith("45.6 GiB peak | saturated 0.0010% | underflow 3.12% | skipped 0")
    assert "MFU" not in line
    clamped = step(7, saturated_tensors=12.0, input_saturation_fraction=0.0421, grad_output_saturation_fraction=0.0)
    line = step_line(clamped, 300, peak_flops=None, eta_seconds=None)
    assert " | clamped in 12 tensors (0.042 of inputs) | skipped 0" in line
    healthy = step(7, saturated_tensors=0.0, input_saturation_fraction=0.0)
    assert "clamped" not in step_line(healthy, 300, peak_flops=None, eta_seconds=None)


def test_lines_come_every_interval_first_last_and_on_nan(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="fp8_megatron")
    with open_logger(tmp_path, total_iterations=23) as metrics_logger:
        for iteration in range(1, 24):
            metrics_logger.log_step(step(iteration, loss=math.nan if iteration == 13 else 5.0))
        metrics_logger.log_eval(EvalMetrics.from_loss(23, "valid", 2.0))
    messages = [record.getMessage() for record in caplog.records]
    assert [message.split("/")[0] for message in messages] == [f"iter {i:>2}" for i in (1, 10, 13, 20, 23, 23)]
    assert messages[1].endswith("ETA 0:00:20")  # 13 steps of 1.5 s, rounded half to even
    assert messages[-1] == "iter 23/23 | validation loss 2.0000 | perplexity 7.39"


def test_summary(tmp_path: Path) -> None:
    with open_logger(tmp_path, total_iterations=12, peak_flops=100e12) as metrics_logger:
        for iteration in range(1, 13):
            speed = 1.0 if iteration == 1 else 1000.0  # the first step compiles; a mean would show it
            peak = 50.0 if iteration == 5 else 40.0
            metrics_logger.log_step(
                step(iteration, loss=float(iteration), tokens_per_second_per_gpu=speed, peak_memory_gib=peak)
            )
        for iteration, loss in ((4, math.nan), (8, 2.0), (12, 2.5)):
            metrics_logger.log_eval(EvalMetrics.from_loss(iteration, "valid", loss))
        metrics_logger.log_eval(EvalMetrics.from_loss(12, "test", 3.0))
        rows = [" ".join(line.split()) for line in metrics_logger.summary().splitlines()]
    assert rows[0] == "training summary"
    assert rows[1:6] == [
        "steps 12 of 12",
        "train loss 7.5000 (mean of the last 10 steps)",
        "validation loss 2.5000 (perplexity 12.18, iteration 12)",
        "best validation loss 2.0000 (perplexity 7.39, iteration 8)",
        "test loss 3.0000 (perplexity 20.09, iteration 12)",
    ]
    assert rows[6] == f"tokens {12 * 8192:,}"
    assert rows[8:11] == [
        "throughput 1,000 tok/s/GPU | 34.5 TFLOP/s/GPU (full attention) | MFU 34.5% of 100 (medians)",
        "peak memory 50.0 GiB",
        "skipped steps 0",
    ]
    assert rows[11] == f"written {tmp_path / 'metrics.jsonl'}"


def test_a_validation_that_is_done_again_replaces_the_first(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with open_logger(tmp_path) as metrics_logger:
        metrics_logger.log_step(step(1))
        for split, loss in (("valid", 1.0), ("test", 2.0)):
            metrics_logger.log_eval(EvalMetrics.from_loss(1, split, loss))
    with open_logger(tmp_path, resume_iteration=1) as metrics_logger:
        metrics_logger.log_eval(EvalMetrics.from_loss(1, "valid", 3.0))
        metrics_logger.log_step(step(2))
        metrics_logger.log_eval(EvalMetrics.from_loss(2, "valid", 4.0))
        summary = metrics_logger.summary()
    written = [(record["iteration"], record.get("split")) for record in strict_lines(path)]
    assert written == [(1, None), (1, "test"), (1, "valid"), (2, None), (2, "valid")]
    assert "best validation loss   3.0000" in summary and list(tmp_path.iterdir()) == [path]


def test_a_validation_that_is_done_again_is_one_point_of_a_sink(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = replace(QUIET, tensorboard=True)
    for resume_iteration, loss in ((0, 2.0), (1, 3.0)):
        with open_logger(tmp_path, config, resume_iteration=resume_iteration) as metrics_logger:
            if resume_iteration == 0:
                metrics_logger.log_step(step(1))
            for split in ("valid", "test"):
                metrics_logger.log_eval(EvalMetrics.from_loss(1, split, loss))
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    for name in ("valid/loss", "test/loss"):
        assert [(event.step, event.value) for event in events.Scalars(name)] == [(1, 2.0)]


def eta(folder: Path, caplog: pytest.LogCaptureFixture, **settings: Any) -> str:
    """What the line of the first of ten steps, which takes 1.5 s, says of the others."""
    caplog.clear()
    caplog.set_level(logging.INFO, logger="fp8_megatron")
    with open_logger(folder, total_iterations=10, **settings) as metrics_logger:
        metrics_logger.log_step(step(1))
    return caplog.records[-1].getMessage().rpartition("ETA ")[2]


def test_iterations_that_are_left_out_take_no_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert eta(tmp_path / "all", caplog) == "0:00:14"  # 9 · 1.5 s, rounded half to even
    assert eta(tmp_path / "some", caplog, left_out=(1, 3, 10, 11)) == "0:00:10"  # 7 · 1.5 s
    # 8 samples up to the third iteration, 16 in the others.
    batches = BatchSchedule(((0, 8), (24, 16)))
    assert eta(tmp_path / "ramp", caplog, batches=batches) == "0:00:24"  # 2 + 7 · 2 times 1.5 s
    assert eta(tmp_path / "both", caplog, batches=batches, left_out=(3, 4)) == "0:00:20"  # 1 + 6 · 2 times 1.5 s


def test_the_summary_says_what_was_left_out(tmp_path: Path) -> None:
    """Of the last iterations too, which are no steps; those that the run has not reached are not counted."""
    left_out = (3, 6, 8)
    with open_logger(tmp_path / "whole", total_iterations=6, left_out=left_out) as metrics_logger:
        for iteration in (1, 2, 4, 5):
            metrics_logger.log_step(step(iteration))
        rows = metrics_logger.summary(reached=6).splitlines()
    assert rows[1].split(maxsplit=1) == ["steps", "6 of 6 (2 left out by --iterations-to-skip)"]
    with open_logger(tmp_path / "resumed", total_iterations=6, resume_iteration=4, left_out=left_out) as metrics_logger:
        rows = metrics_logger.summary(reached=4).splitlines()
        metrics_logger.log_step(step(5))
        after = metrics_logger.summary(reached=6).splitlines()
    notes = "in this session, resumed at 4"
    assert rows[1].split(maxsplit=1)[1] == f"4 of 6 (none {notes}; 1 left out by --iterations-to-skip)"
    assert after[1].split(maxsplit=1)[1] == f"6 of 6 (1 {notes}; 2 left out by --iterations-to-skip)"


def test_other_ranks_touch_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    config = LoggingConfig(wandb_project="unused", progress="on")
    with open_logger(tmp_path / "run", config, is_writer=False) as metrics_logger:
        metrics_logger.log_step(step(1))
        metrics_logger.log_eval(EvalMetrics.from_loss(1, "valid", 2.0))
        assert metrics_logger.summary() == ""
    assert list(tmp_path.iterdir()) == []
    assert caplog.records == []


def test_tensorboard_has_steps_and_validations_and_hides_undone_ones(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = replace(QUIET, tensorboard=True)
    with open_logger(tmp_path, config) as metrics_logger:
        for iteration in (1, 2, 3, 4):
            metrics_logger.log_step(step(iteration, loss=1.0, mfu=None))
        metrics_logger.log_eval(EvalMetrics.from_loss(2, "valid", 2.0))
    with open_logger(tmp_path, config, resume_iteration=2) as metrics_logger:
        metrics_logger.log_step(step(3, loss=5.0))
        assert str(tmp_path / "tensorboard") in metrics_logger.summary()
    # Event files are ordered by the second they were opened in, then by process and number within it.
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 1.0), (2, 1.0), (3, 5.0)]
    assert [(e.step, e.value) for e in events.Scalars("valid/loss")] == [(2, 2.0)]
    assert [e.step for e in events.Scalars("throughput/mfu")] == [3]  # None is left out, not written as 0


def test_tensorboard_that_cannot_start_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tensorboard").write_text("a file where the folder should be")
    with open_logger(tmp_path, replace(QUIET, tensorboard=True)) as metrics_logger:
        metrics_logger.log_step(step(1))
        summary = metrics_logger.summary()
    assert caplog.text.count("tfevents") == 1 and f"({tmp_path / 'tensorboard'}: File exists" in caplog.text
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 1
    assert "metrics.jsonl" in summary and str(tmp_path / "tensorboard") not in summary


def test_tensorboard_writes_into_the_folder_that_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere" / "events"
    with open_logger(tmp_path, replace(QUIET, tensorboard=True, tensorboard_dir=str(folder))) as metrics_logger:
        metrics_logger.log_step(step(1))
    assert any(folder.iterdir()) and not (tmp_path / "tensorboard").exists()


def test_wandb_is_told_its_entity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def refuse(**settings: Any) -> None:
        asked.update(settings)
        raise ConnectionError

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=refuse))
    with open_logger(tmp_path, replace(QUIET, wandb_project="llm", wandb_entity="team")):
        pass
    assert (asked["project"], asked["entity"]) == ("llm", "team")


def test_wandb_that_cannot_start_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(**_: Any) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=refuse))
    with open_logger(tmp_path, replace(QUIET, wandb_project="llm")) as metrics_logger:
        metrics_logger.log_step(step(1))
    assert "project llm failed with ConnectionError: no route to host" in caplog.text
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 1


def test_wandb_offline_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = replace(QUIET, wandb_project="llm", wandb_exp_name="offline")
    with open_logger(tmp_path, config, run_config={"lr": 1e-3}) as metrics_logger:
        metrics_logger.log_step(step(1))
        metrics_logger.log_eval(EvalMetrics.from_loss(1, "valid", 2.0))
        summary = metrics_logger.summary()
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    assert str(run) in summary
    assert (tmp_path / "wandb_run_id.txt").read_text().strip() in run.name
    (record,) = run.glob("run-*.wandb")
    deadline = time.monotonic() + 30  # its own process writes the file
    while b"train/grad_norm" not in record.read_bytes():
        assert time.monotonic() < deadline, "the run's file never got the metrics"
        time.sleep(0.1)


@pytest.mark.parametrize("resume_iteration", [0, 3])
def test_wandb_run_is_continued_on_resume_and_may_break(
    resume_iteration: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class BrokenRun:
        id, url, dir = "new-id", "https://wandb.example/run", "unused"

        def define_metric(self, *_: Any, **__: Any) -> None: ...

        def log(self, row: dict[str, float]) -> None:
            raise OSError(f"disk full at {row['iteration']}")

        def finish(self) -> None:
            raise OSError("still full")

    settings = {}
    fake = types.SimpleNamespace(init=lambda **given: (settings.update(given), BrokenRun())[1])
    monkeypatch.setitem(sys.modules, "wandb", fake)
    (tmp_path / "wandb_run_id.txt").write_text("old-id\n")
    config = replace(QUIET, wandb_project="llm")
    with open_logger(tmp_path, config, resume_iteration=resume_iteration) as metrics_logger:
        for iteration in (4, 5):
            metrics_logger.log_step(step(iteration))
    assert (settings["id"], settings["resume"]) == ((None, None) if resume_iteration == 0 else ("old-id", "allow"))
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [
        "W&B is not written (disk full at 4); the run goes on",
        "W&B is not complete: 3 writes failed",
    ]
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 2


def test_progress_bar_leaves_log_lines_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="fp8_megatron")
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "60")
    handler = logging.StreamHandler()  # made before the bar, as a program configures its logging first
    package_logger = logging.getLogger("fp8_megatron")
    package_logger.addHandler(handler)
    try:
        with open_logger(tmp_path, replace(QUIET, progress="on"), total_iterations=2) as metrics_logger:
            assert handler.stream is not terminal
            metrics_logger.log_step(step(1))
            metrics_logger.log_step(step(2))
        assert handler.stream is terminal
        assert sys.stderr is terminal
    finally:
        package_logger.removeHandler(handler)
    shown = terminal.getvalue()
    assert "2/2" in shown
    for iteration in (1, 2):
        # Erase the bar's line, then the whole log line in one piece although it is wider than the terminal.
        line = step_line(step(iteration), 2, peak_flops=None, eta_seconds=1.5 * (2 - iteration))
        assert f"\x1b[2K{line}\n" in shown


def test_damaged_lines_are_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of a step, a validation and a row of another kind, each damage leaves the good ones."""
    good = [
        {"kind": "train", "iteration": 1, "loss": 2.0},
        {"kind": "train", "iteration": 2, "loss": None, "non_finite": True},
        {"kind": "eval", "iteration": 2, "split": "valid", "loss": 2.0},
        {"kind": "other", "iteration": 3},
    ]
    bad = [
        {"iteration": 1, "loss": 2.0},
        {"kind": 3, "iteration": 1, "loss": 2.0},
        {"kind": "train", "iteration": True, "loss": 2.0},
        {"kind": "train", "iteration": -1, "loss": 2.0},
        {"kind": "train", "iteration": 10**300, "loss": 2.0},
        {"kind": "train", "iteration": 1},
        {"kind": "train", "iteration": 1, "loss": "2.0"},
        {"kind": "train", "iteration": 1, "loss": 10**400},
        {"kind": "eval", "iteration": 1, "loss": 2.0},
        [],
    ]
    lines = [json.dumps(record).encode() for record in good + bad]
    lines += [b"[" * 100_000, b'{"kind": "train", "iteration": 1, "loss": 2.0, "x": "\xff"}', b"1" * 5000]
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\n".join(lines) + b'\n{"kind": "tr')
    assert read_rows(path) == good
    assert "13 lines are no rows of a step or a validation; they are left out" in caplog.text
    with open_logger(tmp_path, resume_iteration=2) as metrics_logger:
        metrics_logger.log_step(step(3))
    assert [record["iteration"] for record in read_rows(path)] == [1, 2, 2, 3]
