"""fp8-megatron parity: its runs over several calls, their results, and what it says of those that fail."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fp8_megatron.commands import parity, parity_runs
from fp8_megatron.commands.parity_runs import RESULTS_FILE, Session, read_results, write_results
from fp8_megatron.commands.pretrain_gpt import main as pretrain
from fp8_megatron.config.checks import ConfigError
from fp8_megatron.config.io import parse_config
from fp8_megatron.errors import UserError
from fp8_megatron.reporting.metrics_file import METRICS_FILE, json_line, read_records
from fp8_megatron.reporting.parity import RunResult
from tests.harness.parity import MODEL, TRAINING, plan_of


def test_files_that_are_missing_are_told_before_the_first_run(
    tmp_path: Path, fake_runs: None, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--output-dir", str(tmp_path / "out"), "--levels", "bf16", "O3"]
    data = ["--no-mock-data", "--data-path", str(tmp_path / "text"), "--tokenizer-type", "NullTokenizer"]
    assert parity.main([*words, "--", *TRAINING, *data]) == 2
    assert str(tmp_path / "text") in capsys.readouterr().err and not (tmp_path / "out").exists()


def _finished(level: str, seed: int, wall_seconds: float | None = 30.0) -> RunResult:
    return RunResult(level, seed, 20, 2.0, 2.1, 0.5, 64.0, 1.0, 0, wall_seconds, [(20, 2.0)], [(20, 2.1)])


def _session(tmp_path: Path, *words: str, finished: list[RunResult] | None = None) -> Session:
    plan = plan_of(tmp_path, "--levels", "bf16", "O3", "--seeds", "1", "2", *words)
    known = {(run.level, run.seed): run for run in finished or []}
    return Session(plan, parity.check_levels(plan), ["0"], math.inf, known)


def test_whole_runs_are_not_started_without_time(tmp_path: Path) -> None:
    words = ["--whole-runs", "--time-limit", "100"]
    session = _session(tmp_path, *words, finished=[_finished("bf16", 1, 100.0), _finished("O3", 1, 30.0)])
    session.deadline = time.monotonic() + 60
    pending = [("bf16", 2), ("O3", 2)]
    assert session._next(pending) == ("O3", 2) and pending == [("bf16", 2)]
    assert session._next(pending) is None and pending == []


def test_results_of_other_settings_are_refused(tmp_path: Path) -> None:
    session = _session(tmp_path, finished=[_finished("bf16", 1)])
    write_results(session.plan, session.config, session.finished)
    assert read_results(session.plan, session.config)[1] == session.finished
    other = plan_of(tmp_path, training=[*TRAINING, "--lr", "1e-5"])
    with pytest.raises(UserError, match=r"has runs with lr\(0.0003\), this command has lr\(1e-05\)"):
        read_results(other, parity.check_levels(other))
    path = tmp_path / RESULTS_FILE
    report = json.loads(path.read_text())
    del report["settings"]["lr"]  # as if the flag came later
    path.write_text(json.dumps(report))
    assert read_results(other, parity.check_levels(other))[1] == session.finished
    (tmp_path / RESULTS_FILE).write_text('{"runs": [{"level": 1}]}')
    with pytest.raises(UserError, match="is no result of this command"):
        read_results(session.plan, session.config)


def test_settings_of_calls_that_trained_nothing_do_not_bind(tmp_path: Path) -> None:
    """After a first call with a wrong flag, the corrected one needs no other folder."""
    session = _session(tmp_path)
    write_results(session.plan, session.config, {})
    other = plan_of(tmp_path, training=[*TRAINING, "--lr", "1e-5"])
    assert read_results(other, parity.check_levels(other))[1] == {}
    saved = tmp_path / "runs" / "bf16_seed_1" / "checkpoints"
    saved.mkdir(parents=True)
    (saved / "latest_checkpointed_iteration.txt").write_text("5")  # an unfinished run
    with pytest.raises(UserError, match=r"has runs with lr\(0.0003\), this command has lr\(1e-05\)"):
        read_results(other, parity.check_levels(other))


def test_a_level_of_ones_own(tmp_path: Path) -> None:
    words = ["--levels", "bf16", "head", "--own-levels", "head=--precision fp8 --fp8-lm-head --lr 1e-4"]
    plan = plan_of(tmp_path, *words)
    parity.check_levels(plan)
    config = parse_config(plan.run_flags(("head", 1), tmp_path / "head"))
    assert config.precision.fp8_lm_head and config.optimizer.lr == 1e-4
    session = Session(plan, parity.check_levels(plan), ["0"], math.inf, {("head", 1): _finished("head", 1)})
    write_results(session.plan, session.config, session.finished)
    other = plan_of(tmp_path, *words[:3], "--own-levels", "head=--precision fp8")
    without = plan_of(tmp_path, "--levels", "bf16", "O3")
    for _ in range(2):  # a call with other levels in between forgets nothing
        with pytest.raises(UserError, match="has runs of level head with '--precision fp8 --fp8-lm-head --lr 1e-4', t"):
            read_results(other, parity.check_levels(other))
        found, finished = read_results(without, session.config)
        write_results(found, session.config, finished)


def test_fine_tuning_starts_from_one_checkpoint_and_goes_on_from_its_own(tmp_path: Path) -> None:
    plan = plan_of(tmp_path / "out", "--finetune-from", str(tmp_path / "base"))
    folder = tmp_path / "run"
    config = parse_config(plan.run_flags(("O3", 1), folder)).checkpoint
    assert config.finetune and str(config.load) == str(tmp_path / "base")
    (folder / "checkpoints").mkdir(parents=True)  # a run that was killed before it saved
    assert parse_config(plan.run_flags(("O3", 1), folder)).checkpoint.finetune
    (folder / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("5")
    config = parse_config(plan.run_flags(("O3", 1), folder)).checkpoint
    assert not config.finetune and str(config.load) == str(folder / "checkpoints")
    session = Session(plan, parity.check_levels(plan), ["0"], math.inf, {("O3", 1): _finished("O3", 1)})
    write_results(session.plan, session.config, session.finished)
    other = plan_of(tmp_path / "out")
    with pytest.raises(
        UserError, match=r"has runs with finetune_from\(.*base\), this command has finetune_from\(None\)"
    ):
        read_results(other, parity.check_levels(other))


def test_every_level_continues_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its weights, state, schedule and data: the run's own precision goes on bit for bit, and O3 stays near it."""
    base = ["--output-dir", str(tmp_path / "base"), "--save", str(tmp_path / "base_7"), "--save-interval", "10"]
    assert pretrain([*TRAINING, "--precision", "bf16", "--seed", "7", "--no-tensorboard", *base]) == 0
    checkpoint = tmp_path / "base_{seed}" / "iter_0000010"
    words = ["--levels", "bf16", "O3", "--seeds", "7", "--continue-from", str(checkpoint)]
    assert parity.main(["--output-dir", str(tmp_path / "out"), *words, "--", *TRAINING]) == 0
    report = json.loads((tmp_path / "out" / RESULTS_FILE).read_text())
    assert report["continue_from"] == str(checkpoint) and report["starts"] == {"7": 10}
    bf16, fp8 = report["runs"]
    records = read_records(tmp_path / "base" / METRICS_FILE)
    losses = {r["iteration"]: r["loss"] for r in records if r["kind"] == "train"}
    assert [tuple(point) for point in bf16["training"]] == [(i, losses[i]) for i in range(11, 21)]
    assert [point[0] for point in fp8["validation"]] == [20] and fp8["steps_before"] == 10
    gaps = [ours[1] / other[1] - 1 for ours, other in zip(fp8["training"], bf16["training"], strict=True)]
    assert 0 < max(map(abs, gaps)) < 0.003
    assert report["comparison"]["levels"][1]["seconds_to_loss"] <= 10.001 * fp8["step_seconds"]


