"""Public GPT scripts of MS-AMP-Examples and Megatron-LM run unchanged, and mean what they mean there."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fp8_megatron.config.checks import check_config
from fp8_megatron.config.io import parse_command_line
from tests.harness.megatron_scripts import SCRIPTS, Script

ROOT = Path(__file__).parents[2]
SCHEDULE_NOTE = "step_batch_size_schedule sets the global batch; global_batch_size(1536) is not read"

#: precision, recipe, amax history; samples or steps; micro-batch, largest batch; lr, min lr, weight decay, β₂, dropout.
BF16, FP16 = ("bf16", "delayed", 16), ("fp16", "delayed", 16)
TE, FP8 = ("te", "delayed", 1), ("fp8", "delayed", 1)
SMALL = (500_000, 8, 64, 1.5e-4, 1e-5, 0.01, 0.999, 0.1)
LARGE_6B7 = (48_828_125, 1, 2048, 3e-4, 3e-5, 0.1, 0.95, 0.0)
LARGE_13B = (146_484_375, 1, 1280, 2e-4, 2e-5, 0.1, 0.95, 0.0)
GPT_175B = (500_000, 1, 1536, 6e-5, 6e-6, 0.1, 0.95, 0.1)
LLAMA_8B = (1_953_125_000, 1, 128, 1.5e-4, 1e-5, 0.1, 0.95, 0.0)
EXPECTED = [
    *((precision, SMALL) for precision in (BF16, TE, FP8)),
    *((precision, LARGE_6B7) for precision in (BF16, TE, FP8)),
    *((precision, LARGE_13B) for precision in (BF16, TE, FP8)),
    (FP16, GPT_175B),
    (FP16, GPT_175B),
    (("fp8", "delayed", 1024), LLAMA_8B),
]


@pytest.mark.parametrize(("script", "expected"), list(zip(SCRIPTS, EXPECTED, strict=True)), ids=lambda x: str(x)[:60])
def test_a_script_means_what_it_means_there(script: Script, expected: tuple[tuple, tuple]) -> None:
    line = parse_command_line(script.words)
    line.check_stated()
    config = line.config
    check_config(config, script.world_size, on_this_machine=False)
    precision, training, optimizer = config.precision, config.training, config.optimizer
    assert (precision.precision, precision.fp8_recipe, precision.fp8_amax_history_len) == expected[0]
    assert expected[1] == (
        config.train_counts,
        training.micro_batch_size,
        config.global_batch_size(script.world_size),
        optimizer.lr,
        optimizer.min_lr,
        optimizer.weight_decay,
        optimizer.adam_beta2,
        config.model.hidden_dropout,
    )
    assert optimizer.lr_decay_style == "cosine" and optimizer.decoupled_weight_decay and optimizer.adam_beta1 == 0.9
    assert config.parallel.sequence_parallel == ("13b" in script.name)
    assert (SCHEDULE_NOTE in line.notes) == ("--step-batch-size-schedule" in script.words)
    assert config.data.split in ("949,50,1", "99,1,0")


def test_the_schedules_of_175b_grow_from_16() -> None:
    for script in SCRIPTS[9:11]:
        schedule = parse_command_line(script.words).config.batch_schedule(script.world_size)
        assert (schedule.batch_size(0), schedule.largest) == (16, 1536) and not schedule.is_constant


#: A stand-in for torchrun: it passes the words on, with the ranks that they ask for.
TORCHRUN = """#!{python}
import subprocess, sys
words, ranks = sys.argv[1:], 1
while words[0].startswith("--"):
    flag, value = words.pop(0), words.pop(0)
    ranks *= int(value) if flag in ("--nproc_per_node", "--nnodes") else 1
