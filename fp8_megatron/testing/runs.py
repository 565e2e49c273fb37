"""A tiny run for tests of the trainer, its checkpoints and its errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..formats import StorageDtype

#: Flags of a model that a CPU steps in a few hundredths of a second; random tokens.
TINY_RUN: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "seq_length": 16,
    "vocab_size": 64,
    "make_vocab_size_divisible_by": 16,
    "micro_batch_size": 2,
    "mock_data": True,
    "num_workers": 0,
    "eval_interval": 0,
    "lr": 1e-2,
    "log_interval": 1000,
    "tensorboard": False,
}


def tiny_flags(output_dir: Path, **overrides: Any) -> list[str]:
    """Command-line flags of the tiny run; an override of None leaves a flag out."""
    flags: list[str] = ["--output-dir", str(output_dir)]
    for name, value in {**TINY_RUN, **overrides}.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(flag if value else "--no-" + flag[2:])
        elif isinstance(value, StorageDtype):
            flags += [flag, value.value]
        elif isinstance(value, list | tuple):
            flags += [flag, *map(str, value)]
        elif value is not None:
            flags += [flag, str(value)]
    return flags