def test_checkpoints_that_cannot_be_continued(tmp_path: Path) -> None:
    plan = plan_of(tmp_path / "out", "--continue-from", str(tmp_path / "base_{seed}"))
    config = parity.check_levels(plan)
    with pytest.raises(UserError, match="base_1: no checkpoint there; give the folder that a run's --save named"):
        parity.find_starts(plan, config, {})
    for number, iteration in ((1, 10), (2, 20), (3, 10)):
        folder = tmp_path / f"base_{number}" / f"iter_{iteration:07d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
        (folder / "config.yaml").write_text(f"training: {{seed: {number}}}\n")
    with pytest.raises(UserError, match="base_2: its checkpoint is of iteration 20, and train_iters is 20; name an"):
        parity.find_starts(plan, config, {})
    other = plan_of(tmp_path / "out", "--continue-from", str(tmp_path / "base_1"), "--seeds", "4")
    with pytest.raises(UserError, match="base_1: that run has seed 1, and its data would go on in the order of seed 4"):
        parity.find_starts(other, config, {})
    other = plan_of(tmp_path / "out", "--finetune-from", str(tmp_path / "base_4"))
    with pytest.raises(UserError, match=r"--finetune-from .*base_4: no checkpoint there; give the folder"):
        parity.find_starts(other, config, {})
    parity.find_starts(plan, config, {(level, 2) for level in plan.levels})  # what is finished needs none
    folder = tmp_path / "run"
    started = parse_config(plan.run_flags(("O3", 3), folder)).checkpoint
    assert str(started.load) == str(tmp_path / "base_3") and not started.finetune
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("15")
    assert str(parse_config(plan.run_flags(("O3", 3), folder)).checkpoint.load) == str(folder / "checkpoints")


