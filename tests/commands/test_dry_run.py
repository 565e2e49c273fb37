"""--dry-run: checks and prints a run, and trains nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fp8_megatron.commands import pretrain_gpt, train

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"


@pytest.mark.parametrize(
    ("model", "world_size", "layout"),
    [
        ("gpt_7b", 8, "ranks: 8 = tensor 1 × pipeline 1 × data 8"),
        ("gpt_13b", 4, "ranks: 4 = tensor 2 × pipeline 1 × data 2"),
        ("gpt_175b", 1024, "ranks: 1024 = tensor 8 × pipeline 16 × data 8"),
    ],
)
def test_what_is_printed(model: str, world_size: int, layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", str(CONFIGS / f"{model}.yaml"), "--mock-data", "--dry-run", "--world-size", str(world_size)]
    assert pretrain_gpt.main(words) == 0
    out = capsys.readouterr().out
    assert layout in out and "  * mock_data = True  (default False)" in out
    assert "Predicted GB (10^9 bytes) of one rank, O3" in out
    assert "wire: in each step a rank sends its data-parallel peers" in out and "vocabulary: 50,304" in out


def test_an_evaluation_has_no_step(capsys: pytest.CaptureFixture[str]) -> None:
    """GPT-7B in FP8: a byte for each linear weight, two for its master."""
    words = f"--config {CONFIGS}/gpt_7b.yaml --mock-data --skip-train --load runs/x --dry-run --world-size 1"
    assert pretrain_gpt.main(words.split()) == 0
    out = capsys.readouterr().out
    assert "evaluation: micro-batches of 4 per rank, nothing is trained" in out
    # 20 bytes a token and channel of one layer (tests/training/test_rank_build.py builds it).
    assert f"GB of stage 0, with {20 * 4 * 2048 * 4096 / 1e9:.2f} GB of activations" in out
    assert not any(line.startswith(("step:", "wire:")) for line in out.splitlines())
    (row,) = (line.split("│")[1:-1] for line in out.splitlines() if line.startswith("│"))
    _, _, weights, gradients, masters, exp_avg, exp_avg_sq, scales, total = (float(c.replace(",", "")) for c in row)
    assert gradients == exp_avg == exp_avg_sq == 0
    assert total == pytest.approx(weights + masters + scales, abs=0.02) and 20 < total < 21


def test_ranks_that_share_sequences_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"--config {CONFIGS}/llama_8b.yaml --mock-data --context-parallel-size 4 --dry-run --world-size 8"
    assert pretrain_gpt.main(words.split()) == 0
    out = capsys.readouterr().out
    assert "ranks: 8 = tensor 1 × context 4 × pipeline 1 × data 2" in out
    assert "step: 64 sequences, 524,288 tokens, 32 micro-batches of 1 per rank" in out


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_a_peak_says_which_balance_of_experts_it_assumes(dispatcher: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"--expert-model-parallel-size 8 --moe-token-dispatcher-type {dispatcher} --dry-run --world-size 8"
    assert pretrain_gpt.main(f"--config {CONFIGS}/mixtral_8x7b.yaml --mock-data {flags}".split()) == 0
    assert ("as if every rank got equally many tokens" in capsys.readouterr().out) == (dispatcher == "alltoall")


@pytest.mark.parametrize(
    ("optimizer", "rates"),
    [
        ("adam", ("× 0.25", "× 0.25", "× 1", "× 1")),
        ("muon --muon-scale-mode unit_rms_norm", ("× 1", "× 0.25", "× 1", "× 1")),
        ("sgd --decoupled-lr 1e-3", ("× 1", "× 1", "of --decoupled-lr", "× 4")),
    ],
)
def test_mups_factors(optimizer: str, rates: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """The table of docs/optimizer.md at four times the width of the base, with heads of 64."""
    shape = "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --num-experts 4"
    run = "--seq-length 32 --micro-batch-size 2 --train-iters 2 --vocab-size 512 --eval-interval 0"
    words = f"--mock-data --dry-run {shape} {run} --lr 1e-3 --optimizer {optimizer}"
    assert pretrain_gpt.main(f"{words} --use-mup --mup-base-hidden-size 256 --mup-embedding-mult 8".split()) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("muP")]
    hidden, linear, router, embedding, vector = "initial standard deviation 0.01", *rates
    assert lines == [
        "muP: m = 4, hidden_size(1024) / 256",
        f"muP, linear layers: {hidden} (proj and fc2: / √16), learning rate {linear}",
        f"muP, router: {hidden}, learning rate {router}",
        f"muP, embeddings, output layer: initial standard deviation 0.02, learning rate {embedding}",
        f"muP, norms, biases: initial values as without it, learning rate {vector}",
        "muP, outputs: embedding × 8, scores of attention × 0.015625, logits × 0.25",
    ]
    assert pretrain_gpt.main(words.split()) == 0
    assert "muP" not in capsys.readouterr().out


def test_a_stage_each_and_their_sum(capsys: pytest.CaptureFixture[str]) -> None:
    """175 billion parameters over 128 ranks of 16 stages; the first and the last also hold an embedding."""
    words = ["--config", str(CONFIGS / "gpt_175b.yaml"), "--mock-data", "--dry-run", "--world-size", "128"]
    assert pretrain_gpt.main(words) == 0
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    params = [int(row[2].replace(",", "")) for row in rows]
    assert [int(row[1]) for row in rows] == list(range(16))
    assert params[0] > params[1] == params[14] < params[15] and 174e9 < 8 * sum(params) < 177e9


def test_stages_of_different_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    """A rank of GPT-7B's layer holds 12 · 4096² weights and 13 · 4096 biases and norms."""
    words = f"--config {CONFIGS}/gpt_7b.yaml --mock-data --dry-run --world-size 4 --pipeline-model-parallel-size 4"
    words += " --decoder-first-pipeline-num-layers 7 --decoder-last-pipeline-num-layers 5"
    assert pretrain_gpt.main(words.split()) == 0
    out = capsys.readouterr().out
    assert "stages: Et*7|t*10|t*10|t*5L" in out
    # 16 micro-batches of 4 · 2,048 tokens of 4,096 values, to two neighbours.
    assert f"stages: in each step a rank sends other stages up to {32 * 8192 * 4096 * 2 / 1e9:.2f} GB" in out
    params = [int(line.split("│")[2].replace(",", "")) for line in out.splitlines() if line.startswith("│")]
    layer, vocabulary = 12 * 4096**2 + 13 * 4096, 50304 * 4096
    assert params == [7 * layer + vocabulary + 2048 * 4096, 10 * layer, 10 * layer, 5 * layer + vocabulary + 2 * 4096]


