"""Comparisons of precision levels for tests: their flags, and the plan of one."""

from __future__ import annotations

from pathlib import Path

from fp8_megatron.commands import parity
from fp8_megatron.commands.parity_plan import RunPlan

MODEL = "--vocab-size 64 --num-layers 1 --hidden-size 64 --num-attention-heads 2 --seq-length 32".split()
STEPS = "--micro-batch-size 2 --train-iters 20 --eval-interval 10 --eval-iters 2 --lr 3e-4".split()
TRAINING = ["--mock-data", *MODEL, *STEPS]


def plan_of(folder: Path, *words: str, training: list[str] = TRAINING) -> RunPlan:
    """The plan of a command line of `parity`: its own flags, and those of its runs."""
    return parity._parse(["--output-dir", str(folder), *words, "--", *training], "parity.py")