@pytest.mark.parametrize("flag", ["--continue-from", "--finetune-from"])
def test_all_runs_start_from_the_iteration_that_the_first_found(flag: str, tmp_path: Path) -> None:
    """Also in a later call, when the run of the checkpoint has saved more."""
    words = ["--levels", "bf16", "O3", "--seeds", "1", flag, str(tmp_path / "base")]

    def save(iteration: int) -> None:
        folder = tmp_path / "base" / f"iter_{iteration:07d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
        (folder / "config.yaml").write_text("training: {seed: 1}\n")

    save(10)
    plan = plan_of(tmp_path / "out", *words)
    config = parity.check_levels(plan)
    plan = parity.find_starts(plan, config, {})
    save(15)
    write_results(plan, config, {("bf16", 1): _finished("bf16", 1)})
    later, finished = read_results(plan_of(tmp_path / "out", *words), config)
    later = parity.find_starts(later, config, finished)
    for one in (plan, later):
        started = parse_config(one.run_flags(("O3", 1), tmp_path / "run")).checkpoint
        assert (str(started.load), started.ckpt_step) == (str(tmp_path / "base"), 10)


def test_continued_runs_on_a_number_of_samples_end_with_them(tmp_path: Path) -> None:
    """10 steps of 2 samples lie behind the checkpoint, and 5 of 4 are left."""
    folder = tmp_path / "base" / "iter_0000010"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    (folder / "config.yaml").write_text("training: {seed: 1}\n")
    about = {"format_version": 4, "iteration": 10, "consumed_samples": 20, "skipped_steps": 0}
    about |= {"topology": {}, "vocab_size": 64, "padded_vocab_size": 64}
    (folder / "checkpoint.json").write_text(json.dumps(about))
    steps = "--micro-batch-size 2 --global-batch-size 4 --eval-interval 10 --eval-iters 2 --lr 3e-4".split()
    training = ["--mock-data", *MODEL, *steps, "--train-samples"]
    words = ["--levels", "bf16", "O3", "--seeds", "1", "--continue-from", str(tmp_path / "base")]
    plan = plan_of(tmp_path, *words, training=[*training, "40"])
    plan = parity.find_starts(plan, parity.check_levels(plan), {})
    assert plan.steps_before == {1: 10} and plan.num_steps == {1: 15}
    short = plan_of(tmp_path, *words, training=[*training, "20"])
    with pytest.raises(UserError, match="its checkpoint is of iteration 10, and train_samples is 20; name an earlier"):
        parity.find_starts(short, parity.check_levels(short), {})


def test_runs_of_several_ranks_share_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert parity._slots(None, 1) == ["4", "5", "6", "7"]
    assert parity._slots(None, 2) == ["4,5", "6,7"]
    assert parity._slots(None, 3) == ["4,5,6"]
    assert parity._slots(2, 2) == ["4,5"]
    with pytest.raises(UserError, match="--gpus 3 is no multiple of --ranks-per-run 2"):
        parity._slots(3, 2)
    with pytest.raises(UserError, match="--ranks-per-run 8, but this machine has 4 GPUs; give at most 4"):
        parity._slots(None, 8)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert parity._slots(None, 2) == [""]
    with pytest.raises(UserError, match="--ranks-per-run 100000 is more than this node's cores can run; give at most"):
        parity._slots(None, 100_000)


def test_layouts_are_checked_with_the_ranks_of_a_run(tmp_path: Path) -> None:
    tensor_parallel = [*TRAINING, "--tensor-model-parallel-size", "2"]
    with pytest.raises(ConfigError, match="tensor_model_parallel_size"):
        parity.check_levels(plan_of(tmp_path, training=tensor_parallel))
    plan = plan_of(tmp_path, "--ranks-per-run", "2", training=tensor_parallel)
    config = parity.check_levels(plan)
    session = Session(plan, config, ["0,1"], math.inf, {("bf16", 1): _finished("bf16", 1)})
    write_results(session.plan, session.config, session.finished)
    other = plan_of(tmp_path, "--ranks-per-run", "4", training=tensor_parallel)
    with pytest.raises(UserError, match="has runs with --ranks-per-run 2, this command has 4"):
        read_results(other, parity.check_levels(other))
    other = plan_of(tmp_path, "--ranks-per-run", "2", training=[*TRAINING, "--pipeline-model-parallel-size", "1"])
    with pytest.raises(UserError, match=r"has runs with tensor_model_parallel_size\(2\), this command has"):
        read_results(other, parity.check_levels(other))


