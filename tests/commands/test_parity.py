"""fp8-megatron parity: its runs over several calls, their results, and what it says of those that fail."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fp8_megatron.commands import parity, parity_runs
from fp8_megatron.commands.parity_plan import check_levels, find_starts
from fp8_megatron.commands.parity_runs import RESULTS_FILE, Results, RunQueue
from fp8_megatron.commands.pretrain_gpt import main as pretrain
from fp8_megatron.config.io import parse_config
from fp8_megatron.errors import UserError
from fp8_megatron.reporting.metrics_file import METRICS_FILE, json_line, read_rows
from fp8_megatron.reporting.parity import RunResult
from tests.harness.parity import MODEL, TRAINING, plan_of

TRACKER = "latest_checkpointed_iteration.txt"

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


#: Ends with an error at once.
FAILING_RUN = "import sys; print('error: no such thing'); sys.exit(2)"


@pytest.fixture
def fake_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], int]:
    """Lets ``fake.py`` stand for runs.

    Returns:
        What writes another one.
    """
    program = tmp_path / "fake.py"
    program.write_text(FAKE_RUN)
    popen = parity_runs.subprocess.Popen

    def start(command: list[str], **settings):  # type: ignore[no-untyped-def]
        if command[1:3] != ["-m", "fp8_megatron.commands.pretrain_gpt"]:
            return popen(command, **settings)
        return popen([sys.executable, "-S", str(program), *command[3:]], **settings)

    monkeypatch.setattr(parity_runs.subprocess, "Popen", start)
    monkeypatch.setattr(parity, "SAVE_SECONDS", 20.0)
    monkeypatch.setattr(parity, "slots", lambda num_gpus, ranks_per_run: ["0", "1"])
    return program.write_text


def call(folder: Path, *words: str, training: list[str] = TRAINING) -> int:
    """The exit status of a comparison of bf16 and O3 with seed 1, or as `words` say. Its results are in ``out``."""
    given = ["--levels", "bf16", "O3", *words] if "--levels" not in words else [*words]
    given = given if "--seeds" in words else [*given, "--seeds", "1"]
    return parity.main(["--output-dir", str(folder / "out"), *given, "--", *training])


def report_of(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "out" / RESULTS_FILE).read_text())
    return report


def unfinished_run(folder: Path) -> None:
    """As a run of level bf16 and seed 1 that a kill left after 5 steps."""
    saved = folder / "out" / "runs" / "bf16_seed_1" / "checkpoints"
    saved.mkdir(parents=True, exist_ok=True)
    (saved / TRACKER).write_text("5")


def test_files_that_are_missing_are_told_before_the_first_run(
    tmp_path: Path, fake_runs: object, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ["--no-mock-data", "--data-path", str(tmp_path / "text"), "--tokenizer-type", "NullTokenizer"]
    assert call(tmp_path, training=[*TRAINING, *data]) == 2
    assert str(tmp_path / "text") in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "more", "said"),
    [
        ([], ["--lr", "1e-5"], " with lr(0.0003), flags and files now say lr(1e-05); give the same again"),
        (
            ["--ranks-per-run", "2"],
            ["--global-batch-size", "4"],
            " with ranks_per_run(1), flags and files now say ",
        ),
        (["--finetune-from", "base"], [], " with finetune_from(None), flags and files now say finetune_from(base)"),
        (["a=--precision fp8"], [], " of level a with lr(0.0001), flags and files now say lr(0.0003)"),
    ],
)
def test_results_of_other_settings_are_refused(
    words: list[str],
    more: list[str],
    said: str,
    tmp_path: Path,
    fake_runs: Callable[[str], int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake_runs(QUICK_RUN)
    levels, own = ["--levels", "bf16", "a", "--own-levels"], "a=--precision fp8 --lr 1e-4"
    assert call(tmp_path, *levels, own) == 0
    assert call(tmp_path) == 0  # a call with other levels in between forgets nothing
    given = words if words[:1] == ["a=--precision fp8"] else [own, *words]
    assert call(tmp_path, *levels, *given, training=[*TRAINING, *more]) == 2
    assert f"out has runs{said}" in capsys.readouterr().err
    (tmp_path / "out" / RESULTS_FILE).write_text('{"runs": [{"level": 1}]}')
    assert call(tmp_path) == 2 and "is no result of this command" in capsys.readouterr().err


def test_settings_of_calls_that_trained_nothing_do_not_bind(
    tmp_path: Path, fake_runs: Callable[[str], int], capsys: pytest.CaptureFixture[str]
) -> None:
    """After a first call with a wrong flag, the corrected one needs no other folder."""
    fake_runs(FAILING_RUN)
    assert call(tmp_path) == 1 and call(tmp_path, training=[*TRAINING, "--lr", "1e-5"]) == 1
    unfinished_run(tmp_path)
    assert call(tmp_path) == 2
    assert "runs with lr(1e-05), flags and files now say lr(0.0003)" in capsys.readouterr().err
    (tmp_path / "out" / RESULTS_FILE).unlink()
    assert call(tmp_path) == 2 and "checkpoints is of an unfinished run; give another" in capsys.readouterr().err


def test_runs_start_from_one_checkpoint_and_go_on_from_their_own(tmp_path: Path) -> None:
    """A run that was killed before it saved starts again, and one that saved does not begin from scratch."""
    scratch = plan_of(
        tmp_path / "out", "--own-levels", "head=--precision fp8 --fp8-lm-head", "--levels", "bf16", "head"
    )
    tuned = plan_of(tmp_path / "out", "--finetune-from", str(tmp_path / "base"))
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    config = parse_config(scratch.run_flags(("head", 1), folder))
    assert config.precision.fp8_lm_head and config.training.seed == 1
    assert config.checkpoint.loads_what_it_saves and not config.checkpoint.exit_on_missing_checkpoint
    start = parse_config(tuned.run_flags(("O3", 1), folder)).checkpoint
    assert start.finetune and str(start.load) == str(tmp_path / "base")
    (folder / "checkpoints" / TRACKER).write_text("5")
    for plan, level in ((scratch, "head"), (tuned, "O3")):
        going_on = parse_config(plan.run_flags((level, 1), folder)).checkpoint
        assert going_on.exit_on_missing_checkpoint and not going_on.finetune
        assert str(going_on.load) == str(folder / "checkpoints")


def test_every_level_continues_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its weights, state, schedule and data: the run's own precision goes on bit for bit, and O3 stays near it."""
    base = ["--output-dir", str(tmp_path / "base"), "--save", str(tmp_path / "base_7"), "--save-interval", "10"]
    assert pretrain([*TRAINING, "--precision", "bf16", "--seed", "7", "--no-tensorboard", *base]) == 0
    checkpoint = tmp_path / "base_{seed}" / "iter_0000010"
    assert call(tmp_path, "--seeds", "7", "--continue-from", str(checkpoint)) == 0
    report = report_of(tmp_path)
    assert report["settings"][""]["continue_from"] == str(checkpoint)
    assert report["starts"] == {str(checkpoint).replace("{seed}", "7"): 10}
    bf16, fp8 = report["runs"]
    records = read_rows(tmp_path / "base" / METRICS_FILE)
    losses = {r["iteration"]: r["loss"] for r in records if r["kind"] == "train"}
    assert [tuple(point) for point in bf16["training"]] == [(i, losses[i]) for i in range(11, 21)]
    assert [point[0] for point in fp8["validation"]] == [20] and fp8["steps_before"] == 10
    gaps = [ours[1] / other[1] - 1 for ours, other in zip(fp8["training"], bf16["training"], strict=True)]
    assert 0 < max(map(abs, gaps)) < 0.003
    assert report["comparison"]["levels"][1]["seconds_to_loss"] <= 10.001 * fp8["step_seconds"]