@pytest.mark.parametrize("program", [pretrain_gpt, train])
def test_what_a_laptop_lacks_is_no_error(program: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No Transformer Engine, no data, no tokenizer, no GPUs; and nothing is written."""
    words = f"--config {CONFIGS}/gpt_345m.yaml --precision te --data-path {tmp_path}/a --tokenizer-model {tmp_path}/b"
    words += f" --save {tmp_path}/c --load {tmp_path}/c --output-dir {tmp_path}/d --micro-batch-size 8"
    words += " --dry-run --world-size 4"
    assert program.main(words.split()) == 0  # type: ignore[attr-defined]
    assert "ranks: 4 = tensor 1 × pipeline 1 × data 4" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--dry-run --world-size 0", "--world-size '0' is not a number of ranks; give 1 to 1000000"),
        ("--dry-run --world-size many", "--world-size 'many' is not a number of ranks"),
        ("--world-size 4", "--world-size is for --dry-run; the launcher says how many ranks there are"),
        ("--dry-run --world-size 3", "global_batch_size(32) is not a multiple of micro_batch_size(32)"),
        ("--dry-run --lr fast", "--lr 'fast' is not a number"),
        ("--dry-run --mtp-num-layers 1", "--mtp-num-layers 1 is not supported"),
    ],
)
def test_what_would_not_train_is_one_line(flags: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", str(CONFIGS / "gpt_345m.yaml"), "--mock-data", *flags.split()]
    assert pretrain_gpt.main(words) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.out == ""


def test_a_first_start_has_all_batches_of_the_ramp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--load may be the folder of --save. A run that resumes from it may be past the batches that ranks cannot share,
    one that takes weights alone is not."""
    saved = tmp_path / "saved"
    words = ["--config", str(CONFIGS / "gpt_345m.yaml"), "--mock-data", "--dry-run", "--world-size", "1"]
    words += ["--micro-batch-size", "2", "--global-batch-size", "6", "--rampup-batch-size", "3", "3", "6"]
    words += ["--save", str(saved), "--load", str(saved)]
    told = "global_batch_size(3), which the batch grows through, is not a multiple"
    assert pretrain_gpt.main(words) == 2
    error = capsys.readouterr().err
    assert told in error and f"no checkpoint is under load({saved}) here" in error
    assert not saved.exists()
    (saved / "iter_0000002").mkdir(parents=True)
    assert pretrain_gpt.main(words) == 0
    assert pretrain_gpt.main([*words, "--finetune"]) == 2
    assert told in capsys.readouterr().err


def test_a_dry_run_starts_no_process_group(tmp_path: Path) -> None:
    code = (
        "import sys, torch; from fp8_megatron.commands.pretrain_gpt import main; "
        f"assert main(['--config', {str(CONFIGS / 'gpt_7b.yaml')!r}, '--mock-data', '--dry-run']) == 0; "
        "assert not torch.distributed.is_initialized() and not torch.cuda.is_initialized(); "
        "assert 'megatron.core' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