@pytest.mark.slow
def test_runs_of_two_ranks_train(tmp_path: Path) -> None:
    training = [*TRAINING, "--global-batch-size", "8", "--train-iters", "10"]
    words = ["--output-dir", str(tmp_path), "--levels", "bf16", "O3", "--seeds", "1", "--ranks-per-run", "2"]
    assert parity.main([*words, "--", *training]) == 0
    report = json.loads((tmp_path / RESULTS_FILE).read_text())
    assert report["ranks_per_run"] == 2 and [run["num_steps"] for run in report["runs"]] == [10, 10]
    for level in ("bf16", "O3"):
        records = read_records(tmp_path / "runs" / f"{level}_seed_1" / METRICS_FILE)
        tokens = [r["tokens_per_second_per_gpu"] * r["step_seconds"] for r in records if r["kind"] == "train"]
        assert tokens == pytest.approx([8 * 32 / 2] * 10)  # of a rank, half of a step's


#: Stands for a run: writes metrics of 10 steps a second, or on SIGTERM a checkpoint, and goes on from it.
FAKE_RUN = """
import json, pathlib, signal, sys, time
words = sys.argv[1:]
value = lambda flag: words[words.index(flag) + 1]
folder, save = pathlib.Path(value("--output-dir")), pathlib.Path(value("--save"))
stops = []
signal.signal(signal.SIGTERM, lambda *_: stops.append(1))
first = int((save / "at").read_text()) if (save / "at").exists() else 0
save.mkdir(exist_ok=True)
with (folder / "metrics.jsonl").open("a") as out:
    for i in range(first + 1, 21):
        time.sleep(0.1)
        out.write(json.dumps(dict(kind="train", iteration=i, loss=3.0, step_seconds=0.1, skipped_steps=0,
                                  tokens_per_second_per_gpu=10.0, peak_memory_gib=1.0)) + "\\n")
        (save / "at").write_text(str(i))
        (save / "latest_checkpointed_iteration.txt").write_text(str(i))
        if stops:
            sys.exit(0)
    loss = 2.0 + 0.1 * int(value("--seed")) + 0.02 * ("O3" in str(folder))
    out.write(json.dumps(dict(kind="eval", split="valid", iteration=20, loss=loss)) + "\\n")
"""


#: The same in no time.
QUICK_RUN = FAKE_RUN.replace("time.sleep(0.1)", "")


@pytest.fixture
def fake_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "fake.py"
    program.write_text(FAKE_RUN)
    popen = parity_runs.subprocess.Popen

    def start(command: list[str], **settings):  # type: ignore[no-untyped-def]
        if command[1:3] != ["-m", "fp8_megatron.commands.pretrain_gpt"]:
            return popen(command, **settings)
        return popen([sys.executable, "-S", str(program), *command[3:]], **settings)

    monkeypatch.setattr(parity_runs.subprocess, "Popen", start)
    monkeypatch.setattr(parity, "SAVE_SECONDS", 20.0)
    monkeypatch.setattr(parity, "_slots", lambda num_gpus, ranks_per_run: ["0", "1"])