def test_checkpoints_that_cannot_be_continued(tmp_path: Path) -> None:
    plan = plan_of(tmp_path / "out", "--continue-from", str(tmp_path / "base_{seed}"))
    config = check_levels(plan)
    with pytest.raises(UserError, match="base_1: no checkpoint there; give the folder that a run's --save named"):
        find_starts(plan, config, {})
    for number, iteration in ((1, 10), (2, 20), (3, 10)):
        folder = tmp_path / f"base_{number}" / f"iter_{iteration:07d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
        (folder / "config.yaml").write_text(f"training: {{seed: {number}}}\n")
    with pytest.raises(UserError, match="base_2: iteration 20 is the end of these runs; name one before"):
        find_starts(plan, config, {})
    other = plan_of(tmp_path / "out", "--continue-from", str(tmp_path / "base_1"), "--seeds", "4")
    with pytest.raises(
        UserError, match="base_1: that run has seed 1, and the order of data depends on it; give --seeds 1"
    ):
        find_starts(other, config, {})
    other = plan_of(tmp_path / "out", "--finetune-from", str(tmp_path / "base_4"))
    with pytest.raises(UserError, match=r"--finetune-from .*base_4: no checkpoint there; give the folder"):
        find_starts(other, config, {})
    find_starts(plan, config, {(level, 2) for level in plan.levels})  # what is finished needs none
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
    for iteration in (10, 15):
        folder = tmp_path / "base" / f"iter_{iteration:07d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
        (folder / "config.yaml").write_text("training: {seed: 1}\n")
        plan = plan_of(tmp_path / "out", *words)
        config = check_levels(plan)
        results = Results.read(plan, config)
        find_starts(plan, config, results.finished)
        curve = [(20, 2.0)]
        results.finished["bf16", 1] = RunResult("bf16", 1, 20, 2.0, 2.1, 0.5, 64.0, 1.0, 0, curve, curve)
        results.write()
        started = parse_config(plan.run_flags(("O3", 1), tmp_path / "run")).checkpoint
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
    find_starts(plan, check_levels(plan), {})
    assert plan.steps_before(1) == 10 and plan.last_steps == {1: 15}
    short = plan_of(tmp_path, *words, training=[*training, "20"])
    with pytest.raises(UserError, match="iteration 10 is the end of these runs"):
        find_starts(short, check_levels(short), {})


