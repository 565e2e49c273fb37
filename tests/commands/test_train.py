"""fp8-megatron train: the configuration is checked first; ranks start as asked; the exit status is the job's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fp8_megatron.commands import launch, pretrain_gpt, train
from fp8_megatron.commands.launch import NodeRanks
from tests.harness.runs import tiny_flags

ROOT = Path(__file__).parents[2]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The start that was requested: (placement, flags), or ("here", flags)."""
    starts: list[Any] = []

    def run_ranks(module: str, words: list[str], placement: NodeRanks, folder: Path | None) -> int:
        assert module == "fp8_megatron.commands.pretrain_gpt"
        starts.append((placement, words))
        return 0

    monkeypatch.setattr(train, "run_ranks", run_ranks)
    monkeypatch.setattr(train, "check_gpus", lambda placement: None)
    monkeypatch.setattr(train, "hide_gpus", lambda: starts.append("hidden"))
    monkeypatch.setattr(pretrain_gpt, "main", lambda words, prog: starts.append(("here", words)) or 0)
    return starts


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", [("here", [])]),
        ("--gpus 1", [("here", [])]),
        ("--gpus 0", ["hidden", ("here", [])]),
        ("--cpu-ranks 1", ["hidden", ("here", [])]),
        ("--gpus 4", [(NodeRanks(4), [])]),
        ("--cpu-ranks=2", [(NodeRanks(2, on_cpu=True), [])]),
        ("--cpu-ranks 2 --max-restarts 3", [(NodeRanks(2, on_cpu=True, max_restarts=3), [])]),
        ("--gpus 1 --restart", [(NodeRanks(1, max_restarts=10), [])]),
        (
            "--gpus 8 --nnodes 2 --node-rank 1 --master-addr node0 --master-port 1234",
            [(NodeRanks(8, num_nodes=2, node_rank=1, master_addr="node0", master_port=1234), [])],
        ),
        (
            "--gpus 1 --nnodes 2 --master-addr node0",
            [(NodeRanks(1, num_nodes=2, node_rank=0, master_addr="node0"), [])],
        ),
    ],
)
def test_own_flags_place_the_ranks_and_all_others_are_passed_on(
    words: str, expected: list[Any], started: list[Any], tmp_path: Path
) -> None:
    flags = [*tiny_flags(tmp_path), "--profile", "--profile-ranks", "0", "1", "--min-lr", "-0.0"]
    own = words.split()
    assert train.main([*own[:1], *own[1:2], *flags, *own[2:]] if own else flags) == 0
    assert started == [place if isinstance(place, str) else (place[0], flags) for place in expected]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--gpus 3 --tensor-model-parallel-size 2",
            "= 2 does not divide WORLD_SIZE(3); choose sizes",
        ),
        (
            "--cpu-ranks 1 --tensor-model-parallel-size 2",
            "WORLD_SIZE(1); start 2 ranks (--gpus 2, on a CPU --cpu-ranks 2), or choose sizes whose product does",
        ),
        (
            "--config gpt_345m",
            "gpt_345m: cannot read the configuration file: No such file or directory; did you mean configs",
        ),
        ("--gpus 4 --nnodes 2 --master-addr a --global-batch-size 4", "× data-parallel size(8)"),
        (
            "--config nowhere.yaml",
            "nowhere.yaml: cannot read the configuration file: No such file or directory; check --config",
        ),
        ("--nnodes 2", "--nnodes 2 needs --master-addr"),
        ("--nnodes 2 --master-addr a --node-rank 2", "--node-rank 2 is none of --nnodes 2"),
        ("--num-layrs 3", "unknown flag --num-layrs; did you mean --num-layers?"),
        ("--save=", "save('') is empty (an unset shell variable?); give --save another value"),
        ("--cpu-ranks 100000", "--cpu-ranks 100000 is more than this node's cores can run; give at most "),
        ("--node-rank 1", "--node-rank 1 is none of --nnodes 1"),
        ("--master-port 1234", "--master-port have no effect with one node"),
    ],
)
def test_a_mistake_is_one_line_and_starts_nothing(
    words: str, message: str, started: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main([*tiny_flags(tmp_path), *words.split()]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1 and message in printed.err
    assert printed.out == "" and started == []


@pytest.mark.parametrize(
    "words",
    ["--gpus 2 --cpu-ranks 2", "--gpus two", "--gpus \uff12", "--gpus -1", "--cpu-ranks 0", "--master-addr=", "--gpus"],
)
def test_a_bad_flag_exits_with_status_2(
    words: str, started: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        train.main([*tiny_flags(tmp_path), *words.split()])
    assert exit_info.value.code == 2 and started == []
    assert capsys.readouterr().err.count("\n") == 1


def test_a_flag_that_is_given_twice_is_noted_once(
    started: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main(["--gpus", "1", *tiny_flags(tmp_path), "--lr", "2", "--gpus=2", "--nnodes", "1"]) == 0
    assert capsys.readouterr().err == "note: --gpus is given 2 times; the last one counts: --gpus 2\n"
    assert started[0][0].ranks_per_node == 2


def test_help_shows_its_own_flags_before_the_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        train.main(["--help"])
    text = capsys.readouterr().out
    assert exit_info.value.code == 0
    assert 0 < text.index("--gpus N") < text.index("--cpu-ranks 2 --config") < text.index("--num-layers")


def test_more_gpus_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    launch.check_gpus(NodeRanks(2))
    launch.check_gpus(NodeRanks(4, on_cpu=True))
    with pytest.raises(ValueError, match="--gpus 4, but this node has 2; give --gpus 2"):
        launch.check_gpus(NodeRanks(4))


def test_torchs_launcher_is_told_of_every_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing by the environment, where torchrun would look for its flags too."""
    monkeypatch.setenv("PET_NNODES", "7")
    monkeypatch.setenv("PET_STANDALONE", "1")
    one = NodeRanks(3, max_restarts=2).launch_config()
    assert (one.min_nodes, one.max_nodes, one.nproc_per_node, one.max_restarts) == (1, 1, 3, 2)
    several = NodeRanks(3, num_nodes=2, node_rank=1, master_addr="node0", master_port=7)
    config = several.launch_config()
    assert (config.min_nodes, config.max_nodes, config.run_id) == (2, 2, "none") and several.world_size == 6
    place = {"node": 1, "world_size": 6, "address": "node0", "port": 7, "restarts": False}
    assert config.rdzv_configs.items() >= place.items()


def test_nodes_meet_under_the_name_of_the_slurm_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert launch.slurm_launch() == "42.2"
    several = NodeRanks(8, num_nodes=2, node_rank=1, master_addr="a", max_restarts=3, launch=launch.slurm_launch())
    assert several.launch_config().run_id == "42.2" and several.launch_config().rdzv_configs["restarts"]
    monkeypatch.delenv("SLURM_JOB_ID")
    assert launch.slurm_launch() is None


def fp8_megatron(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-m", "fp8_megatron.cli", *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=280)


@pytest.mark.slow
def test_two_cpu_ranks_train(tmp_path: Path) -> None:
    flags = tiny_flags(tmp_path, train_iters=2, tensor_model_parallel_size=2)
    result = fp8_megatron("train", "--cpu-ranks", "2", *flags)
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [1, 2]


def test_no_launcher_speaks() -> None:
    """The job's status is that of the rank that failed; stderr has what ranks print and one line."""
    call = "run_ranks('tests.harness.ending_rank', ['2', 'error: why'], NodeRanks(2, on_cpu=True))"
    code = f"import sys; from fp8_megatron.commands.launch import NodeRanks, run_ranks; sys.exit({call})"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "error: why\nrank 0 ended with exit status 2, and the job with it\n"


@pytest.mark.slow
def test_the_exit_status_is_the_ranks(tmp_path: Path) -> None:
    """What the ranks find, a damaged token file, is one line too, and the status of a user's error."""
    for suffix in (".bin", ".idx"):
        (tmp_path / f"bad{suffix}").write_bytes(b"x" * 50)
    flags = tiny_flags(tmp_path, mock_data=False, data_path=[tmp_path / "bad"], tokenizer_type="NullTokenizer")
    result = fp8_megatron("train", "--cpu-ranks", "2", *flags, "--split", "1,0,0")
    assert result.returncode == 2, result.stderr
    assert f"error: {tmp_path / 'bad.idx'} is not a Megatron index" in result.stderr
    assert "Traceback" not in result.stderr
    assert "exit status 2" in result.stderr.splitlines()[-1]