def test_calls_go_on_with_what_is_missing(
    tmp_path: Path, fake_runs: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first call ends after a second, when both of its runs have a checkpoint of about 8 of 20 steps."""
    words = ["--output-dir", str(tmp_path / "out"), "--levels", "bf16", "O3", "--seeds", "1", "2"]
    checkpoints = tmp_path / "out" / "runs" / "O3_seed_1" / "checkpoints"
    session_start = Session._start

    def limited(self: Session, key: tuple[str, int], slot: str):  # type: ignore[no-untyped-def]
        self.deadline = min(self.deadline, time.monotonic() + 1.0)  # whatever the start took
        return session_start(self, key, slot)

    with monkeypatch.context() as first_call:
        first_call.setattr(Session, "_start", limited)
        assert parity.main([*words, "--", *TRAINING]) == 0
    printed = capsys.readouterr().out
    assert printed.count("not finished; the same command goes on") == 2 and "0 of 4 runs are finished" in printed
    assert checkpoints.exists()
    assert parity.main([*words, "--", *TRAINING]) == 0
    printed = capsys.readouterr().out
    assert "O3, seed 1: goes on" in printed and "O3, seed 2: starts" in printed
    assert not checkpoints.exists()
    report = json.loads((tmp_path / "out" / RESULTS_FILE).read_text())
    assert [(run["level"], run["seed"]) for run in report["runs"]] == [("bf16", 1), ("bf16", 2), ("O3", 1), ("O3", 2)]
    assert [len(run["training"]) for run in report["runs"]] == [20] * 4
    gap = report["comparison"]["levels"][1]
    assert gap["gap"] == pytest.approx((0.02 / 2.1 + 0.02 / 2.2) / 2) and gap["seeds"] == [1, 2]
    assert (tmp_path / "out" / "parity.png").exists() and (tmp_path / "out" / "parity.md").exists()
    # A third call has nothing to do, and parity.json alone is enough for it.
    started = time.monotonic()
    for path in (tmp_path / "out" / "runs").rglob("*"):
        if path.is_file():
            path.unlink()
    assert parity.main([*words, "--", *TRAINING]) == 0
    assert "starts" not in capsys.readouterr().out and time.monotonic() - started < 20


def test_two_calls_do_not_share_a_folder(tmp_path: Path, fake_runs: None, capsys: pytest.CaptureFixture[str]) -> None:
    """Their runs would go on with each other's checkpoints, and parity.json would keep those of one call."""
    words = ["--output-dir", str(tmp_path / "out"), "--levels", "bf16", "O3", "--seeds", "1"]
    with parity._locked(tmp_path / "out"):
        assert parity.main([*words, "--", *TRAINING]) == 2
    error = capsys.readouterr().err
    assert "out is in use by process " in error and "wait for its end, or give another folder" in error
    assert not (tmp_path / "out" / "runs").exists()
    assert parity.main([*words, "--", *TRAINING]) == 0


#: Stands for a run whose command was killed: it saves what it has, and lets its checkpoints go.
SAVING_RUN = """
import sys, time
from pathlib import Path
from fp8_megatron.checkpoint.run_identity import RunIdentity
from fp8_megatron.checkpoint.run_lock import RunLock
save = Path(sys.argv[1])
lock = RunLock(save, RunIdentity.drawn())
assert lock.attempt() is None
print("saves", flush=True)
time.sleep(float(sys.argv[2]))
for name in ("at", "latest_checkpointed_iteration.txt"):
    (save / name).write_text("5")
lock.release()
"""


@contextmanager
def run_of_a_killed_call(folder: Path, seconds: float) -> Iterator[subprocess.Popen[str]]:
    """A run of level bf16 and seed 1 after 5 steps, which needs so long to save for the first time."""
    session = _session(folder)
    write_results(session.plan, session.config, {})
    save = session.plan.folder(("bf16", 1)) / "checkpoints"
    save.mkdir(parents=True)
    figures = {"skipped_steps": 0, "tokens_per_second_per_gpu": 10.0, "peak_memory_gib": 1.0, "step_seconds": 0.1}
    steps = [{"kind": "train", "iteration": i, "loss": 3.0, **figures} for i in range(1, 6)]
    (save.parent / METRICS_FILE).write_text("".join(map(json_line, steps)))
    command = [sys.executable, "-c", SAVING_RUN, str(save), str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        try:
            assert run.stdout is not None and run.stdout.readline() == "saves\n"
            yield run
        finally:
            run.kill()


def test_a_run_of_a_killed_call_saves_before_it_goes_on(
    tmp_path: Path, fake_runs: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its losses so far are in one file with the later ones."""
    words = ["--output-dir", str(tmp_path / "out"), "--levels", "bf16", "O3", "--seeds", "1"]
    with run_of_a_killed_call(tmp_path / "out", 4.0) as run:
        assert parity.main([*words, "--", *TRAINING]) == 0
    printed = capsys.readouterr().out
    assert f"waits for process {run.pid}, which an earlier call started, to save and end" in printed
    assert "bf16, seed 1: goes on" in printed and "O3, seed 1: starts" in printed
    report = json.loads((tmp_path / "out" / RESULTS_FILE).read_text())
    assert [len(run["training"]) for run in report["runs"]] == [20, 20]


def test_a_run_of_an_earlier_call_that_does_not_end(
    tmp_path: Path, fake_runs: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parity, "_WAIT_SECONDS", 1.0)
    words = ["--output-dir", str(tmp_path / "out"), "--levels", "bf16", "O3", "--seeds", "1"]
    with run_of_a_killed_call(tmp_path / "out", 100.0) as run:
        assert parity.main([*words, "--", *TRAINING]) == 2
        assert run.poll() is None
    printed = capsys.readouterr()
    assert f"bf16_seed_1/checkpoints is in use by process {run.pid} on " in printed.err
    assert "which an earlier call started; wait for its end, or end it" in printed.err
    assert "starts" not in printed.out and "goes on" not in printed.out


def test_a_run_that_goes_on_does_not_begin_from_scratch(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    started = parse_config(plan.run_flags(("O3", 1), tmp_path / "run")).checkpoint
    assert started.loads_what_it_saves and not started.exit_on_missing_checkpoint
    saved = tmp_path / "run" / "checkpoints"
    saved.mkdir(parents=True)
    (saved / "latest_checkpointed_iteration.txt").write_text("5")
    going_on = parse_config(plan.run_flags(("O3", 1), tmp_path / "run")).checkpoint
    assert str(going_on.load) == str(saved) and going_on.exit_on_missing_checkpoint


def test_the_settings_are_there_before_the_first_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a kill, unfinished runs do not go on with other settings."""

    def killed(self: Session) -> None:
        saved = self.plan.folder(("bf16", 1)) / "checkpoints"
        saved.mkdir(parents=True)
        (saved / "latest_checkpointed_iteration.txt").write_text("5")
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, "run", killed)
    words = ["--output-dir", str(tmp_path / "out"), "--levels", "bf16", "O3", "--seeds", "1"]
    assert parity.main([*words, "--", *TRAINING]) == 130
    other = plan_of(tmp_path / "out", training=[*TRAINING, "--lr", "1e-5"])
    with pytest.raises(UserError, match=r"has runs with lr\(0.0003\), this command has lr\(1e-05\)"):
        read_results(other, parity.check_levels(other))


def test_a_failed_run_is_told(tmp_path: Path, fake_runs: None, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fake.py").write_text("import sys; print('error: no such thing'); sys.exit(2)")
    words = ["--output-dir", str(tmp_path / "out"), "--levels", "bf16", "O3", "--seeds", "1"]
    assert parity.main([*words, "--", *TRAINING]) == 1
    error = capsys.readouterr().err
    assert "bf16, seed 1 ended with status 2: error: no such thing" in error and "O3, seed 1" in error


def test_a_failed_run_is_told_with_its_own_error(
    tmp_path: Path, fake_runs: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not with the launcher's last line, and not with a line of an earlier call."""
    words = ["--output-dir", str(tmp_path / "out"), "--levels", "bf16", "O3", "--seeds", "1"]
    last = "rank 1 ended with exit status 2, and the job with it"
    for said, told in (
        (["note: x", "error on rank 1: no such thing", "  at all", last], "error on rank 1: no such thing"),
        (["internal error: KeyError: 'a'", last], "internal error: KeyError: 'a'"),
        (["Segmentation fault"], "Segmentation fault"),
        ([], "its log says nothing"),
    ):
        (tmp_path / "fake.py").write_text(f"import sys; print({chr(10).join(said)!r}); sys.exit(2)")
        assert parity.main([*words, "--", *TRAINING]) == 1
        assert f"error: bf16, seed 1 ended with status 2: {told}\n" in capsys.readouterr().err


def test_a_run_that_is_killed_before_it_has_saved_is_told(
    tmp_path: Path, fake_runs: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each call may begin with it anew."""
    (tmp_path / "fake.py").write_text(
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "pathlib.Path(sys.argv[sys.argv.index('--output-dir') + 1], 'ignores').touch()\n"
        "time.sleep(60)"
    )
    monkeypatch.setattr(parity_runs, "SAVE_SECONDS", 1.0)
    ask = Session._ask_to_end

    def ask_later(self: Session, running: dict[str, Any]) -> None:
        while len(list((tmp_path / "out").glob("runs/*/ignores"))) < 2:
            time.sleep(0.1)
        ask(self, running)

    monkeypatch.setattr(Session, "_ask_to_end", ask_later)
    monkeypatch.setattr(parity, "SAVE_SECONDS", 40.0)
    words = ["--output-dir", str(tmp_path / "out"), "--levels", "bf16", "O3", "--seeds", "1", "--time-limit", "41"]
    assert parity.main([*words, "--", *TRAINING]) == 0
    said = "bf16, seed 1: not finished; it had not ended 1 s after SIGTERM and was killed; the same command goes on"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_the_exit_status_of_what_it_left_unfinished(
    number: signal.Signals, tmp_path: Path, fake_runs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    session_start = Session._start

    def interrupted(self: Session, key: tuple[str, int], slot: str):  # type: ignore[no-untyped-def]
        signal.raise_signal(number)
        return session_start(self, key, slot)

    words = ["--output-dir", str(tmp_path / "out"), "--levels", "bf16", "O3", "--seeds", "1"]
    with monkeypatch.context() as first_call:
        first_call.setattr(Session, "_start", interrupted)
        assert parity.main([*words, "--", *TRAINING]) == 128 + number
    assert parity.main([*words, "--", *TRAINING]) == 0


def test_runs_are_no_ranks_of_the_launch_that_parity_is_in(
    tmp_path: Path, fake_runs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container of a job of several nodes. A run would wait for the other ranks."""
    launch = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    launch |= {"TORCHELASTIC_RUN_ID": "x", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    for name, value in launch.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "fake.py").write_text(f"import os\nassert not {set(launch)} & set(os.environ)\n{QUICK_RUN}")
    words = ["--output-dir", str(tmp_path / "out"), "--levels", "bf16", "O3", "--seeds", "1"]
    assert parity.main([*words, "--", *TRAINING]) == 0


def test_git_is_not_needed(tmp_path: Path, fake_runs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "fake.py").write_text(QUICK_RUN)
    words = ["--output-dir", str(tmp_path / "out"), "--levels", "bf16", "O3", "--seeds", "1"]
    assert parity.main([*words, "--", *TRAINING]) == 0
    assert json.loads((tmp_path / "out" / RESULTS_FILE).read_text())["commit"] is None


def test_the_commit_is_that_of_this_project(tmp_path: Path, fake_runs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of the folder that the command is called in."""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message", "x"], check=True)
    theirs = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fake.py").write_text(QUICK_RUN)
    words = ["--output-dir", str(tmp_path / "out"), "--levels", "bf16", "O3", "--seeds", "1"]
    assert parity.main([*words, "--", *TRAINING]) == 0
    assert json.loads((tmp_path / "out" / RESULTS_FILE).read_text())["commit"] != theirs


def test_a_file_of_a_level_that_has_changed_makes_another_level(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("{precision: fp8, weight_decay: 0.2}")
    given = plan_of(tmp_path / "out", "--levels", "bf16", "a", "--own-levels", f"a=--config {file}")
    config = parity.check_levels(given)
    given.output_dir.mkdir()
    plan, _ = read_results(given, config)
    write_results(plan, config, {("a", 1): _finished("a", 1)})
    assert set(read_results(given, config)[1]) == {("a", 1)}
    without = plan_of(tmp_path / "out", "--levels", "bf16", "O3")
    for changed in ("precision: fp8, weight_decay: 0.3", "precision: bf16, weight_decay: 0.2", "precision: fp8"):
        file.write_text(f"{{{changed}}}")
        with pytest.raises(UserError, match=r"has runs of level a with \w+\(.+\), its files say \w+\(.+\) now; put"):
            read_results(given, config)
        found, finished = read_results(without, config)  # a call with other levels in between forgets nothing
        write_results(found, config, finished)


@pytest.mark.parametrize("words", [[], ["--levels", "bf16", "a", "--own-levels", "a=--precision fp8 --config OWN"]])
def test_a_file_that_changes_while_runs_train(
    words: list[str], tmp_path: Path, fake_runs: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Later runs would read it."""
    file = tmp_path / "own.yaml"
    file.write_text("weight_decay: 0.2")
    (tmp_path / "fake.py").write_text(f"{QUICK_RUN}\npathlib.Path({str(file)!r}).write_text('weight_decay: 0.3')")
    levels = [word.replace("OWN", str(file)) for word in words] or ["--levels", "bf16", "O3"]
    training = TRAINING if words else [*TRAINING, "--config", str(file)]
    out = ["--output-dir", str(tmp_path / "out")]
    assert parity.main([*out, *levels, "--seeds", "1", "2", "--", *training]) == 2
    printed = capsys.readouterr()
    said = "a file of settings says weight_decay(0.3) now, and said weight_decay(0.2) when this command began; put it"
    assert said in printed.err and f"{'a' if words else 'bf16'}, seed 2: starts" not in printed.out


@pytest.mark.parametrize("flags", [{"bf16": 5}, {"bf16": ["--precision", 1]}, 5])
def test_flags_of_a_level_that_are_none(flags: object, tmp_path: Path) -> None:
    session = _session(tmp_path, finished=[_finished("bf16", 1)])
    write_results(session.plan, session.config, session.finished)
    path = tmp_path / RESULTS_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"flags": flags}))
    with pytest.raises(UserError, match="is no result of this command"):
        read_results(session.plan, session.config)


def test_a_run_that_diverged_is_finished(
    tmp_path: Path, fake_runs: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are compared, and each call of the command names it."""
    fake = tmp_path / "fake.py"
    fake.write_text(
        FAKE_RUN.replace("loss = 2.0 +", "loss = None if '2' == value('--seed') and 'O3' in str(folder) else 2.0 +")
    )
    words = ["--output-dir", str(tmp_path / "out"), "--levels", "bf16", "O3", "--seeds", "1", "2"]
    for call in range(2):
        assert parity.main([*words, "--", *TRAINING]) == 1
        printed = capsys.readouterr()
        assert "error: diverged, with a loss at the end that is not finite: O3, seed 2\n" in printed.err
        assert ("O3, seed 2: starts" in printed.out) == (call == 0)
        assert "the same command goes on" not in printed.out
    report = json.loads((tmp_path / "out" / RESULTS_FILE).read_text())
    assert [run["final_loss"] for run in report["runs"]] == [2.1, 2.2, pytest.approx(2.12), None]
    assert len(report["runs"][3]["training"]) == 20
    level = report["comparison"]["levels"][1]
    assert (level["seeds"], level["diverged"]) == ([1], [2]) and level["gap"] == pytest.approx(0.02 / 2.1)
    assert not (tmp_path / "out" / "runs" / "O3_seed_2" / "checkpoints").exists()


def test_a_run_that_training_ends_for_its_losses_is_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--max-skipped-steps ends it early; it would end so again."""
    words = ["--output-dir", str(tmp_path), "--seeds", "1", "--levels", "bf16", "hot"]
    words += ["--own-levels", "hot=--precision bf16 --lr 1e30"]
    assert parity.main([*words, "--", *TRAINING, "--max-skipped-steps", "3"]) == 1
    assert "not finite: hot, seed 1\n" in capsys.readouterr().err
    good, hot = json.loads((tmp_path / RESULTS_FILE).read_text())["runs"]
    assert good["final_loss"] is not None and hot["final_loss"] is None
    assert hot["training"] and hot["training"][-1][0] < 10
    assert parity.main([*words, "--", *TRAINING, "--max-skipped-steps", "3"]) == 1
    printed = capsys.readouterr()
    assert "starts" not in printed.out and "not finite: hot, seed 1\n" in printed.err


@pytest.mark.parametrize("tracker", [None, "5"])
def test_a_run_that_fails_at_each_call_is_told_each_time(
    tracker: str | None, tmp_path: Path, fake_runs: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has a folder for checkpoints by then, with a checkpoint or without."""
    (tmp_path / "fake.py").write_text("import sys; print('error: no such thing'); sys.exit(2)")
    words = ["--output-dir", str(tmp_path / "out"), "--levels", "bf16", "O3", "--seeds", "1"]
    assert parity.main([*words, "--", *TRAINING]) == 1
    for level in ("bf16", "O3"):
        saved = tmp_path / "out" / "runs" / f"{level}_seed_1" / "checkpoints"
        saved.mkdir()
        if tracker is not None:
            (saved / "latest_checkpointed_iteration.txt").write_text(tracker)
    capsys.readouterr()
    assert parity.main([*words, "--", *TRAINING]) == 1
    printed = capsys.readouterr()
    assert "bf16, seed 1 ended with status 2: error: no such thing" in printed.err
    assert ("bf16, seed 1: starts" in printed.out) == (tracker is None)


def test_losses_of_an_earlier_comparison_are_no_result(
    tmp_path: Path, fake_runs: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its parity.json is removed, and the new runs fail before their first step."""
    words = ["--output-dir", str(tmp_path / "out"), "--levels", "bf16", "O3", "--seeds", "1"]
    assert parity.main([*words, "--", *TRAINING]) == 0
    (tmp_path / "out" / RESULTS_FILE).unlink()
    (tmp_path / "fake.py").write_text("import sys; print('error: no such thing'); sys.exit(2)")
    assert parity.main([*words, "--", *TRAINING, "--lr", "1e-5"]) == 1
    assert json.loads((tmp_path / "out" / RESULTS_FILE).read_text())["runs"] == []
    older = tmp_path / "out" / "runs" / "O3_seed_1" / "metrics.1.jsonl"
    assert len(read_records(older)) == 21  # nothing is lost


def test_unfinished_runs_without_their_settings_do_not_go_on(tmp_path: Path) -> None:
    saved = tmp_path / "runs" / "bf16_seed_1" / "checkpoints"
    saved.mkdir(parents=True)
    (saved / "latest_checkpointed_iteration.txt").write_text("5")
    plan = plan_of(tmp_path)
    with pytest.raises(UserError, match=r"is of an unfinished run, and .*parity.json with its settings is gone"):
        read_results(plan, parity.check_levels(plan))


def test_runs_beside_an_error_save(tmp_path: Path, fake_runs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result of the first run that ends cannot be written, and the other one needs minutes."""
    slow = FAKE_RUN.replace("sys.exit(0)", '(folder / "saved").touch(); sys.exit(0)').replace(
        "time.sleep(0.1)", 'time.sleep(0.1 if "bf16" in str(folder) else 0.5)'
    )
    (tmp_path / "fake.py").write_text(slow)

    def full(*_: object) -> None:
        raise UserError("--output-dir: no space left on device")

    monkeypatch.setattr(parity_runs, "write_results", full)
    words = ["--output-dir", str(tmp_path / "out"), "--levels", "bf16", "O3", "--seeds", "1"]
    assert parity.main([*words, "--", *TRAINING]) == 2
    assert (tmp_path / "out" / "runs" / "O3_seed_1" / "saved").exists()


def test_a_result_that_cannot_be_written_is_not_lost(
    tmp_path: Path, fake_runs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's checkpoint stays, so that the next call reads the result without training."""
    words = ["--output-dir", str(tmp_path / "out"), "--levels", "bf16", "O3", "--seeds", "1"]

    def full(*_: object) -> None:
        raise UserError("--output-dir: no space left on device")

    with monkeypatch.context() as first_call:
        first_call.setattr(parity_runs, "write_results", full)
        assert parity.main([*words, "--", *TRAINING]) == 2
    runs = tmp_path / "out" / "runs"
    ended = [f for f in runs.iterdir() if any(r["kind"] == "eval" for r in read_records(f / METRICS_FILE))]
    assert ended and all((folder / "checkpoints" / "at").read_text() == "20" for folder in ended)