sizes = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size")
need = [int(words[words.index(size) + 1]) for size in sizes if size in words]
fewest = need[0] * need[1] if len(need) == 2 else sum(need) or 1
command = [sys.executable, {program!r}, *words[1:], "--dry-run", "--world-size", str(max(ranks, fewest))]
sys.exit(subprocess.call(command))
"""
#: A script in Megatron's style: words in arrays, some of them quoted within.
SHELL = """#!/bin/bash
GPUS=4
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS
    --nnodes 2
)
MODEL_ARGS=(
    --num-layers 4
    --hidden-size 256
    --num-attention-heads 4
    --seq-length 128 --max-position-embeddings 128
)
DATA_ARGS=(
    "--mock-data"
    "--split '99,1,0'"
    "--vocab-size 512"
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${MODEL_ARGS[@]} ${DATA_ARGS[@]} --bf16 --fp8-format hybrid \\
    --micro-batch-size 2 --train-samples 1000 --lr 1e-3 --lr-warmup-samples 10 --use-distributed-optimizer \\
    --step-batch-size-schedule "0:16 1M:32" --global-batch-size 32 "$@"
"""


def run_script(path: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    torchrun = folder / "bin" / "torchrun"
    torchrun.parent.mkdir(exist_ok=True)
    torchrun.write_text(TORCHRUN.format(python=sys.executable, program=str(ROOT / "pretrain_gpt.py")))
    torchrun.chmod(0o755)
    environment = {**os.environ, "PATH": f"{torchrun.parent}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        ["bash", str(path), *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_a_shell_script_runs_unchanged(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(SHELL)
    done = run_script(script, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "ranks: 8 = tensor 1 × pipeline 1 × data 8" in done.stdout and "  * fp8_amax_history_len = 1" in done.stdout
    assert "split = 99,1,0" in done.stdout
    assert "no effect here: --use-distributed-optimizer --split" in done.stderr
    assert "global_batch_size(32) is not read" in done.stderr
    done = run_script(script, tmp_path, "--mtp-num-layers", "1")
    assert done.returncode == 2 and done.stderr.startswith("error: --mtp-num-layers 1 is not supported")


@pytest.mark.parametrize("mode", ["bf16", "msamp"])
def test_the_345m_script_trains(mode: str, tmp_path: Path) -> None:
    """Its words, and then flags that shrink the model and take random tokens, on one CPU rank."""
    (script,) = (script for script in SCRIPTS if script.name.endswith(f"345m_megatron.sh {mode}"))
    shrunk = (
        "--mock-data --data-path none --vocab-file none --merge-file none --vocab-size 512 --num-layers 2 "
        "--hidden-size 64 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 "
        "--global-batch-size 4 --train-iters 4 --lr-decay-iters 4 --eval-interval 2 --eval-iters 1 --num-workers 0 "
        f"--no-tensorboard --save {tmp_path}/c --load {tmp_path}/c"
    )
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *script.words, *shrunk.split()]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in (tmp_path / "c" / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in steps if "grad_norm" in record]
    assert len(losses) == 4 and all(abs(loss - math.log(512)) < 0.5 for loss in losses)
    assert (tmp_path / "c" / "latest_checkpointed_iteration.txt").read_text().strip() == "4"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["bf16", "te", "msamp"])
@pytest.mark.parametrize("name", ["345m", "6b7", "13b"])
def test_the_scripts_of_ms_amp_examples(name: str, mode: str, tmp_path: Path) -> None:
    """Set MS_AMP_EXAMPLES to a clone of Azure/MS-AMP-Examples."""
    if "MS_AMP_EXAMPLES" not in os.environ:
        pytest.skip("MS_AMP_EXAMPLES names no clone of Azure/MS-AMP-Examples")
    script = Path(os.environ["MS_AMP_EXAMPLES"]) / "gpt3" / f"pretrain_{name}_megatron.sh"
    done = run_script(script, tmp_path, mode)
    assert done.returncode == 0 and "ranks: 8 =" in done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "words", "ranks"),
    [
        ("examples/gpt3/train_gpt3_175b_distributed.sh", ("c", "t", "v.json", "m.txt", "d"), 128),
        ("examples/llama/train_llama3_8b_h100_fp8.sh", (), 8),
    ],
)
def test_the_scripts_of_megatron(script: str, words: tuple[str, ...], ranks: int, tmp_path: Path) -> None:
    """Set MEGATRON_LM to a clone of NVIDIA/Megatron-LM."""
    if "MEGATRON_LM" not in os.environ:
        pytest.skip("MEGATRON_LM names no clone of NVIDIA/Megatron-LM")
    (tmp_path / "pretrain_gpt.py").touch()
    done = run_script(Path(os.environ["MEGATRON_LM"]) / script, tmp_path, *words)
    assert done.returncode == 0 and f"ranks: {ranks} =" in done.stdout, done.stderr
