"""fp8-megatron parity: its runs over several calls, their results, and what it says of those that fail."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8_megatron.commands import parity, parity_runs
from fp8_megatron.commands.parity_runs import RESULTS_FILE, RunQueue
from fp8_megatron.commands.pretrain_gpt import main as pretrain
from fp8_megatron.config.io import parse_config
from fp8_megatron.reporting.metrics_file import METRICS_FILE, read_rows
from tests.harness.parity import TRAINING, plan_of

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


@pytest.mark.slow
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


def test_a_failed_run_is_told_with_its_own_error(
    tmp_path: Path, fake_runs: Callable[[str], int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Not with the launcher's last line, and not with a line of an earlier call."""
    last = "rank 1 ended with exit status 2, and the job with it"
    for said, told in (
        (["note: x", "error on rank 1: no such thing", "  at all", last], "error on rank 1: no such thing"),
        (["internal error: KeyError: 'a'", last], "internal error: KeyError: 'a'"),
        (["Segmentation fault"], "Segmentation fault"),
        ([], "it said nothing"),
    ):
        fake_runs(f"import sys; print({chr(10).join(said)!r}); sys.exit(2)")
        assert call(tmp_path) == 1
        assert f"error: bf16, seed 1 ended with status 2: {told}\n" in capsys.readouterr().err


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
