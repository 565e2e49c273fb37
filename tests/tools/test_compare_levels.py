"""compare_levels: what is written where a level fails or has no finite loss."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fp8_megatron.commands import compare_levels
from fp8_megatron.reporting.metrics_file import json_line


def write_run(folder: Path, train_loss: float, valid_loss: float) -> None:
    folder.mkdir(exist_ok=True)
    figures = {"tokens_per_second_per_gpu": 1.0, "tflops_per_gpu": 1.0, "step_seconds": 1.0, "peak_memory_gib": 1.0}
    steps = [
        {"kind": "train", "iteration": i, "loss": train_loss, "consumed_tokens": i, "skipped_steps": 0, **figures}
        for i in (1, 2)
    ]
    valid = {"kind": "eval", "split": "valid", "iteration": 2, "loss": valid_loss}
    (folder / "metrics.jsonl").write_text("".join(map(json_line, [*steps, valid])))


#: A warm-up by fraction, as in configs/.
TRAINING = ["--config", str(Path(__file__).parents[2] / "configs" / "gpt_345m.yaml"), "--mock-data"]


def compare(
    monkeypatch: pytest.MonkeyPatch, folder: Path, losses: dict[str, tuple[float, float] | None]
) -> tuple[int, dict[str, Any]]:
    """Exit status and results; a level without losses fails."""
    run = subprocess.run

    def train(command: list[str], **options: Any) -> Any:
        if "fp8_megatron.commands.pretrain_gpt" not in command:
            return run(command, **options)
        output = Path(command[command.index("--output-dir") + 1])
        found = losses[output.name]
        if found is not None:
            write_run(output, *found)
        return subprocess.CompletedProcess(command, 0 if found else 3)

    monkeypatch.setattr(compare_levels.subprocess, "run", train)
    own = ["--output-dir", str(folder), "--levels", *losses]
    monkeypatch.setattr(sys, "argv", ["compare_levels.py", *own, "--", *TRAINING])
    status = compare_levels.main()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    report = folder / "comparison.json"
    return status, json.loads(report.read_text(), parse_constant=refuse)["results"] if report.exists() else {}


def test_levels_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, results = compare(monkeypatch, tmp_path, {"bf16": (2.0, 2.0), "O3": (2.5, 3.0)})
    assert status == 0 and [result["loss_gap"] for result in results.values()] == [0.0, 0.5]
    assert results["O3"]["final_train_loss"] == 2.5 and (tmp_path / "comparison.png").exists()


@pytest.mark.parametrize("without", ["bf16", "O3"])
def test_a_validation_loss_that_is_not_finite(
    without: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    levels = {"bf16": (2.0, 2.0), "O3": (2.5, 3.0), "O1": (2.0, 2.5)}
    levels[without] = (2.0, float("nan"))
    status, results = compare(monkeypatch, tmp_path, dict(levels))
    assert status == 1 and results[without]["final_loss"] is None and results[without]["loss_gap"] is None
    assert results["O1"]["loss_gap"] == (None if without == "bf16" else 0.25)
    printed = capsys.readouterr()
    assert f"{without} ends without a finite loss" in printed.err and "NaN" in printed.out


def test_train_losses_that_are_not_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, results = compare(monkeypatch, tmp_path, {"bf16": (2.0, 2.0), "O3": (float("nan"), float("nan"))})
    assert status == 1 and results["O3"]["final_train_loss"] is None
    assert "comparison.png: " in capsys.readouterr().err and not (tmp_path / "comparison.png").exists()


@pytest.mark.parametrize("failed", ["bf16", "O1", "O3"])
def test_a_level_that_fails_leaves_the_others(failed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, results = compare(monkeypatch, tmp_path, {n: None if n == failed else (2.0, 2.0) for n in _LEVELS})
    assert status == 1 and list(results) == [level for level in _LEVELS if level != failed]
    assert (tmp_path / "comparison.png").exists()


_LEVELS = ("bf16", "O1", "O3")


def test_an_older_comparison_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(monkeypatch, tmp_path, {"bf16": (2.0, 2.0), "O3": (2.5, 3.0)})
    assert compare(monkeypatch, tmp_path, {"bf16": None, "O3": None}) == (1, {})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "error: no flags of the run; put them behind --, e.g. -- --config FILE --data-path PREFIX"),
        (
            ["--", *TRAINING, "--num-attention-heads", "5"],
            "error: level bf16: hidden_size(1024) % num_attention_heads(5)",
        ),
        (["--", *TRAINING, "--load", "x", "--skip-train"], "error: level bf16: skip_train: the runs of a comparison"),
        (["--", *TRAINING, "--dry-run"], "error: level bf16: dry_run: the runs of a comparison train; leave it out"),
        (
            ["--", *TRAINING, "--save", "runs/x"],
            "error: level bf16: --save runs/x has no effect: this command gives the run --save none; leave it out",
        ),
        (
            ["--", *TRAINING, "--precision=fp8"],
            "error: level bf16: --precision fp8 has no effect: this command gives the run --precision bf16",
        ),
        (
            ["--speed-levels", "O3-delayed", "--", *TRAINING, "--exit-interval", "20"],
            "error: level O3-delayed: --exit-interval 20 has no effect: this command gives the run --exit-interval 60",
        ),
        (["--", *TRAINING, "--output-dir", "x"], "error: level bf16: --output-dir x has no effect: this command gives"),
        (["--", "--num-layrs", "3"], "error: level bf16: unknown flag --num-layrs; did you mean --num-layers?"),
        (
            ["--speed-levels", "O3", "--", *TRAINING, "--global-batch-size", "33"],
            "error: level bf16: global_batch_size(33)",
        ),
    ],
)
def test_a_mistake_is_told_before_the_first_level_runs(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(compare_levels.subprocess, "run")
    try:
        status = compare_levels.main(["--levels", "bf16", "O1", "--output-dir", str(tmp_path / "out"), *words])
    except SystemExit as error:
        status = int(str(error.code))
    assert status == 2 and capsys.readouterr().err.startswith(said) and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("num_gpus", "num_ranks", "said"),
    [
        (2, 4, "--nproc-per-node 4, but this machine has 2 GPUs; give at most 2"),
        (0, 1024, "--nproc-per-node 1024 is more than this node's cores can run; give at most "),
    ],
)
def test_more_ranks_than_the_machine_runs(
    num_gpus: int,
    num_ranks: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_gpus)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.delattr(compare_levels.subprocess, "run")
    words = ["--output-dir", str(tmp_path / "out"), "--nproc-per-node", str(num_ranks)]
    assert compare_levels.main([*words, "--", *TRAINING, "--micro-batch-size", "1", "--global-batch-size", "1024"]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "flags",
    [
        "--lr-warmup-fraction 0.1",
        "--lr-decay-style WSD --lr-wsd-decay-iters 100",
        "--iterations-to-skip 900",
        "--eval-interval 500 --no-mock-data --data-path a --tokenizer-type NullTokenizer --full-validation",
    ],
)
def test_levels_that_are_timed_stop_early_in_the_schedule_of_a_whole_run(tmp_path: Path, flags: str) -> None:
    words = ["--levels", "bf16", "O1", "--speed-levels", "O3", "--output-dir", str(tmp_path), "--", *TRAINING]
    args = compare_levels._parse([*words, *flags.split()], "compare_levels.py")
    compare_levels.check_levels(args)
    assert compare_levels._flags(args, "O3", tmp_path)[-2:] == ["--exit-interval", "60"]
    assert "--exit-interval" not in compare_levels._flags(args, "O1", tmp_path)
