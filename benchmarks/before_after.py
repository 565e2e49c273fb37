"""Compare training before and after a change. Two trees run the same flags: losses bit for bit, step times, memory.

    python benchmarks/before_after.py --base HEAD~1                      # tiny models on the CPU, two minutes
    python benchmarks/before_after.py --base v0.1 --cases gpu            # GPT-345M on one GPU, for the bits
    python benchmarks/before_after.py --base v0.1 --cases gpu-speed      # times: the trees in turn, twice

Bitwise cases run in deterministic mode. Speed cases do not, so their bits may differ. The changed tree is this checkout
with its uncommitted changes. The base is one of its commits, checked out into a temporary folder. The exit status is 1
if a bitwise case differs or a run fails.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Run as a script from a clone, installed or not.
sys.path.insert(0, str(Path(__file__).parents[1]))
from fp8_megatron.commands.arguments import Parser, output_file
from fp8_megatron.commands.program import exit_status, told_error
from fp8_megatron.outputs import write_output

ROOT = Path(__file__).parents[1]
#: Steps that a median leaves out.
_WARMUP_STEPS = 5

_TINY = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 128 --lr 1e-2 "
    "--make-vocab-size-divisible-by 32 --micro-batch-size 2 --train-iters 6 --num-workers 0 "
    "--attention-dropout 0 --hidden-dropout 0 --lr-decay-style cosine --weight-decay 0.1 --adam-beta2 0.95"
)
_LLAMA = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --group-query-attention "
    "--untie-embeddings-and-output-weights --disable-bias-linear"
)
_TINY_LLAMA = f"{_LLAMA} --ffn-hidden-size 256 --num-query-groups 2"
_FAST = "--fp8-recipe delayed --fp8-weight-grad-scaling delayed --fp8-lm-head"
_CURRENT = "--fp8-recipe tensorwise"
_FIVE_BYTES = "--main-params-dtype split --exp-avg-dtype int8 --exp-avg-sq-dtype uint8"
_345M = "--config configs/gpt_345m.yaml"
_EXACT = "--deterministic-mode --train-iters 8 --lr-warmup-iters 2"
_TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"


@dataclass(frozen=True)
class Case:
    """Flags of `pretrain_gpt.py`, on this many ranks; whether losses must agree bit for bit."""

    name: str
    num_ranks: int
    flags: str
    bitwise: bool = True


CASES = {
    "cpu": [
        Case("tensorwise", 1, f"{_TINY} --global-batch-size 4 {_CURRENT}"),
        Case("fast", 1, f"{_TINY} --global-batch-size 2 {_FAST}"),
        Case("five_byte", 1, f"{_TINY} --global-batch-size 2 {_FAST} {_FIVE_BYTES}"),
        Case("llama_o1", 1, f"{_TINY} --global-batch-size 2 {_TINY_LLAMA} --opt-level O1"),
        Case("llama_tp2_sp", 2, f"{_TINY} --global-batch-size 4 {_TINY_LLAMA} {_FAST} {_TP2}"),
        Case(
            "blockwise_tp2_sp",
            2,
            f"{_TINY} --global-batch-size 4 --fp8-recipe blockwise {_TP2} --hidden-size 256 --ffn-hidden-size 512 "
            "--seq-length 256 --micro-batch-size 1",
        ),
        Case("tp2", 2, f"{_TINY} --global-batch-size 2 --tensor-model-parallel-size 2"),
        Case("dp2_fast", 2, f"{_TINY} --global-batch-size 8 {_FAST}"),
        Case("pp2", 2, f"{_TINY} --global-batch-size 8 --pipeline-model-parallel-size 2"),
        Case("bf16_dp2", 2, f"{_TINY} --global-batch-size 4 --precision bf16"),
    ],
    "gpu": [
        Case("tensorwise", 1, f"{_345M} --micro-batch-size 8 --global-batch-size 16 {_CURRENT} {_EXACT}"),
        Case("fast", 1, f"{_345M} configs/fast.yaml --micro-batch-size 8 --global-batch-size 16 {_EXACT}"),
        Case(
            "five_byte",
            1,
            f"{_345M} configs/fast.yaml --micro-batch-size 8 --global-batch-size 8 {_FIVE_BYTES} {_EXACT}",
        ),
        Case(
            "llama",
            1,
            f"{_345M} {_LLAMA} --ffn-hidden-size 2816 --num-query-groups 4 --num-layers 8 --fp8-recipe delayed "
            f"--micro-batch-size 8 --global-batch-size 16 {_EXACT}",
        ),
    ],
    "2gpus": [
        Case("tp2_sp", 2, f"{_345M} configs/fast.yaml {_TP2} --micro-batch-size 8 --global-batch-size 16 {_EXACT}"),
        Case("dp2", 2, f"{_345M} configs/fast.yaml --micro-batch-size 8 --global-batch-size 32 {_EXACT}"),
    ],
    "gpu-speed": [
        Case(
            "345m_fast",
            1,
            f"{_345M} configs/fast.yaml --micro-batch-size 16 --global-batch-size 32 --train-iters 30",
            bitwise=False,
        ),
        # Steps of one small micro-batch, launched by Python, measure the host's time.
        Case(
            "host",
            1,
            f"{_345M} configs/fast.yaml --micro-batch-size 1 --global-batch-size 1 --seq-length 256 "
            "--cuda-graph-impl none --train-iters 50",
            bitwise=False,
        ),
    ],
    "2gpus-speed": [
        Case(
            "7b_fast",
            2,
            "--config configs/gpt_7b.yaml configs/fast.yaml --micro-batch-size 4 --global-batch-size 32 "
            "--train-iters 13",
            bitwise=False,
        ),
    ],
}


@dataclass(frozen=True)
class Compared:
    """One case in both trees: (loss, gradient norm) of the last step, median step time and peak memory."""

    name: str
    flags: str
    losses_alike: bool
    last_step: dict[str, tuple[float, float]]
    step_ms: dict[str, float]
    peak_gib: dict[str, float]


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """A temporary work tree of a commit."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "base"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(tree), commit], cwd=ROOT, check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)