def test_runs_of_several_ranks_share_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert parity_runs.slots(None, 1) == ["4", "5", "6", "7"]
    assert parity_runs.slots(None, 2) == ["4,5", "6,7"]
    assert parity_runs.slots(None, 3) == ["4,5,6"]
    assert parity_runs.slots(2, 2) == ["4,5"]
    with pytest.raises(UserError, match="--gpus 3 is no multiple of --ranks-per-run 2"):
        parity_runs.slots(3, 2)
    with pytest.raises(UserError, match="--ranks-per-run 8, but this machine has 4 GPUs; give at most 4"):
        parity_runs.slots(None, 8)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert parity_runs.slots(None, 2) == [""]
    with pytest.raises(UserError, match="--ranks-per-run 100000 is more than this node's cores can run; give at most"):
        parity_runs.slots(None, 100_000)


@pytest.mark.slow
def test_runs_of_two_ranks_train(tmp_path: Path) -> None:
    training = [*TRAINING, "--global-batch-size", "8", "--train-iters", "10"]
    assert call(tmp_path, "--ranks-per-run", "2", training=training) == 0
    report = report_of(tmp_path)
    assert report["settings"][""]["ranks_per_run"] == 2 and [run["num_steps"] for run in report["runs"]] == [10, 10]
    for level in ("bf16", "O3"):
        records = read_rows(tmp_path / "out" / "runs" / f"{level}_seed_1" / METRICS_FILE)
        tokens = [r["tokens_per_second_per_gpu"] * r["step_seconds"] for r in records if r["kind"] == "train"]
        assert tokens == pytest.approx([8 * 32 / 2] * 10)  # of a rank, half of a step's


