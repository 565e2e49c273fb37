"""A rank of a chaos run (`chaos.py`): pretrain_gpt.py with a door for faults that no signal makes.

The driver leaves orders as files in the folder $CHAOS_ORDERS: ``limit`` holds an iteration to wait in front of,
``rank0`` and so on a fault of that rank's next step (``nan``: NaN in a weight for good; ``flip``: one bit of a weight).
While ``slow`` exists, each sync of a file takes a second. A rank that finishes training writes the SHA-256 of its
weights, masters and moments to ``final_rank0.json``.
"""

# ruff: noqa: E402  # cuDNN comes before the other imports
from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from fp8_megatron.device.cudnn import load_bundled

load_bundled()  # before megatron-core, which imports Transformer Engine

from fp8_megatron.commands import pretrain_gpt
from fp8_megatron.commands.program import exit_status
from fp8_megatron.training import run_start, training_run
from fp8_megatron.training.build import TrainingState

ORDERS = Path(os.environ["CHAOS_ORDERS"])
RANK = os.environ["RANK"]

_step, _sync, _train = training_run.train_step, os.fsync, training_run.TrainingRun.train


def train_step(state: TrainingState, *args: Any, **kwargs: Any) -> torch.Tensor:
    """One step, after what the driver ordered."""
    batch_size = state.config.global_batch_size(state.topology.world_size)
    while state.schedule.counted_samples // batch_size + 1 >= _limit():
        time.sleep(0.02)
    order = ORDERS / f"rank{RANK}"
    if order.exists():
        fault = order.read_text()
        order.unlink()
        _spoil(state, fault)
    return _step(state, *args, **kwargs)


def _limit() -> float:
    try:
        return float((ORDERS / "limit").read_text())
    except (OSError, ValueError):  # none, or it is being written
        return math.inf


def _spoil(state: TrainingState, fault: str) -> None:
    for space in state.optimizer.states:
        if space.gather is not None:
            space.gather.wait()
    weight = next(s.weight.payload for s in state.optimizer.states if s.weight.payload.dtype == torch.bfloat16)
    if fault == "nan":
        weight.fill_(math.nan)
    else:
        weight.view(torch.uint8)[7] ^= 4


def _slow_sync(descriptor: int) -> None:
    if (ORDERS / "slow").exists():
        time.sleep(1.0)
    _sync(descriptor)


def _train_and_tell(run: Any) -> None:
    _train(run)
    if run.progress.iteration < run.total_iterations:
        return
    hashes = {}
    for index, space in enumerate(run.state.optimizer.states):
        if space.gather is not None:
            space.gather.wait()
        for kind, stored in {"weight": space.weight, "master": space.master, **space.states}.items():
            for name, tensor in (("payload", stored.payload), ("scales", stored.scales)):
                if tensor is not None:
                    bits = tensor.contiguous().view(torch.uint8).numpy().tobytes()
                    hashes[f"{index} {kind} {name}"] = hashlib.sha256(bits).hexdigest()
    final = ORDERS / f"final_rank{RANK}.json"
    final.with_suffix(".tmp").write_text(json.dumps(hashes))
    os.replace(final.with_suffix(".tmp"), final)


def main() -> int:
    """Train; the exit status."""
    training_run.train_step = train_step
    training_run.TrainingRun.train = _train_and_tell  # type: ignore[method-assign]
    os.fsync = _slow_sync
    if "CHAOS_WAIT_SECONDS" in os.environ:  # a second run: that it gives up sooner changes nothing else
        run_start._WAIT_SECONDS = float(os.environ["CHAOS_WAIT_SECONDS"])
    return exit_status(pretrain_gpt.main)


if __name__ == "__main__":
    sys.exit(main())
