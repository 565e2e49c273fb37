"""benchmarks/compare.py: figures are read, written and drawn; a run or a peer that fails is named, the others stay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compare as compare_script

ROOT = Path(__file__).parents[2]
FIGURES = {
    "tok_s_gpu": 10.5,
    "step_ms": 5.0,
    "tflops_gpu": 2.0,
    "tflops_causal": 1.5,
    "mem_gb": 3.25,
    "losses": [3.0, 2.0],
}


def compare(monkeypatch: pytest.MonkeyPatch, folder: Path, script: Path, *flags: str) -> int:
    """Compare with one peer, a stand-in; the exit status."""
    command = ["--model", "345m", "--runs", "--peer", f"stub-bf16={sys.executable} {script}"]
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["compare.py", *command, "--output-dir", str(folder), *flags])
    return compare_script.main()


def test_a_peer_takes_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "peer.py"
    script.write_text(f"print('noise')\nprint('JSON ' + {json.dumps(json.dumps(FIGURES))})\n")
    assert compare(monkeypatch, tmp_path / "out", script) == 0
    (result,) = json.loads((tmp_path / "out" / "comparison.json").read_text())["results"]
    assert (result["name"], result["tokens_per_second_per_gpu"], result["peak_gb"]) == ("stub-bf16", 10.5, 3.25)
    assert (result["final_loss"], result["causal_tflops_per_gpu"]) == (2.0, 1.5)
    assert "stub-bf16" in (tmp_path / "out" / "comparison.md").read_text()
    assert (tmp_path / "out" / "comparison.png").stat().st_size > 1000


def test_speed_without_a_loss_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "peer.py"
    figures = {**FIGURES, "losses": [3.0, float("nan"), 2.0, float("nan")]}
    script.write_text(f"print('JSON ' + {json.dumps(json.dumps(figures))})\n")
    assert compare(monkeypatch, tmp_path / "out", script) == 1
    assert "stub-bf16 has no finite loss in steps [2, 4]" in capsys.readouterr().err
    (result,) = json.loads((tmp_path / "out" / "comparison.json").read_text())["results"]
    assert result["losses"] == [3.0, None, 2.0, None] and "NaN" in (tmp_path / "out" / "comparison.md").read_text()


def test_a_peer_that_takes_too_long_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "peer.py"
    script.write_text(
        f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(100)\n"
    )
    assert compare(monkeypatch, tmp_path / "out", script, "--timeout", "2") == 1
    assert "stub-bf16 took longer than 2 s" in capsys.readouterr().err
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.parametrize("peer", ["a command", "=command", "name=", "a/b=command", "name=an 'open quote"])
def test_a_bad_peer_is_refused_before_anything_runs(
    peer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        own_runs(monkeypatch, tmp_path / "out", ["O3"], "--peer", peer)
    assert f"argument --peer: {peer!r}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


#: Stands in for a run: it logs every step, or, as bf16, fails before it logs any.
_STAND_IN = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
if folder.name == "bf16":
    print("noise", "error on rank 1: 3 is not 4; give 4", "the launcher's trailer", sep="\\n")
    raise SystemExit(3)
folder.mkdir(exist_ok=True)
(folder / "config.yaml").write_text(pathlib.Path("configs/gpt_345m.yaml").read_text())
record = {"kind": "train", "iteration": 1, "loss": 2.0}
record |= {"tokens_per_second_per_gpu": 10.0, "step_seconds": 0.5, "peak_memory_gib": 1.0}
if folder.name != "te-delayed":
    (folder / "metrics.jsonl").write_text((json.dumps(record) + "\\n") * 14)
"""


def own_runs(monkeypatch: pytest.MonkeyPatch, folder: Path, runs: list[str], *flags: str) -> int:
    def command(args: Any, name: str) -> list[str]:
        return [sys.executable, "-c", _STAND_IN, str(args.output_dir / name)]

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(compare_script, "_own_command", command)
    arguments = ["--model", "345m", "--output-dir", str(folder), "--profiled-steps", "0", *flags, "--runs", *runs]
    monkeypatch.setattr(sys, "argv", ["compare.py", *arguments])
    return compare_script.main()


def names(folder: Path) -> list[str]:
    return [result["name"] for result in json.loads((folder / "comparison.json").read_text())["results"]]


def test_a_run_that_fails_before_it_logs_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert own_runs(monkeypatch, tmp_path, ["bf16", "O3", "te-delayed"]) == 1
    assert names(tmp_path) == ["O3"]
    errors = capsys.readouterr().err
    told = f"error: bf16 ended with status 3: error on rank 1: 3 is not 4; give 4; its log is {tmp_path / 'bf16.log'}"
    assert errors.splitlines()[0] == told
    assert "te-delayed: no figures of all its steps in" in errors


@pytest.mark.parametrize(
    ("flags", "passed"),
    [
        ([], ["--mock-data"]),
        (["--num-layers", "4"], ["--num-layers", "4", "--mock-data"]),
        (["--mock-data", "--num-layers", "4"], ["--mock-data", "--num-layers", "4"]),
        (["--data-path", "tokens"], ["--data-path", "tokens"]),
        (["--train-data-path", "tokens"], ["--train-data-path", "tokens"]),
    ],
)
def test_tokens_are_random_unless_flags_name_data(flags: list[str], passed: list[str], tmp_path: Path) -> None:
    words = ["--model", "345m", "--runs", "O3", "--output-dir", str(tmp_path / "out"), "--", *flags]
    assert compare_script.parse(words).passed == passed


def test_figures_of_an_older_run_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_runs(monkeypatch, tmp_path, ["O3"]) == 0
    (tmp_path / "O3").rename(tmp_path / "bf16")
    profile = tmp_path / "bf16" / "profile_rank0.json"
    profile.write_text("{}")
    assert own_runs(monkeypatch, tmp_path, ["bf16"]) == 1
    assert not list(tmp_path.glob("comparison.*")) and not profile.exists()
    assert (tmp_path / "bf16" / "config.yaml").exists()


@pytest.mark.slow
def test_this_project_and_its_peers_learn_alike(tmp_path: Path) -> None:
    """One command compares all that a CPU can run: BF16 of this project, of megatron-core and of PyTorch."""
    small = ["--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "2", "--seq-length", "32"]
    small += ["--vocab-size", "128", "--mock-data", "--num-workers", "0"]
    command = [sys.executable, "benchmarks/compare.py", "--model", "345m", "--micro-batch-size", "2"]
    command += ["--train-iters", "8", "--profiled-steps", "0", "--output-dir", str(tmp_path)]
    command += ["--runs", "bf16", "megatron-bf16", "torch-bf16", "--", *small]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "comparison.json").read_text())["results"]
    assert [result["name"] for result in results] == ["bf16", "megatron-bf16", "torch-bf16"]
    for result in results:
        # Roundings to BF16 differ, by 5 · 10⁻⁴ of a loss at most (tests/tools/test_peers.py); other tokens by 10⁻².
        assert result["losses"][0] == pytest.approx(results[0]["losses"][0], abs=5e-4)
        assert len(result["losses"]) == 8 and result["tokens_per_second_per_gpu"] > 0
