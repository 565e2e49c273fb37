"""Which of the collectives that have not ended a rank names."""

from __future__ import annotations

import time

import pytest
import torch

from fp8_megatron.collectives.transport import copy_engine
from fp8_megatron.collectives.transport.copy_engine import CopyWork
from fp8_megatron.watch import flight_recorder
from fp8_megatron.watch.flight_recorder import CallSite, describe_collective

SITE = CallSite("", "train_step (fp8_megatron/training/train_step.py:36)")


def _entry(age: float, state: str = "scheduled") -> dict:
    """As torch records one of NCCL, `age` seconds ago."""
    return {
        "process_group": ("0", "default_pg"),
        "profiling_name": "nccl:all_reduce",
        "collective_seq_id": 24,
        "is_p2p": False,
        "retired": state == "completed",
        "state": state,
        "time_created_ns": time.time_ns() - int(age * 1e9),
        "input_dtypes": ["Float"],
        "input_sizes": [[4]],
    }


@pytest.mark.parametrize("age", [1.0, 9.0], ids=["before", "after"])
def test_the_one_that_was_queued_first(monkeypatch: pytest.MonkeyPatch, age: float) -> None:
    """A recorded step and what NCCL is to do after it: both have not ended, and only one of them is stuck."""
    monkeypatch.setattr(flight_recorder, "_entries", lambda: [_entry(30.0, "completed"), _entry(age)])
    monkeypatch.setattr(flight_recorder, "_ranks_of_group", lambda name: [0, 1])
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: [0, 1])
    work = CopyWork("forward and backward", None, None, time.monotonic() - 5.0, by="a CUDA graph")  # type: ignore[arg-type]
    monkeypatch.setattr(copy_engine, "unfinished", lambda: work)
    told = describe_collective(SITE)
    of_nccl = "in all_reduce of default_pg (ranks 0, 1), number 24 on nccl, Float[4]"
    expected = "in forward and backward by a CUDA graph among ranks 0, 1" if age < 5.0 else of_nccl
    assert told == f"{expected}; Python is in {SITE.caller}"