def test_calls_go_on_with_what_is_missing(
    tmp_path: Path, fake_runs: Callable[[str], int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first call ends after a second, when both of its runs have a checkpoint of about 8 of 20 steps."""
    checkpoints = tmp_path / "out" / "runs" / "O3_seed_1" / "checkpoints"
    session_start = RunQueue._start

    def limited(self: RunQueue, key: tuple[str, int], slot: str):  # type: ignore[no-untyped-def]
        started = session_start(self, key, slot)
        step = tmp_path / "out" / "runs" / f"{key[0]}_seed_{key[1]}" / "checkpoints" / "at"
        while not step.exists():  # whatever the start takes
            time.sleep(0.01)
        self.deadline = min(self.deadline, time.monotonic() + 1.0)
        return started

    with monkeypatch.context() as first_call:
        first_call.setattr(RunQueue, "_start", limited)
        assert call(tmp_path, "--seeds", "1", "2") == 0
    printed = capsys.readouterr().out
    assert printed.count("not finished; the same command goes on") == 2 and "0 of 4 runs are finished" in printed
    assert checkpoints.exists()
    assert call(tmp_path, "--seeds", "1", "2") == 0
    printed = capsys.readouterr().out
    assert "O3, seed 1: goes on" in printed and "O3, seed 2: starts" in printed
    assert not checkpoints.exists()
    report = report_of(tmp_path)
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
    assert call(tmp_path, "--seeds", "1", "2") == 0
    assert "starts" not in capsys.readouterr().out and time.monotonic() - started < 20


def test_two_calls_do_not_share_a_folder(
    tmp_path: Path, fake_runs: Callable[[str], int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Their runs would go on with each other's checkpoints, and parity.json would keep those of one call."""
    fake_runs(QUICK_RUN)
    with parity._locked(tmp_path / "out"):
        assert call(tmp_path) == 2
    error = capsys.readouterr().err
    assert "out is in use by process " in error and "wait for its end, or end it" in error
    assert not (tmp_path / "out" / "runs").exists()
    assert call(tmp_path) == 0


#: Stands for a run whose command was killed: it saves what it has, and lets its checkpoints go.
SAVING_RUN = """
import sys, time
from pathlib import Path
from fp8_megatron.checkpoint.run_lock import RunIdentity
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
    plan = plan_of(folder, "--levels", "bf16", "O3", "--seeds", "1")
    results = Results.read(plan, check_levels(plan))
    results.write()
    save = plan.folder(("bf16", 1)) / "checkpoints"
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
    tmp_path: Path, fake_runs: Callable[[str], int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its losses so far are in one file with the later ones."""
    with run_of_a_killed_call(tmp_path / "out", 4.0) as run:
        assert call(tmp_path) == 0
    printed = capsys.readouterr().out
    assert f"waits for process {run.pid}, which an earlier call started, to save and end" in printed
    assert "bf16, seed 1: goes on" in printed and "O3, seed 1: starts" in printed
    report = report_of(tmp_path)
    assert [len(run["training"]) for run in report["runs"]] == [20, 20]


def test_a_failed_run_is_told_with_its_own_error(
    tmp_path: Path, fake_runs: Callable[[str], int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Not with the launcher's last line, and not with a line of an earlier call."""
    last = "rank 1 ended with exit status 2, and the job with it"
    for said, told in (
        (["note: x", "error on rank 1: no such thing", "  at all", last], "error on rank 1: no such thing"),
        (["internal error: KeyError: 'a'", last], "internal error: KeyError: 'a'"),
        (["Segmentation fault"], "Segmentation fault"),
        ([], "its log says nothing"),
    ):
        fake_runs(f"import sys; print({chr(10).join(said)!r}); sys.exit(2)")
        assert call(tmp_path) == 1
        assert f"error: bf16, seed 1 ended with status 2: {told}\n" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_the_exit_status_of_what_it_left_unfinished(
    number: signal.Signals, tmp_path: Path, fake_runs: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    session_start = RunQueue._start

    def interrupted(self: RunQueue, key: tuple[str, int], slot: str):  # type: ignore[no-untyped-def]
        signal.raise_signal(number)
        return session_start(self, key, slot)

    with monkeypatch.context() as first_call:
        first_call.setattr(RunQueue, "_start", interrupted)
        assert call(tmp_path) == 128 + number
    assert call(tmp_path) == 0


def test_a_run_that_diverged_is_finished(
    tmp_path: Path, fake_runs: Callable[[str], int], capsys: pytest.CaptureFixture[str]
) -> None:
    """The others are compared, and each call of the command names it."""
    fake_runs(
        FAKE_RUN.replace("loss = 2.0 +", "loss = None if '2' == value('--seed') and 'O3' in str(folder) else 2.0 +")
    )
    for number in range(2):
        assert call(tmp_path, "--seeds", "1", "2") == 1
        printed = capsys.readouterr()
        assert "error: diverged, with a loss at the end that is not finite: O3, seed 2\n" in printed.err
        assert ("O3, seed 2: starts" in printed.out) == (number == 0)
        assert "the same command goes on" not in printed.out
    report = report_of(tmp_path)
    assert [run["final_loss"] for run in report["runs"]] == [2.1, 2.2, pytest.approx(2.12), None]
    assert len(report["runs"][3]["training"]) == 20
    level = report["comparison"]["levels"][1]
    assert (level["seeds"], level["diverged"]) == ([1], [2]) and level["gap"] == pytest.approx(0.02 / 2.1)
    assert not (tmp_path / "out" / "runs" / "O3_seed_2" / "checkpoints").exists()


@pytest.mark.slow
def test_a_run_that_training_ends_for_its_losses_is_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--max-skipped-steps ends it early; it would end so again."""
    words = ["--levels", "bf16", "hot", "--own-levels", "hot=--precision bf16 --lr 1e30"]
    assert call(tmp_path, *words, training=[*TRAINING, "--max-skipped-steps", "3"]) == 1
    assert "not finite: hot, seed 1\n" in capsys.readouterr().err
    good, hot = report_of(tmp_path)["runs"]
    assert good["final_loss"] is not None and hot["final_loss"] is None
    assert hot["training"] and hot["training"][-1][0] < 10
    assert call(tmp_path, *words, training=[*TRAINING, "--max-skipped-steps", "3"]) == 1
    printed = capsys.readouterr()
    assert "starts" not in printed.out and "not finite: hot, seed 1\n" in printed.err