def run_case(tree: Path, case: Case, output_dir: Path, *, on_cpu: bool) -> list[dict[str, Any]]:
    """Train `case` in `tree`; its steps as metrics.jsonl has them.

    Raises:
        RuntimeError: the run failed, with the line that says why.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.num_ranks)]
    command += ["pretrain_gpt.py", *case.flags.split(), "--mock-data", "--eval-interval", "0", "--no-tensorboard"]
    command += ["--output-dir", str(output_dir)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])}
    environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    if on_cpu:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode:
        told = told_error(done.stdout + done.stderr)
        raise RuntimeError(f"{case.name} in {tree} ended with status {done.returncode}: {told}")
    records = map(json.loads, (output_dir / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if record["kind"] == "train"]


def compare_case(case: Case, trees: dict[str, Path], folder: Path, *, on_cpu: bool) -> Compared:
    """Run `case` in every tree; speed cases twice, in turn, and the faster median counts."""
    steps: dict[str, list[dict[str, Any]]] = {}
    times: dict[str, list[float]] = {name: [] for name in trees}
    for turn in range(1 if case.bitwise else 2):
        for name, tree in trees.items():
            steps[name] = run_case(tree, case, folder / f"{case.name}.{name}.{turn}", on_cpu=on_cpu)
            seconds = [step["step_seconds"] for step in steps[name]]
            times[name].append(1e3 * statistics.median(seconds[_WARMUP_STEPS:] or seconds))
    bits = {name: [(step["loss"], step["grad_norm"]) for step in rows] for name, rows in steps.items()}
    return Compared(
        case.name,
        case.flags,
        losses_alike=bits["base"] == bits["change"],
        last_step={name: rows[-1] for name, rows in bits.items()},
        step_ms={name: min(medians) for name, medians in times.items()},
        peak_gib={name: max(step["peak_memory_gib"] for step in rows) for name, rows in steps.items()},
    )


def describe(row: Compared, *, bitwise: bool) -> str:
    """One line of the table."""
    base, change = row.step_ms["base"], row.step_ms["change"]
    bits = "alike " if row.losses_alike else "DIFFER" if bitwise else "-     "
    gib = " → ".join(f"{row.peak_gib[name]:.2f}" for name in ("base", "change"))
    return f"{row.name:14} bits {bits}  {base:9.2f} → {change:9.2f} ms ({change / base - 1:+.1%})  peak GiB {gib}"


def main() -> int:
    """Compare, print, write JSON; the exit status is 1 if a case failed."""
    parser = Parser(description=__doc__)
    parser.add_argument("--base", required=True, help="the commit before the change")
    parser.add_argument("--cases", choices=CASES, default="cpu", help="which runs (default: cpu)")
    parser.add_argument("--only", nargs="*", help="names of cases; default: all of them")
    parser.add_argument("--output", type=output_file, help="JSON to write")
    args = parser.parse_args()
    names = [case.name for case in CASES[args.cases]]
    if unknown := set(args.only or []) - set(names):
        parser.error(f"--only {' '.join(sorted(unknown))}: --cases {args.cases} has {', '.join(names)}")
    rows, failed = [], False
    with checkout(args.base) as base, tempfile.TemporaryDirectory() as folder:
        for case in CASES[args.cases]:
            if args.only and case.name not in args.only:
                continue
            try:
                row = compare_case(case, {"base": base, "change": ROOT}, Path(folder), on_cpu=args.cases == "cpu")
            except RuntimeError as error:
                print(error, file=sys.stderr)
                failed = True
                continue
            rows.append(row)
            failed |= case.bitwise and not row.losses_alike
            print(describe(row, bitwise=case.bitwise), flush=True)
    if args.output:
        write_output(args.output, (json.dumps([asdict(row) for row in rows], indent=1) + "\n").encode(), "--output")
    return int(failed)


if __name__ == "__main__":
    sys.exit(exit_status(main))
